"""Topology: what a machine is, as one frozen value.

Owns the nouns (package, NUMA node, L3 domain, core, CPU), their JSON form and questions about them.
Does not read anything (that is `probe`), decide anything (that is `plan`) or guess: what a source
cannot know is None. CPU numbers, package ids and node ids are the kernel's own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from zenlaunch.cpuset import EMPTY, MAX_ID, CpuSet
from zenlaunch.errors import TopologyError
from zenlaunch.saved import Saved
from zenlaunch.values import printable, shown

SCHEMA = 1
_LONG_RANGE = 4096  # CPUs; the list of more takes long to print, and nobody reads it


class Severity(StrEnum):
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """What the reader of a probe or plan should know; `code` is stable, `text` is for people.

    A text may quote a damaged file: what would do something to a terminal becomes a dot.
    """

    code: str
    severity: Severity
    text: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", printable(self.text))

    def to_dict(self) -> dict[str, str]:
        return {"code": self.code, "severity": self.severity.value, "text": self.text}


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Names of the hardware. `avx512` is None where the source shows no CPU flags."""

    arch: str | None = None
    vendor: str | None = None
    model: str | None = None
    avx512: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A physical package, shown to people as "socket"; its id may be -1 or huge.

    `cpus_known` is False where a source counts the packages without saying what is in them; `cpus`
    is then empty, and null in JSON.
    """

    id: int
    cpus: CpuSet
    cpus_known: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class NumaNode:
    """A NUMA node with its online CPUs (possibly none) and its memory (0: it has none)."""

    id: int
    cpus: CpuSet
    package: int | None = None
    memory_bytes: int | None = None
    free_bytes: int | None = None
    distances: Mapping[int, int] = field(default_factory=dict)
    cpus_known: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class L3:
    """CPUs that share one last-level cache (on EPYC: a CCX)."""

    cpus: CpuSet
    size_bytes: int | None = None


class CoreKind(StrEnum):
    PERFORMANCE = "performance"
    EFFICIENCY = "efficiency"


@dataclass(frozen=True, slots=True, kw_only=True)
class Core:
    """A physical core: `cpus` are its online SMT siblings, `id` the lowest of them.

    `l3` indexes `Topology.l3`; `node` and `package` are kernel ids. `kind` is set on hybrid
    machines only.
    """

    id: int
    cpus: CpuSet
    l3: int | None = None
    node: int | None = None
    package: int | None = None
    kind: CoreKind | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """A machine as one source shows it. Only online CPUs are in packages, nodes, l3 and cores.

    `allowed_cpus`/`allowed_mems` are what this process may use (affinity and cgroup cpuset);
    None where the source cannot know. `packages`, `l3` and `cores` are empty where unknown, and
    `l3_known` tells "no L3 on this machine" from "the source does not show caches".
    """

    origin: str
    machine: Machine
    online: CpuSet
    online_known: bool = True
    offline: CpuSet | None = None
    allowed_cpus: CpuSet | None = None
    allowed_mems: CpuSet | None = None
    packages: tuple[Package, ...] = ()
    nodes: tuple[NumaNode, ...] = ()
    l3: tuple[L3, ...] = ()
    l3_known: bool = True
    cores: tuple[Core, ...] = ()
    threads_per_core: int | None = None
    isolated: CpuSet = EMPTY
    nohz_full: CpuSet = EMPTY
    notes: tuple[Note, ...] = ()

    def node(self, node_id: int) -> NumaNode:
        """Return the node with this kernel id; raises KeyError."""
        for node in self.nodes:
            if node.id == node_id:
                return node
        raise KeyError(node_id)

    @property
    def usable_cpus(self) -> CpuSet:
        """Online CPUs that this process may run on (all online ones where that is not known)."""
        return self.online if self.allowed_cpus is None else self.online & self.allowed_cpus

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON of `zenlaunch probe --json`."""
        return {
            "schema": SCHEMA,
            "origin": self.origin,
            "machine": {
                "arch": self.machine.arch,
                "vendor": self.machine.vendor,
                "model": self.machine.model,
                "avx512": self.machine.avx512,
            },
            "online": str(self.online) if self.online_known else None,
            "offline": _text(self.offline),
            "allowed": {"cpus": _text(self.allowed_cpus), "mems": _text(self.allowed_mems)},
            "packages": [
                {"id": p.id, "cpus": str(p.cpus) if p.cpus_known else None} for p in self.packages
            ],
            "nodes": [
                {
                    "id": n.id,
                    "cpus": str(n.cpus) if n.cpus_known else None,
                    "package": n.package,
                    "memory_bytes": n.memory_bytes,
                    "free_bytes": n.free_bytes,
                    "distances": {str(k): v for k, v in n.distances.items()},
                }
                for n in self.nodes
            ],
            "l3": (
                [{"cpus": str(c.cpus), "size_bytes": c.size_bytes} for c in self.l3]
                if self.l3_known
                else None
            ),
            "cores": [
                {"id": c.id, "cpus": str(c.cpus), "l3": c.l3, "node": c.node, "package": c.package}
                | ({"kind": c.kind.value} if c.kind else {})
                for c in self.cores
            ],
            "threads_per_core": self.threads_per_core,
            "isolated": str(self.isolated),
            "nohz_full": str(self.nohz_full),
            "notes": [n.to_dict() for n in self.notes],
        }

    @classmethod
    def from_dict(cls, data: Any, *, source: str = "probe") -> Topology:
        """Read the JSON of `zenlaunch probe --json`.

        Raises TopologyError that names the key; `source` is the file, for the message.
        """
        hint = "make the file again with `zenlaunch probe --json`"
        try:
            top = Saved(data, "")
            if top.get("schema") != SCHEMA:
                schema = shown(data["schema"])
                raise TopologyError(
                    f"{source}: probe schema {schema}, this zenlaunch reads {SCHEMA}", hint=hint
                )
            topology = _from_saved(top)
            for problem in contradictions(topology):
                raise ValueError(problem)
            return topology
        except ValueError as e:
            raise TopologyError(f"{source}: the saved probe is damaged: {e}", hint=hint) from None

    @property
    def digest(self) -> str:
        """Return "sha256:..." of what a plan depends on.

        Free memory, notes and the origin are left out: they change by themselves or say nothing
        about the machine.
        """
        stable = self.to_dict()
        for key in ("origin", "notes"):
            del stable[key]
        for node in stable["nodes"]:
            del node["free_bytes"]
        text = json.dumps(stable, sort_keys=True, separators=(",", ":"))
        return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def restrict(topology: Topology, cpus: CpuSet) -> Topology:
    """Return the topology as a process limited to `cpus` sees it: only `allowed_cpus` changes."""
    return replace(topology, allowed_cpus=topology.usable_cpus & cpus)


def group_by(pairs: Iterable[tuple[int, int]]) -> dict[int, CpuSet]:
    """Collect (key, cpu) pairs into key -> CpuSet, keys in ascending order."""
    bits: dict[int, int] = {}
    for key, cpu in pairs:
        bits[key] = bits.get(key, 0) | 1 << cpu
    return {key: CpuSet.from_bits(bits[key]) for key in sorted(bits)}


def contradictions(topology: Topology) -> list[str]:
    """Return what cannot be true of any machine: it means that the source is damaged.

    What real kernels do show (a CPU in two nodes or in none, an L3 without CPUs) is not here.
    """
    t, found = topology, list[str]()
    kinds: dict[str, Sequence[Package | NumaNode | L3 | Core]] = {
        "package": t.packages,
        "node": t.nodes,
        "L3": t.l3,
        "core": t.cores,
    }
    for kind, groups in kinds.items():
        for group in groups:
            if not group.cpus <= t.online:
                more = _few(group.cpus - t.online)
                found.append(f"a {kind} has CPUs that are not online: {more}")
        ids = [group.id for group in groups if not isinstance(group, L3)]
        if len(set(ids)) < len(ids):
            found.append(f"two {kind}s have the same id")
    domains: dict[CpuSet, int] = {}
    for i, domain in enumerate(t.l3):
        first = domains.setdefault(domain.cpus, i)
        if first != i:
            found.append(f"L3 {first} and L3 {i} have the same CPUs ({_few(domain.cpus)})")
    packages = {p.id: p.cpus if p.cpus_known else None for p in t.packages}
    nodes = {n.id: n.cpus if n.cpus_known else None for n in t.nodes}
    for node in t.nodes:
        if node.package is not None:
            found += _not_in(f"node {node.id}", node.cpus, "package", node.package, packages)
    found += _core_contradictions(t, packages, nodes)
    if t.offline is not None and not t.offline.isdisjoint(t.online):
        found.append(f"CPUs {_few(t.offline & t.online)} are both online and offline")
    return found + _impossible_numbers(t)


_Groups = Mapping[int, CpuSet | None]


def _core_contradictions(t: Topology, packages: _Groups, nodes: _Groups) -> list[str]:
    found: list[str] = []
    domains = {i: domain.cpus for i, domain in enumerate(t.l3)}
    seen = EMPTY
    for core in t.cores:
        name = f"core {core.id}"
        if not core.cpus or core.id != core.cpus.first:
            found.append(f"{name} is not named after its lowest CPU ({_few(core.cpus)})")
        if not core.cpus.isdisjoint(seen):
            found.append(f"CPUs {_few(core.cpus & seen)} are in two cores")
        seen |= core.cpus
        if core.l3 is not None and core.l3 not in domains:
            found.append(f"{name} names L3 {core.l3} of {len(t.l3)}")
        elif core.l3 is not None:
            found += _not_in(name, core.cpus, "L3", core.l3, domains)
        if core.node is not None:
            found += _not_in(name, core.cpus, "node", core.node, nodes)
        if core.package is not None:
            found += _not_in(name, core.cpus, "package", core.package, packages)
        if t.threads_per_core is not None and len(core.cpus) != t.threads_per_core:
            found.append(
                f"threads_per_core is {t.threads_per_core}, {name} has {len(core.cpus)} CPUs "
                f"({_few(core.cpus)})"
            )
    if t.cores and not t.online <= seen:
        found.append(f"CPUs {_few(t.online - seen)} are online and in no core, though cores are")
    return found


