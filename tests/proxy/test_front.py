"""The front door over real sockets: HTTP/1.1 whole, trust, the proxy's own routes, its log."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .harness import HERE, Client, Engine, Proxy, until

Pair = tuple[Proxy, list[Engine]]
Start = Callable[..., Any]
POST = "POST /v1/completions HTTP/1.1\r\nhost: x\r\n"


def requests(engines: list[Engine]) -> int:
    return sum(int(engine.seen()["requests"]) for engine in engines)


# -- framing


@pytest.mark.parametrize(
    "head",
    [
        POST + "content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n",
        POST + "content-length: 2\r\ncontent-length: 3\r\n\r\n{}",
        POST + "content-length: +2\r\n\r\n{}",
        POST + "content-length : 2\r\n\r\n{}",
        POST + "x: a\r\n b\r\ncontent-length: 2\r\n\r\n{}",
        POST + "x: a\rb\r\ncontent-length: 2\r\n\r\n{}",
        POST + "x: a\0b\r\ncontent-length: 2\r\n\r\n{}",
        POST + "transfer-encoding: gzip\r\n\r\n",
        POST + "host: y\r\ncontent-length: 2\r\n\r\n{}",
        "POST /v1/completions HTTP/1.1\r\ncontent-length: 2\r\n\r\n{}",
        "POST /v1/completions HTTP/1.1\nhost: x\ncontent-length: 2\n\n{}",
        "\x16\x03\x01\x00\xa5\x01\x00\x00",
        POST + "transfer-encoding: chunked\r\n\r\nzz\r\n",
        POST + "transfer-encoding: chunked\r\n\r\n2\r\n{}0\r\n\r\n",
    ],
)
def test_44_ambiguous_framing_is_400_and_close(shared: Pair, head: str) -> None:
    proxy, engines = shared
    before = requests(engines)
    with proxy.connect() as client:
        client.raw(head)
        response = client.read()
        assert response.status == 400
        assert response["connection"] == "close"
        assert response["x-zenlaunch-source"] == "proxy"
        assert response.error["type"] == "invalid_request_error"
        assert client.closed()
    assert requests(engines) == before


def test_chunked_requests_are_reframed(shared: Pair) -> None:
    proxy, engines = shared
    with proxy.connect() as client:
        client.raw(POST + "x-mark: reframed\r\ntransfer-encoding: chunked\r\n\r\n")
        client.raw("3;ext=1\r\n{} \r\n")
        client.raw("1\r\n \r\n0\r\nx-trailer: 1\r\n\r\n")
        assert client.read().status == 200
        client.post()
        assert client.read().status == 200, "the connection goes on"
    head = next(h for e in engines for h in e.seen()["heads"] if "x-mark: reframed" in h)
    assert "content-length: 4" in head
    assert "transfer-encoding" not in head
    assert "x-trailer" not in head


def test_pipelined_requests_are_answered_in_order(shared: Pair) -> None:
    proxy, _ = shared
    with proxy.connect() as client:
        out = ""
        for at in range(20):
            body = json.dumps({"do": {"prefill_s": 0.02 if at % 3 == 0 else 0}})
            out += POST + f"x-tag: {at}\r\nx-request-id: r{at}\r\n"
            out += f"content-length: {len(body)}\r\n\r\n{body}"
            if at % 4 == 0:
                out += "GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
                out += "GET /nowhere HTTP/1.1\r\nhost: x\r\n\r\n"
        client.raw(out)
        for at in range(20):
            response = client.read()
            assert (response.status, response["x-tag"]) == (200, str(at))
            assert response["x-request-id"] == f"r{at}"
            if at % 4 == 0:
                assert client.read().status == 200
                assert client.read().status == 404


def test_pipelining_is_bounded(engines: Start, proxy: Start) -> None:
    one = engines(1)
    door = proxy(one, max_pipelined_bytes=10_000)
    client = door.connect()
    client.post(do={"prefill_s": 60})
    until(lambda: one[0].seen()["running"] == 1)
    client.raw("x" * 20_000)
    until(lambda: one[0].seen()["running"] == 0)
    until(door.idle)


def test_a_body_of_very_many_chunks(shared: Pair) -> None:
    proxy, engines = shared
    with proxy.connect() as client:
        client.raw(POST + "transfer-encoding: chunked\r\n\r\n")
        client.raw(b"1\r\nx\r\n" * 100_000 + b"0\r\n\r\n")
        client.raw(POST + "content-length: 2\r\n\r\n{}")
        assert client.read().status == 200
        assert client.read().status == 200
    assert 100_000 in [size for engine in engines for size in engine.seen()["bodies"]]


def test_one_byte_at_a_time(shared: Pair) -> None:
    proxy, _ = shared
    with proxy.connect() as client:
        client.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for char in POST + "content-length: 2\r\n\r\n{}":
            client.raw(char)
        assert client.read().status == 200


def test_expect_continue_is_answered_after_the_checks(shared: Pair) -> None:
    proxy, _ = shared
    with proxy.connect() as client:
        client.raw(POST + "content-length: 2\r\nexpect: 100-continue\r\n\r\n")
        assert client.read(interim=True).status == 100
        client.raw("{}")
        assert client.read().status == 200
    for extra, status in (
        ("content-length: 999999999", 413),
        ("expect: x\r\ncontent-length: 2", 417),
    ):
        with proxy.connect() as client:
            client.raw(POST + extra + "\r\nexpect: 100-continue\r\n\r\n")
            response = client.read(interim=True)
            assert response.status == status
            assert response["connection"] == "close"


def test_head_204_304_and_interim_answers(shared: Pair) -> None:
    proxy, _ = shared
    with proxy.connect() as client:
        for path in ("/version", "/health", "/v1/models"):
            client.send("HEAD", path)
            response = client.read()
            assert response.status == 200
            assert int(response["content-length"] or 0) > 0
        for status in (204, 304):
            client.post(do={"raw": f"HTTP/1.1 {status} X\r\netag: a\r\n\r\n"})
            response = client.read()
            assert (response.status, response["etag"]) == (status, "a")
        hint = "HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n"
        answer = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
        client.post(do={"raw": hint + answer})
        assert client.read(interim=True).body == b"ok"


@pytest.mark.parametrize("framing", ["chunked", "length", "close"])
@pytest.mark.parametrize("stream", [True, False])
def test_framings_of_answers(shared: Pair, framing: str, stream: bool) -> None:
    proxy, _ = shared
    with proxy.connect() as client:
        for _ in range(3):
            client.post(stream=stream, do={"framing": framing})
            response = client.read()
            assert response.status == 200
            assert response.whole
            assert b"[DONE]" in response.body or b"hello" in response.body


@pytest.mark.parametrize("stream", [True, False])
def test_http_1_0_clients(shared: Pair, stream: bool) -> None:
    proxy, _ = shared
    body = json.dumps({"stream": stream})
    with proxy.connect() as client:
        client.raw(f"POST /v1/completions HTTP/1.0\r\ncontent-length: {len(body)}\r\n\r\n{body}")
        response = client.read()
        assert response["transfer-encoding"] is None
        assert response["connection"] == "close"
        assert response.whole
        assert b"[DONE]" in response.body or b"hello" in response.body


def test_a_broken_stream_is_a_reset_where_the_end_of_the_connection_is_the_end(
    shared: Pair,
) -> None:
    proxy, _ = shared
    body = json.dumps({"stream": True, "do": {"end": "rst", "gap_s": 0.01}})
    with proxy.connect() as client:
        client.raw(f"POST /v1/completions HTTP/1.0\r\ncontent-length: {len(body)}\r\n\r\n{body}")
        response = client.read()
        assert response.reset
        assert "error" in response.events[-1]


def test_upgrade_h2c_is_served_as_http_1_1(shared: Pair) -> None:
    proxy, _ = shared
    with proxy.connect() as client:
        client.send(
            "POST", "/v1/completions", {}, connection="Upgrade, HTTP2-Settings", upgrade="h2c",
            http2_settings="AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA",
        )  # fmt: skip
        assert client.read().status == 200
        client.post()
        assert client.read().status == 200


def test_websocket_is_501(shared: Pair) -> None:
    proxy, _ = shared
    response = proxy.request(
        "GET", "/v1/realtime", connection="Upgrade", upgrade="websocket", sec_websocket_version="13"
    )
    assert response.status == 501
    assert response["x-zenlaunch-source"] == "proxy"


def test_h2_preface_and_unknown_routes(shared: Pair) -> None:
    proxy, engines = shared
    before = requests(engines)
    with proxy.connect() as client:
        client.raw("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        assert client.read().status == 505
    for path in ("/collective_rpc", "/v1/../collective_rpc", "/%63ollective_rpc", "/sleep", "/x",
                 "//collective_rpc", "/COLLECTIVE_RPC", "/v1/load_lora_adapter"):  # fmt: skip
        response = proxy.request("POST", path, {})
        assert response.status == 404
        assert response.error["code"] == "not_found"
    response = proxy.request("GET", "/v1/completions")
    assert response.status == 405
    assert response["allow"] == "POST, OPTIONS"
    assert requests(engines) == before


def test_a_refusal_keeps_the_connection_when_the_body_is_known(shared: Pair) -> None:
    proxy, _ = shared
    with proxy.connect() as client:
        for _ in range(3):
            client.send("POST", "/x", {"a": 1})
            assert client.read().status == 404
        client.post()
        assert client.read().status == 200


# -- what upstreams do


def test_bytes_after_a_complete_answer_reach_nobody(shared: Pair) -> None:
    proxy, engines = shared
    fake = "HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nEVIL"
    before = [e.seen()["connections"] for e in engines]
    with proxy.connect() as client:
        for stream in (True, False):
            client.post(stream=stream, do={"extra": fake})
            response = client.read()
            assert response.whole
            client.post()
            assert b"EVIL" not in client.read().body
    assert before


def test_bytes_on_an_idle_connection_close_it(shared: Pair) -> None:
    proxy, _ = shared
    raw = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
    with proxy.connect() as client:
        for _ in range(4):
            client.post(do={"raw": raw + "HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nEVIL"})
            assert client.read().body == b"ok"


@pytest.mark.parametrize(
    "raw",
    [
        "SSH-2.0-OpenSSH\r\n", "HTTP/1.1 200 OK\r\nx : y\r\n\r\n", "HTTP/1.1 abc OK\r\n\r\n",
        "HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\na",
        "HTTP/1.1 200 OK\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n",
        "HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\n\r\n",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    ],
)  # fmt: skip
def test_upstream_garbage_is_502(shared: Pair, raw: str) -> None:
    proxy, _ = shared
    response = proxy.request("POST", "/v1/completions", {"do": {"raw": raw, "end": "hang"}})
    assert response.status == 502
    assert response.error["code"] == "upstream_garbage"


def test_an_engine_that_answers_before_it_has_read_everything(shared: Pair) -> None:
    proxy, _ = shared
    with socket.create_server(("127.0.0.1", 0)) as early:
        folder = proxy.folder / "early"
        folder.mkdir()
        url = f"http://127.0.0.1:{early.getsockname()[1]}"

        kept: list[socket.socket] = []

        def serve() -> None:
            while True:
                connection, _ = early.accept()
                kept.append(connection)
                data = connection.recv(1000)
                if not data:
                    return
                status = b"200 OK" if data.startswith(b"GET /health") else b"413 Too Large"
                connection.sendall(b"HTTP/1.1 %b\r\ncontent-length: 2\r\n\r\nno" % status)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        engine = Engine.__new__(Engine)
        engine.port = early.getsockname()[1]
        assert engine.url == url
        door = Proxy([engine], folder)
        try:
            body = b'{"a": "' + b"x" * 20_000_000 + b'"}'
            response = door.request("POST", "/v1/completions", body)
            assert (response.status, response.body) == (413, b"no")
            until(door.idle)
        finally:
            door.stop()
            Client(early.getsockname()[1]).sock.close()  # the last one, that ends the thread
            thread.join(5)
            for connection in kept:
                connection.close()


# -- slow clients


def test_slow_heads_bodies_and_idle_connections_are_closed(engines: Start, proxy: Start) -> None:
    door = proxy(engines(1), head_timeout_s=0.2, body_grace_s=0.2, keep_alive_s=0.3)
    head, body, idle, mute = (door.connect() for _ in range(4))
    head.raw("POST /v1/comp")
    body.raw(POST + "content-length: 10\r\n\r\n{")
    idle.send("GET", "/health")
    assert idle.read().status == 200
    assert head.read().status == 408
    assert body.read().status == 408
    assert idle.closed()
    assert mute.closed()
    until(door.idle)


def test_a_client_that_never_reads_is_let_go(engines: Start, proxy: Start) -> None:
    one = engines(1)
    door = proxy(one, client_stall_s=0.3)
    client = Client(door.port, receive_buffer=4096)
    client.post("/v1/embeddings", do={"body_bytes": 50_000_000})
    until(lambda: one[0].seen()["running"] == 1)
    until(lambda: one[0].seen()["running"] == 0)
    until(door.idle)


@pytest.mark.parametrize("path", ["/nowhere", "/health"])
def test_a_pipeline_whose_answers_nobody_reads(engines: Start, proxy: Start, path: str) -> None:
    door = proxy(engines(1))
    client = Client(door.port, receive_buffer=4096)
    client.sock.settimeout(1)
    before = door.rss_bytes()
    with contextlib.suppress(OSError):  # it takes no more, or has hung up
        for _ in range(400):
            client.raw(f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n" * 1000)
    assert door.rss_bytes() - before < 20_000_000


def test_a_pipeline_that_is_read_late_is_answered_whole(shared: Pair) -> None:
    proxy, _ = shared
    client = Client(proxy.port, receive_buffer=4096)
    client.raw("GET /nowhere HTTP/1.1\r\nhost: x\r\n\r\n" * 20_000)
    threading.Event().wait(0.3)
    for _ in range(20_000):
        assert client.read().status == 404
    client.post()
    assert client.read().status == 200


def test_a_client_that_reads_slowly_is_not_let_go(engines: Start, proxy: Start) -> None:
    door = proxy(engines(1), client_stall_s=0.5)
    client = Client(door.port, receive_buffer=4096)
    client.post("/v1/embeddings", do={"body_bytes": 20_000_000})
    taken = 0
    for _ in range(50):
        taken += len(client.sock.recv(8192))
        threading.Event().wait(0.05)
    assert taken > 50_000
    assert door.status()["in_flight"] == 1


def test_connections_are_limited(engines: Start, proxy: Start) -> None:
    door = proxy(engines(1), max_connections=4)
    held = []
    for _ in range(4):
        client = door.connect()
        client.send("GET", "/health")
        client.read()
        held.append(client)
    with door.connect() as client:
        response = client.read()
        assert response.status == 503
        assert response["retry-after"]
    held.pop().sock.close()
    until(lambda: try_health(door.port))


def try_health(port: int) -> bool:
    with Client(port) as client:
        client.send("GET", "/health")
        try:
            return client.read().status == 200
        except (EOFError, OSError):
            return False


def test_an_answer_that_ends_while_the_client_is_slow(engines: Start, proxy: Start) -> None:
    """The engine's connection is fit for the next request, whatever state its reading was in."""
    door = proxy(engines(1))
    for size in (70_000, 300_000, 3_000_000):
        client = Client(door.port, receive_buffer=4096)
        client.post("/v1/embeddings", do={"body_bytes": size})
        until(lambda: door.status()["in_flight"] in (0, 1))
        threading.Event().wait(0.1)
        assert len(client.read().body) == size
        for _ in range(3):
            with door.connect() as other:
                other.sock.settimeout(3)
                other.post()
                assert other.read().status == 200


