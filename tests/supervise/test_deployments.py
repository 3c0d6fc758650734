"""Deployments side by side: claims, the control socket, what dead ones leave."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from supervise.test_outlive import PYTHONPATH, TREE, Up, wait
from supervise.world import Running, deployment, engine
from zenlaunch import child, commands, control, deployments, detach
from zenlaunch.cpuset import CpuSet
from zenlaunch.errors import LaunchError
from zenlaunch.lifecycle import State
from zenlaunch.logs import LogFile
from zenlaunch.spec import LaunchSpec

HERE = Path(__file__).parent


def spec(name: str = "i0", **fields: Any) -> LaunchSpec:
    return LaunchSpec(name=name, argv=("x",), **({"port": 1} | fields))


def test_a_claim_is_seen_and_given_back(tmp_path: Path) -> None:
    with deployments.claim(tmp_path, "prod", [spec()], url="http://x", log_dir=tmp_path) as claim:
        (one,) = deployments.known(tmp_path)
        assert one == deployments.find(tmp_path, "prod")
        assert one.running
        assert (one.name, one.pid, one.url, one.log_dir) == (
            "prod",
            os.getpid(),
            "http://x",
            tmp_path,
        )
        assert claim.control_socket.parent.stat().st_mode & 0o777 == 0o700
        assert not deployments.wait_gone(one, timeout_s=0)
    assert deployments.known(tmp_path) == []
    assert deployments.wait_gone(one)
    with pytest.raises(LaunchError, match=r"no deployment 'prod' is up$"):
        deployments.find(tmp_path, "prod")


@pytest.mark.parametrize(
    ("name", "fields", "says"),
    [
        ("a", {"port": 9}, "the deployment 'a' is up already \\(pid"),
        ("b", {"port": 9, "cpus": CpuSet.parse("2-5")}, "'a' \\(pid .*\\) holds CPUs 2-3, which"),
        ("b", {"port": 1}, "'a' \\(pid .*\\) holds port 1 \\(i0\\), which i0 wants"),
        ("b", {"port": 9, "mem_nodes": CpuSet.parse("0"), "memory_bytes": 60 << 30},
         "node 0 has 100.0 GiB; 'a' holds 50.0 GiB of it and this needs 60.0 GiB"),
    ],
)  # fmt: skip
def test_what_overlaps_is_refused_and_says_who(
    tmp_path: Path, name: str, fields: dict[str, Any], says: str
) -> None:
    node = tmp_path / "root/sys/devices/system/node/node0"
    node.mkdir(parents=True)
    (node / "meminfo").write_text(f"Node 0 MemTotal: {100 << 20} kB\n")
    held = spec(cpus=CpuSet.parse("0-3"), mem_nodes=CpuSet.parse("0"), memory_bytes=50 << 30)
    with deployments.claim(tmp_path, "a", [held]):
        with pytest.raises(LaunchError, match=says):
            deployments.claim(tmp_path, name, [spec(**fields)], sysroot=tmp_path / "root")
        fits = spec(
            port=9, cpus=CpuSet.parse("4-7"), mem_nodes=held.mem_nodes, memory_bytes=50 << 30
        )
        with deployments.claim(tmp_path, "b", [fits], sysroot=tmp_path / "root"):
            assert [k.name for k in deployments.known(tmp_path)] == ["a", "b"]
            with pytest.raises(LaunchError, match="no deployment 'c' is up; up: a, b"):
                deployments.find(tmp_path, "c")


def test_a_runtime_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LaunchError, match="cannot write the runtime folder"):
        deployments.claim(tmp_path / "file", "a", [spec()])


def test_lookers_do_not_get_in_the_way_of_a_claim(tmp_path: Path) -> None:
    deployments.claim(tmp_path, "a", [spec()]).release()
    (tmp_path / "a/state.json").write_text("{}")
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            deployments._is_held(tmp_path / "a/lock")

    looker = threading.Thread(target=look)
    looker.start()
    try:
        for _ in range(20):
            deployments.claim(tmp_path, "a", [spec()]).release()
    finally:
        done.set()
        looker.join()


def test_commands_reach_the_supervisor(tmp_path: Path) -> None:
    async def scene() -> None:
        wanted = deployment(tmp_path, engine("i0"), engine("i1", mem_nodes=CpuSet.parse("0")))
        with deployments.claim(tmp_path / "run", "test", wanted.instances) as claim:
            path = claim.control_socket
            async with Running(wanted) as r:

                async def handle(request: dict[str, Any]) -> dict[str, Any]:
                    look = {"remote_page_ratio": 0.25, "threads_off_plan": 1}
                    return await commands.answer(
                        r.supervisor, request, about={"name": "test"}, seen=lambda name: look
                    )

                async def say(**request: Any) -> dict[str, Any]:
                    return await asyncio.to_thread(control.ask, path, request)

                async with control.control(path, handle):
                    assert path.stat().st_mode & 0o777 == 0o600
                    await r.all_ready()
                    status = (await say(do="status"))["status"]
                    assert (status["schema"], status["name"], status["state"]) == (
                        1,
                        "test",
                        "ready",
                    )
                    assert status["proxy"] is None
                    row = status["instances"][1]
                    assert row["name"] == "i1"
                    assert row["state"] == "ready"
                    assert row["node"] == 0
                    assert row["requests_running"] == 0
                    assert row["requests_waiting"] is None
                    assert row["remote_page_ratio"] == 0.25
                    assert row["resident_bytes"] > 1 << 20
                    for bad, says in (
                        ({"do": "restart", "name": "i9"}, "there is no i9"),
                        ({"do": "restart"}, "there is no None"),
                        ({"do": "dance"}, "there is no command 'dance'"),
                        ({}, "there is no command None"),
                    ):
                        with pytest.raises(LaunchError, match=says):
                            await say(**bad)
                    await say(do="restart", name="i0")
                    await r.until(lambda: r.supervisor.status()[0].restarts == 1)
                    await r.until(lambda: r.supervisor.status()[0].state is State.READY)
                    await say(do="roll")
                    with pytest.raises(LaunchError, match="under way"):
                        await say(do="roll")
                    await r.until(lambda: not r.supervisor.rolling)
                    assert [m.restarts for m in r.supervisor.status()] == [2, 1]
                    await say(do="down")
                    assert (await r.outcome()).exit_code == 0
            with pytest.raises(LaunchError, match="does not answer"):
                control.ask(path, {"do": "status"})

    asyncio.run(scene())


def test_nonsense_on_the_control_socket_is_answered(tmp_path: Path) -> None:
    async def scene() -> None:
        async def handle(request: dict[str, Any]) -> dict[str, Any]:
            return request

        async with control.control(tmp_path / "c", handle):
            for line in (b"{\n", b"[]\n", b"\xff\n", b"[" * 50_000 + b"\n"):
                reader, writer = await asyncio.open_unix_connection(tmp_path / "c")
                writer.write(line)
                assert json.loads(await reader.readline())["ok"] is False
                writer.close()
            reader, writer = await asyncio.open_unix_connection(tmp_path / "c")
            writer.write(b"x" * 1_000_000)
            with pytest.raises(ConnectionResetError):  # a line without an end has no answer
                await reader.read()
            writer.close()
            with socket.socket(socket.AF_UNIX) as silent:  # one who says nothing holds nobody up
                silent.connect(str(tmp_path / "c"))
                answer = await asyncio.to_thread(control.ask, tmp_path / "c", {"a": 1})
                assert answer == {"ok": True, "a": 1}

    asyncio.run(scene())


def test_a_log_is_followed_over_a_rotation(tmp_path: Path) -> None:
    log = tmp_path / "i0.log"
    log.write_text("1\n2\n3\n")
    assert list(control.follow(log, last=2)) == ["2", "3"]
    done = threading.Event()
    lines = control.follow(log, last=1, stop=done.is_set)
    assert next(lines) == "3"
    with log.open("a") as f:
        f.write("4\nhal")
    assert next(lines) == "4"
    with log.open("a") as f:
        f.write("f\n")
    assert next(lines) == "half"
    log.rename(tmp_path / "i0.log.1")
    log.write_text("new\n")
    assert next(lines) == "new"
    done.set()
    assert list(lines) == []
    with pytest.raises(LaunchError, match="cannot read"):
        list(control.follow(tmp_path / "no.log"))


def test_no_line_of_a_log_is_lost_over_rotations(tmp_path: Path) -> None:
    """A writer that rotates all the time: what it wrote just before is read all the same."""
    log = LogFile(tmp_path / "i0.log", most_bytes=1000, keep=200)
    log.write(b"0\n")
    lines = control.follow(log.path, stop=lambda: False)
    assert next(lines) == "0"
    for first in range(1, 2000, 100):
        # The follower has read to the end of the file that is now written to, and then moved.
        log.write(b"".join(b"%d\n" % n for n in range(first, first + 50)))
        log.rotate()
        log.write(b"".join(b"%d\n" % n for n in range(first + 50, first + 100)))
        assert [int(next(lines)) for _ in range(100)] == list(range(first, first + 100))
    lines.close()
    log.close()


def test_leftovers_of_a_killed_zenlaunch_are_found_and_ended(tmp_path: Path) -> None:
    up = Up(tmp_path, *TREE)
    root = tmp_path / "root"

    def found() -> set[int]:
        return {one.pid for one in deployments.leftovers(root) if one.deployment == up.name}

    wait(lambda: up.says("AllReady"))
    assert found() == set()  # its owner lives
    os.kill(up.process.pid, signal.SIGSTOP)
    for pid in up.shims():
        os.kill(pid, signal.SIGKILL)
    up.end()
    wait(lambda: len(up.left()) <= 6)  # the main processes go with their shims
    left = set(up.left())
    assert found() == left
    assert {one.pid for one in deployments.end_leftovers(root)} >= left
    assert up.left() == []
    assert found() == set()


def test_leftovers_without_an_environment_are_known_by_their_session(tmp_path: Path) -> None:
    sleeper = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True
    )
    try:
        claim = deployments.claim(tmp_path, "a", [spec()])
        claim.remember_session(sleeper.pid)
        assert sleeper.pid not in [one.pid for one in deployments.leftovers(tmp_path)]
        os.close(claim._lock_fd)  # as a SIGKILL does
        assert sleeper.pid in [one.pid for one in deployments.leftovers(tmp_path)]
        assert sleeper.pid in [one.pid for one in deployments.end_leftovers(tmp_path)]
        assert sleeper.wait(10) == -signal.SIGKILL
        assert deployments.known(tmp_path) == []
    finally:
        sleeper.kill()
        sleeper.wait()


@pytest.mark.parametrize("leader", ["alive", "gone"])
def test_a_session_whose_number_was_given_out_again_is_left_alone(
    tmp_path: Path, leader: str
) -> None:
    """Somebody logs in after a SIGKILL, and his shell gets the number that a shim had."""
    code = (
        "import os, time\n"
        "pid = os.fork()\n"
        "if pid: print(pid, flush=True)\n"
        "while True: time.sleep(3600)"
    )
    stranger = subprocess.Popen(
        [sys.executable, "-c", code], start_new_session=True, stdout=subprocess.PIPE
    )
    assert stranger.stdout is not None
    below = int(stranger.stdout.readline())
    try:
        claim = deployments.claim(tmp_path, "a", [spec()])
        began = child.start_time(stranger.pid)
        assert began is not None
        claim._state["sessions"][str(stranger.pid)] = began - 1
        claim._write()
        os.close(claim._lock_fd)  # as a SIGKILL does
        if leader == "gone":
            stranger.kill()
            stranger.wait()
        left = {one.pid for one in deployments.leftovers(tmp_path)}
        assert not left & {stranger.pid, below}
    finally:
        os.kill(below, signal.SIGKILL)
        stranger.kill()
        stranger.wait()
        stranger.stdout.close()


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "\xff\x00", "[" * 5000, '{"pid": 1}',
     '{"pid": 1, "boot_id": "", "url": null, "log_dir": null, "started": 0, "holdings": [],'
     ' "sessions": []}'],
)  # fmt: skip
def test_a_damaged_state_file_hides_nobody_who_runs(tmp_path: Path, text: str) -> None:
    with deployments.claim(tmp_path, "a", [spec()]) as claim:
        (claim.folder / "state.json").write_text(text, encoding="latin-1")
        assert deployments.find(tmp_path, "a").pid == os.getpid()
        with pytest.raises(LaunchError, match=rf"'a' is up already \(pid {os.getpid()}\)"):
            deployments.claim(tmp_path, "a", [spec()])
    dead(tmp_path, "b").joinpath("state.json").write_text(text, encoding="latin-1")
    assert deployments.known(tmp_path) == []
    deployments.end_leftovers(tmp_path)
    deployments.claim(tmp_path, "b", [spec()]).release()


def test_a_runtime_folder_that_others_may_write_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "root"
    old_mask = os.umask(0)
    try:
        deployments.claim(root, "a", [spec()]).release()
    finally:
        os.umask(old_mask)
    assert root.stat().st_mode & 0o777 == 0o700
    root.chmod(0o777)
    with pytest.raises(LaunchError, match=r"not be in the hands of others: .* has mode drwxrwxrwx"):
        deployments.claim(root, "a", [spec()])


def dead(root: Path, name: str) -> Path:
    """Leave what a deployment whose zenlaunch was killed leaves; returns its folder."""
    claim = deployments.claim(root, name, [spec()])
    for file in ("control.sock", "proxy.sock", "upstream.key"):
        (claim.folder / file).touch()
    os.close(claim._lock_fd)  # as a SIGKILL does
    return claim.folder


def test_the_files_of_a_dead_deployment_go_its_key_too(tmp_path: Path) -> None:
    assert deployments.end_leftovers(tmp_path / "no/such") == ()
    folder = dead(tmp_path, "a")
    with deployments.claim(tmp_path, "b", [spec(port=2)]) as alive:
        deployments.end_leftovers(tmp_path)
        assert [p.name for p in folder.iterdir()] == ["lock"]
        assert {p.name for p in alive.folder.iterdir()} == {"lock", "state.json"}


def test_files_of_a_name_that_is_claimed_meanwhile_stay(tmp_path: Path) -> None:
    folder = dead(tmp_path, "a")
    before = {p.name for p in folder.iterdir()}
    # A claim under way: it has the root lock, and then the name's.
    root_fd = deployments._locked(tmp_path / ".lock", wait=True)
    assert root_fd is not None
    ending = threading.Thread(target=deployments.end_leftovers, args=(tmp_path,))
    ending.start()
    ending.join(0.3)
    assert ending.is_alive()
    lock_fd = deployments._locked(folder / "lock", wait=False)
    assert lock_fd is not None
    os.close(root_fd)
    ending.join(10)
    assert {p.name for p in folder.iterdir()} == before
    os.close(lock_fd)


def test_an_owner_is_known_beyond_the_reuse_of_its_pid() -> None:
    own = child.own_id()
    assert child.is_alive(own)
    namespace, pid, began = own.rsplit("/", 2)
    assert not child.is_alive(f"{namespace}/{pid}/{int(began) + 1}")
    assert not child.is_alive(f"{namespace}/{0x7FFFFFFF}/1")
    assert child.is_alive(f"pid:[1]/{pid}/1")  # another namespace: not ours to judge


def test_a_detached_one_is_waited_for_and_ended(tmp_path: Path) -> None:
    argv = [sys.executable, str(HERE / "up.py"), str(tmp_path), "far"]
    socket_path = tmp_path / "far/control.sock"
    seen: list[str] = []
    environ = dict(os.environ) | {"PYTHONPATH": PYTHONPATH}

    def start(*words: str, to: str = "out") -> subprocess.Popen[bytes]:
        return detach.start([*argv, *words], output=tmp_path / to, environ=environ)

    process = start("2")
    code = detach.wait_ready(process, socket_path, on_status=lambda s: seen.append(s["state"]))
    assert code is None
    assert seen[-1] == "ready"
    one = deployments.find(tmp_path, "far")
    assert one.pid == process.pid
    assert start("2", to="out2").wait(20) == 1
    assert "the deployment 'far' is up already" in (tmp_path / "out2").read_text()
    control.ask(socket_path, {"do": "down"})
    assert deployments.wait_gone(one, timeout_s=20)
    assert process.wait(20) == 0
    bad = start("1", "--exit-after", "0", "--never-listen")
    assert detach.wait_ready(bad, socket_path) == 6
    with pytest.raises(LaunchError, match="cannot start in the background: /no/such"):
        detach.start(["/no/such"], output=tmp_path / "out")
