"""How an upstream is written: `URL` or `NAME=URL`, on the command line or a line of a file.

Owns the spellings, their limits and the file's errors, each with its line. Opens no connection and
resolves no name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from zenlaunch.errors import ConfigError, ProxyError
from zenlaunch.named_file import read_named_file
from zenlaunch.values import host_port, parse_listen, shown

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_MOST_PROBLEMS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamAddress:
    """One engine: `name` is what status, metrics and `x-zenlaunch-upstream` call it."""

    name: str
    host: str
    port: int

    @property
    def url(self) -> str:
        """The address as a URL."""
        return f"http://{host_port(self.host, self.port)}"


def address_of(name: str, url: str) -> UpstreamAddress:
    """Return the address that a name and a URL stand for; raises ProxyError."""
    if _NAME.fullmatch(name) is None:
        raise ProxyError(
            f"upstream name {shown(name)} is not usable",
            hint="Use up to 64 letters, digits, dots, dashes and underscores.",
        )
    try:
        parts = urlsplit(url)
        extras = (parts.path.strip("/"), parts.query, parts.fragment, "@" in parts.netloc)
        if parts.scheme != "http" or not parts.hostname or any(extras):
            raise ValueError
        port = 80 if parts.port is None else parts.port
        host, port = parse_listen(host_port(parts.hostname, port))
    except ValueError as error:
        why = f": {error}" if str(error) else ""
        raise ProxyError(
            f"upstream {name}: {shown(url)} is not the address of an engine{why}",
            hint="Write http://HOST:PORT, without a path.",
        ) from error
    return UpstreamAddress(name=name, host=host, port=port)


def parse_upstream(text: str, *, name: str = "") -> tuple[str, str]:
    """Return name and URL of an upstream as it is written.

    One without a name is called `name` or, without that either, after its address: such a name
    stays the same whatever is written before it.
    """
    given, mark, url = text.partition("=")
    if mark and "://" not in given:
        return given, url
    return name or re.sub(r"[^A-Za-z0-9._-]+", "-", text.rpartition("://")[2]).strip("-"), text


def read_upstreams(path: Path) -> tuple[tuple[str, str], ...]:
    """Read names and URLs from a file, one upstream a line; `#` begins a comment.

    Raises ConfigError that lists every problem with its line. A file that names nobody is one: it
    may just be being written.
    """
    try:
        text = read_named_file(str(path))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    lines: dict[str, int] = {}
    found: list[tuple[str, str]] = []
    problems: list[str] = []
    for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        name, url = parse_upstream(words[0])
        try:
            if len(words) > 1:
                raise ProxyError(f"{shown(words[1])} is too much: one upstream a line")
            address_of(name, url)
            if name in lines:
                raise ProxyError(f"upstream {name} is in line {lines[name]} already")
        except ProxyError as problem:
            hint = f" ({problem.hint})" if problem.hint else ""
            problems.append(f"line {number}: {problem.message}{hint}")
        lines.setdefault(name, number)
        found.append((name, url))
    if not found:
        problems = [
            "it names no upstream (Write http://HOST:PORT or NAME=http://HOST:PORT a line.)"
        ]
    if problems:
        more = len(problems) - _MOST_PROBLEMS
        lines_of_text = problems[:_MOST_PROBLEMS] + ([f"and {more} more"] if more > 0 else [])
        raise ConfigError(f"{path}: " + "\n  ".join(lines_of_text))
    return tuple(found)
