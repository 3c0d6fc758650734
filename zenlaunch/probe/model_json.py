"""The files of a model folder, read with suspicion: regular, whole, JSON, numbers in their limits.

Owns opening and parsing and the accessors of numbers. Does not know what a model is (`model`,
`weights`). Whatever is wrong is a PlanError that names the file and the key.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from zenlaunch.errors import PlanError
from zenlaunch.saved import parse_json
from zenlaunch.values import shown

COPY_AGAIN = "copy the file again"
# The largest index of a real model has some ten MiB.
_LONGEST = 100_000_000
# Layers, heads, tokens: nothing in a config.json comes near.
MOST = 1_000_000_000
_LARGEST_FACTOR = 1_000_000
_NO_LIMIT = int(1e30)  # how transformers writes that there is none


@contextmanager
def open_regular(file: Path) -> Iterator[tuple[BinaryIO, int]]:
    """Open a file and give it with its size; a pipe or device is refused instead of waited for.

    Raises FileNotFoundError, so that the caller can say what that means, and PlanError.
    """
    try:
        fd = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise _not_regular(file)
            with open(fd, "rb", closefd=False) as f:
                yield f, status.st_size
        finally:
            os.close(fd)
    except FileNotFoundError:
        raise
    except OSError as e:
        raise PlanError(f"{file}: {e.strerror}") from None


def size_of(file: Path) -> int:
    """Return the size of a regular file; raises PlanError for anything else."""
    try:
        status = file.stat()
    except OSError as e:
        raise PlanError(
            f"{file}: {e.strerror}", hint="a link to a file that was not downloaded?"
        ) from None
    if not stat.S_ISREG(status.st_mode):
        raise _not_regular(file)
    return status.st_size


def _not_regular(file: Path) -> PlanError:
    return PlanError(f"{file}: not a regular file", hint="take it out of the model's folder")


def read_object(file: Path) -> tuple[bytes, dict[str, Any]]:
    """Return the bytes and the object of a JSON file.

    Raises FileNotFoundError, and PlanError for whatever else.
    """
    with open_regular(file) as (f, size):
        if size > _LONGEST:
            raise PlanError(f"{file}: not JSON of a model: {size >> 20} MiB", hint=COPY_AGAIN)
        raw = f.read(_LONGEST + 1)
    return raw, parse_object(raw, file, what="not JSON")


def parse_object(raw: bytes, file: Path, *, what: str, hint: str = COPY_AGAIN) -> dict[str, Any]:
    """Parse a JSON object; raises PlanError("FILE: WHAT: reason")."""
    try:
        value = parse_json(raw)
    except (RecursionError, MemoryError, OverflowError) as e:
        reason = "nested too deep" if isinstance(e, RecursionError) else "too large"
        raise PlanError(f"{file}: {what}: {reason}", hint=hint) from None
    except ValueError as e:
        raise PlanError(f"{file}: {what}: {shown_reason(e)}", hint=hint) from None
    if not isinstance(value, dict):
        raise PlanError(f"{file}: {what}: it is not an object", hint=hint)
    return value


def shown_reason(error: ValueError) -> str:
    """Return the text of an error that may quote the file, for a terminal."""
    if isinstance(error, UnicodeError):
        return "not UTF-8 text"
    return shown(str(error), 160).strip("'\"")


@dataclass(frozen=True, slots=True)
class Fields:
    """An object of config.json with questions about it; `file` and `path` are for messages."""

    value: Mapping[str, Any]
    file: Path
    path: str = ""

    def number(self, *names: str) -> int | None:
        """Return the first of these that is a number above 0; raises PlanError above a billion."""
        for name in names:
            value = self.value.get(name)
            if type(value) is int and value > 0 and value != _NO_LIMIT:
                if value > MOST:
                    raise self.wrong(name, f"above {MOST}")
                return value
        return None

    def factor(self, name: str) -> float | None:
        """Return a number above 0 and up to a million; None where it is absent."""
        value = self.value.get(name)
        if value is None:
            return None
        if isinstance(value, int | float) and not isinstance(value, bool):
            if 0 < value <= _LARGEST_FACTOR:  # not so for NaN
                return float(value)
            raise self.wrong(name, f"not above 0 and up to {_LARGEST_FACTOR}")
        raise self.wrong(name, "not a number")

    def words(self, name: str) -> tuple[str, ...]:
        """Return the texts of a list; () where it is absent."""
        value = self.value.get(name)
        if value is None:
            return ()
        if not isinstance(value, list):
            raise self.wrong(name, "not a list")
        return tuple(item for item in value if isinstance(item, str))

    def wrong(self, name: str, why: str) -> PlanError:
        value = shown(self.value[name])
        return PlanError(f"{self.file}: {self.path}{name} is {value}, {why}", hint=COPY_AGAIN)
