"""NUMA nodes of a sysfs tree: their CPUs, memory and distances.

Owns sys/devices/system/node and nothing else. Does not decide which CPUs are online; a node's list
is cut to the online ones by the caller's set, because some kernels leave offline CPUs in it.
Follows Documentation/ABI/stable/sysfs-devices-node and Documentation/admin-guide/mm/numaperf.rst.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from zenlaunch.cpuset import EMPTY, CpuSet
from zenlaunch.probe.tree import Tree
from zenlaunch.topology import Note, NumaNode, Severity

_NODES = "sys/devices/system/node"
_MEMINFO = re.compile(r"^Node\s+\d+\s+([A-Za-z_()]+):\s+(\d{1,15})\s+kB", re.MULTILINE)
# What the kernel can hand out without swapping, reclaimable caches included.
_FREE = ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable")


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """The nodes by ascending id, and what was odd about the files."""

    nodes: tuple[NumaNode, ...]
    notes: tuple[Note, ...]


def read_nodes(tree: Tree, *, online: CpuSet, live: bool) -> Nodes:
    """Read every node directory; `free_bytes` only when `live`."""
    ids = tree.numbered(_NODES, "node")
    notes: list[Note] = []
    listed = tree.cpulist(f"{_NODES}/online")
    if listed and set(listed) != set(ids):
        missing, extra = set(listed) - set(ids), set(ids) - set(listed)
        notes.append(
            Note(
                code="node-list-conflict",
                severity=Severity.WARNING,
                text=f"{_NODES}/online names nodes {listed}, but there are folders for nodes "
                f"{CpuSet(ids)}: "
                + "; ".join(
                    [f"no folder for {CpuSet(missing)}"] * bool(missing)
                    + [f"{CpuSet(extra)} shown all the same"] * bool(extra)
                ),
            )
        )
    cpus = {i: _node_cpus(tree, i, online, notes) for i in ids}
    distances = _distances(tree, ids, notes)
    nodes: list[NumaNode] = []
    for i in ids:
        memory, free = _memory(tree, i)
        nodes.append(
            NumaNode(
                id=i,
                cpus=cpus[i],
                memory_bytes=memory,
                free_bytes=free if live else None,
                distances=distances[i],
            )
        )
    return Nodes(nodes=tuple(nodes), notes=tuple(notes))


def own_nodes(tree: Tree, nodes: tuple[NumaNode, ...], cpus: CpuSet) -> dict[int, int]:
    """Return cpu -> node for CPUs that several nodes list, where the kernel's link tells.

    With numa=fake the nodes of one socket list the same CPUs; each CPU's folder has a link to the
    one node that its memory comes from.
    """
    listing = {n.id: n.cpus for n in nodes}
    found: dict[int, int] = {}
    for cpu in cpus:
        links = tree.numbered(f"sys/devices/system/cpu/cpu{cpu}", "node")
        if len(links) == 1 and cpu in listing.get(links[0], EMPTY):
            found[cpu] = links[0]
    return found


def _node_cpus(tree: Tree, node: int, online: CpuSet, notes: list[Note]) -> CpuSet:
    folder = f"{_NODES}/node{node}"
    listed, masked = tree.cpulist(f"{folder}/cpulist"), tree.cpumask(f"{folder}/cpumap")
    if listed is None and masked is None:
        linked = CpuSet(
            cpu for cpu in online if f"node{node}" in tree.names(f"sys/devices/system/cpu/cpu{cpu}")
        ) | CpuSet(cpu for cpu in tree.numbered(folder, "cpu") if cpu in online)
        if not linked:
            notes.append(
                Note(
                    code="node-cpus-unknown",
                    severity=Severity.WARNING,
                    text=f"node {node}: neither {folder}/cpulist nor cpumap is there, so its CPUs "
                    "are not known; it is shown without any",
                )
            )
        return linked
    if listed is not None and masked is not None and listed & online != masked & online:
        notes.append(
            Note(
                code="node-cpus-conflict",
                severity=Severity.WARNING,
                text=f"node {node}: {folder}/cpulist says {_show(listed)}, cpumap says "
                f"{_show(masked)}; the list is used",
            )
        )
    found = listed if listed is not None else masked
    named = (found or EMPTY) - online
    if named:
        notes.append(
            Note(
                code="node-names-offline-cpus",
                severity=Severity.INFO,
                text=f"node {node}: its list names CPUs that are not online: {named}"
                + (f" (its cpumap says {_show(masked)})" if masked and masked != found else ""),
            )
        )
    return (found or EMPTY) & online


def _memory(tree: Tree, node: int) -> tuple[int | None, int | None]:
    values = {
        match[1]: int(match[2]) * 1024
        for match in _MEMINFO.finditer(tree.text(f"{_NODES}/node{node}/meminfo") or "")
    }
    free = sum(values.get(key, 0) for key in _FREE) if "MemFree" in values else None
    return values.get("MemTotal"), free


def _distances(tree: Tree, ids: list[int], notes: list[Note]) -> dict[int, dict[int, int]]:
    """Return node -> node -> distance; a row has one number for each online node, in order."""
    possible = tree.cpulist(f"{_NODES}/possible") or EMPTY
    found: dict[int, dict[int, int]] = {}
    for i in ids:
        rel = f"{_NODES}/node{i}/distance"
        text = tree.text(rel) or ""
        words = text.split()
        if not all(w.isascii() and w.isdigit() and len(w) < 6 for w in words):
            raise tree.damaged(rel, text, "is not a row of distances")
        row = [int(w) for w in words]
        if not row or len(row) == len(ids):
            found[i] = dict(zip(ids, row, strict=False))
            continue
        # A node that was taken offline can leave its column behind.
        fits = len(row) == len(possible)
        found[i] = dict(zip(possible, row, strict=True)) if fits else {}
        notes.append(
            Note(
                code="distance-conflict",
                severity=Severity.WARNING,
                text=f"node {i}: {rel} has {len(row)} numbers ({text}) for {len(ids)} nodes; "
                + (f"read as distances to nodes {possible}" if fits else "not used"),
            )
        )
    return found


def _show(cpus: CpuSet) -> str:
    return str(cpus) or "no CPU"
