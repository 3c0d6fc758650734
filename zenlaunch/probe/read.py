"""A text becomes a Topology: what `zenlaunch probe --from` and `plan --machine` take.

Owns recognising what a text is, by its content and never by its name. Does not read files: the
caller hands the text in.
"""

from __future__ import annotations

import json
from typing import Any

from zenlaunch.errors import TopologyError
from zenlaunch.probe import collect_env, lscpu, lscpu_table, numactl
from zenlaunch.probe.source import Source, make_source
from zenlaunch.saved import parse_json
from zenlaunch.topology import Topology

_HINT = (
    "zenlaunch reads the output of lscpu, lscpu -J, lscpu -e, lscpu -p, numactl -H, vLLM's "
    "collect_env, or `zenlaunch probe --json`"
)


def read_source(text: str, *, source: str) -> Topology:
    """Read a machine from the text of any known program; `source` names it in messages.

    Raises TopologyError, with the line where there is one, for a text that is of no known kind,
    that cannot be read, or that contradicts itself.
    """
    text = text.removeprefix("\ufeff").replace("\r\n", "\n")
    lines = make_source(text, name=source)
    if text.lstrip()[:1] in ("{", "["):
        return _read_json(text, lines)
    found = [kind for kind, mark in _MARKS if mark.search(text)]
    if "collect-env" in found and "lscpu" in found:
        found = ["collect-env"]  # it embeds lscpu
    if not found:
        first = next(n for n, line in enumerate(lines.lines, 1) if line.strip())
        raise lines.wrong(first, "not a text that describes a machine", hint=_HINT)
    if len(found) > 1:
        raise TopologyError(
            f"{lines.name}: the outputs of several programs in one text: {', '.join(found)}",
            hint="give one of them; `lscpu -p` says most, numactl -H alone knows the memory",
        )
    return _READERS[found[0]](lines)


# What a line must look like for its text to be of a kind.
_MARKS = (
    ("numactl", numactl.LINES),
    ("lscpu-parse", lscpu_table.PARSE_LINES),
    ("lscpu-extended", lscpu_table.EXTENDED_LINES),
    ("collect-env", collect_env.MARKS),
    ("lscpu", lscpu.LINES),
)
_READERS = {
    "numactl": numactl.read_numactl,
    "lscpu-parse": lscpu_table.read_parse,
    "lscpu-extended": lscpu_table.read_extended,
    "collect-env": collect_env.read_collect_env,
    "lscpu": lscpu.read_lscpu,
}


def _read_json(text: str, lines: Source) -> Topology:
    try:
        data: Any = parse_json(text)
    except json.JSONDecodeError as e:
        raise lines.wrong(e.lineno, f"not JSON: {e.msg} (column {e.colno})", hint=_HINT) from None
    except (RecursionError, ValueError) as e:  # nested or a number without end; a key twice
        raise lines.wrong(1, f"not JSON that a probe or lscpu prints: {e}", hint=_HINT) from None
    if isinstance(data, dict) and "schema" in data:
        return Topology.from_dict(data, source=lines.name)
    if isinstance(data, dict) and "lscpu" in data:
        return lscpu.read_lscpu_json(lines, data)
    if isinstance(data, dict) and "cpus" in data:
        return lscpu_table.read_extended_json(lines, data)
    raise lines.wrong(1, "JSON, but neither a saved probe nor what lscpu -J prints", hint=_HINT)
