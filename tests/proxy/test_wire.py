"""One wire on a real socket: its ends, its back-pressure; and the short way of a stream on it."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Coroutine

import pytest

from zenlaunch.proxy.attempt import Attempt
from zenlaunch.proxy.metrics import Counters
from zenlaunch.proxy.peer import reset_on_close
from zenlaunch.proxy.pump import Pump
from zenlaunch.proxy.wire import Wire

from .test_pump import soon


class Owner:
    """Hold a wire and the peer's socket; remember what is told."""

    def __init__(self, pump: Pump) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.peer = socket.create_connection(server.getsockname())
            mine, _ = server.accept()
        mine.setblocking(False)
        mine.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        self.heard: list[bytes] = []
        self.filled: list[bool] = []
        self.lost = 0
        self.wire: Wire = pump.adopt(
            mine,
            self.heard.append,
            filled=lambda: self.filled.append(self.wire.full),
            lost=self._lose,
        )

    def _lose(self) -> None:
        self.lost += 1

    def reset(self) -> None:
        reset_on_close(self.peer)
        self.peer.close()

    async def read(self) -> bytes:
        """Read to the end, as the peer."""

        def run() -> bytes:
            got = bytearray()
            while data := self.peer.recv(2**20):
                got += data
            return bytes(got)

        self.peer.settimeout(5)
        return await asyncio.to_thread(run)


def with_owner(scene: Callable[[Owner], Coroutine[None, None, None]]) -> None:
    """Run a scene with a wire."""
    pump = Pump()

    async def run() -> None:
        owner = Owner(pump)
        await scene(owner)
        owner.peer.close()
        owner.wire.close()
        owner.wire.close()
        assert owner.lost == 1

    with asyncio.Runner(loop_factory=pump.event_loop) as runner:
        runner.run(run())


LARGE = bytes(range(256)) * 20_000  # 5 MB


def test_after_the_peers_end_it_can_be_written_to_and_keeps_nobody_busy() -> None:
    async def scene(owner: Owner) -> None:
        owner.peer.shutdown(socket.SHUT_WR)
        await soon(lambda: owner.heard)
        before = time.process_time()
        await asyncio.sleep(0.2)
        assert time.process_time() - before < 0.1
        owner.wire.write(b"answer")
        assert owner.peer.recv(100) == b"answer"
        assert (owner.heard, owner.lost, owner.wire.error) == ([b""], 0, None)

    with_owner(scene)


def test_a_reset_after_the_peers_end_is_told_at_once() -> None:
    async def scene(owner: Owner) -> None:
        owner.peer.shutdown(socket.SHUT_WR)
        await soon(lambda: owner.heard)
        owner.reset()
        await soon(lambda: owner.lost)
        assert owner.heard == [b"", b""]
        assert owner.wire.error is not None

    with_owner(scene)


def test_a_reset_while_much_waits_is_told() -> None:
    async def scene(owner: Owner) -> None:
        owner.wire.write(LARGE)
        owner.reset()
        await soon(lambda: owner.lost)
        assert owner.heard[-1] == b""
        assert owner.wire.unsent_bytes == 0

    with_owner(scene)


def test_finish_sends_what_waits_and_hears_nothing_more() -> None:
    async def scene(owner: Owner) -> None:
        owner.wire.write(LARGE)
        owner.wire.finish()
        assert owner.lost == 0
        assert await owner.read() == LARGE
        await soon(lambda: owner.lost)
        assert owner.heard == []

    with_owner(scene)


def test_shut_ends_after_what_waits_and_still_reads() -> None:
    async def scene(owner: Owner) -> None:
        owner.wire.write(LARGE)
        owner.wire.shut()
        assert await owner.read() == LARGE
        owner.peer.sendall(b"late")
        await soon(lambda: owner.heard)
        assert owner.heard == [b"late"]
        assert owner.lost == 0

    with_owner(scene)


def test_closing_with_something_unsent_is_no_clean_end() -> None:
    async def scene(owner: Owner) -> None:
        owner.wire.write(LARGE)
        owner.wire.close()
        with pytest.raises(ConnectionResetError):
            await owner.read()

    with_owner(scene)


def test_a_reset_that_is_ours_reaches_the_peer() -> None:
    async def scene(owner: Owner) -> None:
        owner.wire.reset()
        with pytest.raises(ConnectionResetError):
            owner.peer.recv(1)

    with_owner(scene)


def test_it_tells_when_it_is_full_and_when_it_is_empty_again() -> None:
    async def scene(owner: Owner) -> None:
        wire = owner.wire
        while not wire.full:
            wire.write(b"x" * 10_000)
        assert wire.unsent_bytes > 65_536
        wire.write(b"y" * 10_000)
        assert owner.filled == [True]
        sent = asyncio.create_task(owner.read())
        await soon(lambda: not wire.full)
        assert wire.unsent_bytes <= 16_384
        await soon(lambda: not wire.unsent_bytes)
        wire.shut()
        got = await sent
        assert got.endswith(b"y" * 10_000)
        assert owner.filled == [True, False]

    with_owner(scene)


