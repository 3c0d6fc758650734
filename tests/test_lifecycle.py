"""lifecycle: table rows, histories, seeded random runs against a small world with invariants."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from zenlaunch import lifecycle as lc
from zenlaunch.lifecycle import (
    Begin,
    Doomed,
    Drain,
    Drained,
    Exited,
    Finish,
    GaveUp,
    Kill,
    Member,
    Policy,
    Ready,
    Restart,
    Resume,
    Role,
    Roll,
    RollEnded,
    Spawn,
    State,
    Stop,
    System,
    Terminate,
    Tick,
    Unready,
    step,
)

POLICY = Policy(backoff_first_s=2.0, backoff_most_s=16.0, grace_s=10.0, restart_tries=3)


def system(*names: str, proxy: bool = True, key: str | None = None, **fields: object) -> System:
    members = [Member(name=n, start_timeout_s=100.0, drain_s=30.0, cache_key=key) for n in names]
    if proxy:
        members.append(Member(name="proxy", role=Role.PROXY, start_timeout_s=100.0, drain_s=5.0))
    cold = frozenset({key}) if key else frozenset()
    return replace(System(members=tuple(members), policy=POLICY, cold=cold), **fields)  # type: ignore[arg-type]


def play(start: System, *events: lc.Event | float) -> tuple[System, list[lc.Action]]:
    """Apply events; a number is a time to go to. Returns the end and the last one's actions."""
    now, actions = 0.0, ()
    for event in events:
        if isinstance(event, float):
            now = event
        else:
            start, actions = step(start, event, now)
    return start, list(actions)


def states(s: System) -> str:
    return " ".join(m.state for m in s.members)


UP = (Begin(), Ready("proxy"), Ready("a"), Ready("b"))


@pytest.mark.parametrize(
    ("why", "events", "actions", "end"),
    [
        ("all together", [Begin()], [Spawn("a"), Spawn("b"), Spawn("proxy")],
         "starting starting starting"),
        ("ready", UP, [Resume("b")], "ready ready ready"),
        ("a proxy that comes late is told who is ready", [Begin(), Ready("b"), Ready("proxy")],
         [Resume("b")], "starting ready ready"),
        ("ready is told twice", [*UP, Ready("b")], [], "ready ready ready"),
        ("no answer", [*UP, Unready("a")], [], "unready ready ready"),
        ("an answer again", [*UP, Unready("a"), Ready("a")], [], "ready ready ready"),
        ("died while starting: everything ends", [Begin(), Ready("proxy"), Ready("b"), Exited("a")],
         [GaveUp("a", True), Drain("b")], "failed draining ready"),
        ("died while starting: brothers that start are killed",
         [Begin(), Ready("proxy"), Exited("a")],
         [GaveUp("a", True), Kill("b")], "failed stopping ready"),
        ("the proxy goes last", [Begin(), Ready("proxy"), Exited("a"), Exited("b")],
         [Terminate("proxy")], "failed stopped stopping"),
        ("and then it is over",
         [Begin(), Ready("proxy"), Exited("a"), Exited("b"), Exited("proxy")],
         [Finish(6)], "failed stopped stopped"),
        ("the proxy died while starting", [Begin(), Exited("proxy")],
         [GaveUp("proxy", True), Kill("a"), Kill("b")], "stopping stopping failed"),
        ("not ready in time", [Begin(), Ready("b"), Ready("proxy"), 100.0, Tick()],
         [Kill("a")], "stopping ready ready"),
        ("crashed later: that one alone", [*UP, Exited("a")], [], "backoff ready ready"),
        ("and again after a pause", [*UP, Exited("a"), 1.0, Tick()], [Spawn("a")],
         "starting ready ready"),
        ("not before", [*UP, Exited("a", 0.5), 1.4, Tick()], [], "backoff ready ready"),
        ("hung", [*UP, Doomed("a", "hung")], [Kill("a")], "stopping ready ready"),
        ("hung counts as a failure", [*UP, Doomed("a", "hung"), Exited("a")], [],
         "backoff ready ready"),
        ("doomed twice is killed once", [*UP, Doomed("a", "x"), Doomed("a", "y")], [],
         "stopping ready ready"),
        ("stop drains first", [*UP, Stop()], [Drain("a"), Drain("b")], "draining draining ready"),
        ("one SIGTERM when drained", [*UP, Stop(), Drained("a")], [Terminate("a")],
         "stopping draining ready"),
        ("drained is told twice", [*UP, Stop(), Drained("a"), Drained("a")], [],
         "stopping draining ready"),
        ("a drain has an end", [*UP, Stop(), 30.0, Tick()], [Terminate("a"), Terminate("b")],
         "stopping stopping ready"),
        ("so has patience", [*UP, Stop(), Drained("a"), 10.0, Tick()], [Kill("a")],
         "stopping draining ready"),
        ("a second stop kills", [*UP, Stop(), Drained("a"), Stop()],
         [Kill("a"), Kill("b"), Kill("proxy")], "stopping stopping stopping"),
        ("a third does nothing", [*UP, Stop(), Stop(), Stop()], [], "stopping stopping stopping"),
        ("hurry", [*UP, Stop(3, hurry=True)], [Kill("a"), Kill("b"), Kill("proxy")],
         "stopping stopping stopping"),
        ("stop before the begin", [Stop(5)], [Finish(5)], "stopped stopped stopped"),
        ("stop while backing off", [*UP, Exited("a"), Stop(), Drained("b"), Exited("b")],
         [Terminate("proxy")], "stopped stopped stopping"),
        ("a crash while stopping is an end", [*UP, Stop(), Exited("a")], [],
         "stopped draining ready"),
        ("restart", [*UP, Restart("a")], [Drain("a")], "draining ready ready"),
        ("restart comes again", [*UP, Restart("a"), Drained("a"), Exited("a")], [Spawn("a")],
         "starting ready ready"),
        ("restart while starting", [Begin(), Restart("a")], [Kill("a")],
         "stopping starting starting"),
        ("restart ends a pause", [*UP, Exited("a"), Restart("a")], [Spawn("a")],
         "starting ready ready"),
        ("a crash in a drain does not count", [*UP, Restart("a"), Exited("a")], [Spawn("a")],
         "starting ready ready"),
        ("restart of the proxy", [*UP, Restart("proxy")], [Terminate("proxy")],
         "ready ready stopping"),
        ("no restart while stopping", [*UP, Stop(), Restart("a")], [], "draining draining ready"),
        ("a late exit", [*UP, Exited("a"), Exited("a")], [], "backoff ready ready"),
        ("roll: one", [*UP, Roll(("a", "b"))], [Drain("a")], "draining ready ready"),
        ("roll: the next when the first is ready",
         [*UP, Roll(("a", "b")), Drained("a"), Exited("a"), Ready("a")],
         [Resume("a"), Drain("b")], "ready draining ready"),
        ("roll: the end",
         [*UP, Roll(("a", "b")), Drained("a"), Exited("a"), Ready("a"),
          Drained("b"), Exited("b"), Ready("b")],
         [Resume("b"), RollEnded(None)], "ready ready ready"),
        ("roll: stops where one does not come back",
         [*UP, Roll(("a", "b")), Drained("a"), Exited("a"), Exited("a")],
         [RollEnded("a", ("b",))], "backoff ready ready"),
        ("roll: not twice", [*UP, Roll(("a", "b")), Roll(("b",))], [], "draining ready ready"),
        ("a tick with nothing due", [*UP, 50.0, Tick()], [], "ready ready ready"),
    ],
)  # fmt: skip
def test_rows(why: str, events: list[lc.Event | float], actions: list[lc.Action], end: str) -> None:
    s, last = play(system("a", "b"), *events)
    assert (last, states(s)) == (actions, end), why


