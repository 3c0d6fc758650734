"""The way out to one client: sent at once what its socket takes; and whether the client reads.

Most of the proxy's life passes through `write`. Knows nothing of requests or HTTP.
"""

from __future__ import annotations

import asyncio
import os

from zenlaunch.proxy.peer import reset_on_close, unacknowledged_bytes

_FLUSH_S = 5.0


class Outlet:
    """Write to a client's transport; `paused` while the transport holds too much for it."""

    __slots__ = ("_behind", "_fd", "_left_bytes", "_stood_since", "_transport", "paused")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._fd: int = transport.get_extra_info("socket").fileno()
        self._behind = False
        self._left_bytes = 0
        self._stood_since: float | None = None
        self.paused = False

    def write(self, data: bytes) -> None:
        """Send: at once what the socket takes, the rest through the transport.

        One system call is cheaper than the transport's queue. The transport finds out what is
        broken. Once it is closing, the descriptor may be another connection's.
        """
        transport = self._transport
        if self._behind:
            if transport.get_write_buffer_size():
                transport.write(data)
                return
            self._behind = False
        if transport.is_closing():
            return
        try:
            sent = os.write(self._fd, data)
        except OSError:
            sent = 0
        if sent != len(data):
            self._behind = True
            transport.write(data[sent:])

    def stands_s(self, now: float) -> float | None:
        """Return for how long the client has taken nothing of what waits; None if nothing does.

        What its kernel has not acknowledged counts too: the socket buffer may be so large that a
        slow reader leaves ours untouched for many minutes.
        """
        left_bytes = self._transport.get_write_buffer_size()
        if not left_bytes:
            self._stood_since = None
            return None
        left_bytes += unacknowledged_bytes(self._fd)
        if self._stood_since is None or left_bytes != self._left_bytes:
            self._stood_since = now
            self._left_bytes = left_bytes
        return now - self._stood_since

    async def reset(self) -> None:
        """Reset the connection once the client's kernel has what was written, or after 5 s."""
        transport = self._transport
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _FLUSH_S
        while transport.get_write_buffer_size() and loop.time() < deadline:
            await asyncio.sleep(0.02)
        sock = transport.get_extra_info("socket")
        if sock is not None and not transport.is_closing():
            reset_on_close(sock)
        transport.abort()
