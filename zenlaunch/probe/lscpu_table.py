"""The tables of `lscpu -e`, `lscpu -p` and `lscpu -e -J` become a Topology: a row is a CPU.

Owns both forms with any choice of columns. A column that is not there is not known; the numbers of
cores, sockets and caches are lscpu's own, and only say which CPUs belong together. Nodes without
CPUs, memory and names of the hardware are not in these tables.
Follows lscpu(1) ("--extended", "--parse") and sys-utils/lscpu.c.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from zenlaunch.cpuset import MAX_ID, CpuSet
from zenlaunch.probe.remarks import remarks
from zenlaunch.probe.source import Source
from zenlaunch.topology import (
    L3,
    Core,
    Machine,
    Note,
    NumaNode,
    Package,
    Severity,
    Topology,
    group_by,
)

PARSE_LINES = re.compile(r"^#[ \t]*CPU(,[\w() ]*)*[ \t]*$", re.MULTILINE | re.IGNORECASE)
_COLUMNS = "NODE|SOCKET|CORE|CLUSTER|BOOK|DRAWER|ONLINE|CONFIGURED|POLARIZATION|ADDRESS|L1D|L1D:L1I"
EXTENDED_LINES = re.compile(rf"^[ \t]*CPU[ \t]+({_COLUMNS})\b.*$", re.MULTILINE)
_ONLINE = {"yes": True, "y": True, "no": False, "n": False, "true": True, "false": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """One CPU; None where the table does not say."""

    line: int
    cpu: int
    online: bool | None
    node: int | None
    socket: int | None
    core: int | None
    l2: int | None
    l3: int | None


def read_parse(source: Source) -> Topology:
    """Read the output of `lscpu -p`; raises TopologyError with the line that is wrong."""
    header: list[str] | None = None
    rows: list[_Row] = []
    for number, line in enumerate(source.lines, 1):
        text = line.strip()
        if PARSE_LINES.match(text):
            names = [name.strip().upper() for name in text[1:].split(",")]
            if header not in (None, names):
                raise source.wrong(number, "a second table with other columns begins here")
            header = names
        elif header is not None and text and not text.startswith("#"):
            cells = [cell.strip() for cell in text.split(",")]
            rows.append(_row(source, number, _parse_cells(source, number, header, cells)))
    return _topology(source, rows, header or [], origin="lscpu-parse")


def read_extended(source: Source) -> Topology:
    """Read the output of `lscpu -e`; raises TopologyError with the line that is wrong."""
    header: list[str] | None = None
    rows: list[_Row] = []
    for number, line in enumerate(source.lines, 1):
        words = line.split()
        if EXTENDED_LINES.match(line):
            names = [word.upper() for word in words]
            if header not in (None, names):
                raise source.wrong(number, "a second table with other columns begins here")
            header = names
        elif header is not None and words:
            if len(words) != len(header):
                raise source.wrong(number, f"{len(words)} cells for {len(header)} columns")
            rows.append(_row(source, number, dict(zip(header, words, strict=True))))
    return _topology(source, rows, header or [], origin="lscpu-extended")


def read_extended_json(source: Source, data: Any) -> Topology:
    """Read the parsed output of `lscpu -e -J`."""
    items = data.get("cpus") if isinstance(data, dict) else None
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise source.wrong(1, 'not what lscpu -e -J prints: "cpus" is not a list of CPUs')
    rows = [
        _row(source, 1, {str(k).upper(): "-" if v is None else str(v) for k, v in item.items()})
        for item in items
    ]
    columns = list(dict.fromkeys(str(key).upper() for item in items for key in item))
    return _topology(source, rows, columns, origin="lscpu-extended")


def _parse_cells(
    source: Source, number: int, header: list[str], cells: list[str]
) -> dict[str, str]:
    if len(cells) > len(header):
        raise source.wrong(number, f"{len(cells)} cells for {len(header)} columns")
    if len(cells) < len(header):
        # lscpu leaves out the caches that a CPU lacks, and the rest move up: which ones they are
        # cannot be told. The columns before the empty one are always there.
        fixed = header.index("") if "" in header else len(header)
        if len(cells) < fixed:
            raise source.wrong(number, f"{len(cells)} cells for {len(header)} columns")
        return dict(zip(header[:fixed], cells, strict=False))
    return dict(zip(header, cells, strict=True))


def _row(source: Source, number: int, cells: Mapping[str, str]) -> _Row:
    cpu = _number(source, number, "CPU", cells.get("CPU"))
    if cpu is None:
        raise source.wrong(number, "a row without the number of its CPU")
    online = cells.get("ONLINE", "-").lower()
    if online not in (*_ONLINE, "-", ""):
        raise source.wrong(number, f"ONLINE is {online!r}, not yes or no")
    return _Row(
        line=number,
        cpu=cpu,
        online=_ONLINE.get(online),
        node=_number(source, number, "NODE", cells.get("NODE")),
        socket=_number(source, number, "SOCKET", cells.get("SOCKET")),
        core=_number(source, number, "CORE", cells.get("CORE")),
        l2=_cache(source, number, cells, "L2"),
        l3=_cache(source, number, cells, "L3"),
    )


def _number(source: Source, number: int, name: str, text: str | None) -> int | None:
    if text is None or text in ("", "-"):
        return None
    if not re.fullmatch(r"[0-9]{1,6}", text) or (name in ("CPU", "NODE") and int(text) > MAX_ID):
        raise source.wrong(number, f"{name} is {text[:20]!r}, not a number")
    return int(text)


def _cache(source: Source, number: int, cells: Mapping[str, str], level: str) -> int | None:
    """Return the number of a CPU's cache, from a column of its own or from "L1d:L1i:L2:L3"."""
    for name, text in cells.items():
        levels = [part.upper() for part in name.split(":")]
        if level not in levels or text in ("", "-"):
            continue
        parts = text.split(":")
        if len(parts) != len(levels):
            return None  # caches are missing, and it cannot be told which
        return _number(source, number, level, parts[levels.index(level)])
    return None