def test_without_a_proxy_the_engine_drains_itself() -> None:
    s, actions = play(system("a", proxy=False), Begin(), Ready("a"), Stop())
    assert actions == [Terminate("a")]
    assert s.deadline == 40.0  # its drain and the grace


def test_the_first_of_a_cold_cache_starts_alone() -> None:
    s, actions = play(system("a", "b", "c", proxy=False, key="k"), Begin())
    assert actions == [Spawn("a")]
    s, actions = play(s, Ready("a"))
    assert actions == [Resume("a"), Spawn("b"), Spawn("c")]
    assert s.cold == frozenset()


def test_another_one_leads_when_the_first_fails_for_good() -> None:
    policy = replace(POLICY, keep_going=True)
    s, actions = play(system("a", "b", proxy=False, key="k", policy=policy), Begin(), Exited("a"))
    assert actions == [GaveUp("a", True), Spawn("b")]
    s, actions = play(s, Exited("b"))
    assert actions == [GaveUp("b", True), Finish(6)]


def test_a_failed_one_can_be_started_again_by_hand() -> None:
    policy = replace(POLICY, keep_going=True)
    s, actions = play(
        system("a", "b", proxy=False, policy=policy), Begin(), Ready("b"), Exited("a"), Restart("a")
    )
    assert actions == [Spawn("a")]
    assert s.member("a").failures == 0


def test_several_tries_before_it_is_never_ready() -> None:
    policy = replace(POLICY, start_tries=2)
    s, actions = play(system("a", proxy=False, policy=policy), Begin(), Exited("a"))
    assert states(s) == "backoff"
    s, actions = play(s, 5.0, Tick(), Exited("a"))
    assert actions == [GaveUp("a", True), Finish(6)]


