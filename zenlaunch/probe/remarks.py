"""Notes about a Topology, whatever source it came from: what a planner or a person should know.

Owns the notes that follow from the finished value alone, each with a stable code. Does not read
files; contradictions inside a source are noted by the reader that saw them.
"""

from __future__ import annotations

from collections.abc import Iterator

from zenlaunch.cpuset import CpuSet, union
from zenlaunch.topology import CoreKind, Note, Severity, Topology
from zenlaunch.values import in_gib


def remarks(topology: Topology, *, virtual: bool) -> tuple[Note, ...]:
    """Return the notes of a topology, in the order of its JSON.

    `virtual` says that the source shows a hypervisor.
    """
    notes = [
        Note(code=code, severity=severity, text=text)
        for part in (_cpus, _cores, _nodes, _distances, _l3)
        for code, severity, text in part(topology)
    ]
    if virtual and sum(1 for node in topology.nodes if node.cpus) <= 1:
        text = "this is a virtual machine: the host may have NUMA nodes that it does not show"
        notes.append(Note(code="virtual-machine", severity=Severity.INFO, text=text))
    return tuple(notes)


_Remarks = Iterator[tuple[str, Severity, str]]


def _cpus(t: Topology) -> _Remarks:
    if t.offline:
        yield "offline-cpus", Severity.INFO, f"CPUs {t.offline} are offline"
    if t.allowed_cpus is not None:
        if not t.allowed_cpus <= t.online:
            gone = t.allowed_cpus - t.online
            yield (
                "allowed-names-offline-cpus",
                Severity.WARNING,
                f"the allowed CPUs {t.allowed_cpus} name CPUs that are not online: {gone}",
            )
        if not t.online <= t.allowed_cpus:
            yield (
                "cpus-not-allowed",
                Severity.INFO,
                f"this process may use CPUs {_show(t.usable_cpus)} only, of {_show(t.online)}",
            )
    if t.isolated:
        yield (
            "isolated-cpus",
            Severity.INFO,
            f"CPUs {t.isolated} are isolated (isolcpus): the scheduler does not balance them",
        )
    if t.nohz_full:
        yield (
            "nohz-full-cpus",
            Severity.INFO,
            f"CPUs {t.nohz_full} run without the tick (nohz_full)",
        )


def _cores(t: Topology) -> _Remarks:
    if t.cores and t.threads_per_core is None:
        counts: dict[int, int] = {}
        for core in t.cores:
            counts[len(core.cpus)] = counts.get(len(core.cpus), 0) + 1
        shown = ", ".join(f"{n} with {size}" for size, n in sorted(counts.items()))
        yield (
            "threads-not-uniform",
            Severity.INFO,
            f"the cores have different numbers of online CPUs: {shown}",
        )
    slow = union(c.cpus for c in t.cores if c.kind is CoreKind.EFFICIENCY)
    if slow:
        yield "hybrid", Severity.INFO, f"the cores are of two kinds: efficiency cores are {slow}"


def _nodes(t: Topology) -> _Remarks:
    if not t.nodes:
        if t.origin in ("live", "sysroot"):
            yield (
                "no-numa",
                Severity.WARNING,
                "the kernel shows no NUMA node, so memory cannot be bound",
            )
        return
    dark: list[int] = []
    spans: list[str] = []
    for node in t.nodes:
        if not node.cpus and node.cpus_known:
            yield (
                "memory-only-node" if node.memory_bytes != 0 else "empty-node",
                Severity.INFO,
                f"node {node.id} has no online CPU, {_memory(node.memory_bytes)}",
            )
        elif node.memory_bytes == 0:
            yield (
                "memoryless-node",
                Severity.WARNING,
                f"node {node.id} has {f'CPUs {node.cpus} and ' if node.cpus else ''}no memory",
            )
        if node.memory_bytes is None and node.cpus:
            dark.append(node.id)
        inside = [p.id for p in t.packages if not p.cpus.isdisjoint(node.cpus)]
        if len(inside) > 1:
            spans.append(f"node {node.id} spans packages {_ids(inside)}")
    if dark and t.origin in ("live", "sysroot"):
        yield (
            "memory-unknown",
            Severity.INFO,
            f"the source does not show the memory of nodes {CpuSet(dark)}",
        )
    if spans:
        more = f"; so do {len(spans) - 2} more nodes" if len(spans) > 2 else ""
        yield "node-spans-packages", Severity.INFO, "; ".join(spans[:2]) + more
    yield from _membership(t)
    sizes = {n.id: n.memory_bytes for n in t.nodes if n.cpus and n.memory_bytes}
    if sizes and max(sizes.values()) > 1.25 * min(sizes.values()):
        shown = ", ".join(f"node {i} {in_gib(size)}" for i, size in sizes.items())
        yield "uneven-memory", Severity.WARNING, f"the nodes differ in memory: {shown}"


