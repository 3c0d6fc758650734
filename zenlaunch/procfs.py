"""What the kernel says of processes: where threads may run, where pages are, what is mapped.

Owns the reading of /proc/PID (task/*/status, task/*/stat, numa_maps, maps), of a cgroup's
memory.numa_stat and of a sample of pages (move_pages). Judges nothing (observe), changes nothing. A
process that ends while it is read counts nothing. Documentation/filesystems/proc.rst,
Documentation/admin-guide/cgroup-v2.rst, numa_maps(5), move_pages(2).

Pages: anonymous ones and shared memory of a tree count, by size. Pages of files are apart: whoever
read a library or a model file first decides where its one copy is, for all processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from zenlaunch.child import tree
from zenlaunch.cpuset import EMPTY, CpuSet
from zenlaunch.values import printable

MOVE_PAGES = {"x86_64": 279, "aarch64": 239, "riscv64": 239}


@dataclass(frozen=True, slots=True, kw_only=True)
class Thread:
    """One thread: where it may run, where it ran last, and the CPU time it has used."""

    pid: int
    tid: int
    name: str
    cpus: CpuSet
    last_cpu: int
    cpu_s: float

    def to_dict(self) -> dict[str, Any]:
        return {"pid": self.pid, "tid": self.tid, "name": self.name, "cpus": str(self.cpus)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pages:
    """Bytes by NUMA node: `own` anonymous and shared memory, `file` pages of files."""

    own: dict[int, int] = field(default_factory=dict)
    file: dict[int, int] = field(default_factory=dict)

    def local_ratio(self, nodes: CpuSet) -> float | None:
        """Return the share of own bytes that is on `nodes`; None where there are none."""
        total = sum(self.own.values())
        return sum(b for n, b in self.own.items() if n in nodes) / total if total else None


def threads_of(pid: int) -> list[Thread]:
    """Return the threads of one process."""
    found = []
    tick = os.sysconf("SC_CLK_TCK")
    with contextlib.suppress(OSError):
        for task in sorted(os.scandir(f"/proc/{pid}/task"), key=lambda e: int(e.name)):
            with contextlib.suppress(OSError, ValueError, IndexError):
                status = _text(task.path, "status")
                allowed = re.search(r"^Cpus_allowed_list:\s*(\S*)$", status, re.MULTILINE)
                name, _, rest = _text(task.path, "stat").rpartition(")")
                fields = rest.split()
                found.append(
                    Thread(
                        pid=pid,
                        tid=int(task.name),
                        name=printable(name.partition("(")[2]),
                        cpus=CpuSet.parse(allowed[1]) if allowed else EMPTY,
                        last_cpu=int(fields[36]),
                        cpu_s=_used_s(task.path, (int(fields[11]) + int(fields[12])) / tick),
                    )
                )
    return found


def _text(*path: str) -> str:
    """Read a file in which the names of threads and files stand as they are: any bytes."""
    return Path(*path).read_text(encoding="utf-8", errors="surrogateescape")


def parse_numa_maps(text: str, shared: dict[str, dict[int, int]]) -> Pages:
    """Read one process's numa_maps.

    A shared segment is seen by each process that maps it: its pages go to `shared`, by the
    segment's name, where the most that any process saw of a node counts, once.
    """
    own: Counter[int] = Counter()
    file: Counter[int] = Counter()
    for line in text.splitlines():
        words = line.split()
        name = next((w[5:] for w in words if w.startswith("file=")), None)
        size = _number(words, "kernelpagesize_kB", 4) * 1024
        nodes = {
            int(node[1:]): int(count) * size
            for node, _, count in (w.partition("=") for w in words)
            if node[:1] == "N" and node[1:].isdigit()
        }
        if not nodes:
            continue
        if name is None:
            own.update(nodes)
        elif name.startswith(("/dev/shm/", "/memfd:", "/SYSV", "/dev/zero")):
            seen = shared.setdefault(name, {})
            for node, size_bytes in nodes.items():
                seen[node] = max(seen.get(node, 0), size_bytes)
        else:
            # Pages of a private file mapping that were written to are anonymous: their number is
            # known, their nodes only together with the others'.
            anon = _number(words, "anon", 0) * size
            total = sum(nodes.values())
            for node, size_bytes in nodes.items():
                part = min(size_bytes, round(size_bytes * anon / total))
                own[node] += part
                file[node] += size_bytes - part
    return Pages(own=_positive(own), file=_positive(file))


def _used_s(task: str, coarse_s: float) -> float:
    """Return a thread's CPU time: to the nanosecond where the kernel counts so, else in ticks."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(task, "schedstat").read_text().split()[0]) / 1e9
    return coarse_s


def counts_nanoseconds() -> bool:
    """Say whether this kernel counts threads' CPU time so finely that a short request shows."""
    return Path("/proc/self/schedstat").exists()


def _number(words: list[str], key: str, default: int) -> int:
    for word in words:
        name, _, value = word.partition("=")
        if name == key and value.isdigit():
            return int(value)
    return default


def _positive(counts: Counter[int]) -> dict[int, int]:
    return {node: size for node, size in sorted(counts.items()) if size > 0}


def pages_of(pids: Iterable[int]) -> Pages:
    """Return where the pages of these processes are; walks all page tables, so not often."""
    own: Counter[int] = Counter()
    file: Counter[int] = Counter()
    shared: dict[str, dict[int, int]] = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            pages = parse_numa_maps(_text(f"/proc/{pid}/numa_maps"), shared)
            own.update(pages.own)
            file.update(pages.file)
    for segment in shared.values():
        own.update(segment)
    return Pages(own=_positive(own), file=_positive(file))


