"""A proxy is replaced without a pause: on SIGUSR2 a successor takes the sockets, this one drains.

Owns the start of the successor (the same command, so a new version of the program too), what it
inherits (the sockets, and who is drained), and the word that it serves. A successor that ends
before it serves changes nothing. systemd is told who the main process is now (sd_notify(3),
MAINPID=).
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from zenlaunch import notify
from zenlaunch.proxy.aside import aside

log = logging.getLogger("zenlaunch.proxy")

VARIABLE = "ZENLAUNCH_HANDOVER"
_NOT_PASSED_ON = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "WATCHDOG_PID", VARIABLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inherited:
    """The sockets of the one before, and the pipe on which it waits for our word.

    `drained` are the upstreams that an operator has drained there.
    """

    listening: socket.socket
    admin: socket.socket | None
    word: int
    drained: tuple[str, ...]

    def serving(self) -> None:
        """Tell the one before that it may go."""
        with contextlib.suppress(OSError):
            os.write(self.word, str(os.getpid()).encode())
            os.close(self.word)


def inherited(environ: Mapping[str, str] = os.environ) -> Inherited | None:
    """Return what the proxy before passed on; None for one that starts by itself."""
    text = environ.get(VARIABLE, "")
    if not text:
        return None
    listening, admin, word, drained = text.split(",")
    for fd in (listening, admin, word):
        if fd:
            os.set_inheritable(int(fd), False)
    return Inherited(
        listening=socket.socket(fileno=int(listening)),
        admin=socket.socket(fileno=int(admin)) if admin else None,
        word=int(word),
        drained=tuple(drained.split()),
    )


class Handover:
    """The way out of a proxy that is to be replaced; `done` once a successor serves."""

    def __init__(self, listening: socket.socket, admin: socket.socket | None) -> None:
        self.done = False
        self._sockets = (listening, admin)
        self._under_way = False

    async def go(
        self, leave: Callable[[signal.Signals], None], *, drained: Iterable[str] = ()
    ) -> None:
        """Start a successor; when it serves, `leave` is called to drain and end this one."""
        if self._under_way:
            return
        self._under_way = True
        word_r, word_w = os.pipe()
        try:
            try:
                shell = self._start(word_w, drained)
            finally:
                os.close(word_w)
            await aside(partial(os.waitpid, shell, 0))
            log.info("a successor has been started")
            word = await aside(partial(os.read, word_r, 20))
        except OSError as error:
            log.error("no successor: %s; this proxy goes on", error.strerror)
            return
        finally:
            os.close(word_r)
            self._under_way = False
        if not word:
            log.error("the successor ended before it served; this proxy goes on")
            return
        self.done = True
        notify.notify(f"MAINPID={word.decode()}")
        notify.stop()
        leave(signal.SIGTERM)

    def _start(self, word: int, drained: Iterable[str]) -> int:
        fds = [os.dup(s.fileno()) if s is not None else None for s in self._sockets]
        for handed in (*fds, word):
            if handed is not None:
                os.set_inheritable(handed, True)
        environ = {k: v for k, v in os.environ.items() if k not in _NOT_PASSED_ON}
        numbers = ["" if fd is None else str(fd) for fd in (*fds, word)]
        environ[VARIABLE] = ",".join((*numbers, " ".join(drained)))
        # Through a shell that ends at once, so that the successor is a child of systemd (or of our
        # supervisor): systemd does not wait for the end of a main process that is not its child.
        command = ["/bin/sh", "-c", '"$@" &', "sh", sys.executable, *sys.orig_argv[1:]]
        try:
            return os.posix_spawn(command[0], command, environ)
        finally:
            for fd in fds:
                if fd is not None:
                    os.close(fd)
