"""Up: a composed plan becomes a running deployment on this machine.

Joins compose, supervisor and proxy: refuses what cannot run here, makes the proxy's own LaunchSpec,
chooses the folders. Prints nothing; what happens comes out as the supervisor's events.
"""

from __future__ import annotations

import os
import secrets
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from zenlaunch import checks
from zenlaunch.binding import split_numactl
from zenlaunch.compose import Composed
from zenlaunch.config import Config
from zenlaunch.deployments import METRICS_FILE
from zenlaunch.engines import VersionSource
from zenlaunch.errors import LaunchError, PlanError
from zenlaunch.lifecycle import Policy
from zenlaunch.plan import Plan
from zenlaunch.proxy_command import proxy_command
from zenlaunch.same_machine import differences
from zenlaunch.spec import HealthCheck, LaunchSpec
from zenlaunch.supervisor import Deployment
from zenlaunch.topology import Topology
from zenlaunch.values import host_port

PROXY_NAME = "proxy"
PROXY_SOCKET = "proxy.sock"
MAX_SOCKET_PATH = 107  # sun_path of unix(7), less its NUL
# vLLM asks for this key on /v1 and /inference; its other paths stay open on the loopback.
ENGINE_KEY = "VLLM_API_KEY"


@dataclass(frozen=True, slots=True, kw_only=True)
class Folders:
    """Where things are kept.

    `runtime` holds a folder of locks and sockets for each deployment of this user, `logs` the logs
    of this one, `cache` the stamps of filled compile caches.
    """

    runtime: Path
    logs: Path
    cache: Path


def choose_folders(name: str, environ: Mapping[str, str]) -> Folders:
    """Follow the XDG base directories; root's sockets are in /run. Raises LaunchError."""
    if os.geteuid() == 0 and "XDG_RUNTIME_DIR" not in environ:
        runtime = Path("/run/zenlaunch")
    else:
        fallback = f"/tmp/zenlaunch-{os.geteuid()}"
        runtime = Path(environ.get("XDG_RUNTIME_DIR") or fallback) / "zenlaunch"
    try:
        state = Path(environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
        cache = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # an id without an entry, as containers run under
        raise LaunchError(
            f"there is no home folder: HOME is not set, and user {os.geteuid()} is not known here",
            hint="set HOME, or XDG_STATE_HOME (for logs) and XDG_CACHE_HOME",
        ) from None
    return Folders(
        runtime=runtime,
        logs=state / "zenlaunch" / name,
        cache=cache / "zenlaunch" / "compiled",
    )


def refuse_other_machine(planned: Topology, here: Topology, *, source: str) -> None:
    """Raise PlanError, with what differs, unless `here` is the machine that `planned` describes."""
    if planned.digest == here.digest:
        return
    found = differences(planned, here, cpus=planned.usable_cpus)
    if found:
        raise PlanError(
            f"this is not the machine of {source}:\n" + "\n".join(f"  {line}" for line in found),
            hint="plan for this machine: leave --machine out, or save its probe anew",
        )


def refuse_what_cannot_run(composed: Composed) -> None:
    """Raise LaunchError or PlanError for what is known to fail before anything is started."""
    config, plan = composed.config, composed.plan
    if (
        config.engine.name == "vllm"
        and composed.facts.version_source is not VersionSource.INSTALLED
    ):
        raise LaunchError(
            "no vLLM was found on this machine",
            hint="name the interpreter of its environment with --python, or install it "
            '(README, "Install vLLM")',
        )
    if any(i.memory.kv_bytes is None for i in plan.instances) and len(plan.instances) > 1:
        raise PlanError(
            "the size of the KV cache is not known, and several instances on one machine must not "
            "each take what vLLM takes by default (92 % of a node)",
            hint="download the model first, or give --weights SIZE or --kv-cache SIZE",
        )


def members_of(name: str, composed: Composed, folders: Folders) -> tuple[LaunchSpec, ...]:
    """Return the instances and the proxy, for what they take of the machine."""
    folder = folders.runtime / name
    return (*composed.specs, proxy_spec(composed.plan, composed.config, folder, key_file=None))


def make_deployment(
    name: str, composed: Composed, folders: Folders, *, hangup_stops: bool
) -> Deployment:
    """Return what the supervisor runs; writes the engines' key into the runtime folder."""
    runtime = folders.runtime / name
    socket = runtime / PROXY_SOCKET
    if len(os.fsencode(socket)) > MAX_SOCKET_PATH:
        raise LaunchError(
            f"the path of the proxy's socket is too long for the kernel: {socket}",
            hint="set XDG_RUNTIME_DIR to a shorter folder, or give a shorter --name",
        )
    # numactl ends the program where a container forbids memory policies; our own step goes on with
    # the CPUs alone, and says so.
    numactl = shutil.which("numactl") is not None and checks.memory_policy_allowed()
    specs = composed.specs if numactl else tuple(_bound_by_us(s) for s in composed.specs)
    key_file = None
    if composed.config.engine.name == "vllm" and not _has_own_key(composed.config, os.environ):
        key = secrets.token_urlsafe(32)
        key_file = _write_key(runtime / "upstream.key", key)
        specs = tuple(replace(s, env={**s.env, ENGINE_KEY: key}) for s in specs)
    return Deployment(
        name=name,
        instances=specs,
        proxy=proxy_spec(composed.plan, composed.config, runtime, key_file=key_file),
        log_dir=folders.logs,
        cache_dir=folders.cache,
        admin_socket=socket,
        policy=Policy(drain_s=composed.config.engine.drain_s),
        hangup_stops=hangup_stops,
    )


def proxy_url(plan: Plan) -> str:
    """Return where a client on this machine reaches the proxy."""
    return f"http://{host_port(checks.connect_host(plan.proxy.host), plan.proxy.port)}"


def _has_own_key(config: Config, environ: Mapping[str, str]) -> bool:
    """Say whether the user has a key for the engines; it then passes through the proxy."""
    return bool(config.engine.env.get(ENGINE_KEY) or environ.get(ENGINE_KEY))


def _write_key(path: Path, key: str) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.unlink(missing_ok=True)
        path.touch(mode=0o600)
        path.write_text(f"{key}\n")
    except OSError as e:
        raise LaunchError(
            f"cannot write {path}: {e.strerror}",
            hint="set XDG_RUNTIME_DIR to a folder that you may write",
        ) from None
    return path


def proxy_spec(plan: Plan, config: Config, folder: Path, *, key_file: Path | None) -> LaunchSpec:
    """Return how the proxy is started: this program again, on the CPUs of the plan.

    `folder` is the deployment's in the runtime folder.
    """
    proxy, drain_s = plan.proxy, config.engine.drain_s
    groups = proxy_command(
        (sys.executable, "-m", "zenlaunch"),
        plan,
        config,
        listen=host_port(proxy.host, proxy.port),
        admin_socket=str(folder / PROXY_SOCKET),
        upstream_key_file=str(key_file) if key_file else None,
        metrics_file=str(folder / METRICS_FILE),
    )
    return LaunchSpec(
        name=PROXY_NAME,
        argv=tuple(word for group in groups for word in group),
        host=proxy.host,
        port=proxy.port,
        cpus=proxy.cpus,
        self_bind=bool(proxy.cpus),
        health=HealthCheck(path="/health", start_timeout_s=60.0),
        drain_s=drain_s,
    )


def _bound_by_us(spec: LaunchSpec) -> LaunchSpec:
    """Take numactl out: the launcher binds the process itself before it executes it."""
    _, program = split_numactl(spec.argv)
    return replace(spec, argv=program, self_bind=True)
