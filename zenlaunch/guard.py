"""The guard of one instance under systemd: what must be true before it starts, serves and stops.

`check` refuses a machine that is not the planned one, an unbound or wrongly bound self, leftovers,
a taken port and missing memory; `ready` waits until the engine serves; `drain` takes it out of the
proxy. Each runs inside the unit, with its cpuset, policy and sandbox, so that what it sees is what
the engine will get. Reads the plan file that `render systemd` wrote; starts and ends no process.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zenlaunch import checks, compiled, procfs
from zenlaunch.cpuset import EMPTY, CpuSet
from zenlaunch.errors import ConfigError, LaunchError
from zenlaunch.memory import gib
from zenlaunch.plan import Plan, PlannedInstance, plan_from_dict
from zenlaunch.probe.sysfs import read_sysfs
from zenlaunch.same_machine import differences
from zenlaunch.spec import Evidence, Exercise, HealthCheck
from zenlaunch.topology import Topology

SCHEMA = 1
MEMORY_PATIENCE_S = 60.0  # the kernel gives back the memory of the run before within seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How one instance is asked, as the plan file has it."""

    host: str
    port: int
    health: HealthCheck
    memory_bytes: int | None
    drain_s: float
    compile_cache: str | None
    preload: str
    evidence: Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class Guarded:
    """One instance of a plan file, with all that its guard needs."""

    name: str
    plan: Plan
    machine: Topology | None
    instance: PlannedInstance
    launch: Launch
    runtime_folder: Path
    cache_folder: Path
    model_folder: str | None

    @property
    def first(self) -> PlannedInstance:
        return self.plan.instances[0]

    @property
    def stamps(self) -> Path:
        return self.cache_folder / "compiled"

    @property
    def admin_socket(self) -> Path:
        return self.runtime_folder / "proxy.sock"


def read_plan_file(path: Path, instance: str) -> Guarded:
    """Read one instance of a plan file; raises ConfigError that names what is wrong."""
    instances = read_instances(path)
    for one in instances:
        if one.instance.name == instance:
            return one
    names = ", ".join(one.instance.name for one in instances)
    raise ConfigError(f"{path} has no instance {instance!r}", hint=f"it has {names}")


def read_instances(path: Path) -> tuple[Guarded, ...]:
    """Read a plan file of `render systemd`; raises ConfigError that names what is wrong."""
    hint = "make it again with zenlaunch render systemd"
    try:
        data = json.loads(path.read_text())
        if data["schema"] != SCHEMA:
            raise ConfigError(f"{path}: schema {data['schema']!r}, not {SCHEMA}", hint=hint)
        plan = plan_from_dict(data["plan"])
        machine = data["machine"]
        topology = Topology.from_dict(machine, source=str(path)) if machine else None
        return tuple(
            Guarded(
                name=data["name"],
                plan=plan,
                machine=topology,
                instance=instance,
                launch=_launch(data["launch"][instance.name]),
                runtime_folder=Path(data["runtime_folder"]),
                cache_folder=Path(data["cache_folder"]),
                model_folder=data["model_folder"],
            )
            for instance in plan.instances
        )
    except OSError as e:
        raise ConfigError(f"{path}: {e.strerror}", hint=hint) from None
    except (ValueError, KeyError, TypeError) as e:
        raise ConfigError(f"{path} is no plan file: {e}", hint=hint) from None


def _launch(data: dict[str, Any]) -> Launch:
    evidence: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in data["evidence"].items()
    }
    if evidence["exercise"] is not None:
        evidence["exercise"] = Exercise(**evidence["exercise"])
    nested = {"health": HealthCheck(**data["health"]), "evidence": Evidence(**evidence)}
    return Launch(**data | nested)


def check(
    guarded: Guarded, say: Callable[[str], None], *, patience_s: float = MEMORY_PATIENCE_S
) -> None:
    """Raise LaunchError, with every reason, unless the instance may start.

    Waits up to `patience_s` for the node's memory, and without limit for a cold compile cache.
    """
    changed = machine_problems(guarded, read_sysfs(Path("/"), live=True))
    problems = [*changed, *binding_problems(guarded.instance), *_leftovers()]
    taken = checks.port_taken(guarded.launch.host, guarded.launch.port)
    if taken is not None:
        problems.append(taken)
    problems += _unreadable(guarded.model_folder)
    if not problems:
        problems += _missing_memory(guarded, say, patience_s)
    if problems:
        raise LaunchError(
            f"{guarded.instance.name} must not start here:\n  " + "\n  ".join(problems),
            hint="plan for it: zenlaunch render systemd --diff, then --install"
            if changed
            else None,
        )
    _wait_for_cache(guarded, say)


