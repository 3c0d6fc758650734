"""A process tree seen from zenlaunch: started through a shim, ended, and known to be gone.

Owns the other end of the shim's socket, the pipe with the tree's output, and the cleaning up after
a shim that was killed. Does not decide when to start or end anything (lifecycle), nor what the
output means (supervisor). Never waits for "any child": other code in the process may have children
of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zenlaunch.cpuset import CpuSet
from zenlaunch.errors import LaunchError

# In the environment of every process of an instance: DEPLOYMENT/NAME/UUID, and who started it.
MARKER = "ZENLAUNCH_INSTANCE"
OWNER = "ZENLAUNCH_OWNER"
SHIM = Path(__file__).with_name("shim.py")
PR_SET_CHILD_SUBREAPER = 36
PIPE_BYTES = 1 << 20  # an engine is not held up by a pause of the event loop
READ_BYTES = 1 << 18
SHIM_PATIENCE_S = 5.0
SWEEP_S = 2.0

_shims: set[int] = set()


@dataclass(frozen=True, slots=True)
class Process:
    """One row of /proc."""

    pid: int
    parent: int
    session: int
    state: str


def processes() -> list[Process]:
    """Read all processes from /proc; those that end meanwhile are left out."""
    rows = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        fields = _stat(entry.name)
        if len(fields) > 3:
            rows.append(
                Process(int(entry.name), int(fields[1]), int(fields[3]), fields[0].decode())
            )
    return rows


def _stat(pid: int | str) -> list[bytes]:
    """Return the fields of /proc/PID/stat from the state on; [] for a process that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return []


def tree(root: int, rows: list[Process] | None = None) -> list[int]:
    """Return `root` and the pids below it, parents first; empty when it is gone."""
    rows = processes() if rows is None else rows
    children: dict[int, list[int]] = {}
    for row in rows:
        children.setdefault(row.parent, []).append(row.pid)
    found = [root] if any(r.pid == root for r in rows) else []
    for pid in found:
        found.extend(children.get(pid, ()))
    return found


def marks_of(pid: int) -> tuple[str | None, str | None]:
    """Return (instance marker, owner) from a process's environment.

    None where there are none, or where the program has overwritten its environment area (as
    setproctitle does).
    """
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None, None
    found = {}
    for entry in environ.split(b"\0"):
        name, _, value = entry.partition(b"=")
        if name in (MARKER.encode(), OWNER.encode()):
            found[name.decode()] = value.decode(errors="replace")
    return found.get(MARKER), found.get(OWNER)


def marker_of(pid: int) -> str | None:
    """Return the instance marker in a process's environment, if it is to be found there."""
    return marks_of(pid)[0]


def has_environment(pid: int) -> bool:
    """Say whether a process has an environment, or may have: not where it was overwritten."""
    try:
        return b"=" in Path(f"/proc/{pid}/environ").read_bytes()
    except PermissionError:
        return True
    except OSError:
        return False


def start_time(pid: int) -> int | None:
    """Return when a process began, in clock ticks since boot; None when it is gone."""
    fields = _stat(pid)
    return int(fields[19]) if len(fields) > 19 else None


