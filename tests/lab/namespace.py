"""Boot this machine's systemd in namespaces: a real first process, real units, no emulation.

Owns the way in and out, like `vm` for the emulated guest; it starts within a second and runs what
is installed here, a real vLLM too. In exchange the kernel is this machine's: no other topology, and
no cpuset where its control groups give none (`inside.systemd` says so). Files and network are the
namespace's own, and go with it.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lab.image import REPOSITORY, Unavailable
from lab.vm import Result
from zenlaunch.places import places_of

HERE = Path(__file__).parent
SYSTEMD = Path("/lib/systemd/systemd")
GROUP = "zenlaunch-lab-"  # and the process that made it
ENDED = -signal.SIGINT  # of unshare, as of its first process: told to power off (reboot(2))

AGENT = """\
#!/bin/sh
# Do the work, leave its status, power off: nothing here needs an orderly end.
cd /lab
{python} -u /lab/src/inside/{work} {arguments} >/lab/out/log 2>&1
echo $? >/lab/out/rc
journalctl --no-pager -b -o short-monotonic >/lab/out/journal
systemctl poweroff --force --force
"""
UNIT = """\
[Unit]
Description=The lab's work
[Service]
Environment=PYTHONPATH=/lab/src HOME=/root LANG=C.UTF-8
ExecStart=/bin/sh /lab/agent
"""
TARGET = """\
[Unit]
Requires=basic.target lab-agent.service
After=basic.target
"""
PROGRAM = """\
#!{python}
import sys
sys.path.insert(0, "/lab/src")
from zenlaunch.__main__ import main
main()
"""


CHECKOUT = Path("/lab/checkout")


def seen_as(path: Path) -> Path:
    """Return what a path is called inside: the checkout has a place of its own there.

    Units have a /tmp of their own and see no home folders, and a checkout may lie in either.
    """
    if path.is_relative_to(REPOSITORY):
        return CHECKOUT / path.relative_to(REPOSITORY)
    return path


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A booted namespace; `result` waits for the end of its work."""

    folder: Path
    group: Path
    process: subprocess.Popen[bytes]
    began: float
    began_at: float  # of the wall clock, as files have it

    def result(self, *, timeout_s: float) -> Result:
        """Return what the work left. Raises Unavailable where the machine did not allow it."""
        try:
            rc = self.process.wait(max(0.0, self.began + timeout_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise AssertionError(f"no end after {timeout_s} s; its log:\n{self.text()}") from None
        finally:
            self.end()
        said = (self.folder / "console").read_text(errors="replace")
        if not (self.folder / "allowed").exists():
            raise Unavailable(f"namespaces are not allowed here: {said.strip()[-400:]}")
        assert rc == ENDED, f"status {rc}: {said}"
        files = {p.name: p.read_bytes() for p in (self.folder / "out").iterdir() if p.is_file()}
        assert "rc" in files, said
        # When it ended, not when somebody asked.
        seconds = (self.folder / "out" / "rc").stat().st_mtime - self.began_at
        return Result(rc=int(files["rc"]), log=self.text(), files=files, seconds=seconds)

    def text(self) -> str:
        log = self.folder / "out" / "log"
        return log.read_text(errors="replace") if log.is_file() else "(it has not begun)"

    def end(self) -> None:
        """Leave nothing: with the first process go all others, the mounts and the network."""
        self.process.kill()
        self.process.wait()
        until = time.monotonic() + 10
        while self.group.exists() and time.monotonic() < until:
            with contextlib.suppress(OSError):
                (self.group / "cgroup.kill").write_text("1")
            _remove_group(self.group)
            time.sleep(0.02)


def start(folder: Path, work: str, *arguments: str, readable: Iterable[Path] = ()) -> Running:
    """Run `inside/WORK` under a systemd of its own; what it writes to /lab/out comes back.

    `readable` are files and folders, by their names here, that users other than root get to read in
    it; programs of this interpreter are so already. Raises Unavailable.
    """
    group = _group()
    for name in ("out", "root", "over"):
        (folder / name).mkdir()
    words = shlex.join(arguments)
    python = seen_as(Path(sys.executable))
    texts = {
        "agent": AGENT.format(python=python, work=work, arguments=words),
        "lab-agent.service": UNIT,
        "lab.target": TARGET,
        "zenlaunch": PROGRAM.format(python=python),
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "zenlaunch").chmod(0o755)
    programs = [sys.executable, *places_of(sys.executable)]
    opened = _with_parents([*programs, *map(str, readable)])
    command = [
        *("setpriv", "--pdeathsig", "KILL"),  # with us gone (pytest was killed) it goes too
        *("unshare", "--mount", "--pid", "--ipc", "--uts", "--net", "--fork", "--kill-child", "--"),
        # The first process alone into the group: controllers want that nobody stays beside it.
        *("sh", "-c", 'echo 0 >"$0/cgroup.procs" && exec unshare --cgroup -- "$@"', str(group)),
        *(str(HERE / "namespace.sh"), str(folder), str(REPOSITORY), *opened),
    ]
    began, began_at = time.monotonic(), time.time()
    with (folder / "console").open("wb") as console:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=console, stderr=console
        )
    return Running(folder=folder, group=group, process=process, began=began, began_at=began_at)


def _group() -> Path:
    """Make a control group for all of it; raises Unavailable."""
    if os.geteuid() != 0:
        raise Unavailable("a systemd in namespaces needs root")
    for tool in (str(SYSTEMD), "unshare", "setpriv"):
        if shutil.which(tool) is None:
            raise Unavailable(f"{tool} is not on this machine")
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, kind = line.partition(" - ")
        if kind.startswith("cgroup2 "):
            top = Path(fields.split()[4])
            for old in top.glob(f"{GROUP}*"):  # of a pytest that was killed
                if not Path("/proc", old.name.split("-")[2]).exists():
                    _remove_group(old)
            group = top / f"{GROUP}{os.getpid()}-{time.monotonic_ns()}"
            try:
                group.mkdir()
            except OSError as e:
                raise Unavailable(f"no control group can be made: {e}") from None
            return group
    raise Unavailable("control groups are of version 1 alone here")


def _remove_group(group: Path) -> None:
    for folder, _, _ in os.walk(group, topdown=False):
        with contextlib.suppress(OSError):
            Path(folder).rmdir()


def _with_parents(paths: Iterable[str]) -> list[str]:
    """Return the paths and the folders above them; raises Unavailable for other file systems."""
    found: dict[str, None] = {}
    device = Path("/").stat().st_dev
    for path in paths:
        for place in (*reversed(Path(path).parents), Path(path)):
            if place.exists():
                if place.stat().st_dev != device:
                    raise Unavailable(f"{place} lies on another file system than /")
                found[str(place)] = None
    return list(found)