def machine_problems(guarded: Guarded, here: Topology) -> list[str]:
    """Say how this machine differs from the planned one."""
    if guarded.machine is None:
        return ["the plan file does not say which machine it is for"]
    found = differences(guarded.machine, here, cpus=guarded.instance.cpus)
    return [f"not the planned machine: {text}" for text in found]


def binding_problems(
    instance: PlannedInstance, status: Path = Path("/proc/self/status")
) -> list[str]:
    """Say where this process may run and allocate beside what is planned."""
    problems = []
    for key, wanted, directive in [
        ("Cpus_allowed_list", instance.cpus, "AllowedCPUs"),
        ("Mems_allowed_list", instance.mem_nodes, "AllowedMemoryNodes"),
    ]:
        allowed = _status_set(status, key)
        if wanted and allowed != wanted:
            problems.append(
                f"unbound: {key} is {allowed}, planned {wanted} ({directive}= did not take effect)"
            )
    return problems


def _status_set(status: Path, key: str) -> CpuSet:
    for line in status.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return CpuSet.parse(value)
    return EMPTY


def _unit_group() -> Path | None:
    """Return the control group of the unit that this runs in, None outside of one."""
    group = procfs.group_of("self")
    return group if group is not None and group.name.endswith(".service") else None


def _leftovers() -> list[str]:
    """Name processes of an earlier run that are still in the unit's control group."""
    group = _unit_group()
    if group is None:
        return []
    with contextlib.suppress(OSError):
        pids = [int(word) for word in (group / "cgroup.procs").read_text().split()]
        # Its command is not to be seen from here: it is in the earlier run's user namespace.
        return [
            f"pid {pid} is left of an earlier run in {group.name} (kill -KILL {pid})"
            for pid in pids
            if pid != os.getpid()
        ]
    return []


def _unreadable(folder: str | None) -> list[str]:
    """Name what this user cannot read of the model; weights are often for their maker alone."""
    if folder is None:
        return []
    if not os.access(folder, os.R_OK | os.X_OK):
        return [f"the model folder {folder} cannot be read by this user"]
    return [
        f"{path} cannot be read by this user (chmod or chown it)"
        for path in sorted(Path(folder).iterdir())
        if not os.access(path, os.R_OK)
    ]


def _missing_memory(guarded: Guarded, say: Callable[[str], None], patience_s: float) -> list[str]:
    needed, nodes = guarded.launch.memory_bytes, guarded.instance.mem_nodes
    if needed is None or not nodes:
        return []
    until = time.monotonic() + patience_s
    told = False
    while (free := sum(checks.node_free_bytes(n) or 0 for n in nodes)) < needed:
        text = f"node {nodes} has {gib(free)} free, {gib(needed)} are planned"
        if time.monotonic() > until:
            return [text]
        if not told:
            say(f"{text}; waiting up to {patience_s:g} s")
            told = True
        time.sleep(0.5)
    return []


def _wait_for_cache(guarded: Guarded, say: Callable[[str], None]) -> None:
    """While the compile cache is cold, let the first instance fill it alone."""
    key = guarded.launch.compile_cache
    if key is None or guarded.instance is guarded.first or compiled.is_warm(guarded.stamps, key):
        return
    unit = f"{guarded.name}-{guarded.first.name}.service"
    say(f"the compile cache is cold: waiting for {unit}")
    while not compiled.is_warm(guarded.stamps, key) and _unit_state(unit) == "activating":
        time.sleep(1.0)


def _unit_state(unit: str) -> str:
    import subprocess  # for the few that wait for a cache

    try:
        return subprocess.run(
            ["systemctl", "show", "--property=ActiveState", "--value", unit],
            capture_output=True, text=True, check=False, timeout=30,
        ).stdout.strip()  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""