def _topology(source: Source, rows: list[_Row], columns: list[str], *, origin: str) -> Topology:
    last = len(source.lines)
    if not rows:
        raise source.wrong(last, "the table has no rows")
    seen: dict[int, int] = {}
    for row in rows:
        if row.cpu in seen:
            raise source.wrong(row.line, f"CPU {row.cpu} is in line {seen[row.cpu]} already")
        seen[row.cpu] = row.line
    up = [row for row in rows if row.online is not False]
    if not up:
        raise source.wrong(last, "no CPU of the table is on-line")
    down = CpuSet(row.cpu for row in rows if row.online is False)
    notes = _missing_columns(columns)
    cores = _cores(up, notes)
    # Where lscpu numbers the cores of each type from 0, it numbers the sockets so as well.
    per_type = any(note.code == "cores-per-type" for note in notes)
    packages = group_by((r.socket, r.cpu) for r in up if r.socket is not None and not per_type)
    nodes = group_by((r.node, r.cpu) for r in up if r.node is not None)
    l3 = _domains(up, notes)
    l3_index = {cpu: i for i, cpus in enumerate(l3) for cpu in cpus}
    by_cpu = {row.cpu: row for row in up}
    topology = Topology(
        origin=origin,
        machine=Machine(),
        online=CpuSet(by_cpu),
        # Without rows of offline CPUs nothing tells whether there are any (lscpu -e -b, lscpu -p).
        offline=down or None,
        packages=tuple(Package(id=i, cpus=cpus) for i, cpus in packages.items()),
        nodes=tuple(
            NumaNode(
                id=i,
                cpus=cpus,
                package=_same({by_cpu[c].socket for c in cpus}) if packages else None,
            )
            for i, cpus in nodes.items()
        ),
        l3=tuple(L3(cpus=cpus) for cpus in l3),
        l3_known=bool(l3),
        cores=tuple(
            Core(
                id=cpus.first,
                cpus=cpus,
                l3=_same({l3_index.get(c) for c in cpus}),
                node=by_cpu[cpus.first].node,
                package=by_cpu[cpus.first].socket if packages else None,
            )
            for cpus in cores
        ),
        threads_per_core=_same({len(cpus) for cpus in cores}),
    )
    return replace(topology, notes=(*notes, *remarks(topology, virtual=False)))


def _missing_columns(columns: list[str]) -> list[Note]:
    lacking = [name for name in ("NODE", "SOCKET", "CORE") if name not in columns]
    if not lacking:
        return []
    return [_note("columns-missing", f"the table has no column {', '.join(lacking)}: not known")]


def _cores(up: list[_Row], notes: list[Note]) -> list[CpuSet]:
    """Group the CPUs by core; [] where the table does not tell.

    With -y the numbers are the kernel's, which repeat in every socket (and node, on Opterons).
    """
    if any(row.core is None for row in up):
        if any(row.core is not None for row in up):
            notes.append(_note("siblings-unknown", "the table does not give every CPU its core"))
        return []
    groups: dict[tuple[int | None, ...], list[_Row]] = {}
    for row in up:
        groups.setdefault((row.socket, row.node, row.core), []).append(row)
    # The siblings of a core share its L2, but for the large cores of some POWER.
    apart = [g for g in groups.values() if len({row.l2 for row in g} - {None}) > 1]
    if apart:
        cpus = CpuSet(row.cpu for row in apart[0])
        notes.append(
            _note(
                "cores-per-type",
                f"CPUs {cpus} have one core number and different L2 caches, as where lscpu counts "
                "the cores of each type from 0: cores and sockets are not known",
            )
        )
        return []
    return sorted((CpuSet(r.cpu for r in g) for g in groups.values()), key=lambda s: s.first)


def _domains(up: list[_Row], notes: list[Note]) -> list[CpuSet]:
    """Group the CPUs by L3; [] unless every CPU has one, since a domain could else lack some."""
    silent = CpuSet(row.cpu for row in up if row.l3 is None)
    if silent and len(silent) < len(up):
        notes.append(_note("l3-unknown", f"the table does not give the L3 of CPUs {silent}"))
    if silent:
        return []
    groups: dict[tuple[int | None, int | None], list[int]] = {}
    for row in up:
        groups.setdefault((row.socket, row.l3), []).append(row.cpu)
    return sorted((CpuSet(cpus) for cpus in groups.values()), key=lambda s: s.first)


def _note(code: str, text: str) -> Note:
    return Note(code=code, severity=Severity.WARNING, text=text)


def _same(values: set[int | None] | set[int]) -> int | None:
    return next(iter(values)) if len(values) == 1 else None
