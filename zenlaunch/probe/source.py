"""A text that describes a machine: its name, its lines, and the error that quotes one of them.

Owns nothing of any format: `lscpu`, `lscpu_table`, `numactl` and `collect_env` read their own.
"""

from __future__ import annotations

from dataclasses import dataclass

from zenlaunch.cpuset import CpuSet
from zenlaunch.errors import TopologyError

# The output of any of these programs on the largest machine is well below one MiB.
LIMIT = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """`name` is the file for messages ("-" for stdin); `lines` have no line ends."""

    name: str
    lines: tuple[str, ...]

    def wrong(self, number: int, why: str, *, hint: str | None = None) -> TopologyError:
        """Make the error for line `number`, counted from 1."""
        line = self.lines[number - 1].strip() if 0 < number <= len(self.lines) else ""
        shown = printable(line if len(line) <= 80 else line[:77] + "...")
        return TopologyError(
            f"{self.name}, line {number}: {why}\n  {number}: {shown}",
            hint=hint or "give the program's output as it was printed, whole and unedited",
        )

    def cpus(self, number: int, text: str) -> CpuSet:
        """Read a CPU list that was found in line `number`."""
        try:
            return CpuSet.parse(text)
        except ValueError as e:
            raise self.wrong(number, f"not a CPU list ({e})") from None


def make_source(text: str, *, name: str) -> Source:
    """Split a text into lines; raises TopologyError for one that is empty or absurdly long."""
    if len(text) > LIMIT:
        raise TopologyError(f"{name}: {len(text) >> 20} MiB of text describe no machine")
    if not text.strip(" \t\r\n\0"):
        raise TopologyError(
            f"{name}: the text is empty",
            hint="give the output of lscpu, lscpu -p, numactl -H, or `zenlaunch probe --json`",
        )
    return Source(name="stdin" if name == "-" else name, lines=tuple(text.split("\n")))


def printable(text: str) -> str:
    """Return the text for a terminal: escape sequences of a damaged file do nothing there."""
    return "".join(c if c.isprintable() else "·" for c in text)
