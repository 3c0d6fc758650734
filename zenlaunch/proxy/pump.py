"""All sockets of the proxy in one epoll set: one wake-up serves every stream of an engine's step.

An engine's step makes all its streams readable at once. The set takes them together: a read, a call
and a write for each, without an event loop's machinery in between. asyncio, which is left with
timers, probes and signals, sees the set as its selector: where it waits for its own descriptors,
the wires are served. Owns the descriptors and the order of closing; one connection is `wire`'s.
Knows nothing of HTTP. Follows epoll(7), level-triggered.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import select
import selectors
import socket
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any

from zenlaunch.proxy.peer import watch_peer
from zenlaunch.proxy.wire import Wire, nothing

log = logging.getLogger("zenlaunch.proxy")

_IN = select.EPOLLIN
_BACKLOG = 4096
_AT_ONCE = 128  # served between two looks at the clock
_ACCEPTED_AT_ONCE = 64
_REST_S = 1.0
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

Way = tuple[int, Any]  # an address family and an address of it, as getaddrinfo(3) gives them


class Pump(selectors.EpollSelector):
    """The set of all wires and doors; what asyncio registers is in a set of its own within it.

    `now` is when the set was looked at last. `seen` is a moment before that: all that had come by
    then on the engines' side has been served. Both as `time.monotonic`, in seconds. `wanted` is set
    when asyncio has something to do.
    """

    def __init__(self) -> None:
        super().__init__()
        self._epoll = select.epoll()
        self._epoll.register(self.fileno(), _IN)
        self._engines: dict[int, Wire] = {}
        self._clients: dict[int, Wire | Door] = {}
        self._closed: list[socket.socket] = []
        self._serving = False
        self.now = self.seen = monotonic()
        self.wanted = False

    def event_loop(self) -> asyncio.AbstractEventLoop:
        """Return a new event loop that serves the wires whenever it waits."""
        return _Loop(self)

    def hang_up(self) -> None:
        """Close every wire and every door."""
        for one in [*self._engines.values(), *self._clients.values()]:
            _end(one.close)

    def close(self) -> None:
        """Hang up, and close the sets: asyncio does at its end."""
        self.hang_up()
        self._epoll.close()
        super().close()

    # -- connections

    def connect(self, way: Way, receive: Callable[[bytes], None]) -> Wire:
        """Begin to connect; `receive` is given all that comes, and b"" at the end or a failure.

        Raises OSError when the kernel has no descriptor or no watch left.
        """
        family, address = way
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            watch_peer(sock)
            code = sock.connect_ex(address)
            wire = Wire(self, sock, receive)
            wire.connected = False
            self._epoll.register(wire.fd, _IN)
        except OSError:
            sock.close()
            raise
        self._engines[wire.fd] = wire
        if code not in (0, errno.EINPROGRESS):  # told by `receive`, like the end of any connection
            wire.error = OSError(code, os.strerror(code))
        return wire

    def adopt(
        self,
        sock: socket.socket,
        receive: Callable[[bytes], None],
        *,
        filled: Callable[[], None] = nothing,
        lost: Callable[[], None] = nothing,
    ) -> Wire:
        """Serve a client's connected, non-blocking socket; see `Wire` for what is called when.

        Raises OSError when the kernel has no watch left; the socket is then the caller's.
        """
        wire = Wire(self, sock, receive, filled=filled, lost=lost)
        self._epoll.register(wire.fd, _IN)
        self._clients[wire.fd] = wire
        return wire

    def listen(self, sock: socket.socket, take: Callable[[socket.socket, Any], object]) -> Door:
        """Accept connections; `take` is given each, non-blocking, with its peer's address."""
        sock.setblocking(False)
        sock.listen(_BACKLOG)
        if sock.family != socket.AF_UNIX:  # those accepted inherit it
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            watch_peer(sock)
        door = Door(self, sock, take)
        self._clients[door.fd] = door
        self._epoll.register(door.fd, _IN)
        return door

    # -- what is ready

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait and serve, until asyncio has something to do; return what is ready of its own.

        `timeout` is in seconds; None waits for as long as it takes.
        """
        self.wanted = False
        before = monotonic()
        until = None if timeout is None else before + timeout
        while True:
            ready = self._epoll.poll(timeout, _AT_ONCE)
            self.now = now = monotonic()
            if self._serve(ready, before):
                return super().select(0)
            before = monotonic()
            if self.wanted or not ready or (until is not None and now >= until):
                return []
            if until is not None:
                timeout = max(0.0, until - before)

    def _serve(self, ready: list[tuple[int, int]], before: float) -> bool:
        """Serve what is ready; return whether something of asyncio's is too.

        The engines' side first. Their tokens are waited for, what they say unasked is known before
        their connections are used again, and a processor that does one thing at a time is quicker.
        `before` the set was looked at: when that was over may be told late, and more have come.
        """
        self._serving = True
        rest = _serve_each(ready, self._engines)
        if len(ready) < _AT_ONCE:
            self.seen = before
        rest = _serve_each(rest, self._clients)
        self._serving = False
        while self._closed:
            self._closed.pop().close()
        return bool(rest)

    # -- for wires and doors

    def watch(self, fd: int, before: int | None, wanted: int | None) -> None:
        """Be told of other things than before; of nothing at all, not even an end, for None."""
        if wanted is None:
            self._epoll.unregister(fd)
        elif before is None:
            self._epoll.register(fd, wanted)
        else:
            self._epoll.modify(fd, wanted)

    def remove(self, fd: int, sock: socket.socket, *, watched: bool) -> None:
        """Forget a socket and close it.

        Not before all that is ready now has been served: a new socket under the old number would be
        given what belongs to its predecessor. Unregistered by hand, since a child being started may
        still hold a copy of the descriptor.
        """
        if watched:
            self._epoll.unregister(fd)
        if self._engines.pop(fd, None) is None:
            del self._clients[fd]
        if self._serving:
            self._closed.append(sock)
        else:
            sock.close()


def _serve_each(
    ready: list[tuple[int, int]], served: Mapping[int, Wire | Door]
) -> list[tuple[int, int]]:
    """Serve those that are ready; return the others."""
    others: list[tuple[int, int]] = []
    for fd, flags in ready:
        one = served.get(fd)
        if one is None:  # of the other kind, or closed by what was served before it
            others.append((fd, flags))
            continue
        try:
            one.serve(flags)
        except Exception:
            log.exception("serving a connection failed")
            _end(one.fail)
    return others


def _end(way: Callable[[], None]) -> None:
    """End a connection; whatever its owner does wrong then must not end all others."""
    try:
        way()
    except Exception:
        log.exception("cleaning up after a connection failed")


class _Loop(asyncio.SelectorEventLoop):
    """asyncio's loop, which says when it has something to do: a turn of it costs more than an event
    that is relayed.
    """

    def __init__(self, pump: Pump) -> None:
        self._pump = pump
        super().__init__(pump)

    def call_soon(self, *args: Any, **kwargs: Any) -> asyncio.Handle:  # type: ignore[override]
        self._pump.wanted = True
        return super().call_soon(*args, **kwargs)

    def call_at(self, *args: Any, **kwargs: Any) -> asyncio.TimerHandle:  # type: ignore[override]
        self._pump.wanted = True
        return super().call_at(*args, **kwargs)


class Door:
    """A socket that listens."""

    __slots__ = ("_pump", "_sock", "_take", "fd")

    def __init__(
        self, pump: Pump, sock: socket.socket, take: Callable[[socket.socket, Any], object]
    ) -> None:
        self._pump = pump
        self._sock = sock
        self._take = take
        self.fd = sock.fileno()

    def serve(self, flags: int) -> None:
        """Accept who waits."""
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                sock, address = self._sock.accept()
            except OSError as error:
                # Others, see accept(2), are of one connection that is gone already.
                if error.errno in _EXHAUSTED:
                    log.error("no connection can be accepted: %s", error.strerror)
                    self._rest()
                return
            try:
                sock.setblocking(False)
                self._take(sock, address)
            except BaseException:
                sock.close()
                raise

    def _rest(self) -> None:
        """Wait for others to give something back: who waits here would keep the set awake.

        Still registered: to be so again might fail for want of memory too.
        """
        self._watch(0)
        asyncio.get_running_loop().call_later(_REST_S, self._watch, _IN)

    def _watch(self, wanted: int) -> None:
        if self.fd >= 0:
            self._pump.watch(self.fd, _IN, wanted)

    def fail(self) -> None:
        """Go on: what failed was one connection."""

    def close(self) -> None:
        """Close: nobody is accepted any more."""
        if self.fd >= 0:
            self._pump.remove(self.fd, self._sock, watched=True)
            self.fd = -1
