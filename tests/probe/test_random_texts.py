"""Seeded random machines printed as lscpu -p, lscpu -e and numactl -H do: the readers agree."""

from __future__ import annotations

import random
from typing import Any

import pytest
from machines.build import Row, lay_out

from probe.test_random_machines import random_facts
from zenlaunch.cpuset import CpuSet
from zenlaunch.probe.read import read_source
from zenlaunch.topology import Topology


def machine(seed: int) -> tuple[random.Random, dict[str, Any], list[Row], CpuSet]:
    rng = random.Random(seed)
    facts = random_facts(rng)
    return rng, facts, lay_out(facts), CpuSet.parse(facts.get("offline", ""))


def groups(rows: list[Row], key: str) -> list[CpuSet]:
    values = sorted({getattr(row, key) for row in rows})
    return [CpuSet(row.cpu for row in rows if getattr(row, key) == value) for value in values]


def check(t: Topology, up: list[Row]) -> None:
    assert t.online == CpuSet(row.cpu for row in up)
    by_first = {cpus.first: cpus for cpus in groups(up, "core")}
    assert {c.id: c.cpus for c in t.cores} == by_first
    assert {d.cpus for d in t.l3} == set(groups(up, "l3"))
    assert {p.cpus for p in t.packages} == set(groups(up, "package"))
    assert [n.cpus for n in t.nodes] == groups(up, "node")


@pytest.mark.parametrize("seed", range(100))
def test_parsable(seed: int) -> None:
    _, _, rows, off = machine(seed)
    up = [row for row in rows if row.cpu not in off]
    lines = ["# CPU,Core,Socket,Node,,L1d,L1i,L2,L3"]
    lines += [f"{r.cpu},{r.core},{r.package},{r.node},,{r.core},{r.core},{r.core},{r.l3}"
              for r in up]  # fmt: skip
    t = read_source("\n".join(lines), source="p")
    check(t, up)
    assert t.offline is None


@pytest.mark.parametrize("seed", range(100))
def test_extended(seed: int) -> None:
    rng, _, rows, off = machine(seed)
    physical = rng.random() < 0.5  # lscpu -y prints the kernel's core ids, which repeat
    lines = ["CPU NODE SOCKET CORE L1d:L1i:L2:L3 ONLINE"]
    for r in rows:
        caches = f"{r.core}:{r.core}:{r.core}:{r.l3}"
        cells = [r.node, r.package, r.core_id if physical else r.core, caches, "yes"]
        cells = ["-", "-", "-", "-", "no"] if r.cpu in off else cells
        lines.append(" ".join(map(str, [r.cpu, *cells])))
    t = read_source("\n".join(lines), source="e")
    check(t, [row for row in rows if row.cpu not in off])
    assert t.offline == (off or None)


@pytest.mark.parametrize("seed", range(100))
def test_numactl(seed: int) -> None:
    rng, _, rows, _ = machine(seed)
    nodes = sorted({row.node for row in rows})
    sizes = {node: rng.choice([0, rng.randint(1, 10**6)]) for node in nodes}
    table = {a: {b: 10 if a == b else rng.randint(11, 254) for b in nodes} for a in nodes}
    width = rng.choice([20, 80, 10_000])
    lines = [f"available: {len(nodes)} nodes ({CpuSet(nodes)})"]
    for node, cpus in zip(nodes, groups(rows, "node"), strict=True):
        lines.append(f"node {node} cpus:")
        for cpu in cpus:  # wrapped as a mail program does
            if len(lines[-1]) > width:
                lines.append("")
            lines[-1] += f" {cpu}"
        lines += [f"node {node} size: {sizes[node]} MB", f"node {node} free: 0 MB"]
    lines += ["node distances:", "node " + " ".join(f"{n:3}" for n in nodes)]
    lines += [f"{a:3}: " + " ".join(f"{d:3}" for d in row.values()) for a, row in table.items()]
    t = read_source("\n".join(lines) + "\n", source="n")
    assert [n.cpus for n in t.nodes] == groups(rows, "node")
    assert {n.id: n.memory_bytes for n in t.nodes} == {n: s << 20 for n, s in sizes.items()}
    assert {n.id: dict(n.distances) for n in t.nodes} == table
