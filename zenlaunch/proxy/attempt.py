"""What one attempt at an engine has brought: its head, what is held back, how its events went.

Says what may go on to the client now, counts what passes, and judges the engine by a whole answer.
Sends nothing and tries nothing again: that is for `exchange`.
"""

from __future__ import annotations

from bisect import bisect_left
from time import monotonic

from zenlaunch.proxy.balancer import Outcome
from zenlaunch.proxy.http1 import ResponseHead, field
from zenlaunch.proxy.metrics import SECONDS, Counters, bump
from zenlaunch.proxy.sse import EventTracker

_SUCCESS = Outcome.SUCCESS


class Attempt:
    """One answer as it comes in; `first_byte_s` is since the request was whole."""

    __slots__ = (
        "_counters",
        "_early",
        "_held",
        "_held_bytes",
        "_hold_bytes",
        "_started",
        "first_byte_s",
        "head",
        "last_byte",
        "tracker",
    )

    def __init__(self, counters: Counters, *, started: float, hold_bytes: int) -> None:
        self._counters = counters
        self._started = started
        self._hold_bytes = hold_bytes
        self._held: list[bytes] | None = None
        self._held_bytes = 0
        self._early = False
        self.head: ResponseHead | None = None
        self.tracker: EventTracker | None = None
        self.first_byte_s: float | None = None
        self.last_byte = started

    def take_head(self, head: ResponseHead, *, early: bool) -> None:
        """Choose by its head how the answer is passed on.

        Event streams go event by event; JSON is held until it is whole, while it is small, so that
        an engine that dies in the middle of it can still be replaced. `early`: the client has been
        promised events, so that anything else is held, to be told as one.
        """
        self.head = head
        self._early = early
        content_type = head.content_type
        events = content_type.startswith(b"text/event-stream")
        if events and field(head.fields, b"content-encoding") is None:
            self.tracker = EventTracker()
        elif early or (
            not events
            and (
                content_type.startswith(b"application/json")
                if head.length_bytes is None
                else head.length_bytes <= self._hold_bytes
            )
        ):
            self._held = []

    def take(self, payload: bytes, now: float) -> bytes:
        """Take body bytes; return what may go on now."""
        counters, tracker = self._counters, self.tracker
        counters.bytes_received += len(payload)
        if self.first_byte_s is None:
            self.first_byte_s = now - self._started
            counters.first_byte.observe(self.first_byte_s)
        elif tracker is not None:
            counters.gaps.observe(now - self.last_byte)
        self.last_byte = now
        if tracker is not None:
            events = tracker.events
            payload = tracker.feed(payload)
            counters.events += tracker.events - events
            return payload
        if self._held is None:
            return payload
        self._held.append(payload)
        self._held_bytes += len(payload)
        if self._held_bytes <= self._hold_bytes:
            return b""
        if self._early:  # too much for an event; that it came can be told
            self._held = [b"..."]
            return b""
        return self.take_rest()

    def count_events(self, data: bytes) -> None:
        """Count whole chunks of whole events that went on as they were."""
        now = monotonic()
        counters = self._counters
        counters.bytes_received += len(data)
        one = data.find(b"\n\n") == len(data) - 4  # the quicker question, mostly with that answer
        counters.events += 1 if one else data.count(b"\n\n")
        gaps = counters.gaps
        gap_s = now - self.last_byte
        gaps.counts[bisect_left(SECONDS, gap_s)] += 1
        gaps.sum_s += gap_s
        self.last_byte = now

    def take_rest(self) -> bytes:
        """Return what is still held back: all there is, or all there will be."""
        if self.tracker is not None:
            return self.tracker.flush()
        held, self._held = self._held, None
        return b"".join(held) if held else b""

    def outcome(self) -> Outcome:
        """Judge the engine by a whole answer; count it if it is an error."""
        assert self.head is not None
        engine_status = self.tracker.error_status if self.tracker is not None else None
        status = engine_status or self.head.status
        if status >= 500 or status in (408, 429):
            kind = "engine-error" if engine_status else f"status-{status}"
            bump(self._counters.errors, kind)
            return Outcome.FAILURE
        return _SUCCESS if status < 400 else Outcome.NEUTRAL
