"""The engine's side: connections to upstreams, their idle pools, and what comes back on them.

A connection carries one request at a time and tells its receiver what happened: a head, body bytes,
the end, or a fault. It decides nothing about retries or clients. Whole events of a chunked stream
take a short way (`relay`), since that is where the proxy's time goes. Bytes that nobody asked for
close the connection.
"""

from __future__ import annotations

import asyncio
import math
import select
import time
from collections import deque
from typing import Any, Protocol

from zenlaunch.proxy.address import UpstreamAddress
from zenlaunch.proxy.attempt import Receive
from zenlaunch.proxy.chunks import ChunkDecoder
from zenlaunch.proxy.http1 import (
    MAX_HEAD_BYTES,
    BadMessage,
    ResponseHead,
    parse_response_head,
)
from zenlaunch.proxy.pump import Pump, Way
from zenlaunch.proxy.retry import Fault, fault_of_reset
from zenlaunch.proxy.wire import Wire

# An engine that says more than it announced shows it at once: what follows an answer on the same
# connection must not be taken for the next request's. So long must it have been silent when all
# sockets were looked at last.
_SETTLE_S = 0.001

# What a connection awaits. Plain numbers: looking up a member of an enum costs more than comparing.
_NOTHING, _HEAD, _LENGTH, _CHUNKS, _CLOSE = range(5)


class Receiver(Protocol):
    """Who waits for a response: a client's exchange, or the control plane."""

    method: str

    def on_head(self, connection: UpstreamConnection, head: ResponseHead) -> None:
        """Take the head of the response."""

    def on_body(self, connection: UpstreamConnection, payload: bytes) -> None:
        """Take body bytes, transfer framing removed."""

    def on_end(self, connection: UpstreamConnection) -> None:
        """Take note that the response is whole."""

    def on_broken(self, connection: UpstreamConnection, fault: Fault) -> None:
        """Take note that the response will never be whole."""

    def relay(self, otherwise: Receive) -> Receive | None:
        """Return what takes the bytes that come next, when whole chunks may go on as they are.

        `otherwise` is given those that may not.
        """


class UpstreamConnection:
    """One connection to an engine."""

    __slots__ = (
        "_any_byte",
        "_await",
        "_buffer",
        "_decoder",
        "_head",
        "_left",
        "_receiver",
        "idle_since",
        "sent_at",
        "single",
        "upstream",
        "uses",
        "wire",
    )

    def __init__(self, upstream: Upstream, pump: Pump, way: Way) -> None:
        self.upstream = upstream
        self.wire: Wire = pump.connect(way, self.receive)
        self._receiver: Receiver | None = None
        self._await = _NOTHING
        self._buffer = b""
        self._head: ResponseHead | None = None
        self._decoder: ChunkDecoder | None = None
        self._left = 0
        self._any_byte = False
        self.sent_at = 0.0
        self.uses = 0
        self.single = False
        self.idle_since = 0.0

    def send(self, receiver: Receiver, head: bytes, body: bytes | bytearray, now: float) -> None:
        """Send one request, once there is a connection; the receiver hears of all that follows."""
        self._receiver = receiver
        self._await = _HEAD
        self._any_byte = False
        self.sent_at = now
        self.uses += 1
        if len(body) < 65_536:
            self.wire.write(head + body)
        else:
            self.wire.write(head)
            self.wire.write(body)

    def cancel(self, receiver: Receiver) -> None:
        """Close at once if `receiver` still has the connection; it hears nothing more."""
        if self._receiver is not receiver:
            return
        self._receiver = None
        self._await = _NOTHING
        self.close()

    def close(self) -> None:
        """Close now; what is on its way is lost."""
        if self.wire.fd >= 0:
            self.wire.close()
            self.upstream.forget(self)

    def is_silent(self) -> bool:
        """Tell whether nothing has come since the last response: neither bytes nor the end.

        Whatever has come is nobody's answer, and would be taken for the next request's.
        """
        glance = select.poll()
        glance.register(self.wire.fd, select.POLLIN)
        return not glance.poll(0)

    def receive(self, data: bytes) -> None:
        """Take what has come; b"" is the end of the connection."""
        if not data:
            self._ended()
            return
        receiver = self._receiver
        if receiver is None:
            self.close()
            return
        self._any_byte = True
        try:
            if self._await == _HEAD:
                data = self._take_head(receiver, self._buffer + data)
            if data and self._receiver is receiver:
                self._take_body(receiver, data)
        except BadMessage:
            self._break(Fault.GARBAGE)
            return
        if self._receiver is receiver and self._decoder is not None:
            short = receiver.relay(self.receive) if self._decoder.at_boundary else None
            self.wire.receive = short or self.receive

    def _take_head(self, receiver: Receiver, data: bytes) -> bytes:
        """Pass the head on, interim ones left out; return the bytes of the body."""
        while True:
            end = data.find(b"\r\n\r\n")
            if end < 0:
                if len(data) > MAX_HEAD_BYTES or not b"HTTP/1.".startswith(data[:7]):
                    raise BadMessage("not an HTTP response")
                self._buffer = data
                return b""
            head = parse_response_head(data[:end])
            data = data[end + 4 :]
            if head.status == 101:
                raise BadMessage("an upgrade that nobody asked for")
            if head.status >= 200:
                break
        self._buffer = b""
        self._head = head
        if receiver.method == "HEAD" or head.status in (204, 304):
            receiver.on_head(self, head)
            if self._receiver is receiver:
                self._complete(receiver, data)
            return b""
        if head.chunked:
            self._await = _CHUNKS
            self._decoder = ChunkDecoder()
        elif head.length_bytes is not None:
            self._await = _LENGTH
            self._left = head.length_bytes
        else:
            self._await = _CLOSE
        receiver.on_head(self, head)
        if self._receiver is receiver and head.length_bytes == 0:
            self._complete(receiver, data)
            return b""
        return data

    def _take_body(self, receiver: Receiver, data: bytes) -> None:
        if self._await == _CHUNKS and self._decoder is not None:
            pieces, tail = self._decoder.feed(data)
            if pieces:
                receiver.on_body(self, pieces[0] if len(pieces) == 1 else b"".join(pieces))
            if self._decoder.done and self._receiver is receiver:
                self._complete(receiver, tail)
        elif self._await == _LENGTH:
            tail = data[self._left :]
            payload = data[: self._left] if tail else data
            self._left -= len(payload)
            receiver.on_body(self, payload)
            if self._left == 0 and self._receiver is receiver:
                self._complete(receiver, tail)
        else:
            receiver.on_body(self, data)

    def _complete(self, receiver: Receiver, tail: bytes) -> None:
        """End the response; keep the connection only if it is certain to be clean."""
        head = self._head
        clean = (
            head is not None
            and head.keep_alive
            and not self.single
            and not tail
            and self._await != _CLOSE
            and not self.wire.unsent_bytes
        )
        self._reset()
        if self.wire.paused:  # by the very bytes that ended the response
            self.wire.resume()
        if clean:
            self.upstream.put(self, time.monotonic())
        else:
            self.close()
        receiver.on_end(self)

    def _reset(self) -> None:
        self._receiver = None
        self.wire.receive = self.receive
        self._head = None
        self._decoder = None
        self._await = _NOTHING

    def _break(self, fault: Fault) -> None:
        receiver = self._receiver
        self._reset()
        self.close()
        if receiver is not None:
            receiver.on_broken(self, fault)

    def _ended(self) -> None:
        receiver = self._receiver
        if receiver is None:
            self.close()
        elif self._await == _CLOSE and self.wire.error is None:
            self._complete(receiver, b"")
        elif not self.wire.connected:
            self._break(Fault.UNREACHABLE)
        else:
            self._break(
                fault_of_reset(
                    reused=self.uses > 1,
                    any_byte=self._any_byte or bool(self._buffer),
                    elapsed_s=time.monotonic() - self.sent_at,
                )
            )


