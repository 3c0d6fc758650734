"""Texts that users and files give become values: sizes, percentages, addresses; and what is shown.

Owns the spellings and their limits, and how a value that was refused is quoted: short, and without
a character that does something to a terminal. Knows no key, no file and no machine.
"""

from __future__ import annotations

import re
from typing import Any

MIB = 1 << 20
GIB = 1 << 30
EIB = 1 << 60  # no machine has more of anything that is counted in bytes

# 1 EiB has 19 digits; a float of more than 15 is not exact anyway.
_SIZE = re.compile(r"\s*(\d{1,19})(\.\d{1,15})?\s*([kmgtKMGT]?)(i?)[bB]?\s*", re.ASCII)
_PERCENT = re.compile(r"\s*(\d{1,3}(?:\.\d{1,15})?)\s*%\s*", re.ASCII)
# A name as DNS and /etc/hosts have it, or four numbers.
_HOST = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?:\.(?!-)[A-Za-z0-9_-]{1,63})*\.?")
_COLOUR = re.compile("(\x1b\\[[0-9;]*m)")
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def shown(value: Any, most: int = 80) -> str:
    """Quote a value in a message: one line of at most about `most` characters, escapes spelled out.

    Lists and mappings are named, not printed: a YAML alias makes small files into huge values.
    """
    if isinstance(value, str):
        return repr(value) if len(value) <= most else repr(value[: most - 3]) + "..."
    if value is None:
        return "null"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, int) and value.bit_length() > 200:
        return f"a number of about {value.bit_length() * 30103 // 100000 + 1} digits"
    text = str(value)
    return text if len(text) <= most else text[: most - 3] + "..."


def unprintable(text: str) -> bool:
    """Say whether a text holds a NUL, a line end, another control character or half a surrogate."""
    return _UNPRINTABLE.search(text) is not None


def printable(text: str) -> str:
    """Return the text for a terminal: what does something there, or is not seen, becomes a dot."""
    return "".join(c if c.isprintable() else "·" for c in text)


def for_terminal(line: str) -> str:
    """Return a line of a log for a terminal: its colours end with it, and it does nothing else."""
    parts = _COLOUR.split(line.expandtabs())
    text = "".join(part if k % 2 else printable(part) for k, part in enumerate(parts))
    return text + "\x1b[0m" if len(parts) > 1 else text


def parse_size(value: str | int) -> int:
    """Return bytes for "40G", "1.5GiB", "512MiB" or a plain number of bytes, up to 1 EiB.

    K, M, G and T are powers of 1,024, as vLLM and the kernel use them. Raises ValueError.
    """
    if isinstance(value, int):
        size = value
    else:
        match = _SIZE.fullmatch(value)
        if match is None:
            raise ValueError(f"{shown(value)} is not a size such as 40G, 512MiB or 1073741824")
        unit = 1024 ** ("KMGT".index(match[3].upper()) + 1) if match[3] else 1
        size = int(match[1]) * unit + int(float(match[2] or 0) * unit)
    if size < 0:
        raise ValueError(f"{shown(value)} is negative, not a size")
    if size > EIB:
        raise ValueError(f"{shown(value)} is a size above 1 EiB")
    return size


def parse_percent(value: str) -> float:
    """Return the fraction for "8%". Raises ValueError unless it is within 0 % and 90 %."""
    match = _PERCENT.fullmatch(value)
    if match is None or float(match[1]) > 90:
        raise ValueError(f"{shown(value)} is not a percentage from 0% to 90%")
    return float(match[1]) / 100


def parse_listen(value: str) -> tuple[str, int]:
    """Return (host, port) for "127.0.0.1:8000", "[::1]:8000" or ":8000". Raises ValueError."""
    host, sep, port_text = value.rpartition(":")
    if not sep or not re.fullmatch(r"[0-9]{1,5}", port_text):
        raise ValueError(f"{shown(value)} is not HOST:PORT")
    port = int(port_text)
    if not 1 <= port <= 65535:
        raise ValueError(f"port {port} is outside 1-65535")
    if host.startswith("[") or host.endswith("]"):
        inside = host[1:-1]
        if host[:1] != "[" or host[-1:] != "]" or not _is_ipv6(inside):
            raise ValueError(f"{shown(value)} is not HOST:PORT: no IPv6 address in brackets")
        return inside, port
    if ":" in host:
        raise ValueError(f"{shown(value)}: write an IPv6 address in brackets, [::1]:8000")
    if host and not _is_host(host):
        raise ValueError(f"{shown(value)} is not HOST:PORT: {shown(host)} is no name or address")
    return host or "127.0.0.1", port


def is_loopback(host: str) -> bool:
    """Say whether who listens on this host is reached from this machine alone."""
    if _is_ipv6(host):
        from ipaddress import IPv6Address  # for the few that write one

        return IPv6Address(host).is_loopback
    return host == "localhost" or re.fullmatch(r"127(\.[0-9]{1,3}){3}", host) is not None


def in_gib(size: int) -> str:
    """Print bytes as GiB, however many, so that the numbers of one sentence compare."""
    return f"{size / GIB:.1f} GiB"


def counted(count: int, what: str) -> str:
    """Return "1 CPU" or "2 CPUs"."""
    return f"{count} {what}{'s' * (count != 1)}"


def host_port(host: str, port: int) -> str:
    """Return the address as `parse_listen` reads it: an IPv6 one in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _is_host(host: str) -> bool:
    if re.fullmatch(r"[0-9.]+", host):
        parts = host.split(".")
        return len(parts) == 4 and all(0 < len(p) <= 3 and int(p) <= 255 for p in parts)
    return len(host) <= 253 and _HOST.fullmatch(host) is not None


def _is_ipv6(text: str) -> bool:
    from ipaddress import IPv6Address  # for the few that write one

    if not re.fullmatch(r"[0-9A-Fa-f:.]+(?:%[A-Za-z0-9_.-]{1,15})?", text):
        return False
    try:
        IPv6Address(text)
    except ValueError:
        return False
    return True
