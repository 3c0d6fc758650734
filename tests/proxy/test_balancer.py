"""The balancer: tables and histories, and random event runs that keep its invariants."""

from __future__ import annotations

import random

import pytest

from zenlaunch.config import Policy
from zenlaunch.proxy.balancer import Balancer, Lease, Outcome, Rules, State, Verdict

OK, BAD, MEH = Outcome.SUCCESS, Outcome.FAILURE, Outcome.NEUTRAL


def ready(
    names: str = "abc", *, policy: Policy = Policy.LEAST_INFLIGHT, **rules: object
) -> Balancer:
    balancer = Balancer(names, policy=policy, rules=Rules(**rules))  # type: ignore[arg-type]
    for name in names:
        assert balancer.probe_answered(name)
    return balancer


def take(balancer: Balancer, now: float = 0.0, *exclude: str) -> Lease:
    choice = balancer.acquire(now, exclude=frozenset(exclude))
    assert choice.lease is not None, choice.verdict
    return choice.lease


def state(balancer: Balancer, name: str, now: float = 0.0) -> State:
    return next(view.state for view in balancer.views(now) if view.name == name)


def fail(balancer: Balancer, name: str, now: float, times: int = 1) -> None:
    for _ in range(times):
        balancer.release(balancer.lease(name), BAD, now)


def test_nobody_is_usable_before_a_probe_answered() -> None:
    balancer = Balancer("ab")
    assert balancer.acquire(0).verdict is Verdict.NONE_USABLE
    assert state(balancer, "a") is State.STARTING
    balancer.probe_answered("b")
    assert take(balancer).upstream == "b"
    assert not balancer.probe_answered("b"), "only the change is news"


def test_idle_pair_alternates() -> None:
    balancer = ready("ab")
    order = []
    for _ in range(6):
        lease = take(balancer)
        order.append(lease.upstream)
        balancer.release(lease, OK, 0)
    assert "".join(order) == "ababab"


def test_least_inflight_takes_the_emptiest() -> None:
    balancer = ready("abc")
    a, b, c = take(balancer), take(balancer), take(balancer)
    take(balancer)
    assert {a.upstream, b.upstream, c.upstream} == set("abc")
    balancer.release(c, OK, 0)
    assert take(balancer).upstream == c.upstream


def test_round_robin_is_strict_whatever_the_load() -> None:
    balancer = ready("abc", policy=Policy.ROUND_ROBIN)
    leases = [take(balancer) for _ in range(7)]
    assert "".join(lease.upstream for lease in leases) == "abcabca"
    balancer.drain("c")
    assert [take(balancer).upstream for _ in range(3)] == ["b", "a", "b"]


def test_repr_shows_the_counts() -> None:
    balancer = ready("ab")
    take(balancer)
    assert repr(balancer) == "<Balancer least-inflight a:1, b:0>"


def test_k_failures_eject_for_a_while_that_doubles() -> None:
    balancer = ready("ab", eject_after=3, eject_s=5, eject_max_s=15)
    fail(balancer, "a", 0, 2)
    assert state(balancer, "a") is State.READY
    fail(balancer, "a", 0)
    assert state(balancer, "a", 4.9) is State.EJECTED
    assert {take(balancer, 4).upstream for _ in range(20)} == {"b"}
    assert state(balancer, "a", 5) is State.HALF_OPEN
    fail(balancer, "a", 5)  # the trial
    assert state(balancer, "a", 14.9) is State.EJECTED
    assert state(balancer, "a", 15) is State.HALF_OPEN
    fail(balancer, "a", 15)
    assert state(balancer, "a", 29.9) is State.EJECTED, "15 s at most"
    assert state(balancer, "a", 30.1) is State.HALF_OPEN


def test_half_open_lets_one_request_try() -> None:
    balancer = ready("ab", eject_after=1, eject_s=5)
    fail(balancer, "a", 0)
    others = [take(balancer, 6) for _ in range(5)]
    trials = [lease for lease in others if lease.upstream == "a"]
    assert len(trials) == 1
    assert trials[0].trial
    balancer.release(trials[0], OK, 7)
    assert state(balancer, "a", 7) is State.READY
    assert take(balancer, 7).upstream == "a"


def test_neutral_end_of_a_trial_proves_nothing() -> None:
    balancer = ready("ab", eject_after=1, eject_s=5)
    fail(balancer, "a", 0)
    lease = balancer.lease("a")
    balancer.release(lease, MEH, 6)
    assert state(balancer, "a", 6) is State.HALF_OPEN