def test_it_knows_for_how_long_the_peer_has_taken_nothing() -> None:
    async def scene(owner: Owner) -> None:
        wire = owner.wire
        assert wire.stands_s(1.0) is None
        wire.write(LARGE)
        await asyncio.sleep(0.1)
        assert wire.stands_s(2.0) == 0.0
        assert wire.stands_s(5.0) == 3.0
        owner.peer.recv(2**20)
        await asyncio.sleep(0.1)
        assert wire.stands_s(6.0) == 0.0

    with_owner(scene)


# -- the short way


def in_a_chunk(payload: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(payload), payload)


def event(text: str) -> bytes:
    return b'data: {"id":"cmpl-1","choices":[{"text":"%b"}]}\n\n' % text.encode()


PLAIN = [
    pytest.param(in_a_chunk(event("hello")), 1, id="one"),
    pytest.param(in_a_chunk(event("x" * 300)), 1, id="three digits"),
    pytest.param(in_a_chunk(event("x" * 5000)), 1, id="four digits"),
    pytest.param(in_a_chunk(event("a")) + in_a_chunk(event("b")), 2, id="two chunks"),
    pytest.param(in_a_chunk(event("a") + event("b")), 2, id="two in a chunk"),
    pytest.param(in_a_chunk(b"event: x\n" + event("a")), 1, id="named"),
]
ODD = [
    pytest.param(b"", id="end"),
    pytest.param(in_a_chunk(b"data: [DONE]\n\n"), id="done"),
    pytest.param(in_a_chunk(event("a") + b"data: [DONE]\n\n"), id="done after another"),
    pytest.param(in_a_chunk(b'data: {"a":1}\rdata: [DONE]\n\n'), id="done after a CR"),
    pytest.param(in_a_chunk(b'data: {"error": {"code": 500}}\n\n' + b": " * 20), id="error, torn"),
    pytest.param(in_a_chunk(b'data: {"error": {"code": 500}, "a": 1}\n\n'), id="error"),
    pytest.param(in_a_chunk(event("hello")[:-1]), id="half an event"),
    pytest.param(in_a_chunk(event("hello"))[:-1], id="half a chunk"),
    pytest.param(in_a_chunk(event("hello")) + b"0\r\n\r\n", id="the last chunk too"),
    pytest.param(in_a_chunk(event("hello")).replace(b"\r\n", b";x=1\r\n", 1), id="extension"),
    pytest.param(in_a_chunk(event("hello")).replace(b"\n\n\r\n", b"\n\n\n\n"), id="not closed"),
]


def on_the_short_way(pieces: list[bytes]) -> tuple[bytes, list[bytes], Counters]:
    """Return what came out, what went the long way, and the counts."""
    pump = Pump()
    counters = Counters()
    long: list[bytes] = []
    out = b""

    async def run() -> None:
        nonlocal out
        owner = Owner(pump)
        attempt = Attempt(counters, started=time.monotonic(), hold_bytes=1)
        receive = attempt.open_short_way(owner.wire, pump, long.append)
        for piece in pieces:
            receive(piece)
        attempt.settle()
        attempt.settle()
        assert attempt.short_bytes == counters.bytes_received
        owner.wire.shut()
        out = await owner.read()
        owner.peer.close()

    with asyncio.Runner(loop_factory=pump.event_loop) as runner:
        runner.run(run())
    return out, long, counters


@pytest.mark.parametrize(("data", "events"), PLAIN)
def test_whole_events_go_on_as_they_are(data: bytes, events: int) -> None:
    out, long, counters = on_the_short_way([data] * 20)  # known from the second on
    assert out == data * 20
    assert not long
    assert counters.events == events * 20
    assert counters.bytes_received == len(data) * 20
    assert sum(counters.gaps.counts) == 20


@pytest.mark.parametrize("data", ODD)
def test_whatever_else_comes_is_looked_at(data: bytes) -> None:
    plain = in_a_chunk(event("hello"))
    same_size = in_a_chunk(event("x" * max(0, len(data) - len(plain) + 5)))
    out, long, counters = on_the_short_way([same_size, plain, data, data, plain])
    assert long == [data, data]
    assert out == same_size + plain * 2
    assert counters.events == 3


def test_what_a_slow_client_has_not_taken_stays_in_order() -> None:
    pieces = [in_a_chunk(event(f"{at:05d}" + "x" * 200)) for at in range(5000)]
    out, long, counters = on_the_short_way(pieces)
    assert out == b"".join(pieces)
    assert not long
    assert counters.events == 5000
