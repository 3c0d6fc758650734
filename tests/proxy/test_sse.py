"""Event streams in every cut: whole events only, the end mark and errors seen, no byte changed."""

from __future__ import annotations

import pytest

from zenlaunch.proxy.sse import MAX_HELD_BYTES, EventTracker, error_event

STREAM = b'data: {"a": 1}\n\n: comment\n\nevent: x\r\ndata: 2\r\n\r\ndata: [DONE]\n\n'


@pytest.mark.parametrize("cut", range(len(STREAM) + 1))
def test_every_cut(cut: int) -> None:
    tracker = EventTracker()
    out = tracker.feed(STREAM[:cut])
    assert out == b"" or out.endswith((b"\n\n", b"\n\r\n"))
    assert tracker.at_rest == (out == STREAM[:cut])
    out += tracker.feed(STREAM[cut:])
    assert out + tracker.flush() == STREAM
    assert tracker.done
    assert tracker.error_status is None


def test_byte_by_byte() -> None:
    tracker = EventTracker()
    out = b"".join(tracker.feed(STREAM[at : at + 1]) for at in range(len(STREAM)))
    assert out == STREAM
    assert tracker.done


def test_carriage_returns_alone_end_events_too() -> None:
    tracker = EventTracker()
    assert tracker.feed(b"data: 1\r\rdata: 2") == b"data: 1\r\r"


@pytest.mark.parametrize(
    ("data", "done"),
    [
        (b"data: [DONE]\n\n", True), (b"data:[DONE]\n\n", True), (b"data: [DONE]\r\n\r\n", True),
        (b'data: {"text": "data: [DONE]"}\n\n', False), (b"data: x [DONE]\n\n", False),
        (b': [DONE]\n\n', False), (b"\xef\xbb\xbfdata: [DONE]\n\n", True),
        (b"data: x\rdata: [DONE]\r\r", True), (b"event: x\r\ndata:[DONE]\r\n\r\n", True),
    ],
)  # fmt: skip
def test_done(data: bytes, done: bool) -> None:
    tracker = EventTracker()
    tracker.feed(data)
    assert tracker.done is done


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b'{"error": {"message": "x", "code": 500}}', 500), (b'{"error": {"code": 400}}', 400),
        (b'{"error": {"code": "server_error"}}', 500), (b'{"error": "x"}', 500),
        (b'{"error": null, "choices": []}', None), (b'{"choices": [{"error": 1}]}', None),
        (b'{"choices": [{"text": "\\"error\\""}]}', None), (b'{"token": "error"}', None),
        (b'{"type": "error", "message": "x"}', 500), (b'{"type": "error", "code": 429}', 429),
        (b'{"type": "response.failed", "response": {"error": {"code": "x"}}}', 500),
        (b'{"type": "response.created", "response": {"error": null}, "x": "error"}', None),
        (b'{\ndata: "error":\r\ndata: {"code":\rdata: 503}}', 503),
        (b"[" * 90_000 + b'"error"', None),
        (b'{"error": broken', None), (b'{"x": ["error"]}', None), (b'{"error": {"code": 7}}', 500),
    ],
)  # fmt: skip
def test_errors(data: bytes, status: int | None) -> None:
    tracker = EventTracker()
    tracker.feed(b"data: {}\n\ndata: " + data + b"\n\ndata: [DONE]\n\n")
    assert tracker.error_status == status
    assert tracker.done


def test_an_error_in_the_first_event_after_a_byte_order_mark() -> None:
    tracker = EventTracker()
    tracker.feed(b'\xef\xbb\xbfdata: {"error": {"code": 501}}\n\n')
    assert tracker.error_status == 501


def test_a_very_large_event_is_not_held() -> None:
    tracker = EventTracker()
    assert tracker.feed(b"data: " + b"x" * 1000) == b""
    assert not tracker.torn
    assert len(tracker.feed(b"x" * MAX_HELD_BYTES)) == MAX_HELD_BYTES + 1006
    assert tracker.torn
    assert not tracker.at_rest
    assert tracker.feed(b"y") == b""
    assert tracker.torn, "the rest is held, the event not yet whole"
    assert tracker.feed(b"\n\n") == b"y\n\n"
    assert not tracker.torn
    assert tracker.at_rest


def test_a_stream_that_ends_without_its_last_line() -> None:
    tracker = EventTracker()
    assert tracker.feed(b"data: [DONE]") == b""
    assert tracker.flush() == b"data: [DONE]"
    assert tracker.done
    assert tracker.flush() == b""


def test_error_event() -> None:
    assert error_event(b'{"error": {}}') == b'data: {"error": {}}\n\n'
    named = error_event(b'{"error": {}}', named=True)
    torn = error_event(b"{}", torn=True)
    assert torn == b"\n\ndata: {}\n\n"
    assert named == b'event: error\ndata: {"type": "error", "error": {}}\n\n'
