"""Tree: the files of one filesystem root, read once each and never trusted.

Owns opening, decoding and parsing of single sysfs and procfs files, and the error that names a file
which cannot be read as what it should be. Does not know what the files mean (that is `sysfs`,
`nodes`, `cgroup`). An absent file is None, an empty one "": the readers decide what that says.
Follows Documentation/ABI/stable/sysfs-devices-system-cpu and Documentation/admin-guide/cputopology.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from zenlaunch.cpuset import CpuSet
from zenlaunch.errors import TopologyError

# sysfs files are at most a page or two; /proc/cpuinfo of 2,000 CPUs is 4 MiB. Anything beyond is a
# damaged dump (or a link to a device), and reading on would only fill the memory.
LIMIT = 16 << 20
_CHUNK = 1 << 16
_PAGE = 1 << 12
# O_NONBLOCK: a FIFO in a damaged dump must not hang the reader.
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
_NUMBER = re.compile(r"[+-]?\d{1,19}")
# What old kernels print for a list that was never set (isolated, nohz_full).
_UNSET = "(null)"
# Some kernels end a node's files with a NUL after the newline.
_BLANKS = " \t\r\n\v\f\0"


class Differing(NamedTuple):
    """Two files of one folder that should show the same set; the first one was used."""

    used: str
    cpus: CpuSet
    other: str
    others: CpuSet


class Tree:
    """Read files below one root; paths are relative ("sys/devices/system/cpu/online").

    `str` paths and os.open are used on purpose: a 512-CPU machine has some 3,000 files to read
    before the user sees anything.
    """

    def __init__(self, root: Path, *, compare: bool = False) -> None:
        self.root = str(root).rstrip("/")
        self.compare = compare
        self.denied: list[str] = []
        self.differing: list[Differing] = []
        self._lists: dict[str, CpuSet] = {}
        self._masks: dict[str, CpuSet] = {}
        self._usual: dict[tuple[str, ...], str] = {}
        self._others: dict[tuple[str, ...], list[str]] = {}

    def path(self, rel: str) -> str:
        """Return the full path of a file, for messages."""
        return f"{self.root}/{rel}"

    def raw(self, rel: str, *, limit: int = LIMIT) -> bytes | None:
        """Return at most `limit` bytes of a file; None where it is absent or no plain file."""
        try:
            fd = os.open(f"{self.root}/{rel}", _FLAGS)
        except PermissionError:
            self.denied.append(rel)
            return None
        except (OSError, ValueError):  # absent, a broken link, a NUL in a damaged path
            return None
        try:
            data = os.read(fd, min(limit, _CHUNK))
            if len(data) >= _PAGE:  # procfs and sysfs hand out a page at a time
                parts, left = [data], limit - len(data)
                while left > 0 and (more := os.read(fd, min(left, _CHUNK))):
                    parts.append(more)
                    left -= len(more)
                data = b"".join(parts)
        except OSError:  # a directory; EINVAL, EIO and ENXIO of drivers that have nothing to say
            return None
        finally:
            os.close(fd)
        return data

    def text(self, rel: str, *, limit: int = LIMIT) -> str | None:
        """Return at most `limit` bytes of a file without outer blanks; None where it is absent."""
        data = self.raw(rel, limit=limit)
        return None if data is None else data.decode("utf-8", "replace").strip(_BLANKS)

    def names(self, rel: str) -> list[str]:
        """Return the sorted names in a folder; [] where it is absent."""
        try:
            return sorted(os.listdir(f"{self.root}/{rel}"))  # noqa: PTH208 - str paths, see above
        except PermissionError:
            self.denied.append(rel)
            return []
        except (OSError, ValueError):
            return []

    def numbered(self, rel: str, prefix: str) -> list[int]:
        """Return the numbers N, ascending, of the entries called PREFIX + N in a folder."""
        found = (name.removeprefix(prefix) for name in self.names(rel) if name.startswith(prefix))
        return sorted({int(n) for n in found if n.isascii() and n.isdigit() and len(n) < 7})

    def number(self, rel: str) -> int | None:
        """Return the integer in a file; None where it is absent or empty."""
        text = self.text(rel)
        if not text:
            return None
        if _NUMBER.fullmatch(text) is None:
            raise self.damaged(rel, text, "is not a number")
        return int(text)

    def cpulist(self, rel: str) -> CpuSet | None:
        """Return the list ("0-3,8") in a file; None where it is absent, empty where it is empty."""
        text = self.text(rel)
        return None if text is None else self._parse_list(rel, text)

    def cpumask(self, rel: str) -> CpuSet | None:
        """Return the hex mask in a file; None where it is absent or empty."""
        text = self.text(rel)
        return None if not text else self._parse_mask(rel, text)

    def cpus(self, folder: str, *names: str) -> CpuSet | None:
        """Return the first of several spellings of one set that has content in a folder.

        Names ending in "list" are lists, the others masks. The spelling that was found last time
        is tried first: kernels differ in names, the CPUs of one machine do not. With `compare` the
        others are read too, and those that differ are kept in `differing`: a kernel cannot write
        both, a dump that was edited can hold both.
        """
        usual = self._usual.get(names)
        for name in names if usual is None else (usual, *names):
            text = self.text(folder + name)
            if text:
                self._usual[names] = name
                found = self._parse(folder + name, text)
                if self.compare:
                    self._compare(folder, name, found, names)
                return found
        return None

    def _compare(self, folder: str, used: str, found: CpuSet, names: tuple[str, ...]) -> None:
        # Which other spellings a dump has is learnt from its first CPU.
        others = self._others.get(names)
        if others is None:
            others = [n for n in names if n != used and self.text(folder + n)]
            self._others[names] = others
        for name in others:
            text = self.text(folder + name) if name != used else None
            if text and (other := self._parse(folder + name, text)) != found:
                self.differing.append(Differing(folder + used, found, folder + name, other))

    def damaged(self, rel: str, text: str, why: str) -> TopologyError:
        """Make the error for a file whose content cannot be what the kernel writes there."""
        shown = text if len(text) <= 60 else text[:57] + "..."
        return TopologyError(
            f"{self.path(rel)}: {shown!r} {why}",
            hint=(
                "unpack the dump again, or make a new one with `zenlaunch probe --save DIR`"
                if self.root
                else "the kernel shows a value that zenlaunch cannot read: "
                "send a dump, made with `zenlaunch probe --save DIR`"
            ),
        )

    def _parse(self, rel: str, text: str) -> CpuSet:
        if rel.endswith("list"):
            return self._parse_list(rel, text)
        return self._parse_mask(rel, text)

    def _parse_list(self, rel: str, text: str) -> CpuSet:
        known = self._lists.get(text)
        if known is None:
            try:
                known = CpuSet.parse("" if text == _UNSET else text)
            except ValueError as e:
                raise self.damaged(rel, text, f"is not a CPU list ({e})") from None
            self._lists[text] = known
        return known

    def _parse_mask(self, rel: str, text: str) -> CpuSet:
        known = self._masks.get(text)
        if known is None:
            try:
                known = CpuSet.parse_mask(text)
            except ValueError as e:
                raise self.damaged(rel, text, f"is not a CPU mask ({e})") from None
            self._masks[text] = known
        return known
