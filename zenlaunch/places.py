"""Where a program on this machine really lies, and whether a user may get there.

Owns the way from a path to what is run: symbolic links, the interpreter of a script, the Python
that a virtual environment was made from. A unit that hides home folders, or runs as another user,
fails on any of these. Reads a few files, decides nothing.
"""

from __future__ import annotations

import contextlib
import os
import pwd
from pathlib import Path

_SHEBANG_BYTES = 256  # as far as the kernel reads: execve(2)
_READ, _ENTER = 4, 1  # bits of a file's mode


def places_of(program: str) -> tuple[str, ...]:
    """Return the other paths that are read to run `program`, an absolute path; may be none."""
    found: dict[str, None] = {}
    todo = [program]
    while todo:
        path = todo.pop()
        for other in (os.path.realpath(path), *_interpreter(path), *_base_of_venv(path)):
            if other != program and other not in found:
                found[other] = None
                todo.append(other)
    return tuple(found)


def _interpreter(path: str) -> list[str]:
    with contextlib.suppress(OSError):
        if not Path(path).is_file():
            return []
        with Path(path).open("rb") as file:
            head = file.read(_SHEBANG_BYTES)
        if head.startswith(b"#!"):
            words = os.fsdecode(head[2:].partition(b"\n")[0]).split(None, 1)
            return [w for w in words[:1] if w.startswith("/")]
    return []


def _base_of_venv(path: str) -> list[str]:
    """Return the folder of the Python that a virtual environment uses (PEP 405)."""
    with contextlib.suppress(OSError, ValueError):
        for line in (Path(path).parent.parent / "pyvenv.cfg").read_text().splitlines():
            key, _, value = line.partition("=")
            if key.strip() == "home" and value.strip().startswith("/"):
                return [value.strip()]
    return []


def closed_to(user: str, path: str) -> str | None:
    """Return the first folder on the way to `path` that `user` may not enter, or `path` itself.

    None where it can be read. A user that is not there yet owns nothing. Access control lists are
    not looked at.
    """
    uid, groups = _ids(user)
    if uid == 0:
        return None
    for place in (*reversed(Path(path).parents), Path(path)):
        try:
            state = place.stat()
        except OSError:
            return None  # not there, or not for us to see
        shift = 6 if state.st_uid == uid else 3 if state.st_gid in groups else 0
        needed = _ENTER if place != Path(path) else _READ
        if not state.st_mode >> shift & needed:
            return str(place)
    return None


def _ids(user: str) -> tuple[int | None, frozenset[int]]:
    try:
        entry = pwd.getpwnam(user)
    except KeyError:
        return None, frozenset()
    return entry.pw_uid, frozenset(os.getgrouplist(user, entry.pw_gid))
