"""Tell systemd how a service is: ready, alive, stopping; and take the sockets that it passes.

Owns the datagrams of sd_notify(3) and the variables of sd_listen_fds(3). Without systemd (no
NOTIFY_SOCKET, no LISTEN_FDS) every call does nothing. Stdlib only.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Mapping

LISTEN_FDS_START = 3


def notify(message: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Send one message, such as "READY=1"; return whether somebody asked for it and got it."""
    address = environ.get("NOTIFY_SOCKET", "")
    if not address:
        return False
    if address.startswith("@"):  # the abstract namespace
        address = "\0" + address[1:]
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as s,
    ):
        s.sendto(message.encode(), address)
        return True
    return False


def watchdog_s(environ: Mapping[str, str] = os.environ, pid: int | None = None) -> float | None:
    """Return how often a message is due (half of systemd's limit), None where none is asked for."""
    try:
        usec = int(environ.get("WATCHDOG_USEC", ""))
        owner = int(environ.get("WATCHDOG_PID", pid or os.getpid()))
    except ValueError:
        return None
    return usec / 2e6 if usec > 0 and owner == (pid or os.getpid()) else None


def listen_fd(environ: Mapping[str, str] = os.environ, pid: int | None = None) -> int | None:
    """Return the one socket that systemd passed to this process, or None."""
    mine = environ.get("LISTEN_PID") == str(pid or os.getpid())
    return LISTEN_FDS_START if mine and environ.get("LISTEN_FDS") == "1" else None


_beating = True


def stop() -> None:
    """Say no more that this process is alive: another one is the service now."""
    global _beating
    _beating = False


def start(loop: asyncio.AbstractEventLoop, environ: Mapping[str, str] = os.environ) -> None:
    """Say that the service is ready, then that it is alive for as long as the loop turns."""
    notify("READY=1", environ)
    period_s = watchdog_s(environ)

    def beat(period_s: float) -> None:
        if _beating:
            notify("WATCHDOG=1", environ)
            loop.call_later(period_s, beat, period_s)

    if period_s is not None:
        beat(period_s)
