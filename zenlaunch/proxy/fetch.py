"""Asking an engine something on a connection of its own: probes, models, metrics.

Apart from the data plane: whole answers, one timeout, nothing pooled. A probe that gets through
also finds the way to an engine that is known by a name.
"""

from __future__ import annotations

import asyncio
import socket
import time
from functools import partial
from typing import Any

from zenlaunch.proxy.aside import aside
from zenlaunch.proxy.attempt import Receive
from zenlaunch.proxy.http1 import ResponseHead
from zenlaunch.proxy.pump import Way
from zenlaunch.proxy.retry import Fault
from zenlaunch.proxy.upstream import Upstream, UpstreamConnection


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

    def relay(self, otherwise: Receive) -> Receive | None:
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
    """GET a path of an engine: head and body.

    Raises OSError: unknown, refused, broken, or (TimeoutError) not there in time.
    """
    head = b"GET %b HTTP/1.1\r\nhost: %b\r\naccept: */*\r\nconnection: close\r\n%b\r\n" % (
        path.encode(),
        upstream.authority,
        fields,
    )
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(timeout_s):
        problem: OSError | None = None
        for way in await _ways(upstream):
            connection = upstream.connect(way)
            connection.single = True  # never to be found in the pool of the data plane
            done: asyncio.Future[tuple[ResponseHead, bytes]] = loop.create_future()
            collector = _Collector(done, limit_bytes)
            try:
                connection.send(collector, head, b"", time.monotonic())
                answer = await done
            except OSError as error:
                problem = connection.wire.error or error
                if connection.wire.connected:
                    raise problem from error
            else:
                upstream.way = way
                return answer
            finally:
                connection.cancel(collector)
        raise problem or OSError(f"{upstream.address.host} has no address")


async def _ways(upstream: Upstream) -> list[Way]:
    """Return the addresses to try, in the resolver's order; raises OSError."""
    host, port = upstream.address.host, upstream.address.port
    try:
        # An address needs no resolver, and so no thread.
        found = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
        )
    except socket.gaierror:
        # One thread at a time: a resolver that is silent outlasts many probes.
        if upstream.resolving is None or upstream.resolving.done():
            ask = aside(partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM))
            upstream.resolving = asyncio.create_task(ask)
            upstream.resolving.add_done_callback(_heard)
        found = await asyncio.shield(upstream.resolving)
    return [(family, address) for family, _, _, _, address in found]


def _heard(task: asyncio.Task[Any]) -> None:
    """Take note of how a task ended, in case that nobody waits for it any more."""
    if not task.cancelled():
        task.exception()
