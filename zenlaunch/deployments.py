"""Running deployments of this machine: who holds what, how to talk to them, what dead ones left.

Owns the runtime folder of a deployment (lock, state.json; all for its user alone), the refusal of a
second one that would overlap, and the scan for leftovers. A deployment runs while
its lock is held, whatever the files say. Decides nothing about processes of a running one: commands
go to its supervisor through the socket, one line of JSON each way.

Leftovers are processes of an instance whose zenlaunch and shim were both killed. They are known by
the owner in their environment, or, where a program has overwritten that, by the session they share.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import stat
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zenlaunch import checks, child
from zenlaunch.cpuset import CpuSet, union
from zenlaunch.errors import LaunchError
from zenlaunch.spec import LaunchSpec
from zenlaunch.values import in_gib

SCHEMA = 1
METRICS_FILE = "instances.prom"
# What a deployment keeps in its folder beside the lock. Only who holds the lock may remove it.
_FILES = (
    "state.json", "state.json.new", "control.sock", "proxy.sock", "upstream.key", METRICS_FILE,
    f"{METRICS_FILE}.new",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What one member of a deployment takes of the machine."""

    name: str
    port: int
    cpus: CpuSet
    mem_nodes: CpuSet
    memory_bytes: int | None

    @classmethod
    def of(cls, spec: LaunchSpec) -> Holding:
        return cls(
            name=spec.name,
            port=spec.port,
            cpus=spec.cpus,
            mem_nodes=spec.mem_nodes,
            memory_bytes=spec.memory_bytes,
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "port": self.port,
            "cpus": str(self.cpus),
            "mem_nodes": str(self.mem_nodes),
            "memory_bytes": self.memory_bytes,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Holding:
        return cls(
            name=str(data["name"]),
            port=int(data["port"]),
            cpus=CpuSet.parse(data["cpus"]),
            mem_nodes=CpuSet.parse(data["mem_nodes"]),
            memory_bytes=None if data["memory_bytes"] is None else int(data["memory_bytes"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A deployment as its state.json has it; `running` is whether its lock is held."""

    name: str
    folder: Path
    running: bool
    pid: int
    boot_id: str
    url: str | None
    log_dir: Path | None
    started: float
    holdings: tuple[Holding, ...]
    sessions: dict[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """A process whose zenlaunch is gone."""

    pid: int
    deployment: str
    command: str


class Claim:
    """The right to run a deployment of this name: its folder, and the lock that is held."""

    def __init__(self, folder: Path, lock_fd: int, state: dict[str, Any]) -> None:
        self.folder = folder
        self._lock_fd = lock_fd
        self._state = state
        self._write()

    @property
    def control_socket(self) -> Path:
        return self.folder / "control.sock"

    @property
    def metrics_file(self) -> Path:
        """What the session tells Prometheus through the proxy."""
        return self.folder / METRICS_FILE

    def remember_session(self, session: int) -> None:
        """Note the session of a tree that was started, for a scan after our sudden end."""
        began = child.start_time(session)
        if began is not None:
            self._state["sessions"][str(session)] = began
            # A folder that went away, or a full disk, costs the scan and must not stop the engines.
            with contextlib.suppress(OSError):
                self._write()

    def _write(self) -> None:
        fresh = self.folder / "state.json.new"
        fresh.write_text(json.dumps(self._state, indent=1))
        fresh.replace(self.folder / "state.json")

    def release(self) -> None:
        """Give the name back; the folder keeps nothing but the lock."""
        _clear(self.folder)
        with contextlib.suppress(OSError):
            os.close(self._lock_fd)

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def claim(
    root: Path,
    name: str,
    specs: Iterable[LaunchSpec],
    *,
    url: str | None = None,
    log_dir: Path | None = None,
    sysroot: Path = Path("/"),
) -> Claim:
    """Take the name and what the specs need of the machine.

    `root` holds a folder for each deployment. Raises LaunchError where the name is taken, where
    CPUs or ports are held by another deployment, where the memory of both is more than a node has,
    and where the folder cannot be written.
    """
    folder = root / name
    try:
        for one in (root.parent, root, folder):
            one.mkdir(parents=True, exist_ok=True, mode=0o700)
            _refuse_shared(one)
        # Checks and claims of two that start at the same time come one after the other.
        root_fd = _locked(root / ".lock", wait=True)
        try:
            lock_fd = _locked(folder / "lock", wait=False)
            patience = 10
            while lock_fd is None and patience:  # somebody who only looks holds it for a moment
                time.sleep(0.02)
                patience -= 1
                lock_fd = _locked(folder / "lock", wait=False)
            if lock_fd is None:
                raise _taken(root, name)
            holdings = tuple(Holding.of(s) for s in specs)
            state = {
                "schema": SCHEMA,
                "name": name,
                "pid": os.getpid(),
                "boot_id": boot_id(),
                "url": url,
                "log_dir": str(log_dir) if log_dir else None,
                "started": time.time(),
                "holdings": [h.to_dict() for h in holdings],
                "sessions": {},
            }
            try:
                _refuse_overlap(holdings, [k for k in known(root) if k.name != name], sysroot)
                return Claim(folder, lock_fd, state)
            except BaseException:
                _clear(folder)
                os.close(lock_fd)
                raise
        finally:
            if root_fd is not None:
                os.close(root_fd)
    except OSError as e:
        raise LaunchError(
            f"cannot write the runtime folder {folder}: {e.strerror}",
            hint="set XDG_RUNTIME_DIR to a folder that you may write",
        ) from e


def _refuse_shared(folder: Path) -> None:
    """Raise LaunchError for a folder in which another user could put his own for our files."""
    found = folder.stat()
    writable = found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX
    if found.st_uid not in (0, os.geteuid()) or writable:
        raise LaunchError(
            f"the runtime folder must not be in the hands of others: {folder} has mode "
            f"{stat.filemode(found.st_mode)} and owner {found.st_uid}",
            hint="set XDG_RUNTIME_DIR to a folder of your own, of mode 0700",
        )


def _locked(path: Path, *, wait: bool) -> int | None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def _clear(folder: Path) -> None:
    for name in _FILES:
        with contextlib.suppress(OSError):
            (folder / name).unlink()


def _clear_dead(root: Path) -> None:
    """Remove the files of deployments that do not run; a claim waits meanwhile, or wins."""
    with contextlib.suppress(OSError):  # no folder yet, or not ours
        root_fd = _locked(root / ".lock", wait=True)
        try:
            for one in known(root):
                lock_fd = _locked(one.folder / "lock", wait=False)
                if lock_fd is not None:
                    _clear(one.folder)
                    os.close(lock_fd)
        finally:
            if root_fd is not None:
                os.close(root_fd)


def _taken(root: Path, name: str) -> LaunchError:
    other = next((k for k in known(root) if k.name == name), None)
    who = f" (pid {other.pid}{f', {other.url}' if other.url else ''})" if other else ""
    return LaunchError(
        f"the deployment {name!r} is up already{who}",
        hint=f"`zenlaunch down --name {name}` ends it; `--name OTHER` starts one beside it",
    )


def _refuse_overlap(wanted: tuple[Holding, ...], others: Iterable[Known], sysroot: Path) -> None:
    for other in others:
        if not other.running:
            continue
        who = f"the deployment {other.name!r} (pid {other.pid})"
        cpus = union(h.cpus for h in wanted) & union(h.cpus for h in other.holdings)
        if cpus:
            raise LaunchError(
                f"{who} holds CPUs {cpus}, which are wanted here too",
                hint="give each its own with --cpus or --nodes, or "
                f"`zenlaunch down --name {other.name}`",
            )
        ports = {h.port: h.name for h in other.holdings}
        for holding in wanted:
            if holding.port in ports:
                raise LaunchError(
                    f"{who} holds port {holding.port} ({ports[holding.port]}), which "
                    f"{holding.name} wants",
                    hint="choose others with --base-port and --port",
                )
    running = [h for k in others if k.running for h in k.holdings]
    for node in union(h.mem_nodes for h in wanted):
        held = _bytes_on(node, running)
        total = checks.node_total_bytes(node, sysroot)
        here = _bytes_on(node, wanted)
        if held and total is not None and held + here > total:
            names = ", ".join(repr(k.name) for k in others if k.running)
            raise LaunchError(
                f"node {node} has {in_gib(total)}; {names} holds {in_gib(held)} of it and this "
                f"needs {in_gib(here)}",
                hint="a smaller --kv-cache, fewer instances, or another node with --nodes",
            )


def _bytes_on(node: int, holdings: Iterable[Holding]) -> int:
    """Sum what is bound to a node; what may lie on several counts by equal parts."""
    return sum(
        (h.memory_bytes or 0) // max(1, len(h.mem_nodes)) for h in holdings if node in h.mem_nodes
    )


def boot_id() -> str:
    """Return what names this boot of the machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def known(root: Path) -> list[Known]:
    """Return the deployments below `root`: those with a state file, and all whose lock is held."""
    found = []
    for folder in sorted(root.glob("*/")):
        lock = folder / "lock"
        running = _is_held(lock)
        one = _read_state(folder, running=running)
        if one is None and running:
            # It runs whatever became of its state file, and its socket still answers.
            one = Known(
                name=folder.name, folder=folder, running=True, pid=_holder(lock),
                boot_id=boot_id(), url=None, log_dir=None, started=0.0, holdings=(), sessions={},
            )  # fmt: skip
        if one is not None:
            found.append(one)
    return found


def _read_state(folder: Path, *, running: bool) -> Known | None:
    """Return what state.json says; None where there is none, or where it has been damaged."""
    try:
        data = json.loads((folder / "state.json").read_text())
        return Known(
            name=folder.name,
            folder=folder,
            running=running,
            pid=int(data["pid"]),
            boot_id=str(data["boot_id"]),
            url=data["url"],
            log_dir=Path(data["log_dir"]) if data["log_dir"] else None,
            started=float(data["started"]),
            holdings=tuple(Holding.from_dict(h) for h in data["holdings"]),
            sessions={int(s): int(t) for s, t in data["sessions"].items()},
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _holder(lock: Path) -> int:
    """Return the pid of who holds a lock, from /proc/locks; 0 where that does not say."""
    with contextlib.suppress(OSError, ValueError):
        inode = lock.stat().st_ino
        for line in Path("/proc/locks").read_text().splitlines():
            # "1: FLOCK  ADVISORY  WRITE 1234 00:2d:5678 0 EOF"
            words = line.split()
            if words[1] == "FLOCK" and words[5].rpartition(":")[2] == str(inode):
                return int(words[4])
    return 0


def find(root: Path, name: str) -> Known:
    """Return a running deployment; raises LaunchError that says which ones there are."""
    running = [k for k in known(root) if k.running]
    for one in running:
        if one.name == name:
            return one
    names = ", ".join(k.name for k in running)
    raise LaunchError(
        f"no deployment {name!r} is up" + (f"; up: {names}" if names else ""),
        hint=None if names else "`zenlaunch up MODEL` starts one",
    )


def _is_held(lock: Path) -> bool:
    try:
        fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        # Shared, so that two who look at the same time do not take each other for the holder.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def wait_gone(one: Known, *, timeout_s: float | None = None) -> bool:
    """Wait until a deployment has ended; returns whether it has."""
    until = None if timeout_s is None else time.monotonic() + timeout_s
    while _is_held(one.folder / "lock"):
        if until is not None and time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


# -- leftovers -------------------------------------------------------


def leftovers(root: Path) -> tuple[Leftover, ...]:
    """Return the processes of instances whose zenlaunch is gone, of any deployment of this user."""
    rows = child.processes()
    sessions: dict[int, tuple[str, int | None]] = {}
    found: dict[int, str] = {}
    for one in known(root):
        if not one.running and one.boot_id == boot_id():
            for session, began in one.sessions.items():
                sessions[session] = (one.name, began)
    for row in rows:
        marker, owner = child.marks_of(row.pid)
        if marker is not None and owner is not None and not child.is_alive(owner):
            name = marker.partition("/")[0]
            found[row.pid] = name
            sessions[row.session] = (name, None)
    for row in rows:
        if row.pid in found or row.session not in sessions or row.state == "Z":
            continue
        name, since = sessions[row.session]
        if row.session != os.getsid(0) and not _given_out_again(row, since):
            found[row.pid] = name
    zombies = {row.pid for row in rows if row.state == "Z"}
    return tuple(
        Leftover(pid=pid, deployment=name, command=checks.command_of(pid))
        for pid, name in sorted(found.items())
        if pid not in zombies
    )


def _given_out_again(row: child.Process, began: int | None) -> bool:
    """Say whether a process is of a later session with the number of one that `began` then.

    The kernel gives a number out again when nobody uses it any more, so a leader that lives decides
    for all. Without a leader, one with an environment of its own is a stranger: it would bear our
    mark. `began` is None where a process of the session bears it.
    """
    if began is None:
        return False
    leader = child.start_time(row.session)
    if leader is not None:
        return leader != began
    return (child.start_time(row.pid) or 0) < began or child.has_environment(row.pid)


def end_leftovers(root: Path, *, timeout_s: float = 20.0) -> tuple[Leftover, ...]:
    """SIGKILL what dead deployments have left and wait until it is gone; returns what it was.

    Raises LaunchError for processes that do not go.
    """
    ended: dict[int, Leftover] = {}
    until = time.monotonic() + timeout_s
    sweep_until = time.monotonic() + child.SWEEP_S
    while left := leftovers(root):
        for one in left:
            ended[one.pid] = one
            if child.sweeps(one.pid) and time.monotonic() < sweep_until:
                continue
            with contextlib.suppress(OSError):
                os.kill(one.pid, signal.SIGKILL)
        if time.monotonic() > until:
            pids = ", ".join(str(one.pid) for one in left)
            raise LaunchError(
                f"processes of an earlier run do not end: {pids}",
                hint="they hang in the kernel; look at them with `ps -o pid,stat,wchan`",
            )
        time.sleep(0.02)
    _clear_dead(root)
    return tuple(ended[pid] for pid in sorted(ended))
