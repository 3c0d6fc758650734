"""What a running deployment answers on its control socket: status, restart, down.

Owns the JSON of `zenlaunch status --json`. Joins a supervisor with what the command line knows of
the plan and of the kernel's view, which come in as plain values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from zenlaunch.errors import LaunchError
from zenlaunch.events import Load, MemberStatus
from zenlaunch.lifecycle import Role, State
from zenlaunch.supervisor import Supervisor

SCHEMA = 1


async def answer(
    supervisor: Supervisor,
    request: Mapping[str, Any],
    *,
    about: Mapping[str, Any],
    seen: Callable[[str], Mapping[str, Any]] = lambda name: {},
) -> dict[str, Any]:
    """Do what a request asks: {"do": "status" | "restart" | "roll" | "down" | "reload", ...}.

    `about` is what stays the same (name, url, ...), `seen` what the last look at an instance's tree
    found. Raises LaunchError for what cannot be done, ValueError for an unknown command.
    """
    match request.get("do"):
        case "status":
            return {"status": await document(supervisor, about=about, seen=seen)}
        case "restart":
            if supervisor.stopping:
                raise LaunchError("the deployment is stopping")
            name = str(request.get("name"))
            names = [row.name for row in supervisor.status()]
            if name not in names:
                raise LaunchError(f"there is no {name}", hint=f"there are {', '.join(names)}")
            supervisor.restart(name)
        case "roll":
            if not supervisor.roll():
                raise LaunchError("a rolling restart is under way, or the deployment is stopping")
        case "down":
            supervisor.stop(why="down", hurry=bool(request.get("hurry")))
        case "reload":
            supervisor.reload()
        case other:
            raise ValueError(f"there is no command {other!r}")
    return {}


async def document(
    supervisor: Supervisor,
    *,
    about: Mapping[str, Any],
    seen: Callable[[str], Mapping[str, Any]] = lambda name: {},
) -> dict[str, Any]:
    """Return the JSON of `zenlaunch status --json`."""
    loads = await supervisor.load()
    rows = supervisor.status()
    specs = {s.name: s for s in supervisor.deployment.instances}
    instances = []
    for row in rows:
        if row.role is not Role.INSTANCE:
            continue
        spec, load = specs[row.name], loads.get(row.name, Load())
        look = seen(row.name) if row.state is not State.STARTING else {}
        instances.append(
            _member(row)
            | {
                "node": spec.mem_nodes.first if spec.mem_nodes else None,
                "cpus": str(spec.cpus),
                "requests_running": load.running,
                "requests_waiting": load.waiting,
                "kv_usage": load.kv_usage,
                "tokens_per_second": load.tokens_per_second,
                "remote_page_ratio": look.get("remote_page_ratio"),
                "threads_off_plan": look.get("threads_off_plan"),
            }
        )
    proxy = next((_member(r) for r in rows if r.role is Role.PROXY), None)
    return {
        "schema": SCHEMA,
        **about,
        "state": overall(rows, stopping=supervisor.stopping),
        "uptime_s": round(supervisor.uptime_s, 1),
        "rolling": list(supervisor.rolling),
        "rolling_failed": supervisor.rolling_failed,
        "proxy": proxy,
        "instances": instances,
    }


def overall(rows: tuple[MemberStatus, ...], *, stopping: bool) -> str:
    """Say in one word how the deployment is: starting, ready, degraded or stopping."""
    if stopping:
        return "stopping"
    if all(r.state is State.READY for r in rows):
        return "ready"
    first_start = all(r.restarts == 0 and r.state is not State.FAILED for r in rows)
    begun = {State.STOPPED, State.STARTING, State.READY}
    return "starting" if first_start and {r.state for r in rows} <= begun else "degraded"


def _member(row: MemberStatus) -> dict[str, Any]:
    return {
        "name": row.name,
        "state": str(row.state),
        "phase": row.phase,
        "since_s": round(row.since_s, 1),
        "pid": row.pid,
        "resident_bytes": row.resident_bytes,
        "port": row.port,
        "restarts": row.restarts,
        "ready_seconds": None if row.ready_seconds is None else round(row.ready_seconds, 1),
    }
