"""vLLM, stock and with ZenTorch: an instance of the plan becomes argv, environment, health check.

Pure. `choose` decides once for all instances (version row, ZenTorch, freezing) or refuses;
`launch` spells one instance. The environment is the same in all instances but for the memory node,
which vLLM's compile cache does not look at, so that they share one cache entry. vLLM-specific facts
are data in `vllm_versions` and `vllm_log`.
"""

from __future__ import annotations

import hashlib
import json

from zenlaunch.binding import numactl_argv
from zenlaunch.config import GIB, Config, Switch
from zenlaunch.cpuset import CpuSet
from zenlaunch.engines import vllm_log
from zenlaunch.engines.facts import EngineChoice, EngineFacts, VersionSource
from zenlaunch.engines.vllm_versions import DEFAULT, NEWEST, Row, Zen, parse_version, row_for
from zenlaunch.errors import ConfigError, PlanError
from zenlaunch.memory import ModelSizes
from zenlaunch.plan import PlannedInstance
from zenlaunch.spec import CompileCache, Evidence, Exercise, HealthCheck, LaunchSpec
from zenlaunch.topology import Note, Severity

# Inherited values of these change where threads or memory go, or break a start; an instance begins
# without them. (KMP_*, OMP_*: in the API server they pin every later thread to one CPU.)
UNSET = (
    "CPU_VISIBLE_MEMORY_NODES",
    "GOMP_CPU_AFFINITY",
    "GOMP_SPINCOUNT",
    "KMP_AFFINITY",
    "KMP_BLOCKTIME",
    "KMP_FORKJOIN_BARRIER_PATTERN",
    "KMP_HW_SUBSET",
    "KMP_PLAIN_BARRIER_PATTERN",
    "KMP_REDUCTION_BARRIER_PATTERN",
    "KMP_SETTINGS",
    "KMP_TPAUSE",
    "LD_PRELOAD",
    "OMP_NUM_THREADS",
    "OMP_PLACES",
    "OMP_PROC_BIND",
    "OMP_WAIT_POLICY",
    "PROMETHEUS_MULTIPROC_DIR",
    "TORCHINDUCTOR_AUTOGRAD_CACHE",
    "TORCHINDUCTOR_FREEZING",
    "VLLM_CPU_KVCACHE_SPACE",
    "VLLM_CPU_NUM_OF_RESERVED_CPU",
    "VLLM_CPU_OMP_THREADS_BIND",
    "VLLM_CPU_SIM_MULTI_NUMA",
    "VLLM_DP_MASTER_IP",
    "VLLM_DP_MASTER_PORT",
    "VLLM_DP_RANK",
    "VLLM_DP_RANK_LOCAL",
    "VLLM_DP_SIZE",
    "VLLM_PORT",
    "VLLM_USE_AOT_COMPILE",
)

# Variables and flags that the plan owns, and what sets them instead.
_OWNED_ENV = {
    "CPU_VISIBLE_MEMORY_NODES": "--nodes",
    "LD_PRELOAD": "the libraries that zenlaunch finds",
    "VLLM_CPU_KVCACHE_SPACE": "--kv-cache",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "--reserve-per-instance",
    "VLLM_CPU_OMP_THREADS_BIND": "the plan; see engine.explicit_cpu_list",
    "VLLM_CPU_SIM_MULTI_NUMA": "the plan",
    "VLLM_PORT": "--base-port",
}
_OWNED_FLAGS = {
    "--host": "instances listen on 127.0.0.1; the proxy's address is --listen",
    "--port": "--base-port",
    "--uds": "--base-port",
    "--model": "the MODEL argument",
    "--kv-cache-memory-bytes": "--kv-cache",
    "--shutdown-timeout": "engine.drain_s",
    "--api-key": "the environment variable VLLM_API_KEY (an argument can be read by every user)",
    "--numa-bind": "the plan",
    "--numa-bind-nodes": "the plan",
    "--numa-bind-cpus": "the plan",
}
_SPREADING_FLAGS = {
    "--tensor-parallel-size": "-tp",
    "--pipeline-parallel-size": "-pp",
    "--data-parallel-size": "-dp",
}


