"""How things end: half-closed clients, faults of our own, answers that nobody asked for."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from zenlaunch.proxy.address import address_of
from zenlaunch.proxy.pump import Pump
from zenlaunch.proxy.upstream import Upstream, UpstreamConnection

from .harness import Client, until

Start = Callable[..., Any]


def asked_1_0(**do: Any) -> bytes:
    body = json.dumps({"model": "tiny", "prompt": "p", "stream": True, "do": do}).encode()
    head = "POST /v1/completions HTTP/1.0\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
    return (head % len(body)).encode() + body


def test_half_closing_in_an_answer_that_the_connection_ends_is_reset(
    engines: Start, proxy: Start
) -> None:
    """It is cancelled, but whoever still reads must not take what came for all of it."""
    door = proxy(engines(1))
    with door.connect() as client:
        client.raw(asked_1_0(events=1000, gap_s=0.01))
        client.wait_bytes(b" t3")
        client.fin()
        while client._more():
            pass
        assert client.was_reset
    until(door.idle)


def test_a_refusal_is_the_last_answer_of_a_client_that_has_half_closed(
    engines: Start, proxy: Start
) -> None:
    door = proxy(engines(1), half_close="answer")
    with door.connect() as client:
        body = json.dumps({"model": "tiny", "prompt": "p", "do": {"prefill_s": 0.2}}).encode()
        client.raw(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
            + body
            + b"GET /nope HTTP/1.1\r\nhost: x\r\n\r\n"
        )
        client.fin()
        assert client.read().status == 200
        assert client.read().status == 404
        assert client.closed()


def test_all_that_was_asked_before_a_half_close_is_answered_however_slowly_it_is_read(
    engines: Start, proxy: Start
) -> None:
    door = proxy(engines(1), half_close="answer")
    count = 25_000  # more than the sockets hold of their answers
    with Client(door.port, receive_buffer=2048) as client:

        def ask() -> None:
            client.raw(b"GET /nope HTTP/1.1\r\nhost: x\r\n\r\n" * count)
            client.fin()

        asking = threading.Thread(target=ask)
        asking.start()
        asking.join(10)
        time.sleep(0.5)
        got = bytearray()
        while data := client.sock.recv(65_536):
            got += data
    assert got.count(b"HTTP/1.1 404") == count


def test_a_failure_of_ours_is_no_end_of_an_answer_that_the_connection_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    heard: list[str] = []

    class Receiver:
        method = "GET"

        def on_head(self, *_: Any) -> None:
            heard.append("head")

        def on_body(self, *_: Any) -> None:
            raise RuntimeError("a mistake")

        def on_end(self, *_: Any) -> None:
            heard.append("end")

        def on_broken(self, *_: Any) -> None:
            heard.append("broken")

        def relay(self, *_: Any) -> None:
            return None

    async def run(pump: Pump) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            upstream = Upstream(address_of("i0", f"http://127.0.0.1:{port}"), pump, pool_idle_s=4)
            connection = upstream.connect((socket.AF_INET, ("127.0.0.1", port)))
            connection.send(Receiver(), b"GET / HTTP/1.1\r\n\r\n", b"", time.monotonic())
            engine, _ = server.accept()
            engine.sendall(b"HTTP/1.1 200 OK\r\n\r\nhalf of")
            for _ in range(200):
                await asyncio.sleep(0.01)
                if len(heard) > 1:
                    break
            engine.close()

    pump = Pump()
    with asyncio.Runner(loop_factory=pump.event_loop) as runner:
        runner.run(run(pump))
    assert heard == ["head", "broken"]
    assert "serving a connection failed" in caplog.text


class Hears:
    method = "GET"
    ended = False

    def on_head(self, *_: Any) -> None: ...

    def on_body(self, *_: Any) -> None: ...

    def on_end(self, *_: Any) -> None:
        self.ended = True

    def on_broken(self, *_: Any) -> None: ...

    def relay(self, *_: Any) -> None: ...


class Held:
    """An epoll set after whose wait a thread (a scrape's) keeps the interpreter for a while."""

    def __init__(self, epoll: Any, fd: int, engine: socket.socket) -> None:
        self._epoll, self._fd, self._engine = epoll, fd, engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._epoll, name)

    def poll(self, *args: Any) -> list[tuple[int, int]]:
        ready: list[tuple[int, int]] = self._epoll.poll(*args)
        if any(fd == self._fd for fd, _ in ready):
            self._engine.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil")
            self._fd = -1
            time.sleep(0.005)
        return ready


def test_what_came_after_the_wait_but_before_the_clock_is_seen_too() -> None:
    pump = Pump()

    async def run() -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            upstream = Upstream(address_of("i0", f"http://127.0.0.1:{port}"), pump, pool_idle_s=4)
            connection = upstream.connect((socket.AF_INET, ("127.0.0.1", port)))
            receiver = Hears()
            connection.send(receiver, b"GET / HTTP/1.1\r\n\r\n", b"", time.monotonic())
            engine, _ = server.accept()
        engine.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\ngood")
        while not receiver.ended:
            await asyncio.sleep(0)
        taken: list[UpstreamConnection | None] = []
        client, mine = socket.socketpair()
        mine.setblocking(False)
        wire = pump.adopt(mine, lambda _: taken.append(upstream.take(pump.now)))
        pump._epoll = Held(pump._epoll, wire.fd, engine)  # type: ignore[assignment]
        client.send(b"x")
        while not taken:
            await asyncio.sleep(0.01)
        assert taken[0] is None
        client.close()
        engine.close()

    with asyncio.Runner(loop_factory=pump.event_loop) as runner:
        runner.run(run())