def test_half_closing_clients_hear_the_proxys_own_answers(shared: Pair) -> None:
    proxy, _ = shared
    for path in ("/health", "/v1/models", "/metrics", "/nowhere"):
        with proxy.connect() as client:
            client.send("GET", path)
            client.fin()
            assert client.read().status in (200, 404)
            assert client.closed()


def test_reset_after_a_half_close(engines: Start, proxy: Start) -> None:
    one = engines(1)
    door = proxy(one, half_close="answer", queue_timeout_s=0.5)
    client = door.connect()
    client.post(do={"prefill_s": 60})
    until(lambda: one[0].seen()["running"] == 1)
    client.fin()
    client.reset()
    until(lambda: one[0].seen()["running"] == 0)


def test_a_long_pipeline_of_refusals(shared: Pair) -> None:
    proxy, _ = shared
    with proxy.connect() as client:
        one = "GET /nowhere HTTP/1.1\r\nhost: x\r\n\r\n"
        client.raw(one * 3000)
        for _ in range(3000):
            assert client.read().status == 404


# -- trust


def test_api_keys_guard_every_inference_route(engines: Start, proxy: Start, tmp_path: Path) -> None:
    keys, admin, engine_key = tmp_path / "keys", tmp_path / "admin", tmp_path / "engine"
    keys.write_text("# people\nalice: sk-alice\n sk-bare \n")
    admin.write_text("root: sk-root\n")
    engine_key.write_text("sk-engine\n")
    one = engines(1)
    door = proxy(
        one, api_keys_file=str(keys), admin_keys_file=str(admin), upstream_key_file=str(engine_key),
        access_log=str(tmp_path / "access.log"),
    )  # fmt: skip
    for path in ("/v1/completions", "/tokenize", "/pooling", "/score"):
        for headers in ({}, {"authorization": "Bearer nope"}, {"authorization": "Basic sk-alice"}):
            response = door.request("POST", path, {}, **headers)
            assert response.status == 401
            assert response["www-authenticate"] == "Bearer"
            assert response.error["code"] == "invalid_api_key"
    assert door.request("GET", "/v1/models").status == 401
    assert door.request("GET", "/zenlaunch/status").status == 401
    assert door.request("GET", "/health").status == 200
    for headers in ({"authorization": "Bearer sk-alice"}, {"authorization": "bearer sk-bare"},
                    {"x_api_key": "sk-alice"}):  # fmt: skip
        assert door.request("POST", "/v1/completions", {}, **headers).status == 200
    heads = one[0].seen()["heads"]
    assert all("authorization: Bearer sk-engine" in head for head in heads)
    assert not any("sk-alice" in head or "sk-bare" in head for head in heads)
    assert door.request("OPTIONS", "/v1/completions").status == 200

    drain = "/zenlaunch/upstreams/i0/drain"
    assert door.request("POST", drain, authorization="Bearer sk-alice").status == 403
    assert door.request("POST", drain).status == 403
    assert door.request("POST", drain, authorization="Bearer sk-root").status == 200

    keys.write_text("bob: sk-bob\n")
    door.process.send_signal(signal.SIGHUP)
    until(lambda: door.request("GET", "/v1/models", authorization="Bearer sk-alice").status == 401)
    keys.write_text("")
    door.process.send_signal(signal.SIGHUP)
    until(lambda: "nothing was changed" in door.text())
    status = door.request("POST", "/v1/completions", {}, authorization="Bearer sk-bob").status
    assert status == 503, "drained, but admitted"
    until(lambda: '"key":"bob"' in (tmp_path / "access.log").read_text())
    text = (tmp_path / "access.log").read_text()
    assert '"key":"alice"' in text
    assert "sk-" not in text