def test_failures_in_a_row_back_off_and_give_up_and_a_good_run_forgives() -> None:
    s, _ = play(system("a", "b", proxy=False), Begin(), Ready("a"), Ready("b"))
    now, pauses = 0.0, []
    for _ in range(3):
        s, _ = step(s, Exited("a", 0.0), now)
        pauses.append((s.member("a").deadline or 0) - now)
        now = s.member("a").deadline or 0
        s, _ = step(s, Tick(), now)
    assert pauses == [1.0, 2.0, 4.0]
    s, _ = step(s, Ready("a"), now)
    forgiven, _ = step(s, Exited("a"), now + POLICY.good_run_s)
    assert forgiven.member("a").failures == 1
    s, actions = step(s, Exited("a"), now + 1)
    assert list(actions) == [GaveUp("a", False)]
    assert s.exit_code is None  # the other one serves on
    s, actions = play(s, Exited("b"), 1e3, Tick(), Exited("b"), 2e3, Tick(), Exited("b"), 3e3)
    s, actions = play(s, 3e3, Tick(), Exited("b"))
    assert actions == [GaveUp("b", False), Finish(6)]


@pytest.mark.parametrize("failures", range(1, 40))
def test_a_pause_is_between_half_and_whole_and_bounded(failures: int) -> None:
    whole = min(16.0, 2.0**failures)
    assert lc.backoff_s(POLICY, failures, 0.0) == whole / 2
    assert whole / 2 < lc.backoff_s(POLICY, failures, 0.999) < whole


def test_an_unknown_name_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        step(system("a"), Ready("nobody"), 0.0)


class World:
    """Trees that live and die as a kernel would have it; checks every action against them."""

    def __init__(self, chance: random.Random, start: System) -> None:
        self.chance = chance
        self.system = start
        self.now = 0.0
        self.trees: dict[str, str] = {}  # name -> running, dying
        self.termed: set[str] = set()
        self.drained: set[str] = set()
        self.finished: int | None = None

    def feed(self, event: lc.Event) -> None:
        assert self.finished is None
        before = self.system
        self.system, actions = step(before, event, self.now)
        for action in actions:
            match action:
                case Spawn(name):
                    assert name not in self.trees, "two trees of one instance"
                    assert self.system.exit_code is None
                    self.trees[name] = "running"
                    self.termed.discard(name)
                    self.drained.discard(name)
                case Terminate(name):
                    assert name not in self.termed, "a second SIGTERM loses the drain"
                    assert before.member(name).state is not State.STARTING
                    self.termed.add(name)
                case Kill(name):
                    assert name in self.trees
                    self.trees[name] = "dying"
                case Drain(name):
                    assert self.system.proxy_serves
                    self.drained.add(name)
                case Finish(code):
                    self.finished = code
                    assert not self.trees
        self.check()

    def check(self) -> None:
        for member in self.system.members:
            alive = member.name in self.trees
            assert (member.state in lc.ALIVE) is alive, member
            if member.state in (State.STARTING, State.DRAINING, State.BACKOFF):
                assert member.deadline is not None
            if member.state in (*lc.SERVING, *lc.AT_REST):
                assert member.deadline is None
        leaders = [
            m for m in self.system.members
            if m.state is State.STARTING and m.cache_key in self.system.cold
        ]  # fmt: skip
        assert len(leaders) <= 1

    def random_event(self) -> lc.Event:
        chance = self.chance
        name = chance.choice(self.system.members).name
        alive = name in self.trees
        kinds: list[lc.Event] = [Tick(), Restart(name), Roll(("a", "b", "c")), Unready(name)]
        if alive and self.trees[name] == "running":
            kinds += [Ready(name)] * 6 + [Doomed(name, "hung"), Drained(name)]
        if alive:
            kinds += [Exited(name, chance.random())] * (6 if self.trees[name] == "dying" else 2)
        event = chance.choice(kinds)
        if isinstance(event, Exited):
            del self.trees[event.name]
        return event


@pytest.mark.parametrize("seed", range(150))
def test_random_runs_keep_the_invariants_and_can_always_be_stopped(seed: int) -> None:
    chance = random.Random(seed)
    policy = replace(POLICY, keep_going=chance.random() < 0.8, start_tries=chance.randint(1, 3))
    key = "k" if chance.random() < 0.5 else None
    world = World(chance, system("a", "b", "c", key=key, policy=policy))
    world.feed(Begin())
    for _ in range(200):
        if world.finished is not None:
            return
        world.now += chance.choice((0.0, 0.1, 1.0, 20.0, 700.0))
        world.feed(world.random_event())
    if world.finished is None:
        world.feed(Stop(143))
    for _ in range(50):
        if world.finished is not None:
            break
        if world.system.deadline is not None:
            world.now = max(world.now, world.system.deadline)
            world.feed(Tick())
        for name in [n for n, s in world.trees.items() if s == "dying" or n in world.termed]:
            if world.finished is None:
                del world.trees[name]
                world.feed(Exited(name))
    assert world.finished in (6, 7, 143)
    assert not world.trees
