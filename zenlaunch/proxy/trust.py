"""Who may ask, and what is believed of what they say: API keys and forwarded addresses.

Keys are kept as digests and compared in constant time, all of them for every request, so that an
answer's time tells nothing. Nothing here ever prints a key.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
from ipaddress import IPv6Address, ip_address, ip_network
from pathlib import Path

from zenlaunch.errors import ProxyError
from zenlaunch.proxy.http1 import RequestHead, field

log = logging.getLogger("zenlaunch.proxy")

_NAMED = re.compile(r"([A-Za-z0-9._-]+)\s*:\s*(\S+)")


class KeyRing:
    """Named keys; an empty ring admits everybody."""

    __slots__ = ("_digests",)

    def __init__(self, keys: tuple[tuple[str, str], ...] = ()) -> None:
        self._digests = tuple((name, hashlib.sha256(key.encode()).digest()) for name, key in keys)

    def __len__(self) -> int:
        return len(self._digests)

    def __repr__(self) -> str:
        return f"<KeyRing of {len(self)}>"

    def name_of(self, key: bytes) -> str | None:
        """Return the name of a key, or None if it is not on the ring."""
        digest = hashlib.sha256(key).digest()
        found = None
        for name, known in self._digests:
            if hmac.compare_digest(digest, known):
                found = name
        return found


def parse_keys(text: str, *, source: str) -> tuple[tuple[str, str], ...]:
    """Read `name: key` or bare keys, one a line or with commas between; `#` begins a comment.

    Raises `ProxyError` that names the line, never the key: what is half understood would make a key
    that nobody meant.
    """
    keys: list[tuple[str, str]] = []
    for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), 1):
        if line.lstrip().startswith("#"):
            continue
        for entry in line.split(","):
            entry = entry.strip()
            if not entry:
                continue
            named = _NAMED.fullmatch(entry)
            name, key = (named[1], named[2]) if named else (f"key{len(keys) + 1}", entry)
            if key.endswith(":") or not key.isprintable() or len(key.split()) > 1:
                raise ProxyError(
                    f"{source}, line {number}: this is neither a key nor `name: key`",
                    hint="A key has no blanks; a name has letters, digits, dots and dashes.",
                )
            keys.append((name, key))
    return tuple(keys)


def load_keys(path: Path | None, environment: str | None) -> KeyRing:
    """Read a ring from a file and the text of an environment variable.

    Raises `ProxyError` when one cannot be read or holds no key: an empty ring would open the door
    that the user meant to lock.
    """
    keys: tuple[tuple[str, str], ...] = ()
    if path is not None:
        keys = parse_keys(read_secret(path), source=str(path))
        if not keys:
            raise ProxyError(f"{path} holds no API key", hint="Write one `name: key` per line.")
    if environment:
        given = parse_keys(environment, source="the keys in the environment")
        if not given:
            raise ProxyError("the environment's variable for API keys holds none")
        keys += given
    return KeyRing(keys)


def load_key(path: Path) -> str:
    """Read a file that holds exactly one key; raises `ProxyError`."""
    key = read_secret(path).removeprefix("\ufeff").strip()
    if re.fullmatch(r"[\x21-\x7e]+", key) is None:
        raise ProxyError(f"{path} does not hold one key", hint="It is one line without blanks.")
    return key


def read_secret(path: Path) -> str:
    """Read a file of secrets, and warn when everybody can; raises `ProxyError` saying which."""
    try:
        with path.open(encoding="utf-8") as file:
            if os.fstat(file.fileno()).st_mode & 0o004:
                log.warning("%s can be read by everybody on this machine: chmod 600", path)
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ProxyError(f"cannot read {path}: {reason}") from error


class Peers:
    """Whose `X-Forwarded-*` are believed."""

    __slots__ = ("_networks",)

    def __init__(self, networks: tuple[str, ...] = ()) -> None:
        self._networks = tuple(ip_network(network, strict=False) for network in networks)

    def trusts(self, address: str) -> bool:
        """Tell whether a peer's address is in one of the networks."""
        if not self._networks:
            return False
        try:
            peer = ip_address(address)
        except ValueError:
            return False
        if isinstance(peer, IPv6Address) and peer.ipv4_mapped is not None:
            peer = peer.ipv4_mapped  # as a socket for both families shows it
        return any(peer in network for network in self._networks)


def forwarded_fields(head: RequestHead, *, peer: str, trusted: bool) -> bytes:
    """Return the X-Forwarded-* lines to send upstream.

    What the client says of itself is replaced, unless it is a trusted proxy: then it is extended.
    """
    chain, proto, host = peer.encode(), b"http", head.host
    if trusted:
        before = b", ".join(one.value for one in head.fields if one.name == b"x-forwarded-for")
        if before:
            chain = before + b", " + chain
        proto = field(head.fields, b"x-forwarded-proto") or proto
        host = field(head.fields, b"x-forwarded-host") or host
    return b"x-forwarded-for: %b\r\nx-forwarded-proto: %b\r\nx-forwarded-host: %b\r\n" % (
        chain,
        proto,
        host,
    )
