"""The text of `lscpu` and the JSON of `lscpu -J` become a Topology.

Owns the "Field: value" form of util-linux 2.13 to 2.41 on every architecture, also as embedded in
other reports. It shows counts, not maps: which CPUs are siblings, or in which package, is known
only where the counts leave one answer. Caches are sums and memory is absent, so both are unknown.
Follows lscpu(1) and sys-utils/lscpu.c.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from zenlaunch.cpuset import EMPTY, MAX_ID, CpuSet, union
from zenlaunch.probe.remarks import remarks
from zenlaunch.probe.source import Source, printable
from zenlaunch.topology import Core, Machine, Note, NumaNode, Package, Severity, Topology

LINES = re.compile(
    r"^\s*(Architecture|CPU op-mode\(s\)|CPU\(s\)|On-line CPU\(s\) (list|mask))[ \t]*:",
    re.MULTILINE,
)
_NODE = re.compile(r"NUMA node(\d{1,5}) CPU\(s\)")
# "8 // a remark": texts are pasted into notes, and the notes into texts.
_COUNT = re.compile(r"(\d{1,6})(?![\d.\w])")
# util-linux before 2.18.
_OLD_NAMES = {"CPU socket(s)": "Socket(s)"}
# No processor has more; a Xen guest prints its 16 virtual CPUs as the threads of one core.
_MOST_THREADS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One line "name: value"; `line` counts from 1 (0: from JSON)."""

    name: str
    value: str
    line: int


def read_lscpu(source: Source, *, origin: str = "lscpu") -> Topology:
    """Read the output of `lscpu`; raises TopologyError with the line that is wrong."""
    return from_fields(source, list(fields_of(source.lines)), origin=origin)


def read_lscpu_json(source: Source, data: Any) -> Topology:
    """Read the parsed output of `lscpu -J`, flat (before 2.37) or with children."""
    fields: list[Field] = []
    pending = [data.get("lscpu")] if isinstance(data, dict) else [None]
    while pending:
        items = pending.pop()
        if not isinstance(items, list):
            raise source.wrong(1, 'not what lscpu -J prints: "lscpu" is not a list of fields')
        for item in items:
            name = item.get("field") if isinstance(item, dict) else None
            if not isinstance(name, str) or not isinstance(item.get("data"), str | None):
                raise source.wrong(1, f"not what lscpu -J prints: {str(item)[:60]!r} is no field")
            name = name.strip().removesuffix(":")
            fields.append(Field(name=name, value=item.get("data") or "", line=_find(source, item)))
            if "children" in item:
                pending.insert(0, item["children"])
    return from_fields(source, fields, origin="lscpu-json")


def fields_of(lines: Iterable[str], *, first: int = 1) -> Iterable[Field]:
    """Split lines "name: value"; others are passed over (prompts, headings, warnings)."""
    for number, line in enumerate(lines, first):
        name, colon, value = line.partition(":")
        if colon:
            yield Field(name=" ".join(name.split()), value=value.strip(), line=number)


def from_fields(source: Source, fields: list[Field], *, origin: str) -> Topology:
    """Make the topology of one machine's fields."""
    by_name: dict[str, list[Field]] = {}
    for f in fields:
        by_name.setdefault(_OLD_NAMES.get(f.name, f.name), []).append(f)
    notes: list[Note] = []
    online, offline = _cpus(source, by_name)
    nodes = _nodes(source, by_name, online, offline or EMPTY, notes)
    sockets = _unanimous(by_name, "Socket(s)")
    threads = _threads(by_name, online, sockets, notes)
    # A block for each type of core (hybrid machines) counts the sockets of that type.
    whole = sockets == 1 and len(by_name["Socket(s)"]) == 1
    packages = tuple(
        Package(id=i, cpus=online if whole else EMPTY, cpus_known=whole)
        for i in range(min(sockets or 0, len(online)))
    )
    topology = Topology(
        origin=origin,
        machine=Machine(
            arch=_text(by_name, "Architecture"),
            vendor=_text(by_name, "Vendor ID"),
            model=_text(by_name, "Model name"),
            avx512=_avx512(by_name),
        ),
        online=online,
        offline=offline,
        packages=packages,
        nodes=tuple(replace(n, package=0 if whole and n.cpus else None) for n in nodes),
        l3_known=False,
        cores=_cores(online, nodes, packages, threads),
        threads_per_core=threads,
    )
    virtual = "Hypervisor vendor" in by_name
    return replace(topology, notes=(*notes, *remarks(topology, virtual=virtual)))


