"""The small parent of one process tree: it outlives nothing and lets nothing outlive it.

Run by file, `python -I -S shim.py FD NAME`, with one end of a socket pair as FD; the other end is
held by zenlaunch. It is the subreaper of its tree, so every descendant stays in reach whatever it
does with sessions and double forks. When the socket closes (zenlaunch ended, however it ended) or
when the main process exits, the whole tree gets SIGKILL. It decides nothing else: it starts one
program, signals it when told to, and reports. It imports almost nothing: one runs per instance.

Lines of JSON, to the shim: {"argv", "env", "cwd", "cpus", "mem_nodes"} once, then {"signal": N} for
the main process alone and {"kill": true} for the tree. From the shim: {"pid"} or {"error"}, then
{"exited": wait status}, and end of file when nothing of the tree is left. Its stdout and stderr are
those of the program. prctl(2), set_mempolicy(2), proc(5).
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import sys
import time
from typing import Any

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36
MPOL_BIND = 2
SWEEP_S = 2.0
SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237, "riscv64": 237}

# Python or a parent may have left these ignored; a program expects them as the kernel gives them.
_RESTORED = ("SIGPIPE", "SIGXFSZ", "SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGCHLD")


def descendants(root: int) -> list[int]:
    """Return the pids below `root`, read from /proc; zombies are among them."""
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc"):  # noqa: PTH208 (pathlib costs this program half its memory)
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", "rb") as f:  # noqa: PTH123 (as above)
                # The command name may hold blanks and parentheses: the fields follow the last one.
                parents[int(entry)] = int(f.read().rpartition(b")")[2].split()[1])
        except (OSError, IndexError):
            continue
    found: list[int] = []
    seen = {root}
    grown = True
    while grown:
        grown = False
        for pid, parent in parents.items():
            if parent in seen and pid not in seen:
                seen.add(pid)
                found.append(pid)
                grown = True
    return found


def sweeps(pid: int) -> bool:
    """Say whether a process is Python's resource tracker.

    It removes what a tree leaves in /dev/shm once the others have ended, and then ends itself.
    """
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as f:  # noqa: PTH123 (as above)
            return b"multiprocessing.resource_tracker" in f.read()
    except OSError:
        return False


def bind_memory(nodes: list[int]) -> int:
    """Bind this process's memory to `nodes`; returns 0 or the errno."""
    words = max(nodes) // 64 + 1
    mask = (ctypes.c_ulong * words)()
    for node in nodes:
        mask[node // 64] |= 1 << (node % 64)
    libc = ctypes.CDLL(None, use_errno=True)
    number = SET_MEMPOLICY.get(os.uname().machine)
    if number is None:
        return 38  # ENOSYS
    # The kernel reads maxnode - 1 bits (mm/mempolicy.c, get_nodes).
    done = libc.syscall(
        ctypes.c_long(number), ctypes.c_int(MPOL_BIND), mask, ctypes.c_ulong(words * 64 + 1)
    )
    return 0 if done == 0 else ctypes.get_errno()


class Shim:
    """One tree and the socket to zenlaunch."""

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.inbox = b""
        self.main = 0
        self.killing = False
        self.sweep_until: float | None = None
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        # A shim that somebody stopped goes on when zenlaunch ends, and then ends its tree.
        self.libc.prctl(PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)
        self.libc.prctl(PR_SET_NAME, b"zenlaunch-shim", 0, 0, 0)

    def say(self, message: dict[str, Any]) -> None:
        try:
            self.control.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self.killing = True

    def start(self, order: dict[str, Any]) -> None:
        """Fork and execute the main process; a failed exec is reported with its errno."""
        try:
            failed_r, failed_w = os.pipe()  # closed by a successful exec
            pid = os.fork()
        except OSError as e:  # a limit of processes, of open files, or of a cgroup's pids
            self.say({"error": f"fork: {e.strerror}"})
            self.killing = True
            return
        if pid == 0:
            self._become(order, failed_w)
        os.close(failed_w)
        self.main = pid
        with os.fdopen(failed_r, "rb") as failed:
            error = failed.read().decode(errors="replace")
        if error:
            self.say({"error": error})
        else:
            self.say({"pid": pid})

    def _become(self, order: dict[str, Any], failed_w: int) -> None:
        """Turn the forked child into the program; never returns."""
        argv = order["argv"]
        doing = argv[0]
        try:
            # If the shim is killed, its main process goes with it; zenlaunch, the subreaper above,
            # ends what is left. The signal follows the forking thread, and the shim has only one.
            self.libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            os.setpgid(0, 0)
            null = os.open("/dev/null", os.O_RDONLY)
            os.dup2(null, 0)
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            for name in _RESTORED:
                signal.signal(getattr(signal, name), signal.SIG_DFL)
            if order.get("cpus"):
                doing = f"sched_setaffinity to {order['cpus']}"
                os.sched_setaffinity(0, order["cpus"])
            if order.get("mem_nodes"):
                doing = f"set_mempolicy to nodes {order['mem_nodes']}"
                code = bind_memory(order["mem_nodes"])
                if code:
                    raise OSError(code, os.strerror(code))
            if order.get("cwd"):
                doing = order["cwd"]
                os.chdir(order["cwd"])
            doing = argv[0]
            os.execvpe(argv[0], argv, order["env"])
        except BaseException as e:
            text = e.strerror if isinstance(e, OSError) and e.strerror else repr(e)
            os.write(failed_w, f"{doing}: {text}".encode(errors="replace"))
        finally:
            os._exit(127)

    def reap(self) -> bool:
        """Collect what has ended; returns whether a child is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self.main:
                self.main = 0
                self.killing = True
                self.say({"exited": status})

    def kill_tree(self) -> None:
        tree = descendants(os.getpid())
        sweepers = [pid for pid in tree if sweeps(pid)]
        if self.sweep_until is None:
            self.sweep_until = time.monotonic() + SWEEP_S
        spared = sweepers if time.monotonic() < self.sweep_until else []
        for pid in tree:
            if pid in spared:
                continue
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                continue

    def listen(self) -> None:
        """Read orders; end of file means that zenlaunch is gone."""
        try:
            data = self.control.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self.killing = True
            return
        self.inbox += data
        *lines, self.inbox = self.inbox.split(b"\n")
        for line in lines:
            order = json.loads(line)
            if "argv" in order:
                self.start(order)
            elif "kill" in order:
                self.killing = True
            elif self.main:
                os.kill(self.main, order["signal"])

    def run(self) -> None:
        wake_r, wake_w = os.pipe()
        os.set_blocking(wake_r, False)
        os.set_blocking(wake_w, False)
        signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(ignored, signal.SIG_IGN)  # zenlaunch gets them too, and decides
        poll = select.poll()
        poll.register(wake_r, select.POLLIN)
        poll.register(self.control.fileno(), select.POLLIN)
        hear, pause_ms = True, 5
        while True:
            # While killing: look again soon, since a process may have forked between look and kill;
            # ever more rarely, since one that hangs in the kernel cannot be hurried.
            pause_ms = min(pause_ms * 2, 500) if self.killing else 5
            for fd, _ in poll.poll(pause_ms if self.killing else None):
                if fd == wake_r:
                    os.read(wake_r, 4096)
                elif hear:
                    self.listen()
                    if self.killing:
                        # What follows may be end of file, which poll would report without end.
                        poll.unregister(self.control.fileno())
                        hear = False
            if self.killing:
                self.kill_tree()
            if not self.reap() and self.killing:
                return


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    Shim(control).run()


if __name__ == "__main__":
    main()
