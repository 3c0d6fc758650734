"""Which upstream takes the next request, which ones must rest: counts and rules; no IO, no clock.

Owns the in-flight counts, the two policies, passive ejection with half-open return, drain, and the
limits. The shell tells it what happened (a probe answered, a request ended) and at what time; it
says where to go. Readiness comes from active probes alone; failures of real requests eject for a
while, but never the last upstream there is. `now` is any monotonic clock, in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from zenlaunch.config import Policy


class State(StrEnum):
    """An upstream as `status` shows it."""

    STARTING = "starting"
    READY = "ready"
    UNREADY = "unready"
    EJECTED = "ejected"
    HALF_OPEN = "half-open"
    DRAINING = "draining"


class Outcome(StrEnum):
    """How a request ended, as far as the upstream is to praise or blame."""

    SUCCESS = "success"
    FAILURE = "failure"
    NEUTRAL = "neutral"


class Verdict(StrEnum):
    """Why `acquire` did or did not name an upstream."""

    PICKED = "picked"
    BUSY = "busy"
    NONE_USABLE = "none-usable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The numbers of the balancer; limits of None mean no limit.

    An upstream that fails `eject_after` times in a row rests `eject_s`, twice as long each time, up
    to `eject_max_s`. Each failure weighs like `penalty` requests in flight for `penalty_s`, so that
    an upstream that fails fast does not attract everything. While nobody is usable, one that is new
    is worth waiting for `expect_s`, or until its first probe has failed.
    """

    eject_after: int = 3
    eject_s: float = 5.0
    eject_max_s: float = 60.0
    penalty: int = 8
    penalty_s: float = 10.0
    retry_after_max_s: float = 60.0
    probe_misses: int = 3
    max_in_flight: int | None = None
    max_in_flight_per_upstream: int | None = None
    expect_s: float = 0.5


class Lease(NamedTuple):
    """One request's claim on an upstream, from `acquire` to `release`.

    `member` is the upstream as it was then: another engine may have its name since.
    """

    upstream: str
    trial: bool
    member: _Member


class Choice(NamedTuple):
    """The answer of `acquire`; `lease` is set when `verdict` is picked."""

    verdict: Verdict
    lease: Lease | None


