"""The planned mask and environment, put to the installed vLLM's own binding code."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Result
from machines.build import build, names

from zenlaunch.cpuset import CpuSet
from zenlaunch.probe.sysfs import read_sysfs

WISHES: dict[str, tuple[str, ...]] = {
    "default": (),
    "recipe": ("--recipe", "amd-zendnn-5.2"),
    "contiguous": ("--layout", "contiguous"),
    "two-threads": ("--threads-per-core", "2"),
    "reserve-2": ("--reserve-per-instance", "2"),
    "reserve-0": ("--reserve-per-instance", "0"),
    "four-a-node": ("--instances-per-node", "4"),
}
# vLLM keeps lscpu's core number per CPU; here it is the lowest CPU of the core, as unique.
SITUATIONS_PER_MACHINE = len(WISHES)


def situations_of(tree: Path, plan: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what vLLM would see in each instance of a plan."""
    topology = read_sysfs(tree, live=False)
    cpus = [
        (cpu, core.id, -1 if core.node is None else core.node)
        for core in topology.cores
        for cpu in core.cpus
        if core.node is not None
    ]
    mems = topology.allowed_mems or CpuSet(n.id for n in topology.nodes if n.memory_bytes != 0)
    return [
        {
            "cpus": cpus,
            "mask": list(CpuSet.parse(i["cpus"])),
            "mems": list(mems),
            "env": i["env"],
        }
        for i in plan["instances"]
    ]


def test_vllm_binds_what_is_planned(
    zenlaunch: Callable[..., Result], vllm_python: Path, tmp_path: Path
) -> None:
    asked: list[tuple[str, dict[str, Any]]] = []
    situations: list[dict[str, Any]] = []
    for machine in names():
        tree = build(machine, tmp_path / machine)
        for label, wish in WISHES.items():
            result = zenlaunch(
                "plan", "m", "--weights", "1G", "--kv-cache", "1G", "--overhead", "0",
                "--memory-margin", "0%", "--vllm-version", "0.32.0", "--json",
                "--sysroot", str(tree), *wish,
            )  # fmt: skip
            if result.status:
                assert result.status in (3, 4), result.err
                continue
            plan = json.loads(result.out)
            if plan["instances"][0]["node"] is None:
                continue  # without nodes vLLM takes everything for node 0
            asked += [(f"{machine} {label}", i) for i in plan["instances"]]
            situations += situations_of(tree, plan)
    done = subprocess.run(
        [vllm_python, Path(__file__).with_name("bind_like_vllm.py")],
        input=json.dumps(situations),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answers = json.loads(done.stdout)
    assert len(answers) == len(asked) > 500
    for (label, instance), answer in zip(asked, answers, strict=True):
        planned = CpuSet.parse(instance["ranks"][0]["cpus"])
        where = f"{label} {instance['name']}"
        assert CpuSet(answer["engine"]) == planned, where
        assert answer["threads"] == len(planned), where
        if "VLLM_CPU_OMP_THREADS_BIND" not in instance["env"]:
            assert CpuSet(answer["reserved"]) == CpuSet.parse(instance["reserved_cpus"]), where


@pytest.mark.parametrize(
    ("env", "reason"),
    [({}, "auto alone looks at node 0 whatever the mask is")],
)
def test_why_the_memory_node_is_named(
    env: dict[str, str], reason: str, vllm_python: Path, tmp_path: Path
) -> None:
    """Without CPU_VISIBLE_MEMORY_NODES an instance on socket 1 gets no core at all."""
    tree = build("epyc-9755-2s", tmp_path / "tree")
    situation = situations_of(tree, {"instances": [{"cpus": "128-255", "env": env}]})
    done = subprocess.run(
        [vllm_python, Path(__file__).with_name("bind_like_vllm.py")],
        input=json.dumps(situation),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout)[0]["engine"] == [], reason
