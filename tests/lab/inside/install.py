"""Under a systemd of its own: install, install another plan over what runs, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from inside.kernel import ENGINE, save, sh, status_of, wait_for
from inside.load import Load
from inside.systemd import UNITS, active, bind_by_affinity, has_cpuset, main_pid

FIRST, SECOND = "zenlaunch-i0.service", "zenlaunch-i1.service"
PROXY = "zenlaunch-proxy.service"
URL = "http://127.0.0.1:8000"


def render(count: int, flags: str) -> str:
    return (
        f"zenlaunch render systemd --engine command --instances {count} --kv-cache 16M "
        f"--weights 16M --overhead 64M --program /usr/local/bin/zenlaunch {flags} "
        "--access-log /var/log/zenlaunch/access "
        f"-- /usr/bin/python3 {ENGINE} --mib 8 --port {{port}}"
    )


def files() -> str:
    return sh("ls -lR --time-style=full-iso /etc/zenlaunch /etc/systemd/system", check=False)


def roll() -> dict[str, Any]:
    """Restart all under load, the proxy too."""
    units = [FIRST, SECOND, PROXY]
    before = [main_pid(unit) for unit in units]
    with Load(URL, streams=4, tokens=60) as load:
        wait_for("streams run", lambda: load.streaming == 4)
        said = [status_of("zenlaunch restart --rolling"), status_of("zenlaunch restart proxy")]
    return {
        "said": said,
        "anew": [main_pid(unit) not in (0, old) for unit, old in zip(units, before, strict=True)],
        "load": load.report(),
    }


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
    nobody = "setpriv --reuid 65534 --regid 65534 --clear-groups zenlaunch"
    seen["nobody"] = {
        command: status_of(f"{nobody} {command}")
        for command in ("status", "verify", "restart i0", "down")
    }
    seen["roll"] = roll()
    seen["logged"] = len(Path("/var/log/zenlaunch/access").read_text().splitlines())
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
