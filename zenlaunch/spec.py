"""LaunchSpec: how one process tree is started, watched and stopped, as a frozen value.

Made by an engine (or, for the proxy, by `up`), acted upon by the supervisor, which knows nothing of
vLLM: log markers, failure signatures and health paths all come from here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from zenlaunch.cpuset import EMPTY, CpuSet


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A log line that contains `marker` says that the start has reached phase `name`."""

    marker: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """A log line that contains `marker` names a known failure.

    `fatal` failures never become ready by themselves: the instance is ended at once. Others only
    explain an exit. A signature further up in the tuple wins over one below it.
    """

    marker: str
    cause: str
    advice: str
    fatal: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthCheck:
    """How to ask whether an instance serves.

    `path` answers 200 when it does. `start_timeout_s` bounds the time from spawn to ready.
    `progress_metric` and `running_metric` name Prometheus series on `metrics_path` that tell a hung
    engine from a busy one; `waiting_metric`, `kv_metric` (a share) and `tokens_metric` (a counter)
    are shown to people. None where the engine has none.
    """

    path: str = "/health"
    start_timeout_s: float = 1800.0
    interval_s: float = 1.0
    metrics_path: str | None = None
    progress_metric: str | None = None
    running_metric: str | None = None
    waiting_metric: str | None = None
    kv_metric: str | None = None
    tokens_metric: str | None = None
    hang_s: float = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileCache:
    """A cache that instances with the same `key` share.

    The first instance runs alone while no earlier run with this key has left its artifacts. A log
    line that contains one of `artifact_markers` is followed by the path of an artifact.
    """

    key: str
    artifact_markers: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exercise:
    """A short request that makes every engine thread work: `body` (JSON) is posted to `path`.

    The key that it needs, if any, is the value of `key_variable` in the environment.
    """

    path: str
    body: str
    key_variable: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What a ready engine must show besides its threads and pages.

    `libraries` are parts of file names that must be mapped ("libzentorch"), `lines` parts of log
    lines that must have come. `cores_pattern` is a regular expression whose group 1 is the list of
    CPUs that the engine says it uses. `exercise` shows which engine threads ever work.
    """

    libraries: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    cores_pattern: str | None = None
    exercise: Exercise | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpec:
    """One process tree.

    `argv` is complete (numactl included). `env` is set on top of the inherited environment after
    the names in `unset` were removed from it; a name in `unset` that ends in `*` removes all that
    begin so. `drain_s` is the time the engine itself takes to finish requests after SIGTERM;
    `cpus`/`mem_nodes` say where its threads and pages must be; with `self_bind` there is no numactl
    in `argv` and the launcher binds the process itself before it executes it.
    """

    name: str
    argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    unset: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int
    cpus: CpuSet = EMPTY
    engine_cpus: CpuSet = EMPTY
    mem_nodes: CpuSet = EMPTY
    self_bind: bool = False
    memory_bytes: int | None = None
    health: HealthCheck = HealthCheck()
    phases: tuple[Phase, ...] = ()
    signatures: tuple[Signature, ...] = ()
    compile_cache: CompileCache | None = None
    evidence: Evidence = Evidence()
    drain_s: float = 30.0
