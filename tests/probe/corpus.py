"""The topology corpus beside the checkout: found, unpacked once, and its index.

It is data of other projects, so nothing of it is here; a test that needs it skips without it.
"""

from __future__ import annotations

import csv
import json
import os
import tarfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = Path(os.environ.get("ZENLAUNCH_CORPUS") or REPOSITORY.parent / "shared" / "topologies")
ABSENT = f"no topology corpus in {FOLDER} (set ZENLAUNCH_CORPUS)"
# How the index marks what cannot be read on purpose.
_REFUSALS = ("must stop", "must fail", "must refuse", "NOT parsable")


@dataclass(frozen=True)
class Entry:
    name: str
    kind: str
    trap: str
    file: str
    expected: dict[str, Any]

    @property
    def refused(self) -> bool:
        return any(words in self.trap for words in _REFUSALS)

    @property
    def text(self) -> str:
        return (FOLDER / self.file).read_text(encoding="utf-8")

    def unpack(self, folder: Path) -> Path:
        """Unpack a dump below `folder`, once; returns its root."""
        root = folder / self.name
        if not root.exists():
            with tarfile.open(FOLDER / self.file) as tar:
                tar.extractall(folder, filter="tar")
        return root


def present() -> bool:
    return (FOLDER / "INDEX.tsv").is_file()


@cache
def entries() -> tuple[Entry, ...]:
    """Return every machine that has something to read; () where the corpus is absent."""
    if not present():
        return ()
    found = []
    with (FOLDER / "INDEX.tsv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file, delimiter="\t"):
            readable = row["kind"] == "sysfs" or row["file"].endswith(".txt")
            if row["file"] and row["expected"] and readable:
                facts = json.loads((FOLDER / row["expected"]).read_text(encoding="utf-8"))
                found.append(
                    Entry(
                        name=row["name"],
                        kind=row["kind"],
                        trap=row["trap"],
                        file=row["file"],
                        expected=facts.get("expected", facts),
                    )
                )
    return tuple(found)


def dumps() -> list[Entry]:
    return [e for e in entries() if e.kind == "sysfs"]


def texts() -> list[Entry]:
    return [e for e in entries() if e.kind != "sysfs"]


def lscpu_of(entry: Entry) -> list[Path]:
    """Return what lscpu printed on a dump, in its four forms; [] for most dumps."""
    found = (FOLDER / "lscpu" / (entry.name + end) for end in (".txt", ".json", ".e.txt", ".p.txt"))
    return [path for path in found if path.is_file()]
