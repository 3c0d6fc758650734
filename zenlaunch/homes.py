"""Homes: which node's memory an instance uses, and what can be said and done about it.

Owns the choice (the own node, or else the nearest that has memory), the notes on it, and the remedy
when a node cannot hold those that use it. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zenlaunch.config import Config
from zenlaunch.errors import PlanError
from zenlaunch.memory import Remedy, gib
from zenlaunch.pools import Pool, note
from zenlaunch.topology import Core, Note, NumaNode, Severity, Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One instance: its cores, one of `count` shares of the pool, and the node of its memory."""

    pool: Pool
    home: NumaNode | None
    cores: tuple[Core, ...]
    count: int


def memory_home(topology: Topology, pool: Pool) -> NumaNode | None:
    """Return the node whose memory a pool's instances use: its own, or else the nearest usable."""
    node = pool.node
    if node is None:
        return None

    def usable(n: NumaNode) -> bool:
        allowed = topology.allowed_mems is None or n.id in topology.allowed_mems
        return allowed and n.memory_bytes != 0

    if usable(node):
        return node
    # Nodes without CPUs (CXL, HBM, GPU memory) are never taken by themselves.
    candidates = [n for n in topology.nodes if usable(n) and n.cpus]
    if not candidates:
        raise PlanError(
            f"node {node.id} has no memory that may be used, and neither has any other node with "
            f"CPUs (allowed memory nodes: {topology.allowed_mems})",
            hint="check cpuset.mems of the container or service that zenlaunch runs in",
        )
    return min(candidates, key=lambda n: (node.distances.get(n.id, 255), n.id))


def memory_only_notes(topology: Topology) -> list[Note]:
    """Name memory without CPUs, which no instance is bound to."""
    idle = [n for n in topology.nodes if not n.cpus and n.memory_bytes != 0]
    if not idle:
        return []
    sizes = ", ".join(
        f"node {n.id} ({'size unknown' if n.memory_bytes is None else gib(n.memory_bytes)})"
        for n in idle
    )
    return [
        note(
            "memory-only-nodes",
            f"{sizes}: memory without CPUs (CXL, HBM or a device's); no instance is bound to it.",
        )
    ]


def home_notes(dealt: Sequence[Share]) -> list[Note]:
    """Name the nodes whose instances use the memory of another."""
    notes = []
    for share in dealt:
        node, home = share.pool.node, share.home
        if node is None or home is None or home.id == node.id:
            continue
        why = "has no memory" if node.memory_bytes == 0 else "has memory that is not allowed here"
        distance = node.distances.get(home.id)
        text = f"node {node.id} {why}: its instances use node {home.id}, " + (
            f"the nearest at distance {distance}." if distance else "distance unknown."
        )
        notes.append(note("remote-memory", text, Severity.WARNING))
    return list(dict.fromkeys(notes))


def find_remedy(topology: Topology, config: Config, dealt: Sequence[Share], home: int) -> Remedy:
    """Return what could be typed when node `home` cannot hold the instances that use it."""
    users = {id(s.pool) for s in dealt if s.home is not None and s.home.id == home}
    pools = len({id(s.pool) for s in dealt})

    def fewer(k: int) -> str | None:
        if len(users) > 1:  # instances of other nodes use this memory too: no option counts them
            return "--nodes, to leave out some of those that use its memory"
        if config.split.recipe is not None:
            return f"--instances-per-node {k}, without the recipe"
        if config.split.instances is not None:
            return f"--instances {k * pools}"
        return f"--instances-per-node {k}"

    larger = None
    if len([n for n in topology.nodes if n.cpus]) > len(topology.packages) >= 1:
        amd = topology.machine.vendor == "AuthenticAMD"
        larger = "fewer NUMA nodes per socket" + (" (BIOS: NPS1)" if amd else " (BIOS)")
    return Remedy(fewer=fewer, larger_node=larger)
