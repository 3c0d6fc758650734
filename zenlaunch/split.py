"""Split: how many instances the pools make, how large they are, and which core goes to which.

Owns the count per pool, the one size of all, the reserve, and the dealing. Pure. Names, ports,
memory and the proxy's place are `plan`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zenlaunch.config import Layout, Recipe, SplitConfig
from zenlaunch.errors import PlanError
from zenlaunch.pools import Pool, note
from zenlaunch.topology import Core, Note, Severity, Topology

# AMD's published instance is 64 cores; a node of 95 or fewer stays whole.
CORES_PER_INSTANCE = 64
# On nodes that make smaller instances than this, the plan says what would make larger ones.
SMALL_INSTANCE = 16
# Below this an instance is better off with the core than the proxy is.
MIN_CORES_BESIDE_PROXY = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """How many instances each pool gets, of how many cores, and what is kept back.

    `reserve` cores of each instance run no engine threads; the last `proxy_cores` of the first pool
    belong to the proxy alone.
    """

    counts: tuple[int, ...]
    size: int
    reserve: int
    proxy_cores: int


def apply_recipe(topology: Topology, split: SplitConfig) -> SplitConfig:
    """Turn a recipe's name into the options it stands for.

    Raises PlanError on a machine that the recipe was not published for.
    """
    if split.recipe is not Recipe.AMD_ZENDNN_5_2:
        return split
    packages = [node.package for node in topology.nodes if node.cpus]
    if len(packages) != len(set(packages)) or len(packages) < len(topology.packages):
        raise PlanError(
            f"the recipe {split.recipe.value} is two interleaved instances per socket and needs "
            f"one NUMA node per socket (NPS1); this machine has {len(packages)} nodes with CPUs on "
            f"{len(topology.packages)} sockets",
            hint="set NPS1 in the BIOS, or plan without a recipe: --instances-per-node 1",
        )
    return replace(split, instances_per_node=2, reserve_per_instance=0, reserve_proxy=0)


def decide_split(
    topology: Topology, split: SplitConfig, pools: Sequence[Pool]
) -> tuple[Split, list[Note]]:
    """Choose a count per pool and one size for all (README, "How the split is chosen").

    Raises PlanError when what was asked for does not fit.
    """
    notes: list[Note] = []
    siblings = idle_siblings(topology, split, pools[0])
    asked = split.reserve_proxy
    proxy_cores = 0 if asked is None or asked <= siblings else asked
    if proxy_cores >= len(pools[0].cores):
        raise PlanError(
            f"--reserve-proxy {proxy_cores} leaves no core for instances on {pools[0].name}: "
            f"it has {len(pools[0].cores)} usable",
            hint="reserve fewer, or 0: the proxy is then not pinned",
        )
    fit = _fit(split, pools, proxy_cores)
    if fit is None:
        raise _does_not_fit(split, pools, proxy_cores)
    if asked is None and not siblings:
        # A core of its own for the proxy, unless that costs an instance or starves one.
        with_core = _fit(split, pools, 1)
        if with_core and with_core[0] == fit[0] and with_core[1] >= MIN_CORES_BESIDE_PROXY:
            fit, proxy_cores = with_core, 1
    counts, size = fit
    for k, (pool, count) in enumerate(zip(pools, counts, strict=True)):
        if count == 0 and split.instances is None:
            kept = f", {proxy_cores} of them for the proxy" if k == 0 and proxy_cores else ""
            notes.append(
                note(
                    "node-left-out",
                    f"{pool.name} has {len(pool.cores)} usable cores{kept}: too few for an "
                    f"instance as large as the others ({size} cores); --nodes plans it by itself.",
                    Severity.WARNING,
                )
            )
    notes += _small_nodes(topology, split, pools)
    reserve = _reserve(split, size, notes)
    return Split(counts=counts, size=size, reserve=reserve, proxy_cores=proxy_cores), notes


def _small_nodes(topology: Topology, split: SplitConfig, pools: Sequence[Pool]) -> list[Note]:
    """Say what would make larger instances, where the nodes are what makes them small."""
    largest = max(len(pool.cores) for pool in pools)
    chosen = (split.instances, split.instances_per_node, split.cores_per_instance, split.cpus)
    many = len(pools) > len(topology.packages) >= 1
    if largest >= SMALL_INSTANCE or not many or any(wish is not None for wish in chosen):
        return []
    amd = topology.machine.vendor == "AuthenticAMD"
    how = "BIOS: NPS1, and L3 as NUMA off" if amd else "a setting of the BIOS"
    return [
        note(
            "small-nodes",
            f"{len(pools)} NUMA nodes on {len(topology.packages)} socket(s) leave at most "
            f"{largest} cores for an instance; fewer nodes per socket ({how}) would make "
            "larger ones.",
            Severity.WARNING,
        )
    ]


def deal(cores: Sequence[Core], count: int, size: int, layout: Layout) -> list[tuple[Core, ...]]:
    """Deal a node's cores to `count` instances of `size` cores; what is over stays spare."""
    if layout is Layout.INTERLEAVE:
        return [tuple(cores[k : count * size : count]) for k in range(count)]
    if layout is Layout.CONTIGUOUS:
        return [tuple(cores[k * size : (k + 1) * size]) for k in range(count)]
    return [share[:size] for share in _whole_domains(cores, count)]


