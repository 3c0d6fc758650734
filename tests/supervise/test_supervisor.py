"""The supervisor against real processes that fail in every way a start and a run can fail."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from supervise.world import (
    KERNEL_NAMES_BOUND,
    Running,
    deployment,
    engine,
    free_port,
    left_of,
    poll,
)
from zenlaunch import checks, child, events, procfs
from zenlaunch.cpuset import CpuSet
from zenlaunch.errors import LaunchError, ProxyError
from zenlaunch.lifecycle import State
from zenlaunch.spec import HealthCheck, LaunchSpec
from zenlaunch.supervisor import run

HERE = Path(__file__).parent


def go(work: object) -> None:
    asyncio.run(work)  # type: ignore[arg-type]


def post(*, max_tokens: int) -> bytes:
    body = json.dumps({"stream": True, "max_tokens": max_tokens})
    head = f"POST /v1/completions HTTP/1.1\r\ncontent-length: {len(body)}\r\n\r\n"
    return (head + body).encode()


def test_two_instances_come_up_together_and_stop_leaving_nothing(tmp_path: Path) -> None:
    async def scene() -> None:
        pair = (engine("i0", "--children", "2"), engine("i1", "--daemon"))
        async with Running(deployment(tmp_path, *pair)) as r:
            await r.all_ready()
            assert [m.state for m in r.supervisor.status()] == [State.READY, State.READY]
            assert len(left_of("test/i0/")) == 4  # shim, main, two children
            r.supervisor.stop()
            outcome = await r.outcome()
        assert outcome == events.Outcome(exit_code=0)
        assert left_of("test/") == []
        assert r.log("i0") == ["Application startup complete.", "got SIGTERM"]
        assert "Application startup complete." in (tmp_path / "logs/i0.log").read_text()

    go(scene())


def test_an_instance_that_dies_while_starting_ends_all_with_its_last_lines(tmp_path: Path) -> None:
    line = "RuntimeError: Insufficient space in /dev/shm: 240 MiB required, 64 MiB free"

    async def scene() -> None:
        bad = engine(
            "i1", "--say", line, "--exit-after", "0.3", "--exit-code", "1", "--never-listen"
        )
        async with Running(deployment(tmp_path, engine("i0"), bad)) as r:
            outcome = await r.outcome()
        assert outcome.exit_code == 6
        assert isinstance(outcome.error, LaunchError)
        assert "i1 died while starting (exit 1 after" in outcome.error.message
        assert "/dev/shm is too small" in outcome.error.message
        assert outcome.error.hint == "--shm-size=4g"
        assert outcome.error.log_tail == (line,)
        (failed,) = r.of(events.Failed)
        assert failed.retry_s is None
        assert failed.evidence == line
        assert left_of("test/") == []

    go(scene())


@pytest.mark.parametrize(
    ("flags", "fields", "says"),
    [
        (["--exit-after", "0.1", "--never-listen"], {}, "exit 0"),
        (["--segfault-after", "0.1", "--never-listen"], {}, "SIGSEGV"),
        (["--never-listen"], {"start_timeout_s": 0.5}, "not ready after 0.5 s"),
        (["--unavailable"], {"start_timeout_s": 0.7}, "not ready after 0.7 s"),
        (["--never-listen", "--ignore-term", "--say",
          "AssertionError: expected OutputCode, got <class 'function'>"], {},
         "freezing with AOT compile"),
    ],
)  # fmt: skip
def test_every_way_of_never_becoming_ready_is_exit_6(
    tmp_path: Path, flags: list[str], fields: dict[str, float], says: str
) -> None:
    async def scene() -> None:
        bad = engine("i0", *flags, "--children", "1", **fields)
        async with Running(deployment(tmp_path, bad)) as r:
            outcome = await r.outcome(timeout_s=10)
        assert outcome.exit_code == 6
        assert outcome.error is not None
        assert says in outcome.error.message
        assert left_of("test/") == []

    go(scene())


def test_a_program_that_does_not_exist_is_named(tmp_path: Path) -> None:
    async def scene() -> None:
        spec = engine("i0")
        bad = type(spec)(name="i0", argv=("/no/such/python", "-V"), port=spec.port)
        async with Running(deployment(tmp_path, bad)) as r:
            outcome = await r.outcome()
        assert outcome.error is not None
        assert "/no/such/python: No such file or directory" in outcome.error.message

    go(scene())


@pytest.mark.parametrize("listening", [True, False])
def test_a_taken_port_is_found_before_anything_is_started(tmp_path: Path, listening: bool) -> None:
    async def scene() -> None:
        port = free_port()
        with socket.socket() as holder:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind(("127.0.0.1", port))
            if listening:
                holder.listen()
            async with Running(deployment(tmp_path, engine("i0", port=port))) as r:
                outcome = await r.outcome()
        assert outcome.exit_code == 6
        assert outcome.error is not None
        assert f"port {port} is " in outcome.error.message
        seen = listening or KERNEL_NAMES_BOUND
        assert (f"pid {os.getpid()} " in outcome.error.message) is seen
        assert r.of(events.Spawned) == []

    go(scene())


def test_the_first_starts_alone_while_the_compile_cache_is_cold(tmp_path: Path) -> None:
    artifact = tmp_path / "model"

    def three() -> list[object]:
        flags = ("--artifact", str(artifact))
        return [engine(f"i{n}", *flags, cache_key="k 1") for n in range(3)]

    async def scene(*, cold: bool) -> None:
        async with Running(deployment(tmp_path, *three())) as r:  # type: ignore[arg-type]
            await r.all_ready()
            order = [type(e).__name__ + e.name for e in r.events
                     if isinstance(e, events.Spawned | events.BecameReady)]  # fmt: skip
            waited = [w.name for w in r.of(events.Waiting)]
        if cold:
            assert order[:2] == ["Spawnedi0", "BecameReadyi0"]
            assert waited == ["i1", "i2"]
        else:
            assert waited == []

    go(scene(cold=True))
    go(scene(cold=False))
    artifact.unlink()
    go(scene(cold=True))


def test_one_that_crashes_later_is_restarted_alone(tmp_path: Path) -> None:
    async def scene() -> None:
        async with Running(
            deployment(tmp_path, engine("i0", "--children", "2"), engine("i1"))
        ) as r:
            await r.all_ready()
            other = r.supervisor.status()[1].pid
            for kill in (signal.SIGKILL, signal.SIGSEGV):
                before = r.supervisor.status()[0]
                assert before.pid
                os.kill(before.pid, kill)
                await r.until(lambda b=before: r.supervisor.status()[0].restarts > b.restarts)
                await r.until(lambda: r.supervisor.status()[0].state is State.READY)
                assert len(left_of("test/i0/")) == 4
            failures = r.of(events.Failed)
            assert [f.how for f in failures] == ["SIGKILL", "SIGSEGV"]
            assert [f.cause for f in failures] == [None, None]  # no memory kill without evidence
            assert failures[0].message.startswith("i0 died (SIGKILL after ")
            assert [f.report for f in failures] == [
                tmp_path / "logs/i0-crash-1", tmp_path / "logs/i0-crash-2",
            ]  # fmt: skip
            assert "startup complete" in (failures[1].report / "log.txt").read_text()
            assert r.supervisor.status()[1].pid == other
            assert r.supervisor.status()[1].restarts == 0

    go(scene())


def test_exit_0_is_a_failure_and_the_limit_of_restarts_ends_it(tmp_path: Path) -> None:
    async def scene() -> None:
        spec = engine("i0", "--exit-after-answers", "3")
        async with Running(deployment(tmp_path, spec, policy={"restart_tries": 2})) as r:
            outcome = await r.outcome()
        assert outcome.exit_code == 6
        failures = r.of(events.Failed)
        assert [f.how for f in failures] == ["exit 0"] * 3
        assert failures[0].retry_s is not None
        assert failures[-1].retry_s is None
        assert [f.ends_all for f in failures] == [False, False, True]
        assert left_of("test/") == []

    go(scene())


def test_a_killed_shim_costs_one_restart_and_leaves_nothing(tmp_path: Path) -> None:
    async def scene() -> None:
        spec = engine("i0", "--children", "2", "--daemon")
        async with Running(deployment(tmp_path, spec)) as r:
            await r.all_ready()
            first = set(left_of("test/i0/"))
            assert len(first) == 5
            rows = {p.pid: p for p in child.processes()}
            shim = rows[r.supervisor.status()[0].pid or 0].parent
            assert shim in first
            os.kill(shim, signal.SIGKILL)
            await r.until(lambda: r.supervisor.status()[0].restarts == 1)
            await r.until(lambda: r.supervisor.status()[0].state is State.READY)
            assert not first & {p.pid for p in child.processes()}  # zombies neither
            assert len(left_of("test/i0/")) == 5

    go(scene())


def test_a_stopped_engine_that_ignores_sigterm_is_killed_as_a_tree(tmp_path: Path) -> None:
    async def scene() -> None:
        spec = engine("i0", "--ignore-term", "--children", "1", "--daemon", drain_s=0.2)
        async with Running(deployment(tmp_path, spec, policy={"grace_s": 0.3})) as r:
            await r.all_ready()
            r.supervisor.stop()
            assert (await r.outcome(timeout_s=5)).exit_code == 0
        assert r.log("i0")[-1] == "got SIGTERM"
        assert left_of("test/") == []

    go(scene())


def test_a_second_stop_hurries(tmp_path: Path) -> None:
    async def scene() -> None:
        spec = engine("i0", "--ignore-term", drain_s=600.0)
        async with Running(deployment(tmp_path, spec)) as r:
            await r.all_ready()
            r.supervisor.stop(exit_code=130)
            await r.until(lambda: "got SIGTERM" in r.log("i0"))
            r.supervisor.stop(exit_code=130)
            assert (await r.outcome(timeout_s=5)).exit_code == 130
        assert left_of("test/") == []

    go(scene())


def test_a_start_that_is_stopped_is_killed_at_once(tmp_path: Path) -> None:
    async def scene() -> None:
        spec = engine("i0", "--never-listen", "--ignore-term", "--children", "1", drain_s=600.0)
        async with Running(deployment(tmp_path, spec)) as r:
            await r.until(lambda: len(left_of("test/i0/")) == 3)
            r.supervisor.stop()
            await r.outcome(timeout_s=5)
        assert r.log("i0") == []  # no SIGTERM: it would be swallowed
        assert left_of("test/") == []

    go(scene())


def test_a_stream_under_way_is_finished_before_the_end(tmp_path: Path) -> None:
    async def scene() -> None:
        spec = engine("i0", "--drain", "10", drain_s=10.0)
        async with Running(deployment(tmp_path, spec)) as r:
            await r.all_ready()
            reader, writer = await asyncio.open_connection("127.0.0.1", spec.port)
            writer.write(post(max_tokens=20))
            await reader.readuntil(b"t0 ")
            r.supervisor.stop()
            rest = await reader.read()
            assert b"[DONE]" in rest
            writer.close()
            assert (await r.outcome()).exit_code == 0

    go(scene())


def test_a_hang_behind_a_good_health_answer_is_found_and_ended(tmp_path: Path) -> None:
    async def scene() -> None:
        spec = engine("i0", hang_s=0.5)
        async with Running(deployment(tmp_path, spec)) as r:
            await r.all_ready()
            reader, writer = await asyncio.open_connection("127.0.0.1", spec.port)
            writer.write(post(max_tokens=2000))
            # Longer under load than `hang_s`: never ended for being busy.
            await reader.readuntil(b"t60 ")
            assert r.of(events.Failed) == []
            other_reader, other = await asyncio.open_connection("127.0.0.1", spec.port)
            other.write(b"GET /hang HTTP/1.1\r\n\r\n")
            await other_reader.readline()
            await r.until(lambda: r.of(events.Failed))
            assert r.of(events.Failed)[0].how.startswith("hung: 1 requests running")
            await r.until(lambda: r.supervisor.status()[0].state is State.READY)
            writer.close()
            other.close()

    go(scene())


def test_signals_end_the_program_with_their_status(tmp_path: Path) -> None:
    async def scene() -> None:
        for number, status in ((signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)):
            async with Running(deployment(tmp_path, engine("i0"))) as r:
                await r.all_ready()
                os.kill(os.getpid(), number)
                assert (await r.outcome()).exit_code == status

    go(scene())


def test_secrets_do_not_reach_the_log(tmp_path: Path) -> None:
    async def scene() -> None:
        environ = dict(os.environ) | {"HF_TOKEN": "hf_abcdefghijkl", "VLLM_PORT": "1", "OMP_X": "1"}
        spec = engine(
            "i0", "--echo-secret", "HF_TOKEN", "--show-env", "VLLM_PORT", "--show-env", "OMP_X",
            "--show-env", "A", "--say=generated-by-us", "--say=odd \xff",
            unset=("VLLM_PORT", "OMP_*"),
            env={"A": "1", "VLLM_API_KEY": "generated-by-us", "ODD_TOKEN": "\udcff1234567"},
        )  # fmt: skip
        async with Running(deployment(tmp_path, spec, environ=environ)) as r:
            await r.all_ready()
            assert r.log("i0")[:4] == [
                "env VLLM_PORT=None", "env OMP_X=None", "env A=1", "the key is ***, keep it",
            ]  # fmt: skip
            assert "***" in r.log("i0")
        assert "hf_abc" not in (tmp_path / "logs/i0.log").read_text()

    go(scene())


def test_a_flood_of_log_is_rotated_and_holds_nothing_up(tmp_path: Path) -> None:
    async def scene() -> None:
        fields = {"log_bytes": 8 << 20, "log_keep": 2}
        async with Running(deployment(tmp_path, engine("i0", "--flood", "100"), **fields)) as r:
            await r.all_ready()
            assert len(r.log("i0")) > 1_000_000
            r.events.clear()
            r.times.clear()
            await poll(lambda: r.supervisor.status()[0].state is State.READY)
        sizes = {p.name: p.stat().st_size for p in (tmp_path / "logs").iterdir()}
        assert set(sizes) == {"i0.log", "i0.log.1", "i0.log.2"}
        assert all(size <= 8 << 20 for size in sizes.values())

    go(scene())


def test_a_full_disk_is_told_once_and_stops_nothing(tmp_path: Path) -> None:
    async def scene() -> None:
        wanted = deployment(tmp_path, engine("i0", "--flood", "1"))
        wanted.log_dir.mkdir()
        (wanted.log_dir / "i0.log").symlink_to("/dev/full")
        async with Running(wanted) as r:
            await r.all_ready()
            warned = r.of(events.Warned, "i0")
            assert [w.text for w in warned] == [
                "its log cannot be written: No space left on device"
            ]

    go(scene())


def test_a_log_folder_that_cannot_be_made_is_a_launch_error(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file")

    async def scene() -> None:
        with pytest.raises(LaunchError, match="cannot make the folder"):
            async with Running(deployment(tmp_path, engine("i0"))):
                pass

    go(scene())


def test_memory_that_a_node_does_not_have_is_told_before_the_start(tmp_path: Path) -> None:
    async def scene() -> None:
        big = engine("i0", memory_bytes=1 << 50, mem_nodes=CpuSet.parse("0"))
        async with Running(deployment(tmp_path, big, memory_wait_s=0.1)) as r:
            outcome = await r.outcome()
        assert outcome.error is not None
        assert "i0 was not started: node 0 has " in outcome.error.message
        assert "it needs 1048576.0 GiB" in outcome.error.message
        assert "numastat" in (outcome.error.hint or "")
        assert r.of(events.Spawned) == []

    go(scene())


def door(folder: Path) -> LaunchSpec:
    port = free_port()
    return LaunchSpec(
        name="proxy",
        argv=(sys.executable, "-S", "-E", str(HERE / "door.py"), str(port), str(folder / "admin")),
        port=port,
        health=HealthCheck(interval_s=0.1),
        drain_s=5.0,
    )


def test_out_of_the_proxy_first_and_the_proxy_last(tmp_path: Path) -> None:
    async def scene() -> None:
        pair = (engine("i0"), engine("i1"))
        wanted = deployment(tmp_path, *pair, proxy=door(tmp_path), admin_socket=tmp_path / "admin")
        async with Running(wanted) as r:
            await r.all_ready()
            r.supervisor.stop()
            assert (await r.outcome()).exit_code == 0
        said = [
            (e.name, line) for e in r.of(events.LogLines) for line in e.lines
            if "SIGTERM" in line or "drain" in line or '"i0", "in_flight": 0' in line
        ]  # fmt: skip
        ended = said.index(("i0", "got SIGTERM"))
        assert said.index(("proxy", "drain i0")) < ended
        assert said.index(("proxy", "drain i1")) < said.index(("i1", "got SIGTERM"))
        assert any("in_flight" in line for _, line in said[:ended])
        assert said[-1] == ("proxy", "got SIGTERM")
        assert [line for line in r.log("i0") if line == "got SIGTERM"] == ["got SIGTERM"]

    go(scene())


def test_a_rolling_restart_goes_one_by_one(tmp_path: Path) -> None:
    async def scene() -> None:
        pair = (engine("i0"), engine("i1"), engine("i2"))
        wanted = deployment(tmp_path, *pair, proxy=door(tmp_path), admin_socket=tmp_path / "admin")
        async with Running(wanted) as r:
            await r.all_ready()
            first = [m.pid for m in r.supervisor.status()]
            assert r.supervisor.roll()
            await r.until(lambda: r.of(events.RollingEnded))
            assert r.of(events.RollingEnded)[0] == events.RollingEnded(failed=None, left=())
            rows = r.supervisor.status()
            assert [m.restarts for m in rows] == [1, 1, 1, 0]
            assert not {m.pid for m in rows[:3]} & set(first)
            assert rows[3].pid == first[3]
            steps = (State.DRAINING, State.READY)
            order = [f"{e.name} {e.state}" for e in r.of(events.StateChanged) if e.state in steps]
            assert order[-6:] == [
                "i0 draining", "i0 ready", "i1 draining", "i1 ready", "i2 draining", "i2 ready",
            ]  # fmt: skip
            resumed = ["resume i0", "resume i1", "resume i2"]
            await r.until(lambda: [x for x in r.log("proxy") if "resume" in x][-3:] == resumed)

    go(scene())


def test_a_proxy_that_cannot_start_is_exit_7(tmp_path: Path) -> None:
    async def scene() -> None:
        argv = (sys.executable, "-c", "print('no'); exit(7)")
        bad = LaunchSpec(name="proxy", argv=argv, port=free_port())
        async with Running(deployment(tmp_path, engine("i0"), proxy=bad)) as r:
            outcome = await r.outcome()
        assert outcome.exit_code == 7
        assert isinstance(outcome.error, ProxyError)
        assert outcome.error.hint == "no"
        assert left_of("test/") == []

    go(scene())


def test_a_crashed_proxy_comes_back_and_costs_no_instance(tmp_path: Path) -> None:
    async def scene() -> None:
        async with Running(deployment(tmp_path, engine("i0"), proxy=door(tmp_path))) as r:
            await r.all_ready()
            row = r.supervisor.status()[1]
            (tmp_path / "admin").unlink()
            os.kill(row.pid or 0, signal.SIGKILL)
            await r.until(lambda: r.supervisor.status()[1].restarts == 1)
            await r.until(lambda: r.supervisor.status()[1].state is State.READY)
            assert r.supervisor.status()[0].restarts == 0

    go(scene())


def test_without_numactl_the_process_is_bound_by_us(tmp_path: Path) -> None:
    cpu = CpuSet([max(os.sched_getaffinity(0))])

    async def scene() -> None:
        fields = {"cpus": cpu, "mem_nodes": CpuSet.parse("0"), "self_bind": True}
        async with Running(deployment(tmp_path, engine("i0", "--children", "1", **fields))) as r:
            await r.all_ready()
            pid = r.supervisor.status()[0].pid or 0
            assert {t.cpus for t in procfs.tree_threads(pid)} == {cpu}
            for one in child.tree(pid):
                policies = Path(f"/proc/{one}/numa_maps").read_text().splitlines()
                assert {line.split()[1] for line in policies} == {"bind:0"}
            assert r.of(events.Warned) == []

    assert checks.memory_policy_allowed()
    go(scene())


def test_a_binding_that_the_kernel_refuses_is_named(tmp_path: Path) -> None:
    async def scene() -> None:
        none = engine("i0", mem_nodes=CpuSet.parse("63"), self_bind=True)
        async with Running(deployment(tmp_path, none)) as r:
            outcome = await r.outcome()
        assert outcome.error is not None
        assert "set_mempolicy to nodes [63]: Invalid argument" in outcome.error.message

    go(scene())


def test_cpus_that_are_not_online_are_named_before_the_start(tmp_path: Path) -> None:
    async def scene() -> None:
        async with Running(deployment(tmp_path, engine("i0", cpus=CpuSet.parse("0,1000")))) as r:
            outcome = await r.outcome()
        assert outcome.error is not None
        assert outcome.error.message == ("i0 was not started: CPUs 1000 of the plan are not online")

    go(scene())


def test_a_hangup_of_a_detached_one_goes_to_the_proxy(tmp_path: Path) -> None:
    async def scene() -> None:
        wanted = deployment(tmp_path, engine("i0"), proxy=door(tmp_path), hangup_stops=False)
        async with Running(wanted) as r:
            await r.all_ready()
            os.kill(os.getpid(), signal.SIGHUP)
            await r.until(lambda: "got SIGHUP" in r.log("proxy"))
            assert {m.state for m in r.supervisor.status()} == {State.READY}

    go(scene())


def test_a_stop_right_after_the_begin_ends_at_once(tmp_path: Path) -> None:
    async def scene() -> None:
        for pauses in range(12):
            async with Running(deployment(tmp_path, engine("i0"), engine("i1"))) as r:
                for _ in range(pauses):
                    await asyncio.sleep(0)
                r.supervisor.stop(hurry=True)
                assert (await r.outcome(timeout_s=10)).exit_code == 0
            assert left_of("test/") == []

    go(scene())


def test_a_port_that_another_process_answers_is_not_ours(tmp_path: Path) -> None:
    """Another server took the port after the probe: its 200 must not count for our instance."""

    async def ok(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    async def scene() -> None:
        spec = engine("i0", "--never-listen", "--say", "bound")
        async with Running(deployment(tmp_path, spec)) as r:
            await r.until(lambda: r.log("i0") == ["bound"])
            other = await asyncio.start_server(ok, "127.0.0.1", spec.port, reuse_address=True)
            outcome = await r.outcome()
            other.close()
        assert outcome.error is not None
        assert f"port {spec.port} is answered by another process" in outcome.error.message
        assert f"pid {os.getpid()} " in outcome.error.message

    go(scene())


@pytest.mark.skipif(shutil.which("numactl") is None, reason="needs numactl")
def test_what_numactl_refuses_is_explained(tmp_path: Path) -> None:
    async def scene() -> None:
        plain = engine("i0")
        bad = replace(plain, argv=("numactl", "--physcpubind=4000", *plain.argv))
        async with Running(deployment(tmp_path, bad)) as r:
            outcome = await r.outcome()
        assert outcome.error is not None
        assert "numactl cannot use a CPU of the plan" in outcome.error.message
        assert "zenlaunch probe" in (outcome.error.hint or "")

    go(scene())


def test_a_supervisor_that_is_cancelled_leaves_nothing(tmp_path: Path) -> None:
    async def scene() -> None:
        pair = (engine("i0", "--children", "1", "--ignore-term"), engine("i1", "--never-listen"))
        r = Running(deployment(tmp_path, *pair))
        await r.__aenter__()
        await r.until(lambda: r.of(events.BecameReady, "i0") and r.of(events.Spawned, "i1"))
        r.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await r.task
        assert left_of("test/") == []

    go(scene())


def test_a_reader_of_events_that_fails_ends_all_and_leaves_nothing(tmp_path: Path) -> None:
    def see(event: events.Event) -> None:
        if isinstance(event, events.BecameReady):
            raise RuntimeError("no more paper")

    async def scene() -> None:
        with pytest.raises(RuntimeError, match="no more paper"):
            await run(deployment(tmp_path, engine("i0", "--children", "1")), on_event=see)
        assert left_of("test/") == []

    go(scene())
