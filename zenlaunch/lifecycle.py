"""What happens next to a deployment: a pure step from (state, event, time) to (state, actions).

Owns the start order, what counts as ready, as a crash and as never ready, restarts with backoff,
giving up, draining, and rolling restarts, for the instances and for the proxy as one member more.
It starts nothing and waits for nothing: the supervisor turns actions into processes and what it
sees into events. Times are seconds of one monotonic clock.

Any exit that was not asked for is a failure, exit status 0 included: an engine whose worker died
ends its API server cleanly. What a member that is starting is told to do is to die: SIGTERM is
swallowed by an engine that loads, and it has nothing to lose.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import assert_never


class State(StrEnum):
    """What a member is in; the words of `zenlaunch status`."""

    STOPPED = "stopped"
    STARTING = "starting"
    READY = "ready"
    UNREADY = "unready"
    DRAINING = "draining"
    STOPPING = "stopping"
    BACKOFF = "backoff"
    FAILED = "failed"


class Role(StrEnum):
    INSTANCE = "instance"
    PROXY = "proxy"


class Want(StrEnum):
    """What shall come after the present run: the same again, a new one, or nothing."""

    RUN = "run"
    RESTART = "restart"
    STOP = "stop"


SERVING = frozenset({State.READY, State.UNREADY})
ALIVE = SERVING | {State.STARTING, State.DRAINING, State.STOPPING}
AT_REST = frozenset({State.STOPPED, State.FAILED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How patient the deployment is.

    `start_tries`: attempts of a member that was never ready. `restart_tries`: failures in a row of
    one that was ready before; a run of `good_run_s` begins the count anew. `drain_s` is how long
    answers under way are waited for once the proxy sends nothing new, `grace_s` what an engine may
    take to end after that. `keep_going`: one that never becomes ready is left failed, instead of
    ending everything.
    """

    start_tries: int = 1
    restart_tries: int = 8
    backoff_first_s: float = 1.0
    backoff_most_s: float = 60.0
    good_run_s: float = 600.0
    drain_s: float = 30.0
    grace_s: float = 15.0
    keep_going: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One process tree: an instance or the proxy.

    `deadline` is when its state stops being acceptable: not ready (starting), not drained
    (draining), not gone (stopping), to be tried again (backoff). `failures` counts in a row,
    `restarts` in all. `doomed` says why a run is being ended as a failure.
    """

    name: str
    role: Role = Role.INSTANCE
    cache_key: str | None = None
    start_timeout_s: float
    drain_s: float = 0.0
    state: State = State.STOPPED
    want: Want = Want.RUN
    since: float = 0.0
    deadline: float | None = None
    ever_ready: bool = False
    ready_at: float | None = None
    failures: int = 0
    restarts: int = 0
    doomed: str | None = None
    killed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A whole deployment.

    `cold` holds the keys of compile caches that no run has filled yet. `rolling` are the members
    that a rolling restart has still to do; the first of them is under way. `exit_code` is set once
    everything is being stopped.
    """

    members: tuple[Member, ...]
    policy: Policy = Policy()
    cold: frozenset[str] = frozenset()
    rolling: tuple[str, ...] = ()
    exit_code: int | None = None
    begun: bool = False

    def member(self, name: str) -> Member:
        """Return the member of this name; raises KeyError."""
        for member in self.members:
            if member.name == name:
                return member
        raise KeyError(name)

    @property
    def proxy_serves(self) -> bool:
        return any(m.role is Role.PROXY and m.state in SERVING for m in self.members)

    @property
    def deadline(self) -> float | None:
        """Return when the next `Tick` is due, or None."""
        times = [m.deadline for m in self.members if m.deadline is not None]
        return min(times) if times else None


# -- events ------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Begin:
    """Start everything."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The member's process lives and answers."""

    name: str


@dataclass(frozen=True, slots=True)
class Unready:
    """A member that was ready does not answer now."""

    name: str


@dataclass(frozen=True, slots=True)
class Doomed:
    """The member cannot recover (a fatal log line, a hang): end it and count a failure."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Drained:
    """The proxy sends nothing to the member any more and no answer is under way."""

    name: str


@dataclass(frozen=True, slots=True)
class Exited:
    """No process of the member is left, or it could not be started; `jitter` is in [0, 1)."""

    name: str
    jitter: float = 0.0


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; look at the deadlines."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop everything and end with `exit_code`; a second one, or `hurry`, kills."""

    exit_code: int = 0
    hurry: bool = False


@dataclass(frozen=True, slots=True)
class Restart:
    """Replace the member's run by a new one; begins again what has failed or is backing off."""

    name: str


@dataclass(frozen=True, slots=True)
class Roll:
    """Restart these members one after the other, each ready before the next is touched."""

    names: tuple[str, ...]


Event = (
    Begin | Ready | Unready | Doomed | Drained | Exited | Tick | Stop | Restart | Roll
)  # fmt: skip


