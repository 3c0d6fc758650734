"""Commands about what runs: up, proxy, status, verify, logs, restart, down.

Each reads its options, calls the rooms below and prints; `cli` registers them.
"""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zenlaunch.cli_options import (
    AsJson,
    ConfigFile,
    ModelArgument,
    Port,
    ZenTorch,
    read_config,
    takes_all_wishes,
    takes_proxy_wishes,
)
from zenlaunch.config import Policy
from zenlaunch.errors import ConfigError, LaunchError
from zenlaunch.stdout import reader_is_gone, write_line

if TYPE_CHECKING:
    from rich.console import Console

    from zenlaunch.compose import Composed
    from zenlaunch.deployments import Known
    from zenlaunch.events import Outcome
    from zenlaunch.proxy.options import ProxyOptions
    from zenlaunch.units import Units
    from zenlaunch.up import Folders


def _checked_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
        raise ConfigError(f"--name {name!r}: use letters, digits, dot, dash and underscore")
    return name


Name = Annotated[
    str, typer.Option("--name", callback=_checked_name, help="Name of the deployment.")
]


@takes_all_wishes
def up(
    ctx: typer.Context,
    model: ModelArgument = None,
    config_file: ConfigFile = None,
    name: Name = "default",
    detach: Annotated[
        bool,
        typer.Option("--detach", "-d", show_default=False,
                     help="Go on in the background; return when all is ready."),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan, start nothing.", show_default=False)
    ] = False,
    ask: Annotated[
        str | None,
        typer.Option("--ask", show_default=False,
                     help="When all is ready, put this question through the proxy."),
    ] = None,
    machine: Annotated[
        str | None,
        typer.Option("--machine", show_default=False,
                     help="A saved probe: refuse to start on any other machine."),
    ] = None,
    port: Port = None,
    zentorch: ZenTorch = None,
    background: Annotated[Path | None, typer.Option("--background", hidden=True)] = None,
    *,
    wishes: Mapping[str, Any],
) -> None:  # fmt: skip
    """Start instances and proxy; stay until Ctrl-C.

    What follows `--` goes to the engine: zenlaunch up MODEL -- --max-model-len 8192
    """
    from zenlaunch.compose import compose, read_machine
    from zenlaunch.output import make_console, print_plan
    from zenlaunch.up import choose_folders, refuse_other_machine, refuse_what_cannot_run

    if background is not None:
        os.chdir(background)  # where the user typed the command: its paths may be relative
    config = read_config(ctx, model, config_file, port, zentorch, wishes)
    topology, here = read_machine(None, None)
    if machine is not None:
        refuse_other_machine(read_machine(machine, None)[0], topology, source=machine)
    composed = compose(config, topology, here=here)
    refuse_what_cannot_run(composed)
    console = make_console()
    if dry_run:
        print_plan(composed, console, dict(os.environ))
        return
    folders = choose_folders(name, os.environ)
    if detach and background is None:
        _detach(name, folders, console)
        return
    outcome = _run_here(
        name, composed, folders, console, question=ask, background=background is not None
    )
    if outcome.error is not None:
        raise outcome.error
    raise typer.Exit(outcome.exit_code)


