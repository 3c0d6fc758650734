from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from zenlaunch.cpuset import CpuSet
from zenlaunch.errors import TopologyError
from zenlaunch.probe.read import read_source
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
    "packages is 'null', not a list": lambda d: d.update(packages=None),
    "packages[0] is not an object": lambda d: d.update(packages=["0-4"]),
    "packages[0].id is 'null', not a number": lambda d: d["packages"][0].update(id=None),
    "nodes[0].id is 'True', not a whole number": lambda d: d["nodes"][0].update(id=True),
    "nodes[0].memory_bytes is '1.5', not a whole number": (
        lambda d: d["nodes"][0].update(memory_bytes=1.5)
    ),
    "nodes[0].free_bytes is '99999": lambda d: d["nodes"][0].update(free_bytes=10**30 - 1),
    "nodes[0].distances.x is '10', and its key is not a node": (
        lambda d: d["nodes"][0].update(distances={"x": 10})
    ),
    "nodes[0].distances.0 is 'null', not a number": (
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
    "core 0 (CPUs 0-1) names node 8, whose CPUs are none": lambda d: d["cores"][0].update(node=8),
    "core 4 (CPUs 4) names L3 0, whose CPUs are 0-3": lambda d: d["cores"][2].update(l3=0),
    "core 2 (CPUs 2-3) names package 40, whose CPUs are 4": lambda d: (
        d.update(packages=[{"id": 36, "cpus": "0-3"}, {"id": 40, "cpus": "4"}]),
        d["nodes"][0].update(package=None),
        d["cores"][1].update(package=40),
        d["cores"][2].update(package=40),
    ),
    "node 0 (CPUs 0-4) names package 36, whose CPUs are 0-3": lambda d: d.update(
        packages=[{"id": 36, "cpus": "0-3"}]
    ),
    "node 0 names package 3, which is not listed": lambda d: d["nodes"][0].update(package=3),
    "L3 0 and L3 1 have the same CPUs (0-3)": lambda d: d["l3"].append(d["l3"][0]),
    "CPUs 4 are online and in no core, though cores are": lambda d: d["cores"].pop(),
    "threads_per_core is 2, core 4 has 1 CPUs (4)": lambda d: d.update(threads_per_core=2),
    "threads_per_core is -5, core 0 has 2 CPUs (0-1)": lambda d: d.update(threads_per_core=-5),
    "threads_per_core is -5, below 1": lambda d: d.update(threads_per_core=-5, cores=[]),
    "a node has less than no free memory: node 0, -3 bytes": (
        lambda d: d["nodes"][0].update(free_bytes=-3)
    ),
    "L3 0 has less than no size: -3 bytes": lambda d: d["l3"][0].update(size_bytes=-3),
    "the distance from node 0 to node 8 is -10": (
        lambda d: d["nodes"][0].update(distances={"8": -10})
    ),
    "nodes[0].distances gives a node two distances": (
        lambda d: d["nodes"][0].update(distances={"8": 10, "08": 11})
    ),
    "nodes[0].distances.70000 is '10', and its key is not a node": (
        lambda d: d["nodes"][0].update(distances={"70000": 10})
    ),
    "nodes[1].id is '-1', outside 0-65535": lambda d: d["nodes"][1].update(id=-1),
    "nodes[1].id is '70000', outside 0-65535": lambda d: d["nodes"][1].update(id=70000),
    "probe schema 'xxx": lambda d: d.update(schema="x" * 5000),
    "probe schema a number of about 4001 digits": lambda d: d.update(schema=10**4000),
    "machine.model is 'a number of about 4001 digits', not a text": (
        lambda d: d["machine"].update(model=10**4000)
    ),
    "nodes[0].distances.··[2J": lambda d: d["nodes"][0].update(distances={"\x1b\ud800[2J": 1}),
}