def choose(config: Config, facts: EngineFacts) -> EngineChoice:
    """Decide version, ZenTorch and freezing for all instances.

    Raises PlanError where what was asked for cannot work, ConfigError for arguments and variables
    that the plan owns.
    """
    _refuse_owned(config)
    version = facts.version or DEFAULT
    row = row_for(version)
    notes = list(_version_notes(version, row, facts))
    zentorch, zentorch_notes = _choose_zentorch(config.engine.zentorch, row, version, facts)
    freezing, freezing_notes = _choose_freezing(config, row, version)
    notes += zentorch_notes + freezing_notes + list(_library_notes(facts))
    with_zentorch = f" with zentorch {facts.zentorch_version or ''}".rstrip() if zentorch else ""
    return EngineChoice(
        label="vllm-zentorch" if zentorch else "vllm",
        title=f"vLLM {version} (CPU){with_zentorch}"
        + (f" in {facts.python}" if facts.python else ""),
        version=version,
        zentorch=zentorch,
        freezing=freezing,
        notes=tuple(notes),
    )


def launch(
    instance: PlannedInstance,
    config: Config,
    facts: EngineFacts,
    choice: EngineChoice,
    sizes: ModelSizes,
) -> LaunchSpec:
    """Return how one instance is started.

    Raises PlanError for a KV size that the version cannot take.
    """
    row = row_for(choice.version or DEFAULT)
    env = _environment(instance, config, facts, choice, row)
    argv = [*_program(config, facts), "--host", "127.0.0.1", "--port", str(instance.port)]
    kv = instance.memory.kv_bytes
    if kv is not None and row.kv_flag:
        # vLLM reads an upper-case G as GiB; fractions are given in bytes.
        argv += ["--kv-cache-memory-bytes", f"{kv // GIB}G" if kv % GIB == 0 else str(kv)]
    if row.shutdown_timeout:
        argv += ["--shutdown-timeout", str(int(config.engine.drain_s))]
    argv += config.engine.args
    return LaunchSpec(
        name=instance.name,
        argv=(*numactl_argv(instance.binding), *argv),
        env=env,
        unset=tuple(name for name in UNSET if name not in env),
        host="127.0.0.1",
        port=instance.port,
        cpus=instance.cpus,
        engine_cpus=instance.engine_cpus,
        mem_nodes=instance.mem_nodes,
        memory_bytes=instance.memory.total_bytes,
        health=HealthCheck(
            path="/health",
            start_timeout_s=config.engine.start_timeout_s,
            interval_s=10.0,
            metrics_path="/metrics",
            progress_metric="vllm:iteration_tokens_total_count",
            running_metric="vllm:num_requests_running",
            waiting_metric="vllm:num_requests_waiting",
            kv_metric="vllm:kv_cache_usage_perc",
            tokens_metric="vllm:generation_tokens_total",
        ),
        phases=vllm_log.PHASES,
        signatures=vllm_log.SIGNATURES,
        compile_cache=_compile_cache(config, facts, choice, row, sizes, env),
        evidence=_evidence(config, facts, choice, row),
        drain_s=config.engine.drain_s if row.shutdown_timeout else 0.0,
    )


def _refuse_owned(config: Config) -> None:
    engine = config.engine
    for name, instead in _OWNED_ENV.items():
        if name in engine.env:
            raise ConfigError(f"engine.env.{name} is set by zenlaunch", hint=f"use {instead}")
    for i, arg in enumerate(engine.args):
        flag, _, value = arg.partition("=")
        if flag in _OWNED_FLAGS:
            raise ConfigError(
                f"the engine argument {flag} is set by zenlaunch", hint=f"use {_OWNED_FLAGS[flag]}"
            )
        for long, short in _SPREADING_FLAGS.items():
            if flag in (long, short):
                value = value or (engine.args[i + 1] if i + 1 < len(engine.args) else "")
                if value != "1":
                    raise PlanError(
                        f"{flag} {value}: one instance of zenlaunch is one engine of one rank",
                        hint="use --instances-per-node for more engines",
                    )
    if engine.env.get("TORCHINDUCTOR_FREEZING") not in (None, "0"):
        raise ConfigError(
            "engine.env.TORCHINDUCTOR_FREEZING is set by zenlaunch",
            hint="say `freezing: on`, which also sets what this vLLM needs with it",
        )