def pid_namespace() -> str:
    """Return the name of our pid namespace: pids of another one mean other processes."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return "pid:[?]"


def own_id() -> str:
    """Return what names this process beyond the reuse of its pid."""
    return f"{pid_namespace()}/{os.getpid()}/{start_time(os.getpid())}"


def is_alive(owner: str) -> bool:
    """Say whether the process of an `own_id` lives; one of another namespace is taken for alive."""
    namespace, _, rest = owner.partition("/")
    pid, _, began = rest.partition("/")
    if namespace != pid_namespace() or not pid.isdigit():
        return True
    return str(start_time(int(pid))) == began


def become_subreaper() -> bool:
    """Make orphans of a killed shim our children; returns whether the kernel agreed."""
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)


def _cannot_start(error: OSError) -> LaunchError:
    return LaunchError(
        f"the kernel gives no process or no file for it: {error.strerror}",
        hint="limits: `ulimit -n` of open files, `ulimit -u` of processes, pids.max of the cgroup",
    )


def describe_status(status: int | None) -> str:
    """Say how a process ended, in words: "exit 1", "SIGSEGV"."""
    if status is None:
        return "its shim was killed"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        try:
            return signal.Signals(number).name
        except ValueError:
            return f"signal {number}"
    return f"exit {os.waitstatus_to_exitcode(status)}"


class Child:
    """A running tree. `pid` is its main process; `status` its wait status once it has ended."""

    def __init__(self, name: str, marker: str) -> None:
        self.name = name
        self.marker = marker
        self.pid = 0
        self.shim_pid = 0
        self.status: int | None = None
        self.gone = asyncio.Event()
        self._popen: subprocess.Popen[bytes]
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter
        self._output = -1
        self._on_output: Callable[[bytes], None]
        self._tasks: set[asyncio.Task[None]] = set()

    @classmethod
    async def spawn(
        cls,
        *,
        name: str,
        marker: str,
        argv: tuple[str, ...],
        env: Mapping[str, str],
        on_output: Callable[[bytes], None],
        cwd: Path | None = None,
        cpus: CpuSet | None = None,
        mem_nodes: CpuSet | None = None,
    ) -> Child:
        """Start a shim and the program below it.

        `on_output` gets what the tree writes to stdout and stderr. With `cpus` or `mem_nodes` the
        shim binds the program itself. Raises LaunchError when the program cannot be executed.
        """
        self = cls(name, marker)
        self._on_output = on_output
        try:
            ours, theirs = socket.socketpair()
        except OSError as e:
            raise _cannot_start(e) from e
        # From the spawn on there must be no way out that forgets the shim: so this comes first.
        try:
            self._reader, self._writer = await asyncio.open_connection(sock=ours)
        except BaseException:
            ours.close()
            theirs.close()
            raise
        try:
            out_r, out_w = os.pipe()
        except OSError as e:
            self._writer.close()
            theirs.close()
            raise _cannot_start(e) from e
        with contextlib.suppress(OSError):  # above the limit of an unprivileged user
            fcntl.fcntl(out_r, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        # The program's environment goes over the socket, not through the shim: preloaded libraries
        # and Python settings are meant for the program. What the shim needs is to be found.
        marks = {MARKER: marker, OWNER: own_id()}
        shim_env = {k: v for k, v in os.environ.items() if k in ("PATH", "LD_LIBRARY_PATH")}
        try:
            self._popen = subprocess.Popen(
                [sys.executable, "-I", "-S", str(SHIM), str(theirs.fileno()), name],
                stdin=subprocess.DEVNULL,
                stdout=out_w,
                stderr=out_w,
                env=shim_env | marks,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        except OSError as e:
            self._writer.close()
            os.close(out_r)
            raise _cannot_start(e) from e
        finally:
            theirs.close()
            os.close(out_w)
        self.shim_pid = self._popen.pid
        _shims.add(self.shim_pid)
        os.set_blocking(out_r, False)
        self._output = out_r
        asyncio.get_running_loop().add_reader(out_r, self._read_output)
        self._send(
            {
                "argv": argv,
                "env": dict(env) | marks,
                "cwd": str(cwd) if cwd else None,
                "cpus": list(cpus) if cpus else None,
                "mem_nodes": list(mem_nodes) if mem_nodes else None,
            }
        )
        started: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._run(self._listen(started))
        try:
            error = await started
        except asyncio.CancelledError:
            self.kill()
            await self.gone.wait()
            raise
        if error is not None:
            await self.gone.wait()
            raise LaunchError(error)
        return self

    def signal(self, number: int) -> None:
        """Send a signal to the main process, and to no other."""
        self._send({"signal": int(number)})

    def kill(self) -> None:
        """SIGKILL the whole tree; `gone` is set when nothing is left."""
        self._send({"kill": True})
        self._run(self._insist())

    def _send(self, message: dict[str, Any]) -> None:
        if not self._writer.is_closing():
            self._writer.write(json.dumps(message).encode() + b"\n")

    def _run(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _insist(self) -> None:
        """Do without the shim when it does not react: stopped by somebody, or stuck in an exec."""
        try:
            async with asyncio.timeout(SHIM_PATIENCE_S):
                await self.gone.wait()
        except TimeoutError:
            below: list[int] = []
            with contextlib.suppress(OSError):
                below = tree(self.shim_pid)[1:]
            for pid in (*below, self.shim_pid):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)

    async def _listen(self, started: asyncio.Future[str | None]) -> None:
        try:
            while line := await self._reader.readline():
                message = json.loads(line)
                if "pid" in message:
                    self.pid = message["pid"]
                if "exited" in message:
                    self.status = message["exited"]
                if ("pid" in message or "error" in message) and not started.done():
                    started.set_result(message.get("error"))
        except (OSError, ValueError):
            pass  # the shim was killed in the middle of a line: as good as end of file
        while self._popen.poll() is None:  # it has closed its socket, so it is exiting
            await asyncio.sleep(0.005)
        if self._popen.returncode != 0:
            await end_orphans(self.shim_pid, self.marker)
        _shims.discard(self.shim_pid)
        self._writer.close()
        self._close_output()
        if not started.done():
            started.set_result("its shim ended early")
        self.gone.set()

    def _read_output(self) -> None:
        try:
            data = os.read(self._output, READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self._on_output(data)
        else:
            self._close_output()

    def _close_output(self) -> None:
        """Read what is there already and close; whoever still holds the pipe is not awaited."""
        if self._output < 0:
            return
        asyncio.get_running_loop().remove_reader(self._output)
        left = 4 * PIPE_BYTES
        with contextlib.suppress(OSError):
            while left > 0 and (data := os.read(self._output, READ_BYTES)):
                left -= len(data)
                self._on_output(data)
        os.close(self._output)
        self._output = -1


def sweeps(pid: int) -> bool:
    """Say whether a process is Python's resource tracker, which clears /dev/shm (see the shim)."""
    with contextlib.suppress(OSError):
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


async def end_orphans(session: int, marker: str) -> None:
    """SIGKILL and reap what a killed shim has left: its session, its marker, what we adopted."""
    pause_s = 0.005
    sweep_until = time.monotonic() + SWEEP_S
    while True:
        try:
            rows = processes()
        except OSError:  # a limit of open files: what cannot be seen now is there all the same
            await asyncio.sleep(0.5)
            continue
        ours = os.getpid()
        own_session = os.getsid(0)
        roots = [
            r.pid
            for r in rows
            if r.pid != ours
            and (
                r.session == session
                or (r.parent == ours and r.pid not in _shims and r.session != own_session)
                or marker_of(r.pid) == marker
            )
        ]
        doomed = {pid for root in roots for pid in tree(root, rows)}
        if not doomed:
            return
        parents = {r.pid: r.parent for r in rows}
        for pid in doomed:
            if not (sweeps(pid) and time.monotonic() < sweep_until):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            if parents.get(pid) == ours:
                with contextlib.suppress(OSError):
                    os.waitpid(pid, os.WNOHANG)
        await asyncio.sleep(pause_s)
        pause_s = min(pause_s * 2, 0.5)