@pytest.mark.parametrize("message", DAMAGE)
def test_a_damaged_probe_is_refused_by_the_key(message: str) -> None:
    data = copy.deepcopy(HYBRID.to_dict())
    DAMAGE[message](data)
    with pytest.raises(TopologyError) as caught:
        Topology.from_dict(data, source="saved.json")
    assert message in caught.value.message
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < 300
    assert caught.value.message.startswith("saved.json: ")
    assert caught.value.hint == "make the file again with `zenlaunch probe --json`"
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("data", [None, [], 3, "text"])
def test_something_else_is_refused(data: object) -> None:
    with pytest.raises(TopologyError, match="the whole is not an object"):
        Topology.from_dict(data)


def test_package_ids_are_the_kernels() -> None:
    for number in (-1, 1 << 40):
        data = HYBRID.to_dict()
        for part in (data["packages"][0], *data["cores"]):
            part["id" if "node" not in part else "package"] = number
        data["nodes"][0]["package"] = number
        assert Topology.from_dict(data).packages[0].id == number


def test_cpus_in_several_nodes_are_no_contradiction() -> None:
    """With numa=fake each node lists all CPUs of its socket, and no core is in one of them."""
    fake = replace(
        HYBRID,
        nodes=tuple(NumaNode(id=i, cpus=HYBRID.online, package=36) for i in (0, 1)),
        cores=tuple(replace(core, node=i % 2 or None) for i, core in enumerate(HYBRID.cores)),
    )
    assert contradictions(fake) == []
    assert Topology.from_dict(fake.to_dict()) == fake


def test_what_is_not_known_contradicts_nothing() -> None:
    data = HYBRID.to_dict()
    data["packages"][0]["cpus"] = None
    data["nodes"][0]["cpus"] = None
    assert Topology.from_dict(data).cores == HYBRID.cores


def test_all_contradictions_are_found_at_once() -> None:
    other = replace(
        HYBRID, threads_per_core=-5, cores=HYBRID.cores[:1], l3=(*HYBRID.l3, *HYBRID.l3)
    )
    assert [text.partition(" ")[0] for text in contradictions(other)] == [
        "L3", "threads_per_core", "CPUs", "threads_per_core",
    ]  # fmt: skip


def test_a_reading_with_a_node_beyond_any_machine() -> None:
    nodes = (*HYBRID.nodes, NumaNode(id=70000, cpus=CpuSet()))
    assert contradictions(replace(HYBRID, nodes=nodes)) == ["node 70000 is outside 0-65535"]


def test_long_lists_are_cut_in_messages() -> None:
    data = HYBRID.to_dict()
    data["nodes"][0]["cpus"] = ",".join(map(str, range(0, 60000, 2)))
    with pytest.raises(TopologyError) as caught:
        Topology.from_dict(data)
    assert len(caught.value.message) < 200


@pytest.mark.parametrize("text", ["\ud800", "\x1b[2J", "a\0b", "\x9b", "a\nb"])
def test_what_does_something_to_a_terminal_becomes_a_dot(text: str) -> None:
    data = HYBRID.to_dict()
    data["machine"] |= {"arch": text, "vendor": text, "model": text}
    data["origin"] = text
    data["notes"][0] |= {"code": text, "text": text}
    read = Topology.from_dict(data)
    shown = (read.origin, read.machine.arch, read.machine.vendor, read.machine.model,
             read.notes[0].code, read.notes[0].text)  # fmt: skip
    assert all(value is not None and value.isprintable() and "·" in value for value in shown)
    assert read.digest == Topology.from_dict(read.to_dict()).digest
    note = Note(code="c", severity=Severity.INFO, text=text)
    assert note.text.isprintable()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"online": "0-4"', '"online": "0-4", "online": "0-1"'),
        ('"id": 8', '"id": 8, "id": 9'),
        ('"0": 17', '"0": 17, "0": 10'),
    ],
)
def test_a_key_given_twice_is_refused(old: str, new: str) -> None:
    text = json.dumps(HYBRID.to_dict())
    assert read_source(text, source="saved.json") == HYBRID
    with pytest.raises(TopologyError, match=r"given twice in one object: .* and ") as caught:
        read_source(text.replace(old, new, 1), source="saved.json")
    assert caught.value.exit_code == 3
