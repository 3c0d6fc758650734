"""Under a systemd of its own: units as rendered, and an engine that dies a minute after each start.

Takes the six minutes that it takes: burst x (60 s + pause), in the time of a real clock.
"""

from __future__ import annotations

import json
import time
from typing import Any

from inside.kernel import ENGINE, ask, save, sh, status_of, wait_for
from inside.systemd import active, bind_by_affinity, has_cpuset, show

URL = "http://127.0.0.1:8000"
UNIT, OTHER = "zenlaunch-i0.service", "zenlaunch-i1.service"
RENDER = (
    "zenlaunch render systemd --engine command --instances 2 --kv-cache 16M --weights 16M "
    "--overhead 64M --program /usr/local/bin/zenlaunch --install --yes "
    f"-- /usr/bin/python3 {ENGINE} --mib 8 --die-after 60 --die-if /var/lib/zenlaunch/die-{{name}} "
    "--port {port}"
)


def main() -> None:
    sh(RENDER)
    if not has_cpuset():
        bind_by_affinity("zenlaunch-*.service")
    sh("install -d -o zenlaunch -g zenlaunch /var/lib/zenlaunch; touch /var/lib/zenlaunch/die-i0")
    began = time.monotonic()
    sh("systemctl start zenlaunch.target")
    limit = show(UNIT, "StartLimitIntervalUSec", "StartLimitBurst", "RestartUSec")
    failed: dict[str, str] = wait_for(
        "the start limit",
        lambda: (s := show(UNIT, "ActiveState", "Result"))["ActiveState"] == "failed" and s,
        timeout_s=600,
    )
    seen: dict[str, Any] = {
        "limit": limit,
        "seconds": time.monotonic() - began,
        "unit": failed,
        "others": active([OTHER, "zenlaunch-proxy.service"]),
        "status": json.loads(sh("zenlaunch status --json")),
        "answers": [ask(URL) for _ in range(4)],
        "again": status_of(f"systemctl start {UNIT}"),
        "journal": sh(f"journalctl -b --no-pager -o short-unix -u {UNIT}"),
        "mended": status_of("zenlaunch restart i0"),
        "after": [ask(URL) for _ in range(4)],
    }
    save("limit.json", seen)


main()
