"""What to do when an attempt at an upstream fails: the rules, as one pure function.

A request has begun to be answered when the first body byte was forwarded; from then on nothing is
tried again. Before that: a reset on a reused idle connection is the server's idle timeout crossing
our request, so the same instance is asked once more on a fresh connection; an instance that cannot
be reached, or says 503, never took the request, so every other one is asked once; an instance that
died under the request may have died *of* it, so one other is asked and no more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from enum import StrEnum

# A server's idle timeout resets a reused connection at once; later, the request was at work.
IDLE_RACE_S = 2.0


class Fault(StrEnum):
    """How an attempt failed."""

    UNREACHABLE = "unreachable"
    CONNECT_TIMEOUT = "connect-timeout"
    IDLE_RESET = "idle-reset"
    DIED = "died"
    UNAVAILABLE = "unavailable"
    FIRST_BYTE_TIMEOUT = "first-byte-timeout"
    GAP_TIMEOUT = "gap-timeout"
    GARBAGE = "garbage"
    TRUNCATED = "truncated"


# What a client is told when nothing can be tried any more.
TOLD: dict[Fault, tuple[int, str, str]] = {
    Fault.UNREACHABLE: (503, "upstream_unreachable", "no instance could be reached"),
    Fault.CONNECT_TIMEOUT: (503, "upstream_unreachable", "no instance took the connection in time"),
    Fault.UNAVAILABLE: (503, "upstream_unavailable", "no instance takes requests now"),
    Fault.IDLE_RESET: (502, "upstream_broken", "the instance closed the connection"),
    Fault.DIED: (502, "upstream_broken", "the instance broke the connection before it answered"),
    Fault.GARBAGE: (502, "upstream_garbage", "the instance answered something that is not HTTP"),
    Fault.TRUNCATED: (502, "upstream_truncated", "the instance's answer ended before its end"),
    Fault.FIRST_BYTE_TIMEOUT: (504, "upstream_timeout", "the instance did not answer in time"),
    Fault.GAP_TIMEOUT: (504, "upstream_stalled", "the instance's answer stood still"),
}


class Next(StrEnum):
    """What follows a failed attempt."""

    SAME_FRESH = "same-fresh"
    OTHER = "other"
    GIVE_UP = "give-up"


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What was tried for one request: `tried` are not asked again, `fresh` is asked once more."""

    tried: frozenset[str] = frozenset()
    deaths: int = 0
    fresh: str = ""
    attempts: int = 0


FIRST = History()


def fault_of_reset(*, reused: bool, any_byte: bool, elapsed_s: float) -> Fault:
    """Name the fault of a connection that closed before its answer was whole."""
    if reused and not any_byte and elapsed_s < IDLE_RACE_S:
        return Fault.IDLE_RESET
    return Fault.DIED


def counts_against(fault: Fault) -> bool:
    """Tell whether the balancer holds a fault against the upstream."""
    return fault is not Fault.IDLE_RESET


def retry_after_s(value: bytes | None, *, epoch_s: float) -> float | None:
    """Return for how long a Retry-After asks: seconds, or a date (RFC 9110 10.2.3); None: it says
    nothing. `epoch_s` is now.
    """
    text = (value or b"").decode("latin-1").strip()
    if text.isascii() and text.isdigit() and len(text) < 10:
        return float(text)
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - epoch_s)
    except (ValueError, OverflowError):
        return None


def decide(
    fault: Fault, upstream: str, history: History, *, begun: bool, stateless: bool
) -> tuple[Next, History, Fault]:
    """Return what to do after `fault` at `upstream`, the history then, and what it really was."""
    if begun:
        return Next.GIVE_UP, history, fault
    if fault is Fault.IDLE_RESET:
        if not stateless:
            return Next.GIVE_UP, history, fault
        again = replace(history, fresh=upstream, attempts=history.attempts + 1)
        return Next.SAME_FRESH, again, fault
    if history.fresh == upstream and fault in (Fault.UNREACHABLE, Fault.CONNECT_TIMEOUT):
        # The reset was no idle timeout after all: the instance went down with this request in it.
        fault = Fault.DIED
    tried = replace(
        history, tried=history.tried | {upstream}, fresh="", attempts=history.attempts + 1
    )
    if fault in (Fault.UNREACHABLE, Fault.CONNECT_TIMEOUT, Fault.UNAVAILABLE):
        return Next.OTHER, tried, fault
    if fault is Fault.DIED and stateless and history.deaths == 0:
        return Next.OTHER, replace(tried, deaths=1), fault
    return Next.GIVE_UP, tried, fault
