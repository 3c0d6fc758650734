"""Every machine of tests/machines is read as its description says, note for note."""

from __future__ import annotations

import json
from typing import Any

import pytest
from machines.build import build, folder, load, names

from zenlaunch.cpuset import CpuSet
from zenlaunch.probe.sysfs import read_sysfs
from zenlaunch.topology import Topology, contradictions


def taken(t: Topology) -> dict[str, Any]:
    """Return what a topology says, under the keys that `expect` uses."""
    return {
        "online": str(t.online),
        "offline": None if t.offline is None else str(t.offline),
        "allowed_cpus": None if t.allowed_cpus is None else str(t.allowed_cpus),
        "allowed_mems": None if t.allowed_mems is None else str(t.allowed_mems),
        "packages": {p.id: str(p.cpus) for p in t.packages},
        "nodes": {n.id: str(n.cpus) for n in t.nodes},
        "node_packages": {n.id: n.package for n in t.nodes},
        "memory_bytes": {n.id: n.memory_bytes for n in t.nodes},
        "distances": {n.id: dict(n.distances) for n in t.nodes},
        "l3": [str(d.cpus) for d in t.l3],
        "l3_known": t.l3_known,
        "l3_with": {c: str(t.l3[core.l3].cpus) for core in t.cores
                    for c in core.cpus if core.l3 is not None},
        "cores": [str(c.cpus) for c in t.cores],
        "core_of": {c: str(core.cpus) for core in t.cores for c in core.cpus},
        "core_nodes": {c: core.node for core in t.cores for c in core.cpus},
        "threads_per_core": t.threads_per_core,
        "isolated": str(t.isolated),
        "nohz_full": str(t.nohz_full),
        "kinds": {
            kind: str(CpuSet(c for core in t.cores for c in core.cpus if core.kind == kind))
            for kind in {core.kind.value for core in t.cores if core.kind}
        },
        "avx512": t.machine.avx512,
        "notes": sorted(n.code for n in t.notes),
    }  # fmt: skip


PARTIAL = {"nodes", "packages", "node_packages", "memory_bytes", "distances", "l3_with", "core_of",
           "core_nodes"}  # fmt: skip
WHOLE_WHEN_EMPTY = {"nodes", "packages"}


def texts(value: Any) -> Any:
    """Turn the numbers of a YAML list or map of CPU lists into texts."""
    if isinstance(value, dict):
        return {key: texts(item) for key, item in value.items()}
    if isinstance(value, list):
        return [texts(item) for item in value]
    return value if value is None else str(value)


@pytest.mark.parametrize("name", names())
def test_machine(name: str) -> None:
    expect = load(name).expect
    with folder() as root:
        topology = read_sysfs(build(name, root), live=False)
    got = taken(topology)
    assert expect.keys() <= got.keys(), "the description expects something unknown"
    assert "notes" in expect, "every description says which notes are right"
    for key, want in expect.items():
        seen = got[key]
        if key in ("cores", "l3") and isinstance(want, int):
            seen = len(seen)
        elif key in PARTIAL and want:
            assert want.keys() <= seen.keys(), key
            seen = {k: seen[k] for k in want}
        assert texts(seen) == texts(want), key
    assert contradictions(topology) == []
    data = json.loads(json.dumps(topology.to_dict()))
    again = Topology.from_dict(data)
    assert again.to_dict() == data
    assert again == topology


def test_each_description_says_what_it_is_for() -> None:
    assert all(load(name).what for name in names())
    assert len({load(name).what for name in names()}) == len(names())
