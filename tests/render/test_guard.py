"""The guard's questions, asked of this machine: real plans, real ports, real processes."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from supervise.world import ENGINE, free_port

from zenlaunch import compiled
from zenlaunch.cpuset import CpuSet
from zenlaunch.errors import ConfigError, LaunchError
from zenlaunch.guard import Guarded, binding_problems, check, drain, read_plan_file, ready

Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    """Return the plan file of one instance that has this machine to itself."""
    wishes = ["--engine", "command", "--instances", "1", "--kv-cache", "16M", "--weights", "16M",
              "--overhead", "16M", "--base-port", str(free_port())]  # fmt: skip
    command = [sys.executable, "-m", "zenlaunch", "render", "systemd", "--output", str(tmp_path)]
    subprocess.run([*command, *wishes, "--", "/bin/true", "{port}"], check=True)
    path = tmp_path / "etc/zenlaunch/plan.json"
    data = json.loads(path.read_text())
    data["runtime_folder"] = data["cache_folder"] = str(tmp_path)
    path.write_text(json.dumps(data))
    return path


@pytest.fixture
def guarded(plan_file: Path) -> Guarded:
    return read_plan_file(plan_file, "i0")


@pytest.fixture
def start() -> Iterator[Start]:
    """Return a function that starts a program, which ends with the test."""
    running: list[subprocess.Popen[bytes]] = []

    def go(*argv: str) -> subprocess.Popen[bytes]:
        running.append(subprocess.Popen([sys.executable, *argv]))
        return running[-1]

    yield go
    for process in running:
        process.kill()
        process.wait()


def engine(guarded: Guarded, start: Start, *flags: str) -> subprocess.Popen[bytes]:
    return start("-S", str(ENGINE), "--port", str(guarded.launch.port), *flags)


def whole_machine(guarded: Guarded) -> Guarded:
    """Return the same with the binding that this process has."""
    text = Path("/proc/self/status").read_text()
    sets = {
        line.split(":")[0]: CpuSet.parse(line.split(":")[1])
        for line in text.splitlines()
        if "_allowed_list" in line
    }
    instance = replace(
        guarded.instance, cpus=sets["Cpus_allowed_list"], mem_nodes=sets["Mems_allowed_list"]
    )
    return replace(guarded, instance=instance)


def test_passes_where_all_is_as_planned(guarded: Guarded) -> None:
    said: list[str] = []
    check(whole_machine(guarded), said.append)
    assert said == []


def test_refuses_a_taken_port(guarded: Guarded) -> None:
    with (
        socket.create_server(("127.0.0.1", guarded.launch.port)),
        pytest.raises(LaunchError, match=f"port {guarded.launch.port} is taken by pid"),
    ):
        check(whole_machine(guarded), print)


def test_refuses_another_machine(guarded: Guarded) -> None:
    assert guarded.machine is not None
    other = replace(guarded.machine, machine=replace(guarded.machine.machine, model="another"))
    with pytest.raises(LaunchError, match="not the planned machine: model: planned for another"):
        check(whole_machine(replace(guarded, machine=other)), print)


def test_refuses_a_plan_of_no_machine(guarded: Guarded) -> None:
    with pytest.raises(LaunchError, match="does not say which machine"):
        check(whole_machine(replace(guarded, machine=None)), print)


def test_refuses_a_model_that_is_not_there(guarded: Guarded) -> None:
    with pytest.raises(LaunchError, match="cannot be read by this user"):
        check(replace(whole_machine(guarded), model_folder="/nonexistent/model"), print)


def test_refuses_weights_that_are_not_for_this_user(guarded: Guarded, tmp_path: Path) -> None:
    """A link into a cache that was cleared stands for a file without permission, also for root."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").touch()
    (folder / "model.safetensors").symlink_to(tmp_path / "gone")
    with pytest.raises(LaunchError, match=r"model\.safetensors cannot be read by this user"):
        check(replace(whole_machine(guarded), model_folder=str(folder)), print)