def idle_siblings(topology: Topology, split: SplitConfig, pool: Pool) -> int:
    """Count the reserved cores of one instance whose SMT sibling is free for the proxy."""
    if split.threads_per_core != 1 or split.cpus is not None or split.reserve_per_instance == 0:
        return 0
    smt = all(len(core.cpus & topology.usable_cpus) > 1 for core in pool.cores)
    return (split.reserve_per_instance or 1) if smt and len(pool.cores) > 1 else 0


def _own_cores(pools: Sequence[Pool], index: int, proxy_cores: int) -> Sequence[Core]:
    cores = pools[index].cores
    return cores[: len(cores) - proxy_cores] if index == 0 else cores


def own_cores(pools: Sequence[Pool], split: Split) -> list[Sequence[Core]]:
    """Return each pool's cores less those of the proxy."""
    return [_own_cores(pools, i, split.proxy_cores) for i in range(len(pools))]


def _fit(
    split: SplitConfig, pools: Sequence[Pool], proxy_cores: int
) -> tuple[tuple[int, ...], int] | None:
    """Return (count per pool, size), or None when what was asked for does not fit."""
    own = [_own_cores(pools, i, proxy_cores) for i in range(len(pools))]
    counts = _counts(split, own)
    largest = [_largest_size(cores, n, split.layout) for cores, n in zip(own, counts, strict=True)]
    asked = split.instances is not None or split.instances_per_node is not None
    if split.cores_per_instance is not None:
        size = split.cores_per_instance
    elif asked:
        size = min(s for s, n in zip(largest, counts, strict=True) if n)
    else:
        size = _busiest_size(counts, largest)
    fitting = [n if s >= size else 0 for n, s in zip(counts, largest, strict=True)]
    if size < 1 or not sum(fitting) or (asked and fitting != counts):
        return None
    return tuple(fitting), size


def _counts(split: SplitConfig, own: Sequence[Sequence[Core]]) -> list[int]:
    if split.instances is not None:
        base, extra = divmod(split.instances, len(own))
        return [base + (1 if i < extra else 0) for i in range(len(own))]
    if split.instances_per_node is not None:
        return [split.instances_per_node] * len(own)
    if split.cores_per_instance is not None:
        return [len(cores) // split.cores_per_instance for cores in own]
    return [max(1, (len(c) * 2 + CORES_PER_INSTANCE) // (2 * CORES_PER_INSTANCE)) for c in own]


def _largest_size(cores: Sequence[Core], count: int, layout: Layout) -> int:
    """Return the largest equal size of `count` instances on these cores; 0 when they do not fit."""
    if count == 0:
        return 0
    if layout is not Layout.L3:
        return len(cores) // count
    domains = {core.l3 for core in cores}
    if None in domains:
        raise PlanError(
            "the layout l3 needs L3 domains, and this machine or source shows none for "
            f"CPU {next(c.id for c in cores if c.l3 is None)}",
            hint="plan with --layout interleave or contiguous",
        )
    return min(map(len, _whole_domains(cores, count))) if len(domains) >= count else 0


def _whole_domains(cores: Sequence[Core], count: int) -> list[tuple[Core, ...]]:
    """Give each instance whole, neighbouring L3 domains."""
    domains: dict[int | None, list[Core]] = {}
    for core in cores:
        domains.setdefault(core.l3, []).append(core)
    groups = list(domains.values())
    return [
        tuple(
            c for g in groups[k * len(groups) // count : (k + 1) * len(groups) // count] for c in g
        )
        for k in range(count)
    ]


def _busiest_size(counts: Sequence[int], largest: Sequence[int]) -> int:
    """Return the size that puts most cores to work, of two equal ones the larger.

    Nodes too small for it are left out.
    """

    def cores_at_work(size: int) -> tuple[int, int]:
        instances = sum(n for n, s in zip(counts, largest, strict=True) if s >= size)
        return size * instances, size

    return max(largest, key=cores_at_work)


def _does_not_fit(split: SplitConfig, pools: Sequence[Pool], proxy_cores: int) -> PlanError:
    have = ", ".join(f"{len(pool.cores)} on {pool.name}" for pool in pools)
    kept = f", of which {proxy_cores} on {pools[0].name} for the proxy" if proxy_cores else ""
    size = split.cores_per_instance or 1
    asked = f"instances of {size} core{'s' * (size != 1)}"
    if split.instances is not None:
        asked = f"{split.instances} {asked}"
    elif split.instances_per_node is not None:
        asked = f"{split.instances_per_node} {asked} per node"
    if split.layout is Layout.L3:
        domains = min(len({core.l3 for core in pool.cores}) for pool in pools)
        asked += f" on whole L3 domains (the smallest node has {domains})"
    return PlanError(
        f"{asked} do not fit: usable cores are {have}{kept}",
        hint="fewer instances"
        + (", a smaller --cores-per-instance" if size > 1 else "")
        + (", another --layout" if split.layout is Layout.L3 else "")
        + (", or --reserve-proxy 0" if proxy_cores else ""),
    )


def _reserve(split: SplitConfig, size: int, notes: list[Note]) -> int:
    asked = split.reserve_per_instance
    if asked is None:
        if size == 1:
            notes.append(
                note(
                    "nothing-reserved",
                    "instances of one core: the API server and engine core share it with the "
                    "engine's only thread.",
                )
            )
        return min(1, size - 1)
    if asked >= size:
        raise PlanError(
            f"--reserve-per-instance {asked} leaves no core for engine threads: an instance has "
            f"{size}",
            hint=f"--reserve-per-instance {size - 1} at most, or larger instances",
        )
    return asked
