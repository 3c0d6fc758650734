"""Engines and surroundings that are worse than those of the other tests, with real processes."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import socket
import time
from pathlib import Path

import pytest

from supervise.test_outlive import Up, wait
from supervise.world import Running, deployment, engine
from zenlaunch import checks, commands, events, observe, procfs
from zenlaunch.cpuset import CpuSet
from zenlaunch.lifecycle import State

pytestmark = pytest.mark.timeout(60)


def go(work: object) -> None:
    asyncio.run(work)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "metrics",
    [
        'vllm:num_requests_running{e="0"} 1\n',  # but no counter of progress
        'vllm:num_requests_running{e="0"} NaN\nvllm:iteration_tokens_total_count{e="0"} +Inf\n',
        "\x00garbage{{{ 1 2 3\n",
        "x 1\n" * 500_000,
    ],
)
def test_an_engine_that_says_nothing_of_itself_is_judged_by_its_health(
    tmp_path: Path, metrics: str
) -> None:
    async def scene() -> None:
        spec = engine("i0", "--metrics-file", str(tmp_path / "metrics"), hang_s=0.5)
        (tmp_path / "metrics").write_text(metrics)
        async with Running(deployment(tmp_path, spec)) as r:
            await r.all_ready()
            await asyncio.sleep(1.5)  # three times as long as a hang may take
            assert r.of(events.Failed) == []
            status = await commands.document(r.supervisor, about={})
            json.dumps(status, allow_nan=False)

    go(scene())


def test_a_listener_that_was_forked_twice_is_ours(tmp_path: Path) -> None:
    async def scene() -> None:
        async with Running(deployment(tmp_path, engine("i0", "--daemon-listens"))) as r:
            await r.all_ready()
            assert r.of(events.Failed) == []

    go(scene())


def test_names_in_no_encoding_are_read(tmp_path: Path) -> None:
    async def scene() -> None:
        async with Running(deployment(tmp_path, engine("i0", "--odd-names", str(tmp_path)))) as r:
            await r.all_ready()
            pid = r.supervisor.status()[0].pid
            assert pid is not None
            tasks = Path(f"/proc/{pid}/task")
            before = {path.name for path in tasks.iterdir()}
            seen = {str(thread.tid) for thread in procfs.threads_of(pid)}
            # Threads that answer come and go; those that stay are all read.
            assert {path.name for path in tasks.iterdir()} & before <= seen
            found = observe.verify(engine("i0"), pid, ())
            assert found.threads >= 2
            assert found.problems == ()

    go(scene())


@pytest.mark.parametrize("whom", ["all", "shim"])
def test_nothing_stays_in_shared_memory(tmp_path: Path, whom: str) -> None:
    async def scene() -> None:
        async with Running(deployment(tmp_path, engine("i0", "--shared-memory"))) as r:
            await r.all_ready()
            name = next(line.split()[1] for line in r.log("i0") if line.startswith("segment"))
            assert (Path("/dev/shm") / name).exists()
            row = r.supervisor.status()[0]
            assert row.session is not None
            if whom == "shim":
                os.kill(row.session, signal.SIGKILL)
                await r.until(lambda: r.of(events.Failed))
            else:
                r.supervisor.stop(hurry=True)
                await r.outcome()
            assert not (Path("/dev/shm") / name).exists()

    go(scene())


def test_two_that_start_together_do_not_both_take_the_last_memory(tmp_path: Path) -> None:
    free = checks.node_free_bytes(0)
    if free is None:
        pytest.skip("the kernel does not say how much memory a node has")

    async def scene() -> None:
        specs = [
            engine(
                f"i{n}", "--ready-after", "5", mem_nodes=CpuSet([0]), memory_bytes=free * 6 // 10
            )
            for n in range(2)
        ]
        async with Running(deployment(tmp_path, *specs, memory_wait_s=0.5)) as r:
            outcome = await r.outcome()
            assert outcome.error is not None
            assert "claimed by others that start" in outcome.error.message

    go(scene())


def test_one_that_stands_still_is_told_unready_and_then_ended(tmp_path: Path) -> None:
    async def scene() -> None:
        async with Running(deployment(tmp_path, engine("i0", hang_s=3.0))) as r:
            await r.all_ready()
            pid = r.supervisor.status()[0].pid
            assert pid is not None
            begun = time.monotonic()
            os.kill(pid, signal.SIGSTOP)
            await r.until(lambda: r.of(events.StateChanged)[-1].state is not State.READY)
            assert State.UNREADY in [e.state for e in r.of(events.StateChanged)]
            # Three questions of a second each; its metrics are not waited for too.
            assert time.monotonic() - begun < 5
            await r.until(lambda: r.of(events.Failed))
            assert r.of(events.Failed)[0].how == "hung: no answer on /health for 3 s"

    go(scene())


def test_one_that_was_given_up_is_no_reason_for_what_ends_all_later(tmp_path: Path) -> None:
    async def scene() -> None:
        specs = [engine("i0"), engine("i1")]
        policy = {"restart_tries": 1}
        async with Running(deployment(tmp_path, *specs, policy=policy)) as r:
            await r.all_ready()

            async def give_up(name: str) -> events.Failed:
                row = next(m for m in r.supervisor.status() if m.name == name)
                seen = len(r.of(events.Failed, name))
                with socket.socket() as other:
                    assert row.pid is not None
                    os.kill(row.pid, signal.SIGKILL)
                    await r.until(lambda: len(r.of(events.Failed, name)) > seen)
                    other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    other.bind(("127.0.0.1", row.port))
                    other.listen()
                    await r.until(lambda: len(r.of(events.Failed, name)) > seen + 1)
                failed: events.Failed = r.of(events.Failed, name)[-1]
                return failed

            assert not (await give_up("i0")).ends_all
            r.supervisor.restart("i0")
            await r.until(lambda: r.supervisor.status()[0].state is State.READY)
            assert not (await give_up("i1")).ends_all
            last = await give_up("i0")
            assert last.ends_all
            outcome = await r.outcome()
            assert outcome.error is not None
            assert outcome.error.message == last.message

    go(scene())


def test_time_in_which_zenlaunch_was_stopped_is_no_evidence(tmp_path: Path) -> None:
    """Ctrl-Z while it starts, `fg` after the time it may take: the engine is ready by then."""
    up = Up(tmp_path, "--ready-after", "1", start_timeout_s=2.0)
    wait(lambda: up.says("Spawned i1"))
    os.kill(up.process.pid, signal.SIGSTOP)
    time.sleep(5)
    os.kill(up.process.pid, signal.SIGCONT)
    wait(lambda: up.says("AllReady") or up.process.poll() is not None)
    assert up.process.poll() is None, up.out.read_text()
    assert up.end(signal.SIGTERM) == 143


def test_the_limit_of_open_files_is_raised_or_named(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def scene() -> None:
        async with Running(deployment(tmp_path, engine("i0"))) as r:
            await r.all_ready()
            assert r.supervisor.status()[0].state is State.READY

    resource.setrlimit(resource.RLIMIT_NOFILE, (40, hard))
    try:
        go(scene())
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 64
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_time_without_a_file_to_open_is_survived(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def scene() -> None:
        async with Running(deployment(tmp_path, engine("i0"))) as r:
            await r.all_ready()
            pid = r.supervisor.status()[0].pid
            assert pid is not None
            open_files = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
            resource.setrlimit(resource.RLIMIT_NOFILE, (open_files - 3, hard))
            try:
                os.kill(pid, signal.SIGKILL)
                await r.until(lambda: len(r.of(events.Failed)) > 1)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            assert r.of(events.Failed)[1].how.endswith("Too many open files")
            await r.until(lambda: r.supervisor.status()[0].state is State.READY)

    go(scene())
