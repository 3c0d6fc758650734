"""Whatever happens to zenlaunch, no process of an instance outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from supervise.world import left_of
from zenlaunch import child

HERE = Path(__file__).parent
PYTHONPATH = os.pathsep.join((str(HERE.parent), str(HERE.parent.parent)))
TREE = ("--children", "2", "--daemon", "--ignore-term")


def wait(test: Callable[[], object], timeout_s: float = 20.0) -> None:
    until = time.monotonic() + timeout_s
    while not test():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.002)


class Up:
    """A zenlaunch that runs in a process of its own."""

    def __init__(
        self,
        folder: Path,
        *flags: str,
        start_timeout_s: float = 30.0,
        before: Callable[[], object] | None = None,
    ) -> None:
        self.name = f"outlive-{os.getpid()}-{folder.name}"
        self.out = folder / "out"
        with self.out.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / "up.py"), str(folder), self.name, "2", *flags],
                stdout=out,
                env=dict(os.environ)
                | {"PYTHONPATH": PYTHONPATH, "START_TIMEOUT_S": str(start_timeout_s)},
                start_new_session=True,
                preexec_fn=before,
            )

    def says(self, text: str) -> bool:
        return text in self.out.read_text()

    def left(self) -> list[int]:
        return left_of(self.name + "/")

    def shims(self) -> list[int]:
        ours = self.process.pid
        return [p.pid for p in child.processes() if p.parent == ours and p.session == p.pid]

    def end(self, number: int = signal.SIGKILL) -> int:
        os.kill(self.process.pid, number)
        return self.process.wait(timeout=20)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Up]]:
    started: list[Up] = []

    def begin(*flags: str, **how: Any) -> Up:
        started.append(Up(tmp_path, *flags, **how))
        return started[-1]

    yield begin
    for up in started:
        if up.process.poll() is None:
            up.end()


PHASES: dict[str, tuple[tuple[str, ...], Callable[[Up], object]]] = {
    "a shim is there": (TREE, lambda up: up.shims()),
    "a process is there": (TREE, lambda up: up.left()),
    "spawned": (TREE, lambda up: up.says("Spawned i1")),
    "loading": ((*TREE, "--never-listen"), lambda up: len(up.left()) == 10),
    "one is ready": (TREE, lambda up: up.says("BecameReady")),
    "all are ready": (TREE, lambda up: up.says("AllReady")),
}


@pytest.mark.parametrize("phase", PHASES)
def test_killed_at_each_phase_of_a_start(start: Callable[..., Up], phase: str) -> None:
    flags, reached = PHASES[phase]
    up = start(*flags)
    wait(lambda: reached(up))
    up.end()
    wait(lambda: not up.left())


def test_killed_while_it_stops(start: Callable[..., Up]) -> None:
    up = start(*TREE)
    wait(lambda: up.says("AllReady"))
    os.kill(up.process.pid, signal.SIGTERM)
    wait(lambda: up.says("Stopping"))
    up.end()
    wait(lambda: not up.left())


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)]
)
def test_ended_by_a_signal(start: Callable[..., Up], number: int, status: int) -> None:
    up = start("--children", "2", "--daemon")
    wait(lambda: up.says("AllReady"))
    assert up.end(number) == status
    assert up.left() == []


def test_a_crash_of_zenlaunch_itself(start: Callable[..., Up]) -> None:
    up = start(*TREE)
    wait(lambda: up.says("AllReady"))
    up.end(signal.SIGSEGV)
    wait(lambda: not up.left())


def test_a_stopped_shim_does_not_protect_its_tree(start: Callable[..., Up]) -> None:
    up = start(*TREE)
    wait(lambda: up.says("AllReady"))
    os.kill(up.shims()[0], signal.SIGSTOP)
    os.kill(up.process.pid, signal.SIGTERM)
    wait(lambda: up.says("Stopping"))
    assert up.end(signal.SIGTERM) == 143
    assert up.left() == []


def test_a_stopped_shim_goes_on_when_zenlaunch_is_killed(start: Callable[..., Up]) -> None:
    up = start(*TREE)
    wait(lambda: up.says("AllReady"))
    for pid in up.shims():
        os.kill(pid, signal.SIGSTOP)
    up.end()
    wait(lambda: not up.left())


def test_shim_and_zenlaunch_killed_together_leave_only_what_the_scan_finds(
    start: Callable[..., Up],
) -> None:
    up = start(*TREE)
    wait(lambda: up.says("AllReady"))
    os.kill(up.process.pid, signal.SIGSTOP)
    for pid in up.shims():
        os.kill(pid, signal.SIGKILL)
    up.end()
    wait(lambda: len(up.left()) <= 6)  # the main processes die with their shims, in a moment
    for pid in up.left():  # these are found by their marker
        os.kill(pid, signal.SIGKILL)
    wait(lambda: not up.left())


def _left_by_a_careless_parent() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGCHLD})


def test_signals_that_a_parent_ignores_or_blocks_hide_nothing(start: Callable[..., Up]) -> None:
    up = start("--children", "2", "--daemon", before=_left_by_a_careless_parent)
    wait(lambda: up.says("AllReady"))
    shim = up.shims()[0]
    os.kill(shim, signal.SIGKILL)
    wait(lambda: len(up.left()) == 10 and shim not in up.shims())
    wait(lambda: up.out.read_text().count("BecameReady") == 3)
    assert len(up.left()) == 10  # two trees of a shim, a main process, and three below
    assert up.end(signal.SIGTERM) == 143
    assert up.left() == []
