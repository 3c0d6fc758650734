from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from zenlaunch.cpuset import CpuSet
from zenlaunch.errors import TopologyError
from zenlaunch.topology import (
    L3,
    Core,
    CoreKind,
    Machine,
    Note,
    NumaNode,
    Package,
    Severity,
    Topology,
    contradictions,
    group_by,
    restrict,
)

HYBRID = Topology(
    origin="sysroot",
    machine=Machine(arch="x86_64", vendor="AuthenticAMD", model="made up", avx512=True),
    online=CpuSet.parse("0-4"),
    offline=CpuSet([5]),
    allowed_cpus=CpuSet.parse("0-3"),
    allowed_mems=CpuSet([0]),
    packages=(Package(id=36, cpus=CpuSet.parse("0-4")),),
    nodes=(
        NumaNode(id=0, cpus=CpuSet.parse("0-4"), package=36, memory_bytes=1 << 30,
                 free_bytes=1 << 29, distances={0: 10, 8: 17}),
        NumaNode(id=8, cpus=CpuSet(), memory_bytes=0, distances={0: 17, 8: 10}),
    ),
    l3=(L3(cpus=CpuSet.parse("0-3"), size_bytes=1 << 25),),
    cores=(
        Core(id=0, cpus=CpuSet.parse("0-1"), l3=0, node=0, package=36, kind=CoreKind.PERFORMANCE),
        Core(id=2, cpus=CpuSet.parse("2-3"), l3=0, node=0, package=36, kind=CoreKind.PERFORMANCE),
        Core(id=4, cpus=CpuSet([4]), node=0, package=36, kind=CoreKind.EFFICIENCY),
    ),
    isolated=CpuSet([3]),
    nohz_full=CpuSet([3]),
    notes=(Note(code="hybrid", severity=Severity.INFO, text="two kinds"),),
)  # fmt: skip
UNKNOWN = Topology(
    origin="lscpu",
    machine=Machine(),
    online=CpuSet(),
    online_known=False,
    packages=(Package(id=0, cpus=CpuSet(), cpus_known=False),),
    nodes=(NumaNode(id=0, cpus=CpuSet(), cpus_known=False),),
    l3_known=False,
)


@pytest.mark.parametrize("topology", [HYBRID, UNKNOWN], ids=["hybrid", "unknown"])
def test_json_round_trip(topology: Topology) -> None:
    assert contradictions(topology) == []
    assert Topology.from_dict(topology.to_dict()) == topology
    assert Topology.from_dict(topology.to_dict()).digest == topology.digest


def test_json_of_what_is_unknown() -> None:
    data = UNKNOWN.to_dict()
    assert data["online"] is None
    assert data["offline"] is None
    assert data["allowed"] == {"cpus": None, "mems": None}
    assert data["packages"] == [{"id": 0, "cpus": None}]
    assert data["nodes"][0]["cpus"] is None
    assert data["l3"] is None


def test_json_of_the_interface() -> None:
    data = HYBRID.to_dict()
    assert data["schema"] == 1
    assert data["packages"] == [{"id": 36, "cpus": "0-4"}]
    assert data["nodes"][1] == {
        "id": 8, "cpus": "", "package": None, "memory_bytes": 0, "free_bytes": None,
        "distances": {"0": 17, "8": 10},
    }  # fmt: skip
    assert data["l3"] == [{"cpus": "0-3", "size_bytes": 1 << 25}]
    assert data["cores"][2] == {
        "id": 4, "cpus": "4", "l3": None, "node": 0, "package": 36, "kind": "efficiency",
    }  # fmt: skip
    assert data["threads_per_core"] is None
    assert data["notes"] == [{"code": "hybrid", "severity": "info", "text": "two kinds"}]


def test_an_older_probe_lacks_the_later_keys() -> None:
    data = HYBRID.to_dict()
    del data["isolated"], data["nohz_full"], data["machine"]["avx512"]
    for core in data["cores"]:
        del core["kind"]
    read = Topology.from_dict(data)
    assert read.isolated == CpuSet()
    assert read.machine.avx512 is None
    assert read.cores[0].kind is None


def test_digest_holds_what_a_plan_depends_on() -> None:
    other_free = replace(
        HYBRID, origin="live", notes=(), nodes=tuple(replace(n, free_bytes=1) for n in HYBRID.nodes)
    )
    assert other_free.digest == HYBRID.digest
    assert HYBRID.digest.startswith("sha256:")
    for other in (
        replace(HYBRID, allowed_cpus=CpuSet([0])),
        replace(HYBRID, online=CpuSet.parse("0-3")),
        replace(HYBRID, isolated=CpuSet()),
        replace(HYBRID, nodes=HYBRID.nodes[:1]),
    ):
        assert other.digest != HYBRID.digest


