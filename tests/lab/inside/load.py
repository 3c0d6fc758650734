"""Load on the proxy while something happens to it: streams, and short requests in a row."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from typing import Any

from inside.kernel import ask


class Load:
    """Streams that should come to their end, and a client that counts what is refused."""

    def __init__(self, url: str, *, streams: int, tokens: int) -> None:
        self.url = url
        self.tokens = tokens
        self.streaming = 0
        self.ended: list[str] = []
        self.asked: list[tuple[float, float, int]] = []
        self.stopping = threading.Event()
        self.lock = threading.Lock()
        self.threads = [threading.Thread(target=self.stream) for _ in range(streams)]
        self.threads.append(threading.Thread(target=self.ask_on))

    def __enter__(self) -> Load:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        for thread in self.threads:
            thread.join()

    def stream(self) -> None:
        body = json.dumps({"model": "m", "messages": [], "stream": True, "max_tokens": self.tokens})
        request = urllib.request.Request(
            self.url + "/v1/chat/completions", body.encode(), {"content-type": "application/json"}
        )
        last = "no answer"
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                for line in answer:
                    if last == "no answer":
                        with self.lock:
                            self.streaming += 1
                    last = line.decode().strip() or last
        except OSError as e:
            last = f"{last}, then {e!r}"
        self.ended.append(last)

    def ask_on(self) -> None:
        while not self.stopping.is_set():
            began = time.monotonic()
            status, _ = ask(self.url, timeout_s=120)
            self.asked.append((began, time.monotonic(), status))

    def answered_after(self, moment: float) -> bool:
        return any(began > moment and status == 200 for began, _, status in self.asked)

    def report(self) -> dict[str, Any]:
        return {
            "streams": self.ended,
            "asked": len(self.asked),
            "failed": [status for _, _, status in self.asked if status != 200],
            "longest_s": max(end - began for began, end, _ in self.asked),
        }
