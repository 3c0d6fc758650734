"""placement: the proof round a request, what became worse, and how Prometheus hears of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from zenlaunch import placement
from zenlaunch.cpuset import CpuSet
from zenlaunch.observe import Look, Verification
from zenlaunch.placement import Placement, prove
from zenlaunch.procfs import Pages
from zenlaunch.spec import Evidence, Exercise, LaunchSpec

PROGRAM = Path(__file__).with_name("pinned.py")
CPUS = CpuSet(sorted(os.sched_getaffinity(0))[:2])
KEY = "sk-of-the-worker"


@contextlib.contextmanager
def worker(*flags: str) -> Iterator[tuple[int, int]]:
    """Run a worker on two CPUs; yields its pid and port."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    argv = [sys.executable, str(PROGRAM), "1", *map(str, CPUS), "--port", str(port), *flags]
    env = os.environ | {"WORKER_KEY": KEY}
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=env)
    try:
        assert process.stdout
        while process.stdout.readline() != "pinned\n":
            assert process.poll() is None
        yield process.pid, port
    finally:
        process.kill()
        process.communicate()


def proof_of(pid: int, port: int, *, key: str = KEY) -> Verification:
    exercise = Exercise(path="/v1/completions", body="{}", key_variable="API_KEY")
    spec = LaunchSpec(
        name="i0", argv=("x",), port=port, cpus=CPUS, engine_cpus=CPUS, env={"API_KEY": key},
        evidence=Evidence(exercise=exercise),
    )  # fmt: skip
    return asyncio.run(prove(spec, pid, (), {}))


@pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs")
def test_an_engine_cpu_on_which_nothing_runs_is_named() -> None:
    with worker() as (pid, port):
        proof = proof_of(pid, port)
        assert proof.idle == CpuSet()
        assert proof.to_dict()["idle_cpus"] == ""
        assert not any("did nothing" in p for p in proof.problems)
    with worker("--lazy", str(CPUS.last)) as (pid, port):
        proof = proof_of(pid, port)
        assert proof.idle == CpuSet([CPUS.last])
        assert any(f"on CPUs {CPUS.last} did nothing" in p for p in proof.problems), proof.problems


@pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs")
def test_an_engine_that_does_not_answer_the_request_is_judged_without_it() -> None:
    with worker("--lazy", str(CPUS.last)) as (pid, port):
        proof = proof_of(pid, port, key="wrong")
    assert proof.idle is None
    assert proof.to_dict()["idle_cpus"] is None
    assert not any("did nothing" in p for p in proof.problems)


def test_an_engine_that_keeps_the_request_waiting_is_judged_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(placement, "EXERCISE_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert proof_of(os.getpid(), silent.getsockname()[1]).idle is None


def verification(*problems: str, away: int = 0) -> Verification:
    return Verification(
        threads=4, threads_off_plan=(), engine_threads={}, pages=Pages(),
        local_ratio=1 - away / 100, libraries={}, cores_logged=None, idle=None, problems=problems,
    )  # fmt: skip


def look(*, off: int = 0, away: float = 0.0) -> Look:
    return Look(threads=4, threads_off_plan=off, remote_page_ratio=away)


def told(kept: Placement, path: Path, **restarts: int) -> dict[tuple[str, str], float]:
    kept.write(path, restarts)
    return {
        (sample.name.removeprefix("zenlaunch_instance_"), sample.labels["instance"]): sample.value
        for family in text_string_to_metric_families(path.read_text())
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def test_what_became_worse_is_counted_and_told(tmp_path: Path) -> None:
    path = tmp_path / "instances.prom"
    kept = Placement(["i0", "i1"])
    assert told(kept, path) == {
        ("restarts_total", "i0"): 0, ("restarts_total", "i1"): 0,
        ("drifts_total", "i0"): 0, ("drifts_total", "i1"): 0,
    }  # fmt: skip
    assert kept.seen("i0") == {}
    kept.proved("i0", verification())
    kept.proved("i1", verification("10 % of 1 MiB is not on node 1", away=10))
    assert kept.seen("i1") == {"remote_page_ratio": pytest.approx(0.1), "threads_off_plan": 0}
    assert kept.looked("i0", look()) is None
    assert "may run off the plan" in (kept.looked("i0", look(off=2, away=0.0)) or "")
    assert kept.looked("i0", look(off=2, away=0.0)) is None
    assert "on other nodes" in (kept.looked("i0", look(off=2, away=0.3)) or "")
    assert kept.looked("i1", look(away=0.2)) is None  # told at its ready
    seen = told(kept, path, i0=0, i1=3, proxy=1)
    assert seen == {
        ("restarts_total", "i0"): 0, ("restarts_total", "i1"): 3,
        ("drifts_total", "i0"): 2, ("drifts_total", "i1"): 0,
        ("problems", "i0"): 0, ("problems", "i1"): 1,
        ("threads_off_plan", "i0"): 2, ("threads_off_plan", "i1"): 0,
        ("remote_page_ratio", "i0"): 0.3, ("remote_page_ratio", "i1"): 0.2,
    }  # fmt: skip


def test_of_a_run_that_has_ended_only_the_counts_stay(tmp_path: Path) -> None:
    kept = Placement(["i0"])
    kept.proved("i0", verification())
    kept.looked("i0", look(away=0.5))
    kept.forget("i0")
    assert told(kept, tmp_path / "m", i0=1) == {
        ("restarts_total", "i0"): 1, ("drifts_total", "i0"): 1,
    }  # fmt: skip
    kept.proved("i0", verification())
    assert kept.looked("i0", look(away=0.5)) is not None
