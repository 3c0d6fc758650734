"""Sockets to the engines, read and written by hand: one wake-up serves every stream of a step.

An engine's step makes all its streams readable at once. One private epoll set, itself one reader of
the event loop, takes them together: a read, a call and (in `outlet`) a write for each, without the
event loop's machinery in between. A descriptor for each in the event loop itself costs more, and
uvloop tells of a reset only once, whatever is left to be read before it. Owns the descriptors, what
a socket has not taken yet, and the order of closing. Knows nothing of HTTP. Follows epoll(7),
level-triggered.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import select
import socket
from collections.abc import Callable
from typing import Any

from zenlaunch.proxy.peer import watch_peer

log = logging.getLogger("zenlaunch.proxy")

_IN, _OUT = select.EPOLLIN, select.EPOLLOUT
_READ_BYTES = 65_536
_WRITE_BYTES = 2**20  # at once, so that a large body does not hold up the others
_AT_ONCE = 64  # streams served before the event loop gets its turn

Way = tuple[int, Any]  # an address family and an address of it, as getaddrinfo(3) gives them


class Pump:
    """The set of all wires."""

    __slots__ = ("_closed", "_epoll", "_loop", "_serving", "_wires")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._epoll = select.epoll()
        self._wires: dict[int, Wire] = {}
        self._closed: list[socket.socket] = []
        self._serving = False
        loop.add_reader(self._epoll.fileno(), self._serve)

    def stop(self) -> None:
        """Close every wire without a word, and the set."""
        for wire in list(self._wires.values()):
            wire.close()
        self._loop.remove_reader(self._epoll.fileno())
        self._epoll.close()

    def connect(self, way: Way, receive: Callable[[bytes], None]) -> Wire:
        """Begin to connect; `receive` is given all that comes, and b"" at the end or a failure.

        Raises OSError when the kernel has no descriptor or no watch left.
        """
        family, address = way
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        watch_peer(sock)
        wire = Wire(self, sock, receive)
        code = sock.connect_ex(address)
        if code not in (0, errno.EINPROGRESS):  # told by `receive`, like the end of any connection
            wire.error = OSError(code, os.strerror(code))
        try:
            self._epoll.register(wire.fd, _IN)
        except OSError:
            sock.close()
            raise
        self._wires[wire.fd] = wire
        return wire

    def _serve(self) -> None:
        """Serve what is ready, and what has become so meanwhile: to come back costs more.

        What is left over after `_AT_ONCE` wakes the event loop again at once.
        """
        left = _AT_ONCE
        while left > 0:
            ready = self._epoll.poll(0, left)
            if not ready:
                return
            left -= len(ready)
            self._serving = True
            for fd, flags in ready:
                wire = self._wires.get(fd)
                if wire is not None:  # not closed by what was served before it
                    self._serve_one(wire, flags)
            self._serving = False
            while self._closed:
                self._closed.pop().close()

    def _serve_one(self, wire: Wire, flags: int) -> None:
        try:
            if flags & _OUT and wire.unsent:
                wire.flush()
            if flags == _OUT or wire.paused:
                return
            try:
                data = os.read(wire.fd, _READ_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                wire.error = wire.error or error
                data = b""
            wire.receive(data)
            if not data:
                wire.close()
        except Exception:
            log.exception("serving an upstream's connection failed")
            wire.fail()

    def watch(self, fd: int, before: int, wanted: int) -> None:
        """Be told of other things than before; of nothing at all, not even an end, for 0."""
        if not wanted:
            self._epoll.unregister(fd)
        elif before:
            self._epoll.modify(fd, wanted)
        else:
            self._epoll.register(fd, wanted)

    def remove(self, wire: Wire, sock: socket.socket, *, watched: bool) -> None:
        """Forget a wire and close its socket.

        Not before all that is ready now has been served: a new socket under the old number would be
        given what belongs to its predecessor. Unregistered by hand, since a child being started may
        still hold a copy of the descriptor.
        """
        if watched:
            self._epoll.unregister(wire.fd)
        del self._wires[wire.fd]
        if self._serving:
            self._closed.append(sock)
        else:
            sock.close()


class Wire:
    """One socket. `fd` is -1 once it is closed.

    `connected` is false until a byte could be written, `error` is what broke the connection.
    """

    __slots__ = (
        "_pump",
        "_sock",
        "_watched",
        "connected",
        "error",
        "fd",
        "paused",
        "receive",
        "unsent",
    )

    def __init__(self, pump: Pump, sock: socket.socket, receive: Callable[[bytes], None]) -> None:
        self._pump = pump
        self._sock = sock
        self._watched = _IN
        self.fd = sock.fileno()
        self.receive = receive
        self.connected = False
        self.error: OSError | None = None
        self.paused = False
        self.unsent: list[memoryview] = []

    def write(self, data: bytes | bytearray) -> None:
        """Write now what the socket takes (nothing while it still connects), the rest later."""
        self.unsent.append(memoryview(data))
        if len(self.unsent) == 1:
            self.flush()

    def flush(self) -> None:
        """Write more of what is left.

        A failure is not told here: what the engine said before it broke is still to be read, and
        after it comes the end.
        """
        unsent = self.unsent
        try:
            sent = os.write(self.fd, unsent[0][:_WRITE_BYTES])
        except BlockingIOError:
            pass
        except OSError as error:
            self.error = self.error or error
            unsent.clear()
        else:
            self.connected = True
            if sent == len(unsent[0]):
                del unsent[0]
            else:
                unsent[0] = unsent[0][sent:]
        if bool(unsent) != bool(self._watched & _OUT):
            self._watch()

    def pause(self) -> None:
        """Read no more until `resume`."""
        self.paused = True
        if self.fd >= 0:
            self._watch()

    def resume(self) -> None:
        """Read again."""
        self.paused = False
        if self.fd >= 0:
            self._watch()

    def _watch(self) -> None:
        wanted = (0 if self.paused else _IN) | (_OUT if self.unsent else 0)
        if wanted != self._watched:
            self._pump.watch(self.fd, self._watched, wanted)
            self._watched = wanted

    def close(self) -> None:
        """Close now; nothing more is received."""
        if self.fd >= 0:
            self._pump.remove(self, self._sock, watched=self._watched != 0)
            self.fd = -1
            self.unsent.clear()
            self.receive = _ignore  # so that no circle of references is left behind

    def fail(self) -> None:
        """Treat as broken off: tell of an end, and close if that did not."""
        with contextlib.suppress(Exception):
            if self.fd >= 0:
                self.receive(b"")
        self.close()


def _ignore(data: bytes) -> None:
    pass
