"""The text of `numactl -H` becomes a Topology: nodes, memory and distances, nothing else.

Owns that format of numactl 0.9 to 2.0.19, lists wrapped over lines and the kernel's ranges
included. Does not know packages, cores or caches: numactl shows none, so they are unknown.
Follows numactl(8) and show_distances/hardware of numactl.c.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from zenlaunch.cpuset import EMPTY, MAX_ID, CpuSet, union
from zenlaunch.errors import TopologyError
from zenlaunch.probe.remarks import remarks
from zenlaunch.probe.source import Source
from zenlaunch.topology import Machine, Note, NumaNode, Severity, Topology

_AVAILABLE = re.compile(r"\s*available: (\d{1,5}) nodes?(?: \(([^)]*)\))?\s*$")
_NODE = re.compile(r"\s*node (\d{1,5}) (cpus|size|free):(.*)$")
_SIZE = re.compile(r"(\d{1,12}) MB$")
_NUMBERS = re.compile(r"[\d\s,-]*$")
_HEADER = re.compile(r"\s*node((?:\s+\d{1,5})+)\s*$")
_ROW = re.compile(r"\s*(\d{1,5}):((?:\s+\d{1,5})*)\s*$")
LINES = re.compile(r"^\s*(available: \d+ nodes?\b|node \d+ (cpus|size):)", re.MULTILINE)


@dataclass(slots=True)
class _Found:
    """What was read so far; the numbers are lines, for messages."""

    available: tuple[int, int, CpuSet | None] | None = None
    cpus: dict[int, tuple[int, CpuSet]] = field(default_factory=dict)
    sizes: dict[int, tuple[int, int | None]] = field(default_factory=dict)
    columns: tuple[int, list[int]] | None = None
    rows: dict[int, tuple[int, list[int]]] = field(default_factory=dict)


def read_numactl(source: Source) -> Topology:
    """Read the output of `numactl -H`; raises TopologyError with the line that is wrong."""
    found = _scan(source)
    ids = sorted(found.sizes.keys() | found.cpus.keys())
    last = len(source.lines)
    if not ids:
        raise source.wrong(last, "the text ends without a line `node N cpus:` or `node N size:`")
    _check_count(source, found, ids)
    if found.cpus and found.cpus.keys() != set(ids):
        lacking = min(set(ids) - found.cpus.keys())
        raise source.wrong(
            found.sizes[lacking][0], f"node {lacking} has no line `node {lacking} cpus:`"
        )
    known = bool(found.cpus)
    notes: list[Note] = []
    if not known:
        notes.append(
            Note(
                code="cpus-unknown",
                severity=Severity.WARNING,
                text="the text has no lines `node N cpus:` (an old numactl): no CPU is known",
            )
        )
    if found.available is None:
        notes.append(
            Note(
                code="text-incomplete",
                severity=Severity.WARNING,
                text="the text has no line `available: N nodes`: nodes may be missing",
            )
        )
    topology = Topology(
        origin="numactl",
        machine=Machine(),
        online=union(cpus for _, cpus in found.cpus.values()),
        online_known=known,
        nodes=tuple(
            NumaNode(
                id=i,
                cpus=found.cpus[i][1] if known else EMPTY,
                cpus_known=known,
                memory_bytes=found.sizes[i][1] if i in found.sizes else None,
                distances=dict(zip(found.columns[1], found.rows[i][1], strict=True))
                if found.columns and i in found.rows
                else {},
            )
            for i in ids
        ),
        l3_known=False,
    )
    if known and not topology.online:
        raise source.wrong(min(n for n, _ in found.cpus.values()), "no node has a CPU")
    return replace(topology, notes=(*notes, *remarks(topology, virtual=False)))


def _scan(source: Source) -> _Found:
    found = _Found()
    open_list: int | None = None  # the node whose CPU list may go on in the next line
    for number, line in enumerate(source.lines, 1):
        if open_list is not None and line.strip() and _NUMBERS.match(line):
            start, cpus = found.cpus[open_list]
            found.cpus[open_list] = (start, cpus | _cpus(source, number, line))
            continue
        open_list = None
        if match := _AVAILABLE.match(line):
            if found.available is not None:
                raise source.wrong(number, "a second machine begins here")
            listed = source.cpus(number, match[2]) if match[2] else None
            found.available = (number, int(match[1]), listed)
        elif match := _NODE.match(line):
            node, rest = int(match[1]), match[3].strip()
            if match[2] == "cpus":
                if node in found.cpus:
                    raise source.wrong(number, f"the CPUs of node {node} are listed twice")
                found.cpus[node] = (number, _cpus(source, number, rest))
                open_list = node
            elif match[2] == "size":
                if node in found.sizes:
                    raise source.wrong(number, f"the size of node {node} is given twice")
                found.sizes[node] = (number, _size(source, number, rest))
        else:
            _scan_distances(source, number, line, found)
    return found


def _cpus(source: Source, number: int, text: str) -> CpuSet:
    """Read "0 1 2" or "0-2,8": numactl prints the first, people and newer tools the second."""
    if not _NUMBERS.match(text):
        raise source.wrong(number, "not a list of CPU numbers")
    found = EMPTY
    for word in text.split():
        more = source.cpus(number, word.strip(","))
        if not more.isdisjoint(found):
            raise source.wrong(number, f"CPU {(more & found).first} is listed twice")
        found |= more
    return found


def _size(source: Source, number: int, text: str) -> int | None:
    if text == "<not available>":
        return None
    match = _SIZE.match(text)
    if match is None:
        raise source.wrong(number, "not a size in MB")
    return int(match[1]) << 20


def _scan_distances(source: Source, number: int, line: str, found: _Found) -> None:
    if match := _HEADER.match(line):
        if found.columns is not None:
            raise source.wrong(number, "a second table of distances begins here")
        found.columns = (number, [int(word) for word in match[1].split()])
    elif found.columns is not None and (match := _ROW.match(line)):
        node, row = int(match[1]), [int(word) for word in match[2].split()]
        if node in found.rows:
            raise source.wrong(number, f"the distances of node {node} are given twice")
        if len(row) != len(found.columns[1]):
            raise source.wrong(
                number, f"{len(row)} distances for the {len(found.columns[1])} nodes of the table"
            )
        found.rows[node] = (number, row)
    elif re.match(r"\s*(node \d+|available)\b", line):
        raise source.wrong(number, "not a line that numactl -H prints")


def _check_count(source: Source, found: _Found, ids: list[int]) -> None:
    """Compare the nodes with the numbers that the text itself gives."""
    if ids[-1] > MAX_ID:
        raise TopologyError(f"{source.name}: node {ids[-1]} is beyond any machine")
    if found.available is not None:
        number, count, listed = found.available
        if count != len(ids):
            raise source.wrong(number, f"{count} nodes are announced, {len(ids)} are described")
        if listed is not None and set(listed) != set(ids):
            raise source.wrong(number, f"nodes {listed} are announced, {CpuSet(ids)} are described")
    if found.columns is not None:
        number, columns = found.columns
        if sorted(columns) != ids:
            raise source.wrong(
                number, f"the table of distances is not about the nodes {CpuSet(ids)}"
            )
        if found.rows.keys() != set(ids):
            raise source.wrong(
                number, f"the table of distances has {len(found.rows)} rows for {len(ids)} nodes"
            )
