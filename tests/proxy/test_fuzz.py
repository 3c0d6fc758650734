"""Seeded fuzzing against h11: what we take, h11 takes too and reads alike.

Requests: bytes are mutated, cut at random and fed to our parser and to h11. Responses: the same
through the very protocol that talks to engines. Over sockets: pipelined requests, good and bad, of
which every answer must carry its own request's id. A failing case prints its seed and its bytes.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import h11
import pytest

from zenlaunch.proxy.chunks import ChunkDecoder
from zenlaunch.proxy.http1 import (
    BadMessage,
    ResponseHead,
    parse_request_head,
    problem_of_partial_head,
)
from zenlaunch.proxy.options import UpstreamAddress
from zenlaunch.proxy.retry import Fault
from zenlaunch.proxy.upstream import Upstream, UpstreamConnection

from .harness import Engine, Proxy, until

Parsed = tuple[Any, ...]
SEEDS = 8
CASES = 3000  # for each seed and each fuzzer

LINES = [
    b"Host: a", b"Host: b", b"Content-Length: 5", b"Content-Length: 3", b"content-length: +5",
    b"Content-Length: 05", b"Content-Length: 5,5", b"Transfer-Encoding: chunked",
    b"Transfer-Encoding: identity", b"transfer-encoding:\tchunked", b"Transfer-Encoding: CHUNKED",
    b"Transfer-Encoding: gzip, chunked", b"Transfer-Encoding : chunked", b"Connection: close",
    b"Connection: keep-alive, x", b"Upgrade: h2c", b"X: y", b"X:", b"X: \xe9", b"X: a\tb",
    b" folded",
    b"X: " + b"v" * 300, b"Expect: 100-continue", b"A b: c", b"Trailer: X", b"\x00: x", b"X: a\x01",
]  # fmt: skip
BODIES = [
    b"", b"hello", b"hel", b"5\r\nhello\r\n0\r\n\r\n",
    b"3;x=y\r\nabc\r\n2\r\nde\r\n0\r\nT: x\r\n\r\n",
    b"5\r\nhell\r\n0\r\n\r\n", b"5\nhello\n0\n\n", b"0\r\n\r\n", b"05\r\nhello\r\n00\r\n\r\n",
    b"+5\r\nhello\r\n0\r\n\r\n", b"5 \r\nhello\r\n0\r\n\r\n", b"5\r\nhello\r\n0\r\n\r\nGET /x",
]  # fmt: skip
BYTES = [b"\r", b"\n", b"\r\n", b"\0", b" ", b"\t", b":", b",", b"0", b"5", b"\xff", b";", b"/",
         b"%", b"\r\n\r\n", b"\x0b", b"GET / HTTP/1.1\r\n"]  # fmt: skip


def a_request(rng: random.Random) -> bytes:
    if rng.random() < 0.6:
        body = rng.choice([BODIES[1], *BODIES[3:5]])
        framing = b"Content-Length: 5" if body == b"hello" else b"Transfer-Encoding: chunked"
        return (
            b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n" + framing + b"\r\nX: y \r\n\r\n" + body
        )
    method = rng.choice([b"GET", b"POST", b"HEAD", b"OPTIONS", b"P@ST"])
    target = rng.choice([b"/v1/completions", b"/", b"*", b"http://a/b", b"/a b", b"/\xe9"])
    version = rng.choice([b"HTTP/1.1"] * 6 + [b"HTTP/1.0", b"HTTP/2.0", b"http/1.1"])
    chunked = rng.random() < 0.4
    lines = [b"Host: a"] if rng.random() < 0.9 else []
    if chunked:
        lines.append(b"Transfer-Encoding: chunked")
    elif rng.random() < 0.6:
        lines.append(b"Content-Length: 5")
    lines += rng.sample(LINES, rng.choice([0, 0, 0, 1, 2]))
    rng.shuffle(lines)
    body = rng.choice(BODIES[3:] if chunked else BODIES[:3])
    return b" ".join([method, target, version]) + b"\r\n" + b"".join(
        line + b"\r\n" for line in lines) + b"\r\n" + body  # fmt: skip


def a_response(rng: random.Random) -> bytes:
    if rng.random() < 0.5:
        body = rng.choice([BODIES[1], *BODIES[3:5]])
        framing = b"Content-Length: 5" if body == b"hello" else b"Transfer-Encoding: chunked"
        return b"HTTP/1.1 200 OK\r\n" + framing + b"\r\nX: y \r\n\r\n" + body
    status = rng.choice([b"200 OK"] * 5 + [b"204 No Content", b"304 X", b"100 Continue", b"20 OK",
                                           b"500", b"200 \xe9", b"999 X"])  # fmt: skip
    version = rng.choice([b"HTTP/1.1"] * 6 + [b"HTTP/1.0", b"HTTP/2"])
    chunked = rng.random() < 0.5
    lines = [b"Transfer-Encoding: chunked"] if chunked else []
    if not chunked and rng.random() < 0.8:
        lines.append(b"Content-Length: 5")
    lines += rng.sample(LINES, rng.choice([0, 0, 1, 2]))
    rng.shuffle(lines)
    body = rng.choice(BODIES[3:] if chunked else BODIES[:3])
    return version + b" " + status + b"\r\n" + b"".join(
        line + b"\r\n" for line in lines) + b"\r\n" + body  # fmt: skip


def mutated(rng: random.Random, data: bytes) -> bytes:
    for _ in range(rng.choice([0, 0, 1, 1, 2, 4])):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(5):
            case 0:
                data = data[:at] + rng.choice(BYTES) + data[at:]
            case 1:
                data = data[:at] + data[at + rng.randrange(1, 4) :]
            case 2:
                data = data[:at] + rng.choice(BYTES) + data[at + 1 :]
            case 3:
                data = data.replace(b"\r\n", b"\n", rng.randrange(1, 3))
            case 4:
                other = rng.randrange(len(data) + 1)
                data = data[:at] + data[min(at, other) : max(at, other)] + data[at:]
    return data


def pieces(rng: random.Random, data: bytes) -> list[bytes]:
    cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.choice([0, 0, 1, 3, 8])))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True) if a != b]


# -- requests


def ours(parts: list[bytes]) -> tuple[list[Parsed], bool]:
    """Read requests as `downstream` does; return them and whether the rest was refused."""
    found: list[Parsed] = []
    buffer = b""
    head = None
    body: list[bytes] = []
    decoder = ChunkDecoder()
    for part in parts:
        buffer += part
        while buffer:
            if head is None:
                end = buffer.find(b"\r\n\r\n")
                if end < 0:
                    if problem_of_partial_head(buffer) is not None:
                        return found, True
                    break
                try:
                    head = parse_request_head(buffer[:end])
                except BadMessage:
                    return found, True
                buffer = buffer[end + 4 :]
                body, decoder = [], ChunkDecoder()
                left = head.length_bytes or 0
            elif head.chunked:
                try:
                    payload, buffer = decoder.feed(buffer)
                except BadMessage:
                    return found, True
                body += payload
            else:
                body.append(buffer[:left])
                buffer, left = buffer[left:], left - len(body[-1])
            if decoder.done or (not head.chunked and left == 0):
                found.append(
                    (
                        head.method.encode(),
                        head.target,
                        sorted(f[:2] for f in head.fields),
                        b"".join(body),
                    )
                )
                closing = not head.keep_alive
                head = None
                if closing:
                    return found, False
    return found, False


def theirs(parts: list[bytes]) -> tuple[list[Parsed], bool]:
    connection = h11.Connection(h11.SERVER)
    found: list[Parsed] = []
    request: h11.Request | None = None
    body = b""
    try:
        for part in parts:
            connection.receive_data(part)
            while True:
                event = connection.next_event()
                if event is h11.NEED_DATA:
                    break
                if event is h11.PAUSED:
                    if connection.our_state is h11.SEND_RESPONSE:
                        connection.send(
                            h11.Response(status_code=200, headers=[("content-length", "0")])
                        )
                        connection.send(h11.EndOfMessage())
                    if connection.our_state is not h11.DONE:
                        return found, False
                    connection.start_next_cycle()
                elif isinstance(event, h11.Request):
                    request, body = event, b""
                elif isinstance(event, h11.Data):
                    body += event.data
                elif isinstance(event, h11.EndOfMessage):
                    assert request is not None
                    fields = sorted((bytes(k), bytes(v)) for k, v in request.headers)
                    found.append((bytes(request.method), bytes(request.target), fields, body))
                    connection.send(
                        h11.Response(status_code=200, headers=[("content-length", "0")])
                    )
                    connection.send(h11.EndOfMessage())
                    if connection.our_state is not h11.DONE:
                        return found, False
                    connection.start_next_cycle()
                else:
                    return found, False
    except (h11.RemoteProtocolError, h11.LocalProtocolError):
        return found, True
    return found, False


@pytest.mark.parametrize("seed", range(SEEDS))
def test_requests(seed: int) -> None:
    rng = random.Random(seed)
    both = refused = 0
    for _ in range(CASES):
        data = mutated(rng, b"".join(a_request(rng) for _ in range(rng.choice([1, 1, 2, 3]))))
        parts = pieces(rng, data)
        mine, bad = ours(parts)
        yours, worse = theirs([data])
        assert mine == yours[: len(mine)], f"seed {seed}: {data!r}"
        if worse and len(mine) == len(yours):
            # h11 stopped here with an error: whatever we do next, we took nothing that it refused.
            refused += 1
        both += len(mine)
        assert not (bad and not worse and len(mine) > len(yours))
    assert both > CASES / 4, "the fuzzer must also make what is good"
    assert refused > CASES / 10


# -- responses


class Wire:
    """As much of a wire, and of the pump that makes it, as a connection asks for."""

    fd = 0
    connected = True
    paused = False
    error = None
    unsent_bytes = 0
    seen = 0.0

    def connect(self, way: object, receive: object) -> Wire:
        return self

    def write(self, data: bytes) -> None:
        pass

    def close(self) -> None:
        self.fd = -1


class Recorder:
    method = "GET"

    def __init__(self) -> None:
        self.head: ResponseHead | None = None
        self.body = b""
        self.end = ""

    def on_head(self, connection: UpstreamConnection, head: ResponseHead) -> None:
        self.head = head

    def on_body(self, connection: UpstreamConnection, payload: bytes) -> None:
        self.body += payload

    def on_end(self, connection: UpstreamConnection) -> None:
        self.end = "whole"

    def on_broken(self, connection: UpstreamConnection, fault: Fault) -> None:
        self.end = "broken"

    def relay(self, otherwise: object) -> None:
        pass


def read_ours(parts: list[bytes]) -> Recorder:
    address = UpstreamAddress(name="a", host="h", port=1)
    upstream = Upstream(address, Wire(), pool_idle_s=1)  # type: ignore[arg-type]
    connection = upstream.connect((0, ""))
    recorder = Recorder()
    connection.send(recorder, b"", b"", 0.0)
    for part in parts:
        if connection.wire.fd < 0 or recorder.end:
            break
        connection.receive(part)
    if not recorder.end:
        connection.receive(b"")
    return recorder


def read_theirs(data: bytes) -> tuple[int, bytes] | None:
    connection = h11.Connection(h11.CLIENT)
    connection.send(h11.Request(method="GET", target="/", headers=[("host", "a")]))
    connection.send(h11.EndOfMessage())
    connection.receive_data(data)
    connection.receive_data(b"")
    status, body = 0, b""
    try:
        while True:
            event = connection.next_event()
            if isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage):
                return status, body
            elif (
                event is h11.NEED_DATA
                or event is h11.PAUSED
                or isinstance(event, h11.ConnectionClosed)
            ):
                return None
    except h11.RemoteProtocolError:
        return None


@pytest.mark.parametrize("seed", range(SEEDS))
def test_responses(seed: int) -> None:
    rng = random.Random(1000 + seed)
    both = 0
    for _ in range(CASES):
        data = mutated(rng, a_response(rng))
        mine = read_ours(pieces(rng, data))
        yours = read_theirs(data)
        assert mine.end in ("whole", "broken"), f"seed {seed}: {data!r}"
        if mine.end == "whole":
            assert mine.head is not None
            assert (mine.head.status, mine.body) == yours, f"seed {seed}: {data!r}"
            both += 1
    assert both > CASES / 5, "the fuzzer must also make what is good"


# -- over sockets


@pytest.mark.parametrize("seed", range(3))
def test_every_answer_carries_its_own_requests_id(
    shared: tuple[Proxy, list[Engine]], seed: int
) -> None:
    proxy, _ = shared
    rng = random.Random(2000 + seed)
    for case in range(120):
        wanted: list[str] = []
        out = b""
        for at in range(rng.randrange(1, 8)):
            tag = f"{seed}-{case}-{at}"
            one = rng.choice(MAKERS)(rng, tag)
            wanted.append(tag)
            out += one
        if rng.random() < 0.3:
            out += mutated(rng, a_request(rng))
        with proxy.connect() as client:
            for piece in pieces(rng, out):
                try:
                    client.raw(piece)
                except OSError:
                    break  # refused and closed already
            for tag in wanted:
                response = client.read()
                assert response["x-request-id"] == tag, f"seed {seed} case {case}: {out!r}"
                echoed = response["x-tag"]
                assert echoed in (None, tag)
                assert response.whole
    until(proxy.idle)


def _post(tag: str, body: bytes, *, path: str = "/v1/completions", chunked: bool = False) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: a\r\nx-request-id: {tag}\r\nx-tag: {tag}\r\n".encode()
    if not chunked:
        return head + b"content-length: %d\r\n\r\n%b" % (len(body), body)
    half = len(body) // 2 or 1
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in (body[:half], body[half:]) if p)
    return head + b"transfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"


def _do(rng: random.Random, tag: str) -> bytes:
    do: dict[str, Any] = {
        "framing": rng.choice(["chunked", "length"]),
        "status": rng.choice([200, 200, 200, 400]),
        "prefill_s": rng.choice([0, 0, 0.005]),
        "extra": rng.choice(["", "", "HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nX"]),
    }
    stream = rng.random() < 0.5
    body = json.dumps({"stream": stream, "max_tokens": rng.randrange(5), "do": do}).encode()
    return _post(tag, body, chunked=rng.random() < 0.4)


MAKERS: list[Callable[[random.Random, str], bytes]] = [
    _do,
    _do,
    lambda rng, tag: _post(tag, b"{}", path="/no/such"),
    lambda rng, tag: f"GET /health HTTP/1.1\r\nhost: a\r\nx-request-id: {tag}\r\n\r\n".encode(),
    lambda rng, tag: f"GET /version HTTP/1.1\r\nhost: a\r\nx-request-id: {tag}\r\n\r\n".encode(),
]
