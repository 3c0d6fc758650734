"""Whether an engine that has requests and is silent still works: pure; nobody is asked here.

A hung engine answers 200 at `/health` for as long as its API server lives, and a long prefill on a
CPU is as silent as a hang. What tells them apart is a counter of the engine's that moves with every
step (vLLM's `iteration_tokens_total`). An engine that does not say is never taken for hung.
"""

from __future__ import annotations

RUNNING = "vllm:num_requests_running"
STEPS = "vllm:iteration_tokens_total_count"
_LOOKS = 10  # at the counter, in the time after which an engine counts as hung


class Progress:
    """What is known of one engine; times are seconds of any monotonic clock."""

    __slots__ = ("_asked", "_hang_s", "_received", "_since", "_steps")

    def __init__(self, hang_s: float) -> None:
        self._hang_s = hang_s
        self._received = -1
        self._steps: float | None = None
        self._since: float | None = None
        self._asked = 0.0

    def is_doubtful(self, now: float, *, in_flight: int, received: int) -> bool:
        """Tell whether to ask the engine: it has requests and no byte has come since last time."""
        silent = in_flight > 0 and received == self._received
        self._received = received
        if not silent:
            self._since = None
            return False
        return now - self._asked >= self._hang_s / _LOOKS

    def stands_still(self, now: float, *, running: float | None, steps: float | None) -> bool:
        """Take what the engine says; tell whether it has stood still for too long."""
        self._asked = now
        if not running or steps is None or steps != self._steps:
            self._steps, self._since = steps, None
        elif self._since is None:
            self._since = now
        return self._since is not None and now - self._since >= self._hang_s
