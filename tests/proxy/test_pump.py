"""The pump by itself, on a real event loop and real sockets; then streams that pass through it."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path

import pytest

from zenlaunch.proxy.fetch import fetch
from zenlaunch.proxy.options import UpstreamAddress
from zenlaunch.proxy.pump import Pump
from zenlaunch.proxy.upstream import Upstream
from zenlaunch.proxy.wire import Wire

from .harness import Engine, Proxy, until

CLIENTS = 200


class Ear:
    """Remember what a wire receives."""

    def __init__(self) -> None:
        self.heard: list[bytes] = []

    def __call__(self, data: bytes) -> None:
        self.heard.append(data)


def on_a_pump(scene: Callable[[Pump, socket.socket], Coroutine[None, None, None]]) -> None:
    """Run a scene with a pump below its event loop, and a socket that listens."""
    pump = Pump()
    with (
        socket.create_server(("127.0.0.1", 0), backlog=CLIENTS) as server,
        asyncio.Runner(loop_factory=pump.event_loop) as runner,
    ):
        runner.run(scene(pump, server))


async def soon(what: Callable[[], object]) -> None:
    deadline = time.monotonic() + 5
    while not what():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.001)


def to(server: socket.socket) -> tuple[int, object]:
    return socket.AF_INET, server.getsockname()


def joined(pump: Pump, server: socket.socket, ear: Ear) -> tuple[Wire, socket.socket]:
    """A wire that has written a byte, and its peer, who has not read it."""
    wire = pump.connect(to(server), ear)
    wire.write(b"x")
    return wire, server.accept()[0]


def test_a_large_body_goes_out_whole_and_in_order() -> None:
    body = bytes(range(256)) * 65_536  # 16 MiB
    got = bytearray()

    async def run(pump: Pump, server: socket.socket) -> None:
        wire = pump.connect(to(server), Ear())
        wire.write(b"head")
        wire.write(body)
        wire.write(b"tail")
        peer, _ = server.accept()

        def read() -> None:
            while len(got) < len(body) + 8:
                got.extend(peer.recv(2**20))

        await asyncio.to_thread(read)
        peer.close()
        assert wire.connected
        assert not wire.unsent_bytes

    on_a_pump(run)
    assert got == b"head" + body + b"tail"


def test_a_refused_connection_is_an_end_with_its_reason() -> None:
    async def run(pump: Pump, server: socket.socket) -> None:
        where = to(server)
        server.close()
        ear = Ear()
        wire = pump.connect(where, ear)
        wire.write(b"x")
        await soon(lambda: ear.heard)
        assert ear.heard == [b""]
        assert isinstance(wire.error, ConnectionRefusedError)
        assert not wire.connected
        wire.close()

    on_a_pump(run)


def test_what_came_before_a_broken_write_is_still_read() -> None:
    async def run(pump: Pump, server: socket.socket) -> None:
        ear = Ear()
        wire, peer = joined(pump, server, ear)
        peer.sendall(b"413 too much")
        peer.close()  # with a byte unread: a reset
        wire.write(b"y" * 1000)
        await soon(lambda: b"" in ear.heard)
        assert b"".join(ear.heard) in (b"413 too much", b"")
        assert wire.error is not None
        wire.close()

    on_a_pump(run)


def test_a_paused_wire_is_silent_even_when_its_peer_resets_it() -> None:
    async def run(pump: Pump, server: socket.socket) -> None:
        ear = Ear()
        wire, peer = joined(pump, server, ear)
        wire.pause()
        wire.pause()
        peer.close()
        before = time.process_time()
        await asyncio.sleep(0.2)
        assert time.process_time() - before < 0.1, "a paused wire must not keep the loop busy"
        assert not ear.heard
        wire.resume()
        await soon(lambda: ear.heard)
        assert ear.heard == [b""]
        wire.close()
        wire.close()

    on_a_pump(run)


def test_a_descriptor_used_again_is_not_given_what_its_predecessor_had_coming() -> None:
    """The first of two ready wires closes the second and opens a third in its place."""

    async def run(pump: Pump, server: socket.socket) -> None:
        third = Ear()
        wires: list[Wire] = []
        heard: list[bytes] = []

        def receive(data: bytes) -> None:
            heard.append(data)
            for wire in wires:
                wire.close()
            if len(wires) == 2:
                wires.append(pump.connect(to(server), third))

        wires += [pump.connect(to(server), receive), pump.connect(to(server), receive)]
        peers = [server.accept()[0], server.accept()[0]]
        for peer in peers:
            peer.sendall(b"old")
        await asyncio.sleep(0.05)
        assert heard == [b"old"]
        assert third.heard == []
        assert wires[2].fd >= 0
        peer, _ = server.accept()
        peer.sendall(b"new")
        await soon(lambda: third.heard)
        assert third.heard == [b"new"]
        for one in (*peers, peer):
            one.close()

    on_a_pump(run)


def test_one_that_fails_does_not_stop_the_others(caplog: pytest.LogCaptureFixture) -> None:
    async def run(pump: Pump, server: socket.socket) -> None:
        ear = Ear()

        def fail(data: bytes) -> None:
            raise ZeroDivisionError

        bad = pump.connect(to(server), fail)
        good = pump.connect(to(server), ear)
        peers = [server.accept()[0], server.accept()[0]]
        for peer in peers:
            peer.sendall(b"hello")
        await soon(lambda: ear.heard)
        assert ear.heard == [b"hello"]
        await soon(lambda: bad.fd < 0)
        assert good.fd >= 0
        for peer in peers:
            peer.close()

    on_a_pump(run)
    assert "ZeroDivisionError" in caplog.text


def test_an_owner_that_fails_at_the_end_too_ends_nobody_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def run(pump: Pump, server: socket.socket) -> None:
        def fail(data: bytes = b"") -> None:
            raise ZeroDivisionError

        ear = Ear()
        pairs = [socket.socketpair() for _ in range(3)]
        for mine, _ in pairs:
            mine.setblocking(False)
        bad = pump.adopt(pairs[0][0], fail, lost=fail)
        good = pump.adopt(pairs[1][0], ear)
        last = pump.adopt(pairs[2][0], Ear(), lost=fail)
        pairs[0][1].sendall(b"x")
        pairs[1][1].sendall(b"x")
        await soon(lambda: ear.heard)
        assert bad.fd < 0
        assert good.fd >= 0
        pump.hang_up()
        assert last.fd < 0
        assert good.fd < 0
        for _, peer in pairs:
            peer.close()

    on_a_pump(run)
    assert "cleaning up after a connection failed" in caplog.text


def test_a_name_is_resolved_by_the_probe_and_the_way_kept() -> None:
    """An engine on 127.0.0.1 called localhost, which may mean ::1 first."""
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"

    async def run(pump: Pump, server: socket.socket) -> None:
        port = server.getsockname()[1]
        address = UpstreamAddress(name="a", host="localhost", port=port)
        upstream = Upstream(address, pump, pool_idle_s=1)
        with pytest.raises(OSError, match="has not been resolved"):
            upstream.connect()

        def serve() -> None:
            peer, _ = server.accept()
            peer.recv(1000)
            peer.sendall(answer)
            peer.close()

        thread = threading.Thread(target=serve)
        thread.start()
        head, body = await fetch(upstream, "/health", timeout_s=5)
        assert (head.status, body) == (200, b"ok")
        thread.join()
        assert upstream.way == (socket.AF_INET, ("127.0.0.1", port))
        assert upstream.connections == 0
        unknown = UpstreamAddress(name="a", host="nobody.invalid", port=port)
        with pytest.raises(OSError, match=r".+"):
            await fetch(Upstream(unknown, pump, pool_idle_s=1), "/health", timeout_s=5)

    on_a_pump(run)


def test_a_connection_settles_before_it_is_used_again() -> None:
    """Bytes beyond an answer may come a moment after it, and are nobody's answer."""

    async def run(pump: Pump, server: socket.socket) -> None:
        address = UpstreamAddress(name="a", host="127.0.0.1", port=1)
        upstream = Upstream(address, pump, pool_idle_s=4)
        connections = [upstream.connect(to(server)) for _ in range(3)]
        peers = [server.accept()[0] for _ in connections]
        for at, connection in enumerate(connections):
            upstream.put(connection, 10.0 + at / 10_000)
        pump.seen = 10.0
        assert upstream.take(10.0005) is None
        pump.seen = 10.00115
        assert upstream.take(10.1) is connections[1], "the one used last of the settled"
        pump.seen = 10.0
        # What nobody has looked at since is looked at before it is used.
        peers[2].sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        connections[0].close()
        assert upstream.take(10.1) is None
        assert connections[2].wire.fd < 0
        assert upstream.connections == 1
        upstream.put(connections[1], 11.0)
        upstream.close_idle(14.0)
        assert connections[1].wire.fd >= 0
        upstream.close_idle(15.0)
        assert upstream.connections == 0
        for peer in peers:
            peer.close()

    on_a_pump(run)


