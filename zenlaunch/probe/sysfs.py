"""A filesystem root becomes a Topology: the live machine, or a dump given with --sysroot.

Owns sys/devices/system/cpu but its caches: which CPUs are online, how they form cores and packages;
and puts together what `caches`, `nodes`, `cgroup` and `cpuinfo` read. Does not decide anything:
where two files disagree, the choice and both readings are in a note.
Follows Documentation/admin-guide/cputopology.rst and
Documentation/ABI/stable/sysfs-devices-system-cpu.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from zenlaunch.cpuset import EMPTY, CpuSet, union
from zenlaunch.errors import TopologyError
from zenlaunch.probe.caches import read_l3
from zenlaunch.probe.cgroup import read_allowed
from zenlaunch.probe.conflicts import conflicts, few
from zenlaunch.probe.cpuinfo import CPUINFO, CpuInfo, is_virtual, read_cpuinfo, read_machine
from zenlaunch.probe.nodes import own_nodes, read_nodes
from zenlaunch.probe.remarks import remarks
from zenlaunch.probe.tree import Tree
from zenlaunch.topology import Core, CoreKind, Note, Package, Severity, Topology, group_by

CPU = "sys/devices/system/cpu"
_SIBLINGS = ("thread_siblings_list", "core_cpus_list", "thread_siblings", "core_cpus")
_PACKAGE = ("core_siblings_list", "package_cpus_list", "core_siblings", "package_cpus")
# A core below this share of the largest capacity is of the slow kind. Favoured cores of one kind
# differ by a few per cent, a big core and a little one by a factor of two or more.
_SLOW = 0.6
# What a kernel can be built for (CONFIG_NR_CPUS); a list of more comes from a damaged file.
_MOST_CPUS = 8192


def read_sysfs(root: Path, *, live: bool) -> Topology:
    """Read the machine below `root`: "/" when `live`, otherwise a dump with sys/ and proc/.

    A live reading takes this process's affinity and the free memory of the nodes; a dump has its
    own proc/self or nothing. Raises TopologyError that names the file which cannot be read.
    """
    tree = Tree(root, compare=not live)
    affinity = CpuSet(os.sched_getaffinity(0)) if live else None
    return read_tree(tree, affinity=affinity, live=live)


def read_tree(tree: Tree, *, affinity: CpuSet | None, live: bool) -> Topology:
    """Read the machine of a tree; `affinity` is the mask of the process that will use it."""
    notes: list[Note] = []
    allowed = read_allowed(tree, affinity=affinity)
    lazy = _LazyCpuInfo(tree)
    online, offline = _read_online(tree, lazy, notes)
    if not online:
        raise _no_cpus(tree)
    nodes = read_nodes(tree, online=online, live=live)
    notes += nodes.notes
    node_of = _unique({n.id: n.cpus for n in nodes.nodes})
    node_of |= own_nodes(tree, nodes.nodes, union(n.cpus for n in nodes.nodes) - CpuSet(node_of))
    rows = _read_rows(tree, online)
    siblings = _siblings(tree, rows, online, node_of, lazy, notes)
    packages = _packages(rows, online, lazy, notes)
    package_of = {cpu: p.id for p in packages for cpu in p.cpus}
    caches = read_l3(tree, online, notes)
    l3_of = _unique({i: domain.cpus for i, domain in enumerate(caches.domains)})
    kinds = _kinds(tree, online)
    cores = tuple(
        Core(
            id=cpus.first,
            cpus=cpus,
            l3=_same(l3_of.get(c) for c in cpus),
            node=_same(node_of.get(c) for c in cpus),
            package=_same(package_of.get(c) for c in cpus),
            kind=_kind(kinds, cpus),
        )
        for cpus in siblings
    )
    machine = read_machine(tree, arch=os.uname().machine if live else None)
    topology = Topology(
        origin="live" if live else "sysroot",
        machine=machine,
        online=online,
        offline=offline,
        allowed_cpus=allowed.cpus,
        allowed_mems=allowed.mems,
        packages=packages,
        nodes=tuple(
            replace(n, package=_same(package_of.get(c) for c in n.cpus)) for n in nodes.nodes
        ),
        l3=caches.domains,
        l3_known=caches.known,
        cores=cores,
        threads_per_core=_same(len(c.cpus) for c in cores),
        isolated=(tree.cpulist(f"{CPU}/isolated") or EMPTY) & online,
        nohz_full=(tree.cpulist(f"{CPU}/nohz_full") or EMPTY) & online,
    )
    notes += conflicts(tree, topology)
    return replace(topology, notes=(*notes, *remarks(topology, virtual=is_virtual(tree))))


def _no_cpus(tree: Tree) -> TopologyError:
    if not tree.root:
        hint = "is /sys mounted? (mount -t sysfs sysfs /sys)"
    elif tree.names("devices/system/cpu"):
        hint = f"this is a sys folder itself: --sysroot {Path(tree.root).parent}"
    else:
        hint = "--sysroot takes the folder that holds sys/ and proc/"
    return TopologyError(
        f"no CPU information below {tree.root or '/'}: neither {tree.path(CPU)} nor "
        f"{tree.path(CPUINFO)} names a CPU",
        hint=hint,
    )


class _LazyCpuInfo:
    """/proc/cpuinfo, read at the first question: most machines never need it (4 MiB on some)."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._info: CpuInfo | None = None

    def get(self) -> CpuInfo:
        if self._info is None:
            self._info = read_cpuinfo(self._tree)
        return self._info