_PICKED, _SUCCESS, _FAILURE = Verdict.PICKED, Outcome.SUCCESS, Outcome.FAILURE
_BUSY = Choice(Verdict.BUSY, None)
_NONE_USABLE = Choice(Verdict.NONE_USABLE, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """One upstream at one moment; `barred_s` is how long it still rests."""

    name: str
    state: State
    in_flight: int
    requests: int
    errors: int
    ejections: int
    barred_s: float | None


class _Member:
    __slots__ = (
        "barred_until",
        "draining",
        "ejections",
        "ejections_total",
        "errors",
        "expected_until",
        "failures",
        "half_open",
        "in_flight",
        "misses",
        "name",
        "penalty_until",
        "position",
        "ready",
        "requests",
        "seen",
        "trials",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.position = 0  # in the rotation
        self.ready = False
        self.seen = False
        self.draining = False
        self.in_flight = 0
        self.requests = 0
        self.errors = 0
        self.failures = 0
        self.misses = 0
        self.ejections = 0
        self.ejections_total = 0
        self.barred_until = 0.0
        self.penalty_until = 0.0
        self.half_open = False
        self.trials = 0
        self.expected_until = 0.0

    def forgive(self) -> None:
        self.failures = 0
        self.ejections = 0
        self.barred_until = self.penalty_until = 0.0
        self.half_open = False

    def state(self, now: float) -> State:
        if self.draining:
            return State.DRAINING
        if not self.ready:
            return State.UNREADY if self.seen else State.STARTING
        if now < self.barred_until:
            return State.EJECTED
        return State.HALF_OPEN if self.half_open else State.READY


class Balancer:
    """The state of all upstreams and the rules that act on it."""

    def __init__(
        self,
        names: Iterable[str],
        *,
        policy: Policy = Policy.LEAST_INFLIGHT,
        rules: Rules = Rules(),
    ) -> None:
        self.policy = policy
        self.rules = rules
        self._strict = policy is Policy.ROUND_ROBIN
        self._members: list[_Member] = []
        self._by_name: dict[str, _Member] = {}
        self._next = 0
        self._in_flight = 0
        self.set_members(names, -math.inf)  # none of these is waited for

    def __repr__(self) -> str:
        members = ", ".join(f"{m.name}:{m.in_flight}" for m in self._members)
        return f"<Balancer {self.policy} {members}>"

    @property
    def in_flight(self) -> int:
        """The number of requests that hold a lease."""
        return self._in_flight

    @property
    def names(self) -> tuple[str, ...]:
        """The upstreams in the order of rotation."""
        return tuple(member.name for member in self._members)

    def set_members(
        self, names: Iterable[str], now: float, *, replaced: Container[str] = ()
    ) -> None:
        """Replace the list of upstreams; those that stay keep their state and their leases.

        A name in `replaced` is another engine's from now on: nothing is held against that one,
        neither then nor when requests of the one before end.
        """
        before, self._by_name = self._by_name, {}
        for position, name in enumerate(names):
            member = before.get(name)
            if member is None or name in replaced:
                member = _Member(name)
                member.expected_until = now + self.rules.expect_s
            member.position = position
            self._by_name[name] = member
        self._members = list(self._by_name.values())
        self._next = 0

    def acquire(self, now: float, *, exclude: frozenset[str] = frozenset()) -> Choice:
        """Choose an upstream for one request and count it in flight there."""
        rules = self.rules
        if rules.max_in_flight is not None and self._in_flight >= rules.max_in_flight:
            return _BUSY
        cap = rules.max_in_flight_per_upstream
        best: _Member | None = None
        best_load = math.inf
        last_resort: _Member | None = None
        busy = False
        for member in self._members[self._next :] + self._members[: self._next]:
            if not member.ready or member.draining or member.name in exclude:
                continue
            if cap is not None and member.in_flight >= cap:
                busy = True
                continue
            if now < member.barred_until or (member.half_open and member.trials):
                if last_resort is None or member.barred_until < last_resort.barred_until:
                    last_resort = member
                continue
            if self._strict:
                best = member
                break
            load: float = member.in_flight
            if now < member.penalty_until and not member.half_open:
                load += rules.penalty * member.failures
            if load < best_load:
                best, best_load = member, load
        if best is None:
            if busy:
                return _BUSY
            if last_resort is None:
                for member in self._members:
                    if now < member.expected_until and member.name not in exclude:
                        return _BUSY
                return _NONE_USABLE
            # All that are left are resting. Passive evidence never closes the door altogether.
            best = last_resort
        self._next = best.position + 1
        return Choice(_PICKED, self._lease(best))

    def lease(self, name: str) -> Lease:
        """Count one more request in flight at a named upstream, whatever its state."""
        return self._lease(self._by_name[name])

    def _lease(self, member: _Member) -> Lease:
        member.in_flight += 1
        member.requests += 1
        self._in_flight += 1
        if member.half_open:
            member.trials += 1
        return Lease(member.name, member.half_open, member)

    def release(
        self, lease: Lease, outcome: Outcome, now: float, *, retry_after_s: float | None = None
    ) -> bool:
        """Give a lease back and learn from how its request ended; return whether that ejected it.

        `retry_after_s` is what the upstream itself asked for: it rests so long.
        """
        member = lease.member
        member.in_flight -= 1
        self._in_flight -= 1
        ejections = member.ejections_total
        if lease.trial:
            member.trials -= 1
        if outcome is _SUCCESS:
            if member.half_open and not lease.trial:
                return False  # begun before the ejection: says nothing of how it is now
            asked_for = 0.0 if lease.trial else member.barred_until
            member.forgive()
            member.barred_until = asked_for  # others' success does not undo a Retry-After
        elif outcome is _FAILURE:
            self._blame(member, lease, now)
        if retry_after_s is not None and retry_after_s > 0:
            rest = min(retry_after_s, self.rules.retry_after_max_s)
            member.barred_until = max(member.barred_until, now + rest)
        return member.ejections_total > ejections

    def _blame(self, member: _Member, lease: Lease, now: float) -> None:
        rules = self.rules
        member.errors += 1
        member.failures += 1
        member.penalty_until = now + rules.penalty_s
        if now < member.barred_until:
            return
        if not (lease.trial or member.failures >= rules.eject_after):
            return
        if self._by_name.get(member.name) is not member:
            return  # it gets nothing any more
        if not any(other.ready and not other.draining and now >= other.barred_until
                   for other in self._members if other is not member):  # fmt: skip
            return
        rest = min(rules.eject_s * 2.0 ** min(member.ejections, 16), rules.eject_max_s)
        member.barred_until = now + rest
        member.ejections += 1
        member.ejections_total += 1
        member.half_open = True

    def probe_answered(self, name: str) -> bool:
        """Note that an upstream says it is well; return whether it has just become ready."""
        member = self._by_name[name]
        member.misses = 0
        if member.ready:
            return False
        member.ready = member.seen = True
        member.expected_until = 0.0
        member.forgive()
        return True

    def probe_missed(self, name: str, *, decisive: bool) -> bool:
        """Note a probe without a good answer; return whether the upstream has just gone unready.

        `decisive` ones (connection refused, an answer that is not 200) count at once, silence only
        after `probe_misses` in a row: a busy engine may be late.
        """
        member = self._by_name[name]
        member.misses += 1
        member.expected_until = 0.0
        if not member.ready or not (decisive or member.misses >= self.rules.probe_misses):
            return False
        member.ready = False
        return True

    def drain(self, name: str) -> int:
        """Send an upstream nothing new; return how many requests it has. KeyError: unknown."""
        member = self._by_name[name]
        member.draining = True
        return member.in_flight

    def resume(self, name: str) -> int:
        """Undo `drain`; return the requests in flight. KeyError if there is no such upstream."""
        member = self._by_name[name]
        member.draining = False
        return member.in_flight

    def rest(self, name: str, until: float) -> None:
        """Let an upstream rest; like any that does, it serves when nobody else can."""
        member = self._by_name[name]
        member.barred_until = max(member.barred_until, until)

    def in_flight_at(self, name: str) -> int:
        """Return the number of requests that an upstream has."""
        return self._by_name[name].in_flight

    def drained(self) -> tuple[str, ...]:
        """Return the upstreams that are being, or have been, drained."""
        return tuple(member.name for member in self._members if member.draining)

    def is_ready(self, name: str) -> bool:
        """Tell whether an upstream's last word was that it is well."""
        return self._by_name[name].ready

    def usable(self) -> tuple[str, ...]:
        """Return the upstreams that requests may go to, those at rest included."""
        return tuple(m.name for m in self._members if m.ready and not m.draining)

    def retry_after_s(self, now: float) -> int:
        """Return in how many whole seconds a refused client should ask again."""
        waits = [m.barred_until - now for m in self._members if m.ready and now < m.barred_until]
        return max(1, math.ceil(min(waits))) if waits else 2

    def views(self, now: float) -> tuple[View, ...]:
        """Return every upstream as it is now."""
        return tuple(
            View(
                name=m.name,
                state=m.state(now),
                in_flight=m.in_flight,
                requests=m.requests,
                errors=m.errors,
                ejections=m.ejections_total,
                barred_s=m.barred_until - now if now < m.barred_until else None,
            )
            for m in self._members
        )