def test_questions() -> None:
    assert HYBRID.node(8).memory_bytes == 0
    with pytest.raises(KeyError):
        HYBRID.node(1)
    assert HYBRID.usable_cpus == CpuSet.parse("0-3")
    assert replace(HYBRID, allowed_cpus=None).usable_cpus == HYBRID.online
    assert restrict(HYBRID, CpuSet.parse("3-9")).allowed_cpus == CpuSet([3])
    assert group_by([(8, 1), (0, 2), (8, 0)]) == {0: CpuSet([2]), 8: CpuSet.parse("0-1")}


Change = Callable[[dict[str, Any]], object]
DAMAGE: dict[str, Change] = {
    "probe schema 2": lambda d: d.update(schema=2),
    "the key schema is missing": lambda d: d.pop("schema"),
    "the key machine.arch is missing": lambda d: d["machine"].pop("arch"),
    "the key nodes[1].distances is missing": lambda d: d["nodes"][1].pop("distances"),
    "machine is not an object": lambda d: d.update(machine=[]),
    "machine.model is '3', not a text": lambda d: d["machine"].update(model=3),
    "machine.avx512 is 'yes', not true, false or null": lambda d: d["machine"].update(avx512="yes"),
    "online is 'x', not a CPU list": lambda d: d.update(online="x"),
    "offline is '5', not a text": lambda d: d.update(offline=5),
    "packages is 'None', not a list": lambda d: d.update(packages=None),
    "packages[0] is not an object": lambda d: d.update(packages=["0-4"]),
    "packages[0].id is 'None', not a number": lambda d: d["packages"][0].update(id=None),
    "nodes[0].id is 'True', not a whole number": lambda d: d["nodes"][0].update(id=True),
    "nodes[0].memory_bytes is '1.5', not a whole number": (
        lambda d: d["nodes"][0].update(memory_bytes=1.5)
    ),
    "nodes[0].free_bytes is '99999": lambda d: d["nodes"][0].update(free_bytes=10**30 - 1),
    "nodes[0].distances.x is '10', and its key is not a node": (
        lambda d: d["nodes"][0].update(distances={"x": 10})
    ),
    "nodes[0].distances.0 is 'None', not a number": (
        lambda d: d["nodes"][0].update(distances={"0": None})
    ),
    "cores[0].kind is 'slow', not one of performance, efficiency": (
        lambda d: d["cores"][0].update(kind="slow")
    ),
    "notes[0].severity is 'bad', not one of info, warning, error": (
        lambda d: d["notes"][0].update(severity="bad")
    ),
    "a package has CPUs that are not online: 7": lambda d: d["packages"][0].update(cpus="0-4,7"),
    "a node has CPUs that are not online: 5": lambda d: d["nodes"][1].update(cpus="5"),
    "a L3 has CPUs that are not online: 6": lambda d: d["l3"][0].update(cpus="6"),
    "two nodes have the same id": lambda d: d["nodes"][1].update(id=0),
    "two packages have the same id": lambda d: d["packages"].append({"id": 36, "cpus": ""}),
    "core 1 is not named after its lowest CPU": lambda d: d["cores"][0].update(id=1),
    "CPUs 2 are in two cores": lambda d: d["cores"][0].update(cpus="0-2"),
    "core 0 names L3 1 of 1": lambda d: d["cores"][0].update(l3=1),
    "core 0 names L3 -1 of 1": lambda d: d["cores"][0].update(l3=-1),
    "core 0 names node 5, which is not listed": lambda d: d["cores"][0].update(node=5),
    "core 0 names package 0, which is not listed": lambda d: d["cores"][0].update(package=0),
    "a node has less than no memory": lambda d: d["nodes"][1].update(memory_bytes=-1),
    "CPUs 4 are both online and offline": lambda d: d.update(offline="4-5"),
}


@pytest.mark.parametrize("message", DAMAGE)
def test_a_damaged_probe_is_refused_by_the_key(message: str) -> None:
    data = copy.deepcopy(HYBRID.to_dict())
    DAMAGE[message](data)
    with pytest.raises(TopologyError) as caught:
        Topology.from_dict(data, source="saved.json")
    assert message in caught.value.message
    assert caught.value.message.startswith("saved.json: ")
    assert caught.value.hint == "make the file again with `zenlaunch probe --json`"
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("data", [None, [], 3, "text"])
def test_something_else_is_refused(data: object) -> None:
    with pytest.raises(TopologyError, match="the whole is not an object"):
        Topology.from_dict(data)
