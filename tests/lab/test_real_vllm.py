"""A real vLLM under real units: does what hardens them leave it what it needs?

The systemd of this machine runs in namespaces (lab.namespace), so that this needs root and takes a
minute, and nothing of it stays. What the kernel gives no cpuset for is bound by CPUAffinity= there;
cpusets themselves are shown in the emulated guest (test_units).
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from lab.image import Unavailable
from lab.namespace import seen_as, start
from zenlaunch.places import places_of

pytestmark = [pytest.mark.lab, pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def seen(
    vllm_python: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("two instances need two CPUs")
    model = tiny_model.resolve()
    python = vllm_python.parent.parent.resolve() / "bin" / "python"
    readable = [model, *model.iterdir(), python, *map(Path, places_of(str(python)))]
    folder = tmp_path_factory.mktemp("vllm")
    try:
        words = [str(seen_as(path)) for path in (model, python)]
        running = start(folder, "real_vllm.py", *words, readable=readable)
        result = running.result(timeout_s=540)
    except Unavailable as reason:
        pytest.skip(str(reason))
    print(result.log, result.seconds)
    assert result.rc == 0, result.log + result.files["journal"].decode()[-6000:]
    found: dict[str, Any] = result.json("seen.json")
    return found


def test_all_are_ready_and_answer(seen: dict[str, Any]) -> None:
    assert seen["start"]["rc"] == 0
    assert set(seen["states"].values()) == {"active"}
    assert {status for status, _ in seen["answers"]} == {200}
    assert {name for _, name in seen["answers"]} == {"i0", "i1"}


def test_they_are_as_planned(seen: dict[str, Any]) -> None:
    assert seen["verify_units"] == [0, ""]
    assert seen["status"]["state"] == "ready"
    for row in seen["status"]["instances"]:
        assert row["requests_running"] == 0
        assert row["kv_usage"] == 0
    rc, said = seen["verify"]
    assert rc == 0, said
    for one in json.loads(said).values():
        assert one["ok"]
        assert one["libraries"]["iomp5"]


def test_what_hardens_them_is_in_force(seen: dict[str, Any]) -> None:
    for unit, one in seen["sandbox"].items():
        assert one["NoNewPrivs"] == "1"
        assert one["Seccomp"] == "2"
        assert int(one["CapEff"], 16) == int(one["CapBnd"], 16) == 0
        assert not one["Uid"].startswith("0\t")
        assert one["user_namespace"]
        assert one["others_hidden"]
        assert not one["sees_tmp"]
        assert set(one["devices"]) <= {
            *("char", "fd", "full", "hugepages", "log", "mqueue", "null", "ptmx", "pts", "random"),
            *("shm", "stderr", "stdin", "stdout", "tty", "urandom", "zero"),
        }
        own = ["/var/lib/zenlaunch", "/var/cache/zenlaunch"] if "-i0" in unit else []
        assert one["writable"] == own
    # The proxy, which listens on the loopback here, gets nowhere else.
    assert seen["reached"] == {"zenlaunch-i0.service": True, "zenlaunch-proxy.service": False}
    # What it does not apply, systemd says.
    assert seen["warnings"] == ""


def test_what_it_compiles_is_its_own_and_is_run(seen: dict[str, Any]) -> None:
    libraries = seen["compiled"].splitlines()
    assert libraries
    assert all(line.startswith("zenlaunch 700 /var/cache/zenlaunch/vllm/") for line in libraries)


def test_restart_and_down(seen: dict[str, Any]) -> None:
    assert seen["restart"]["rc"] == 0
    assert seen["restart"]["said"] == "restarted: i0\n"
    assert seen["restarted"]
    assert {tuple(answer) for answer in seen["after"]} == {(200, "i0"), (200, "i1")}
    assert seen["down"]["rc"] == 0
    assert seen["left"] == ""
    assert {r["Result"] for r in seen["results"].values()} == {"success"}
    assert {r["NRestarts"] for r in seen["results"].values()} == {"0"}
