"""Plan: what the goldens do not show: saved plans, sources without cores, ports, 0.13's warning."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zenlaunch.config import Config, override
from zenlaunch.cpuset import CpuSet
from zenlaunch.engines import EngineFacts, VersionSource, command, vllm
from zenlaunch.errors import ConfigError, PlanError
from zenlaunch.memory import ModelSizes, size_instances
from zenlaunch.plan import make_plan, plan_from_dict
from zenlaunch.probe.read import read_source
from zenlaunch.probe.sysfs import read_sysfs

NUMACTL = """available: 2 nodes (0-1)
node 0 cpus: 0 1 2 3 8 9 10 11
node 0 size: 64000 MB
node 0 free: 60000 MB
node 1 cpus: 4 5 6 7 12 13 14 15
node 1 size: 64000 MB
node 1 free: 60000 MB
node distances:
node   0   1
  0:  10  32
  1:  32  10
"""
SIZES = ModelSizes(weights_bytes=1 << 30)


def wish(**options: Any) -> Config:
    return override(Config(model="m"), {k.replace("__", "."): v for k, v in options.items()})


def test_a_source_without_cores_needs_cpus_that_the_user_vouches_for() -> None:
    one_range = NUMACTL.replace("0 1 2 3 8 9 10 11", "0 1 2 3 4 5 6 7").replace(
        "4 5 6 7 12 13 14 15", "8 9 10 11 12 13 14 15"
    )
    with pytest.raises(PlanError, match="SMT siblings") as caught:
        make_plan(read_source(one_range, source="n"), wish(), sizes=SIZES, engine="vllm")
    topology = read_source(NUMACTL, source="numactl.txt")
    assert caught.value.hint
    assert "lscpu -e" in caught.value.hint
    plan = make_plan(topology, wish(split__cpus="0-7"), sizes=SIZES, engine="vllm")
    assert [(str(i.cpus), i.node) for i in plan.instances] == [("0-2", 0), ("4-6", 1)]
    assert plan.proxy.cpus == CpuSet([3])


def test_siblings_are_told_from_the_numbering_where_it_is_plain() -> None:
    """CPU n and n+8 of two nodes that are each a range and the same range 8 higher."""
    plan = make_plan(read_source(NUMACTL, source="numactl.txt"), wish(), sizes=SIZES, engine="vllm")
    assert [str(i.cpus) for i in plan.instances] == ["0-3", "4-7"]
    assert plan.proxy.cpus == CpuSet([11])
    assert plan.notes[0].code == "siblings-by-numbering"


@pytest.fixture
def saved(trees: Callable[[str], Path]) -> dict[str, Any]:
    topology = read_sysfs(trees("epyc-9755-2s"), live=False)
    return make_plan(topology, wish(), sizes=SIZES, engine="vllm").to_dict()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 2}, "plan schema 2"),
        ({"proxy": None}, "cannot be read"),
        ({"layout": "diagonal"}, "cannot be read"),
        ({"instances": [{}]}, "lacks the key 'name'"),
        ({"memory": [{"nodes": 1}]}, "cannot be read"),
    ],
)
def test_saved_plans_with_damage(
    saved: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        plan_from_dict(saved | change)
    del saved["machine"]
    with pytest.raises(PlanError, match="lacks the key 'machine'"):
        plan_from_dict(saved)


def test_ports_end(trees: Callable[[str], Path]) -> None:
    topology = read_sysfs(trees("epyc-9755-2s"), live=False)
    with pytest.raises(PlanError, match="port 65536, beyond"):
        make_plan(topology, wish(base_port=65535), sizes=SIZES, engine="vllm")


def test_no_memory_anywhere(trees: Callable[[str], Path]) -> None:
    topology = read_source(NUMACTL.replace("64000", "0"), source="numactl.txt")
    with pytest.raises(PlanError, match="no memory that may be used"):
        make_plan(topology, wish(split__cpus="0-7"), sizes=SIZES, engine="vllm")


def test_vllm_0_13_warns() -> None:
    facts = EngineFacts(version="0.13.0", version_source=VersionSource.NAMED)
    assert "16 engine threads" in vllm.choose(wish(), facts).notes[0].text


def test_the_command_engine_needs_a_command_with_a_port() -> None:
    with pytest.raises(ConfigError, match=r"needs engine\.args"):
        command.choose(wish(), EngineFacts())
    with pytest.raises(ConfigError, match=r"needs \{port\}"):
        command.choose(wish(engine__args=("server",)), EngineFacts())


def test_a_machine_without_nodes_has_no_room_to_check() -> None:
    memory = size_instances(None, 3, wish(memory__kv_cache="1G").memory, SIZES)
    assert memory.total_bytes == (1 + 1 + 4) << 30
