"""Files of one tree that contradict each other: each pair becomes a note with both readings.

Owns the comparisons that cost extra reads or look across rooms: list against mask, cpu/online
against cpuN/online and /proc/cpuinfo, the nodes' memory against /proc/meminfo. Does not change the
reading; the readers have already chosen. Most of this is for dumps: a live kernel writes list and
mask from one bitmap, so they are not compared there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from zenlaunch.cpuset import MAX_ID, CpuSet
from zenlaunch.probe.cpuinfo import CPUINFO
from zenlaunch.probe.tree import Tree
from zenlaunch.topology import Note, Severity, Topology
from zenlaunch.values import in_gib

_CPU = "sys/devices/system/cpu"
_PROCESSOR = re.compile(r"^processor[ \t]*:[ \t]*(\d{1,5})[ \t]*$", re.MULTILINE)
_TOTAL = re.compile(r"^MemTotal:\s+(\d{1,15}) kB", re.MULTILINE)
# The kernel keeps some memory out of the nodes' totals on some architectures.
_NEAR = 0.05


def conflicts(tree: Tree, topology: Topology) -> list[Note]:
    """Return the notes about files of this tree that cannot both be right."""
    notes = [*_spellings(tree, topology.online), *_memory(tree, topology), *_denied(tree)]
    if tree.compare:
        notes += _online(tree, topology.online)
    return notes


def few(items: list[str], most: int = 4) -> str:
    """Join the first few of many findings."""
    more = f"; and {len(items) - most} more" if len(items) > most else ""
    return "; ".join(items[:most]) + more


def _spellings(tree: Tree, online: CpuSet) -> Iterator[Note]:
    found = [
        f"{d.used} says {_show(d.cpus)}, {d.other.rpartition('/')[2]} says {_show(d.others)}"
        for d in tree.differing
        if d.cpus & online != d.others & online
    ]
    if found:
        yield Note(
            code="spelling-conflict",
            severity=Severity.WARNING,
            text=few(found) + "; the first file of each pair is used",
        )


def _online(tree: Tree, online: CpuSet) -> Iterator[Note]:
    folders = tree.numbered(_CPU, "cpu")
    states = {cpu: tree.text(f"{_CPU}/cpu{cpu}/online") for cpu in folders}
    wrong = CpuSet(cpu for cpu, text in states.items() if text == ("0" if cpu in online else "1"))
    if wrong:
        yield Note(
            code="online-conflict",
            severity=Severity.WARNING,
            text=f"CPUs {online} are taken as online, but the files cpuN/online of CPUs {wrong} "
            "say the opposite",
        )
    present = tree.cpulist(f"{_CPU}/present")
    if present and not online <= present:
        yield Note(
            code="present-conflict",
            severity=Severity.WARNING,
            text=f"CPUs {online - present} are online, but {_CPU}/present says {present}",
        )
    shown = CpuSet(int(n) for n in _PROCESSOR.findall(tree.text(CPUINFO) or "") if int(n) <= MAX_ID)
    if shown and shown != online:
        yield Note(
            code="cpuinfo-conflict",
            severity=Severity.WARNING,
            text=f"CPUs {online} are online, but {CPUINFO} shows {shown}",
        )


def _memory(tree: Tree, topology: Topology) -> Iterator[Note]:
    match = _TOTAL.search(tree.text("proc/meminfo", limit=1 << 12) or "")
    sizes = [n.memory_bytes for n in topology.nodes]
    if match is None or not sizes:
        return
    total, known = int(match[1]) * 1024, [s for s in sizes if s is not None]
    if len(known) == len(sizes) and abs(total - sum(known)) > _NEAR * max(total, sum(known)):
        yield Note(
            code="memory-conflict",
            severity=Severity.WARNING,
            text=f"proc/meminfo says {in_gib(total)}, the nodes add up to "
            f"{in_gib(sum(known))}, as under a container's limit or with the balloon "
            "of a VM; the nodes are used",
        )


def _denied(tree: Tree) -> Iterator[Note]:
    if tree.denied:
        yield Note(
            code="permission-denied",
            severity=Severity.WARNING,
            text="not readable for this user: "
            + few([tree.path(rel) for rel in tree.denied])
            + "; read as if they were absent",
        )


def _show(cpus: CpuSet) -> str:
    return str(cpus) or "no CPU"