def _program(config: Config, facts: EngineFacts) -> list[str]:
    model = config.model or "MODEL"
    if facts.python is not None and facts.command is None:
        return [facts.python, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    return [facts.command or "vllm", "serve", model]


def _environment(
    instance: PlannedInstance, config: Config, facts: EngineFacts, choice: EngineChoice, row: Row
) -> dict[str, str]:
    env: dict[str, str] = {}
    preload = [path for path in (facts.tcmalloc, facts.openmp) if path]
    if preload:
        env["LD_PRELOAD"] = ":".join(preload)
    own_node = instance.node is not None and instance.mem_nodes == CpuSet([instance.node])
    smt_pairs = len(instance.engine_cpus) and config.split.threads_per_core > 1
    if row.visible_nodes and instance.mem_nodes:
        env["CPU_VISIBLE_MEMORY_NODES"] = str(instance.mem_nodes)
    if config.engine.explicit_cpu_list or smt_pairs or (instance.mem_nodes and not own_node):
        # `auto` takes one CPU of each core, and only CPUs of the memory node: not what is planned.
        env["VLLM_CPU_OMP_THREADS_BIND"] = instance.engine_cpus.to_commas()
    else:
        env["VLLM_CPU_NUM_OF_RESERVED_CPU"] = str(len(instance.reserved_cpus))
    kv = instance.memory.kv_bytes
    if kv is not None and not row.kv_flag:
        if kv % GIB:
            raise PlanError(
                f"vLLM {choice.version} takes its KV cache in whole GiB (VLLM_CPU_KVCACHE_SPACE)",
                hint=f"--kv-cache {max(1, kv // GIB)}G",
            )
        env["VLLM_CPU_KVCACHE_SPACE"] = str(kv // GIB)
    # uvicorn closes idle connections after 5 s, too soon for a proxy that keeps them.
    env["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"] = "120"
    if choice.freezing:
        env["TORCHINDUCTOR_FREEZING"] = "1"
        if not row.freezing_alone:
            env["VLLM_USE_AOT_COMPILE"] = "0"
    if facts.zentorch_version and not choice.zentorch and facts.hide_zentorch:
        env["PYTHONPATH"] = facts.hide_zentorch
    return env | config.engine.env


def _evidence(config: Config, facts: EngineFacts, choice: EngineChoice, row: Row) -> Evidence:
    """Return what a ready instance must show: libraries really mapped, the cores it logged.

    The log line of the zen platform is not asked for: vLLM 0.32 prints it before its logging is set
    up, so that it is lost. The library tells.
    """
    libraries = [
        *(["libtcmalloc"] if facts.tcmalloc else []),
        *(["libiomp5"] if facts.openmp else []),
        *(["libzentorch"] if choice.zentorch and facts.zentorch_version else []),
    ]
    return Evidence(
        libraries=tuple(libraries),
        cores_pattern=vllm_log.CORES_PATTERN if row.bind_log else None,
        exercise=Exercise(
            path="/v1/completions",
            body=json.dumps(
                {"model": _served_name(config), "prompt": "one two " * 16, "max_tokens": 2}
            ),
            key_variable="VLLM_API_KEY",
        ),
    )


def _served_name(config: Config) -> str:
    """Return what clients call the model: the first of --served-model-name, or its own name."""
    args = config.engine.args
    for i, arg in enumerate(args):
        flag, equals, value = arg.partition("=")
        if flag == "--served-model-name":
            return value if equals else args[i + 1] if i + 1 < len(args) else ""
    return config.model or ""


def _compile_cache(
    config: Config,
    facts: EngineFacts,
    choice: EngineChoice,
    row: Row,
    sizes: ModelSizes,
    env: dict[str, str],
) -> CompileCache | None:
    """Return the key under which equal instances share compiled code; None where none is kept."""
    if not row.aot_cache or env.get("VLLM_USE_AOT_COMPILE") == "0":
        return None
    if "--enforce-eager" in config.engine.args:
        return None
    per_instance = {"CPU_VISIBLE_MEMORY_NODES"}
    parts = {
        "vllm": choice.version,
        "torch": facts.torch_version,
        "zentorch": facts.zentorch_version if choice.zentorch else None,
        "model": config.model,
        "model_digest": sizes.digest,
        "args": config.engine.args,
        "env": {k: v for k, v in sorted(env.items()) if k not in per_instance},
    }
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return CompileCache(
        key=hashlib.sha256(text.encode()).hexdigest()[:32],
        artifact_markers=vllm_log.ARTIFACT_MARKERS,
    )


def _version_notes(version: str, row: Row, facts: EngineFacts) -> list[Note]:
    notes = []
    if facts.version is None:
        notes.append(
            _note(
                "vllm-assumed",
                f"planned for vLLM {version}, since none was found (--vllm-version).",
            )
        )
    if parse_version(version) > NEWEST:
        notes.append(
            _note(
                "vllm-newer",
                f"vLLM {version} is newer than {NEWEST[0]}.{NEWEST[1]}, the newest that was "
                f"checked; planned as {row.since[0]}.{row.since[1]}.",
                Severity.WARNING,
            )
        )
    if row.warning:
        notes.append(_note("vllm-version", row.warning + ".", Severity.WARNING))
    if facts.torch_cuda:
        notes.append(
            _note(
                "torch-cuda",
                f"torch {facts.torch_version} is a CUDA build; vLLM on CPU needs the CPU build "
                '(README, "Install vLLM").',
                Severity.WARNING,
            )
        )
    return notes


def _choose_zentorch(
    wish: Switch, row: Row, version: str, facts: EngineFacts
) -> tuple[bool, list[Note]]:
    problem, fix = _zentorch_problem(row, version, facts)
    if wish is Switch.ON and problem:
        raise PlanError(f"zentorch is asked for and cannot work: {problem}", hint=fix)
    if wish is Switch.ON:
        return True, []
    if wish is Switch.OFF:
        return False, []
    known = facts.zentorch_version is not None and facts.avx512 is not None
    if known and not problem:
        return True, []
    able = facts.amd and facts.avx512 and facts.version_source is VersionSource.INSTALLED
    if problem and (facts.zentorch_version or able):
        text = f"zentorch is off: {problem}" + (f" ({fix})." if fix else ".")
        return False, [_note("zentorch-off", text)]
    return False, []


def _zentorch_problem(row: Row, version: str, facts: EngineFacts) -> tuple[str | None, str | None]:
    """Say why ZenTorch cannot work here, and what would mend it; (None, None) when it can."""
    if facts.amd is False:
        return "ZenTorch is for AMD CPUs, and this is none", None
    if facts.avx512 is False:
        return "this CPU has no AVX-512 (Zen 4 or later is needed)", None
    if row.zen is Zen.NONE:
        return f"vLLM {version} has no zen platform", "use vLLM 0.18 or later"
    if facts.version_source is not VersionSource.INSTALLED:
        return None, None
    pin = row.zentorch or (facts.torch_version or row.torch).partition("+")[0] + ".*"
    fix = f"{facts.python} -m pip install 'zentorch=={pin}'"
    if facts.zentorch_version is None:
        return "it is not installed", fix
    torch = (facts.torch_version or "").partition("+")[0]
    # zentorch's first three fields are the torch it was built for; a weekly build names none.
    built_for = ".".join(facts.zentorch_version.split(".")[:3])
    if torch and built_for != torch and not facts.zentorch_version.startswith("5."):
        return f"zentorch {facts.zentorch_version} is built for torch {built_for}, not {torch}", fix
    return None, None


def _choose_freezing(config: Config, row: Row, version: str) -> tuple[bool, list[Note]]:
    wish = config.engine.freezing
    aot = config.engine.env.get("VLLM_USE_AOT_COMPILE")
    if wish is Switch.ON:
        if not row.freezing_alone and aot not in (None, "0"):
            raise PlanError(
                f"freezing: on and VLLM_USE_AOT_COMPILE={aot} stop the engine of vLLM {version}",
                hint="leave VLLM_USE_AOT_COMPILE out: `freezing: on` sets it to 0",
            )
        if row.freezing_alone:
            return True, []
        return True, [
            _note(
                "freezing-on",
                "TORCHINDUCTOR_FREEZING is on, with VLLM_USE_AOT_COMPILE=0, which it needs with "
                f"vLLM {version}; every start compiles anew.",
            )
        ]
    if wish is Switch.OFF:
        return False, []
    if row.freezing_alone:
        return True, [
            _note("freezing-on", f"TORCHINDUCTOR_FREEZING is on: it works with vLLM {version}.")
        ]
    return False, [
        _note(
            "freezing-off",
            "TORCHINDUCTOR_FREEZING is off: with vLLM >= 0.17 it stops the engine unless AOT "
            "compile is off (`freezing: on` sets both).",
        )
    ]


def _library_notes(facts: EngineFacts) -> list[Note]:
    notes = []
    if facts.version_source is not VersionSource.INSTALLED:
        why = "without a vLLM here" if facts.here else "the libraries of that machine are not known"
        return [_note("libraries-unknown", f"LD_PRELOAD is not planned: {why}.")]
    if facts.tcmalloc is None:
        notes.append(
            _note(
                "no-tcmalloc",
                "no tcmalloc was found; vLLM is slower without "
                "(Debian, Ubuntu: apt install libtcmalloc-minimal4).",
                Severity.WARNING,
            )
        )
    if facts.openmp is None:
        notes.append(
            _note(
                "no-iomp",
                "no libiomp5 was found, so vLLM uses torch's libgomp, which is slower in short "
                f"parallel regions ({facts.python} -m pip install intel-openmp).",
                Severity.WARNING,
            )
        )
    if facts.torchvision_version is not None:
        notes.append(
            _note(
                "torchvision",
                f"torchvision {facts.torchvision_version} is installed; if vLLM stops with "
                "`operator torchvision::nms does not exist`, uninstall it.",
            )
        )
    return notes


def _note(code: str, text: str, severity: Severity = Severity.INFO) -> Note:
    return Note(code=code, severity=severity, text=text)
