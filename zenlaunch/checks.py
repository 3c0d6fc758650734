"""Questions asked of the machine before a start, and of a server while it runs.

Owns: is a port free, how much memory has a node left, does a server answer, does an engine make
progress. Answers only; what follows from them is the supervisor's affair. Ports: an engine that
loads has bound its port and does not listen yet, so that connect() is refused and only a bind()
without SO_REUSEADDR tells. Memory: the engine's own sum, MemFree + Active(file) + Inactive(file) +
SReclaimable of the node.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import math
import os
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zenlaunch.blot import argv_without
from zenlaunch.sockdiag import bound_inactive
from zenlaunch.values import printable

_FREE_KEYS = ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable")
GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236, "riscv64": 236}
ANSWER_BYTES = 16 << 20
_LISTEN = "0A"
# FIN_WAIT1, FIN_WAIT2, TIME_WAIT, CLOSE, CLOSE_WAIT, LAST_ACK, CLOSING
_CLOSING = frozenset({"04", "05", "06", "07", "08", "09", "0B"})


@dataclass(frozen=True, slots=True)
class TcpRow:
    """One row of /proc/net/tcp: the local port, the state's hex code, the socket's inode."""

    port: int
    state: str
    inode: int


def tcp_rows(port: int) -> list[TcpRow]:
    """Return the TCP sockets of this network namespace whose local port is `port`."""
    rows = []
    for name in ("tcp", "tcp6"):
        try:
            lines = Path("/proc/net", name).read_text().splitlines()[1:]
        except OSError:
            continue
        suffix = f":{port:04X}"
        for line in lines:
            fields = line.split()
            if fields[1].endswith(suffix):
                rows.append(TcpRow(port, fields[3], int(fields[9])))
    return rows


def holders(inodes: Iterable[int]) -> dict[int, int]:
    """Return inode -> pid for the sockets that some readable process holds."""
    wanted = {f"socket:[{i}]": i for i in inodes if i}
    found: dict[int, int] = {}
    if not wanted:
        return found
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            for fd in os.scandir(f"{entry.path}/fd"):
                with contextlib.suppress(OSError):
                    inode = wanted.get(os.readlink(fd.path))  # noqa: PTH115 (thousands of links)
                    if inode is not None:
                        found.setdefault(inode, int(entry.name))
    return found


def listeners(port: int) -> dict[int, int]:
    """Return inode -> pid of those who listen on `port`, as far as they can be seen."""
    return holders(r.inode for r in tcp_rows(port) if r.state == _LISTEN)


def command_of(pid: int) -> str:
    """Return a process's command line without secrets, cut to 80 characters."""
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return "?"
    words = raw.decode(errors="replace").split("\0")
    return printable(" ".join(argv_without(words)).strip())[:80] or "?"


def _binds(host: str, port: int, *, reuse: bool) -> OSError | None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as s:
        if reuse:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((host, port))
        except OSError as e:
            return e
    return None


def port_taken(host: str, port: int) -> str | None:
    """Say who holds `port`, or return None when it is free.

    A plain bind() also fails while connections of an earlier run are closing (TIME_WAIT). Where
    such are there and a bind() with SO_REUSEADDR succeeds, the port is free unless an engine began
    to load on it within that minute: Linux names that one from 6.8 on, and before it is
    `foreign_listener` that finds it, when ours says that it is ready.
    """
    error = _binds(host, port, reuse=False)
    if error is None:
        return None
    if error.errno != 98:  # EADDRINUSE
        return f"cannot bind {host}:{port}: {error.strerror}"
    rows = tcp_rows(port)
    loading = bound_inactive(port)
    if (
        not loading
        and any(r.state in _CLOSING for r in rows)
        and _binds(host, port, reuse=True) is None
    ):
        return None
    for pid in listeners(port).values():
        return f"port {port} is taken by pid {pid} ({command_of(pid)})"
    if any(r.state == _LISTEN for r in rows):
        return f"port {port} is taken by a process of another user"
    who = next((f"pid {p} ({command_of(p)})" for p in holders(loading).values()), "a process")
    return f"port {port} is bound by {who}, which does not listen yet (another engine that loads?)"


def foreign_listener(port: int, own: Iterable[int]) -> int | None:
    """Return the pid of a listener on `port` when all that can be seen are outside `own`."""
    pids = set(listeners(port).values())
    return min(pids) if pids and pids.isdisjoint(own) else None


def node_free_bytes(node: int, sysroot: Path = Path("/")) -> int | None:
    """Return what a node can give to an engine now; None where the kernel does not say."""
    values = _node_meminfo(node, sysroot)
    if "MemFree" not in values:
        return None
    return sum(values.get(key, 0) for key in _FREE_KEYS)


def _node_meminfo(node: int, sysroot: Path) -> dict[str, int]:
    try:
        text = (sysroot / f"sys/devices/system/node/node{node}/meminfo").read_text()
    except OSError:
        return {}
    values = {}
    for line in text.splitlines():
        # "Node 0 MemFree:  123 kB"
        fields = line.split()
        if len(fields) >= 4:
            values[fields[2].rstrip(":")] = int(fields[3]) * 1024
    return values


def resident_bytes(pids: Iterable[int]) -> int:
    """Return the summed resident memory of processes; those that are gone count nothing."""
    total = 0
    page = os.sysconf("SC_PAGE_SIZE")
    for pid in pids:
        with contextlib.suppress(OSError):
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * page
    return total


def memory_policy_allowed() -> bool:
    """Say whether this process may set memory policies.

    Containers filter the whole family of system calls, so that reading the own policy tells.
    """
    number = GET_MEMPOLICY.get(os.uname().machine)
    if number is None:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    done = libc.syscall(
        ctypes.c_long(number), None, None, ctypes.c_ulong(0), None, ctypes.c_ulong(0)
    )
    return bool(done == 0)