def test_a_connection_that_was_only_counted_as_old_is_looked_at() -> None:
    """A look of its own at one says nothing of the others; nor does the sweep that ages them."""

    async def run(pump: Pump, server: socket.socket) -> None:
        address = UpstreamAddress(name="a", host="127.0.0.1", port=1)
        upstream = Upstream(address, pump, pool_idle_s=4)
        connections = [upstream.connect(to(server)) for _ in range(3)]
        peers = [server.accept()[0] for _ in connections]
        pump.seen = 10.0
        for connection in connections:
            upstream.put(connection, 10.5)
        assert upstream.take(11.0) is connections[2]
        upstream.close_idle(11.0)
        for peer in peers:
            peer.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        assert upstream.take(11.0001) is None
        connections[2].close()
        for peer in peers:
            peer.close()

    on_a_pump(run)


@pytest.mark.parametrize("said", [b"HTTP/1.1 200 OK\r\n\r\n", b""])
def test_what_an_idle_connection_says_unasked_closes_it(said: bytes) -> None:
    async def run(pump: Pump, server: socket.socket) -> None:
        address = UpstreamAddress(name="a", host="127.0.0.1", port=1)
        upstream = Upstream(address, pump, pool_idle_s=4)
        connection = upstream.connect(to(server))
        peer = server.accept()[0]
        upstream.put(connection, time.monotonic())
        peer.sendall(said) if said else peer.close()
        await soon(lambda: connection.wire.fd < 0)
        assert upstream.take(time.monotonic()) is None
        peer.close()

    on_a_pump(run)


