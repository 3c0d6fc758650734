"""Golden plans: each file of tests/cases is a machine, a command and what must come out."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import Result

CASES = sorted((Path(__file__).parent / "cases").rglob("*.yaml"))
UPDATE = bool(os.environ.get("ZENLAUNCH_UPDATE_CASES"))


class _Literal(str):
    """Text that is written as a block."""


yaml.SafeDumper.add_representer(
    _Literal, lambda d, text: d.represent_scalar("tag:yaml.org,2002:str", text, style="|")
)


@pytest.mark.parametrize("path", CASES, ids=lambda p: p.stem)
def test_case(path: Path, zenlaunch: Callable[..., Result], trees: Callable[[str], Path]) -> None:
    case = yaml.safe_load(path.read_text())
    tree = trees(case["machine"])
    shows = case["shows"]
    args = ["plan", *map(str, case["args"])]
    at = args.index("--") if "--" in args else len(args)
    args[at:at] = ["--sysroot", str(tree), *(["--json"] if shows != "screen" else [])]
    result = zenlaunch(*args)
    if result.status:
        output = result.err.replace(str(tree), "SYSROOT")
    else:
        output = {"screen": str, "launch": show_launch, "sets": show_sets}[shows](result.out)
    output = "\n".join(line.rstrip() for line in output.splitlines()) + "\n"
    if UPDATE:
        case |= {"status": result.status, "output": _Literal(output)}
        path.write_text(yaml.safe_dump(case, sort_keys=False, width=100, allow_unicode=True))
    assert result.status == case["status"], result.err
    assert output == case["output"]


def show_launch(text: str) -> str:
    """Print argv and environment of the first and the last instance, then the notes."""
    plan = json.loads(text)
    lines = []
    for instance in (plan["instances"][0], plan["instances"][-1]):
        lines.append(f"{instance['name']}:")
        lines += [f"  {k}={v}" for k, v in instance["env"].items()]
        lines += [f"  {word}" for word in instance["argv"]]
    return "\n".join(lines + notes_of(plan))


def show_sets(text: str) -> str:
    """Print who got which CPUs and which memory."""
    plan = json.loads(text)
    lines = [
        f"{i['name']}: cpus {i['cpus']} reserved {i['reserved_cpus'] or '-'} node {i['node']} "
        f"memory {i['mem_nodes'] or '-'} kv {i['memory']['kv_bytes']}"
        for i in plan["instances"]
    ]
    lines.append(f"proxy: {plan['proxy']['cpus'] or '-'}")
    lines.append(f"spare: {plan['spare_cpus'] or '-'}")
    return "\n".join(lines + notes_of(plan))


def notes_of(plan: dict[str, Any]) -> list[str]:
    return [f"{n['severity']} {n['code']}: {n['text']}" for n in plan["notes"]]