def _find(source: Source, item: Mapping[str, Any]) -> int:
    """Return the line of a JSON field, for messages; 1 where it cannot be told."""
    wanted = f'"{item["field"]}"'
    return next((n for n, line in enumerate(source.lines, 1) if wanted in line), 1)


def _text(by_name: Mapping[str, list[Field]], name: str) -> str | None:
    """Return the first value; "-" is how lscpu prints what it does not know."""
    value = by_name[name][0].value if name in by_name else ""
    return printable(value) if value not in ("", "-") else None


def _single(source: Source, by_name: Mapping[str, list[Field]], name: str) -> Field | None:
    """Return the only field of a name that a machine has once."""
    found = by_name.get(name, [])
    for other in found[1:]:
        if other.value != found[0].value:
            raise source.wrong(
                other.line, f"{name!r} differs from line {found[0].line}: two machines in one text?"
            )
    return found[0] if found else None


def _count(source: Source, field: Field | None) -> int | None:
    if field is None or field.value in ("", "-"):
        return None
    match = _COUNT.match(field.value)
    if match is None:
        raise source.wrong(field.line, "not a number")
    return int(match[1])


def _cpus(source: Source, by_name: Mapping[str, list[Field]]) -> tuple[CpuSet, CpuSet | None]:
    """Return the online and the offline CPUs."""
    total_field = _single(source, by_name, "CPU(s)")
    total = _count(source, total_field)
    listed = _set(source, by_name, "On-line CPU(s)") or _all_in_nodes(source, by_name, total)
    offline = _set(source, by_name, "Off-line CPU(s)")
    if listed is None or not listed[1]:
        at = listed[0] if listed else total_field.line if total_field else len(source.lines)
        if total:
            raise source.wrong(at, "the text does not list its CPUs (`On-line CPU(s) list:`)")
        raise source.wrong(
            at,
            "lscpu found no CPU here, as in some containers",
            hint="run lscpu on the host, or `zenlaunch probe --json` where zenlaunch will run",
        )
    online = listed[1]
    if offline is None:
        # lscpu prints the line only where there are offline CPUs.
        rest = EMPTY if total == len(online) else None
    else:
        rest = offline[1]
        if not rest.isdisjoint(online):
            raise source.wrong(offline[0], f"CPUs {rest & online} are on-line and off-line")
    if total is not None and rest is not None and total != len(online) + len(rest):
        at = total_field.line if total_field else 1
        raise source.wrong(at, f"{total} CPUs are announced, {len(online) + len(rest)} are listed")
    if total is not None and total < len(online):
        at = total_field.line if total_field else 1
        raise source.wrong(at, f"{total} CPUs are announced, {len(online)} are on-line")
    return online, rest


def _all_in_nodes(
    source: Source, by_name: Mapping[str, list[Field]], total: int | None
) -> tuple[int, CpuSet] | None:
    """Return the CPUs of the nodes, where an old lscpu lists no others and none is missing."""
    fields = [by_name[name][0] for name in by_name if _NODE.fullmatch(name)]
    cpus = union(source.cpus(f.line, f.value) for f in fields if not f.value.startswith("0x"))
    return (fields[0].line, cpus) if total and len(cpus) == total else None


def _set(
    source: Source, by_name: Mapping[str, list[Field]], name: str
) -> tuple[int, CpuSet] | None:
    """Return the line and the CPUs of "NAME list", or of "NAME mask" (lscpu -x)."""
    field = _single(source, by_name, f"{name} list")
    if field is not None:
        return field.line, source.cpus(field.line, field.value)
    field = _single(source, by_name, f"{name} mask")
    return None if field is None else (field.line, _mask(source, field))


def _mask(source: Source, field: Field) -> CpuSet:
    try:
        return CpuSet.parse_mask(field.value) if field.value else EMPTY
    except ValueError as e:
        raise source.wrong(field.line, f"not a CPU mask ({e})") from None