def test_refuses_missing_memory_after_some_patience(guarded: Guarded) -> None:
    here = whole_machine(guarded)
    if not here.instance.mem_nodes:
        pytest.skip("this machine shows no NUMA nodes")
    greedy = replace(here, launch=replace(here.launch, memory_bytes=1 << 50))
    said: list[str] = []
    with pytest.raises(LaunchError, match=r"GiB free, 1024.0 TiB are planned"):
        check(greedy, said.append, patience_s=0.2)
    assert len(said) == 1
    assert said[0].endswith("waiting up to 0.2 s")


def test_binding_is_compared_with_the_plan(guarded: Guarded, tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("Name:\tx\nCpus_allowed_list:\t4-5\nMems_allowed_list:\t2\n")
    right = replace(guarded.instance, cpus=CpuSet([4, 5]), mem_nodes=CpuSet([2]))
    assert binding_problems(right, status) == []
    assert binding_problems(replace(right, mem_nodes=CpuSet()), status) == []
    (wide,) = binding_problems(replace(right, cpus=CpuSet([4])), status)
    assert wide.startswith("unbound: Cpus_allowed_list is 4-5, planned 4 ")
    (far,) = binding_problems(replace(right, mem_nodes=CpuSet([1])), status)
    assert far.startswith("unbound: Mems_allowed_list is 2, planned 1 ")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: data.update(schema=7), "schema 7"),
        (lambda data: data.pop("plan"), "no plan file"),
        (lambda data: data["launch"]["i0"].update(port2=1), "no plan file"),
        (lambda data: data.pop("launch"), "no plan file"),
    ],
)
def test_a_damaged_plan_file_is_named(
    plan_file: Path, change: Callable[[dict[str, object]], object], said: str
) -> None:
    data = json.loads(plan_file.read_text())
    change(data)
    plan_file.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=said):
        read_plan_file(plan_file, "i0")


def test_unknown_instance_and_absent_file(plan_file: Path) -> None:
    with pytest.raises(ConfigError, match="no instance 'i9'"):
        read_plan_file(plan_file, "i9")
    with pytest.raises(ConfigError, match="No such file"):
        read_plan_file(plan_file.with_name("absent"), "i0")


def test_ready_waits_for_the_engine(guarded: Guarded, start: Start) -> None:
    process = engine(guarded, start, "--ready-after", "0.5")
    said: list[str] = []
    ready(guarded, process.pid, said.append)
    assert said == ["i0 is ready"]


def test_ready_gives_up_when_the_engine_ends(guarded: Guarded, start: Start) -> None:
    process = engine(guarded, start, "--ready-after", "60", "--exit-after", "0.3")
    with pytest.raises(LaunchError, match="i0 ended before it was ready"):
        ready(guarded, process.pid, print)


def test_a_ready_engine_leaves_the_cache_warm(
    guarded: Guarded, start: Start, tmp_path: Path
) -> None:
    (tmp_path / "vllm").mkdir()
    process = engine(guarded, start)
    cached = replace(guarded, launch=replace(guarded.launch, compile_cache="abc"))
    assert not compiled.is_warm(cached.stamps, "abc")
    ready(cached, process.pid, print)
    assert compiled.is_warm(cached.stamps, "abc")


def test_drain_waits_for_the_requests(guarded: Guarded, start: Start) -> None:
    engine(guarded, start)
    port = free_port() + 30
    start("-m", "zenlaunch", "proxy", "--listen", f"127.0.0.1:{port}",
          "--admin-socket", str(guarded.admin_socket),
          "--upstream", f"i0=http://127.0.0.1:{guarded.launch.port}")  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    body = json.dumps({"model": "m", "messages": [], "stream": True, "max_tokens": 50}).encode()
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", body, {"content-type": "application/json"}
    )
    until = time.monotonic() + 60
    while True:
        try:
            answer = urllib.request.urlopen(request, timeout=60)
            break
        except OSError:
            assert time.monotonic() < until
            time.sleep(0.05)
    with answer:
        answer.readline()
        said: list[str] = []
        draining = threading.Thread(target=drain, args=(guarded, said.append))
        draining.start()
        assert answer.read().rstrip().endswith(b"data: [DONE]")
        draining.join(60)
    assert said == ["i0 is out of the proxy"]


def test_drain_without_a_proxy_holds_nothing_up(guarded: Guarded) -> None:
    said: list[str] = []
    drain(guarded, said.append)
    assert said == ["i0: the proxy does not answer, nothing to drain"]
