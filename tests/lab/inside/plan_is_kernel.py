"""In the guest: probe, plan, up with the lab's engine; what the kernel says of each instance."""

from __future__ import annotations

import json
import signal
import subprocess
import time

from inside.kernel import ENGINE, OUT, ask, engines, facts, get, save, sh, wait_for

WISH = "--engine command --instances 4 --kv-cache 16M --weights 16M --overhead 64M"
PROGRAM = f"/usr/bin/python3 {ENGINE} --mib 48 --like-vllm /tmp/compiled"
COMMAND = f"-- {PROGRAM} --port {{port}} --cpus {{cpus}}"
URL = "http://127.0.0.1:8000"


def usable() -> int:
    status = get(f"{URL}/zenlaunch/status") or {"upstreams": []}
    return sum(u["state"] == "ready" for u in status["upstreams"])


began = time.monotonic()
probe = json.loads(sh("zenlaunch probe --json"))
save("probe.json", probe)
plan = json.loads(sh(f"zenlaunch plan --json {WISH} {COMMAND}"))
save("plan.json", plan)
print(f"probe and plan: {time.monotonic() - began:.1f} s")
with (OUT / "up.log").open("wb") as log:
    command = f"exec zenlaunch up {WISH} {COMMAND}"
    up = subprocess.Popen(["sh", "-c", command], stdout=log, stderr=log)
    wait_for("all instances ready", lambda: up.poll() is not None or usable() == 4, timeout_s=150)
    print(f"ready after {time.monotonic() - began:.1f} s, up: {up.poll()}")
    running = engines()
    save("kernel.json", {port: [facts(pid) for pid in pids] for port, pids in running.items()})
    save("answers.json", [ask(URL) for _ in range(8)])
    up.send_signal(signal.SIGINT)
    rc = up.wait(90)
save("end.json", {"rc": rc, "left": engines()})
