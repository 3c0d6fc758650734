"""L3 domains of a sysfs tree: which CPUs share a last-level cache, and how large it is.

Owns the cache folders of the CPUs. Does not know cores or nodes: a domain can cross both. A CPU
whose folder shows no L3 is in no domain; a tree without cache folders knows nothing of them.
Follows Documentation/ABI/testing/sysfs-devices-system-cpu (cache/index*).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from zenlaunch.cpuset import EMPTY, CpuSet
from zenlaunch.probe.conflicts import few
from zenlaunch.probe.tree import Tree
from zenlaunch.topology import L3, Note, Severity

_CPU = "sys/devices/system/cpu"
_SHARED = ("shared_cpu_list", "shared_cpu_map")
_SIZE = re.compile(r"(\d{1,12})([KMG]?)")
_UNIT = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True, slots=True, kw_only=True)
class Caches:
    domains: tuple[L3, ...]
    known: bool


def read_l3(tree: Tree, online: CpuSet, notes: list[Note]) -> Caches:
    """Return the L3 domains in the order of their CPUs; `known` is False without cache folders."""
    sizes: dict[CpuSet, int | None] = {}
    index_of: dict[int, int] = {}
    known = False
    for cpu in online:
        folder = f"{_CPU}/cpu{cpu}/cache/index"
        # A CPU in a domain already seen has its L3 at the same index: one file tells.
        index = index_of.get(cpu)
        shared = None if index is None else tree.cpus(f"{folder}{index}/", *_SHARED)
        if shared is not None and shared & online in sizes:
            continue
        index, any_cache = _l3_index(tree, cpu)
        known = known or any_cache
        if index is None:
            continue
        shared = tree.cpus(f"{folder}{index}/", *_SHARED)
        if shared is None:
            continue
        cpus = shared & online
        if cpus not in sizes:
            sizes[cpus] = _size(tree, f"{folder}{index}/size")
            for other in cpus:
                index_of.setdefault(other, index)
    domains = sorted(sizes, key=lambda s: (s.bits & -s.bits, s.bits))
    seen = EMPTY
    overlap = False
    for cpus in domains:
        overlap = overlap or not cpus.isdisjoint(seen)
        seen |= cpus
    if overlap:
        notes.append(
            Note(
                code="l3-conflict",
                severity=Severity.WARNING,
                text=f"L3 domains overlap: {few([str(d) for d in domains])}; all are shown, "
                "cores in several belong to none",
            )
        )
    return Caches(
        domains=tuple(L3(cpus=cpus, size_bytes=sizes[cpus]) for cpus in domains), known=known
    )


def _l3_index(tree: Tree, cpu: int) -> tuple[int | None, bool]:
    """Return the number of the CPU's L3 in its cache folder, and whether it has any cache."""
    indexes = tree.numbered(f"{_CPU}/cpu{cpu}/cache", "index")
    levels = {i: tree.number(f"{_CPU}/cpu{cpu}/cache/index{i}/level") for i in indexes}
    for i, level in levels.items():
        if level == 3:
            return i, True
    # Cut dumps have no level files; index0 to index2 are L1d, L1i and L2 wherever there is more.
    if 3 in levels and all(level is None for level in levels.values()):
        return 3, True
    return None, bool(indexes)


def _size(tree: Tree, rel: str) -> int | None:
    match = _SIZE.fullmatch(tree.text(rel) or "")
    return int(match[1]) * _UNIT[match[2]] if match else None