def _run_here(
    name: str,
    composed: Composed,
    folders: Folders,
    console: Console,
    *,
    question: str | None,
    background: bool,
) -> Outcome:
    import asyncio

    from zenlaunch import deployments
    from zenlaunch.front import open_to_others
    from zenlaunch.output import plan_map
    from zenlaunch.screens import UpScreen
    from zenlaunch.session import Session
    from zenlaunch.up import make_deployment, members_of, proxy_url

    ended = deployments.end_leftovers(folders.runtime)
    url = proxy_url(composed.plan)
    members = members_of(name, composed, folders)
    with deployments.claim(folders.runtime, name, members, url=url, log_dir=folders.logs) as claim:
        # After the claim: what it writes belongs to the deployment of this name.
        deployment = make_deployment(name, composed, folders, hangup_stops=not background)
        with UpScreen(composed.plan, console) as screen:
            for gone in ended:
                screen.say(
                    f"ended a leftover of {gone.deployment}: pid {gone.pid} ({gone.command})"
                )
            for line in plan_map(composed.topology, composed.plan):
                screen.say(line)
            screen.say(f"logs in {folders.logs}")
            environ = os.environ | composed.config.engine.env
            if (warning := open_to_others(composed.config.proxy, environ)) is not None:
                screen.say(f"warning  {warning}", "yellow")
            session = Session(
                deployment,
                claim,
                url=url,
                screen=screen,
                question=question,
                look_every_s=composed.config.engine.look_every_s,
            )
            return asyncio.run(session.run())


def _detach(name: str, folders: Folders, console: Console) -> None:
    """Start the same command in the background and wait until it is ready or has ended."""
    from zenlaunch import detach as background

    # The child sees --detach too, and --background, which makes it stay.
    try:
        folder = str(Path.cwd())
    except OSError as e:
        raise LaunchError(
            f"the current folder is not there any more: {e.strerror}", hint="cd /"
        ) from e
    here = sys.argv[1:]
    at = here.index("--") if "--" in here else len(here)
    argv = [
        *(sys.executable, "-m", "zenlaunch"),
        *(*here[:at], "--background", folder, *here[at:]),
    ]
    output = folders.logs / "up.log"
    earlier = output.stat().st_size if output.exists() else 0
    process = background.start(argv, output=output)
    shown: dict[str, str] = {}

    def show(status: Mapping[str, Any]) -> None:
        for row in status["instances"]:
            what = row["phase"] or row["state"]
            if shown.get(row["name"]) != what:
                shown[row["name"]] = what
                console.print(f"{row['name']:<6}{what}")

    which = "" if name == "default" else f" --name {name}"
    try:
        code = background.wait_ready(
            process, folders.runtime / name / "control.sock", on_status=show
        )
    except KeyboardInterrupt:
        console.print(f"it goes on in the background; `zenlaunch down{which}` ends it")
        raise
    if code is None:
        console.print(f"{name} is up; `zenlaunch status{which}`, `zenlaunch down{which}`")
        console.print(f"its output goes to {output}")
        return
    with output.open("rb") as file:
        file.seek(earlier)
        tail = file.read().decode(errors="replace").splitlines()[-20:]
    error = LaunchError(
        f"{name} did not come up (exit {code})", log_tail=tuple(tail), hint=f"all of it: {output}"
    )
    if 0 < code < 128:
        error.exit_code = code  # as `up` in the foreground would have ended
    raise error


