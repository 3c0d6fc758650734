"""Two hundred seeded bad events over four engines; after each the kernel is asked what is there."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections import defaultdict
from pathlib import Path

from supervise.world import Running, deployment, engine, left_of, poll
from zenlaunch import child, events
from zenlaunch.lifecycle import State

EVENTS = 200
SEED = int(os.environ.get("ZENLAUNCH_CHAOS_SEED", "20"))
NAMES = ("i0", "i1", "i2", "i3")
HANG_S = 0.6


def trees() -> dict[str, dict[str, list[int]]]:
    """Return instance -> run -> pids, as the environment of live processes says."""
    found: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for pid in left_of("chaos/"):
        marker = child.marker_of(pid)
        if marker is not None:
            _, name, run = marker.split("/")
            found[name][run].append(pid)
    return found


class Chaos:
    def __init__(self, running: Running, chance: random.Random) -> None:
        self.r = running
        self.chance = chance
        self.stopped: set[int] = set()

    def pids(self, name: str) -> list[int]:
        """Return shim, main and children of the present run, as far as they are there."""
        row = next(m for m in self.r.supervisor.status() if m.name == name)
        if row.pid is None or row.session is None:
            return []
        return [row.session, *child.tree(row.pid)]

    def strike(self) -> None:
        """Do one bad thing to one instance."""
        name = self.chance.choice(NAMES)
        pids = self.pids(name)
        kind = self.chance.choice(
            ("kill", "kill", "segv", "term", "stop", "shim", "child", "restart", "roll", "all")
        )
        if kind == "restart":
            self.r.supervisor.restart(name)
        elif kind == "roll":
            self.r.supervisor.roll()
        elif len(pids) >= 2:
            shim, main, *rest = pids
            targets = {"shim": [shim], "child": rest[:1], "all": pids}.get(kind, [main])
            numbers = {"segv": signal.SIGSEGV, "term": signal.SIGTERM, "stop": signal.SIGSTOP}
            for pid in targets:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, numbers.get(kind, signal.SIGKILL))

    def check(self) -> None:
        """At most one live tree an instance, whatever is going on."""
        for name, runs in trees().items():
            assert len(runs) <= 1, f"two trees of {name}: {dict(runs)}"

    def settled(self) -> bool:
        """The state shown is the kernel's: all ready, each pid the main process of its tree."""
        rows = self.r.supervisor.status()
        if any(m.state is not State.READY for m in rows) or self.r.supervisor.rolling:
            return False
        found = trees()
        return all(m.pid in next(iter(found[m.name].values()), []) for m in rows)


def test_two_hundred_bad_events_leave_four_whole_instances(tmp_path: Path) -> None:
    chance = random.Random(SEED)

    async def scene() -> None:
        flags = ("--children", "1", "--drain", "1")
        specs = [engine(name, *flags, hang_s=HANG_S, start_timeout_s=4.0) for name in NAMES]
        wanted = deployment(
            tmp_path,
            *specs,
            name="chaos",
            policy={"restart_tries": 10_000, "backoff_first_s": 0.02, "backoff_most_s": 0.1},
        )
        async with Running(wanted) as r:
            await r.all_ready()
            chaos = Chaos(r, chance)
            for number in range(EVENTS):
                chaos.strike()
                chaos.check()
                await asyncio.sleep(chance.choice((0, 0, 0.02, 0.1)))
                if number % 25 == 24:
                    await r.until(chaos.settled, timeout_s=60)
            await r.until(chaos.settled, timeout_s=60)
            assert sum(m.restarts for m in r.supervisor.status()) > EVENTS / 8
            assert not r.of(events.Warned)
            r.supervisor.stop()
            assert (await r.outcome()).exit_code == 0
        await poll(lambda: not left_of("chaos/"))
        assert not [p for p in child.processes() if p.parent == os.getpid() and p.state == "Z"]

    asyncio.run(scene())