def test_success_of_a_request_from_before_the_ejection_proves_nothing() -> None:
    balancer = ready("ab", eject_after=1, eject_s=5)
    old = balancer.lease("a")
    fail(balancer, "a", 0)
    balancer.release(old, OK, 1)
    assert state(balancer, "a", 1) is State.EJECTED


def test_the_last_one_is_never_ejected() -> None:
    balancer = ready("ab", eject_after=1, eject_s=5)
    fail(balancer, "a", 0)
    fail(balancer, "b", 0, 50)
    assert state(balancer, "b") is State.READY
    alone = ready("a", eject_after=1)
    fail(alone, "a", 0, 50)
    assert take(alone, 0).upstream == "a"


def test_the_ejected_serve_when_nobody_else_can() -> None:
    balancer = ready("ab", eject_after=1, eject_s=50)
    fail(balancer, "a", 0)
    balancer.probe_missed("b", decisive=True)
    assert take(balancer, 1).upstream == "a"
    assert take(balancer, 1).upstream == "a"


def test_the_ejected_do_not_serve_while_others_are_only_busy() -> None:
    balancer = ready("ab", eject_after=1, eject_s=50, max_in_flight_per_upstream=1)
    fail(balancer, "a", 0)
    take(balancer, 1)
    assert balancer.acquire(1).verdict is Verdict.BUSY


def test_failures_weigh_before_they_eject() -> None:
    balancer = ready("ab", penalty=8, penalty_s=10)
    fail(balancer, "a", 0)
    assert [take(balancer, 1).upstream for _ in range(8)] == ["b"] * 8
    assert take(balancer, 11).upstream == "a", "forgotten after a while"


@pytest.mark.parametrize("outcome", [OK, MEH])
def test_praise_and_neutral_never_eject(outcome: Outcome) -> None:
    balancer = ready("ab", eject_after=1)
    for _ in range(20):
        balancer.release(balancer.lease("a"), outcome, 0)
    assert state(balancer, "a") is State.READY


def test_retry_after_is_honoured_within_reason() -> None:
    balancer = ready("ab", retry_after_max_s=60)
    balancer.release(balancer.lease("a"), BAD, 0, retry_after_s=20)
    assert state(balancer, "a", 19) is State.EJECTED
    assert balancer.retry_after_s(5.5) == 15
    assert state(balancer, "a", 20) is State.READY
    balancer.release(balancer.lease("a"), BAD, 100, retry_after_s=10_000)
    assert state(balancer, "a", 161) is State.READY
    assert balancer.retry_after_s(161) == 2


def test_success_does_not_cut_short_what_an_upstream_asked_for() -> None:
    balancer = ready("ab")
    other = balancer.lease("a")
    balancer.release(balancer.lease("a"), BAD, 0, retry_after_s=20)
    balancer.release(other, OK, 1)
    assert state(balancer, "a", now=19) is State.EJECTED
    assert [take(balancer, 19).upstream for _ in range(3)] == ["b", "b", "b"]
    assert state(balancer, "a", now=20) is State.READY


def test_one_that_rests_serves_when_nobody_else_can() -> None:
    balancer = ready("ab")
    balancer.rest("a", 10)
    assert [take(balancer).upstream for _ in range(3)] == ["b", "b", "b"]
    assert state(balancer, "a") is State.EJECTED
    assert balancer.in_flight_at("b") == 3
    balancer.probe_missed("b", decisive=True)
    assert take(balancer).upstream == "a"
    assert state(balancer, "a", now=10) is State.READY


def test_limits() -> None:
    balancer = ready("ab", max_in_flight_per_upstream=2, max_in_flight=3)
    leases = [take(balancer) for _ in range(3)]
    assert balancer.acquire(0).verdict is Verdict.BUSY
    balancer.release(leases[0], OK, 0)
    take(balancer)
    per_upstream = ready("a", max_in_flight_per_upstream=1)
    take(per_upstream)
    assert per_upstream.acquire(0).verdict is Verdict.BUSY


def test_exclude() -> None:
    balancer = ready("abc")
    assert take(balancer, 0, "a", "b").upstream == "c"
    assert balancer.acquire(0, exclude=frozenset("abc")).verdict is Verdict.NONE_USABLE


def test_probes() -> None:
    balancer = ready("ab", probe_misses=3)
    assert not balancer.probe_missed("a", decisive=False)
    assert not balancer.probe_missed("a", decisive=False)
    balancer.probe_answered("a")
    assert not balancer.probe_missed("a", decisive=False), "counted anew after an answer"
    assert not balancer.probe_missed("a", decisive=False)
    assert balancer.probe_missed("a", decisive=False)
    assert state(balancer, "a") is State.UNREADY
    assert balancer.probe_missed("b", decisive=True)
    assert balancer.usable() == ()
    assert not balancer.probe_missed("b", decisive=True), "only the change is news"