def _read_online(tree: Tree, lazy: _LazyCpuInfo, notes: list[Note]) -> tuple[CpuSet, CpuSet | None]:
    """Return the online CPUs and the present ones that are not."""
    folders = CpuSet(tree.numbered(CPU, "cpu"))
    present = tree.cpulist(f"{CPU}/present") or folders
    online = tree.cpulist(f"{CPU}/online")
    if not online:  # absent (before 2.6.26, cut dumps) or an empty file
        online = _online_by_folder(tree, folders) or CpuSet(lazy.get().cpus)
    if folders and not online <= folders:
        # A cut dump need not have a folder for each CPU, but something must know of them.
        known = folders | CpuSet(lazy.get().cpus)
        known |= present if len(present) <= _MOST_CPUS else EMPTY
        if not online <= known:
            notes.append(
                Note(
                    code="online-conflict",
                    severity=Severity.WARNING,
                    text=f"{CPU}/online says {online}, but only CPUs {known} are known otherwise; "
                    "the others are taken as absent",
                )
            )
            online &= known
    return online, (present - online if present else None)


def _online_by_folder(tree: Tree, folders: CpuSet) -> CpuSet:
    state = {cpu: tree.text(f"{CPU}/cpu{cpu}/online") or "" for cpu in folders}
    up = CpuSet(cpu for cpu, text in state.items() if text == "1")
    # A CPU that cannot be taken offline (often CPU 0) has no such file.
    unsaid = CpuSet(cpu for cpu, text in state.items() if text not in ("0", "1"))
    # An offline CPU keeps its folder but not its topology; a cut dump may have none at all.
    alive = CpuSet(cpu for cpu in folders if tree.names(f"{CPU}/cpu{cpu}/topology"))
    return up | (unsaid & alive if alive else unsaid)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """What the topology folder of one CPU says, cut to online CPUs; None where it is silent."""

    package: int | None
    core: int | None
    die: int | None
    siblings: CpuSet | None
    package_cpus: CpuSet | None


def _read_rows(tree: Tree, online: CpuSet) -> dict[int, _Row]:
    rows: dict[int, _Row] = {}
    for cpu in online:
        folder = f"{CPU}/cpu{cpu}/topology/"
        siblings = tree.cpus(folder, *_SIBLINGS)
        package_cpus = tree.cpus(folder, *_PACKAGE)
        bare = siblings is None
        rows[cpu] = _Row(
            package=tree.number(folder + "physical_package_id"),
            core=tree.number(folder + "core_id") if bare else None,
            die=tree.number(folder + "die_id") if bare else None,
            siblings=None if siblings is None else siblings & online,
            package_cpus=None if package_cpus is None else package_cpus & online,
        )
    return rows


