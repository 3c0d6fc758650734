"""HTTP/1.1 framing: what is taken, what is refused, and chunks in every cut."""

from __future__ import annotations

import contextlib
import time

import pytest

from zenlaunch.proxy.chunks import ChunkDecoder, are_whole_events, chunk
from zenlaunch.proxy.http1 import (
    BadMessage,
    field,
    parse_request_head,
    parse_response_head,
    problem_of_partial_head,
)

POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"


def refused(head: bytes) -> int:
    with pytest.raises(BadMessage) as caught:
        parse_request_head(head)
    assert caught.value.message
    return caught.value.status


def test_a_plain_request() -> None:
    head = parse_request_head(POST + b"Content-Length: 12\r\nX-A:  b \t\r\nconnection: Close, x-b")
    assert head.method == "POST"
    assert head.target == b"/v1/completions"
    assert head.length_bytes == 12
    assert not head.chunked
    assert not head.keep_alive
    assert head.one_hop == {b"close", b"x-b"}
    assert field(head.fields, b"x-a") == b"b"
    assert field(head.fields, b"x-c") is None


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (b"Content-Length: 5\r\nTransfer-Encoding: chunked", "TE with CL"),
        (b"Content-Length: 5\r\nContent-Length: 6", "differing CL"),
        (b"Content-Length: 5\r\nContent-Length: 5", "repeated CL"),
        (b"Content-Length: 5, 5", "CL list"),
        (b"Content-Length: +5", "signed CL"),
        (b"Content-Length: -5", "negative CL"),
        (b"Content-Length: 0x5", "hexadecimal CL"),
        (b"Content-Length: 5 5", "CL with space"),
        (b"Content-Length:", "empty CL"),
        (b"Content-Length: 5_0", "CL with underscore"),
        (b"Content-Length: 1234567890123456", "CL too long"),
        (b"Content-Length: \xb2", "CL not ASCII"),
        (b"X: a\r\n b", "obs-fold"),
        (b"X: a\r\n\tb", "obs-fold with tab"),
        (b"Content-Length : 5", "space before the colon"),
        (b"Transfer-Encoding\t: chunked", "tab before the colon"),
        (b" X: y", "leading space"),
        (b"X: a\rb", "bare CR"),
        (b"X: a\nb: c", "bare LF"),
        (b"X: a\0b", "NUL"),
        (b"X: a\x0bb", "vertical tab"),
        (b"X: a\x7f", "DEL"),
        (b"Transfer-Encoding: gzip, chunked", "unknown TE"),
        (b"Transfer-Encoding: chunked, chunked", "chunked twice"),
        (b"Transfer-Encoding: identity", "identity"),
        (b"Transfer-Encoding:", "empty TE"),
        (b"Transfer-Encoding: xchunked", "not chunked"),
        (b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked", "two TE"),
        (b'Transfer-Encoding: "chunked"', "quoted chunked"),
        (b"Host: y", "two Hosts"),
        (b"no colon here", "no colon"),
        (b": empty name", "empty name"),
        (b"b@d: x", "bad name"),
        (b"n\xc3\xa4me: x", "name not ASCII"),
        (b"Connection: a b", "malformed Connection"),
    ],
)
def test_ambiguous_heads_are_400(lines: bytes, why: str) -> None:
    assert refused(POST + lines) == 400, why


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (b"GET  / HTTP/1.1", 400), (b"GET /\tHTTP/1.1", 400), (b" GET / HTTP/1.1", 400),
        (b"GET / HTTP/1.1 ", 400), (b"GET /a b HTTP/1.1", 400), (b"GET / http/1.1", 400),
        (b"GET / HTTP/11", 400), (b"GET / HTTP/1.10", 400), (b"GET /", 400), (b"", 400),
        (b"G@T / HTTP/1.1", 400), (b"GET /\x80 HTTP/1.1", 400), (b"GET / HTTP/2.0", 505),
        (b"PRI * HTTP/2.0", 505), (b"GET / HTTP/0.9", 505),
        (b"GET /" + b"a" * 17000 + b" HTTP/1.1", 414),
    ],
)  # fmt: skip
def test_request_lines(line: bytes, status: int) -> None:
    assert refused(line + b"\r\nHost: x") == status


def test_host() -> None:
    assert refused(b"GET / HTTP/1.1") == 400
    assert refused(b"GET / HTTP/1.1\r\nHost: a/b") == 400
    assert refused(b"GET / HTTP/1.1\r\nHost: a b") == 400
    assert parse_request_head(b"GET / HTTP/1.0").host == b""
    for host in (b"", b"a:80", b"[::1]:80", b"a_b.c-d"):
        assert parse_request_head(b"GET / HTTP/1.1\r\nHost: " + host).host == host