def test_coming_back_forgives() -> None:
    balancer = ready("ab", eject_after=1, eject_s=100)
    fail(balancer, "a", 0)
    balancer.probe_missed("a", decisive=True)
    balancer.probe_answered("a")
    assert state(balancer, "a") is State.READY
    assert balancer.is_ready("a")


def test_drain_and_resume() -> None:
    balancer = ready("ab")
    lease = balancer.lease("a")
    assert balancer.drain("a") == 1
    assert {take(balancer).upstream for _ in range(4)} == {"b"}
    assert state(balancer, "a") is State.DRAINING
    balancer.release(lease, OK, 0)
    assert balancer.resume("a") == 0
    assert take(balancer).upstream == "a"
    with pytest.raises(KeyError):
        balancer.drain("z")
    with pytest.raises(KeyError):
        balancer.resume("z")


def test_members_can_change_under_way() -> None:
    balancer = ready("ab")
    lease = balancer.lease("a")
    balancer.set_members("bc", 0)
    assert balancer.names == ("b", "c")
    assert take(balancer).upstream == "b"
    balancer.release(lease, OK, 0)
    assert balancer.in_flight == 1


def test_another_engine_under_the_name_begins_anew() -> None:
    balancer = ready("ab", eject_after=1)
    balancer.drain("a")
    old = balancer.lease("a")
    balancer.set_members("ab", 0, replaced="a")
    assert state(balancer, "a") is State.STARTING
    balancer.probe_answered("a")
    assert take(balancer).upstream == "a"
    assert not balancer.release(old, BAD, 0)
    assert [(v.state, v.in_flight, v.errors) for v in balancer.views(0)] == [
        (State.READY, 1, 0), (State.READY, 0, 0)]  # fmt: skip
    assert balancer.in_flight == 1


def test_new_ones_are_worth_a_moment_when_nobody_else_is_there() -> None:
    balancer = ready("a")
    balancer.set_members("bc", 10)
    assert balancer.acquire(10).verdict is Verdict.BUSY
    assert balancer.acquire(10, exclude=frozenset("bc")).verdict is Verdict.NONE_USABLE
    assert balancer.acquire(11).verdict is Verdict.NONE_USABLE
    balancer.probe_missed("b", decisive=True)
    assert balancer.acquire(10).verdict is Verdict.BUSY
    balancer.probe_missed("c", decisive=False)
    assert balancer.acquire(10).verdict is Verdict.NONE_USABLE
    balancer.probe_answered("c")
    assert balancer.acquire(10).verdict is Verdict.PICKED


@pytest.mark.parametrize("seed", range(20))
def test_random_runs_keep_the_invariants(seed: int) -> None:
    rng = random.Random(seed)
    policy = rng.choice(list(Policy))
    balancer = ready("abcd", policy=policy, max_in_flight_per_upstream=rng.choice([None, 3]),
                     max_in_flight=rng.choice([None, 9]))  # fmt: skip
    held: list[Lease] = []
    now = 0.0
    for _ in range(2000):
        now += rng.random()
        name = rng.choice("abcd")
        match rng.randrange(8):
            case 0 | 1 | 2:
                usable = balancer.usable()
                choice = balancer.acquire(now)
                assert (choice.lease is not None) == (choice.verdict is Verdict.PICKED)
                if choice.lease is not None:
                    assert choice.lease.upstream in usable
                    held.append(choice.lease)
                elif choice.verdict is Verdict.NONE_USABLE:
                    assert not usable
            case 3 | 4:
                if held:
                    lease = held.pop(rng.randrange(len(held)))
                    after = rng.choice([None, None, 3.0])
                    balancer.release(lease, rng.choice(list(Outcome)), now, retry_after_s=after)
            case 5:
                balancer.probe_answered(name)
            case 6:
                balancer.probe_missed(name, decisive=rng.random() < 0.3)
            case 7:
                rng.choice([balancer.drain, balancer.resume])(name)
        views = balancer.views(now)
        assert sum(view.in_flight for view in views) == balancer.in_flight == len(held)
        assert all(view.in_flight == sum(h.upstream == view.name for h in held) for view in views)
        assert balancer.retry_after_s(now) >= 1
    for lease in held:
        balancer.release(lease, OK, now)
    assert balancer.in_flight == 0
    assert all(view.in_flight == 0 for view in balancer.views(now))
