"""The retry rules as a table, and the longest histories they allow."""

from __future__ import annotations

import pytest

from zenlaunch.proxy.retry import (
    FIRST,
    Fault,
    History,
    Next,
    counts_against,
    decide,
    fault_of_reset,
    retry_after_s,
)

TABLE = [
    # fault, begun, stateless, next
    (Fault.UNREACHABLE, False, True, Next.OTHER),
    (Fault.UNREACHABLE, False, False, Next.OTHER),
    (Fault.CONNECT_TIMEOUT, False, False, Next.OTHER),
    (Fault.UNAVAILABLE, False, True, Next.OTHER),
    (Fault.IDLE_RESET, False, True, Next.SAME_FRESH),
    (Fault.IDLE_RESET, False, False, Next.GIVE_UP),
    (Fault.DIED, False, True, Next.OTHER),
    (Fault.DIED, False, False, Next.GIVE_UP),
    (Fault.FIRST_BYTE_TIMEOUT, False, True, Next.GIVE_UP),
    (Fault.GAP_TIMEOUT, False, True, Next.GIVE_UP),
    (Fault.GARBAGE, False, True, Next.GIVE_UP),
    (Fault.TRUNCATED, False, True, Next.GIVE_UP),
]


@pytest.mark.parametrize(("fault", "begun", "stateless", "expected"), TABLE)
def test_first_fault(fault: Fault, begun: bool, stateless: bool, expected: Next) -> None:
    assert decide(fault, "a", FIRST, begun=begun, stateless=stateless)[0] is expected


@pytest.mark.parametrize("fault", list(Fault))
def test_nothing_is_tried_once_begun(fault: Fault) -> None:
    assert decide(fault, "a", FIRST, begun=True, stateless=True) == (Next.GIVE_UP, FIRST, fault)


def test_one_death_is_tried_elsewhere_and_no_more() -> None:
    after, history, _ = decide(Fault.DIED, "a", FIRST, begun=False, stateless=True)
    assert after is Next.OTHER
    assert history == History(tried=frozenset("a"), deaths=1, attempts=1)
    assert decide(Fault.DIED, "b", history, begun=False, stateless=True)[0] is Next.GIVE_UP
    # An instance that cannot be reached never had the request: that does not use the try up.
    after, history, _ = decide(Fault.UNREACHABLE, "b", history, begun=False, stateless=True)
    assert after is Next.OTHER
    assert history.tried == frozenset("ab")


def test_reset_then_refused_was_a_death() -> None:
    after, history, _ = decide(Fault.IDLE_RESET, "a", FIRST, begun=False, stateless=True)
    assert after is Next.SAME_FRESH
    after, history, fault = decide(Fault.UNREACHABLE, "a", history, begun=False, stateless=True)
    assert (after, fault, history.deaths) == (Next.OTHER, Fault.DIED, 1)
    _, history, _ = decide(Fault.IDLE_RESET, "b", history, begun=False, stateless=True)
    after, history, fault = decide(Fault.UNREACHABLE, "b", history, begun=False, stateless=True)
    assert (after, fault) == (Next.GIVE_UP, Fault.DIED)
    assert history.attempts == 4


@pytest.mark.parametrize(
    ("reused", "any_byte", "elapsed_s", "fault"),
    [
        (True, False, 0.001, Fault.IDLE_RESET),
        (True, False, 10.0, Fault.DIED),
        (True, True, 0.001, Fault.DIED),
        (False, False, 0.001, Fault.DIED),
    ],
)
def test_which_resets_are_idle_timeouts(
    reused: bool, any_byte: bool, elapsed_s: float, fault: Fault
) -> None:
    assert fault_of_reset(reused=reused, any_byte=any_byte, elapsed_s=elapsed_s) is fault


def test_only_idle_resets_are_nobodys_fault() -> None:
    assert [fault for fault in Fault if not counts_against(fault)] == [Fault.IDLE_RESET]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (b"7", 7), (b" 7 ", 7), (b"0", 0), (b"Thu, 01 Jan 1970 00:20:00 GMT", 200),
        (b"Thursday, 01-Jan-70 00:20:00 GMT", 200), (b"Thu Jan  1 00:20:00 1970", 200),
        (b"Thu, 01 Jan 1970 00:00:00 GMT", 0), (None, None), (b"", None), (b"soon", None),
        (b"-5", None), (b"1.5", None), (b"9" * 400, None), (b"\xb2", None),
        (b"Thu, 99 Jan 1970 00:20:00 GMT", None), (b"Thu, 01 Jan 99999999999 00:20:00 GMT", None),
    ],
)  # fmt: skip
def test_retry_after(value: bytes | None, expected: float | None) -> None:
    assert retry_after_s(value, epoch_s=1000) == expected
