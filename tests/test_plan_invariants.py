"""What holds for every plan: thousands of machine x wish pairs, our machines and the corpus."""

from __future__ import annotations

import json
import shlex
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from machines.build import names

from zenlaunch.compose import shell_line
from zenlaunch.config import Config, Layout, Recipe, override, validated
from zenlaunch.cpuset import CpuSet, union
from zenlaunch.engines import ENGINES, EngineFacts, VersionSource
from zenlaunch.errors import PlanError, TopologyError
from zenlaunch.memory import ModelSizes
from zenlaunch.plan import Plan, make_plan, plan_from_dict
from zenlaunch.probe.read import read_source
from zenlaunch.probe.sysfs import read_sysfs
from zenlaunch.topology import Topology

SIZES = ModelSizes(weights_bytes=1 << 28, kv_bytes_per_token=1 << 10, max_model_len=4096)

WISHES: tuple[dict[str, Any], ...] = (
    {},
    {"split.layout": Layout.CONTIGUOUS},
    {"split.layout": Layout.L3},
    {"split.recipe": Recipe.AMD_ZENDNN_5_2},
    {"split.threads_per_core": 2},
    {"split.threads_per_core": 2, "split.layout": Layout.L3},
    {"split.instances": 1},
    {"split.instances": 3},
    {"split.instances": 16},
    {"split.instances_per_node": 1},
    {"split.instances_per_node": 2},
    {"split.instances_per_node": 5},
    {"split.instances_per_node": 2, "split.layout": Layout.L3},
    {"split.cores_per_instance": 1},
    {"split.cores_per_instance": 7},
    {"split.cores_per_instance": 16, "split.layout": Layout.CONTIGUOUS},
    {"split.instances_per_node": 2, "split.cores_per_instance": 2},
    {"split.reserve_per_instance": 0},
    {"split.reserve_per_instance": 2},
    {"split.reserve_per_instance": 0, "split.reserve_proxy": 0},
    {"split.reserve_proxy": 1},
    {"split.reserve_proxy": 3},
    {"split.nodes": "0"},
    {"split.nodes": "0-1", "split.instances": 2},
    {"split.cpus": "0-3"},
    {"split.cpus": "0-15", "split.instances_per_node": 2},
    {"memory.kv_cache": "100M"},
    {"engine.explicit_cpu_list": True},
    {"engine.version": "0.15.1", "memory.kv_cache": "1G"},
)  # fmt: skip


def own_machines(trees: Callable[[str], Path]) -> Iterator[tuple[str, Topology]]:
    for name in names():
        yield name, read_sysfs(trees(name), live=False)


def corpus_machines(corpus: Path, folder: Path) -> Iterator[tuple[str, Topology]]:
    for packed in sorted((corpus / "packed").glob("*.tar.gz")):
        with tarfile.open(packed) as tar:
            tar.extractall(folder, filter="data")
        name = packed.name.removesuffix(".tar.gz")
        try:
            yield name, read_sysfs(folder / name, live=False)
        except TopologyError:
            continue
    for text in sorted([*(corpus / "text").iterdir(), *(corpus / "lscpu").iterdir()]):
        if text.suffix == ".txt":
            try:
                yield text.name, read_source(text.read_text(), source=text.name)
            except TopologyError:
                continue


def check_machine(name: str, topology: Topology, outcomes: Counter[str]) -> None:
    for wish in WISHES:
        config = validated(override(Config(model="m"), wish))
        try:
            plan = make_plan(topology, config, sizes=SIZES, engine="vllm")
            check(topology, config, plan)
            check_launch(plan, config)
        except PlanError:
            outcomes["refused"] += 1
            continue
        except AssertionError as e:
            raise AssertionError(f"{name} with {wish}: {e}") from e
        outcomes["planned"] += 1
        again = make_plan(topology, config, sizes=SIZES, engine="vllm")
        assert again == plan, f"{name} with {wish}: not repeatable"


