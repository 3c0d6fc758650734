"""Everything at once, seeded: engines that fail in every way, die and return; clients that leave.

What must hold whatever happens: every answer is one of the known kinds and ends as it should, no
client waits for ever, and when all is over every count is zero and the next request succeeds.
"""

from __future__ import annotations

import contextlib
import random
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest

from .harness import Client, Engine, Proxy, Response, until

Start = Callable[..., Any]
WAYS_TO_END = [*["done"] * 8, "no-done", "fin", "rst", "half-event", "engine-error", "hang"]
RAW = [
    "",
    "HTTP/1.1 200 OK\r\n",
    "garbage\r\n\r\n",
    "HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nab",
]
PATHS = ["/v1/completions", "/v1/chat/completions", "/v1/responses"]


def a_deed(rng: random.Random, *, stream: bool) -> dict[str, Any]:
    if rng.random() < 0.05:
        return {"raw": rng.choice(RAW), "end": rng.choice(["rst", "fin", "hang"])}
    do: dict[str, Any] = {
        "end": rng.choice(WAYS_TO_END),
        "events": rng.randrange(12),
        "gap_s": rng.choice([0, 0, 0.01]),
        "prefill_s": rng.choice([0, 0, 0.02, 0.2]),
        "head_first": rng.random() < 0.3,
        "status": rng.choice([*[200] * 10, 503, 500, 429, 400]),
        "framing": rng.choice(["chunked", "length", "close"]),
        "split": rng.random() < 0.3,
        "extra": rng.choice([*[""] * 6, "XX"]),
    }
    if do["framing"] == "close":
        do["extra"] = ""  # it would be part of the body
    if not stream and rng.random() < 0.2:
        do["body_bytes"] = rng.choice([10, 100_000, 2_000_000])
    return do


def judge(response: Response, path: str) -> None:
    assert response.status in (200, 400, 429, 500, 502, 503, 504)
    assert response["x-zenlaunch-source"] or response["x-zenlaunch-upstream"]
    if "event-stream" not in (response["content-type"] or ""):
        return
    if not response.whole:
        assert "error" in response.events[-1]
    elif path != "/v1/responses":  # what ends there is not known, only that HTTP says it is whole
        assert response.events[-1] == "[DONE]"


def client_life(rng: random.Random, port: int) -> None:
    client = Client(port)
    client.sock.settimeout(10)
    for _ in range(rng.randrange(1, 5)):
        stream, path = rng.random() < 0.5, rng.choice(PATHS)
        client.post(path, stream=stream, do=a_deed(rng, stream=stream))
        fate = rng.random()
        if fate < 0.1:
            client.reset()
            return
        if fate < 0.2:
            with contextlib.suppress(OSError):  # the proxy may have closed it already
                client.fin()
            break
        response = client.read()
        judge(response, path)
        if not response.whole or response["connection"] == "close":
            break
    client.sock.close()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_in_flight_per_upstream": 4, "max_queued": 8, "queue_timeout_s": 0.5},
        {"sse_keepalive_s": 0.05, "policy": "round-robin"},
    ],
    ids=["plain", "limits", "keepalive"],
)
def test_chaos(engines: Start, proxy: Start, options: dict[str, Any]) -> None:
    three: list[Engine] = engines(3)
    door: Proxy = proxy(
        three,
        eject_s=0.2,
        gap_timeout_s=0.5,
        first_byte_timeout_s=1.0,
        client_stall_s=1.0,
        **options,
    )
    problems: list[str] = []
    done = threading.Event()

    def live(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(12):
            try:
                client_life(rng, door.port)
            except Exception as error:
                problems.append(f"seed {seed}: {error!r}")

    def meddle() -> None:
        rng = random.Random(99)
        while not done.is_set():
            engine = rng.choice(three)
            match rng.randrange(3):
                case 0:
                    engine.stop()
                    done.wait(rng.random() * 0.3)
                    engine.start()
                case 1:
                    engine.signal(signal.SIGSTOP)
                    done.wait(rng.random() * 0.5)
                    engine.signal(signal.SIGCONT)
                case 2:
                    door.set_engines(three)
                    door.process.send_signal(signal.SIGHUP)
            done.wait(rng.random())

    threads = [threading.Thread(target=live, args=(seed,)) for seed in range(12)]
    meddler = threading.Thread(target=meddle)
    for thread in [*threads, meddler]:
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    meddler.join()
    assert not problems
    until(door.idle, why="counts did not fall to zero")
    until(lambda: door.request("POST", "/v1/completions", {}).status == 200)
