"""How LLM proxies fail in practice: one test for each known kind of fault, named by its number.

The numbers are those of the project's list of cases, collected from public issues of other proxies.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, free_ports, skip_for_want_of

from .harness import Client, Engine, Proxy, until

Pair = tuple[Proxy, list[Engine]]
Start = Callable[..., Any]

HOW_TO_LEAVE = ["reset", "fin"]


def running(engines: list[Engine]) -> int:
    return sum(int(engine.seen()["running"]) for engine in engines)


def leave(client: Client, how: str) -> float:
    at = time.monotonic()
    if how == "reset":
        client.reset()
    else:
        client.fin()
    return at


def cancelled_within_s(engines: list[Engine], left_at: float) -> float:
    until(lambda: running(engines) == 0, within_s=2)
    return max(float(engine.seen()["cancelled_at"]) for engine in engines) - left_at


@pytest.mark.parametrize("how", HOW_TO_LEAVE)
@pytest.mark.parametrize("head_first", [False, True], ids=["before-head", "head-sent"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_1_2_3_client_gone_in_prefill(
    shared: Pair, stream: bool, head_first: bool, how: str
) -> None:
    proxy, engines = shared
    client = proxy.connect()
    client.post(stream=stream, do={"prefill_s": 60, "head_first": head_first})
    until(lambda: running(engines) == 1)
    assert cancelled_within_s(engines, leave(client, how)) < 0.1
    assert proxy.upstream("i0")["errors"] == 0


@pytest.mark.parametrize("how", HOW_TO_LEAVE)
def test_1_client_gone_mid_stream(shared: Pair, how: str) -> None:
    proxy, engines = shared
    client = proxy.connect()
    client.post(stream=True, do={"events": 100_000, "gap_s": 0.01})
    client.wait_bytes(b" t3")
    assert cancelled_within_s(engines, leave(client, how)) < 0.1


def test_1_client_gone_while_queued(engines: Start, proxy: Start) -> None:
    one = engines(1)
    door = proxy(one, max_in_flight_per_upstream=1)
    first, second = door.connect(), door.connect()
    first.post(do={"prefill_s": 60})
    until(lambda: running(one) == 1)
    second.post()
    until(lambda: door.status()["queued"] == 1)
    second.reset()
    until(lambda: door.status()["queued"] == 0)
    first.reset()
    until(door.idle)
    assert one[0].seen()["requests"] == 1


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_4_5_half_closing_client_is_answered_when_asked_so(
    engines: Start, proxy: Start, stream: bool
) -> None:
    door = proxy(engines(1), half_close="answer")
    with door.connect() as client:
        client.post(stream=stream, do={"prefill_s": 0.1})
        client.fin()
        response = client.read()
        assert response.status == 200
        assert response.whole
        assert b"[DONE]" in response.body or b"hello" in response.body
        assert client.closed()


@pytest.mark.parametrize("end", ["rst", "fin", "half-event", "exit"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_8_9_10_broken_stream_is_told_and_never_ended(
    engines: Start, proxy: Start, end: str, path: str
) -> None:
    door = proxy(engines(1))
    with door.connect() as client:
        client.post(path, stream=True, do={"events": 3, "end": end, "gap_s": 0.01})
        response = client.read()
    assert not response.whole
    assert response.status == 200
    assert response.events[-1]["error"]["code"] == "upstream_truncated"
    assert len(response.events) == 4, "each whole event, then the error"
    assert "[DONE]" not in response.events
    assert b'finish_reason": "stop' not in response.body
    assert door.upstream("i0")["errors"] == 1
    until(door.idle)


def test_10_stream_without_done_is_an_error_where_done_is_due(shared: Pair) -> None:
    proxy, _ = shared
    with proxy.connect() as client:
        client.post(stream=True, do={"end": "no-done"})
        response = client.read()
        assert not response.whole
        assert "error" in response.events[-1]
    with proxy.connect() as client:  # other routes have their own endings
        client.post("/v1/responses", stream=True, do={"end": "no-done"})
        assert client.read().whole


@pytest.mark.parametrize("end", ["fin", "half-event", "engine-error"])
def test_10_stream_with_a_length(shared: Pair, end: str) -> None:
    """An engine that states a length and keeps it, or not: no byte may spill into what follows."""
    proxy, _ = shared
    with proxy.connect() as client:
        client.post(stream=True, do={"framing": "length", "events": 2})
        assert client.read().events[-1] == "[DONE]"
        client.post(stream=True, do={"framing": "length", "end": end, "events": 2, "gap_s": 0.01})
        response = client.read()
        assert not response.whole
        assert "error" in response.events[-1]
        assert client.closed()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses"])
def test_8_break_inside_a_very_large_event(shared: Pair, path: str) -> None:
    """An event that is too large to be held is told apart from the error that follows it."""
    proxy, _ = shared
    with proxy.connect() as client:
        head = (
            "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 900000\r\n\r\n"
        )
        raw = head + 'data: {"a": "' + "x" * 200_000
        client.post(path, stream=True, do={"raw": raw, "end": "fin"})
        response = client.read()
    assert not response.whole
    last = response.body.removesuffix(b"\n\n").rpartition(b"\n\n")[2]
    assert json.loads(last.rpartition(b"data: ")[2])["error"]["code"] == "upstream_truncated"


def test_10_stream_delimited_by_close(shared: Pair) -> None:
    proxy, _ = shared
    with proxy.connect() as client:
        client.post(stream=True, do={"framing": "close"})
        response = client.read()
        assert response.whole
        assert response.events[-1] == "[DONE]"
    with proxy.connect() as client:
        client.post(stream=True, do={"framing": "close", "end": "fin"})
        response = client.read()
        assert not response.whole
        assert "error" in response.events[-1]


@pytest.mark.parametrize("end", ["rst", "fin", "exit"])
@pytest.mark.parametrize("framing", ["length", "chunked"])
def test_9_truncated_whole_answer_is_502(
    engines: Start, proxy: Start, end: str, framing: str
) -> None:
    door = proxy(engines(1))
    with door.connect() as client:
        client.post(do={"end": end, "framing": framing, "gap_s": 0.01})
        response = client.read()
    assert response.status == 502
    assert response.whole
    assert response["x-zenlaunch-source"] == "proxy"
    assert response.error["code"] == "upstream_broken"


def test_9_truncated_large_answer_is_aborted(shared: Pair) -> None:
    proxy, _ = shared
    with proxy.connect() as client:
        client.post("/v1/embeddings", do={"body_bytes": 8_000_000, "end": "rst"})
        assert not client.read().whole


def test_11_engine_error_is_relayed_as_it_is_and_counted(shared: Pair) -> None:
    proxy, _ = shared
    before = proxy.metric("zenlaunch_errors_total", kind="engine-error")
    with proxy.connect() as client:
        client.post(stream=True, do={"events": 2, "end": "engine-error"})
        response = client.read()
    assert response.whole
    assert response.events[-2]["error"]["message"].startswith("EngineCore")
    assert response.events[-1] == "[DONE]"
    assert proxy.metric("zenlaunch_errors_total", kind="engine-error") == before + 1


def test_12_idle_connection_closed_by_the_server_costs_nothing(
    engines: Start, proxy: Start
) -> None:
    one = engines(1)
    one[0].do(None, idle_s=0.02)
    door = proxy(one)
    with door.connect() as client:
        for _ in range(40):
            client.post()
            assert client.read().status == 200
            threading.Event().wait(0.019)  # as near the server's timeout as can be
    assert door.upstream("i0")["errors"] == 0


def test_12_reset_of_a_reused_connection_is_retried_on_a_fresh_one(
    engines: Start, proxy: Start
) -> None:
    one = engines(1)
    door = proxy(one)
    assert door.request("POST", "/v1/completions", {}).status == 200
    one[0].do({"raw": "", "end": "rst"}, times=1)
    threading.Event().wait(0.02)  # a connection settles before it is used again
    assert door.request("POST", "/v1/completions", {}).status == 200
    assert one[0].seen()["requests"] == 3
    assert door.upstream("i0")["errors"] == 0
    assert door.metric("zenlaunch_retries_total", kind="idle-reset") == 1


def test_13_connections_of_clients_are_kept(shared: Pair) -> None:
    proxy, _ = shared
    with proxy.connect() as client:
        for stream in (False, True, False, True):
            client.post(stream=stream)
            response = client.read()
            assert response.whole
            assert response["connection"] is None


def test_14_one_hung_engine_hurts_nobody_else(engines: Start, proxy: Start) -> None:
    both = engines()
    door = proxy(both)
    both[0].do({"end": "hang", "prefill_s": 600})
    hung = [door.connect() for _ in range(20)]
    for client in hung:
        client.post()
    until(lambda: running(both[:1]) >= 1)
    for _ in range(20):
        with door.connect() as client:
            client.post(max_tokens=1)
            client.sock.settimeout(0.5)
            try:
                assert client.read().status == 200
            except TimeoutError:
                continue  # this one went to the hung engine too
    assert both[1].seen()["requests"] >= 15
    for client in hung:
        client.sock.close()


def test_14_21_models_do_not_wait_for_one_that_hangs(engines: Start, proxy: Start) -> None:
    both = engines()
    door = proxy(both)
    both[0].signal(signal.SIGSTOP)
    started = time.monotonic()
    assert door.request("GET", "/v1/models").status == 200
    assert time.monotonic() - started < 2


def test_14_connections_that_are_never_taken_go_elsewhere(engines: Start, proxy: Start) -> None:
    one = engines(1)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        stuck = Engine.__new__(Engine)
        stuck.port = full.getsockname()[1]

        def be_healthy_once() -> None:
            connection, _ = full.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")

        thread = threading.Thread(target=be_healthy_once)
        thread.start()
        door = proxy([stuck, *one], connect_timeout_s=0.2, probe_ready_interval_s=60,
                     policy="round-robin")  # fmt: skip
        thread.join()
        queue = [socket.socket() for _ in range(4)]  # more than the kernel keeps
        for sock in queue:
            sock.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                sock.connect(full.getsockname())
        for _ in range(4):
            assert door.request("POST", "/v1/completions", {}).status == 200
        assert door.metric("zenlaunch_errors_total", instance="i0", kind="connect-timeout") >= 1
        for sock in queue:
            sock.close()


def test_14_both_sides_are_watched_by_the_kernel(shared: Pair) -> None:
    """A machine that is gone sends nothing: only keep-alive probes find out."""
    proxy, engines = shared
    with proxy.connect() as client:
        client.post(do={"prefill_s": 60})
        until(lambda: running(engines) == 1)
        rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        ours = f":{proxy.port:04X}"
        theirs = {f":{engine.port:04X}" for engine in engines}
        # "02:..." in the sixth column is a keep-alive timer (Documentation/networking/proc_net_tcp)
        watched = [r for r in rows if r[3] == "01" and r[5].startswith("02")]
        assert [r for r in watched if r[1].endswith(ours)]
        assert [r for r in watched if r[2][8:] in theirs]
        client.reset()


def test_14_first_byte_timeout_is_504(engines: Start, proxy: Start) -> None:
    door = proxy(engines(1), first_byte_timeout_s=0.2)
    with door.connect() as client:
        client.post(do={"prefill_s": 60})
        response = client.read()
    assert response.status == 504
    assert response.error["code"] == "upstream_timeout"
    until(door.idle)


def test_14_gap_timeout_ends_a_stream_honestly(engines: Start, proxy: Start) -> None:
    one = engines(1)
    door = proxy(one, gap_timeout_s=0.2)
    with door.connect() as client:
        client.post(stream=True, do={"events": 2, "end": "hang"})
        response = client.read()
    assert not response.whole
    assert response.events[-1]["error"]["code"] == "upstream_stalled"
    until(lambda: running(one) == 0)


def test_16_25_all_gone_is_503_and_recovers_by_itself(engines: Start, proxy: Start) -> None:
    both = engines()
    door = proxy(both)
    for engine in both:
        engine.stop()
    until(lambda: door.request("POST", "/v1/completions", {}).status == 503)
    response = door.request("POST", "/v1/completions", {})
    assert response.status == 503
    assert int(response["retry-after"] or 0) >= 1
    assert response["x-zenlaunch-source"] == "proxy"
    until(lambda: door.request("GET", "/health").status == 503)
    both[0].start()
    until(lambda: door.request("POST", "/v1/completions", {}).status == 200, within_s=3)


def test_16_a_spike_of_refusals_is_forgotten(engines: Start, proxy: Start) -> None:
    both = engines()
    door = proxy(both, eject_s=0.2)
    for engine in both:
        engine.do({"status": 408}, times=10)
    for _ in range(20):
        door.request("POST", "/v1/completions", {})
    until(lambda: both[0].seen()["requests"] + both[1].seen()["requests"] >= 20)
    for engine in both:
        engine.do(None, times=0)
    until(lambda: all(u["state"] == "ready" for u in ask_and_status(door)), within_s=3)


def ask_and_status(door: Proxy) -> list[dict[str, Any]]:
    assert door.request("POST", "/v1/completions", {}).status == 200
    return list(door.status()["upstreams"])


def test_25_starts_and_listens_without_engines(proxy: Start) -> None:
    nobody = Engine()
    nobody.stop()
    door = proxy([nobody], ready=False)
    assert door.request("GET", "/health").status == 503
    assert door.request("GET", "/v1/models").status == 503
    assert door.request("POST", "/v1/completions", {}).error["code"] == "no_instance"
    assert door.upstream("i0")["state"] == "starting"


def test_17_2000_open_streams(engines: Start, proxy: Start) -> None:
    both = engines()
    door = proxy(both)
    before = door.rss_bytes()
    clients = [door.connect() for _ in range(2000)]
    for client in clients:
        client.post(stream=True, do={"events": 1, "end": "hang"})
    for client in clients:
        client.wait_bytes(b" t0")
    assert door.status()["in_flight"] == 2000
    assert [u["in_flight"] for u in door.status()["upstreams"]] == [1000, 1000]
    assert (door.rss_bytes() - before) / 2000 < 40_000
    for client in clients:
        client.reset()
    until(door.idle)


def test_20_host_is_rewritten(shared: Pair) -> None:
    proxy, engines = shared
    proxy.request("POST", "/v1/completions", {}, host="public.example")
    heads = [head for engine in engines for head in engine.seen()["heads"][-1:]]
    hosts = [line for head in heads for line in head.split("\r\n") if line.startswith("host: ")]
    assert all(line.startswith("host: 127.0.0.1:") for line in hosts)
    assert any("x-forwarded-host: public.example" in head for head in heads)


def test_21_models_of_the_living(proxy: Start) -> None:
    both = [Engine("lora-a"), Engine("lora-b")]
    try:
        door = proxy(both)
        ids = [m["id"] for m in json.loads(door.request("GET", "/v1/models").body)["data"]]
        assert ids == ["tiny", "lora-a", "lora-b"]
        both[0].stop()
        ids = [m["id"] for m in json.loads(door.request("GET", "/v1/models").body)["data"]]
        assert ids == ["tiny", "lora-b"]
        both[1].stop()
        assert door.request("GET", "/v1/models").status == 503
    finally:
        for engine in both:
            engine.stop()


@pytest.mark.parametrize(
    "text",
    ["[", "[" * 100_000, '{"data": 1}', '{"data": [1]}', '{"data": [{"id": []}]}', "\xff", "[]",
     '{"data": [{"id": ' + "9" * 5000 + "}]}", "x" * 9_000_000],
    ids=range(9),
)  # fmt: skip
def test_21_an_instance_that_talks_nonsense_hides_nobody(shared: Pair, text: str) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    proxy, engines = shared
    engines[0].do(None, **{"/v1/models": text, "/metrics": f"<html>\n{text}\n# TYPE\nok 1\n"})
    response = proxy.request("GET", "/v1/models")
    assert [m["id"] for m in json.loads(response.body)["data"]] == ["tiny"]
    metrics = proxy.request("GET", "/metrics").body.decode()
    families = {f.name: f for f in text_string_to_metric_families(metrics)}
    assert {s.labels["instance"] for s in families["vllm:ttft"].samples} == {"i1"}
    assert ("ok" in families) == (len(text) < 9_000_000)


def test_23_counts_are_zero_after_10000_aborted_requests(shared: Pair) -> None:
    proxy, engines = shared
    before = proxy.metric("zenlaunch_requests_total")
    gone_before = proxy.metric("zenlaunch_cancelled_total")
    for at in range(10_000):
        client = proxy.connect()
        client.post(stream=at % 2 == 0, do={"prefill_s": 0 if at % 3 else 30, "events": 50})
        if at % 5 == 0:
            client.sock.settimeout(0.001)
            with contextlib.suppress(TimeoutError):
                client.sock.recv(100)
        leave(client, HOW_TO_LEAVE[at % 2])
        client.sock.close()
    until(proxy.idle, why="a count leaked")
    until(lambda: running(engines) == 0)
    # They really were requests (a reset can overtake one), and their clients really left.
    assert proxy.metric("zenlaunch_requests_total") - before > 9_500
    assert proxy.metric("zenlaunch_cancelled_total") - gone_before > 7_500
    assert sum(engine.seen()["cancelled"] for engine in engines) > 500


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422])
def test_24_4xx_never_ejects(shared: Pair, status: int) -> None:
    proxy, _ = shared
    errors = [u["errors"] for u in proxy.status()["upstreams"]]
    for _ in range(10):
        response = proxy.request("POST", "/v1/completions", {"do": {"status": status}})
        assert response.status == status
        assert response.reason == "Told"
    assert [u["errors"] for u in proxy.status()["upstreams"]] == errors
    assert {u["state"] for u in proxy.status()["upstreams"]} == {"ready"}


def test_28_permit_is_held_to_the_end_of_the_body(engines: Start, proxy: Start) -> None:
    one = engines(1)
    door = proxy(one, max_in_flight_per_upstream=1, max_queued=1, queue_timeout_s=0.3)
    first, second, third = door.connect(), door.connect(), door.connect()
    first.post(stream=True, do={"events": 1, "end": "hang"})
    first.wait_bytes(b" t0")
    second.post()
    until(lambda: door.status()["queued"] == 1)
    third.post()
    refused = third.read()
    assert refused.status == 429
    assert refused["retry-after"]
    late = second.read()
    assert late.status == 503
    assert late.error["code"] == "queue_timeout"
    assert one[0].seen()["requests"] == 1
    second.post()
    until(lambda: door.status()["queued"] == 1)
    first.reset()
    assert second.read().status == 200
    for client in (first, second, third):
        client.sock.close()


def test_14_a_request_that_must_wait_for_one_instance_holds_up_nobody_else(
    engines: Start, proxy: Start
) -> None:
    both = engines()
    door = proxy(both, max_in_flight_per_upstream=1, eject_s=0.05)
    clients = {}
    for _ in both:  # one at each; the second is to lose its instance
        client = door.connect()
        client.post(do={"prefill_s": 60})
        until(lambda: door.status()["in_flight"] > len(clients))
        clients[len(clients)] = client
    victim = next(at for at in (0, 1) if both[at].seen()["running"])
    both[victim].stop()
    until(lambda: door.status()["queued"] == 1)
    both[victim].start()
    until(lambda: door.request("POST", "/v1/completions", {}).status == 200)
    assert door.status()["queued"] == 1, "it may not go back to where it failed"


def test_29_fast_failures_attract_nobody(engines: Start, proxy: Start) -> None:
    both = engines()
    door = proxy(both)
    both[0].do({"status": 500})
    statuses = [door.request("POST", "/v1/completions", {}).status for _ in range(60)]
    assert statuses.count(500) <= 3
    assert both[1].seen()["requests"] >= 57


def test_30_retry_goes_elsewhere(engines: Start, proxy: Start) -> None:
    three = engines(3)
    door = proxy(three)
    for engine in three[:2]:
        engine.do({"status": 503})
    for _ in range(12):
        assert door.request("POST", "/v1/completions", {}).status == 200
    three[2].do({"status": 503, "headers": {"retry-after": "7"}})
    last = door.request("POST", "/v1/completions", {})
    assert last.status == 503
    assert last["x-zenlaunch-upstream"], (
        "an engine's own refusal is relayed when nobody else is left"
    )


def test_30_dead_engine_loses_nothing_that_had_not_begun(engines: Start, proxy: Start) -> None:
    both = engines()
    door = proxy(both)
    clients = [door.connect() for _ in range(20)]
    for client in clients:
        client.post(stream=True, do={"prefill_s": 0.5, "head_first": True})
    until(lambda: running(both) == 20)
    both[0].stop()
    for client in clients:
        response = client.read()
        assert response.status == 200
        assert response.events[-1] == "[DONE]"
        client.sock.close()


def test_30_fifty_kills_during_slow_prefills(engines: Start, proxy: Start) -> None:
    """Nothing is lost that had not begun, whether its engine had sent the head or not."""
    four: list[Engine] = engines(4)
    door = proxy(four, eject_s=0.05)
    for _ in range(50):
        clients = [door.connect() for _ in range(8)]
        for at, client in enumerate(clients):
            client.post(stream=at % 2 == 0, do={"prefill_s": 0.1, "head_first": at % 4 < 3})
        until(lambda: door.status()["in_flight"] == 8)
        busiest = max(door.status()["upstreams"], key=lambda u: int(u["in_flight"]))
        victim = four[int(busiest["name"][1:])]
        until(lambda one=victim: one.seen()["running"] > 0)  # and has sent the heads
        victim.stop()
        victim.begin()
        for client in clients:
            response = client.read()
            assert response.status == 200, response.body
            assert response.whole
            assert b"[DONE]" in response.body or b"hello" in response.body
            client.sock.close()
    assert door.metric("zenlaunch_retries_total", kind="died") >= 50, "every kill hit somebody"
    until(door.idle)


def test_30_poison_prompt_kills_two_at_most(engines: Start, proxy: Start) -> None:
    four = engines(4)
    door = proxy(four)
    for warm in range(8):  # so that the poison goes over connections that were used before
        assert door.request("POST", "/v1/completions", {"n": warm}).status == 200
    response = door.request("POST", "/v1/completions", {"do": {"end": "exit"}})
    assert response.status == 502
    until(lambda: sum(engine.process.poll() is not None for engine in four) == 2)
    assert door.request("POST", "/v1/completions", {}).status == 200


def test_32_48_first_byte_timeouts_eject_and_the_ejected_gets_only_probes(
    engines: Start, proxy: Start
) -> None:
    both = engines()
    door = proxy(both, first_byte_timeout_s=0.1, eject_s=30, policy="round-robin")
    both[0].do({"prefill_s": 600})
    statuses = [door.request("POST", "/v1/completions", {}).status for _ in range(8)]
    assert statuses.count(504) == 3
    upstream = door.upstream("i0")
    assert upstream["state"] == "ejected"
    assert 25 < upstream["ejected_until"] - time.time() < 31
    before = both[0].seen()
    for _ in range(10):
        assert door.request("POST", "/v1/completions", {}).status == 200
    until(lambda: both[0].seen()["probes"] > before["probes"] + 1)
    assert both[0].seen()["requests"] == before["requests"]


def test_32_34_an_engine_that_stands_still_and_says_it_is_well(
    engines: Start, proxy: Start
) -> None:
    both = engines()
    door = proxy(both, hang_s=0.3, probe_ready_interval_s=0.05)
    stands = "vllm:num_requests_running 1\nvllm:iteration_tokens_total_count %d\n"
    clients = []
    for at, engine in enumerate(both):
        engine.do({"prefill_s": 60}, times=1, **{"/metrics": stands % 7})
        client = door.connect()
        client.post()
        until(lambda at=at: door.status()["in_flight"] == at + 1)
        clients.append(client)
    both[1].do(None, times=0, **{"/metrics": "nothing\n"})  # silent too, but it does not say
    until(lambda: door.upstream("i0")["state"] == "ejected")
    before = both[0].seen()["requests"]
    for _ in range(10):
        assert door.request("POST", "/v1/completions", {})["x-zenlaunch-upstream"] == "i1"
    assert both[0].seen()["requests"] == before
    assert door.upstream("i1")["state"] == "ready"
    both[1].stop()
    until(lambda: door.upstream("i1")["state"] == "unready")
    assert door.request("POST", "/v1/completions", {})["x-zenlaunch-upstream"] == "i0", "the last"
    for steps in range(100):  # a long prefill: silent, and it moves
        both[0].do(None, times=0, **{"/metrics": stands % steps})
        if door.upstream("i0")["state"] == "ready":
            break
        threading.Event().wait(0.05)
    assert door.upstream("i0")["state"] == "ready"


def test_48_half_open_return(engines: Start, proxy: Start) -> None:
    both = engines()
    door = proxy(both, eject_s=0.3, policy="round-robin")
    both[0].do({"status": 500}, times=4)
    while door.upstream("i0")["state"] != "ejected":
        door.request("POST", "/v1/completions", {})
    until(lambda: door.upstream("i0")["state"] == "half-open")
    until(lambda: door.request("POST", "/v1/completions", {}).status == 500)  # the trial fails
    assert door.upstream("i0")["state"] == "ejected"
    until(lambda: door.upstream("i0")["state"] == "half-open")
    until(lambda: door.request("POST", "/v1/completions", {}) and
          door.upstream("i0")["state"] == "ready")  # fmt: skip


def test_33_35_busy_engine_that_misses_probes_stays_while_tokens_flow(
    engines: Start, proxy: Start
) -> None:
    one = engines(1)
    door = proxy(one, probe_timeout_s=0.05)
    with door.connect() as client:
        client.post(stream=True, do={"events": 1000, "gap_s": 0.01})
        client.wait_bytes(b" t3")
        probes = one[0].seen()["probes"]
        one[0].do(None, health=0)
        until(lambda: one[0].seen()["probes"] > probes + 4)
        assert door.upstream("i0")["state"] == "ready"
    until(lambda: door.upstream("i0")["state"] == "unready")  # silent, and no tokens: three misses
    one[0].do(None, health=200)
    until(lambda: door.upstream("i0")["state"] == "ready")


def test_36_events_leave_within_5_ms(shared: Pair) -> None:
    proxy, _ = shared
    with proxy.connect() as client:
        client.post(stream=True, do={"events": 100, "gap_s": 0.01, "stamp": True})
        response = client.read()
    late = []
    for at, data in response.arrivals:
        for part in data.split(b"data: ")[1:]:
            if part.startswith(b"{"):
                written = json.loads(part.split(b"\n\n")[0])["choices"][0]["text"]
                late.append(at - float(written))
    late.sort()
    assert len(late) == 100
    assert late[50] < 0.005
    assert late[90] < 0.02, "with two CPUs shared by the tests some are late"


def test_36_events_in_pieces_arrive_whole(shared: Pair) -> None:
    proxy, _ = shared
    with proxy.connect() as client:
        client.post(stream=True, do={"events": 20, "split": True})
        response = client.read()
    assert len(response.events) == 21


def test_37_buffering_is_forbidden(shared: Pair) -> None:
    proxy, _ = shared
    with proxy.connect() as client:
        client.post(stream=True)
        response = client.read()
    assert response["x-accel-buffering"] == "no"
    assert response["cache-control"] == "no-cache"


NGINX = """
daemon off; worker_processes 1; pid pid; error_log error.log;
events {}
http {
  access_log off; client_body_temp_path t1; proxy_temp_path t2; fastcgi_temp_path t3;
  uwsgi_temp_path t4; scgi_temp_path t5;
  server {
    listen 127.0.0.1:PORT;
    proxy_http_version 1.1; proxy_read_timeout 900s; client_max_body_size 64m;
    location / { proxy_pass http://127.0.0.1:BEHIND; }
  }
}
"""


def test_37_events_pass_at_once_through_nginx_as_the_readme_has_it(
    shared: Pair, tmp_path: Path
) -> None:
    proxy, _ = shared
    program = shutil.which("nginx")
    if program is None:
        skip_for_want_of("nginx", "apt install nginx")
    for setting in re.findall(r"proxy_http.*", NGINX)[0].split("; "):
        assert setting.rstrip(";") in (ROOT / "README.md").read_text()
    port = free_ports(1)
    conf = tmp_path / "nginx.conf"
    conf.write_text(NGINX.replace("PORT", str(port)).replace("BEHIND", str(proxy.port)))
    tmp_path.chmod(0o755)
    nginx = subprocess.Popen([program, "-p", str(tmp_path), "-c", str(conf), "-e", "error.log"])
    try:
        until(lambda: not refuses(port))
        with Client(port) as client:
            client.post(stream=True, do={"events": 6, "gap_s": 0.1})
            response = client.read()
        assert response.events[-1] == "[DONE]"
        assert response.arrivals[-1][0] - response.arrivals[0][0] > 0.4, "nginx kept them back"
    finally:
        nginx.terminate()
        nginx.wait(5)


def test_38_comments_keep_a_long_prefill_alive(engines: Start, proxy: Start) -> None:
    one = engines(1)
    door = proxy(one, sse_keepalive_s=0.05)
    with door.connect() as client:
        client.post(stream=True, do={"prefill_s": 0.4})
        client.wait_bytes(b": keep-alive")
        response = client.read()
    assert response.whole
    assert response.body.count(b": keep-alive") >= 2
    assert response.events[-1] == "[DONE]"
    with door.connect() as client:  # the head is out: an error can only be told in the stream
        client.post(stream=True, do={"prefill_s": 0.3, "status": 400})
        response = client.read()
    assert not response.whole
    assert response.events[-1]["error"]["code"] == 400
    for do in (  # what is no event stream is told in one, and not put into it
        {"type": "text/plain", "framing": "chunked", "status": 500},
        {"type": "text/plain", "framing": "chunked", "body_bytes": 3_000_000},
        {"headers": {"content-encoding": "gzip"}},
    ):
        with door.connect() as client:
            client.post(stream=True, do={"prefill_s": 0.2, **do})
            response = client.read()
        assert not response.whole
        *comments, last = response.body.removesuffix(b"\n\n").split(b"\n\n")
        assert all(comment.startswith(b": keep-alive") for comment in comments)
        assert "error" in json.loads(last.removeprefix(b"data: "))
    with door.connect() as client:  # looked into for `stream`, but no JSON that can be read
        client.send("POST", "/v1/completions", b"[" * 100_000)
        assert client.read().status == 200
    with door.connect() as client:  # not asked for a stream: nothing of the kind
        client.post(do={"prefill_s": 0.2})
        assert client.read().body.startswith(b"{")


def test_40_41_large_answer_slow_client_flat_memory(engines: Start, proxy: Start) -> None:
    door = proxy(engines(1))
    client = Client(door.port, receive_buffer=4096)
    client.post("/v1/embeddings", do={"body_bytes": 50_000_000})
    client.wait_bytes(b"\r\n\r\n")
    before = door.rss_bytes()
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        client.sock.recv(16)
        threading.Event().wait(0.016)
    assert door.rss_bytes() - before < 8_000_000
    client.sock.close()
    until(door.idle)
    response = door.request("POST", "/v1/embeddings", {"do": {"body_bytes": 50_000_000}})
    assert response.whole
    assert len(response.body) == 50_000_000


def test_42_large_requests_pass_and_too_large_ones_are_told_early(shared: Pair) -> None:
    proxy, engines = shared
    image = json.dumps({"image": "A" * 20_000_000}).encode()
    assert proxy.request("POST", "/v1/chat/completions", image).status == 200
    assert len(image) in [size for engine in engines for size in engine.seen()["bodies"]]
    with proxy.connect() as client:
        client.raw("POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 70000000\r\n\r\n")
        response = client.read()
        assert response.status == 413
        assert response["connection"] == "close"
        assert response.error["code"] == "body_too_large"
        client.raw(b"x" * 1_000_000)  # swallowed: closing at once could destroy the answer
        assert client.closed()


def test_42_chunked_request_over_the_limit(engines: Start, proxy: Start) -> None:
    door = proxy(engines(1), max_body_bytes=100_000)
    with door.connect() as client:
        client.raw("POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        client.raw("c000\r\n" + "x" * 0xC000 + "\r\n")
        client.raw("ffff\r\n" + "x" * 0xFFFF + "\r\n")
        assert client.read().status == 413
    until(door.idle)


def test_42_budget_for_bodies(engines: Start, proxy: Start) -> None:
    door = proxy(engines(1), body_budget_bytes=1_000_000)
    with door.connect() as first, door.connect() as second:
        first.raw("POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 900000\r\n\r\n")
        first.raw(b"x" * 850_000)
        until(lambda: door.status()["buffered_body_bytes"] == 850_000)
        second.raw("POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 200000\r\n\r\n")
        response = second.read()
        assert response.status == 503
        assert response["retry-after"]
    until(door.idle)


def test_46_hop_by_hop_fields_end_here(shared: Pair) -> None:
    proxy, engines = shared
    with proxy.connect() as client:
        client.send(
            "POST", "/v1/completions",
            {"do": {"headers": {"keep-alive": "timeout=5", "x-mine": "1", "connection": "x-hop",
                                "x-hop": "2", "x-zenlaunch-source": "fake"}}},
            connection="keep-alive, X-Secret", x_secret="1", te="trailers", x_kept="yes",
            keep_alive="timeout=1", proxy_authorization="Basic x", x_zenlaunch_upstream="i9",
            x_data_parallel_rank="3", upgrade="h2c", http2_settings="AAMAAABk",
        )  # fmt: skip
        response = client.read()
    assert response["x-mine"] == "1"
    for name in ("keep-alive", "x-hop", "x-zenlaunch-source"):
        assert response[name] is None
    head = next(h for e in engines for h in e.seen()["heads"] if "x-kept" in h)
    for name in ("x-secret", "te:", "keep-alive", "proxy-auth", "x-zenlaunch", "rank", "upgrade",
                 "http2", "connection"):  # fmt: skip
        assert f"\r\n{name}" not in head


def test_47_retry_after_is_passed_on_and_honoured(engines: Start, proxy: Start) -> None:
    both = engines()
    door = proxy(both)
    both[0].do({"status": 429, "headers": {"retry-after": "30"}})
    statuses = {}
    for at in range(20):
        response = door.request("POST", "/v1/completions", {})
        statuses[at] = response.status
        if response.status == 429:
            assert response["retry-after"] == "30"
    assert list(statuses.values()).count(429) == 1
    assert door.upstream("i0")["state"] == "ejected"


def test_47_retry_after_as_a_date(engines: Start, proxy: Start) -> None:
    both = engines()
    door = proxy(both)
    date = formatdate(time.time() + 20, usegmt=True)
    both[0].do({"status": 503, "headers": {"retry-after": date}}, times=1)
    for _ in range(2):
        assert door.request("POST", "/v1/completions", {}).status == 200
    upstream = door.upstream("i0")
    assert upstream["state"] == "ejected"
    assert 15 < upstream["ejected_until"] - time.time() < 21
    both[1].do({"status": 429, "headers": {"retry-after": date}}, times=1)
    assert door.request("POST", "/v1/completions", {})["retry-after"] == date


def test_49_endpoints_are_read_again_on_sighup(engines: Start, proxy: Start) -> None:
    one, other = engines(2)
    door = proxy([one])
    assert door.request("POST", "/v1/completions", {}).status == 200
    door.set_engines([other])
    door.process.send_signal(signal.SIGHUP)
    until(lambda: door.upstream("i0")["url"] == other.url)
    door.wait_usable(1)
    assert door.request("POST", "/v1/completions", {}).status == 200
    assert other.seen()["requests"] == 1


def test_49_engine_that_comes_back_on_its_port(engines: Start, proxy: Start) -> None:
    one = engines(1)
    door = proxy(one)
    for _ in range(3):
        assert door.request("POST", "/v1/completions", {}).status == 200
        one[0].stop()
        one[0].start()
        until(lambda: door.request("POST", "/v1/completions", {}).status == 200)


def test_54_55_sigterm_lets_streams_finish(engines: Start, proxy: Start) -> None:
    door = proxy(engines(1))
    streaming, idle = door.connect(), door.connect()
    streaming.post(stream=True, do={"events": 30, "gap_s": 0.02})
    streaming.wait_bytes(b" t0")
    idle.post()
    idle.read()
    door.process.terminate()
    assert idle.closed()
    until(lambda: refuses(door.port))
    response = streaming.read()
    assert response.whole
    assert response.events[-1] == "[DONE]"
    assert door.process.wait(2) == 0
    streaming.sock.close()
    idle.sock.close()


@pytest.mark.parametrize("framing", ["content-length: 300000", "transfer-encoding: chunked"])
def test_54_sigterm_lets_requests_arrive(engines: Start, proxy: Start, framing: str) -> None:
    """Who sends a request cannot know that the door is closing: it is taken in and answered."""
    door = proxy(engines(1))
    body, head = door.connect(), door.connect()
    body.raw(f"POST /v1/completions HTTP/1.1\r\nhost: x\r\n{framing}\r\n\r\n")
    if "chunked" in framing:
        body.raw("493e0\r\n")
    body.raw(b"x" * 100_000)
    head.raw("POST /v1/completions HTTP/1.1\r\nho")
    until(lambda: door.status()["buffered_body_bytes"] == 100_000)
    door.process.terminate()
    until(lambda: refuses(door.port))
    threading.Event().wait(0.3)
    head.raw("st: x\r\ncontent-length: 2\r\n\r\n{}")
    body.raw(b"x" * 200_000 + (b"\r\n0\r\n\r\n" if "chunked" in framing else b""))
    for client in (head, body):
        response = client.read()
        assert response.status == 200
        assert response["connection"] == "close"
    assert door.process.wait(3) == 0


def test_54_a_request_that_never_arrives_does_not_hold_the_door(
    engines: Start, proxy: Start
) -> None:
    door = proxy(engines(1), drain_s=0.3)
    with door.connect() as client:
        client.raw("POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{")
        until(lambda: door.status()["buffered_body_bytes"] == 1)
        door.process.terminate()
        response = client.read()
        assert response.status == 503
        assert response.error["code"] == "shutdown"
        assert door.process.wait(5) == 128 + signal.SIGTERM


def refuses(port: int) -> bool:
    try:
        Client(port).sock.close()
    except ConnectionRefusedError:
        return True
    return False


def test_54_drain_ends_honestly_when_the_time_is_over(engines: Start, proxy: Start) -> None:
    one = engines(1)
    door = proxy(one, drain_s=0.2)
    streaming, waiting = door.connect(), door.connect()
    streaming.post(stream=True, do={"events": 1, "end": "hang"})
    streaming.wait_bytes(b" t0")
    waiting.post(do={"prefill_s": 60})
    until(lambda: running(one) == 2)
    door.process.terminate()
    response = streaming.read()
    assert not response.whole
    assert response.events[-1]["error"]["code"] == "shutdown"
    assert waiting.read().status == 503
    assert door.process.wait(3) == 128 + signal.SIGTERM
    until(lambda: running(one) == 0)
    streaming.sock.close()
    waiting.sock.close()


def test_54_second_signal_ends_it_now(engines: Start, proxy: Start) -> None:
    door = proxy(engines(1))
    with door.connect() as client:
        client.post(do={"prefill_s": 60})
        until(lambda: door.status()["in_flight"] == 1)
        door.process.send_signal(signal.SIGINT)
        until(lambda: refuses(door.port))
        door.process.send_signal(signal.SIGINT)
        assert client.read().status == 503
        assert door.process.wait(3) == 128 + signal.SIGINT


def test_56_bodies_pass_byte_for_byte(shared: Pair) -> None:
    proxy, engines = shared
    odd = b'{"model" : "tiny",\t"prompt":"\xff\x00 not even JSON", "a":1,"a":2}' * 10
    assert proxy.request("POST", "/v1/completions", odd).status == 200
    assert len(odd) in [size for engine in engines for size in engine.seen()["bodies"]]
    answer = "HTTP/1.1 200 OK\r\ncontent-length: 4\r\ncontent-encoding: br\r\n\r\n\xff\x00\r\n"
    response = proxy.request("POST", "/v1/completions", {"do": {"raw": answer}})
    assert response.body == b"\xff\x00\r\n"
    assert response["content-encoding"] == "br"