# -- who comes in


def test_who_is_accepted_is_not_delayed_and_is_watched_by_the_kernel() -> None:
    async def run(pump: Pump, server: socket.socket) -> None:
        came: list[tuple[socket.socket, tuple[str, int]]] = []
        door = pump.listen(server, lambda sock, address: came.append((sock, address)))
        clients = [socket.create_connection(server.getsockname()) for _ in range(200)]
        await soon(lambda: len(came) == 200)
        for sock, _ in came:
            assert not sock.getblocking()
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60
        assert {address[1] for _, address in came} == {c.getsockname()[1] for c in clients}
        door.close()
        for one in (*clients, *(sock for sock, _ in came)):
            one.close()

    on_a_pump(run)


def test_without_descriptors_nobody_is_accepted_and_nothing_is_lost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def run(pump: Pump, server: socket.socket) -> None:
        came: list[socket.socket] = []
        client = socket.create_connection(server.getsockname())
        spare = os.dup(client.fileno())
        os.close(spare)  # the lowest free number
        resource.setrlimit(resource.RLIMIT_NOFILE, (spare, hard))
        try:
            pump.listen(server, lambda sock, address: came.append(sock))
            await soon(lambda: "no connection can be accepted" in caplog.text)
            before = time.process_time()
            await asyncio.sleep(0.3)
            assert time.process_time() - before < 0.1, "it must not ask over and over"
            assert not came
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        await soon(lambda: came)
        for one in (client, *came):
            one.close()

    on_a_pump(run)


# -- asyncio above it


def test_asyncio_has_its_turn_while_wires_are_never_silent() -> None:
    """Timers, threads and signals, while two wires throw a byte to and fro."""
    throws = 0

    async def run(pump: Pump, server: socket.socket) -> None:
        left = pump.connect(to(server), lambda data: throw(right, data))
        right = pump.adopt(server.accept()[0], lambda data: throw(left, data))
        right_sock = right.fd

        def throw(wire: Wire, data: bytes) -> None:
            nonlocal throws
            throws += 1
            wire.write(data)

        os.set_blocking(right_sock, False)
        left.write(b"x")
        loop = asyncio.get_running_loop()
        began = time.monotonic()
        await asyncio.sleep(0.05)
        assert 0.05 <= time.monotonic() - began < 0.5
        assert await asyncio.to_thread(lambda: 5) == 5
        got = asyncio.Event()
        loop.add_signal_handler(signal.SIGUSR1, got.set)
        os.kill(os.getpid(), signal.SIGUSR1)
        await asyncio.wait_for(got.wait(), 5)
        loop.remove_signal_handler(signal.SIGUSR1)
        assert throws > 100
        left.close()
        right.close()

    on_a_pump(run)