def metric(text: str, name: str | None) -> float | None:
    """Sum the samples of one series in Prometheus text; None where it is not, or no number."""
    if name is None:
        return None
    found = False
    total = 0.0
    for line in text.splitlines():
        if line.startswith(name) and line[len(name) : len(name) + 1] in ("{", " "):
            with contextlib.suppress(ValueError, IndexError):
                total += float(
                    line.rpartition("}")[2].split()[0] if "}" in line else line.split()[1]
                )
                found = True
    return total if found and math.isfinite(total) else None


class Http:
    """One server, asked over TCP or a unix socket; every failure to answer is None.

    So is an answer of more than ANSWER_BYTES: what is asked here has a hundredth of that.

    Each question has its own connection, which we close first: what lingers then does so on our
    port, not on the server's, and a cancelled question leaves nothing open.
    """

    def __init__(self, *, host: str = "", port: int = 0, socket_path: Path | None = None) -> None:
        self._host = host
        self._port = port
        self._socket_path = socket_path

    async def get(self, path: str, *, timeout_s: float = 10.0) -> tuple[int, str] | None:
        return await self._ask(f"GET {path} HTTP/1.1\r\nhost: zenlaunch\r\n\r\n", timeout_s)

    async def post(
        self, path: str, body: str = "", *, key: str | None = None, timeout_s: float = 10.0
    ) -> tuple[int, str] | None:
        """Post a body of JSON, or nothing; `key` is sent as a bearer token."""
        fields = f"content-length: {len(body.encode())}\r\n"
        if body:
            fields += "content-type: application/json\r\n"
        if key is not None:
            fields += f"authorization: Bearer {key}\r\n"
        request = f"POST {path} HTTP/1.1\r\nhost: zenlaunch\r\n{fields}\r\n{body}"
        return await self._ask(request, timeout_s)

    async def _ask(self, request: str, timeout_s: float) -> tuple[int, str] | None:
        try:
            async with asyncio.timeout(timeout_s):
                if self._socket_path is not None:
                    reader, writer = await asyncio.open_unix_connection(self._socket_path)
                else:
                    reader, writer = await asyncio.open_connection(self._host, self._port)
                try:
                    writer.write(request.encode())
                    return await _read_answer(reader)
                finally:
                    writer.close()
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError):
            return None  # TimeoutError is an OSError


async def _read_answer(reader: asyncio.StreamReader) -> tuple[int, str]:
    """Read status and body; raises ValueError or EOFError for what is no whole HTTP/1.1 answer."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.lower().split("\r\n")
    if not first.startswith("http/1."):
        raise ValueError(f"{first!r} is not HTTP/1")
    status = int(first[9:12])
    fields = {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
    body = bytearray()
    if "chunked" in fields.get("transfer-encoding", ""):
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            body += await _read(reader, size, ANSWER_BYTES - len(body))
            await reader.readexactly(2)
    elif "content-length" in fields:
        body += await _read(reader, int(fields["content-length"]), ANSWER_BYTES)
    else:
        while part := await reader.read(1 << 16):
            body += part
            if len(body) > ANSWER_BYTES:
                raise ValueError("the answer is too long")
    return status, body.decode(errors="replace")


async def _read(reader: asyncio.StreamReader, size: int, most: int) -> bytes:
    if size > most:
        raise ValueError("the answer is too long")
    return await reader.readexactly(size)


def in_flight(status: Any, name: str) -> int | None:
    """Read from the proxy's status how many requests an upstream has under way, or None."""
    upstreams = status.get("upstreams") if isinstance(status, dict) else None
    for row in upstreams if isinstance(upstreams, list) else ():
        if isinstance(row, dict) and row.get("name") == name:
            value = row.get("in_flight")
            return value if isinstance(value, int) else None
    return None


def connect_host(host: str) -> str:
    """Return where to connect to reach a server that listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)


def group_free_bytes(root: Path = Path("/")) -> int | None:
    """Return what the memory cgroups around this process still allow; None without a limit.

    Pages of files go when memory is short, as on a node, and are counted as free.
    Documentation/admin-guide/cgroup-v2.rst, cgroup-v1/memory.rst.
    """
    found = [_left_in(folder) for folder in _memory_groups(root)]
    return min((left for left in found if left is not None), default=None)


def _memory_groups(root: Path) -> Iterator[Path]:
    """Yield the folders of this process's memory cgroup (v2 and v1) and of those around it."""
    with contextlib.suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            base = root / "sys/fs/cgroup" / ("memory" if controllers else "")
            # In a container the path may be that of the host; its own group is then the base.
            folder = base / path.lstrip("/")
            yield from (f for f in (folder, *folder.parents) if f.is_relative_to(base))


def _left_in(folder: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError, KeyError):
        new = (folder / "memory.max").exists()
        limit = (folder / ("memory.max" if new else "memory.limit_in_bytes")).read_text().strip()
        if limit == "max" or int(limit) >= 1 << 62:
            return None
        used = int((folder / ("memory.current" if new else "memory.usage_in_bytes")).read_text())
        rows = (folder / "memory.stat").read_text().split()
        stat = dict(zip(rows[::2], map(int, rows[1::2]), strict=True))
        if new:
            files = stat["file"] - stat["shmem"] + stat["slab_reclaimable"]
        else:
            files = stat["total_cache"] - stat["total_shmem"]
        return int(limit) - used + files
    return None


def node_total_bytes(node: int, sysroot: Path = Path("/")) -> int | None:
    """Return the size of a node's memory; None where the kernel does not say."""
    return _node_meminfo(node, sysroot).get("MemTotal")