def test_what_a_browser_may_read_is_the_engines_to_say(engines: Start, proxy: Start) -> None:
    one = engines(1)
    door = proxy(one)
    asked = {"origin": "http://page", "access-control-request-method": "GET"}
    assert door.request("OPTIONS", "/v1/models", **asked)["x-zenlaunch-upstream"] == "i0"
    assert "origin: http://page" in one[0].seen()["heads"][-1]
    answer = door.request("GET", "/v1/models", origin="http://page")
    assert answer["access-control-allow-origin"] == "*"
    assert door.request("GET", "/v1/models")["access-control-allow-origin"] is None
    assert door.request("OPTIONS", "/health").status == 405


def test_without_keys_the_clients_own_goes_to_the_engine(shared: Pair) -> None:
    proxy, engines = shared
    proxy.request("POST", "/v1/completions", {}, authorization="Bearer mine")
    assert any("authorization: Bearer mine" in h for e in engines for h in e.seen()["heads"])


def test_forwarded_fields(engines: Start, proxy: Start) -> None:
    one = engines(1)
    forged = {
        "x_forwarded_for": "6.6.6.6",
        "x_forwarded_proto": "https",
        "forwarded": "for=6.6.6.6",
    }
    door = proxy(one)
    door.request("POST", "/v1/completions", {}, **forged)
    head = one[0].seen()["heads"][-1]
    assert "6.6.6.6" not in head
    assert "x-forwarded-for: 127.0.0.1\r\nx-forwarded-proto: http\r\n" in head
    behind = proxy(one, trusted_peers=["127.0.0.0/8"])
    behind.request("POST", "/v1/completions", {}, **forged)
    head = one[0].seen()["heads"][-1]
    assert "x-forwarded-for: 6.6.6.6, 127.0.0.1\r\nx-forwarded-proto: https\r\n" in head