def group_pages(pids: Collection[int], root: Path = Path("/")) -> Pages | None:
    """Return the pages of a cgroup (v2) that holds these processes and no other; else None.

    The kernel keeps these sums anyway: no page table is walked, and no right is needed to read
    them. They are those of the cgroup, so that a neighbour in it would be counted too; and cgroup
    v1 does not tell shared memory from files.
    """
    try:
        (folder,) = {group_of(pid, root) for pid in pids}
        if folder is None:
            return None
        members = {int(word) for word in (folder / "cgroup.procs").read_text().split()}
        if members != set(pids) or any(e.is_dir() for e in folder.iterdir()):
            return None
        lines = (folder / "memory.numa_stat").read_text().splitlines()
    except (OSError, ValueError):  # not unpacked: there is no such group, or more than one
        return None
    sums = {words[0]: _by_node(words[1:]) for words in (line.split() for line in lines)}
    own = Counter(sums.get("anon", {})) + Counter(sums.get("shmem", {}))
    file = Counter(sums.get("file", {})) - Counter(sums.get("shmem", {}))
    return Pages(own=_positive(own), file=_positive(file))


def group_of(pid: int | Literal["self"], root: Path = Path("/")) -> Path | None:
    """Return the folder of a process's cgroup (v2), None without one; raises OSError."""
    for line in (root / f"proc/{pid}/cgroup").read_text().splitlines():
        if line.startswith("0::/"):
            return root / "sys/fs/cgroup" / line.removeprefix("0::/")
    return None


def _by_node(words: list[str]) -> dict[int, int]:
    pairs = (word.partition("=") for word in words)
    return {int(name[1:]): int(size) for name, _, size in pairs}


def may_read(pid: int) -> bool:
    """Say whether this user may see what a process has mapped; True for one that is gone.

    The kernel asks when the file is opened (ptrace(2), "Ptrace access mode checking"); without that
    leave all readings here are empty, which says nothing of the process.
    """
    try:
        Path(f"/proc/{pid}/maps").open("rb").close()
    except PermissionError:
        return False
    except OSError:
        return True
    return True


def environ_of(pid: int) -> dict[str, str]:
    """Return the environment that a process was started with; {} where it may not be read."""
    with contextlib.suppress(OSError):
        raw = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="surrogateescape")
        pairs = (entry.partition("=") for entry in raw.split("\0") if entry)
        return {name: value for name, _, value in pairs}
    return {}


def mapped_files(pid: int) -> set[str]:
    """Return the paths of the files that a process has mapped executable."""
    found = set()
    with contextlib.suppress(OSError):
        for line in _text(f"/proc/{pid}/maps").splitlines():
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and "x" in fields[1] and fields[5].startswith("/"):
                found.add(fields[5].removesuffix(" (deleted)"))
    return found


def sample_pages(pid: int, count: int = 4096, *, chance: random.Random | None = None) -> Pages:
    """Ask the kernel for the nodes of `count` random anonymous pages of one process.

    Cheap whatever the size of the process, for the periodic check: move_pages(2) with no target.
    Needs the right to trace the process. Pages that are not there count nothing.
    """
    number = MOVE_PAGES.get(os.uname().machine)
    regions = list(_anonymous_regions(pid))
    if number is None or not regions:
        return Pages()
    page = os.sysconf("SC_PAGE_SIZE")
    chance = chance or random.Random()
    weights = [end - start for start, end in regions]
    picked = chance.choices(regions, weights, k=count)
    addresses = (ctypes.c_void_p * count)(
        *(start + chance.randrange((end - start) // page) * page for start, end in picked)
    )
    status = (ctypes.c_int * count)()
    libc = ctypes.CDLL(None, use_errno=True)
    done = libc.syscall(
        ctypes.c_long(number), ctypes.c_int(pid), ctypes.c_ulong(count), addresses, None, status, 0
    )
    if done != 0:
        return Pages()
    own: Counter[int] = Counter(node for node in status if node >= 0)
    return Pages(own={node: n * page for node, n in sorted(own.items())})


def _anonymous_regions(pid: int) -> Iterator[tuple[int, int]]:
    with contextlib.suppress(OSError):
        for line in _text(f"/proc/{pid}/maps").splitlines():
            fields = line.split(maxsplit=5)
            named = fields[5] if len(fields) == 6 else ""
            if fields[1].startswith("rw") and (not named or named in ("[heap]", "[stack]")):
                start, _, end = fields[0].partition("-")
                yield int(start, 16), int(end, 16)


def tree_threads(pid: int) -> list[Thread]:
    """Return the threads of the tree under `pid`."""
    return [t for p in tree(pid) for t in threads_of(p)]


def online_cpus() -> CpuSet:
    """Return the CPUs that are online now."""
    with contextlib.suppress(OSError, ValueError):
        return CpuSet.parse(Path("/sys/devices/system/cpu/online").read_text())
    return CpuSet(range(os.cpu_count() or 1))


def mems_allowed(pid: int) -> CpuSet | None:
    """Return the memory nodes that a process's cpuset allows."""
    with contextlib.suppress(OSError, ValueError):
        for line in _text(f"/proc/{pid}/status").splitlines():
            if line.startswith("Mems_allowed_list:"):
                return CpuSet.parse(line.partition(":")[2])
    return None


def bound_nodes(pid: int) -> set[CpuSet]:
    """Return the node sets of the `bind` policies in a process's mappings."""
    found = set()
    with contextlib.suppress(OSError, ValueError):
        for line in _text(f"/proc/{pid}/numa_maps").splitlines():
            # "bind:1", or "bind=static:1" with a flag
            name, _, nodes = line.split(maxsplit=2)[1].partition(":")
            if name.partition("=")[0] == "bind":
                found.add(CpuSet.parse(nodes))
    return found
