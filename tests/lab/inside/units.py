"""In the guest, systemd as init: the rendered units installed, started, hurt, stopped, rebooted.

Each step leaves a JSON of what was seen; what it should have been is said by the test outside.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

from inside.kernel import ENGINE, OUT, ask, engines, facts, get, save, sh, status_of, wait_for
from inside.load import Load
from inside.systemd import active, main_pid, show

from zenlaunch.render.quoting import env_line, exec_line

URL = "http://127.0.0.1:8000"
NAMES = ("i0", "i1", "i2", "i3")
UNITS = [f"zenlaunch-{name}.service" for name in NAMES]
FAULT = Path("/var/lib/zenlaunch/die-i0")
PLAN = Path("/etc/zenlaunch/plan.json")
RENDER = (
    "zenlaunch render systemd --engine command --instances 4 --kv-cache 16M --weights 16M "
    "--overhead 64M --program /usr/local/bin/zenlaunch {} "
    f"-- /usr/bin/python3 {ENGINE} --mib 48 --like-vllm /var/cache/zenlaunch/code "
    "--die-after 2 --die-if /var/lib/zenlaunch/die-{{name}} "
    "--hold /var/lib/zenlaunch/hold-{{name}} --port {{port}} --cpus {{cpus}}"
)


def main() -> None:
    if (OUT / "rebooting").exists():
        after_reboot()
        return
    quoting()
    install()
    start()
    reload_proxy()
    restart_proxy()
    commands()
    rolling()
    change_cpuset()
    stop()
    cold_cache()
    refusals()
    leftovers()
    start_limit()
    sh("systemctl enable zenlaunch.target")
    save("rebooting", True)
    sh("systemctl reboot")
    signal.pause()


def step(name: str) -> None:
    print(f"{time.monotonic():7.1f} {name}", flush=True)


def states() -> dict[str, str]:
    return active([*UNITS, "zenlaunch-proxy.service", "zenlaunch-proxy.socket", "zenlaunch.target"])


def kernel() -> dict[int, list[dict[str, Any]]]:
    return {port: [facts(pid) for pid in pids] for port, pids in engines().items()}


def usable() -> list[str]:
    status = get(f"{URL}/zenlaunch/status") or {"upstreams": []}
    return [u["name"] for u in status["upstreams"] if u["state"] == "ready"]


def quoting() -> None:
    """Give systemd words that it must not change."""
    step("quoting")
    words = [
        "", " two  words ", "100%", "%i%%n", "$HOME", "${HOME}", "$$", "a'b", 'say "x"', "\\",
        "\\n", "ends in \\", ";", "&&", "#x", "a\tb", "{}", "naïve ☃", "-", "@x", "*",
    ]  # fmt: skip
    command = exec_line(
        ["/usr/bin/python3", "/lab/src/inside/dump.py", "/run/quoting.json", *words]
    )
    lines = [env_line(f"NASTY_{k}", value) for k, value in enumerate(words)]
    Path("/run/nasty.env").write_text("\n".join(lines) + "\n")
    Path("/run/systemd/system/quoting.service").write_text(
        f"[Service]\nType=oneshot\nEnvironmentFile=/run/nasty.env\nExecStart={command}\n"
    )
    sh("systemctl daemon-reload; systemctl start quoting.service")
    arguments, environ = json.loads(Path("/run/quoting.json").read_text())
    values = [environ.get(f"NASTY_{k}") for k in range(len(words))]
    save("quoting.json", {"words": words, "arguments": arguments, "values": values})


def install() -> None:
    step("install")
    first = status_of(RENDER.format("--diff"))
    sh(RENDER.format("--install --yes"))
    again = status_of(RENDER.format("--diff"))
    folder = "/etc/systemd/system"
    verify = status_of(
        "systemd-analyze verify " + " ".join(f"{folder}/{u}" for u in [*UNITS, "zenlaunch.target"])
    )
    exposure = {
        unit: status_of(f"systemd-analyze security --no-pager --offline=true {folder}/{unit}")[1]
        .rstrip().rpartition("\n")[2]
        for unit in ("zenlaunch-i0.service", "zenlaunch-proxy.service")
    }  # fmt: skip
    save(
        "install.json",
        {
            "diff_before": first[0],
            "diff_after": again,
            "verify": verify,
            "exposure": exposure,
            "env_mode": oct(Path("/etc/zenlaunch/i0.env").stat().st_mode & 0o777),
        },
    )


def start() -> None:
    step("start")
    began = time.monotonic()
    started = status_of("systemctl start zenlaunch.target")
    seconds = time.monotonic() - began
    step(f"started: {started[0]}")
    seen = states()
    # The proxy asks its upstreams by itself; systemd's "active" is the engine's own word.
    wait_for("the proxy sees all", lambda: len(usable()) == 4)
    save(
        "start.json",
        {
            "rc": started,
            "seconds": seconds,
            "states": seen,
            "kernel": kernel(),
            "plan": json.loads(PLAN.read_text())["plan"],
            "answers": [ask(URL) for _ in range(8)],
            "proxy_cpus": facts(main_pid("zenlaunch-proxy.service"))["cpus"],
            "journal": sh("journalctl -b -o cat -u 'zenlaunch-*' --no-pager"),
        },
    )


def kill_one() -> None:
    step("kill -9")
    before = {unit: main_pid(unit) for unit in UNITS}
    os.kill(before[UNITS[1]], signal.SIGKILL)
    wait_for("i1 to go", lambda: show(UNITS[1], "ActiveState")["ActiveState"] != "active")
    during = [ask(URL) for _ in range(6)]
    wait_for("i1 to be back", lambda: states()[UNITS[1]] == "active", timeout_s=120)
    wait_for("the proxy sees it", lambda: "i1" in usable())
    after = {unit: main_pid(unit) for unit in UNITS}
    save(
        "kill.json",
        {
            "before": before,
            "during": during,
            "after": after,
            "restarts": {unit: show(unit, "NRestarts")["NRestarts"] for unit in UNITS},
        },
    )


def reload_proxy() -> None:
    step("reload the proxy under load")
    unit = "zenlaunch-proxy.service"
    before = main_pid(unit)
    with Load(URL, streams=2, tokens=300) as load:
        wait_for("streams run", lambda: load.streaming == 2)
        sh(f"systemctl reload {unit}")
        wait_for("the successor is the main process", lambda: main_pid(unit) != before)
        wait_for("the old one is gone", lambda: not Path(f"/proc/{before}").exists())
    reloaded = time.monotonic()
    kill_one()
    # Longer than the watchdog, so that the successor's heartbeats count.
    wait_for("the watchdog's time", lambda: time.monotonic() > reloaded + 32)
    seen = show(unit, "ActiveState", "NRestarts", "MainPID")
    save("reload.json", {"before": before, "unit": seen, "load": load.report(), "now": ask(URL)})


def restart_proxy() -> None:
    step("restart the proxy under load")
    with Load(URL, streams=2, tokens=60) as load:
        wait_for("streams run", lambda: load.streaming == 2)
        began = time.monotonic()
        rc = status_of("systemctl restart zenlaunch-proxy.service")
        seconds = time.monotonic() - began
        wait_for("it serves again", lambda: load.answered_after(began + seconds))
    save("proxy.json", {"rc": rc, "seconds": seconds, "load": load.report()})


def commands() -> None:
    step("status, verify, logs, restart")
    before = main_pid(UNITS[3])
    status = json.loads(sh("zenlaunch status --json"))
    table = sh("zenlaunch status")
    rc, verify = status_of("zenlaunch verify --json 2>/dev/null")
    logs = sh("zenlaunch logs i0 -n 500")
    said = sh("zenlaunch restart i3")
    save(
        "commands.json",
        {
            "status": status,
            "table": table,
            "verify_rc": rc,
            "verify": json.loads(verify),
            "logs": logs,
            "restart": said,
            "new_process": main_pid(UNITS[3]) != before,
            "unknown": status_of("zenlaunch logs i9"),
        },
    )


def rolling() -> None:
    """Roll under load, and the third does not come back."""
    step("restart --rolling under load")
    before = {unit: main_pid(unit) for unit in UNITS}
    drop_in = Path(f"/run/systemd/system/{UNITS[2]}.d/lab.conf")
    drop_in.parent.mkdir(parents=True)
    drop_in.write_text("[Service]\nExecStart=\nExecStart=/bin/false\n")
    sh("systemctl daemon-reload")
    away: list[list[str]] = []  # who was not active, each time that this changed
    rolled = threading.Event()

    def watch() -> None:
        while not rolled.wait(0.5):
            now = [unit for unit, state in active(UNITS).items() if state != "active"]
            if now and away[-1:] != [now]:
                away.append(now)

    watcher = threading.Thread(target=watch)
    watcher.start()
    with Load(URL, streams=4, tokens=100) as load:
        wait_for("streams run", lambda: load.streaming == 4)
        said = status_of("zenlaunch restart --rolling")
    rolled.set()
    watcher.join()
    after = {unit: main_pid(unit) for unit in UNITS}
    drop_in.unlink()
    sh("systemctl daemon-reload")
    mended = status_of("zenlaunch restart i2")
    save(
        "rolling.json",
        {
            "before": before, "after": after, "said": said, "away": away, "load": load.report(),
            "mended": mended,
        },
    )  # fmt: skip


def change_cpuset() -> None:
    step("change a cpuset under running threads")
    unit, port = UNITS[2], 8003
    before = [facts(pid) for pid in engines()[port]]
    plan = json.loads(PLAN.read_text())["plan"]["instances"][2]["cpus"]
    first = plan.partition("-")[0].partition(",")[0]
    sh(f"systemctl set-property --runtime {unit} AllowedCPUs={first}")
    sh(f"systemctl set-property --runtime {unit} AllowedCPUs={plan}")
    after = [facts(pid) for pid in engines()[port]]
    verify = status_of("zenlaunch verify --json 2>/dev/null")
    sh(f"systemctl restart {unit}")
    mended = [facts(pid) for pid in engines()[port]]
    save("cpuset.json", {"before": before, "after": after, "verify": verify, "mended": mended})


def stop() -> None:
    step("stop")
    began = time.monotonic()
    rc = status_of("systemctl stop zenlaunch.target")
    seconds = time.monotonic() - began
    # A target is down at once, its services when their engines have ended.
    wait_for("all are down", lambda: set(states().values()) == {"inactive"}, timeout_s=60)
    left = sh("ps -u zenlaunch -o pid=,args=", check=False)
    save("stop.json", {"rc": rc, "seconds": seconds, "states": states(), "left": left})


def cold_cache() -> None:
    """Two instances with one compile cache: i1 lets i0 fill it; warm, it does not wait."""
    good = PLAN.read_text()
    data = json.loads(good)
    for name in ("i0", "i1"):
        data["launch"][name]["compile_cache"] = "lab"
    PLAN.write_text(json.dumps(data))
    sh("install -d -o zenlaunch -g zenlaunch /var/cache/zenlaunch/vllm")
    hold = Path("/var/lib/zenlaunch/hold-i0")
    found = {}
    for name in ("cold", "warm"):
        step(f"{name} cache")
        hold.touch()
        since = sh("date +%s").strip()
        journal = f"journalctl -o cat --no-pager --since @{since} -u {UNITS[1]}"
        sh(f"systemctl start --no-block {UNITS[0]} {UNITS[1]}")
        wait_for("i1 says something", lambda j=journal: any(w in sh(j) for w in ("cold", "ready")))
        found[name] = {"i1": states()[UNITS[1]], "journal": sh(journal)}
        hold.unlink()
        wait_for("both", lambda: {states()[unit] for unit in UNITS[:2]} == {"active"})
        sh(f"systemctl stop {UNITS[0]} {UNITS[1]} zenlaunch-proxy.socket zenlaunch-proxy.service")
    PLAN.write_text(good)
    save("cache.json", found)


def refusals() -> None:
    """Start i0 on what is not planned; each time with one thing changed."""
    unit, found = UNITS[0], {}
    good = PLAN.read_text()
    drop_in = Path(f"/run/systemd/system/{unit}.d/lab.conf")
    drop_in.parent.mkdir(parents=True)

    def attempt(name: str, overrides: str = "", plan: str = good) -> None:
        step(f"refusal: {name}")
        PLAN.write_text(plan)
        drop_in.write_text(f"[Unit]\nStartLimitIntervalSec=0\n[Service]\nRestart=no\n{overrides}")
        sh("systemctl daemon-reload")
        since = sh("date +%s").strip()
        rc, _ = status_of(f"systemctl start {unit}")
        found[name] = {
            "rc": rc,
            **show(unit, "ActiveState", "Result", "ExecMainStatus"),
            "journal": sh(f"journalctl -o cat --no-pager --since @{since} -u {unit}"),
            "running": engines().get(8001, []),
        }
        sh(f"systemctl stop {unit}; systemctl reset-failed {unit}", check=False)

    data = json.loads(good)
    data["machine"]["machine"]["model"] = "another CPU"
    attempt("another machine", plan=json.dumps(data))
    attempt("no such CPU", "AllowedCPUs=\nAllowedCPUs=99")
    attempt("no such node", "NUMAMask=\nNUMAMask=9")
    attempt("wrong CPUs", "AllowedCPUs=\nAllowedCPUs=7")
    with subprocess.Popen(
        ["python3", "-c", "import socket as s, time; k = s.create_server(('127.0.0.1', 8001)); "
         "print('bound', flush=True); time.sleep(600)"],
        stdout=subprocess.PIPE,
    ) as holder:  # fmt: skip
        assert holder.stdout is not None
        holder.stdout.readline()
        attempt("port taken")
        holder.kill()
    PLAN.write_text(good)
    drop_in.unlink()
    sh("systemctl daemon-reload")
    other = json.loads(sh("zenlaunch probe --json"))
    other["machine"]["model"] = "another CPU"
    Path("/tmp/other.json").write_text(json.dumps(other))
    before = sh("ls -lR --time-style=full-iso /etc/zenlaunch /etc/systemd/system")
    rc, said = status_of(RENDER.format("--install --yes --machine /tmp/other.json"))
    same = before == sh("ls -lR --time-style=full-iso /etc/zenlaunch /etc/systemd/system")
    found["install"] = {"rc": rc, "said": said, "untouched": same}
    save("refusals.json", found)


def leftovers() -> None:
    """Start over what an earlier run has left: refused, and told; without it, all is well."""
    step("leftovers")
    unit = UNITS[0]
    drop_in = Path(f"/run/systemd/system/{unit}.d/lab.conf")
    # With the unit's own KillMode= systemd leaves nothing; what hangs in the kernel does stay.
    drop_in.write_text("[Service]\nRestart=no\nKillMode=process\n")
    sh(f"systemctl daemon-reload; systemctl start {unit}")
    main, worker = engines()[8001]
    os.kill(main, signal.SIGKILL)
    wait_for("it to be down", lambda: show(unit, "ActiveState")["ActiveState"] == "failed")
    since = sh("date +%s").strip()
    rc = status_of(f"systemctl start {unit}")[0]
    found = {
        "rc": rc,
        "worker": worker,
        "alive": engines().get(8001),
        "journal": sh(f"journalctl -o cat --no-pager --since @{since} -u {unit}"),
    }
    os.kill(worker, signal.SIGKILL)
    wait_for("it to be gone", lambda: not engines().get(8001))
    found["then"] = status_of(f"systemctl start {unit}")[0]
    drop_in.unlink()
    sh(f"systemctl daemon-reload; systemctl stop {unit}")
    save("leftovers.json", found)


def start_limit() -> None:
    step("start limit")
    unit = UNITS[0]
    drop_in = Path(f"/run/systemd/system/{unit}.d/lab.conf")
    drop_in.write_text("[Service]\nRestartSec=1\n")
    FAULT.touch()
    sh("systemctl daemon-reload")
    began = time.monotonic()
    sh(f"systemctl start zenlaunch-proxy.socket {UNITS[1]} {unit}", check=False)
    failed = wait_for(
        "the start limit",
        lambda: (
            (s := show(unit, "ActiveState", "Result", "NRestarts"))["ActiveState"] == "failed" and s
        ),
        timeout_s=240,
    )
    save(
        "limit.json",
        {
            "seconds": time.monotonic() - began,
            "unit": failed,
            "again": status_of(f"systemctl start {unit}")[0],
            "answers": [ask(URL) for _ in range(4)],
            "usable": usable(),
        },
    )
    FAULT.unlink()
    drop_in.unlink()
    sh(f"systemctl daemon-reload; systemctl reset-failed {unit}")


def after_reboot() -> None:
    step("after the reboot")
    wait_for("all are active", lambda: set(states().values()) == {"active"}, timeout_s=180)
    wait_for("the proxy sees all", lambda: len(usable()) == 4)
    save(
        "reboot.json",
        {"states": states(), "answers": [ask(URL) for _ in range(8)], "kernel": kernel()},
    )
    down = status_of("zenlaunch down")
    save("down.json", {"down": down, "states": states(), "left": engines()})


main()
