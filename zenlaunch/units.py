"""A deployment that systemd runs, seen and moved through systemctl, journalctl and the kernel.

Owns what `status`, `verify`, `logs`, `restart` and `down` do where `render systemd --install` was
used. What the instances should be comes from the installed plan file; whether they are, from
systemd (states), the proxy (usable or drained), the engines (requests) and `observe` (threads,
pages). Starts and ends nothing by itself.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zenlaunch import checks, child, observe, procfs
from zenlaunch.errors import LaunchError
from zenlaunch.guard import Guarded, read_instances
from zenlaunch.placement import prove
from zenlaunch.spec import LaunchSpec
from zenlaunch.values import host_port

SCHEMA = 1
DEFAULT_NAME = "zenlaunch"  # what `--name default` is called under systemd
_PROPERTIES = (
    "Id", "ActiveState", "SubState", "Result", "MainPID", "NRestarts",
    "StateChangeTimestampMonotonic", "ActiveEnterTimestampMonotonic",
    "ExecMainStartTimestampMonotonic", "InvocationID",
)  # fmt: skip
_STATES = {
    ("activating", "auto-restart"): "backoff",
    ("activating", ""): "starting",
    ("reloading", ""): "ready",
    ("active", ""): "ready",
    ("deactivating", "stop"): "draining",
    ("deactivating", ""): "stopping",
    ("failed", ""): "failed",
    ("inactive", ""): "stopped",
}
_TAKEN_IN_S = 60.0  # how long the proxy may rest an upstream that had failed before


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """An installed deployment: the prefix of its units, and its instances as planned."""

    prefix: str
    instances: tuple[Guarded, ...]

    @property
    def proxy_unit(self) -> str:
        return f"{self.prefix}-proxy.service"

    def unit(self, name: str) -> str:
        """Return the unit of an instance or the proxy; raises LaunchError for others."""
        names = [*(i.instance.name for i in self.instances), "proxy"]
        if name not in names:
            raise LaunchError(
                f"{self.prefix} has no member {name!r}", hint=f"it has {', '.join(names)}"
            )
        return f"{self.prefix}-{name}.service"


def find(name: str, root: Path = Path("/")) -> Units | None:
    """Return the deployment that `render systemd --install` made under this name, or None."""
    prefix = DEFAULT_NAME if name == "default" else name
    path = root / "etc" / prefix / "plan.json"
    if not (root / "etc/systemd/system" / f"{prefix}.target").is_file() or not path.is_file():
        return None
    return Units(prefix=prefix, instances=read_instances(path))


def status(units: Units) -> dict[str, Any]:
    """Return the JSON of `zenlaunch status --json`; what systemd cannot know is null."""
    shown = _show(units)
    usable = _usable(units)
    proxy = units.instances[0].plan.proxy
    rows = []
    for one in units.instances:
        row = _member(one.instance.name, one.launch.port, shown[units.unit(one.instance.name)])
        said = usable.get(one.instance.name)
        if row["state"] == "ready" and said in ("unready", "draining", "ejected", "half-open"):
            row["state"] = "draining" if said == "draining" else "unready"
        health = one.launch.health
        text = None
        if row["state"] == "ready" and health.metrics_path is not None:
            text = _get(one.launch.port, health.metrics_path, host=one.launch.host)
        look = observe.look(spec_of(one), row["pid"]) if row["state"] == "ready" else None
        rows.append(
            row
            | {
                "node": one.instance.mem_nodes.first if one.instance.mem_nodes else None,
                "cpus": str(one.instance.cpus),
                "requests_running": _metric(text, health.running_metric),
                "requests_waiting": _metric(text, health.waiting_metric),
                "kv_usage": _metric(text, health.kv_metric),
                "tokens_per_second": None,
                "remote_page_ratio": None if look is None else look.remote_page_ratio,
                "threads_off_plan": None if look is None else look.threads_off_plan,
            }
        )
    front = _member("proxy", proxy.port, shown[units.proxy_unit])
    states = {row["state"] for row in (*rows, front)}
    target = shown[f"{units.prefix}.target"]
    return {
        "schema": SCHEMA,
        "name": units.prefix,
        "url": f"http://{host_port(checks.connect_host(proxy.host), proxy.port)}/v1",
        "supervisor": "systemd",
        "state": _overall(states),
        "uptime_s": _since_s(target["ActiveEnterTimestampMonotonic"]) or 0.0,
        "rolling": [],
        "rolling_failed": None,
        "proxy": front,
        "instances": rows,
    }


def verify(units: Units) -> dict[str, Any]:
    """Return the JSON of `zenlaunch verify --json`. Causes no restart, whatever it finds."""
    shown = _show(units)
    found: dict[str, Any] = {}
    for one in units.instances:
        name = one.instance.name
        properties = shown[units.unit(name)]
        row = _member(name, one.launch.port, properties)
        if row["pid"] is None or row["state"] != "ready":
            found[name] = {"ok": False, "problems": [f"it is {row['state']}"]}
            continue
        if not procfs.may_read(row["pid"]):
            raise LaunchError(
                f"this user may not look into the processes of {name}",
                hint=_as_root(units, "verify"),
            )
        log = _run(
            ["journalctl", "--no-pager", "-o", "cat", "-n", "5000",
             f"_SYSTEMD_INVOCATION_ID={properties['InvocationID']}"]
        ).splitlines()  # fmt: skip
        proof = prove(spec_of(one), row["pid"], log, procfs.environ_of(row["pid"]))
        found[name] = asyncio.run(proof).to_dict()
    return found


def spec_of(one: Guarded) -> LaunchSpec:
    """Return what `status` and `verify` need of a spec, from the plan file."""
    return LaunchSpec(
        name=one.instance.name,
        argv=(),
        env={"LD_PRELOAD": one.launch.preload} if one.launch.preload else {},
        host=one.launch.host,
        port=one.launch.port,
        cpus=one.instance.cpus,
        engine_cpus=one.instance.engine_cpus,
        mem_nodes=one.instance.mem_nodes,
        memory_bytes=one.launch.memory_bytes,
        evidence=one.launch.evidence,
    )


def log_command(units: Units, member: str, *, lines: int, follow: bool) -> list[str]:
    """Return the journalctl command that shows a member's log."""
    words = ["journalctl", "--no-pager", "-o", "cat", "-n", str(lines)]
    return [*words, *(["-f"] if follow else []), "-u", units.unit(member)]