def check(topology: Topology, config: Config, plan: Plan) -> None:
    taken = CpuSet()
    cores = {cpu: core for core in topology.cores for cpu in core.cpus}
    owner: dict[int, str] = {}
    isolated_ok = config.split.cpus is not None
    for i in plan.instances:
        assert i.cpus, f"{i.name} is empty"
        assert taken.isdisjoint(i.cpus), f"{i.name} shares CPUs"
        taken |= i.cpus
        assert i.cpus <= topology.usable_cpus, f"{i.name} has CPUs that are not allowed"
        assert isolated_ok or i.cpus.isdisjoint(topology.isolated) or (
            topology.usable_cpus <= topology.isolated
        ), f"{i.name} has isolated CPUs"  # fmt: skip
        assert i.reserved_cpus <= i.cpus, f"{i.name} reserves outside its mask"
        assert i.engine_cpus, f"{i.name} has no engine thread"
        for cpu in i.cpus:
            if cpu in cores:
                core = cores[cpu]
                assert owner.setdefault(core.id, i.name) == i.name, f"core {core.id} is shared"
                assert core.node == i.node or i.node is None, f"{i.name} leaves its node"
                used = core.cpus & i.cpus
                assert len(used) == config.split.threads_per_core, f"core {core.id}: {used}"
        if i.node is None:
            assert not i.mem_nodes
            assert not topology.nodes
        else:
            home = topology.node(i.mem_nodes.first)
            assert len(i.mem_nodes) == 1
            assert home.memory_bytes != 0
            assert topology.allowed_mems is None or home.id in topology.allowed_mems
            if home.id != i.node:
                assert any(n.code == "remote-memory" for n in plan.notes), "remote, not explained"
    assert len({len(i.cpus) for i in plan.instances}) == 1, "not equal"
    assert len({len(i.reserved_cpus) for i in plan.instances}) == 1, "not equal"
    engines = union(i.engine_cpus for i in plan.instances)
    alone = plan.proxy.cpus - taken
    shared = plan.proxy.cpus & engines
    assert not shared or any(n.code == "proxy-shares" for n in plan.notes), "proxy on engine CPUs"
    assert alone <= topology.usable_cpus
    assert plan.spare_cpus.isdisjoint(taken | plan.proxy.cpus)
    for row in plan.memory:
        if row.planned_bytes is not None and row.available_bytes is not None:
            assert row.planned_bytes <= row.available_bytes, f"node {row.node} is overbooked"
    data = json.loads(json.dumps(plan.to_dict()))
    assert plan_from_dict(data) == replace(plan, steps=()), "JSON does not come back"


def check_launch(plan: Plan, config: Config) -> None:
    engine = ENGINES["vllm"]
    facts = EngineFacts(
        version=config.engine.version or "0.32.0", version_source=VersionSource.NAMED
    )
    choice = engine.choose(config, facts)
    for i in plan.instances:
        spec = engine.launch(i, config, facts, choice, SIZES)
        words = shlex.split(shell_line(spec))
        assert words[0] == "env"
        unset, env = [], {}
        at = 1
        while words[at] == "-u":
            unset.append(words[at + 1])
            at += 2
        while "=" in words[at] and not words[at].startswith("-"):
            key, _, value = words[at].partition("=")
            env[key] = value
            at += 1
        assert tuple(unset) == spec.unset
        assert env == spec.env
        assert tuple(words[at:]) == spec.argv
        assert not set(unset) & set(env)


def test_our_machines(trees: Callable[[str], Path]) -> None:
    outcomes: Counter[str] = Counter()
    for name, topology in own_machines(trees):
        check_machine(name, topology, outcomes)
    assert outcomes.total() > 1500
    assert outcomes["planned"] > outcomes["refused"]


@pytest.mark.corpus
def test_machines_of_the_corpus(corpus: Path, tmp_path: Path) -> None:
    outcomes: Counter[str] = Counter()
    for name, topology in corpus_machines(corpus, tmp_path):
        check_machine(name, topology, outcomes)
    assert outcomes.total() > 4000
    assert outcomes["planned"] > 1000