# -- actions -----------------------------------------------------


@dataclass(frozen=True, slots=True)
class Spawn:
    """Start the member's process tree."""

    name: str


@dataclass(frozen=True, slots=True)
class Drain:
    """Have the proxy send the member nothing new; answer with `Drained`."""

    name: str


@dataclass(frozen=True, slots=True)
class Resume:
    """Let the proxy use the member (again)."""

    name: str


@dataclass(frozen=True, slots=True)
class Terminate:
    """Send one SIGTERM to the member's main process."""

    name: str


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL the member's whole tree."""

    name: str


@dataclass(frozen=True, slots=True)
class GaveUp:
    """The member is failed for good; `never_ready` tells the two ways apart."""

    name: str
    never_ready: bool


@dataclass(frozen=True, slots=True)
class RollEnded:
    """The rolling restart is over; `left` were not done because `failed` did not become ready."""

    failed: str | None
    left: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Finish:
    """Everything is at rest; end with this status."""

    exit_code: int


Action = Spawn | Drain | Resume | Terminate | Kill | GaveUp | RollEnded | Finish


# -- the step ----------------------------------------------------


def backoff_s(policy: Policy, failures: int, jitter: float) -> float:
    """Return the pause before the next try: twice as long each time, half of it by chance."""
    whole = min(policy.backoff_most_s, policy.backoff_first_s * 2.0 ** min(failures - 1, 30))
    return whole * (0.5 + jitter / 2)


def step(system: System, event: Event, now: float) -> tuple[System, tuple[Action, ...]]:
    """Apply one event; events that no longer matter change nothing."""
    work = _Step(system, now)
    match event:
        case Begin():
            work.system = replace(work.system, begun=True)
        case Ready(name):
            work.ready(work.system.member(name))
        case Unready(name):
            if work.system.member(name).state is State.READY:
                work.change(name, state=State.UNREADY)
        case Doomed(name, reason):
            work.doom(work.system.member(name), reason)
        case Drained(name):
            if work.system.member(name).state is State.DRAINING:
                work.terminate(name, system.policy.grace_s)
        case Exited(name, jitter):
            work.exited(work.system.member(name), jitter)
        case Tick():
            for member in system.members:
                if member.deadline is not None and member.deadline <= now:
                    work.overdue(member)
        case Stop(exit_code, hurry):
            work.stop(exit_code, hurry=hurry)
        case Restart(name):
            if work.system.exit_code is None:
                work.restart(work.system.member(name))
        case Roll(names):
            if work.system.exit_code is None and not work.system.rolling and names:
                work.system = replace(work.system, rolling=names)
                work.restart(work.system.member(names[0]))
        case _:
            assert_never(event)
    work.settle()
    return work.system, tuple(work.actions)