@takes_proxy_wishes
def proxy(
    ctx: typer.Context,
    upstream: Annotated[
        list[str] | None,
        typer.Option("--upstream", help="URL or NAME=URL of an engine; repeat it.",
                     show_default=False),
    ] = None,
    upstreams_file: Annotated[
        Path | None,
        typer.Option("--upstreams-file", show_default=False,
                     help="A file with one upstream a line, read again on SIGHUP."),
    ] = None,
    config_file: ConfigFile = None,
    listen: Annotated[
        str | None, typer.Option("--listen", help="HOST:PORT.", show_default=False)
    ] = None,
    policy: Annotated[
        Policy | None,
        typer.Option("--policy", help="How an engine is chosen.", show_default=False),
    ] = None,
    admin_socket: Annotated[
        Path | None,
        typer.Option("--admin-socket", help="A unix socket for drain and resume.",
                     show_default=False),
    ] = None,
    upstream_key_file: Annotated[
        Path | None,
        typer.Option("--upstream-key-file", help="The key that the engines ask for.",
                     show_default=False),
    ] = None,
    metrics_file: Annotated[
        Path | None,
        typer.Option("--metrics-file", help="Prometheus text to add to /metrics.",
                     show_default=False),
    ] = None,
    drain_s: Annotated[
        float | None,
        typer.Option("--drain-s", help="How long answers may finish at the end (120).",
                     show_default=False),
    ] = None,
    *,
    wishes: Mapping[str, Any],
) -> None:  # fmt: skip
    """Run the proxy alone.

    Before engines that somebody else started: each --upstream, each line of --upstreams-file.
    SIGHUP reads that file and the keys again; SIGUSR2 puts a new process in the place of this one.
    """
    from zenlaunch.front import open_to_others, proxy_options
    from zenlaunch.notify import listen_fd
    from zenlaunch.proxy.address import parse_upstream, read_upstreams
    from zenlaunch.proxy.server import run as serve

    given = {**wishes, "proxy.listen": listen, "proxy.policy": policy, "engine.drain_s": drain_s}
    config = read_config(ctx, None, config_file, None, None, given)
    if not upstream and upstreams_file is None:
        raise ConfigError("no engine is named", hint="Give --upstream URL, or --upstreams-file.")
    for text in upstream or ():
        if any(c.isspace() for c in text):
            raise ConfigError(f"--upstream {text!r}: an address has no blanks")
    fixed = [parse_upstream(text, name=f"u{k}") for k, text in enumerate(upstream or ())]
    fd = listen_fd()

    def read_options() -> ProxyOptions:
        return proxy_options(
            config.proxy,
            [*fixed, *(read_upstreams(upstreams_file) if upstreams_file is not None else ())],
            admin_socket=admin_socket,
            upstream_key_file=upstream_key_file,
            metrics_file=metrics_file,
            listen_fd=fd,
            drain_s=config.engine.drain_s,
        )

    options = read_options()
    if fd is None and (warning := open_to_others(config.proxy, os.environ)) is not None:
        print(f"warning  {warning}", file=sys.stderr, flush=True)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    raise typer.Exit(serve(options, reload=read_options))


def status(as_json: AsJson = False, name: Name = "default") -> None:
    """Show what a running deployment is doing."""
    from zenlaunch import units
    from zenlaunch.output import make_console
    from zenlaunch.screens import print_status

    if (under := _units(name)) is not None:
        document = units.status(under)
    else:
        document = _ask(name, {"do": "status"})["status"]
    if as_json:
        write_line(json.dumps(document, indent=1))
        return
    print_status(document, make_console())


def verify(as_json: AsJson = False, name: Name = "default") -> None:
    """Compare what runs with the plan.

    Threads, pages and libraries; exit status 0 only when all is as planned.
    """
    from zenlaunch import units
    from zenlaunch.output import make_console
    from zenlaunch.screens import print_verify

    if (under := _units(name)) is not None:
        found = units.verify(under)
    else:
        found = _ask(name, {"do": "verify"}, timeout_s=300)["verify"]
    if as_json:
        write_line(json.dumps(found, indent=1))
    else:
        print_verify(found, make_console())
    if not all(one["ok"] for one in found.values()):
        raise typer.Exit(LaunchError.exit_code)


def logs(
    member: Annotated[str, typer.Argument(help="An instance, or proxy.")],
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with new lines.", show_default=False)
    ] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="How many lines.")] = 50,
    name: Name = "default",
) -> None:
    """Print the last lines of an instance's log."""
    from zenlaunch import control, units
    from zenlaunch.up import choose_folders
    from zenlaunch.values import for_terminal

    if (under := _units(name)) is not None:
        command = units.log_command(under, member, lines=lines, follow=follow)
        raise typer.Exit(subprocess.call(command))
    folder = choose_folders(name, os.environ).logs
    path = folder / f"{member}.log"
    if not re.fullmatch(r"[A-Za-z0-9._-]+", member) or not path.is_file():
        there = ", ".join(sorted(p.stem for p in folder.glob("*.log"))) or "none"
        raise LaunchError(f"there is no log of {member!r} in {folder}", hint=f"logs: {there}")
    if not _is_up(name):
        print(f"{name} is not up: this is the log of an earlier run", file=sys.stderr)
    stop = reader_is_gone if follow else None
    show = for_terminal if sys.stdout.isatty() else str
    for line in control.follow(path, last=lines, stop=stop):
        write_line(show(line))