def test_request_ids_and_traces(shared: Pair) -> None:
    proxy, engines = shared
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    kept = proxy.request("POST", "/v1/completions", {}, x_request_id="my-id", traceparent=trace)
    assert kept["x-request-id"] == "my-id"
    head = next(h for e in engines for h in e.seen()["heads"] if "x-request-id: my-id" in h)
    assert f"traceparent: {trace}" in head
    ids = {proxy.request("POST", "/v1/completions", {})["x-request-id"] for _ in range(20)}
    ids |= {proxy.request("GET", "/x", x_request_id='bad"id')["x-request-id"]}
    assert len(ids) == 21


# -- the proxy's own routes


def admin_request(path: Path, method: str, target: str) -> tuple[int, Any]:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(path))
        sock.sendall(f"{method} {target} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
        data = b""
        while more := sock.recv(65536):
            data += more
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


def test_draining_an_upstream(engines: Start, proxy: Start, tmp_path: Path) -> None:
    both = engines()
    path = tmp_path / "admin.sock"
    door = proxy(both, admin_socket=str(path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with door.connect() as client:
        client.post(stream=True, do={"events": 20, "gap_s": 0.02})
        client.wait_bytes(b" t0")
        busy = next(u["name"] for u in door.status()["upstreams"] if u["in_flight"])
        assert admin_request(path, "POST", f"/zenlaunch/upstreams/{busy}/drain") == (
            200, {"name": busy, "draining": True, "in_flight": 1})  # fmt: skip
        assert door.upstream(busy)["state"] == "draining"
        for _ in range(6):
            assert door.request("POST", "/v1/completions", {})["x-zenlaunch-upstream"] != busy
        response = client.read()
        assert response.events[-1] == "[DONE]", "what was under way finishes"
    assert admin_request(path, "POST", f"/zenlaunch/upstreams/{busy}/resume")[1]["in_flight"] == 0
    seen = {door.request("POST", "/v1/completions", {})["x-zenlaunch-upstream"] for _ in range(6)}
    assert seen == {"i0", "i1"}
    assert admin_request(path, "POST", "/zenlaunch/upstreams/i9/drain")[0] == 404
    assert admin_request(path, "GET", "/zenlaunch/status")[1]["schema"] == 1
    assert door.request("POST", "/zenlaunch/upstreams/i0/drain").status == 403
    door.stop()
    assert not path.exists()


def test_a_stale_admin_socket_is_replaced_and_a_live_one_is_not(
    engines: Start, proxy: Start, tmp_path: Path
) -> None:
    path = tmp_path / "admin.sock"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    one = engines(1)
    door = proxy(one, admin_socket=str(path))
    assert admin_request(path, "GET", "/health")[0] == 200
    code, text = run_to_the_end(tmp_path, {"admin_socket": str(path), "listen_port": 0})
    assert code == 7
    assert "another proxy listens" in text
    assert door.request("GET", "/health").status == 200


def run_to_the_end(folder: Path, options: dict[str, Any]) -> tuple[int, str]:
    file = folder / "more.json"
    file.write_text(json.dumps({"upstreams": [], **options}))
    argv = [sys.executable, str(HERE / "launcher.py"), str(file)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=False)
    return done.returncode, done.stderr


def test_a_taken_port_is_exit_7_with_a_hint(shared: Pair, tmp_path: Path) -> None:
    proxy, _ = shared
    code, text = run_to_the_end(tmp_path, {"listen_port": proxy.port})
    assert code == 7
    assert f"cannot listen on 127.0.0.1:{proxy.port}: Address already in use" in text
    assert "ss -ltnp" in text


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"upstreams": [["a b", "http://x"]]}, "is not usable"),
        ({"upstreams": [["a", "http://x:1"], ["a", "http://x:2"]]}, "two upstreams"),
        ({"upstreams": [["a", "https://x"]]}, "is not the address of an engine"),
        ({"upstreams": [["a", "http://x/v1"]]}, "is not the address of an engine"),
        ({"upstreams": [["a", "http://x:99999"]]}, "upstream a"),
        ({"trusted_peers": ["nowhere"]}, "trusted peer"),
        ({"listen_port": 70000}, "port 70000"),
        ({"listen_host": "no.such.host.invalid"}, "cannot listen"),
        ({"first_byte_timeout_s": 0}, "first_byte_timeout_s must be more than 0"),
        ({"api_keys_file": "/nonexistent/keys"}, "cannot read /nonexistent/keys"),
        ({"admin_socket": "/nonexistent/sock"}, "admin socket"),
        ({"access_log": "/nonexistent/log"}, "cannot write /nonexistent/log"),
        ({"max_connections": 10**9}, "open files"),
        ({"listen_fd": 99}, "file descriptor 99"),
    ],
)
def test_options_that_cannot_be(tmp_path: Path, options: dict[str, Any], says: str) -> None:
    code, text = run_to_the_end(tmp_path, {"listen_port": 0, **options})
    assert code == 7, text
    assert says in text
    assert "Traceback" not in text