class _Step:
    """One step under way: the system so far and the actions so far."""

    def __init__(self, system: System, now: float) -> None:
        self.system = system
        self.now = now
        self.actions: list[Action] = []

    def change(self, name: str, /, **fields: object) -> None:
        """Replace fields of one member; a new state begins now."""

        def changed(member: Member) -> Member:
            if fields.get("state", member.state) is not member.state:
                fields["since"] = self.now
            return replace(member, **fields)  # type: ignore[arg-type]

        members = tuple(changed(m) if m.name == name else m for m in self.system.members)
        self.system = replace(self.system, members=members)

    def spawn(self, member: Member) -> None:
        self.change(
            member.name,
            state=State.STARTING,
            want=Want.RUN,
            deadline=self.now + member.start_timeout_s,
            ready_at=None,
            doomed=None,
            killed=False,
        )
        self.actions.append(Spawn(member.name))

    def ready(self, member: Member) -> None:
        if member.state is State.UNREADY:
            self.change(member.name, state=State.READY)
        if member.state is not State.STARTING:
            return
        self.change(
            member.name, state=State.READY, deadline=None, ever_ready=True, ready_at=self.now
        )
        if member.role is Role.INSTANCE:
            self.actions.append(Resume(member.name))
        else:  # it has not been told of those that were ready before it
            self.actions += [
                Resume(m.name)
                for m in self.system.members
                if m.state is State.READY and m.role is Role.INSTANCE
            ]
        if member.cache_key is not None:
            self.system = replace(self.system, cold=self.system.cold - {member.cache_key})
        if self.system.rolling and self.system.rolling[0] == member.name:
            self.system = replace(self.system, rolling=self.system.rolling[1:])
            if self.system.rolling:
                self.restart(self.system.member(self.system.rolling[0]))
            else:
                self.actions.append(RollEnded(None))

    def doom(self, member: Member, reason: str) -> None:
        if member.state not in ALIVE or member.killed:
            return
        failing = member.state in SERVING or member.state is State.STARTING
        self.kill(member.name)
        if failing:
            self.change(member.name, doomed=reason)

    def kill(self, name: str) -> None:
        self.change(name, state=State.STOPPING, deadline=None, killed=True)
        self.actions.append(Kill(name))

    def terminate(self, name: str, patience_s: float) -> None:
        self.change(name, state=State.STOPPING, deadline=self.now + patience_s)
        self.actions.append(Terminate(name))

    def overdue(self, member: Member) -> None:
        match member.state:
            case State.STARTING:
                self.doom(member, f"not ready after {member.start_timeout_s:g} s")
            case State.DRAINING:
                self.terminate(member.name, self.system.policy.grace_s)
            case State.STOPPING:
                self.kill(member.name)
            case State.BACKOFF:
                self.change(member.name, state=State.STOPPED, deadline=None)
            case _:
                self.change(member.name, deadline=None)

    def end(self, member: Member, want: Want) -> None:
        """Begin to end a run that was asked to end, in the way that its state allows."""
        self.change(member.name, want=want)
        if member.state is State.STARTING:
            self.kill(member.name)
        elif member.state in SERVING:
            if member.role is Role.INSTANCE and self.system.proxy_serves:
                deadline = self.now + self.system.policy.drain_s
                self.change(member.name, state=State.DRAINING, deadline=deadline)
                self.actions.append(Drain(member.name))
            else:
                self.terminate(member.name, member.drain_s + self.system.policy.grace_s)
        elif member.state is State.BACKOFF:
            self.change(member.name, state=State.STOPPED, deadline=None)

    def restart(self, member: Member) -> None:
        if member.state in AT_REST or member.state is State.BACKOFF:
            self.change(member.name, state=State.STOPPED, want=Want.RUN, deadline=None, failures=0)
        else:
            self.end(member, Want.RESTART)

    def stop(self, exit_code: int, *, hurry: bool) -> None:
        again = self.system.exit_code is not None
        if not again:
            self.system = replace(self.system, exit_code=exit_code, rolling=())
        for member in self.system.members:
            if (hurry or again) and member.state in ALIVE:
                self.change(member.name, want=Want.STOP)
                if not member.killed:
                    self.kill(member.name)
            elif member.role is Role.INSTANCE or member.state not in ALIVE:
                self.end(member, Want.STOP)

    def exited(self, member: Member, jitter: float) -> None:
        if member.state not in ALIVE:
            return
        asked = member.state in (State.DRAINING, State.STOPPING) and member.doomed is None
        if self.system.exit_code is not None:
            self.change(member.name, state=State.STOPPED, deadline=None, want=Want.STOP)
        elif asked:
            self.change(
                member.name, state=State.STOPPED, deadline=None, restarts=member.restarts + 1
            )
        else:
            self.failed(member, jitter)

    def failed(self, member: Member, jitter: float) -> None:
        policy = self.system.policy
        good = member.ready_at is not None and self.now - member.ready_at >= policy.good_run_s
        failures = 1 if good else member.failures + 1
        if (
            self.system.rolling
            and self.system.rolling[0] == member.name
            and member.ready_at is None
        ):
            self.actions.append(RollEnded(member.name, self.system.rolling[1:]))
            self.system = replace(self.system, rolling=())
        if failures <= policy.restart_tries if member.ever_ready else failures < policy.start_tries:
            deadline = self.now + backoff_s(policy, failures, jitter)
            self.change(
                member.name,
                state=State.BACKOFF,
                want=Want.RUN,
                deadline=deadline,
                failures=failures,
                restarts=member.restarts + 1,
            )
            return
        self.change(member.name, state=State.FAILED, deadline=None, failures=failures)
        self.actions.append(GaveUp(member.name, never_ready=not member.ever_ready))
        if member.role is Role.PROXY:
            self.stop(7, hurry=False)
            return
        instances = [m for m in self.system.members if m.role is Role.INSTANCE]
        hopeless = all(m.state is State.FAILED for m in instances)
        if hopeless or not (member.ever_ready or policy.keep_going):
            self.stop(6, hurry=False)

    def settle(self) -> None:
        """Start what may start now; end when all that shall end has ended."""
        if self.system.exit_code is None:
            if self.system.begun:
                for member in self.system.members:
                    if self.may_start(self.system.member(member.name)):
                        self.spawn(self.system.member(member.name))
            return
        instances = [m for m in self.system.members if m.role is Role.INSTANCE]
        if any(m.state not in AT_REST for m in instances):
            return
        for member in self.system.members:
            if member.state in SERVING or member.state is State.STARTING:
                self.end(member, Want.STOP)
        if all(m.state in AT_REST for m in self.system.members):
            self.actions.append(Finish(self.system.exit_code))

    def may_start(self, member: Member) -> bool:
        """A member at rest starts, but alone where a compile cache has to be filled first."""
        if member.state is not State.STOPPED:
            return False
        if member.cache_key is None or member.cache_key not in self.system.cold:
            return True
        return not any(
            m.cache_key == member.cache_key and m.state in ALIVE for m in self.system.members
        )
