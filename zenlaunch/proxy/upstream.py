"""The engine's side: connections to upstreams, their idle pools, and what comes back on them.

A connection carries one request at a time and tells its receiver what happened: a head, body bytes,
the end, or a fault. It decides nothing about retries or clients. Whole events of a chunked stream
take a short way (`relay`), since that is where the proxy's time goes. Bytes that nobody asked for
close the connection.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from enum import IntEnum
from typing import Protocol, cast

from zenlaunch.proxy.address import UpstreamAddress
from zenlaunch.proxy.chunks import ChunkDecoder, are_whole_events
from zenlaunch.proxy.http1 import (
    MAX_HEAD_BYTES,
    BadMessage,
    ResponseHead,
    parse_response_head,
)
from zenlaunch.proxy.retry import Fault, fault_of_reset
from zenlaunch.proxy.tcp import watch_peer

Relay = Callable[[bytes], None]


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

    def relay(self) -> Relay | None:
        """Return what takes whole chunks of whole events as they are, when that is possible."""


class _Await(IntEnum):
    NOTHING = 0
    HEAD = 1
    LENGTH = 2
    CHUNKS = 3
    CLOSE = 4


class UpstreamConnection(asyncio.Protocol):
    """One connection to an engine."""

    __slots__ = (
        "_any_byte",
        "_await",
        "_buffer",
        "_decoder",
        "_head",
        "_left",
        "_loop",
        "_paused",
        "_receiver",
        "_relay",
        "_sent_at",
        "fd",
        "idle_since",
        "single",
        "transport",
        "upstream",
        "uses",
    )
    transport: asyncio.Transport

    def __init__(self, upstream: Upstream, loop: asyncio.AbstractEventLoop) -> None:
        self.upstream = upstream
        self._loop = loop
        self._receiver: Receiver | None = None
        self._relay: Relay | None = None
        self._await = _Await.NOTHING
        self._buffer = b""
        self._head: ResponseHead | None = None
        self._decoder: ChunkDecoder | None = None
        self._left = 0
        self._any_byte = False
        self._paused = False
        self._sent_at = 0.0
        self.uses = 0
        self.single = False
        self.fd = -1
        self.idle_since = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is not a subclass
        self.fd = transport.get_extra_info("socket").fileno()
        self.upstream.connections += 1

    def send(self, receiver: Receiver, head: bytes, body: bytes | bytearray, now: float) -> None:
        """Send one request; the receiver hears of everything that follows."""
        self._receiver = receiver
        self._await = _Await.HEAD
        self._any_byte = False
        self._sent_at = now
        self.uses += 1
        if not body:
            self.transport.write(head)
        elif len(body) < 65_536:
            self.transport.write(head + body)
        else:
            self.transport.writelines((head, body))

    def cancel(self, receiver: Receiver) -> None:
        """Close at once if `receiver` still has the connection; it hears nothing more."""
        if self._receiver is not receiver:
            return
        self._receiver = None
        self._relay = None
        self._await = _Await.NOTHING
        self.transport.abort()

    def is_silent(self) -> bool:
        """Tell whether nothing has come since the last response: neither bytes nor the end.

        Whatever has come is nobody's answer, and would be taken for the next request's.
        """
        if self.transport.is_closing():
            return False
        try:
            os.read(self.fd, 1)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def pause(self) -> None:
        """Read no more until `resume`: the client is slow."""
        self._paused = True
        if not self.transport.is_closing():
            self.transport.pause_reading()

    def resume(self) -> None:
        """Read again."""
        self._paused = False
        if not self.transport.is_closing():
            self.transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        relay = self._relay
        if (
            relay is not None
            and are_whole_events(data)
            and b'"error"' not in data
            and b"[DONE]" not in data
        ):
            relay(data)
            return
        receiver = self._receiver
        if receiver is None:
            self.transport.abort()
            return
        self._any_byte = True
        try:
            if self._await is _Await.HEAD:
                data = self._take_head(receiver, self._buffer + data)
            if data and self._receiver is receiver:
                self._take_body(receiver, data)
        except BadMessage:
            self._break(Fault.GARBAGE)
            return
        if self._receiver is receiver and self._decoder is not None and self._decoder.at_boundary:
            self._relay = receiver.relay()
        else:
            self._relay = None

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
            self._await = _Await.CHUNKS
            self._decoder = ChunkDecoder()
        elif head.length_bytes is not None:
            self._await = _Await.LENGTH
            self._left = head.length_bytes
        else:
            self._await = _Await.CLOSE
        receiver.on_head(self, head)
        if self._receiver is receiver and head.length_bytes == 0:
            self._complete(receiver, data)
            return b""
        return data

    def _take_body(self, receiver: Receiver, data: bytes) -> None:
        if self._await is _Await.CHUNKS and self._decoder is not None:
            pieces, tail = self._decoder.feed(data)
            if pieces:
                receiver.on_body(self, pieces[0] if len(pieces) == 1 else b"".join(pieces))
            if self._decoder.done and self._receiver is receiver:
                self._complete(receiver, tail)
        elif self._await is _Await.LENGTH:
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
            and self._await is not _Await.CLOSE
            and self.transport.get_write_buffer_size() == 0
        )
        self._reset()
        if self._paused:  # by the very bytes that ended the response
            self.resume()
        if clean:
            self.upstream.put(self, time.monotonic())
        else:
            self.transport.abort()
        receiver.on_end(self)

    def _reset(self) -> None:
        self._receiver = None
        self._relay = None
        self._head = None
        self._decoder = None
        self._await = _Await.NOTHING

    def _break(self, fault: Fault) -> None:
        receiver = self._receiver
        self._reset()
        self.transport.abort()
        if receiver is not None:
            receiver.on_broken(self, fault)

    def _closed_early(self) -> None:
        elapsed_s = time.monotonic() - self._sent_at
        self._break(
            fault_of_reset(
                reused=self.uses > 1,
                any_byte=self._any_byte or bool(self._buffer),
                elapsed_s=elapsed_s,
            )
        )

    def eof_received(self) -> bool | None:
        receiver = self._receiver
        if receiver is not None:
            if self._await is _Await.CLOSE:
                self._complete(receiver, b"")
            else:
                self._closed_early()
        return None

    def connection_lost(self, exc: Exception | None) -> None:
        self.upstream.connections -= 1
        self.upstream.forget(self)
        if self._receiver is not None:
            self._closed_early()


class Upstream:
    """One engine: its address, its idle connections, what was counted for it."""

    __slots__ = (
        "_loop", "address", "authority", "connections", "idle", "name", "pool_idle_s", "retired",
    )  # fmt: skip

    def __init__(
        self, address: UpstreamAddress, loop: asyncio.AbstractEventLoop, *, pool_idle_s: float
    ) -> None:
        self.address = address
        self.name = address.name
        self.authority = address.url.removeprefix("http://").encode()
        self.pool_idle_s = pool_idle_s
        self.idle: list[UpstreamConnection] = []
        self.connections = 0
        self.retired = False
        self._loop = loop

    async def connect(self) -> UpstreamConnection:
        """Open a connection; raises OSError."""
        transport, connection = await self._loop.create_connection(
            lambda: UpstreamConnection(self, self._loop), self.address.host, self.address.port
        )
        watch_peer(transport.get_extra_info("socket"))
        return connection

    def take(self, now: float) -> UpstreamConnection | None:
        """Return the idle connection used last, if one is fresh enough."""
        while self.idle:
            connection = self.idle.pop()
            if now - connection.idle_since < self.pool_idle_s and connection.is_silent():
                return connection
            connection.transport.abort()
        return None

    def put(self, connection: UpstreamConnection, now: float) -> None:
        """Keep a connection for the next request, unless there will be none."""
        if self.retired:
            connection.transport.abort()
            return
        connection.idle_since = now
        self.idle.append(connection)

    def forget(self, connection: UpstreamConnection) -> None:
        """Drop a connection that has closed."""
        if connection in self.idle:
            self.idle.remove(connection)

    def retire(self) -> None:
        """Get no more requests: what is under way finishes, and its connections are closed."""
        self.retired = True
        self.close_idle()

    def close_idle(self, now: float | None = None) -> None:
        """Close the idle connections: those too old by `now`, or all."""
        for connection in list(self.idle):
            if now is None or now - connection.idle_since >= self.pool_idle_s:
                self.idle.remove(connection)
                connection.transport.abort()


class _Collector:
    """Receive a whole response for the control plane."""

    method = "GET"

    def __init__(self, done: asyncio.Future[tuple[ResponseHead, bytes]], limit_bytes: int) -> None:
        self._done = done
        self._limit_bytes = limit_bytes
        self._head: ResponseHead | None = None
        self._pieces: list[bytes] = []
        self._size = 0

    def on_head(self, connection: UpstreamConnection, head: ResponseHead) -> None:
        self._head = head

    def on_body(self, connection: UpstreamConnection, payload: bytes) -> None:
        self._pieces.append(payload)
        self._size += len(payload)
        if self._size > self._limit_bytes:
            connection.cancel(self)
            self._fail("the answer is too large")

    def on_end(self, connection: UpstreamConnection) -> None:
        if not self._done.done():
            assert self._head is not None
            self._done.set_result((self._head, b"".join(self._pieces)))

    def on_broken(self, connection: UpstreamConnection, fault: Fault) -> None:
        self._fail(fault)

    def relay(self) -> Relay | None:
        return None

    def _fail(self, why: str) -> None:
        if not self._done.done():
            self._done.set_exception(ConnectionError(why))


async def fetch(
    upstream: Upstream,
    path: str,
    *,
    timeout_s: float,
    fields: bytes = b"",
    limit_bytes: int = 2**20,
) -> tuple[ResponseHead, bytes]:
    """GET a path of an engine on a connection of its own: head and body.

    Raises OSError: refused, broken, or (TimeoutError) not there in time.
    """
    loop = asyncio.get_running_loop()
    connection: UpstreamConnection | None = None
    done: asyncio.Future[tuple[ResponseHead, bytes]] = loop.create_future()
    collector = _Collector(done, limit_bytes)
    try:
        async with asyncio.timeout(timeout_s):
            connection = await upstream.connect()
            connection.single = True  # never to be found in the pool of the data plane
            head = b"GET %b HTTP/1.1\r\nhost: %b\r\naccept: */*\r\nconnection: close\r\n%b\r\n" % (
                path.encode(),
                upstream.authority,
                fields,
            )
            connection.send(collector, head, b"", time.monotonic())
            return await done
    finally:
        if connection is not None:
            connection.cancel(collector)
