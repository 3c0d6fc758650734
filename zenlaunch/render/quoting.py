"""Quoting for systemd: words of a command, values of an environment file, plain values.

Owns the escapes, nothing else. A value that cannot be written without changing it (a newline, a
control character) is refused. Follows systemd.service(5) "COMMAND LINES", systemd.syntax(7) and
systemd.exec(5) `EnvironmentFile=`; percent signs are specifiers (systemd.unit(5)).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from zenlaunch.errors import RenderError

_PLAIN = re.compile(r"[A-Za-z0-9_@+=:,./-]+")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def exec_line(words: Iterable[str]) -> str:
    """Return a command for `ExecStart=`: no word is split, expanded or changed.

    Raises RenderError for a program that is not an absolute path, and for what cannot be written.
    """
    program, *args = words
    if not program.startswith("/"):
        raise RenderError(
            f"systemd needs the whole path of {program!r}",
            hint="name the program, or the interpreter (--python), with its folder",
        )
    if "$" in program:
        raise RenderError(f"systemd cannot start a program with $ in its path: {program!r}")
    return " ".join([_word(program), *(_word(arg, dollar="$$") for arg in args)])


def _word(word: str, *, dollar: str = "$") -> str:
    _refuse_unprintable(word)
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("\t", "\\t")
    escaped = escaped.replace("%", "%%").replace("$", dollar)
    return escaped if _PLAIN.fullmatch(word) else f'"{escaped}"'


def paths(values: Iterable[str]) -> str:
    """Return a list of paths, such as for `RequiresMountsFor=`."""
    return " ".join(_word(value) for value in values)


def plain(value: str) -> str:
    """Return a value that systemd takes as it stands, such as for `Description=`."""
    _refuse_unprintable(value)
    if value.endswith("\\"):
        raise RenderError(f"{value!r} would go on in the next line")
    return value.replace("%", "%%")


def env_line(name: str, value: str) -> str:
    """Return one line of an environment file; nothing in it is expanded when it is read."""
    if _ENV_NAME.fullmatch(name) is None:
        raise RenderError(f"{name!r} is not the name of an environment variable")
    _refuse_unprintable(value)
    escaped = re.sub(r'(["\\`$])', r"\\\1", value)
    return f'{name}="{escaped}"'


def _refuse_unprintable(value: str) -> None:
    for char in value:
        # A lone surrogate is a byte that was not UTF-8: systemd drops the whole line.
        if (ord(char) < 0x20 and char != "\t") or ord(char) == 0x7F or 0xD800 <= ord(char) < 0xE000:
            raise RenderError(
                f"{value!r} holds the character {char!r}, which a unit cannot carry",
                hint="newlines and control characters are refused, not changed",
            )