def _siblings(
    tree: Tree,
    rows: Mapping[int, _Row],
    online: CpuSet,
    node_of: Mapping[int, int],
    lazy: _LazyCpuInfo,
    notes: list[Note],
) -> list[CpuSet]:
    """Return the cores as sets of online CPUs, ascending, each CPU in exactly one."""
    said = {cpu: row.siblings for cpu, row in rows.items() if row.siblings}
    cores: dict[CpuSet, None] = {}
    odd: list[str] = []
    for cpu, cpus in said.items():
        # Two CPUs share a core when each says so; one without the files follows the other's word.
        both = CpuSet(c for c in cpus if c == cpu or cpu in said.get(c, cpus))
        if both != cpus or cpu not in cpus:
            odd.append(f"CPU {cpu} says {cpus}")
        cores[both | CpuSet([cpu])] = None
    taken: dict[int, CpuSet] = {}
    for cpus in sorted(cores, key=lambda s: (s.first, -len(s))):
        left = CpuSet(c for c in cpus if c not in taken)
        if left:
            taken |= dict.fromkeys(left, left)
    if odd:
        notes.append(
            Note(
                code="siblings-conflict",
                severity=Severity.WARNING,
                text="the CPUs of a core disagree about it: "
                + few(odd)
                + "; only CPUs that name each other are taken as one core",
            )
        )
    silent = online - CpuSet(taken)
    found = list(dict.fromkeys(taken.values()))
    if silent:
        found += _cores_by_number(rows, silent, node_of, lazy, notes)
    return sorted(found, key=lambda s: s.first)


def _cores_by_number(
    rows: Mapping[int, _Row],
    silent: CpuSet,
    node_of: Mapping[int, int],
    lazy: _LazyCpuInfo,
    notes: list[Note],
) -> list[CpuSet]:
    """Group CPUs without sibling files by their core numbers, of sysfs or else of cpuinfo.

    A core number repeats in every package, and on some Opterons in every die of a package, so the
    package, the die and the node are part of the key.
    """
    info = lazy.get().cpus
    groups: dict[tuple[int | None, ...], list[int]] = {}
    alone: list[int] = []
    for cpu in silent:
        row, block = rows[cpu], info.get(cpu)
        core = row.core if row.core is not None and row.core >= 0 else None
        package = row.package
        if block is not None:
            core = block.core if core is None else core
            package = block.package if package is None else package
        if core is None:
            alone.append(cpu)
        else:
            groups.setdefault((package, row.die, node_of.get(cpu), core), []).append(cpu)
    for key, cpus in list(groups.items()):
        # Some hypervisors give every CPU the same numbers, and say that there is no SMT.
        blocks = [info[c] for c in cpus if c in info]
        if len(cpus) > 1 and any(b.siblings and b.siblings == b.cores for b in blocks):
            alone += groups.pop(key)
    if alone and len(silent) > 1:
        notes.append(
            Note(
                code="siblings-unknown",
                severity=Severity.WARNING,
                text=f"nothing says which CPUs share a core (CPUs {CpuSet(alone)}): "
                "each is shown as a core of its own",
            )
        )
    return [CpuSet([cpu]) for cpu in alone] + [CpuSet(cpus) for cpus in groups.values()]