def test_versions_and_persistence() -> None:
    assert parse_request_head(b"GET / HTTP/1.1\r\nHost: x").keep_alive
    assert not parse_request_head(b"GET / HTTP/1.0\r\nConnection: keep-alive").keep_alive
    assert refused(b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked") == 400
    assert parse_request_head(POST + b"Transfer-Encoding: Chunked").chunked


def test_expectations() -> None:
    assert parse_request_head(POST + b"Expect: 100-Continue").expects_continue
    assert refused(POST + b"Expect: a-miracle") == 417


def test_limits() -> None:
    assert refused(POST + b"\r\n".join(b"a: b" for _ in range(200))) == 431
    many = problem_of_partial_head(POST + b"a: " + b"x" * 70_000)
    assert many is not None
    assert many.status == 431
    long = problem_of_partial_head(b"GET /" + b"x" * 20_000)
    assert long is not None
    assert long.status == 414


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00",
        b"\r\nGET",
        b"GET / HTTP/1.1\nHost: x\n\n",
        b"GET / HTTP/1.1\r\na: \0",
        b"GET / HTTP/1.1\r\na: b\rc",
        b" GET",
    ],
)
def test_hopeless_beginnings_are_told_at_once(data: bytes) -> None:
    assert problem_of_partial_head(data) is not None


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"G",
        b"GET / HTTP/1.1",
        b"GET / HTTP/1.1\r",
        b"GET / HTTP/1.1\r\nHost: x\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r",
    ],
)
def test_hopeful_beginnings_wait(data: bytes) -> None:
    assert problem_of_partial_head(data) is None


def test_what_travels_upstream() -> None:
    head = parse_request_head(
        POST + b"Connection: x-hop\r\nX-Hop: 1\r\nTE: trailers\r\nUpgrade: h2c\r\nExpect: 100"
        b"-continue\r\nX-Zenlaunch-Upstream: i0\r\nX-Data-Parallel-Rank: 1\r\nX-Request-Id: 7\r\n"
        b"Forwarded: for=x\r\nX-Forwarded-For: y\r\nAuthorization: Bearer k\r\ntraceparent: 00-1"
    )
    assert head.up == b"authorization: Bearer k\r\ntraceparent: 00-1\r\n"
    less = head.up_keyless
    assert less == b"traceparent: 00-1\r\n"
    plain = parse_request_head(POST + b"A:b")
    assert plain.up == b"a: b\r\n"


def test_what_travels_down() -> None:
    head = parse_response_head(
        b"HTTP/1.1 200 OK\r\nDate: now\r\nContent-Length: 3\r\nConnection: x-a\r\nX-A: 1\r\n"
        b"Keep-Alive: timeout=5\r\nX-Zenlaunch-Source: fake\r\nSet-Cookie: a\r\nSet-Cookie: b"
    )
    assert head.down == b"HTTP/1.1 200 OK\r\ndate: now\r\nset-cookie: a\r\nset-cookie: b\r\n"
    assert parse_response_head(b"HTTP/1.0 404\r\nA:b").down == b"HTTP/1.1 404 \r\na: b\r\n"


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 20 OK",
        b"HTTP/2 200",
        b"HTTP/1.1 200OK",
        b"SSH-2.0",
        b"HTTP/1.1 200 OK\r\nA : b",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip",
        b"HTTP/1.1 200 O\0K",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
    ],
)
def test_responses_that_cannot_be_trusted(head: bytes) -> None:
    with pytest.raises(BadMessage):
        parse_response_head(head)


def test_responses() -> None:
    head = parse_response_head(b"HTTP/1.1 200")
    assert (head.status, head.reason, head.length_bytes, head.chunked) == (200, b"", None, False)
    assert head.keep_alive
    assert not parse_response_head(b"HTTP/1.0 200 OK").keep_alive
    assert parse_response_head(b"HTTP/1.0 200 OK\r\nConnection: keep-alive").keep_alive
    two = parse_response_head(b"HTTP/1.1 200 OK\r\nConnection: a\r\nConnection: close")
    assert two.one_hop == {b"a", b"close"}


BODY = b"5\r\nhello\r\n6;ext=1\r\n world\r\n1\r\n\n\r\n0\r\nTrailer: x\r\nB: y\r\n\r\n"


