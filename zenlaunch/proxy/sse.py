"""Server-sent events as they pass: where an event ends, whether the stream ended well.

The proxy forwards whole events (an event is of no use to a client before its empty line), so that a
stream that breaks can be ended by an error event of its own and no client ever reads half of one.
Nothing is changed or dropped. Follows the WHATWG event-stream format; errors and `[DONE]` as vLLM
and OpenAI send them.
"""

from __future__ import annotations

import json
import re

MAX_HELD_BYTES = 65_536

_LINE = rb"(?:^(?:\xef\xbb\xbf)?|[\r\n])"  # where one begins, after a byte order mark too
_DONE = re.compile(_LINE + rb"data: ?\[DONE\][\r\n]")
_DATA = re.compile(_LINE + rb"data: ?([^\r\n]*)")
_ERROR_TYPES = ("error", "response.failed")
_BETWEEN = re.compile(rb"(?:\r\n|\n|\r(?!\n)){2}")


class EventTracker:
    """Follow one event stream.

    `done` is set once `data: [DONE]` has passed, `error_status` once an error event has (the status
    that it names, 500 if none). `torn` while the last event that was forwarded has not ended.
    """

    __slots__ = ("_held", "done", "error_status", "events", "torn")

    def __init__(self) -> None:
        self._held = b""
        self.done = False
        self.error_status: int | None = None
        self.events = 0
        self.torn = False

    @property
    def at_rest(self) -> bool:
        """Whether all that came was whole events."""
        return not self._held and not self.torn

    def feed(self, payload: bytes) -> bytes:
        """Return what may be forwarded now: the whole events; keeps the beginning of the next.

        More than 64 KiB of one event is forwarded as it comes.
        """
        if self._held:
            payload = self._held + payload
            self._held = b""
        torn = False
        if not payload.endswith(b"\n\n"):
            cut = _end_of_events(payload)
            torn = len(payload) - cut > MAX_HELD_BYTES
            if not torn:
                self._held = payload[cut:]
                payload = payload[:cut]
        if payload:
            self.torn = torn
            self._look(payload)
        return payload

    def flush(self) -> bytes:
        """Return what is still held: the stream has ended."""
        rest, self._held = self._held, b""
        if rest:
            self._look(rest + b"\n")
        return rest

    def _look(self, payload: bytes) -> None:
        self.events += payload.count(b"\n\n") or 1
        if b"[DONE]" in payload and _DONE.search(payload):
            self.done = True
        if b'"error"' in payload and self.error_status is None:
            for event in _BETWEEN.split(payload):
                if b'"error"' in event:
                    data = b"\n".join(match[1] for match in _DATA.finditer(event))
                    self.error_status = self.error_status or _error_status(data)


def _end_of_events(payload: bytes) -> int:
    end = 0
    for mark in (b"\n\n", b"\n\r\n", b"\r\r"):
        at = payload.rfind(mark)
        if at >= 0:
            end = max(end, at + len(mark))
    return end


def _error_status(data: bytes) -> int | None:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    # vLLM's chat and completions; then the error event of OpenAI's responses, and its failed one.
    error = value.get("error") or (value if value.get("type") in _ERROR_TYPES else None)
    if not error:
        return None
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) and 400 <= code < 600 else 500


def error_event(body: bytes, *, named: bool = False, torn: bool = False) -> bytes:
    """Return the event that tells a client of a broken stream; `body` is one line of JSON.

    Where events have names (Anthropic's messages, OpenAI's responses) it is called `error`, and its
    data says so too. `torn`: the one before it has not ended, and must not swallow it.
    """
    apart = b"\n\n" if torn else b""
    if named:
        return apart + b'event: error\ndata: {"type": "error", ' + body[1:] + b"\n\n"
    return apart + b"data: " + body + b"\n\n"
