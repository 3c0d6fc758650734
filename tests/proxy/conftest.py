"""Fixtures: engines and proxies that end with the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .harness import Client, Engine, Proxy


@pytest.fixture(autouse=True)
def _sockets() -> Iterator[None]:
    yield
    while Client.opened:
        Client.opened.pop().close()


@pytest.fixture
def engines() -> Iterator[Callable[..., list[Engine]]]:
    started: list[Engine] = []

    def start(count: int = 2) -> list[Engine]:
        new = [Engine() for _ in range(count)]
        started.extend(new)
        return new

    yield start
    for engine in started:
        engine.stop()


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[Callable[..., Proxy]]:
    started: list[Proxy] = []

    def start(engines: list[Engine], **options: Any) -> Proxy:
        folder = tmp_path / f"proxy{len(started)}"
        folder.mkdir()
        new = Proxy(engines, folder, **options)
        started.append(new)
        return new

    yield start
    for one in started:
        one.stop()
        text = one.text()
        assert "Traceback" not in text, text


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Proxy, list[Engine]]]:
    """A proxy before two engines, shared by a module's tests that break neither."""
    both = [Engine(), Engine()]
    one = Proxy(both, tmp_path_factory.mktemp("pair"))
    yield one, both
    one.stop()
    for engine in both:
        engine.stop()
    text = one.text()
    assert "Traceback" not in text, text


@pytest.fixture
def shared(pair: tuple[Proxy, list[Engine]]) -> Iterator[tuple[Proxy, list[Engine]]]:
    """`pair`, left as it was found: engines well behaved, nothing counted."""
    from .harness import until

    one, both = pair
    yield pair
    while Client.opened:
        Client.opened.pop().close()
    for engine in both:
        engine.do(None, times=0, health=200, idle_s=None, **{"/v1/models": None, "/metrics": None})
    until(one.idle, why="counts did not fall to zero")
