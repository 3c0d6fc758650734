"""An instance as the kernel has it, against its spec: `verify` in full, `look` now and then.

Owns the comparison and its words: each mismatch is named with its likely cause. Reads through
procfs, changes nothing, and knows no engine: what an engine must show is in the spec's Evidence.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zenlaunch import checks
from zenlaunch.child import tree
from zenlaunch.cpuset import EMPTY, CpuSet, union
from zenlaunch.procfs import (
    Pages,
    Thread,
    bound_nodes,
    group_pages,
    mapped_files,
    mems_allowed,
    online_cpus,
    pages_of,
    sample_pages,
    threads_of,
)
from zenlaunch.spec import LaunchSpec

LOCAL_ENOUGH = 0.99


# Labels of `Verification.libraries`: a part of the file's name.
LIBRARIES = {
    "tcmalloc": "libtcmalloc",
    "jemalloc": "libjemalloc",
    "iomp5": "libiomp5",
    "gomp": "libgomp",
    "omp": "libomp.so",
    "zentorch": "libzentorch",
}


OPENMP = ("iomp5", "gomp", "omp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """An instance as the kernel has it, against its spec; `ok` when there is no problem."""

    threads: int
    threads_off_plan: tuple[Thread, ...]
    engine_threads: dict[int, int]
    pages: Pages
    local_ratio: float | None
    libraries: dict[str, str | None]
    cores_logged: CpuSet | None
    idle: CpuSet | None
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON of `zenlaunch verify --json` for one instance; pages in bytes."""
        return {
            "threads": self.threads,
            "threads_off_plan": [t.to_dict() for t in self.threads_off_plan],
            "engine_threads": {str(c): n for c, n in self.engine_threads.items()},
            "pages": {str(n): b for n, b in sorted(self.pages.own.items())},
            "file_pages": {str(n): b for n, b in sorted(self.pages.file.items())},
            "local_ratio": self.local_ratio,
            "libraries": self.libraries,
            "omp_cores_logged": None if self.cores_logged is None else str(self.cores_logged),
            "idle_cpus": None if self.idle is None else str(self.idle),
            "ok": self.ok,
            "problems": list(self.problems),
        }


def cores_logged(pattern: str | None, log: Sequence[str]) -> CpuSet | None:
    """Return the CPUs that the engine said it uses; None where it said nothing."""
    if pattern is None:
        return None
    for line in reversed(log):
        match = re.search(pattern, line)
        if match:
            with contextlib.suppress(ValueError):
                return CpuSet.parse(match[1])
    return None


def idle_cpus(spec: LaunchSpec, before: Sequence[Thread], after: Sequence[Thread]) -> CpuSet:
    """Return the engine CPUs with threads of their own that did nothing between two looks.

    With a request in between these are CPUs that the engine does not use.
    """
    used = {t.tid: t.cpu_s for t in before}
    own = {t.cpus.first for t in after if len(t.cpus) == 1}
    busy = {t.cpus.first for t in after if len(t.cpus) == 1 and t.cpu_s > used.get(t.tid, 0.0)}
    return spec.engine_cpus & CpuSet(own - busy)


def verify(
    spec: LaunchSpec,
    pid: int,
    log: Sequence[str],
    *,
    found: Pages | None = None,
    before: Sequence[Thread] | None = None,
) -> Verification:
    """Compare the tree under `pid` with its spec.

    `log` are the lines of its start. `found` are its pages, when they have been looked at already;
    else the page tables are walked. `before` are its threads before a request that it has answered
    by now; without them nothing is said of threads that do not work.
    """
    pids = tree(pid)
    threads = [t for p in pids for t in threads_of(p)]
    files = set().union(*(mapped_files(p) for p in pids)) if pids else set()
    preloaded = spec.env.get("LD_PRELOAD", "").split(":")
    libraries = {
        label: min(
            (f for f in files if part in _base(f)),
            key=lambda f: (f not in preloaded, len(f), f),
            default=None,
        )
        for label, part in LIBRARIES.items()
    }
    found = pages_of(pids) if found is None else found
    off_plan = tuple(t for t in threads if spec.cpus and not t.cpus <= spec.cpus)
    engine_threads = {
        cpu: sum(1 for t in threads if t.cpus == CpuSet([cpu])) for cpu in spec.engine_cpus
    }
    logged = cores_logged(spec.evidence.cores_pattern, log)
    idle = EMPTY if before is None else idle_cpus(spec, before, threads)
    ratio = found.local_ratio(spec.mem_nodes) if spec.mem_nodes else None
    seen = _Seen(
        spec=spec,
        pid=pid,
        threads=threads,
        off_plan=off_plan,
        engine_threads=engine_threads,
        found=found,
        ratio=ratio,
        files=files,
        libraries=libraries,
        logged=logged,
        idle=idle,
        log=log,
    )
    return Verification(
        threads=len(threads),
        threads_off_plan=off_plan,
        engine_threads=engine_threads,
        pages=found,
        local_ratio=ratio,
        libraries=libraries,
        cores_logged=logged,
        idle=None if before is None else idle,
        problems=tuple(_problems(seen)),
    )


def _base(path: str) -> str:
    return path.rpartition("/")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """A cheap look at a tree, for the periodic check; None where nothing could be seen."""

    threads: int
    threads_off_plan: int
    remote_page_ratio: float | None

    @classmethod
    def of(cls, proof: Verification) -> Look:
        """Return what a look would have seen when this proof was made."""
        ratio = proof.local_ratio
        return cls(
            threads=proof.threads,
            threads_off_plan=len(proof.threads_off_plan),
            remote_page_ratio=None if ratio is None else 1 - ratio,
        )


def look(
    spec: LaunchSpec, pid: int, *, samples: int = 4096, chance: random.Random | None = None
) -> Look:
    """Look at all threads of the tree under `pid`, and at its pages without walking tables.

    The pages are those of its cgroup, where it has one to itself; else samples, dealt out over its
    processes by their resident memory.
    """
    pids = tree(pid)
    threads = [t for p in pids for t in threads_of(p)]
    off_plan = sum(1 for t in threads if spec.cpus and not t.cpus <= spec.cpus)
    return Look(
        threads=len(threads),
        threads_off_plan=off_plan,
        remote_page_ratio=_remote_ratio(spec, pids, samples, chance) if spec.mem_nodes else None,
    )


def _remote_ratio(
    spec: LaunchSpec, pids: Sequence[int], samples: int, chance: random.Random | None
) -> float | None:
    whole = group_pages(pids)
    if whole is not None:
        ratio = whole.local_ratio(spec.mem_nodes)
        return None if ratio is None else 1 - ratio
    sizes = {p: checks.resident_bytes([p]) for p in pids}
    total = sum(sizes.values())
    away = near = 0.0
    for one, size in sizes.items():
        count = samples * size // total if total else 0
        if not count:
            continue
        ratio = sample_pages(one, count, chance=chance).local_ratio(spec.mem_nodes)
        if ratio is not None:
            near += ratio * size
            away += (1 - ratio) * size
    return away / (near + away) if near + away else None


def drift(old: Look | None, new: Look) -> str | None:
    """Say in words what has become worse since the last look; None where nothing has.

    Threads come and go, and a new one has the mask of the one that made it: what counts is that
    more than twice as many are off the plan.
    """
    words = []
    before = old.threads_off_plan if old else 0
    if new.threads_off_plan > 2 * before:
        words.append(
            f"{new.threads_off_plan} of {new.threads} threads may run off the plan "
            f"(before: {before}): a cpuset or affinity that was changed under them"
        )
    bad = 1 - LOCAL_ENOUGH
    was_bad = old is not None and (old.remote_page_ratio or 0) > bad
    if new.remote_page_ratio is not None and new.remote_page_ratio > bad and not was_bad:
        words.append(
            f"{100 * new.remote_page_ratio:.1f} % of the pages are on other nodes: "
            "NUMA balancing, migratepages, or a cpuset"
        )
    return "; ".join(words) or None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    spec: LaunchSpec
    pid: int
    threads: list[Thread]
    off_plan: tuple[Thread, ...]
    engine_threads: dict[int, int]
    found: Pages
    ratio: float | None
    files: set[str]
    libraries: dict[str, str | None]
    logged: CpuSet | None
    idle: CpuSet
    log: Sequence[str]


def _problems(seen: _Seen) -> Iterator[str]:
    if not seen.threads:
        yield f"no process {seen.pid}: the instance has ended"
        return
    yield from _thread_problems(seen)
    yield from _page_problems(seen)
    yield from _library_problems(seen)
    for text in seen.spec.evidence.lines:
        if not any(text in line for line in seen.log):
            yield f"its log does not say {text!r}"


def _thread_problems(seen: _Seen) -> Iterator[str]:
    spec = seen.spec
    offline = spec.cpus - online_cpus() if spec.cpus else EMPTY
    if offline:
        yield (
            f"CPUs {offline} of the plan are offline: their threads share other CPUs (put them "
            "online again and restart the instance, or plan anew)"
        )
    if spec.cpus:
        allowed = union(t.cpus for t in seen.threads)
        missing = spec.cpus - allowed - offline
        if seen.off_plan:
            where = union(t.cpus for t in seen.off_plan) - spec.cpus
            yield (
                f"{len(seen.off_plan)} of {len(seen.threads)} threads may run on CPUs {where}, "
                f"outside {spec.cpus}: {_escape_cause(seen)}"
            )
        elif missing:
            yield (
                f"no thread may run on CPUs {missing} of the plan: a cpuset (a container's, or the "
                "cgroup's) leaves them out"
            )
    if seen.logged is not None and seen.logged != spec.engine_cpus:
        yield f"the engine says it uses CPUs {seen.logged or 'none'}; {_logged_cause(seen)}"
    if seen.idle:
        yield (
            f"the engine threads on CPUs {seen.idle} did nothing during a request: the engine was "
            "told to use fewer threads than it has pinned (OMP_NUM_THREADS, torch.set_num_threads)"
        )
    crowded = _crowded(seen)
    if crowded:
        yield f"several busy threads share CPUs {crowded}: more engine threads than CPUs"
    bare = CpuSet(c for c, n in seen.engine_threads.items() if n == 0) - offline
    if not bare or len(spec.engine_cpus) == 1 == len(seen.spec.cpus):
        return
    if bare == spec.engine_cpus:
        yield f"no engine thread is pinned to one CPU: {_unpinned_cause(seen)}"
    else:
        yield (
            f"no engine thread is pinned to CPUs {bare} (planned: one on each of "
            f"{spec.engine_cpus}): fewer threads than CPUs, or a cpuset that was changed under them"
        )