def test_a_socket_that_listens_already(tmp_path: Path) -> None:
    file = tmp_path / "fd.json"
    with socket.create_server(("127.0.0.1", 0)) as sock:
        os.set_inheritable(sock.fileno(), True)
        file.write_text(json.dumps({"upstreams": [], "listen_fd": sock.fileno()}))
        argv = [sys.executable, str(HERE / "launcher.py"), str(file)]
        process = subprocess.Popen(argv, pass_fds=(sock.fileno(),), stderr=subprocess.PIPE)
        try:
            port = sock.getsockname()[1]
            with Client(port) as client:
                client.send("GET", "/health")
                assert client.read().status == 503
        finally:
            process.terminate()
            assert process.wait(5) == 0
            assert process.stderr is not None
            process.stderr.close()


def test_a_socket_in_the_file_system_that_listens_already(tmp_path: Path) -> None:
    """As systemd passes one for `ListenStream=/path`."""
    file, path = tmp_path / "fd.json", tmp_path / "door"
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))
        sock.listen()
        file.write_text(json.dumps({"upstreams": [], "listen_fd": sock.fileno()}))
        argv = [sys.executable, str(HERE / "launcher.py"), str(file)]
        with subprocess.Popen(argv, pass_fds=(sock.fileno(),), stderr=subprocess.PIPE) as process:
            try:
                for name in ("", str(tmp_path / "client")):
                    with socket.socket(socket.AF_UNIX) as client:
                        if name:
                            client.bind(name)
                        client.settimeout(5)
                        client.connect(str(path))
                        client.sendall(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
                        assert client.recv(1000).startswith(b"HTTP/1.1 503 ")
            finally:
                process.terminate()
                assert process.wait(5) == 0


def test_metrics_of_all_instances(shared: Pair) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    proxy, _ = shared
    with proxy.connect() as client:
        client.post(stream=True, do={"events": 7})
        client.read()
    text = proxy.request("GET", "/metrics").body.decode()
    families = {f.name: f for f in text_string_to_metric_families(text)}
    assert len(families) == len(list(text_string_to_metric_families(text))), "each family once"
    running = families["vllm:num_requests_running"]
    assert running.type == "gauge"
    assert {s.labels["instance"] for s in running.samples} == {"i0", "i1"}
    assert all(s.labels["model_name"] == "tiny" for s in running.samples)
    assert families["vllm:ttft"].type == "histogram"
    assert families["zenlaunch_requests"].type == "counter"
    assert families["zenlaunch_time_to_first_byte_seconds"].type == "histogram"
    assert proxy.metric("zenlaunch_events_relayed_total") >= 8
    assert proxy.metric("zenlaunch_upstream_up") == 2
    assert json.loads(proxy.request("GET", "/load").body)["server_load"] == 0


def test_metrics_that_somebody_else_keeps(engines: Start, proxy: Start, tmp_path: Path) -> None:
    file = tmp_path / "instances.prom"
    door = proxy(engines(1), metrics_file=str(file))
    before = door.request("GET", "/metrics")
    assert before.status == 200  # there is no such file yet
    file.write_text("# TYPE zenlaunch_instance_restarts_total counter\n"
                    'zenlaunch_instance_restarts_total{instance="i0"} 3')  # fmt: skip
    assert door.metric("zenlaunch_instance_restarts_total") == 3
    assert door.metric("zenlaunch_upstream_up") == 1
    file.unlink()
    assert "zenlaunch_instance" not in door.request("GET", "/metrics").body.decode()


def test_access_log(engines: Start, proxy: Start, tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    door = proxy(engines(1), access_log=str(path))
    door.request("POST", "/v1/completions?key=secret", {"prompt": "private"}, x_request_id="a1")
    with door.connect() as client:
        client.post(stream=True, do={"end": "rst", "gap_s": 0.01})
        client.read()
    door.request("GET", '/"odd\x7e?secret')
    client = door.connect()
    client.post(do={"prefill_s": 60})
    until(lambda: door.status()["in_flight"] == 1)
    client.reset()
    until(lambda: path.exists() and '"status":499' in path.read_text())
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    by_id = {line["request_id"]: line for line in lines}
    first = by_id["a1"]
    assert (first["path"], first["status"], first["upstream"]) == ("/v1/completions", 200, "i0")
    assert first["bytes_out"] > 0
    assert first["duration_s"] >= first["first_byte_s"] > 0
    broken = next(line for line in lines if line["error"] == "truncated")
    assert (broken["status"], broken["upstream"]) == (502, "i0")
    assert any(line["path"] == '/"odd~' and line["status"] == 404 for line in lines)
    assert "secret" not in path.read_text()
    assert "private" not in path.read_text()
    path.rename(tmp_path / "access.log.1")
    door.process.send_signal(signal.SIGHUP)
    until(path.exists)
    door.request("GET", "/x")
    until(lambda: '"path":"/x"' in path.read_text())
