"""What one attempt at an engine has brought: its head, what is held back, how its events went.

Says what may go on to the client now, counts what passes, and judges the engine by a whole answer.
Tries nothing again and sends nothing (that is for `exchange`), except on the short way of a stream:
whole events in whole chunks go on as they came, in one function. A busy proxy spends nearly all of
its time there, where each question asked of an event and each object touched costs some percent of
all that relaying takes; so they are few.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable
from typing import TYPE_CHECKING

from zenlaunch.proxy.balancer import Outcome
from zenlaunch.proxy.chunks import are_whole_events
from zenlaunch.proxy.http1 import ResponseHead, field
from zenlaunch.proxy.metrics import SECONDS, Counters, bump
from zenlaunch.proxy.sse import EventTracker

if TYPE_CHECKING:
    from zenlaunch.proxy.pump import Pump
    from zenlaunch.proxy.wire import Wire

Receive = Callable[[bytes], None]

_SUCCESS = Outcome.SUCCESS

# The size of a chunk that holds one event, with its framing, by its first five bytes: the size line
# of two or three digits. None is so short that it could be `data: [DONE]`.
_sizes: dict[bytes, int] = {}
_size_of = _sizes.get
_DONE_BYTES = 32
_write = os.write


class Attempt:
    """One answer as it comes in.

    `first_byte_s` is since the request was whole, `short_bytes` what went on the short way.
    """

    __slots__ = (
        "_client",
        "_clock",
        "_counters",
        "_early",
        "_held",
        "_held_bytes",
        "_hold_bytes",
        "_otherwise",
        "_settled_at",
        "_settled_bytes",
        "_started",
        "first_byte_s",
        "head",
        "last_byte",
        "short_bytes",
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
        self.short_bytes = 0
        self._settled_at = started
        self._settled_bytes = 0

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
        self.last_byte = self._settled_at = now
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

    def open_short_way(self, client: Wire, clock: Pump, otherwise: Receive) -> Receive:
        """Return what may be given all bytes from now on: whole chunks have gone out before them.

        `otherwise` gets what does not pass as it is, b"" too. Gaps are measured from one wake-up of
        `clock` to another.
        """
        self._client, self._clock, self._otherwise = client, clock, otherwise
        return self._pass

    def _pass(self, data: bytes) -> None:
        size = len(data)
        # One line in one event in one chunk. A single byte is what is found fastest.
        if (
            _size_of(data[:5]) == size
            and data.find(b"\n", 5) == size - 4
            and data.find(b"\r", 5) == size - 2
            and data.endswith(b"\n\n\r\n")
            and data.find(b'"error"') < 0
        ):
            events = 1
        else:
            events = _events_in(data)
            if not events:
                self.settle()
                self._otherwise(data)
                return
        now = self._clock.now
        counters = self._counters
        counters.events += events
        counters.gaps.counts[bisect_left(SECONDS, now - self.last_byte)] += 1
        self.last_byte = now
        self.short_bytes += size
        client = self._client
        try:
            sent = 0 if client.unsent_bytes else _write(client.fd, data)
        except OSError:
            sent = 0  # the wire finds out by itself
        if sent != size:
            client.write(data[sent:])

    def settle(self) -> None:
        """Add to the counters what the short way has put off: bytes, and the sum of gaps."""
        counters = self._counters
        counters.bytes_received += self.short_bytes - self._settled_bytes
        counters.gaps.sum_s += self.last_byte - self._settled_at
        self._settled_bytes = self.short_bytes
        self._settled_at = self.last_byte

    def restart(self, now: float) -> None:
        """Measure the next gap from now on: the client has held up the engine."""
        self.settle()
        self.last_byte = self._settled_at = now

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


def _events_in(data: bytes) -> int:
    """Count the events of whole chunks; 0 where the long way must look at them."""
    if not are_whole_events(data) or b'"error"' in data or b"[DONE]" in data:
        return 0
    line, _, rest = data.partition(b"\r\n")
    if (
        len(data) > _DONE_BYTES
        and len(line) in (2, 3)
        and rest.startswith(b"data: ")
        and int(line, 16) + 2 == len(rest)
    ):
        _sizes[data[:5]] = len(data)
    return data.count(b"\n\n")
