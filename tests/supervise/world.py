"""What the supervising tests share: specs of the faulty engine, events, and the kernel asked."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from zenlaunch import child, events
from zenlaunch.lifecycle import Policy, State
from zenlaunch.spec import CompileCache, HealthCheck, LaunchSpec, Phase, Signature
from zenlaunch.supervisor import Deployment, Supervisor, run

ENGINE = Path(__file__).with_name("engine.py")
# Linux says from 6.8 on who has bound a port and does not listen yet.
KERNEL_NAMES_BOUND = tuple(int(n) for n in os.uname().release.split(".")[:2]) >= (6, 8)

SIGNATURES = (
    Signature(
        marker="Insufficient space in /dev/shm",
        cause="/dev/shm is too small",
        advice="--shm-size=4g",
    ),
    Signature(
        marker="expected OutputCode, got <class 'function'>",
        cause="freezing with AOT compile",
        advice="unset TORCHINDUCTOR_FREEZING",
        fatal=True,
    ),
)


def free_port() -> int:
    """Return a port that is free now and that no outgoing connection will take."""
    for port in range(20000 + (time.time_ns() // 1000) % 9000, 32000):
        with socket.socket() as s:
            try:
                s.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no free port")


def engine(name: str, *flags: str, port: int | None = None, **fields: Any) -> LaunchSpec:
    """Return the spec of one faulty engine."""
    port = free_port() if port is None else port
    health = HealthCheck(
        interval_s=0.1,
        start_timeout_s=fields.pop("start_timeout_s", 30.0),
        hang_s=fields.pop("hang_s", 60.0),
        metrics_path="/metrics",
        progress_metric="vllm:iteration_tokens_total_count",
        running_metric="vllm:num_requests_running",
    )
    key = fields.pop("cache_key", None)
    if key is not None:
        fields["compile_cache"] = CompileCache(
            key=key, artifact_markers=("saved AOT compiled function to",)
        )
    return LaunchSpec(
        name=name,
        argv=(sys.executable, "-S", "-E", str(ENGINE), "--port", str(port), *flags),
        port=port,
        health=health,
        signatures=SIGNATURES,
        phases=(Phase(marker="Application startup complete", name="serving"),),
        drain_s=fields.pop("drain_s", 2.0),
        **fields,
    )


def deployment(folder: Path, *specs: LaunchSpec, **fields: Any) -> Deployment:
    policy = fields.pop("policy", {})
    return Deployment(
        name=fields.pop("name", "test"),
        instances=specs,
        log_dir=folder / "logs",
        cache_dir=folder / "cache",
        policy=replace(Policy(grace_s=1.0, backoff_first_s=0.05), **policy),
        **fields,
    )


class Running:
    """A deployment that runs in this test's loop, with all that it reported."""

    def __init__(self, wanted: Deployment) -> None:
        self.events: list[events.Event] = []
        self.times: list[float] = []
        self.supervisor: Supervisor
        self._deployment = wanted

    async def __aenter__(self) -> Running:
        self.task = asyncio.create_task(
            run(self._deployment, on_event=self._see, on_start=self._begin)
        )
        await asyncio.sleep(0)  # so that it has begun
        return self

    def _see(self, event: events.Event) -> None:
        self.events.append(event)
        self.times.append(time.monotonic())

    def seconds_in(self, name: str, state: State) -> list[float]:
        """Return how long each stay of a member in a state has taken."""
        stays, since = [], 0.0
        for at, event in zip(self.times, self.events, strict=True):
            if isinstance(event, events.StateChanged) and event.name == name:
                if event.state is state:
                    since = at
                elif event.previous is state:
                    stays.append(at - since)
        return stays

    def _begin(self, supervisor: Supervisor) -> None:
        self.supervisor = supervisor

    async def __aexit__(self, *_: object) -> None:
        if not self.task.done():
            self.supervisor.stop(hurry=True)
        await asyncio.wait_for(self.task, 30)

    def of(self, kind: type[Any], name: str | None = None) -> list[Any]:
        return [e for e in self.events if isinstance(e, kind) and (name is None or e.name == name)]

    async def until(self, test: Callable[[], object], *, timeout_s: float = 30.0) -> None:
        await poll(lambda: self.task.done() or test(), timeout_s=timeout_s)
        assert test(), f"ended before: {self.events[-8:]}"

    async def all_ready(self) -> None:
        await self.until(lambda: self.of(events.AllReady))

    async def outcome(self, *, timeout_s: float = 30.0) -> events.Outcome:
        return await asyncio.wait_for(asyncio.shield(self.task), timeout_s)

    def log(self, name: str) -> list[str]:
        return [line for e in self.of(events.LogLines, name) for line in e.lines]


async def poll(test: Callable[[], object], *, timeout_s: float = 30.0) -> None:
    """Wait until `test` is true; fails after `timeout_s`."""
    until = time.monotonic() + timeout_s
    while not test():
        assert time.monotonic() < until, "waited in vain"
        await asyncio.sleep(0.01)


def left_of(marker: str) -> list[int]:
    """Return the pids whose environment marker begins with `marker`, zombies apart."""
    return [
        p.pid
        for p in child.processes()
        if p.state != "Z" and (child.marker_of(p.pid) or "").startswith(marker)
    ]