@pytest.mark.parametrize("cut", range(1, len(BODY)))
def test_chunks_in_every_cut(cut: int) -> None:
    decoder = ChunkDecoder()
    out = b""
    for piece in (BODY[:cut], BODY[cut:] + b"next"):
        payload, tail = decoder.feed(piece)
        out += b"".join(payload)
    assert out == b"hello world\n"
    assert decoder.done
    assert tail == b"next"


def test_chunks_byte_by_byte() -> None:
    decoder = ChunkDecoder()
    out = b""
    for at in range(len(BODY)):
        payload, tail = decoder.feed(BODY[at : at + 1])
        out += b"".join(payload)
        assert not tail
    assert out == b"hello world\n"
    assert decoder.done


@pytest.mark.parametrize(
    "body",
    [
        b"g\r\n",
        b"-1\r\n",
        b"+1\r\n",
        b"0x1\r\n",
        b" 1\r\na",
        b"1 \r\na",
        b"1\na\n",
        b"\r\n",
        b"1_0\r\n",
        b"1\r\nab\r\n",
        b"1\r\na\n",
        b"1\r\na\rX",
        b"1;\0\r\na",
        b"1\r\r\n",
        b"0\r\nbad line\r\n\r\n",
        b"0\r\n a: b\r\n\r\n",
        b"0\r\na : b\r\n\r\n",
        b"f" * 16 + b"\r\n",
        b"1;" + b"x" * 2000,
        b"0\r\n" + b"a: " + b"b" * 20_000 + b"\r\n\r\n",
        b"0\r\n" + b"a: bbbbbbbbbbbbb\r\n" * 2000,
        b"0\r\na: b\nc: d\r\n\r\n",
        b"0\r\n\n",
    ],
)
def test_malformed_chunks(body: bytes) -> None:
    with pytest.raises(BadMessage):
        ChunkDecoder().feed(body)


def test_boundaries() -> None:
    decoder = ChunkDecoder()
    assert decoder.at_boundary
    for data, expected in [(b"2", False), (b"\r\n", False), (b"ab\r", False), (b"\n", True)]:
        decoder.feed(data)
        assert decoder.at_boundary is expected
    decoder.feed(b"0\r\n")
    assert not decoder.at_boundary


E = b"data: 1\n\n"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (chunk(E), True),
        (chunk(E) * 3, True),
        (chunk(E * 3), True),
        (b"09\r\n" + E + b"\r\n", True),
        (chunk(b"a: 123456\n\n"), True),
        (b"9;a\r\n" + E + b"\r\n", False),
        (chunk(b"hello"), False),
        (chunk(E)[:-1], False),
        (chunk(E) + b"9", False),
        (chunk(E) + chunk(b"half"), False),
        (chunk(E) + b"0\r\n\r\n", False),
        (b"0\r\n\r\n", False),
        (b"", False),
        (b"\r\n", False),
        (b"+9\r\n" + E + b"\r\n", False),
        (b"9\r\n" + E + b"XX", False),
        (b"8\r\n" + E + b"\r\n", False),
        (b"a\r\n" + E + b"\r\n", False),
        (b"zz\r\n" + E + b"\r\n", False),
        (E, False),
    ],
)
def test_whole_events(data: bytes, expected: bool) -> None:
    for _ in range(2):  # sizes are known the second time
        assert are_whole_events(data) is expected


def test_an_empty_payload_is_no_chunk() -> None:
    assert chunk(b"") == b""


@pytest.mark.parametrize(
    "value",
    [b"a," + b" " * 60_000, b" ," * 30_000, b"," * 60_000, b"a " * 30_000, b"\t,\t" * 20_000,
     b"1" * 60_000, b"a" * 60_000, b"%" * 60_000],
    ids=range(8),
)  # fmt: skip
@pytest.mark.parametrize(
    "name", [b"connection", b"host", b"content-length", b"transfer-encoding", b"expect", b"x"]
)
def test_no_value_takes_long_to_refuse(name: bytes, value: bytes) -> None:
    """One request must not hold up every stream: what a pattern tries must not multiply."""
    head = b"GET / HTTP/1.1\r\n" + name + b": " + value + b'"'
    started = time.perf_counter()
    with contextlib.suppress(BadMessage):
        parse_request_head(head)
    with contextlib.suppress(BadMessage):
        parse_response_head(head.replace(b"GET / HTTP/1.1", b"HTTP/1.1 200 OK"))
    assert time.perf_counter() - started < 0.5
