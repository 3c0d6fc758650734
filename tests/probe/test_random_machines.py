"""Seeded random machines: whatever the layout, the numbering and the kernel's age, the tree reads
back as the machine it was made from."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from machines.build import Description, cpu_list, files_of, lay_out, write

from zenlaunch.cpuset import CpuSet
from zenlaunch.probe.sysfs import read_sysfs

# What hides nothing, by itself or together.
HARMLESS = ("masks", "no-present", "new-names", "nul", "stale-node-lists", "no-levels")


def random_facts(rng: random.Random) -> dict[str, Any]:
    packages, nps = rng.choice([1, 1, 2, 2, 4]), rng.choice([1, 1, 2, 3, 4])
    facts: dict[str, Any] = {
        "packages": packages,
        "nodes_per_package": nps,
        # Either L3 domains inside nodes, or one that spans them.
        "l3_per_package": nps * rng.choice([1, 2]) if rng.random() < 0.8 else 1,
        "cores_per_l3": rng.choice([nps, 2 * nps]),
        "threads": rng.choice([1, 1, 2, 2, 4]),
        "numbering": rng.choice(["linear", "adjacent", "round-robin"]),
        "round_robin": rng.choice(["packages", "nodes"]),
        "core_ids": rng.choice(["package", "node"]),
        "l3_size": f"{rng.randint(1, 400)}MiB",
        "memory": f"{rng.randint(1, 999)}GiB",
        "package_ids": rng.sample(range(rng.choice([packages, 10_000])), packages),
        "node_ids": rng.sample(range(rng.choice([packages * nps, 255])), packages * nps),
        "quirks": rng.sample(HARMLESS, rng.randint(0, 3)),
    }
    online = rng.choice([None, "no-online", "empty-online"])
    facts["quirks"] += [online] if online else []
    if rng.random() < 0.2:
        # cpuinfo alone tells the cores then, and knows packages by number only.
        facts["quirks"].append("no-topology")
        facts["package_ids"] = list(range(packages))
    cpus = [row.cpu for row in lay_out(facts)]
    if rng.random() < 0.4 and len(cpus) > 2:
        facts["offline"] = cpu_list(rng.sample(cpus, rng.randint(1, len(cpus) // 2)))
    return facts


@pytest.mark.parametrize("seed", range(150))
def test_random_machine(seed: int, tree: Path) -> None:
    facts = random_facts(random.Random(seed))
    rows = lay_out(facts)
    write(files_of(Description(name=f"seed {seed}", facts=facts, rows=rows)), tree)
    t = read_sysfs(tree, live=False)
    off = CpuSet.parse(facts.get("offline", ""))
    up = [row for row in rows if row.cpu not in off]

    def groups(key: str) -> dict[int, CpuSet]:
        return {
            value: CpuSet(row.cpu for row in up if getattr(row, key) == value)
            for value in sorted({getattr(row, key) for row in up})
        }

    assert t.online == CpuSet(row.cpu for row in up), facts
    assert t.offline == off, facts
    ids = facts["package_ids"]
    packages = {ids[i]: cpus for i, cpus in groups("package").items()}
    assert {p.id: p.cpus for p in t.packages} == packages, facts
    assert {n.id: n.cpus for n in t.nodes if n.cpus} == groups("node"), facts
    cores = sorted(groups("core").values(), key=lambda s: s.first)
    assert [c.cpus for c in t.cores] == cores, facts
    assert {d.cpus for d in t.l3} == set(groups("l3").values()), facts
    home = {row.cpu: row for row in up}
    for core in t.cores:
        row = home[core.id]
        assert (core.node, core.package) == (row.node, ids[row.package]), facts
        assert core.l3 is not None
        assert core.id in t.l3[core.l3].cpus
    sizes = {len(cpus) for cpus in cores}
    assert t.threads_per_core == (sizes.pop() if len(sizes) == 1 else None), facts
    conflicts = [n.text for n in t.notes if n.code.endswith("-conflict")]
    assert conflicts == [], facts
