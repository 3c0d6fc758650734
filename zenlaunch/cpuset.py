"""CpuSet: an immutable set of CPU (or NUMA node) numbers, in the kernel's own spellings.

Owns parsing and printing of the list format ("0-3,8", also strides: "0-30:2/4") and of hex masks
("ff,ffffffff"), and set algebra. Does not know what a CPU is or which of them exist.
Follows Documentation/admin-guide/kernel-parameters.rst ("cpu lists") and lib/bitmap.c of Linux.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

# Far above any machine (the largest known has 1,920 CPUs; the kernel's own limit is 8,192), low
# enough that a damaged file with "0-4000000000" is an error and not a gigabyte of zeros.
MAX_ID = 65_535

_ID = "([0-9]{1,9})"
_RANGE = re.compile(f"{_ID}(?:-{_ID}(?::{_ID}/{_ID})?)?")


class CpuSet:
    """A frozen, hashable set of small non-negative integers kept as one bit mask."""

    __slots__ = ("_bits",)
    _bits: int

    def __init__(self, ids: Iterable[int] = ()) -> None:
        bits = 0
        for i in ids:
            if not 0 <= i <= MAX_ID:
                raise ValueError(f"id {i} is outside 0-{MAX_ID}")
            bits |= 1 << i
        object.__setattr__(self, "_bits", bits)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("CpuSet is immutable")

    @classmethod
    def from_bits(cls, bits: int) -> CpuSet:
        """Make a set from a mask whose bit i stands for id i."""
        if bits < 0 or bits.bit_length() > MAX_ID + 1:
            raise ValueError(f"mask has ids outside 0-{MAX_ID}")
        new = cls()
        object.__setattr__(new, "_bits", bits)
        return new

    @classmethod
    def parse(cls, text: str) -> CpuSet:
        """Read the kernel's list format; blanks and a trailing newline are allowed.

        Raises ValueError that names the element which cannot be read.
        """
        bits = 0
        stripped = text.strip()
        if not stripped:
            return cls()
        for part in stripped.split(","):
            element = part.strip()
            match = _RANGE.fullmatch(element)
            if match is None:
                shown = element if len(element) <= 40 else element[:37] + "..."
                raise ValueError(f"{shown!r} is not a CPU number or range such as 0-3")
            first = int(match[1])
            last = int(match[2]) if match[2] is not None else first
            if last < first:
                raise ValueError(f"range {element!r} ends before it begins")
            if last > MAX_ID:
                raise ValueError(f"{element!r} is outside 0-{MAX_ID}")
            if match[3] is None:
                bits |= ((1 << (last - first + 1)) - 1) << first
                continue
            used, group = int(match[3]), int(match[4])
            if not 0 < used <= group:
                raise ValueError(f"stride {element!r} must be used/group with 0 < used <= group")
            for start in range(first, last + 1, group):
                for i in range(start, min(start + used, last + 1)):
                    bits |= 1 << i
        return cls.from_bits(bits)

    @classmethod
    def parse_mask(cls, text: str) -> CpuSet:
        """Read a hex mask of 32-bit words, most significant first: "ff,ffffffff" or "0xff"."""
        words = text.strip().split(",")
        bits = 0
        for word in words:
            digits = word.strip().removeprefix("0x")
            if not re.fullmatch(r"[0-9a-fA-F]+", digits):
                raise ValueError(f"{text.strip()!r} is not a hex CPU mask")
            if len(words) > 1 and len(digits) > 8:
                raise ValueError(f"{word.strip()!r} is longer than one 32-bit word")
            bits = (bits << 32) | int(digits, 16) if len(words) > 1 else int(digits, 16)
        return cls.from_bits(bits)

    @property
    def bits(self) -> int:
        return self._bits

    def __iter__(self) -> Iterator[int]:
        bits = self._bits
        while bits:
            low = bits & -bits
            yield low.bit_length() - 1
            bits ^= low

    def __len__(self) -> int:
        return self._bits.bit_count()

    def __bool__(self) -> bool:
        return self._bits != 0

    def __contains__(self, i: object) -> bool:
        return isinstance(i, int) and i >= 0 and bool(self._bits >> i & 1)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CpuSet) and self._bits == other._bits

    def __hash__(self) -> int:
        return hash(self._bits)

    def __or__(self, other: CpuSet) -> CpuSet:
        return CpuSet.from_bits(self._bits | other._bits)

    def __and__(self, other: CpuSet) -> CpuSet:
        return CpuSet.from_bits(self._bits & other._bits)

    def __sub__(self, other: CpuSet) -> CpuSet:
        return CpuSet.from_bits(self._bits & ~other._bits)

    def __le__(self, other: CpuSet) -> bool:
        """Say whether every id of this set is in the other one."""
        return not self._bits & ~other._bits

    def isdisjoint(self, other: CpuSet) -> bool:
        return not self._bits & other._bits

    @property
    def first(self) -> int:
        """Return the lowest id; raises ValueError for the empty set."""
        if not self._bits:
            raise ValueError("the empty set has no first id")
        return (self._bits & -self._bits).bit_length() - 1

    @property
    def last(self) -> int:
        """Return the highest id; raises ValueError for the empty set."""
        if not self._bits:
            raise ValueError("the empty set has no last id")
        return self._bits.bit_length() - 1

    def __str__(self) -> str:
        """Print in the kernel's list format: "0-3,8"; "" for the empty set."""
        parts: list[str] = []
        bits, base = self._bits, 0
        while bits:
            skip = (bits & -bits).bit_length() - 1
            bits >>= skip
            base += skip
            run = (~bits & (bits + 1)).bit_length() - 1
            parts.append(str(base) if run == 1 else f"{base}-{base + run - 1}")
            bits >>= run
            base += run
        return ",".join(parts)

    def to_commas(self) -> str:
        """Print every id, "0,2,4": for programs that know no strides and to be read by people."""
        return ",".join(map(str, self))

    def __repr__(self) -> str:
        return f"CpuSet({str(self)!r})"


EMPTY = CpuSet()


def union(sets: Iterable[CpuSet]) -> CpuSet:
    """Return the union of any number of sets."""
    bits = 0
    for s in sets:
        bits |= s.bits
    return CpuSet.from_bits(bits)