class Upstream:
    """One engine: its address, its idle connections, what was counted for it.

    `way` is where its name led when a probe got through last: requests never wait for a resolver.
    """

    __slots__ = (
        "_pump",
        "_settling",
        "address",
        "authority",
        "connections",
        "idle",
        "name",
        "pool_idle_s",
        "resolving",
        "retired",
        "way",
    )

    def __init__(self, address: UpstreamAddress, pump: Pump, *, pool_idle_s: float) -> None:
        self.address = address
        self.name = address.name
        self.authority = address.url.removeprefix("http://").encode()
        self.pool_idle_s = pool_idle_s
        self.idle: dict[UpstreamConnection, None] = {}  # the one used last is last
        self.connections = 0
        self.way: Way | None = None
        self.resolving: asyncio.Task[list[Any]] | None = None
        self.retired = False
        self._pump = pump
        self._settling: deque[UpstreamConnection] = deque()

    def connect(self, way: Way | None = None) -> UpstreamConnection:
        """Begin a new connection, which can be sent on at once.

        Raises OSError when there is no descriptor left, or no way is known.
        """
        way = way or self.way
        if way is None:
            raise OSError(f"{self.address.host} has not been resolved yet")
        connection = UpstreamConnection(self, self._pump, way)
        self.connections += 1
        return connection

    def take(self, now: float) -> UpstreamConnection | None:
        """Return the idle connection used last, if one is fresh enough and has been silent.

        What has come since its last answer has closed it, if that was long enough before all
        sockets were looked at; else it costs a look of its own.
        """
        seen = self._pump.seen
        for until in (seen, now):
            self._settle(until)
            while self.idle:
                connection, _ = self.idle.popitem()
                if now - connection.idle_since < self.pool_idle_s and (
                    seen - connection.idle_since >= _SETTLE_S or connection.is_silent()
                ):
                    return connection
                connection.close()
        return None

    def put(self, connection: UpstreamConnection, now: float) -> None:
        """Keep a connection for a later request, unless there will be none."""
        if self.retired:
            connection.close()
            return
        connection.idle_since = now
        self._settling.append(connection)

    def _settle(self, seen: float) -> None:
        settling = self._settling
        while settling and seen - settling[0].idle_since >= _SETTLE_S:
            connection = settling.popleft()
            if connection.wire.fd >= 0:
                self.idle[connection] = None

    def forget(self, connection: UpstreamConnection) -> None:
        """Drop a connection that has closed."""
        self.connections -= 1
        self.idle.pop(connection, None)

    def retire(self) -> None:
        """Get no more requests: what is under way finishes, and its connections are closed."""
        self.retired = True
        self.close_idle()

    def close_idle(self, now: float | None = None) -> None:
        """Close the idle connections: those too old by `now`, or all."""
        self._settle(math.inf if now is None else now)
        for connection in list(self.idle):
            if now is not None and now - connection.idle_since < self.pool_idle_s:
                return  # and so are all that were used later
            connection.close()