def test_what_a_wire_asks_of_asyncio_is_done_at_once() -> None:
    async def run(pump: Pump, server: socket.socket) -> None:
        done: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        wire = pump.connect(to(server), lambda data: done.set_result(time.monotonic()))
        peer = server.accept()[0]
        late = asyncio.get_running_loop().call_later(60, lambda: None)
        threading.Timer(0.1, peer.sendall, (b"x",)).start()
        at = await asyncio.wait_for(done, 5)
        assert time.monotonic() - at < 0.5
        late.cancel()
        wire.close()
        peer.close()

    on_a_pump(run)


# -- streams through it


def test_thousands_of_events_stay_whole_and_in_order(
    proxy: Callable[..., Proxy], engines: Callable[..., list[Engine]]
) -> None:
    door = proxy(engines(2))
    clients = [door.connect() for _ in range(50)]
    for client in clients:
        client.post(stream=True, max_tokens=400)
    for client in clients:
        response = client.read()
        assert response.whole
        texts = [e["choices"][0]["text"] for e in response.events if e != "[DONE]"]
        assert texts == [f" t{at}" for at in range(400)]
        assert response.events[-1] == "[DONE]"
    until(door.idle)
    assert door.metric("zenlaunch_events_relayed_total") == 50 * 401


def test_a_client_that_stalls_gets_every_event_and_holds_up_nobody(
    proxy: Callable[..., Proxy], engines: Callable[..., list[Engine]]
) -> None:
    door = proxy(engines(1))
    slow, quick = door.connect(), door.connect()
    count, text = 3000, "x" * 4000
    slow.post(stream=True, do={"events": count, "text": text})
    slow.wait_bytes(b"data: ")
    time.sleep(1.0)  # the engine has filled every buffer on the way by now
    before = door.rss_bytes()
    quick.post(stream=True, max_tokens=50)
    assert quick.read().events[-1] == "[DONE]"
    response = slow.read()
    assert response.whole
    assert len(response.events) == count + 1
    assert all(e["choices"][0]["text"] == text for e in response.events[:-1])
    assert door.rss_bytes() - before < 8_000_000
    until(door.idle)


def test_leaving_in_the_middle_of_a_stream_closes_the_engines_connection(
    proxy: Callable[..., Proxy], engines: Callable[..., list[Engine]]
) -> None:
    both = engines(1)
    door = proxy(both)
    for leave in ("reset", "fin"):
        client = door.connect()
        client.post(stream=True, do={"events": 10_000, "gap_s": 0.002})
        client.wait_bytes(b" t20")
        cancelled = both[0].seen()["cancelled"]
        getattr(client, leave)()
        until(lambda: both[0].seen()["cancelled"] == cancelled + 1, within_s=0.5)  # noqa: B023
    until(door.idle)


def test_an_engine_that_dies_in_the_middle_is_told_to_every_stream(
    proxy: Callable[..., Proxy], engines: Callable[..., list[Engine]]
) -> None:
    one = engines(1)
    door = proxy(one)
    clients = [door.connect() for _ in range(20)]
    for client in clients:
        client.post(stream=True, do={"events": 10_000, "gap_s": 0.005})
    for client in clients:
        client.wait_bytes(b" t10")
    one[0].process.kill()
    for client in clients:
        response = client.read()
        assert not response.whole
        assert response.events[-1]["error"]["code"] == "upstream_truncated"
        texts = [e["choices"][0]["text"] for e in response.events[:-1]]
        assert texts == [f" t{at}" for at in range(len(texts))]
    until(door.idle)


def test_what_runs_aside_leaves_no_thread_behind(
    proxy: Callable[..., Proxy], engines: Callable[..., list[Engine]]
) -> None:
    """A second thread, even asleep, makes each system call of the first dearer."""
    door = proxy(engines(2))
    assert door.request("GET", "/metrics").status == 200
    tasks = Path(f"/proc/{door.process.pid}/task")
    until(lambda: len(list(tasks.iterdir())) == 1)