def restart(
    member: Annotated[str | None, typer.Argument(help="An instance.", show_default=False)] = None,
    rolling: Annotated[
        bool,
        typer.Option("--rolling", help="All, one after the other.", show_default=False),
    ] = False,
    name: Name = "default",
) -> None:
    """Restart an instance, or all in turn.

    Drained first; returns when it is ready again.
    """
    if (member is None) == (not rolling):
        raise ConfigError("name one instance, or say --rolling")
    from zenlaunch import units

    if (under := _units(name)) is not None:
        whom = [i.instance.name for i in under.instances] if rolling else [str(member)]
        for done_name in units.restart(under, whom):
            print(f"restarted: {done_name}", flush=True)
        return
    before = _ask(name, {"do": "status"})["status"]
    # Not by the count of restarts: one that is tried again anyway has been counted already.
    pids = {row["name"]: row["pid"] for row in _members(before)}
    if member is not None and member not in pids:
        raise LaunchError(f"there is no {member!r} in {name}", hint=f"one of {', '.join(pids)}")
    if rolling:
        _ask(name, {"do": "roll"})
        names = [row["name"] for row in before["instances"]]
    else:
        names = [str(member)]
        _ask(name, {"do": "restart", "name": member})
    while True:
        now = _ask(name, {"do": "status"})["status"]
        rows = {row["name"]: row for row in _members(now)}
        failed = next((n for n in names if rows[n]["state"] == "failed"), None)
        if rolling:
            failed = now["rolling_failed"] or failed
        if failed:
            raise LaunchError(
                f"{failed} did not become ready again", hint=f"zenlaunch logs {failed}"
            )
        done = all(rows[n]["state"] == "ready" and rows[n]["pid"] != pids[n] for n in names)
        if done and not now["rolling"]:
            print(f"restarted: {', '.join(names)}")
            return
        time.sleep(0.5)


def down(
    now: Annotated[
        bool, typer.Option("--now", help="Do not wait for answers.", show_default=False)
    ] = False,
    name: Name = "default",
) -> None:
    """Stop a deployment.

    No new requests, answers finish, then everything ends.
    """
    from zenlaunch import deployments, units

    if (under := _units(name)) is not None:
        units.down(under)
        print(f"{under.prefix} is down")
        return
    known = _find(name)
    _ask(name, {"do": "down", "hurry": now})
    deployments.wait_gone(known)
    # The lock is given back a moment before the program itself has ended.
    until = time.monotonic() + 10
    while Path(f"/proc/{known.pid}").exists() and time.monotonic() < until:
        time.sleep(0.05)
    print(f"{name} is down")


def _units(name: str) -> Units | None:
    """Return the deployment of this name under systemd, unless `up` runs one."""
    from zenlaunch import units

    return None if _is_up(name) else units.find(name)


def _is_up(name: str) -> bool:
    """Say whether `up` runs a deployment of this name."""
    from zenlaunch import deployments
    from zenlaunch.up import choose_folders

    root = choose_folders(name, os.environ).runtime
    return any(one.running and one.name == name for one in deployments.known(root))


def _members(status: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of the instances and of the proxy."""
    return [*status["instances"], *([status["proxy"]] if status["proxy"] else [])]


def _find(name: str) -> Known:
    from zenlaunch import deployments
    from zenlaunch.up import choose_folders

    return deployments.find(choose_folders(name, os.environ).runtime, name)


def _ask(name: str, request: Mapping[str, Any], *, timeout_s: float = 30.0) -> dict[str, Any]:
    from zenlaunch import control

    return control.ask(_find(name).folder / "control.sock", request, timeout_s=timeout_s)
