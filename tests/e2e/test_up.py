"""`up` and the commands about it as a user types them: real processes, a small engine program."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import ROOT, free_ports, wait_for

from zenlaunch.procfs import threads_of

PROGRAM = str(ROOT / ".venv" / "bin" / "zenlaunch")
ENGINE = str(ROOT / "tests" / "supervise" / "engine.py")
# Sizes so small that they fit on any machine.
SMALL = ("--kv-cache", "1M", "--weights", "1M", "--overhead", "1M")
CPUS = sorted(os.sched_getaffinity(0))
FAILS = ("--ready-after", "60", "--exit-after", "0.2", "--exit-code", "3")

pytestmark = pytest.mark.timeout(240)


class World:
    """Folders and ports of one test, and what it started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_ports(4)
        self.environ = os.environ | {
            "XDG_RUNTIME_DIR": str(folder / "run"),
            "XDG_STATE_HOME": str(folder / "state"),
            "XDG_CACHE_HOME": str(folder / "cache"),
        }

    def words(self, *options: str, engine: tuple[str, ...] = ()) -> list[str]:
        return [
            PROGRAM, "up", "--engine", "command", *SMALL, "--port", str(self.port),
            "--base-port", str(self.port + 1), *options,
            "--", sys.executable, ENGINE, "--port", "{port}", *engine,
        ]  # fmt: skip

    def run(self, *words: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words, capture_output=True, text=True, check=False, timeout=timeout, env=self.environ
        )

    def zenlaunch(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self.run(PROGRAM, *words)

    def status(self) -> dict[str, Any] | None:
        done = self.zenlaunch("status", "--json")
        return json.loads(done.stdout) if done.returncode == 0 else None

    def is_ready(self) -> bool:
        status = self.status()
        return status is not None and status["state"] == "ready"

    def processes(self) -> list[int]:
        """Return whatever was started for this test and still runs."""
        mark = str(self.folder).encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                with contextlib.suppress(OSError):
                    if mark in (entry / "environ").read_bytes():
                        found.append(int(entry.name))
        return found


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    one = World(tmp_path)
    yield one
    for pid in one.processes():
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def test_in_the_background(world: World) -> None:
    started = world.run(*world.words("-d", "--instances-per-node", "1", engine=("--children", "1")))
    assert started.returncode == 0, started.stderr
    assert "default is up" in started.stdout
    status = world.status()
    assert status is not None
    assert [i["state"] for i in status["instances"]] == ["ready"]
    assert httpx.get(f"http://127.0.0.1:{world.port}/health").status_code == 200
    verified = world.zenlaunch("verify", "--json")
    assert json.loads(verified.stdout)["i0"]["threads"] > 0
    assert world.zenlaunch("logs", "i0", "-n", "1").stdout.count("\n") == 1
    follower = subprocess.Popen(
        [PROGRAM, "logs", "-f", "i0"], env=world.environ, stdout=subprocess.PIPE
    )
    assert follower.stdout is not None
    assert follower.stdout.readline() != b""
    follower.stdout.close()  # as `| head -1` does
    assert follower.wait(10) == 0
    assert world.zenlaunch("restart", "i0").stdout == "restarted: i0\n"
    assert world.zenlaunch("restart", "--rolling").stdout == "restarted: i0\n"
    assert world.zenlaunch("restart", "proxy").stdout == "restarted: proxy\n"
    unknown = world.zenlaunch("restart", "i7")
    assert (unknown.returncode, "one of i0, proxy" in unknown.stderr) == (6, True)
    after = world.status()
    assert after is not None
    assert after["instances"][0]["restarts"] == 2
    again = world.run(*world.words("-d"))
    assert again.returncode == 6
    assert "is up already" in again.stderr
    other = world.run(*world.words("--name", "other", "--port", str(world.port + 3)))
    assert other.returncode == 6
    assert "holds CPU" in other.stderr
    assert world.zenlaunch("down").stdout == "default is down\n"
    wait_for(lambda: not world.processes(), 10, "something is left")
    assert world.zenlaunch("status").returncode == 6


def test_background_arguments_stay_the_engines(world: World, tmp_path: Path) -> None:
    """What follows `--` is the engine's, also `-d`; grouped options start one deployment."""
    config = tmp_path / "c.yaml"
    config.write_text("split: {instances_per_node: 1}\n")
    words = world.words("-df", str(config), engine=("--say=-d", "--say=--detach"))
    assert world.run(*words).returncode == 0
    assert {"-d", "--detach"} <= set(world.zenlaunch("logs", "i0").stdout.splitlines())
    ours = [p for p in world.processes() if b"--background" in _command(p)]
    assert len(ours) == 1
    assert world.zenlaunch("down", "--now").returncode == 0


def test_background_start_that_fails(world: World) -> None:
    done = world.run(*world.words("-d", engine=FAILS))
    assert done.returncode == 6
    assert "died while starting (exit 3" in done.stderr
    assert world.processes() == []
    # The next failure is not told together with this one, and ends with its own status.
    with socket.socket() as s:
        s.bind(("127.0.0.1", world.port))
        done = world.run(*world.words("-d"))
    assert done.returncode == 7
    assert f"port {world.port} is" in done.stderr
    assert "exit 3" not in done.stderr


def test_a_full_disk_under_the_output_stops_nothing(world: World) -> None:
    with Path("/dev/full").open("w") as full:
        process = subprocess.Popen(world.words(), env=world.environ, stdout=full, stderr=full)
        wait_for(world.is_ready, 60, "not ready")
        again = subprocess.run(world.words(), env=world.environ, stderr=full, check=False)
        assert again.returncode == 6
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143
    assert world.processes() == []


def test_restart_of_one_that_is_tried_again_anyway(world: World) -> None:
    assert world.run(*world.words("-d")).returncode == 0

    def instance() -> dict[str, Any]:
        status = world.status()
        assert status is not None
        row: dict[str, Any] = status["instances"][0]
        return row

    for crashes in range(1, 5):  # the pause grows to two seconds at least
        wait_for(lambda: instance()["state"] == "ready", 20, "not ready")
        os.kill(instance()["pid"], signal.SIGKILL)
        wait_for(lambda n=crashes: instance()["restarts"] == n, 20, "not noticed")  # type: ignore[misc]
    assert instance()["state"] == "backoff"
    assert world.zenlaunch("restart", "i0").stdout == "restarted: i0\n"
    assert instance()["restarts"] == 4
    assert world.zenlaunch("down").returncode == 0


@pytest.mark.skipif(len(CPUS) < 2, reason="needs a CPU beside the plan's")
def test_placement_that_changes_is_told_once_and_measured(world: World) -> None:
    words = world.words("-d", "--cpus", str(CPUS[0]), "--look-every-s", "0.2")
    assert world.run(*words).returncode == 0

    def metric(name: str) -> float | None:
        text = httpx.get(f"http://127.0.0.1:{world.port}/metrics").text
        found = re.search(rf'^zenlaunch_instance_{name}{{instance="i0"}} (\S+)$', text, re.M)
        return float(found[1]) if found else None

    def said() -> int:
        return (world.folder / "state/zenlaunch/default/up.log").read_text().count("off the plan")

    wait_for(lambda: metric("problems") is not None, 10, "no proof")
    assert (metric("drifts_total"), metric("threads_off_plan"), said()) == (0, 0, 0)
    status = world.status()
    assert status is not None
    for thread in threads_of(status["instances"][0]["pid"]):
        os.sched_setaffinity(thread.tid, CPUS)
    wait_for(lambda: (metric("threads_off_plan") or 0) > 0, 10, "not noticed")
    time.sleep(0.5)  # two more looks, which must not tell it again
    assert (metric("drifts_total"), said()) == (1, 1)
    assert world.zenlaunch("verify").returncode == 6
    assert world.zenlaunch("restart", "i0").returncode == 0
    wait_for(lambda: metric("threads_off_plan") == 0, 10, "the new run is not as planned")
    assert (metric("restarts_total"), metric("drifts_total"), said()) == (1, 1, 1)
    assert world.zenlaunch("down").returncode == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals(world: World, number: signal.Signals) -> None:
    process = subprocess.Popen(world.words(), env=world.environ, stdout=subprocess.DEVNULL)
    wait_for(world.is_ready, 60, "not ready")
    process.send_signal(number)
    assert process.wait(60) == 128 + number
    assert world.processes() == []


def test_terminal_that_goes(world: World) -> None:
    """The window is closed: the kernel sends SIGHUP, and every write to the terminal fails."""
    pid, master = pty.fork()
    if pid == 0:
        os.execve(PROGRAM, world.words(), world.environ)
    reader = os.dup(master)
    os.set_blocking(reader, False)

    def ready() -> bool:
        with contextlib.suppress(OSError):
            os.read(reader, 1 << 16)
        return world.is_ready()

    wait_for(ready, 60, "not ready")
    os.close(reader)
    os.close(master)
    wait_for(lambda: os.waitpid(pid, os.WNOHANG)[0] == pid, 60, "it goes on without a terminal")
    assert world.processes() == []


def test_nohup(world: World) -> None:
    process = subprocess.Popen(
        ["nohup", *world.words()],
        env=world.environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_for(world.is_ready, 60, "not ready")
    process.send_signal(signal.SIGHUP)
    until = time.monotonic() + 2
    while time.monotonic() < until:
        assert process.poll() is None, "SIGHUP ended it under nohup"
        time.sleep(0.1)  # it must go on for the whole of this time
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143


def test_taken_port(world: World) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", world.port + 1))
        done = world.run(*world.words())
    assert done.returncode == 6
    assert f"port {world.port + 1}" in done.stderr
    assert world.processes() == []


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_dry_run_starts_nothing(world: World, zenlaunch: Callable[..., Any]) -> None:
    done = world.run(*world.words("--dry-run"))
    assert done.returncode == 0
    assert "numactl" in done.stdout
    assert world.processes() == []