def _packages(
    rows: Mapping[int, _Row], online: CpuSet, lazy: _LazyCpuInfo, notes: list[Note]
) -> tuple[Package, ...]:
    """Return the packages with online CPUs, ascending by id."""
    named = {c: r.package for c, r in rows.items() if r.package is not None and r.package >= 0}
    silent = online - CpuSet(named)
    info = lazy.get().cpus if silent and not any(rows[c].package_cpus for c in silent) else {}
    for cpu in silent:
        block = info.get(cpu)
        if block is not None and block.package is not None and block.package >= 0:
            named[cpu] = block.package
    # A CPU without files of its own is in the package whose other CPUs list it.
    lists = {(r.package_cpus, named[c]) for c, r in rows.items() if r.package_cpus and c in named}
    named |= _unique({i: union(s for s, of in lists if of == i) & (online - CpuSet(named))
                      for i in {of for _, of in lists}})  # fmt: skip
    groups = group_by((package, cpu) for cpu, package in named.items())
    silent = online - CpuSet(named)
    if silent:
        groups |= _unnamed_packages(rows, silent, taken=set(groups), notes=notes)
    odd = [
        f"CPU {cpu} is in package {named[cpu]} ({groups[named[cpu]]}) by physical_package_id, "
        f"among {row.package_cpus} by core_siblings"
        for cpu, row in rows.items()
        if cpu in named and row.package_cpus is not None and row.package_cpus != groups[named[cpu]]
    ]
    if odd:
        notes.append(
            Note(
                code="package-conflict",
                severity=Severity.WARNING,
                text=few(odd) + "; physical_package_id is used",
            )
        )
    return tuple(Package(id=i, cpus=cpus) for i, cpus in sorted(groups.items()))


def _unnamed_packages(
    rows: Mapping[int, _Row], silent: CpuSet, *, taken: set[int], notes: list[Note]
) -> dict[int, CpuSet]:
    """Number the packages of CPUs whose id is -1 or absent from 0, in the order of their CPUs."""
    sets: list[CpuSet] = []
    left = silent
    for cpu in silent:
        if cpu in left and rows[cpu].package_cpus:
            group = (rows[cpu].package_cpus or EMPTY) & left | CpuSet([cpu])
            sets.append(group)
            left -= group
    if left:
        sets.append(left)
    free = (i for i in range(len(taken) + len(sets)) if i not in taken)
    groups = dict(zip(free, sets, strict=False))
    how = (
        "nothing says which CPUs share a package: they are shown as one"
        if left == silent
        else "the packages are those of core_siblings, numbered here"
    )
    notes.append(
        Note(
            code="package-id-unknown",
            severity=Severity.INFO if left != silent or len(silent) == 1 else Severity.WARNING,
            text=f"CPUs {silent} have no package id (absent, or -1); {how}",
        )
    )
    return groups


def _kinds(tree: Tree, online: CpuSet) -> dict[int, CoreKind]:
    """Return the kind of each CPU of a hybrid machine; {} where all are alike."""
    fast = tree.cpulist("sys/devices/cpu_core/cpus")
    slow = tree.cpulist("sys/devices/cpu_atom/cpus")
    if fast and slow:
        return dict.fromkeys(slow & online, CoreKind.EFFICIENCY) | dict.fromkeys(
            fast & online, CoreKind.PERFORMANCE
        )
    first = tree.number(f"{CPU}/cpu{online.first}/cpu_capacity") if online else None
    if first is None:
        return {}
    capacity = {cpu: tree.number(f"{CPU}/cpu{cpu}/cpu_capacity") or 0 for cpu in online}
    best = max(capacity.values())
    if not 0 < min(capacity.values()) < _SLOW * best:
        return {}
    return {
        cpu: CoreKind.EFFICIENCY if value < _SLOW * best else CoreKind.PERFORMANCE
        for cpu, value in capacity.items()
    }


def _kind(kinds: Mapping[int, CoreKind], cpus: CpuSet) -> CoreKind | None:
    found = {kinds.get(c) for c in cpus}
    return found.pop() if len(found) == 1 else None


def _unique(groups: Mapping[int, CpuSet]) -> dict[int, int]:
    """Return cpu -> key for the CPUs that are in exactly one group."""
    found: dict[int, int] = {}
    several: set[int] = set()
    for key, cpus in groups.items():
        for cpu in cpus:
            if cpu in found:
                several.add(cpu)
            found[cpu] = key
    return {cpu: key for cpu, key in found.items() if cpu not in several}


def _same(values: Iterable[int | None]) -> int | None:
    """Return the value that all share; None where they differ or there is none."""
    found = set(values)
    return found.pop() if len(found) == 1 else None
