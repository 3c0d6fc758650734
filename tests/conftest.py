"""What all tests share: the real vLLM, the command line run in this process, honest skips."""

from __future__ import annotations

import contextlib
import io
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a command left behind."""

    status: int
    out: str
    err: str


def skip_for_want_of(what: str, how: str) -> None:
    """Skip a test whose needs could have been installed; with ZENLAUNCH_STRICT_SKIPS that fails."""
    reason = f"{what} is not there ({how})"
    if os.environ.get("ZENLAUNCH_STRICT_SKIPS"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """Return the interpreter of an environment with a real vLLM."""
    python = ROOT / ".venv-vllm" / "bin" / "python"
    if not (ROOT / ".venv-vllm" / ".ready").exists():
        skip_for_want_of("a real vLLM", "make setup-vllm")
    return python


@pytest.fixture(scope="session")
def tiny_model(vllm_python: Path) -> Path:
    """Return the folder of a tiny Llama with random weights."""
    folder = ROOT / ".cache" / "tiny-llama"
    if not (folder / "model.safetensors").is_file():
        skip_for_want_of("the tiny model", "make setup-vllm")
    return folder


@pytest.fixture(scope="session")
def corpus() -> Path:
    """Return the folder of real machines' topologies, which lies beside the checkout."""
    folder = Path(os.environ.get("ZENLAUNCH_CORPUS") or ROOT.parent / "shared" / "topologies")
    if not (folder / "INDEX.tsv").is_file():
        pytest.skip(f"the topology corpus is not at {folder}")
    return folder


@pytest.fixture(scope="session")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that expands a machine of tests/machines to a filesystem tree, once."""
    from machines.build import build

    folder = tmp_path_factory.mktemp("machines")

    def expand(name: str) -> Path:
        root = folder / name
        return root if root.exists() else build(name, root)

    return expand


def run_zenlaunch(*args: str) -> Result:
    """Run the command line in this process, as the console script does."""
    from zenlaunch.__main__ import main

    out, err = io.StringIO(), io.StringIO()
    status = 0
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main(args)
        except SystemExit as e:
            status = e.code if isinstance(e.code, int) else 0 if e.code is None else 1
    return Result(status=status, out=out.getvalue(), err=err.getvalue())


@pytest.fixture(scope="session")
def zenlaunch() -> Callable[..., Result]:
    return run_zenlaunch


def free_ports(count: int) -> int:
    """Return the first of `count` free ports in a row."""
    for first in range(18000, 30000, 100):
        socks = [socket.socket() for _ in range(count)]
        try:
            for k, s in enumerate(socks):
                s.bind(("127.0.0.1", first + k))
            return first
        except OSError:
            continue
        finally:
            for s in socks:
                s.close()
    raise AssertionError("no free ports")


def wait_for(check: Callable[[], object], seconds: float, what: str) -> None:
    """Poll until `check` is true."""
    until = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < until, what
        time.sleep(0.1)  # between two looks; the deadline is above
