from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from machines.build import folder

_FUZZ = pytest.StashKey[Counter[str]]()


@pytest.fixture
def tree() -> Iterator[Path]:
    """Give an empty folder for the files of one machine."""
    with folder() as made:
        yield made


@pytest.fixture(scope="session")
def unpacked() -> Iterator[Path]:
    """Give a folder in which the dumps of the corpus are unpacked, each once a session."""
    with folder() as made:
        yield made


@pytest.fixture
def fuzz(request: pytest.FixtureRequest) -> Counter[str]:
    """Give the session's counts of fuzzed answers and refusals."""
    return request.config.stash.setdefault(_FUZZ, Counter())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    counts = terminalreporter.config.stash.get(_FUZZ, Counter())
    if counts:
        shown = ", ".join(f"{n} {what}" for what, n in sorted(counts.items()))
        terminalreporter.write_line(f"fuzzed {counts.total()} damaged sources: {shown}")
