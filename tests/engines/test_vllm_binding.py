"""The planned mask and environment, put to the installed vLLM's own binding code."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from conftest import Result
from machines.build import names

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
    zenlaunch: Callable[..., Result], vllm_python: Path, trees: Callable[[str], Path]
) -> None:
    asked: list[tuple[str, dict[str, Any]]] = []
    situations: list[dict[str, Any]] = []
    for machine in names():
        tree = trees(machine)
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
    answers = ask_vllm(vllm_python, situations)
    assert len(answers) == len(asked) > 500
    for (label, instance), answer in zip(asked, answers, strict=True):
        planned = CpuSet.parse(instance["ranks"][0]["cpus"])
        where = f"{label} {instance['name']}"
        assert CpuSet(answer["engine"]) == planned, where
        assert answer["threads"] == len(planned), where
        if "VLLM_CPU_OMP_THREADS_BIND" not in instance["env"]:
            assert CpuSet(answer["reserved"]) == CpuSet.parse(instance["reserved_cpus"]), where


def test_why_the_memory_node_is_named(vllm_python: Path, trees: Callable[[str], Path]) -> None:
    """Without CPU_VISIBLE_MEMORY_NODES an instance on socket 1 gets no core at all."""
    instance = {"cpus": "128-255", "env": {"VLLM_CPU_NUM_OF_RESERVED_CPU": "1"}}
    situations = situations_of(trees("epyc-9755-2s"), {"instances": [instance]})
    assert ask_vllm(vllm_python, situations)[0]["engine"] == []


def ask_vllm(python: Path, situations: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run vLLM's binding code on each situation."""
    done = subprocess.run(
        [python, Path(__file__).with_name("bind_like_vllm.py")],
        input=json.dumps(situations),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answers: list[dict[str, Any]] = json.loads(done.stdout)
    return answers