def ready(guarded: Guarded, main_pid: int | None, say: Callable[[str], None]) -> None:
    """Wait until the engine answers; raises LaunchError when its main process ends before.

    How long it may take is the unit's TimeoutStartSec=.
    """
    launch = guarded.launch
    with _watched(main_pid) as alive:
        while _status(launch.host, launch.port, launch.health.path) != 200:
            if not alive(0.5):
                raise LaunchError(
                    f"{guarded.instance.name} ended before it was ready",
                    hint=f"journalctl -u {guarded.name}-{guarded.instance.name}.service",
                )
    foreign = _foreign_listener(launch.port)
    if foreign is not None:
        raise LaunchError(
            f"port {launch.port} is answered by pid {foreign} ({checks.command_of(foreign)}), "
            f"which is not of {guarded.instance.name}"
        )
    say(f"{guarded.instance.name} is ready")
    if launch.compile_cache is not None:
        folder = guarded.cache_folder / "vllm"
        if folder.is_dir():
            compiled.remember(guarded.stamps, launch.compile_cache, (str(folder),))
    _admin(guarded, "POST", f"/zenlaunch/upstreams/{guarded.instance.name}/resume")


def _foreign_listener(port: int) -> int | None:
    group = _unit_group()
    if group is None:
        return None
    own = [int(word) for word in (group / "cgroup.procs").read_text().split()]
    return checks.foreign_listener(port, own)


@contextlib.contextmanager
def _watched(pid: int | None) -> Any:
    """Give a function that waits some seconds and says whether `pid` still runs (None: yes)."""
    if pid is None:
        yield _slept
        return
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        yield lambda seconds: False
        return
    try:
        yield lambda seconds: not select.select([fd], [], [], seconds)[0]
    finally:
        os.close(fd)


def _slept(seconds: float) -> bool:
    time.sleep(seconds)
    return True


def drain(guarded: Guarded, say: Callable[[str], None]) -> None:
    """Take the instance out of the proxy and wait until its requests are done, or `drain_s`.

    A proxy that is not there, or does not know the instance, is no reason not to stop.
    """
    name = guarded.instance.name
    path = f"/zenlaunch/upstreams/{name}/drain"
    until = time.monotonic() + guarded.launch.drain_s
    while (answer := _admin(guarded, "POST", path)) is not None:
        in_flight = answer.get("in_flight", 0)
        if not in_flight:
            say(f"{name} is out of the proxy")
            return
        if time.monotonic() > until:
            say(f"{name} still has {in_flight} requests after {guarded.launch.drain_s:g} s")
            return
        time.sleep(0.2)
    say(f"{name}: the proxy does not answer, nothing to drain")


def _status(host: str, port: int, path: str) -> int | None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    answer = _http(family, (host, port), "GET", path, timeout_s=10.0)
    return None if answer is None else answer[0]


def _admin(guarded: Guarded, method: str, path: str) -> dict[str, Any] | None:
    """Ask the proxy on its admin socket; None when it does not answer with 200."""
    address = str(guarded.admin_socket)
    answer = _http(socket.AF_UNIX, address, method, path, timeout_s=5.0)
    if answer is None or answer[0] != 200:
        return None
    try:
        body = json.loads(answer[1])
    except ValueError:
        return None
    return body if isinstance(body, dict) else None


def _whole(answer: bytes) -> bool:
    """Say whether an answer with a content-length is there, also where the server closes late."""
    head, end, body = answer.partition(b"\r\n\r\n")
    found = re.search(rb"\r\ncontent-length: *(\d+)", head, re.IGNORECASE)
    return bool(end) and found is not None and len(body) >= int(found[1])


def _http(
    family: int, address: Any, method: str, path: str, *, timeout_s: float
) -> tuple[int, bytes] | None:
    """Put one request on a connection of its own; None when nothing that makes sense comes back.

    By hand, because http.client would cost a third of a guard's whole time.
    """
    request = f"{method} {path} HTTP/1.1\r\nhost: zenlaunch\r\ncontent-length: 0\r\n"
    try:
        with socket.socket(family, socket.SOCK_STREAM) as s:
            s.settimeout(timeout_s)
            s.connect(address)
            s.sendall(request.encode() + b"connection: close\r\n\r\n")
            answer = b""
            while not _whole(answer) and (chunk := s.recv(65536)):
                answer += chunk
        head, _, body = answer.partition(b"\r\n\r\n")
        return int(head.split(b" ", 2)[1]), body
    except (OSError, ValueError, IndexError):
        return None
