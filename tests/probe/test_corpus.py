"""Every machine of the corpus is read as its independent reading says, fact by fact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from probe import corpus
from zenlaunch.cpuset import EMPTY, CpuSet
from zenlaunch.errors import TopologyError
from zenlaunch.probe.read import read_source
from zenlaunch.probe.sysfs import read_sysfs
from zenlaunch.topology import Topology, contradictions

pytestmark = [
    pytest.mark.corpus,
    pytest.mark.skipif(not corpus.present(), reason=corpus.ABSENT),
]


def cpus(text: str | None) -> CpuSet | None:
    return None if text is None else CpuSet.parse(text)


def sets(found: dict[str, str | None]) -> dict[int, CpuSet | None]:
    return {int(key): cpus(value) for key, value in found.items()}


def home_of(groups: dict[int, CpuSet | None], core: CpuSet) -> int | None:
    """Return the only group that holds a whole core and shares none of it with another."""
    touching = [key for key, group in groups.items() if group and not group.isdisjoint(core)]
    if len(touching) != 1:
        return None
    return touching[0] if core <= (groups[touching[0]] or EMPTY) else None


@pytest.mark.parametrize("entry", corpus.dumps(), ids=lambda e: e.name)
def test_dump(entry: corpus.Entry, unpacked: Path) -> None:
    root = entry.unpack(unpacked)
    if entry.refused:
        with pytest.raises(TopologyError, match="no CPU information"):
            read_sysfs(root, live=False)
        return
    t, want = read_sysfs(root, live=False), entry.expected
    assert t.online == cpus(want["online"])
    assert t.offline == cpus(want["offline"])
    packages = sets(want["socket_cpus"])
    assert {p.id: p.cpus for p in t.packages} == packages
    nodes = {i: (found or EMPTY) & t.online for i, found in sets(want["node_cpus"]).items()}
    assert {n.id: n.cpus for n in t.nodes} == nodes
    assert [c.cpus for c in t.cores] == [cpus(c) for c in want["core_sets"]]
    l3 = sorted((CpuSet.parse(d).bits, d) for d in want["l3_domains"])
    assert sorted(d.cpus.bits for d in t.l3) == [bits for bits, _ in l3]
    assert {n.id: n.memory_bytes for n in t.nodes} == {
        int(i): None if size is None else size * 1024 for i, size in want["node_mem_kb"].items()
    }
    if want["distances"]:
        assert {n.id: list(n.distances.values()) for n in t.nodes} == {
            int(i): row for i, row in want["distances"].items()
        }
    assert t.allowed_cpus == cpus(want["allowed_cpus"])
    assert t.allowed_mems == cpus(want["allowed_mems"])
    threads = {int(size) for size in want["threads_per_core"]}
    assert t.threads_per_core == (threads.pop() if len(threads) == 1 else None)
    assert t.machine.vendor == want["vendor"]
    if want["model"] is not None:
        assert t.machine.model == want["model"]
    # The maps from a core to its L3, node and package.
    domains = {i: d.cpus for i, d in enumerate(t.l3)}
    for core in t.cores:
        assert core.l3 == home_of(dict(domains), core.cpus), core
        assert core.node == home_of(dict(nodes), core.cpus), core
        assert core.package == home_of(packages, core.cpus), core
    for package, inside in want.get("socket_nodes", {}).items():
        for node in (n for n in t.nodes if n.package == int(package)):
            assert node.id in CpuSet.parse(inside)
    assert contradictions(t) == []
    assert Topology.from_dict(t.to_dict()) == t


@pytest.mark.parametrize(
    ("entry", "path"),
    [(e, path) for e in corpus.dumps() for path in corpus.lscpu_of(e)],
    ids=lambda value: value.name,
)
def test_lscpu_agrees_with_its_dump(entry: corpus.Entry, path: Path, unpacked: Path) -> None:
    text = path.read_text()
    if set(text.splitlines()[-1]) <= set(" -,"):  # lscpu could not read that tree itself
        with pytest.raises(TopologyError, match=r"line \d+"):
            read_source(text, source=path.name)
        return
    seen = read_source(text, source=path.name)
    t = read_sysfs(entry.unpack(unpacked), live=False)
    assert seen.online == t.online
    if seen.offline is not None:
        assert seen.offline == t.offline
    nodes = {n.id: n.cpus for n in t.nodes}
    for node in seen.nodes:
        assert node.cpus == nodes[node.id], node.id
    # lscpu reads the masks, and goes wrong where a list says something else; where it prints a
    # block for each type of core, it counts the sockets of each.
    if any(n.code == "spelling-conflict" for n in t.notes):
        return
    if seen.packages and text.count("Socket(s)") < 2:
        assert len(seen.packages) == len(t.packages)
    if all(p.cpus_known for p in seen.packages) and seen.packages:
        assert {p.cpus for p in seen.packages} == {p.cpus for p in t.packages}
    if seen.cores:
        assert {c.cpus for c in seen.cores} == {c.cpus for c in t.cores}
        of = {c.id: c for c in t.cores}
        for core in seen.cores:
            assert core.node is None or core.node == of[core.id].node
    if seen.threads_per_core is not None:
        assert seen.threads_per_core == t.threads_per_core
    if seen.l3:
        assert {d.cpus for d in seen.l3} <= {d.cpus for d in t.l3}
    if seen.machine.model is not None and t.machine.arch == "x86_64":
        assert seen.machine.model == t.machine.model


@pytest.mark.parametrize("entry", corpus.texts(), ids=lambda e: e.name)
def test_text(entry: corpus.Entry) -> None:
    if entry.refused:
        with pytest.raises(TopologyError, match=r"line \d+: .*\n  \d+: "):
            read_source(entry.text, source=entry.file)
        return
    t, want = read_source(entry.text, source=entry.file), entry.expected
    given: dict[str, Any] = {key: value for key, value in want.items() if value is not None}
    if "online" in given:
        assert t.online == cpus(given["online"])
    if "cpus" in given and "offline" not in given:
        assert len(t.online) == given["cpus"]
    if "offline" in given:
        assert t.offline == cpus(given["offline"])
    if "sockets" in given:
        assert len(t.packages) == given["sockets"]
    if "cores" in given:
        assert len(t.cores) == given["cores"]
    if given.get("threads_per_core"):
        assert t.threads_per_core == given["threads_per_core"]
    nodes = sets(given.get("node_cpus", {}))
    assert {n.id for n in t.nodes} == nodes.keys() or not nodes
    for node in t.nodes:
        listed = nodes.get(node.id, node.cpus)
        assert node.cpus_known == (listed is not None)
        assert node.cpus == (listed or EMPTY) & t.online
    if "node_mem_mb" in given:
        assert {n.id: n.memory_bytes for n in t.nodes} == {
            int(i): None if size is None else size << 20 for i, size in given["node_mem_mb"].items()
        }
    if given.get("distances"):
        assert {n.id: list(n.distances.values()) for n in t.nodes} == {
            int(i): row for i, row in given["distances"].items()
        }
    if "l3_domains" in given:
        assert {d.cpus for d in t.l3} == set(sets(given["l3_domains"]).values())
    if "model" in given:
        assert t.machine.model == given["model"]
    if "arch" in given:
        assert t.machine.arch == given["arch"]
    assert contradictions(t) == []
    assert Topology.from_dict(t.to_dict()) == t


def test_how_many() -> None:
    read = [e for e in corpus.entries() if not e.refused]
    assert len(read) >= 171
    assert sum(e.refused for e in corpus.entries()) >= 4
