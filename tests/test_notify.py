"""Messages to systemd over a real socket, and the sockets it passes."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import pytest

from zenlaunch.notify import listen_fd, notify, start, watchdog_s


@pytest.fixture
def manager(tmp_path: Path) -> socket.socket:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s:
        s.bind(str(tmp_path / "notify"))
        s.settimeout(10)
        yield s


def test_ready_and_alive(manager: socket.socket) -> None:
    environ = {"NOTIFY_SOCKET": str(manager.getsockname()), "WATCHDOG_USEC": "100000"}

    async def serve() -> list[bytes]:
        start(asyncio.get_running_loop(), environ)
        return [await asyncio.to_thread(manager.recv, 100) for _ in range(3)]

    assert asyncio.run(serve()) == [b"READY=1", b"WATCHDOG=1", b"WATCHDOG=1"]


def test_nobody_asked() -> None:
    assert not notify("READY=1", {})
    assert not notify("READY=1", {"NOTIFY_SOCKET": "/nonexistent/notify"})


def test_abstract_name() -> None:
    name = f"zenlaunch-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s:
        s.bind(f"\0{name}")
        assert notify("READY=1", {"NOTIFY_SOCKET": f"@{name}"})
        assert s.recv(100) == b"READY=1"


@pytest.mark.parametrize(
    ("environ", "period_s"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "30000000"}, 15.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "7"}, 15.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "8"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
    ],
)
def test_watchdog(environ: dict[str, str], period_s: float | None) -> None:
    assert watchdog_s(environ, pid=7) == period_s


@pytest.mark.parametrize(
    ("environ", "fd"),
    [
        ({}, None),
        ({"LISTEN_PID": "7", "LISTEN_FDS": "1"}, 3),
        ({"LISTEN_PID": "8", "LISTEN_FDS": "1"}, None),
        ({"LISTEN_PID": "7", "LISTEN_FDS": "2"}, None),
    ],
)
def test_listen_fd(environ: dict[str, str], fd: int | None) -> None:
    assert listen_fd(environ, pid=7) == fd