def restart(units: Units, names: Sequence[str]) -> Iterator[str]:
    """Drain, end and start instances anew, one at a time; yields each that is ready again.

    Raises LaunchError, and touches no further one, when one does not become ready or the proxy does
    not take it back.
    """
    for name in names:
        _restart_one(units, name)
        yield name


def _restart_one(units: Units, name: str) -> None:
    unit = units.unit(name)
    before = _show(units)[unit]
    # What an operator asks for does not count towards the start limit.
    subprocess.run(["systemctl", "reset-failed", unit], stderr=subprocess.DEVNULL, check=False)
    # The proxy's reload puts a successor in its place; nobody waits for the old one's streams.
    verb = "reload-or-restart" if name == "proxy" else "restart"
    done = subprocess.run(["systemctl", verb, unit], check=False)
    now = _show(units)[unit]
    if done.returncode and now["InvocationID"] == before["InvocationID"]:
        raise LaunchError(f"systemd did not {verb} {name}", hint=_as_root(units, f"restart {name}"))
    if done.returncode or now["ActiveState"] != "active":
        raise LaunchError(f"{name} did not become ready again", hint=f"journalctl -u {unit}")
    until = time.monotonic() + _TAKEN_IN_S
    while (missing := _missing(units, name, before["MainPID"])) is not None:
        if time.monotonic() > until:
            raise LaunchError(missing, hint=f"journalctl -u {units.proxy_unit}")
        time.sleep(0.2)


def _missing(units: Units, name: str, old_pid: str) -> str | None:
    """Say what keeps a member that was started anew from its work."""
    if _show(units)[units.unit(name)]["MainPID"] == old_pid:  # a reload returns before it is done
        return f"{name} is still the process that it was"
    said = _usable(units).get(name)
    if said in (None, "ready", "half-open"):
        return None
    return f"{name} runs again, and the proxy does not use it: it is {said} there"


