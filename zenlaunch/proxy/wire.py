"""One connection's socket, read and written by hand: what has not been sent, who waits for whom.

Most of the proxy's life passes through `serve` and `write`. Owns one descriptor, what its socket
has not taken yet, back-pressure and the ways to end. Knows nothing of HTTP, nor which side it is.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from zenlaunch.proxy.peer import reset_on_close, unacknowledged_bytes

if TYPE_CHECKING:
    from zenlaunch.proxy.pump import Pump

_IN, _OUT = select.EPOLLIN, select.EPOLLOUT
_BROKEN = select.EPOLLHUP | select.EPOLLERR
_READ_BYTES = 65_536
_WRITE_BYTES = 2**20  # at once, so that a large body does not hold up the others
_FULL_BYTES = 65_536
_EMPTY_BYTES = 16_384


def nothing() -> None:
    """Call back nobody."""


def _ignore(data: bytes) -> None:
    pass


class Wire:
    """One socket. `fd` is -1 once it is closed.

    `receive` is given what comes; b"" is the end of it, or (`error` is set) of the connection.
    After an end the wire can still be written to; should it break then, b"" is told again.
    `filled` is called when `full` changes: whether so much waits to be sent that no more should
    come. `lost` is called once, when the wire has been closed, by whomever.
    `connected` is false for one that still connects: until a byte could be written.
    """

    __slots__ = (
        "_closing",
        "_ended",
        "_filled",
        "_left_bytes",
        "_lost",
        "_pump",
        "_shutting",
        "_sock",
        "_stood_since",
        "_unsent",
        "_watched",
        "connected",
        "error",
        "fd",
        "full",
        "paused",
        "quiet",
        "receive",
        "unsent_bytes",
    )

    def __init__(
        self,
        pump: Pump,
        sock: socket.socket,
        receive: Callable[[bytes], None],
        *,
        filled: Callable[[], None] = nothing,
        lost: Callable[[], None] = nothing,
    ) -> None:
        self._pump = pump
        self._sock = sock
        self.receive = receive
        self._filled = filled
        self._lost = lost
        self._watched: int | None = _IN
        self._unsent: list[memoryview] = []
        self.quiet = False  # not read from: paused, ended or closing
        self._ended = False
        self._closing = False
        self._shutting = False
        self._left_bytes = 0
        self._stood_since: float | None = None
        self.fd = sock.fileno()
        self.connected = True
        self.error: OSError | None = None
        self.full = False
        self.paused = False
        self.unsent_bytes = 0

    # -- what is ready

    def serve(self, flags: int) -> None:
        """Do what epoll says can be done."""
        if flags != _IN or self.quiet:
            if self._unsent and flags & _OUT:
                self._flush()
            if self.quiet and flags & _BROKEN and not self.paused:
                self._break(OSError("the connection is closed"))
            if self.quiet or flags == _OUT:
                return
        try:
            data = os.read(self.fd, _READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._break(error)
            return
        if data:
            self.receive(data)
            return
        self._ended = True
        self.receive(b"")
        if self.error is not None:
            self.close()
        else:
            self._watch()

    def _break(self, error: OSError) -> None:
        self.error = self.error or error
        self.receive(b"")
        self.close()

    # -- sending

    def write(self, data: bytes | bytearray) -> None:
        """Write now what the socket takes (nothing while it still connects), the rest later.

        A failure is not told here: what the peer said before it broke is still to be read, and
        after it comes the end.
        """
        if self._unsent:
            self._keep(memoryview(data))
            return
        try:
            sent = os.write(self.fd, data)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            self.error = self.error or error
            return
        else:
            self.connected = True
        if sent != len(data):
            self._keep(memoryview(data)[sent:])

    def _keep(self, data: memoryview) -> None:
        self._unsent.append(data)
        self.unsent_bytes += len(data)
        self._changed()

    def _flush(self) -> None:
        unsent = self._unsent
        try:
            sent = os.write(self.fd, unsent[0][:_WRITE_BYTES])
        except BlockingIOError:
            return
        except OSError as error:
            self.error = self.error or error
            unsent.clear()
            self.unsent_bytes = 0
        else:
            self.connected = True
            self.unsent_bytes -= sent
            if sent == len(unsent[0]):
                del unsent[0]
            else:
                unsent[0] = unsent[0][sent:]
        self._changed()

    def _changed(self) -> None:
        """What waits has become more or less."""
        if not self._unsent:
            if self._closing:
                self.close()
                return
            if self._shutting:
                self._shut()
        self._watch()
        full = self.unsent_bytes > (_EMPTY_BYTES if self.full else _FULL_BYTES)
        if full != self.full:
            self.full = full
            self._filled()

    def stands_s(self, now: float) -> float | None:
        """Return for how long the peer has taken nothing of what waits; None if nothing does.

        What its kernel has not acknowledged counts too: the socket buffer may be so large that a
        slow reader leaves ours untouched for many minutes.
        """
        if not self.unsent_bytes:
            self._stood_since = None
            return None
        left_bytes = self.unsent_bytes + unacknowledged_bytes(self.fd)
        if self._stood_since is None or left_bytes != self._left_bytes:
            self._stood_since = now
            self._left_bytes = left_bytes
        return now - self._stood_since

    # -- reading or not

    def pause(self) -> None:
        """Read no more until `resume`."""
        self.paused = True
        self._watch()

    def resume(self) -> None:
        """Read again."""
        self.paused = False
        self._watch()

    def _watch(self) -> None:
        if self.fd < 0:
            return
        self.quiet = self.paused or self._ended or self._closing
        wanted: int | None = (0 if self.quiet else _IN) | (_OUT if self._unsent else 0)
        if self.paused and not wanted:
            wanted = None  # an end would be told over and over
        if wanted != self._watched:
            self._pump.watch(self.fd, self._watched, wanted)
            self._watched = wanted

    # -- ending

    def shut(self) -> None:
        """Tell the peer that nothing more comes, after what waits."""
        self._shutting = True
        if not self._unsent:
            self._shut()

    def _shut(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def finish(self) -> None:
        """Close once what waits has been sent; nothing more is received."""
        self._closing = True
        self.receive = _ignore
        if self._unsent:
            self._watch()
        else:
            self.close()

    def reset(self) -> None:
        """Close with a reset, which nobody takes for the end of an answer."""
        if self.fd >= 0:
            self._reset_on_close()
            self.close()

    def _reset_on_close(self) -> None:
        with contextlib.suppress(OSError):
            reset_on_close(self._sock)

    def close(self) -> None:
        """Close now; nothing more is received.

        With a reset where something has not been sent: what was must not be taken for all.
        """
        if self.fd < 0:
            return
        if self.unsent_bytes:
            self._reset_on_close()
        self._pump.remove(self.fd, self._sock, watched=self._watched is not None)
        self.fd = -1
        self._unsent.clear()
        self.unsent_bytes = 0
        self.quiet = True
        lost = self._lost
        # No circle of references is left behind.
        self.receive, self._filled, self._lost = _ignore, nothing, nothing
        lost()

    def fail(self) -> None:
        """Treat as broken off, which is no end: tell so, and reset if that did not close."""
        self.error = self.error or OSError("the proxy has failed")
        with contextlib.suppress(Exception):
            self.receive(b"")
        self.reset()