def _membership(t: Topology) -> _Remarks:
    seen = several = CpuSet()
    for node in t.nodes:
        several |= seen & node.cpus
        seen |= node.cpus
    if several:
        lost = union(c.cpus for c in t.cores if c.node is None) & several
        lost = lost if t.cores else several
        own = f"the own node of {lost} is not known" if lost else "the link of each names its own"
        yield (
            "cpus-in-several-nodes",
            Severity.WARNING,
            f"CPUs {several} are listed in several nodes; {own}",
        )
    if t.online - seen and all(n.cpus_known for n in t.nodes):
        yield (
            "cpus-in-no-node",
            Severity.WARNING,
            f"online CPUs {t.online - seen} are in no node",
        )
    if t.allowed_mems is not None:
        remote = union(n.cpus & t.usable_cpus for n in t.nodes if n.id not in t.allowed_mems)
        if remote:
            yield (
                "allowed-mems-remote",
                Severity.WARNING,
                f"allowed CPUs {remote} lie on nodes whose memory is not allowed "
                f"(allowed: {_show(t.allowed_mems)})",
            )


def _distances(t: Topology) -> _Remarks:
    table = {(n.id, to): d for n in t.nodes for to, d in n.distances.items()}
    odd = [i for (i, to), d in table.items() if i == to and d != 10]
    if odd:
        yield (
            "self-distance",
            Severity.INFO,
            f"the distance of a node to itself is not 10 but {table[odd[0], odd[0]]} "
            f"(nodes {_ids(odd)})",
        )
    skew = [(i, to) for (i, to), d in table.items() if i < to and table.get((to, i), d) != d]
    if skew:
        i, to = skew[0]
        yield (
            "distances-asymmetric",
            Severity.INFO,
            f"distances differ by direction: {i} to {to} is {table[i, to]}, back {table[to, i]}",
        )


def _l3(t: Topology) -> _Remarks:
    if not t.l3_known and t.origin in ("live", "sysroot"):
        yield (
            "caches-unknown",
            Severity.INFO,
            "no cache folders: it is not known which CPUs share an L3",
        )
    if not t.l3:
        return
    spanning = [d for d in t.l3 if sum(1 for n in t.nodes if not n.cpus.isdisjoint(d.cpus)) > 1]
    if spanning:
        yield (
            "l3-spans-nodes",
            Severity.INFO,
            f"an L3 domain spans several nodes: {len(spanning)} of {len(t.l3)}, "
            f"for example {spanning[0].cpus}",
        )
    if any(not d.cpus for d in t.l3):
        yield (
            "l3-cpus-unknown",
            Severity.WARNING,
            "an L3 is there, but its map names no CPU",
        )
    without = t.online - union(d.cpus for d in t.l3)
    if without:
        yield "cpus-without-l3", Severity.INFO, f"CPUs {without} share no L3"


def _memory(memory_bytes: int | None) -> str:
    if memory_bytes is None:
        return "its memory is not shown"
    return in_gib(memory_bytes) if memory_bytes else "and no memory"


def _ids(ids: list[int]) -> str:
    return ", ".join(map(str, sorted(ids)))


def _show(s: CpuSet) -> str:
    return str(s) or "none"
