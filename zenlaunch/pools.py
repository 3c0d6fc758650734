"""Pools: which cores may be used, grouped by NUMA node, each in the order in which it is dealt.

Owns the first steps of the planner: online and allowed CPUs, those that are set aside, whole cores,
nodes. Pure. How many instances the pools make is `split`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zenlaunch.config import SplitConfig
from zenlaunch.cpuset import CpuSet, union
from zenlaunch.errors import PlanError
from zenlaunch.topology import Core, CoreKind, Note, NumaNode, Severity, Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One numbered step of the algorithm, with the sets it left behind."""

    text: str
    sets: tuple[tuple[str, CpuSet], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """The cores of one node that may be used, in dealing order (L3 by L3).

    `node` is None on a machine that shows no NUMA nodes. `cpus` maps a core's id to the CPUs of it
    that the plan uses: one per wanted thread.
    """

    node: NumaNode | None
    cores: tuple[Core, ...]
    cpus: Mapping[int, CpuSet]

    @property
    def name(self) -> str:
        return "the machine" if self.node is None else f"node {self.node.id}"

    def of(self, cores: Sequence[Core]) -> CpuSet:
        """Return the CPUs that the plan uses of these cores."""
        return union(self.cpus[core.id] for core in cores)

    @property
    def all_cpus(self) -> CpuSet:
        return self.of(self.cores)


def note(code: str, text: str, severity: Severity = Severity.INFO) -> Note:
    return Note(code=code, severity=severity, text=text)


def usable_pools(
    topology: Topology, split: SplitConfig
) -> tuple[tuple[Pool, ...], list[Note], list[Step]]:
    """Return the pools with at least one core, by node id, and what was left out and why."""
    notes: list[Note] = []
    cores = _known_cores(topology, split, notes)
    usable = topology.usable_cpus
    steps = [Step(text="take the CPUs that are online and allowed", sets=(("cpus", usable),))]
    if split.cpus is not None:
        asked = CpuSet.parse(split.cpus)
        if missing := asked - usable:
            raise PlanError(
                f"--cpus names {missing}: not online, or not allowed to this process "
                f"(usable: {usable})",
                hint="leave them out, or start zenlaunch outside the cpuset that forbids them",
            )
        usable = asked
        steps.append(Step(text="keep those of --cpus", sets=(("cpus", usable),)))
    else:
        usable = _set_aside(topology, cores, usable, notes)
        steps.append(Step(text="leave isolated and slow CPUs out", sets=(("cpus", usable),)))
    wanted = split.threads_per_core
    used: dict[int, CpuSet] = {}
    for core in cores:
        here = list(core.cpus & usable)
        if len(here) >= wanted:
            used[core.id] = CpuSet(here[:wanted])
    if wanted > 1 and not used:
        raise PlanError(
            "--threads-per-core 2 needs SMT, and no core here has two usable CPUs",
            hint="plan with --threads-per-core 1",
        )
    left = usable - union(used.values()) if split.cpus is not None or wanted > 1 else CpuSet()
    if left:
        why = "their core's other CPU is used" if wanted == 1 else "their core has no second CPU"
        notes.append(note("cpus-left-out", f"CPUs {left} are left out: {why}."))
    pools = _group(topology, split, cores, used, notes)
    steps.append(
        Step(
            text=f"group whole cores by NUMA node, {wanted} CPU(s) of each core",
            sets=tuple((pool.name, pool.all_cpus) for pool in pools),
        )
    )
    return pools, notes, steps


def _known_cores(topology: Topology, split: SplitConfig, notes: list[Note]) -> tuple[Core, ...]:
    """Return the cores; where a source shows none, those that can be told from the numbering.

    With `--cpus` the user vouches that each CPU named is a core of its own.
    """
    if topology.cores:
        return topology.cores
    node_of = {cpu: node.id for node in topology.nodes for cpu in node.cpus}
    package_of = {cpu: package.id for package in topology.packages for cpu in package.cpus}
    gap = 0 if split.cpus is not None else _sibling_gap(topology)
    if split.cpus is None and not gap:
        raise PlanError(
            f"this source ({topology.origin}) does not show which CPUs are SMT siblings of one "
            "core, so two instances could land on the same core",
            hint="give `zenlaunch probe --json` or `lscpu -e` of that machine, or name one CPU of "
            "each core with --cpus",
        )
    if gap:
        notes.append(
            note(
                "siblings-by-numbering",
                f"this source ({topology.origin}) does not show SMT siblings; CPU n and n+{gap} "
                "are taken for one core, as Linux numbers them on x86.",
                Severity.WARNING,
            )
        )
    first = CpuSet(c for c in topology.online if c < gap) if gap else topology.online
    return tuple(
        Core(
            id=cpu,
            cpus=CpuSet([cpu, cpu + gap]),
            node=node_of.get(cpu),
            package=package_of.get(cpu),
        )
        for cpu in first
    )


def _sibling_gap(topology: Topology) -> int:
    """Return N where every node is a range and the same range N higher; else 0.

    So Linux numbers x86 machines with SMT: all first siblings, then all second ones. A single node
    that is one range says nothing: its siblings may be neighbours (virtual machines, POWER).
    """
    nodes = [node for node in topology.nodes if node.cpus]
    total = len(topology.online)
    if len(nodes) < 2 or total % 2 or topology.online != CpuSet(range(total)):
        return 0
    gap = total // 2
    lower = CpuSet(range(gap))
    for node in nodes:
        first = node.cpus & lower
        if not first or first != CpuSet(range(first.first, first.last + 1)):
            return 0
        if node.cpus != first | CpuSet(c + gap for c in first):
            return 0
    return gap


def _set_aside(
    topology: Topology, cores: Sequence[Core], usable: CpuSet, notes: list[Note]
) -> CpuSet:
    isolated = topology.isolated & usable
    if isolated and isolated != usable:
        usable = usable - isolated
        notes.append(
            note(
                "isolated-cpus",
                f"CPUs {isolated} are isolated from the scheduler (isolcpus) and left out; --cpus "
                "uses them.",
            )
        )
    slow = union(c.cpus for c in cores if c.kind is CoreKind.EFFICIENCY) & usable
    if slow and slow != usable:
        usable = usable - slow
        notes.append(
            note("efficiency-cores", f"efficiency cores {slow} are left out; --cpus uses them.")
        )
    return usable


def _group(
    topology: Topology,
    split: SplitConfig,
    cores: Sequence[Core],
    used: Mapping[int, CpuSet],
    notes: list[Note],
) -> tuple[Pool, ...]:
    nodes: list[NumaNode | None] = [n for n in topology.nodes if n.cpus]
    known = CpuSet(n.id for n in nodes if n is not None)
    if split.nodes is not None:
        asked = CpuSet.parse(split.nodes)
        if missing := asked - known:
            raise PlanError(
                f"--nodes names {missing}; the nodes with CPUs are {known or 'none'}",
                hint=f"--nodes {known}" if known else "this machine shows no NUMA nodes",
            )
        nodes = [n for n in nodes if n is not None and n.id in asked]
    if not topology.nodes:
        nodes = [None]
    # An L3 counts by the lowest of its cores, so that the walk follows the kernel's numbering.
    l3_first: dict[int, int] = {}
    for core in cores:
        if core.l3 is not None:
            l3_first[core.l3] = min(core.id, l3_first.get(core.l3, core.id))

    def dealing_order(core: Core) -> tuple[int, int]:
        return (l3_first[core.l3] if core.l3 is not None else -1, core.id)

    pools = []
    for node in nodes:
        own = [c for c in cores if c.id in used and (node is None or c.node == node.id)]
        if own:
            ordered = tuple(sorted(own, key=dealing_order))
            pools.append(Pool(node=node, cores=ordered, cpus={c.id: used[c.id] for c in ordered}))
    homeless = union(used[c.id] for c in cores if c.id in used and c.node is None)
    if topology.nodes and homeless:
        notes.append(
            note(
                "cpus-in-no-node",
                f"CPUs {homeless} are in no NUMA node, so that their memory cannot be bound: left "
                "out.",
                Severity.WARNING,
            )
        )
    if not pools and homeless and topology.nodes:
        raise PlanError(
            f"CPUs {homeless} belong to no NUMA node or to several at once, so that their memory "
            "cannot be bound",
            hint="boot without numa=fake, or report this machine: zenlaunch probe --save DIR",
        )
    if not pools:
        raise PlanError(
            f"no usable cores are left (online {topology.online}, allowed {topology.allowed_cpus})",
            hint="loosen --cpus or --nodes, or start zenlaunch outside the cpuset that limits it",
        )
    return tuple(pools)
