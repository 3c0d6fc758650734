"""Telling a hang from a long prefill: histories of what an engine says."""

from __future__ import annotations

from zenlaunch.proxy.progress import Progress


def look(progress: Progress, now: float, steps: float | None, running: float | None = 1) -> bool:
    return progress.stands_still(now, running=running, steps=steps)


def test_only_silence_with_requests_is_doubtful() -> None:
    progress = Progress(100)
    assert not progress.is_doubtful(50, in_flight=1, received=0), "the first look knows nothing"
    assert progress.is_doubtful(55, in_flight=1, received=0)
    assert not progress.is_doubtful(60, in_flight=1, received=9)
    assert not progress.is_doubtful(65, in_flight=0, received=9)
    assert progress.is_doubtful(70, in_flight=2, received=9)
    look(progress, 70, 5)
    assert not progress.is_doubtful(75, in_flight=2, received=9), "asked a moment ago"
    assert progress.is_doubtful(80, in_flight=2, received=9)


def test_a_counter_that_stands_still() -> None:
    progress = Progress(100)
    assert not look(progress, 0, 5)
    assert not look(progress, 10, 5)
    assert not look(progress, 109, 5)
    assert look(progress, 110, 5)
    assert look(progress, 120, 5)
    assert not look(progress, 130, 6), "it moves again"
    assert not look(progress, 140, 6)
    assert not look(progress, 239, 6)
    assert look(progress, 240, 6)


def test_bytes_are_progress() -> None:
    progress = Progress(100)
    for now in (0, 10):
        look(progress, now, 5)
    assert not progress.is_doubtful(100, in_flight=1, received=7)
    assert not look(progress, 110, 5), "counted anew"


def test_an_engine_that_does_not_say_is_not_hung() -> None:
    progress = Progress(1)
    for now in range(10):
        assert not look(progress, now, None)
        assert not look(progress, now, 5, running=0), "it has nothing to do"
        assert not look(progress, now, 5, running=None)