def down(units: Units) -> None:
    """Stop all units of the deployment and wait until nothing of it runs."""
    names = [f"{units.prefix}.target", f"{units.prefix}-proxy.socket", units.proxy_unit]
    names += [units.unit(one.instance.name) for one in units.instances]
    done = subprocess.run(["systemctl", "stop", *names], check=False)
    if done.returncode:
        raise LaunchError(
            f"systemctl stop ended with {done.returncode}", hint=_as_root(units, "down")
        )


def _as_root(units: Units, command: str) -> str:
    """Return a hint for what systemd or the kernel refused."""
    if os.geteuid() == 0:
        return f"journalctl -u {units.prefix}.target, systemctl status '{units.prefix}*'"
    name = "" if units.prefix == DEFAULT_NAME else f" --name {units.prefix}"
    return f"it needs root: sudo zenlaunch {command}{name}"


def _show(units: Units) -> dict[str, dict[str, str]]:
    names = [f"{units.prefix}.target", units.proxy_unit]
    names += [units.unit(one.instance.name) for one in units.instances]
    text = _run(["systemctl", "show", f"--property={','.join(_PROPERTIES)}", *names])
    found = {}
    for block in text.split("\n\n"):
        values = dict(line.partition("=")[::2] for line in block.splitlines())
        if "Id" in values:
            found[values["Id"]] = values
    missing = [name for name in names if name not in found]
    if missing:
        raise LaunchError(f"systemd does not know {', '.join(missing)}")
    return found


def _member(name: str, port: int, values: dict[str, str]) -> dict[str, Any]:
    active, sub = values["ActiveState"], values["SubState"]
    state = _STATES.get((active, sub)) or _STATES.get((active, ""), "starting")
    pid = int(values.get("MainPID") or 0) or None
    began, ready = (
        int(values.get(key) or 0)
        for key in ("ExecMainStartTimestampMonotonic", "ActiveEnterTimestampMonotonic")
    )
    return {
        "name": name,
        "state": state,
        "phase": None if state in ("ready", "stopped") else sub,
        "since_s": _since_s(values["StateChangeTimestampMonotonic"]),
        "pid": pid,
        "resident_bytes": checks.resident_bytes(child.tree(pid)) if pid else None,
        "port": port,
        "restarts": int(values.get("NRestarts") or 0),
        "ready_seconds": round((ready - began) / 1e6, 1) if ready >= began > 0 else None,
    }


def _overall(states: set[str]) -> str:
    if states == {"ready"}:
        return "ready"
    if states == {"stopped"}:
        return "stopped"
    if states & {"stopping", "draining"}:
        return "stopping"
    return "starting" if states <= {"ready", "starting", "stopped"} else "degraded"


def _since_s(monotonic_usec: str) -> float | None:
    usec = int(monotonic_usec or 0)
    return round(time.clock_gettime(time.CLOCK_MONOTONIC) - usec / 1e6, 1) if usec else None


def _usable(units: Units) -> dict[str, str]:
    """Return the proxy's word on each upstream; {} when it does not answer."""
    proxy = units.instances[0].plan.proxy
    text = _get(proxy.port, "/zenlaunch/status", host=checks.connect_host(proxy.host))
    try:
        return {row["name"]: row["state"] for row in json.loads(text or "{}")["upstreams"]}
    except (ValueError, KeyError, TypeError):
        return {}


def _get(port: int, path: str, *, host: str = "127.0.0.1") -> str | None:
    connection = http.client.HTTPConnection(host, port, timeout=5)
    try:
        connection.request("GET", path, headers={"connection": "close"})
        answer = connection.getresponse()
        body = answer.read().decode(errors="replace")
        return body if answer.status == 200 else None
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def _metric(text: str | None, name: str | None) -> float | None:
    return None if text is None else checks.metric(text, name)


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as e:
        raise LaunchError(f"{command[0]}: {e}") from None
    if done.returncode:
        raise LaunchError(f"{command[0]} ended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout
