"""A crash report: what can be known of an instance that ended, in one folder, without secrets.

Owns what is in it (report.json, log.txt, node meminfo, memory.events) and how many are kept, and
the evidence for an out-of-memory kill: SIGKILL alone is none, a counter of the kernel that rose is.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zenlaunch.blot import argv_without, environ_without, secrets_of
from zenlaunch.spec import LaunchSpec

KEPT = 10


@dataclass(frozen=True, slots=True)
class OomCount:
    """How often the kernel has killed for memory: on this machine, and in this cgroup."""

    machine: int | None
    cgroup: int | None

    def rose_since(self, before: OomCount) -> str | None:
        """Say which counter rose, or None."""
        for name, old, new in (
            ("memory.events of the cgroup", before.cgroup, self.cgroup),
            ("/proc/vmstat", before.machine, self.machine),
        ):
            if old is not None and new is not None and new > old:
                return f"oom_kill in {name} rose from {old} to {new}"
        return None


def oom_count(root: Path = Path("/")) -> OomCount:
    """Read the kernel's counters of out-of-memory kills."""
    events = _cgroup_events(root)
    return OomCount(_counter(root / "proc/vmstat"), _counter(events) if events else None)


def _counter(path: Path) -> int | None:
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    return None


def _cgroup_events(root: Path) -> Path | None:
    """Return the file of this process's cgroup that counts kills (cgroup v2, else v1)."""
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                base, name = root / "sys/fs/cgroup", "memory.events"
            elif "memory" in controllers.split(","):
                base, name = root / "sys/fs/cgroup/memory", "memory.oom_control"
            else:
                continue
            # In a container the path may be that of the host, and its own group be the root.
            for file in (base / path.lstrip("/") / name, base / name):
                if file.exists():
                    return file
    return None


def write_report(
    folder: Path,
    spec: LaunchSpec,
    *,
    facts: Mapping[str, Any],
    environ: Mapping[str, str],
    log: Sequence[str],
    root: Path = Path("/"),
) -> Path | None:
    """Write NAME-crash-N below `folder`; returns its path, or None where it cannot be written.

    `facts` go into report.json as they are. Only the last few reports of an instance are kept.
    """
    numbers = sorted(
        int(p.name.rpartition("-")[2])
        for p in folder.glob(f"{spec.name}-crash-*")
        if p.name.rpartition("-")[2].isdigit()
    )
    report = folder / f"{spec.name}-crash-{numbers[-1] + 1 if numbers else 1}"
    secrets = secrets_of(environ, spec.argv)
    data = {
        **facts,
        "argv": argv_without(spec.argv, secrets),
        "cpus": str(spec.cpus),
        "engine_cpus": str(spec.engine_cpus),
        "mem_nodes": str(spec.mem_nodes),
        "memory_bytes": spec.memory_bytes,
        "environment": environ_without(environ, secrets),
    }
    for number in numbers[: max(0, len(numbers) + 1 - KEPT)]:
        shutil.rmtree(folder / f"{spec.name}-crash-{number}", ignore_errors=True)
    try:
        report.mkdir(mode=0o750)
        (report / "report.json").write_text(json.dumps(data, indent=1) + "\n")
        (report / "log.txt").write_text("".join(f"{line}\n" for line in log), encoding="utf-8")
        _copy(root / "proc/meminfo", report / "meminfo.txt")
        for node in spec.mem_nodes:
            _copy(
                root / f"sys/devices/system/node/node{node}/meminfo",
                report / f"meminfo-node{node}.txt",
            )
        events = _cgroup_events(root)
        if events is not None:
            _copy(events, report / events.name)
    except OSError:
        shutil.rmtree(report, ignore_errors=True)  # on a full disk a half tells little
        return None
    return report


def _copy(source: Path, target: Path) -> None:
    with contextlib.suppress(FileNotFoundError, PermissionError):
        target.write_bytes(source.read_bytes())
