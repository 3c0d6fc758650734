"""Saved JSON, read with suspicion: each question names the key that cannot be answered.

Owns parsing without silent choices (a key given twice is an error) and the accessors. Does not know
what is saved; `topology` asks the questions. Raises ValueError; the caller knows the file.
"""

from __future__ import annotations

import json
from collections import Counter
from enum import StrEnum
from typing import Any, TypeVar

from zenlaunch.cpuset import CpuSet
from zenlaunch.values import printable, shown

_Enum = TypeVar("_Enum", bound=StrEnum)


def parse_json(text: str | bytes) -> Any:
    """Parse JSON; raises ValueError (or RecursionError) also where an object has a key twice."""
    return json.loads(text, object_pairs_hook=_object)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        twice = counts.most_common(1)[0][0]
        readings = [value for key, value in pairs if key == twice]
        raise ValueError(
            f"the key {shown(twice)} is given twice in one object: "
            f"{shown(readings[0], 60)} and {shown(readings[1], 60)}"
        )
    return found


class Saved:
    """One object of the JSON; every question names the key in its ValueError."""

    def __init__(self, value: Any, path: str) -> None:
        if not isinstance(value, dict):
            raise ValueError(f"{path.rstrip('.') or 'the whole'} is not an object")
        self.value, self.path = value, path

    def get(self, key: str) -> Any:
        if key not in self.value:
            raise ValueError(f"the key {self.path}{key} is missing")
        return self.value[key]

    def wrong(self, key: str, why: str) -> ValueError:
        value = self.value[key]
        text = shown(value, 60)
        named = text if isinstance(value, str) else f"'{text}'"
        return ValueError(f"{self.path}{printable(key)[:60]} is {named}, {why}")

    def text(self, key: str) -> str | None:
        """Return a text that a terminal can show: control characters and the like become dots."""
        value = self.get(key)
        if value is not None and not isinstance(value, str):
            raise self.wrong(key, "not a text")
        return None if value is None else printable(value)

    def whole(self, key: str) -> int | None:
        value = self.get(key)
        if value is None or (type(value) is int and abs(value) < 1 << 63):
            return value
        raise self.wrong(key, "not a whole number")

    def id(self, key: str, *, most: int | None = None) -> int:
        """Return a number that must be there, within 0 and `most` if that is given."""
        value = self.whole(key)
        if value is None:
            raise self.wrong(key, "not a number")
        if most is not None and not 0 <= value <= most:
            raise self.wrong(key, f"outside 0-{most}")
        return value

    def cpus(self, key: str, default: str | None = None) -> CpuSet | None:
        text = default if default is not None and key not in self.value else self.text(key)
        try:
            return None if text is None else CpuSet.parse(text)
        except ValueError as e:
            raise self.wrong(key, f"not a CPU list: {e}") from None

    def all(self, key: str) -> list[Saved]:
        value = self.get(key)
        if not isinstance(value, list):
            raise self.wrong(key, "not a list")
        return [Saved(item, f"{self.path}{key}[{i}].") for i, item in enumerate(value)]

    def one_of(self, key: str, kind: type[_Enum]) -> _Enum | None:
        text = self.text(key)
        try:
            return None if text is None else kind(text)
        except ValueError:
            raise self.wrong(key, f"not one of {', '.join(kind)}") from None
