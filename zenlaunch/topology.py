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
from typing import Any, TypeVar

from zenlaunch.cpuset import EMPTY, CpuSet
from zenlaunch.errors import TopologyError

SCHEMA = 1

_Enum = TypeVar("_Enum", bound=StrEnum)


class Severity(StrEnum):
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """What the reader of a probe or plan should know; `code` is stable, `text` is for people."""

    code: str
    severity: Severity
    text: str

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
            top = _Saved(data, "")
            if top.get("schema") != SCHEMA:
                raise TopologyError(
                    f"{source}: probe schema {data['schema']!r}, this zenlaunch reads {SCHEMA}",
                    hint=hint,
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
                found.append(f"a {kind} has CPUs that are not online: {group.cpus - t.online}")
        ids = [group.id for group in groups if not isinstance(group, L3)]
        if len(set(ids)) < len(ids):
            found.append(f"two {kind}s have the same id")
    packages, nodes = {p.id for p in t.packages}, {n.id for n in t.nodes}
    seen = EMPTY
    for core in t.cores:
        if not core.cpus or core.id != core.cpus.first:
            found.append(f"core {core.id} is not named after its lowest CPU ({core.cpus})")
        if not core.cpus.isdisjoint(seen):
            found.append(f"CPUs {core.cpus & seen} are in two cores")
        seen |= core.cpus
        if core.l3 is not None and not 0 <= core.l3 < len(t.l3):
            found.append(f"core {core.id} names L3 {core.l3} of {len(t.l3)}")
        if core.node is not None and core.node not in nodes:
            found.append(f"core {core.id} names node {core.node}, which is not listed")
        if core.package is not None and core.package not in packages:
            found.append(f"core {core.id} names package {core.package}, which is not listed")
    if any((n.memory_bytes or 0) < 0 for n in t.nodes):
        found.append("a node has less than no memory")
    if t.offline is not None and not t.offline.isdisjoint(t.online):
        found.append(f"CPUs {t.offline & t.online} are both online and offline")
    return found


class _Saved:
    """One object of the JSON; every question names the key in its ValueError."""

    def __init__(self, value: Any, path: str) -> None:
        if not isinstance(value, dict):
            raise ValueError(f"{path.rstrip('.') or 'the whole'} is not an object")
        self.value, self.path = value, path

    def get(self, key: str) -> Any:
        if key not in self.value:
            raise ValueError(f"the key {self.path}{key} is missing")
        return self.value[key]

    def wrong(self, key: str, why: str) -> ValueError:
        return ValueError(f"{self.path}{key} is {str(self.value[key])[:60]!r}, {why}")

    def text(self, key: str) -> str | None:
        value = self.get(key)
        if value is not None and not isinstance(value, str):
            raise self.wrong(key, "not a text")
        return value

    def whole(self, key: str) -> int | None:
        value = self.get(key)
        if value is None or (type(value) is int and abs(value) < 1 << 63):
            return value
        raise self.wrong(key, "not a whole number")

    def id(self, key: str) -> int:
        value = self.whole(key)
        if value is None:
            raise self.wrong(key, "not a number")
        return value

    def cpus(self, key: str, default: str | None = None) -> CpuSet | None:
        text = default if default is not None and key not in self.value else self.text(key)
        try:
            return None if text is None else CpuSet.parse(text)
        except ValueError as e:
            raise self.wrong(key, f"not a CPU list: {e}") from None

    def all(self, key: str) -> list[_Saved]:
        value = self.get(key)
        if not isinstance(value, list):
            raise self.wrong(key, "not a list")
        return [_Saved(item, f"{self.path}{key}[{i}].") for i, item in enumerate(value)]

    def one_of(self, key: str, kind: type[_Enum]) -> _Enum | None:
        text = self.text(key)
        try:
            return None if text is None else kind(text)
        except ValueError:
            raise self.wrong(key, f"not one of {', '.join(kind)}") from None


def _from_saved(top: _Saved) -> Topology:
    machine, allowed = (
        _Saved(top.get("machine"), "machine."),
        _Saved(top.get("allowed"), "allowed."),
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
                id=n.id("id"),
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


def _distances(node: _Saved) -> dict[int, int]:
    row = _Saved(node.get("distances"), f"{node.path}distances.")
    for key in row.value:
        if not (key.isascii() and key.isdigit() and len(key) < 7):
            raise row.wrong(key, "and its key is not a node number")
    return {int(key): row.id(key) for key in row.value}


def _text(s: CpuSet | None) -> str | None:
    return None if s is None else str(s)
