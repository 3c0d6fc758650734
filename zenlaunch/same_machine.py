"""Is this the machine that a plan was made for? Two topologies compared, in words.

Owns what counts: architecture, CPU model, nodes and packages with their CPUs, cores. What changes
by itself does not: free memory, the kernel's own share of a node, what this process is allowed. A
CPU that is offline now counts only for those who were to run on it.
"""

from __future__ import annotations

from collections.abc import Iterator

from zenlaunch.cpuset import EMPTY, CpuSet
from zenlaunch.topology import Topology

# A kernel update moves a node's total by some MiB; a missing memory module by more than this.
LOST_MEMORY = 0.9


def differences(planned: Topology, here: Topology, *, cpus: CpuSet) -> tuple[str, ...]:
    """Return every difference that matters to an instance on `cpus`; () for the same machine."""
    return tuple(_differences(planned, here, cpus))


def _differences(planned: Topology, here: Topology, cpus: CpuSet) -> Iterator[str]:
    for what in ("arch", "vendor", "model"):
        before, now = getattr(planned.machine, what), getattr(here.machine, what)
        if before is not None and now is not None and before != now:
            yield f"{what}: planned for {before}, this is {now}"
    offline = (here.offline or EMPTY) & planned.online
    missing = cpus - here.online
    if missing:
        yield f"CPU {missing} is {'offline' if missing <= offline else 'not there'}"
    if planned.online - offline != here.online:
        yield f"CPUs: planned with {planned.online}, this machine has {here.online}"
    yield from _nodes(planned, here, offline)
    for kind in ("packages", "l3", "cores"):
        before = {c for item in getattr(planned, kind) if (c := item.cpus - offline)}
        now = {item.cpus for item in getattr(here, kind)}
        if before != now:
            odd = sorted(str(c) for c in before ^ now)
            yield f"{kind} differ: {'; '.join(odd[:4])}{'; ...' if len(odd) > 4 else ''}"


def _nodes(planned: Topology, here: Topology, offline: CpuSet) -> Iterator[str]:
    now = {node.id: node for node in here.nodes}
    for node in planned.nodes:
        same = now.pop(node.id, None)
        if same is None:
            yield f"node {node.id} is not there"
            continue
        if node.cpus - offline != same.cpus:
            yield f"node {node.id}: planned with CPUs {node.cpus}, this one has {same.cpus}"
        before, left = node.memory_bytes, same.memory_bytes
        if before and left is not None and left < before * LOST_MEMORY:
            yield (
                f"node {node.id}: planned with {before >> 20} MiB of memory, "
                f"this one has {left >> 20}"
            )
    for node_id in now:
        yield f"node {node_id} is new"