def _crowded(seen: _Seen) -> CpuSet:
    """Return the engine CPUs with more than one thread that works.

    Helpers of an engine inherit the CPU of its main thread; they are told from workers by the time
    they have used.
    """
    times: dict[int, list[float]] = {c: [0.0] for c in seen.spec.engine_cpus}
    for thread in seen.threads:
        if len(thread.cpus) == 1 and thread.cpus.first in times:
            times[thread.cpus.first].append(thread.cpu_s)
    if len(times) < 2:
        return EMPTY
    usual = statistics.median(max(t) for t in times.values())
    busy = max(1.0, usual / 2)
    return CpuSet(c for c, t in times.items() if sum(s >= busy for s in t) > 1)


def _escape_cause(seen: _Seen) -> str:
    if all(t.pid == seen.pid and not t.cpus <= seen.spec.cpus for t in seen.threads):
        return "the binding was not applied, or somebody changed it (taskset, a cgroup)"
    if seen.libraries["gomp"] and not seen.libraries["iomp5"]:
        return "libgomp places threads on any CPU it is told to, past the mask of numactl"
    return "the engine, or somebody with taskset, changed their affinity"


def _logged_cause(seen: _Seen) -> str:
    planned = f"the plan says {seen.spec.engine_cpus}"
    if not seen.logged:
        return (
            f"{planned}: its automatic binding looked at another NUMA node than numactl "
            "(CPU_VISIBLE_MEMORY_NODES)"
        )
    if seen.logged <= seen.spec.engine_cpus:
        return f"{planned}: it keeps more CPUs in reserve, or a cpuset leaves some out"
    return f"{planned}: its automatic binding chose for itself"


def _unpinned_cause(seen: _Seen) -> str:
    if not any(seen.libraries[label] for label in OPENMP):
        return "no OpenMP runtime is mapped"
    if not seen.libraries["iomp5"] and not seen.libraries["gomp"]:
        return "the OpenMP runtime was told to keep threads in the set, not on one CPU each"
    return "the OpenMP runtime did not bind its threads (two runtimes, or OMP_PROC_BIND=false?)"


def _page_problems(seen: _Seen) -> Iterator[str]:
    if seen.ratio is None or seen.ratio >= LOCAL_ENOUGH:
        return
    total = sum(seen.found.own.values())
    away = {n: b for n, b in seen.found.own.items() if n not in seen.spec.mem_nodes}
    where = ", ".join(f"{b / (1 << 20):,.0f} MiB on node {n}" for n, b in sorted(away.items()))
    yield (
        f"{100 * (1 - seen.ratio):.1f} % of {total / (1 << 20):,.0f} MiB is not on node "
        f"{seen.spec.mem_nodes} ({where}): {_remote_cause(seen)}"
    )


def _remote_cause(seen: _Seen) -> str:
    words = ("set_mempolicy", "numa_migrate_pages", "mbind", "get_mempolicy")
    denied = any("not permitted" in line and any(w in line for w in words) for line in seen.log)
    if denied:
        return "setting a memory policy is not permitted (in docker: --cap-add SYS_NICE)"
    allowed = mems_allowed(seen.pid)
    if allowed is not None and not seen.spec.mem_nodes <= allowed:
        return f"a cpuset allows memory of node {allowed} only"
    bound = {b for p in tree(seen.pid) for b in bound_nodes(p)}
    strange = {b for b in bound if not b <= seen.spec.mem_nodes}
    if strange:
        return f"the engine bound memory to node {union(strange)} by itself"
    if not bound:
        balancing = ""
        with contextlib.suppress(OSError):
            if Path("/proc/sys/kernel/numa_balancing").read_text().strip() != "0":
                balancing = "; kernel.numa_balancing moves what is not bound"
        return f"no memory policy is set (no numactl --membind, and the engine set none){balancing}"
    return "they were there before the policy was set, or were moved (migratepages, a cpuset)"


def _library_problems(seen: _Seen) -> Iterator[str]:
    mapped = {os.path.realpath(f) for f in seen.files}
    for path in filter(None, seen.spec.env.get("LD_PRELOAD", "").split(":")):
        if os.path.realpath(path) not in mapped:
            yield f"{path} is to be preloaded and is not mapped: it does not exist or does not fit"
    for part in seen.spec.evidence.libraries:
        if not any(part in _base(f) for f in seen.files):
            yield f"no library {part} is mapped"
