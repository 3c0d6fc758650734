"""What the supervisor reports: one frozen value for each thing that happens to a deployment.

Read by the command line, the control socket and tests. Seconds are durations; nothing here carries
a date, since whoever shows it knows when it came.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from zenlaunch.errors import ZenlaunchError
from zenlaunch.lifecycle import Role, State


@dataclass(frozen=True, slots=True, kw_only=True)
class StateChanged:
    """A member went from one state to another; `reason` says why where that is not plain."""

    name: str
    previous: State
    state: State
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A member has not been started yet, and why."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Spawned:
    """A member's main process runs; `session` is the kernel's session id of its tree."""

    name: str
    pid: int
    session: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseReached:
    """A start got as far as `phase`, `seconds` after its spawn; `line` is what said so."""

    name: str
    phase: str
    line: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLines:
    """Lines that a member wrote, in order."""

    name: str
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BecameReady:
    """A member answers; `log` are the last lines of its start."""

    name: str
    pid: int
    seconds: float
    log: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A member ended without being asked to, or could not be started.

    `what` is "died", "was ended" (by us, since it could not recover) or "was not started", `how`
    "exit 1", "SIGKILL" or the reason. `retry_s` is when the next try comes; None: no more.
    `ends_all` is whether the whole deployment ends for it. `report` is the folder of the crash
    report.
    """

    name: str
    what: str
    how: str
    starting: bool
    seconds: float
    cause: str | None
    evidence: str | None
    advice: str | None
    log_tail: tuple[str, ...]
    retry_s: float | None
    report: Path | None
    ends_all: bool = False

    @property
    def message(self) -> str:
        if self.what == "was not started":
            return f"{self.name} was not started: {self.how}"
        what = f"{self.name} {self.what}{' while starting' if self.starting else ''}"
        if self.what == "was ended":
            return f"{what} (after {self.seconds:.0f} s): {self.how}"
        cause = f": {self.cause}" if self.cause else ""
        return f"{what} ({self.how} after {self.seconds:.0f} s){cause}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReady:
    """Every member is ready for the first time, `seconds` after the begin."""

    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopping:
    """Everything is being stopped; `why` is a signal's name, a command, or a failure."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RollingEnded:
    """A rolling restart is over; `failed` did not become ready, and `left` were not touched."""

    failed: str | None
    left: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Warned:
    """Something is not as it should be, and nothing was stopped for it."""

    name: str | None
    text: str


Event = (
    StateChanged
    | Waiting
    | Spawned
    | PhaseReached
    | LogLines
    | BecameReady
    | Failed
    | AllReady
    | Stopping
    | RollingEnded
    | Warned
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a deployment ended; `error` is what to show when it did not end by being asked to."""

    exit_code: int
    error: ZenlaunchError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberStatus:
    """What `zenlaunch status` shows of a member; `since_s` is the time in the present state.

    `session` is the kernel's session id of its tree, by which orphans of it are known.
    """

    name: str
    role: Role
    state: State
    phase: str | None
    pid: int | None
    session: int | None
    resident_bytes: int | None
    host: str
    port: int
    since_s: float
    restarts: int
    ready_seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What an engine says of its work; None where it does not say. `kv_usage` is a share of 1."""

    running: float | None = None
    waiting: float | None = None
    kv_usage: float | None = None
    tokens_per_second: float | None = None
