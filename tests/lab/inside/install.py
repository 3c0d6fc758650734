"""Under a systemd of its own: install, install another plan over what runs, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from inside.kernel import ENGINE, save, sh, status_of
from inside.systemd import UNITS, active, bind_by_affinity, has_cpuset, main_pid

FIRST, SECOND = "zenlaunch-i0.service", "zenlaunch-i1.service"
PROXY = "zenlaunch-proxy.service"


def render(count: int, flags: str) -> str:
    return (
        f"zenlaunch render systemd --engine command --instances {count} --kv-cache 16M "
        f"--weights 16M --overhead 64M --program /usr/local/bin/zenlaunch {flags} "
        f"-- /usr/bin/python3 {ENGINE} --mib 8 --port {{port}}"
    )


def files() -> str:
    return sh("ls -lR --time-style=full-iso /etc/zenlaunch /etc/systemd/system", check=False)


def main() -> None:
    seen: dict[str, Any] = {}
    before = files()
    seen["no"] = status_of(f"echo n | {render(2, '--install')}")
    foreign = UNITS / "zenlaunch-proxy.socket"
    foreign.write_text("[Socket]\nListenStream=1\n")
    seen["foreign"] = status_of(render(2, "--install --yes"))
    foreign.unlink()
    seen["untouched"] = files().splitlines()[1:] == before.splitlines()[1:]
    seen["install"] = status_of(render(2, "--install --yes"))
    if not has_cpuset():
        bind_by_affinity("zenlaunch-*.service")
    seen["before"] = {
        command: status_of(f"zenlaunch {command}")
        for command in ("status", "verify", "logs i0", "down")
    }
    sh("systemctl start zenlaunch.target")
    pids = {unit: main_pid(unit) for unit in (FIRST, PROXY)}
    seen["diff"] = status_of(render(1, "--diff"))
    seen["fewer"] = status_of(render(1, "--install --yes"))
    seen["gone"] = [active([SECOND])[SECOND], (UNITS / SECOND).exists()]
    seen["same"] = {unit: main_pid(unit) for unit in (FIRST, PROXY)} == pids
    seen["status"] = json.loads(sh("zenlaunch status --json"))
    seen["again"] = status_of(render(1, "--install --yes"))
    plan = Path("/etc/zenlaunch/plan.json")
    plan.write_text("{")
    seen["damaged"] = status_of("zenlaunch status")
    save("install.json", seen)


main()