def _not_in(name: str, cpus: CpuSet, kind: str, number: int, groups: _Groups) -> list[str]:
    """Say that a group is named and not listed, or that its list lacks CPUs of what names it."""
    if number not in groups:
        return [f"{name} names {kind} {number}, which is not listed"]
    inside = groups[number]
    if inside is None or cpus <= inside:
        return []
    return [
        f"{name} (CPUs {_few(cpus)}) names {kind} {number}, whose CPUs are {_few(inside) or 'none'}"
    ]


def _impossible_numbers(t: Topology) -> list[str]:
    found: list[str] = []
    for node in t.nodes:
        if not 0 <= node.id <= MAX_ID:
            found.append(f"node {node.id} is outside 0-{MAX_ID}")
        for what, size in (("memory", node.memory_bytes), ("free memory", node.free_bytes)):
            if size is not None and size < 0:
                found.append(f"a node has less than no {what}: node {node.id}, {size} bytes")
        for to, distance in node.distances.items():
            if distance < 0:
                found.append(f"the distance from node {node.id} to node {to} is {distance}")
    for i, domain in enumerate(t.l3):
        if domain.size_bytes is not None and domain.size_bytes < 0:
            found.append(f"L3 {i} has less than no size: {domain.size_bytes} bytes")
    if t.threads_per_core is not None and t.threads_per_core < 1:
        found.append(f"threads_per_core is {t.threads_per_core}, below 1")
    return found


def _few(cpus: CpuSet) -> str:
    """Return a CPU list for a message, cut where it is long."""
    if not cpus or cpus.last - cpus.first < _LONG_RANGE:
        text = str(cpus)
        return text if len(text) <= 60 else text[:57] + "..."
    begin = ((1 << _LONG_RANGE) - 1) << cpus.first
    return str(CpuSet.from_bits(cpus.bits & begin))[:57] + "..."


def _from_saved(top: Saved) -> Topology:
    machine, allowed = (
        Saved(top.get("machine"), "machine."),
        Saved(top.get("allowed"), "allowed."),
    )
    avx512 = machine.value.get("avx512")
    if not isinstance(avx512, bool | None):
        raise machine.wrong("avx512", "not true, false or null")
    online, l3_known = top.cpus("online"), top.get("l3") is not None
    return Topology(
        origin=top.text("origin") or "probe",
        machine=Machine(
            arch=machine.text("arch"),
            vendor=machine.text("vendor"),
            model=machine.text("model"),
            avx512=avx512,
        ),
        online=EMPTY if online is None else online,
        online_known=online is not None,
        offline=top.cpus("offline"),
        allowed_cpus=allowed.cpus("cpus"),
        allowed_mems=allowed.cpus("mems"),
        packages=tuple(
            Package(
                id=p.id("id"), cpus=p.cpus("cpus") or EMPTY, cpus_known=p.get("cpus") is not None
            )
            for p in top.all("packages")
        ),
        nodes=tuple(
            NumaNode(
                id=n.id("id", most=MAX_ID),
                cpus=n.cpus("cpus") or EMPTY,
                cpus_known=n.get("cpus") is not None,
                package=n.whole("package"),
                memory_bytes=n.whole("memory_bytes"),
                free_bytes=n.whole("free_bytes"),
                distances=_distances(n),
            )
            for n in top.all("nodes")
        ),
        l3=tuple(
            L3(cpus=c.cpus("cpus") or EMPTY, size_bytes=c.whole("size_bytes"))
            for c in (top.all("l3") if l3_known else ())
        ),
        l3_known=l3_known,
        cores=tuple(
            Core(
                id=c.id("id"),
                cpus=c.cpus("cpus") or EMPTY,
                l3=c.whole("l3"),
                node=c.whole("node"),
                package=c.whole("package"),
                kind=c.one_of("kind", CoreKind) if c.value.get("kind") else None,
            )
            for c in top.all("cores")
        ),
        threads_per_core=top.whole("threads_per_core"),
        isolated=top.cpus("isolated", "") or EMPTY,
        nohz_full=top.cpus("nohz_full", "") or EMPTY,
        notes=tuple(
            Note(
                code=n.text("code") or "",
                severity=n.one_of("severity", Severity) or Severity.INFO,
                text=n.text("text") or "",
            )
            for n in top.all("notes")
        ),
    )


def _distances(node: Saved) -> dict[int, int]:
    row = Saved(node.get("distances"), f"{node.path}distances.")
    for key in row.value:
        if not (key.isascii() and key.isdigit() and len(key) < 7 and int(key) <= MAX_ID):
            raise row.wrong(key, "and its key is not a node number")
    found = {int(key): row.id(key) for key in row.value}
    if len(found) < len(row.value):
        raise ValueError(f"{row.path.rstrip('.')} gives a node two distances")
    return found


def _text(s: CpuSet | None) -> str | None:
    return None if s is None else str(s)
