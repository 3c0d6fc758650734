"""Topology: what a machine is, as one frozen value.

Owns the nouns (package, NUMA node, L3 domain, core, CPU), their JSON form and questions about them.
Does not read anything (that is `probe`), decide anything (that is `plan`) or guess: what a source
cannot know is None. CPU numbers, package ids and node ids are the kernel's own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from zenlaunch.cpuset import EMPTY, CpuSet
from zenlaunch.errors import TopologyError

SCHEMA = 1


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
    """A physical package, shown to people as "socket"; its id may be -1 or huge."""

    id: int
    cpus: CpuSet


@dataclass(frozen=True, slots=True, kw_only=True)
class NumaNode:
    """A NUMA node with its online CPUs (possibly none) and its memory (0: it has none)."""

    id: int
    cpus: CpuSet
    package: int | None = None
    memory_bytes: int | None = None
    free_bytes: int | None = None
    distances: Mapping[int, int] = field(default_factory=dict)


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
            "online": str(self.online),
            "offline": _text(self.offline),
            "allowed": {"cpus": _text(self.allowed_cpus), "mems": _text(self.allowed_mems)},
            "packages": [{"id": p.id, "cpus": str(p.cpus)} for p in self.packages],
            "nodes": [
                {
                    "id": n.id,
                    "cpus": str(n.cpus),
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
        try:
            if data["schema"] != SCHEMA:
                raise TopologyError(
                    f"{source}: probe schema {data['schema']!r}, this zenlaunch reads {SCHEMA}",
                    hint="make the file again with `zenlaunch probe --json`",
                )
            machine = data["machine"]
            return cls(
                origin=str(data["origin"]),
                machine=Machine(
                    arch=machine["arch"],
                    vendor=machine["vendor"],
                    model=machine["model"],
                    avx512=machine.get("avx512"),
                ),
                online=CpuSet.parse(data["online"]),
                offline=_cpuset(data["offline"]),
                allowed_cpus=_cpuset(data["allowed"]["cpus"]),
                allowed_mems=_cpuset(data["allowed"]["mems"]),
                packages=tuple(
                    Package(id=int(p["id"]), cpus=CpuSet.parse(p["cpus"])) for p in data["packages"]
                ),
                nodes=tuple(
                    NumaNode(
                        id=int(n["id"]),
                        cpus=CpuSet.parse(n["cpus"]),
                        package=_int(n["package"]),
                        memory_bytes=_int(n["memory_bytes"]),
                        free_bytes=_int(n["free_bytes"]),
                        distances={int(k): int(v) for k, v in n["distances"].items()},
                    )
                    for n in data["nodes"]
                ),
                l3=tuple(
                    L3(cpus=CpuSet.parse(c["cpus"]), size_bytes=_int(c["size_bytes"]))
                    for c in data["l3"] or ()
                ),
                l3_known=data["l3"] is not None,
                cores=tuple(
                    Core(
                        id=int(c["id"]),
                        cpus=CpuSet.parse(c["cpus"]),
                        l3=_int(c["l3"]),
                        node=_int(c["node"]),
                        package=_int(c["package"]),
                        kind=CoreKind(c["kind"]) if c.get("kind") else None,
                    )
                    for c in data["cores"]
                ),
                threads_per_core=_int(data["threads_per_core"]),
                isolated=CpuSet.parse(data.get("isolated", "")),
                nohz_full=CpuSet.parse(data.get("nohz_full", "")),
                notes=tuple(
                    Note(code=n["code"], severity=Severity(n["severity"]), text=n["text"])
                    for n in data["notes"]
                ),
            )
        except KeyError as e:
            raise TopologyError(
                f"{source}: the saved probe lacks the key {e.args[0]!r}",
                hint="make the file again with `zenlaunch probe --json`",
            ) from None
        except (TypeError, ValueError, AttributeError) as e:
            raise TopologyError(
                f"{source}: the saved probe has a value that cannot be read: {e}",
                hint="make the file again with `zenlaunch probe --json`",
            ) from None

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


def _text(s: CpuSet | None) -> str | None:
    return None if s is None else str(s)


def _cpuset(text: str | None) -> CpuSet | None:
    return None if text is None else CpuSet.parse(text)


def _int(value: Any) -> int | None:
    return None if value is None else int(value)