def _nodes(
    source: Source,
    by_name: Mapping[str, list[Field]],
    online: CpuSet,
    offline: CpuSet,
    notes: list[Note],
) -> tuple[NumaNode, ...]:
    found: dict[int, CpuSet] = {}
    named = EMPTY
    for name in by_name:
        match = _NODE.fullmatch(name)
        if match is None:
            continue
        field = _single(source, by_name, name)
        assert field is not None
        if int(match[1]) > MAX_ID:
            raise source.wrong(field.line, f"node {match[1]} is beyond any machine")
        hexadecimal = field.value.startswith("0x")
        cpus = _mask(source, field) if hexadecimal else source.cpus(field.line, field.value)
        found[int(match[1])] = cpus & online
        named |= cpus - online
    announced = _single(source, by_name, "NUMA node(s)")
    count = _count(source, announced)
    if announced is not None and count is not None and count != len(found):
        raise source.wrong(
            announced.line, f"{count} NUMA nodes are announced, {len(found)} are listed"
        )
    if named:
        kind = "off-line" if named <= offline else "not on-line"
        notes.append(
            Note(
                code="node-names-offline-cpus",
                severity=Severity.INFO,
                text=f"the node lists name CPUs that are {kind}: {named}",
            )
        )
    return tuple(NumaNode(id=i, cpus=found[i]) for i in sorted(found))


def _unanimous(by_name: Mapping[str, list[Field]], name: str) -> int | None:
    """Return a count that every block of a hybrid machine agrees on."""
    matches = [_COUNT.match(f.value) for f in by_name.get(name, [])]
    values = {int(m[1]) if m else None for m in matches}
    value = values.pop() if len(values) == 1 else None
    return value or None


def _threads(
    by_name: Mapping[str, list[Field]], online: CpuSet, sockets: int | None, notes: list[Note]
) -> int | None:
    """Return the threads per core, where the counts agree with the CPUs that are on-line."""
    threads = _unanimous(by_name, "Thread(s) per core")
    if threads is None:
        return None
    cores = _unanimous(by_name, "Core(s) per socket")
    several = len(by_name["Thread(s) per core"]) > 1
    doubt = None
    if threads > _MOST_THREADS:
        doubt = f"{threads} threads per core are printed, more than any processor has"
    elif len(online) % threads:
        doubt = f"{threads} threads per core are printed for {len(online)} on-line CPUs"
    elif sockets and cores and not several and sockets * cores * threads != len(online):
        doubt = (
            f"{sockets} sockets of {cores} cores of {threads} threads are printed, "
            f"{len(online)} CPUs are on-line"
        )
    if doubt is None:
        return threads
    notes.append(Note(code="threads-unknown", severity=Severity.WARNING, text=doubt))
    return None


def _cores(
    online: CpuSet,
    nodes: tuple[NumaNode, ...],
    packages: tuple[Package, ...],
    threads: int | None,
) -> tuple[Core, ...]:
    """Return the cores where only one answer is possible: no SMT, or one core in all."""
    if threads is None or (threads != 1 and threads != len(online)):
        return ()
    homes: dict[int, list[int]] = {}
    for node in nodes:
        for cpu in node.cpus:
            homes.setdefault(cpu, []).append(node.id)
    groups = [online] if threads == len(online) else [CpuSet([cpu]) for cpu in online]
    package = packages[0].id if len(packages) == 1 and packages[0].cpus_known else None
    cores: list[Core] = []
    for cpus in groups:
        home = {tuple(homes.get(cpu, ())) for cpu in cpus}
        only = home.pop() if len(home) == 1 else ()
        node_id = only[0] if len(only) == 1 else None
        cores.append(Core(id=cpus.first, cpus=cpus, node=node_id, package=package))
    return tuple(cores)


def _avx512(by_name: Mapping[str, list[Field]]) -> bool | None:
    """Look for the flag; flags that were cut short ("fpu vme ...") deny nothing."""
    words = (_text(by_name, "Flags") or "").split()
    if "avx512f" in words:
        return True
    cut = not words or any(set(word) <= set(".…[]") for word in words) or len(words) < 10
    return None if cut else False
