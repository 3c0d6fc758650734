"""A proxy replaced under load: no request is refused or delayed, old streams come to their end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from supervise.world import ENGINE, free_port


def wait_for(test: Callable[[], Any], timeout_s: float = 60.0) -> Any:
    until = time.monotonic() + timeout_s
    while not (value := test()):
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.02)
    return value


def get(port: int, path: str, timeout_s: float = 20.0) -> Any:
    try:
        url = f"http://127.0.0.1:{port}{path}"
        with urllib.request.urlopen(url, timeout=timeout_s) as answer:
            return json.load(answer)
    except (OSError, ValueError):
        return None


def proxies(socket_path: Path) -> list[int]:
    """Return the running proxies that were given this admin socket."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().split(b"\0")
            state = (path / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if str(socket_path).encode() in words and state != "Z":
            found.append(int(path.name))
    return sorted(found)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[tuple[int, Path, subprocess.Popen[bytes]]]:
    engine_port, port = free_port(), free_port() + 20
    admin = tmp_path / "proxy.sock"
    engine = subprocess.Popen([sys.executable, "-S", str(ENGINE), "--port", str(engine_port)])
    command = [sys.executable, "-m", "zenlaunch", "proxy", "--listen", f"127.0.0.1:{port}"]
    with (tmp_path / "log").open("wb") as log:
        proxy = subprocess.Popen(
            [*command, "--admin-socket", str(admin), "--upstream",
             f"http://127.0.0.1:{engine_port}"],
            env={**os.environ, "PYTHONPATH": str(tmp_path)},  # for what a test puts there
            stderr=log,
        )  # fmt: skip
    try:
        wait_for(lambda: (get(port, "/health") or {}).get("status") == "ok")
        yield port, admin, proxy
    finally:
        for pid in proxies(admin):
            os.kill(pid, signal.SIGKILL)
        engine.kill()
        engine.wait()
        proxy.wait()


class Stream(threading.Thread):
    """One long stream; `lines` is what came of it."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self.lines: list[str] = []
        body = json.dumps({"model": "m", "messages": [], "stream": True, "max_tokens": 100})
        self.request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/chat/completions",
            body.encode(),
            {"content-type": "application/json"},
        )

    def run(self) -> None:
        with urllib.request.urlopen(self.request, timeout=60) as answer:
            for line in answer:
                if line.strip():
                    self.lines.append(line.decode().strip())


def test_handover_under_load(world: tuple[int, Path, subprocess.Popen[bytes]]) -> None:
    port, admin, proxy = world
    stream = Stream(port)
    stream.start()
    wait_for(lambda: stream.lines)
    waits: list[float] = []
    proxy.send_signal(signal.SIGUSR2)
    while len(proxies(admin)) < 2 or proxy.pid in proxies(admin):
        began = time.monotonic()
        assert (get(port, "/v1/models") or {}).get("data"), "a request was refused"
        waits.append(time.monotonic() - began)
        if proxy.poll() is not None:
            break
    stream.join(60)
    assert stream.lines[-1] == "data: [DONE]"
    assert len(stream.lines) == 101
    assert proxy.wait(30) == 0
    assert max(waits) < 1.0
    (successor,) = proxies(admin)
    assert successor != proxy.pid
    assert admin.is_socket()
    assert get(port, "/health")["status"] == "ok"
    os.kill(successor, signal.SIGTERM)
    wait_for(lambda: not proxies(admin))
    assert not admin.exists()


def test_successor_that_fails_changes_nothing(
    world: tuple[int, Path, subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    port, admin, proxy = world
    (tmp_path / "sitecustomize.py").write_text("import os; os._exit(3)")
    proxy.send_signal(signal.SIGUSR2)
    said = wait_for(lambda: "ended before it served" in (tmp_path / "log").read_text())
    assert said
    assert get(port, "/health")["status"] == "ok"
    assert proxies(admin) == [proxy.pid]
    (tmp_path / "sitecustomize.py").unlink()
    proxy.send_signal(signal.SIGUSR2)
    assert proxy.wait(60) == 0
    assert get(port, "/health")["status"] == "ok"
