"""Under a systemd of its own: the units of a real vLLM, installed, started, asked, moved, stopped.

usage: real_vllm.py MODEL PYTHON. Leaves a JSON of what was seen; the test outside says what it
should have been.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from errno import ECONNREFUSED
from pathlib import Path
from typing import Any

from inside.kernel import ask, field, save, sh, status_of, wait_for
from inside.systemd import active, bind_by_affinity, has_cpuset, main_pid, show

URL = "http://127.0.0.1:8000"
INSTANCES = ["zenlaunch-i0.service", "zenlaunch-i1.service"]
PROXY = "zenlaunch-proxy.service"
ALL = [*INSTANCES, PROXY, "zenlaunch-proxy.socket", "zenlaunch.target"]
RENDER = (
    "zenlaunch render systemd {model} --python {python} --instances 2 --kv-cache 512M "
    "--overhead 2G --program /usr/local/bin/zenlaunch --install --yes "
    "-- --max-model-len 1024 --served-model-name m"
)


def main() -> None:
    model, python = sys.argv[1:]
    sh(RENDER.format(model=shlex.quote(model), python=shlex.quote(python)))
    cpuset = has_cpuset()
    if not cpuset:
        bind_by_affinity("zenlaunch-*.service")
    seen: dict[str, Any] = {"cpuset": cpuset}
    seen["verify_units"] = status_of(
        "systemd-analyze verify " + " ".join(f"/etc/systemd/system/{unit}" for unit in ALL)
    )
    seen["start"] = timed("systemctl start zenlaunch.target")
    seen["states"] = active(ALL)
    seen["answers"] = [ask(URL, max_tokens=4) for _ in range(4)]
    seen["status"] = json.loads(sh("zenlaunch status --json"))
    seen["verify"] = status_of("zenlaunch verify --json 2>/dev/null")
    seen["sandbox"] = {unit: sandbox(main_pid(unit)) for unit in (INSTANCES[0], PROXY)}
    sh("ip address add 192.0.2.1/32 dev lo")  # TEST-NET-1: an address that is not the loopback's
    seen["reached"] = {unit: reaches(unit, "192.0.2.1") for unit in (INSTANCES[0], PROXY)}
    seen["compiled"] = sh("find /var/cache/zenlaunch -name '*.so' -printf '%u %m %p\\n'")
    before = main_pid(INSTANCES[0])
    seen["restart"] = timed("zenlaunch restart i0")
    seen["restarted"] = main_pid(INSTANCES[0]) != before
    seen["after"] = [ask(URL, max_tokens=4) for _ in range(4)]
    seen["down"] = timed("zenlaunch down")
    wait_for("all are down", lambda: set(active(ALL).values()) == {"inactive"})
    seen["left"] = sh("ps -u zenlaunch -o pid=,args=", check=False)
    seen["results"] = {u: show(u, "Result", "NRestarts") for u in (*INSTANCES, PROXY)}
    # What systemd could not apply, it says; everything else of the units took effect.
    seen["warnings"] = sh("journalctl -b --no-pager -o cat -p warning _PID=1")
    save("seen.json", seen)


def timed(command: str) -> dict[str, Any]:
    began = time.monotonic()
    rc, said = status_of(command)
    seconds = time.monotonic() - began
    print(f"{seconds:6.1f} s {command}: {rc} {said}", flush=True)
    return {"rc": rc, "said": said, "seconds": round(seconds, 1)}


def sandbox(pid: int) -> dict[str, Any]:
    """Return what a process may do, as the kernel has it."""
    proc = Path(f"/proc/{pid}")
    names = ("NoNewPrivs", "Seccomp", "CapEff", "CapBnd", "Uid")
    secret = Path("/tmp/of-root")
    secret.touch()
    return {
        **{name: field(proc / "status", name) for name in names},
        "user_namespace": (proc / "ns/user").readlink() != Path("/proc/self/ns/user").readlink(),
        "devices": sorted(p.name for p in (proc / "root/dev").iterdir()),
        "sees_tmp": (proc / "root/tmp/of-root").exists(),
        "homes": sorted(p.name for p in (proc / "root/home").iterdir()),
        "writable": [
            folder
            for folder in ("/etc", "/usr", "/var/lib", "/root", "/var/lib/zenlaunch",
                           "/var/cache/zenlaunch", "/sys/fs/cgroup", "/proc/sys/kernel")
            if writable(proc / "root" / folder.lstrip("/"))
        ],
        "others_hidden": hides_others(pid),
    }  # fmt: skip


def writable(folder: Path) -> bool:
    """Say whether the mount there takes writes; root asks, so that permissions do not count."""
    return folder.is_dir() and not os.statvfs(folder).f_flag & os.ST_RDONLY


def hides_others(pid: int) -> bool:
    """Say whether its /proc shows the unit's user no processes of others (ProtectProc=)."""
    for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines():
        fields, _, rest = line.partition(" - ")
        if fields.split()[4] == "/proc":
            return "hidepid=invisible" in rest or "hidepid=2" in rest
    return False


def reaches(unit: str, address: str) -> bool:
    """Say whether the unit's control group gets through to an address (IPAddressDeny=)."""
    group = f"/sys/fs/cgroup/system.slice/{unit}/cgroup.procs"
    program = (
        f"import os, socket; open({group!r}, 'w').write(str(os.getpid())); "
        f"s = socket.socket(); s.settimeout(2); print(s.connect_ex(({address!r}, 9)))"
    )
    # Refused as far as the address, where nobody listens; else its packets are dropped.
    return int(sh(f"{shlex.quote(sys.executable)} -c {shlex.quote(program)}")) == ECONNREFUSED


main()
