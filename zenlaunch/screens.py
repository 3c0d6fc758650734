"""Screens of what runs: the start as it goes on, status, verify.

Like `output`: readable without colour, made for 80 columns, decides nothing.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from zenlaunch import events
from zenlaunch.cpuset import CpuSet
from zenlaunch.lifecycle import State
from zenlaunch.memory import gib
from zenlaunch.observe import Verification
from zenlaunch.output import print_note
from zenlaunch.plan import Plan
from zenlaunch.stdout import ReaderGoneError


class UpScreen:
    """What `zenlaunch up` shows: a live table of the start on a terminal, else a line a change.

    `handle` takes the supervisor's events. Failures and warnings stay on the screen.
    """

    def __init__(self, plan: Plan, console: Console, *, quiet: bool = False) -> None:
        self._plan = plan
        self._console = console
        self._quiet = quiet
        self._nodes = {i.name: i.node for i in plan.instances}
        self._what: dict[str, str] = {}
        self._since: dict[str, float] = {}
        self._live: Live | None = None
        self._deaf = False
        if console.is_terminal and not quiet:
            self._live = Live(get_renderable=self._table, console=console, refresh_per_second=4)

    def __enter__(self) -> UpScreen:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.settle()

    def settle(self) -> None:
        """Leave the table as it is; what comes later is printed below it."""
        if self._live is not None:
            with contextlib.suppress(OSError, ReaderGoneError):
                self._live.stop()
            self._live = None

    def say(self, text: str | Text, style: str = "") -> None:
        """Print one line above the table.

        A terminal that is gone, or a full disk, ends the talk and nothing else.
        """
        if self._deaf:
            return
        shown = Text(text, style=style) if isinstance(text, str) else text
        try:
            (self._live.console if self._live else self._console).print(shown)
        except (OSError, ReaderGoneError):
            self._deaf = True

    def handle(self, event: events.Event) -> None:
        """Show one event."""
        match event:
            case events.Waiting(name=name, reason=reason):
                self._set(name, f"waiting {reason}")
            case events.Spawned(name=name):
                self._since[name] = time.monotonic()
                self._set(name, "starting")
            case events.PhaseReached(name=name, phase=phase):
                self._set(name, phase)
            case events.BecameReady(name=name, seconds=seconds):
                self._since.pop(name, None)
                self._set(name, f"ready    {seconds:.0f} s")
            case events.Failed():
                self._set(event.name, "failed")
                if not event.starting or event.retry_s is not None:
                    self.say(event.message, "bold red")  # else it ends `up`, and is its error
                if event.retry_s is not None:
                    self.say(f"  again in {event.retry_s:.0f} s", "dim")
            case events.StateChanged(name=name, state=state) if state in _QUIET_STATES:
                self._since.pop(name, None)
                self._set(name, state.value)
            case events.Warned(name=name, text=text):
                self.say(f"warning  {f'{name}: ' if name else ''}{text}", "yellow")
            case events.Stopping(why=why):
                self.settle()
                self.say(f"stopping ({why})" if len(why) < 20 else "stopping")
            case _:
                pass

    def show_proof(self, name: str, proof: Verification, nodes: CpuSet) -> None:
        """Show what the kernel says of a ready instance, and each thing that is not as planned."""
        bound = sum(1 for n in proof.engine_threads.values() if n)
        text = f"{bound}/{len(proof.engine_threads)} threads on plan"
        if proof.local_ratio is not None:
            text += f", {proof.local_ratio:.1%} of pages on node {nodes}"
        self._set(name, f"{self._what.get(name, 'ready')}   {text}")
        for problem in proof.problems:
            self.say(f"warning  {name}: {problem}", "yellow")

    def _set(self, name: str, what: str) -> None:
        if self._what.get(name) == what:
            return
        self._what[name] = what
        if self._live is None and not self._quiet:
            self.say(f"{name:<6}{self._place(name):<9}{what}")

    def _place(self, name: str) -> str:
        node = self._nodes.get(name)
        return "" if node is None else f"node {node}"

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False, show_header=False)
        for name in (*self._nodes, *(n for n in self._what if n not in self._nodes)):
            since = self._since.get(name)
            seconds = "" if since is None else f"{time.monotonic() - since:.0f} s"
            table.add_row(name, self._place(name), self._what.get(name, "waiting"), seconds)
        return table


def print_status(document: Mapping[str, Any], console: Console) -> None:
    """Print `zenlaunch status`: a headline, a row an instance."""
    rows = document["instances"]
    ready = sum(row["state"] == "ready" for row in rows)
    rate = [row["tokens_per_second"] for row in rows if row["tokens_per_second"] is not None]
    running = [row["requests_running"] for row in rows if row["requests_running"] is not None]
    waiting = [row["requests_waiting"] for row in rows if row["requests_waiting"] is not None]
    parts = [
        f"{document['name']}   {document['state']}   up {_duration(document['uptime_s'])}",
        document["url"],
        f"{ready} of {len(rows)} ready",
    ]
    if rate:
        parts.append(f"{sum(rate):,.0f} tok/s")
    if running:
        parts.append(f"{sum(running):.0f} running")
    if waiting:
        parts.append(f"{sum(waiting):.0f} waiting")
    console.print(Text("   ".join(parts), style="bold"))
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 1, 0, 0))
    for name in (
        "inst", "state", "node", "cores", "running", "waiting", "KV", "tok/s", "RSS", "remote",
        "restarts",
    ):  # fmt: skip
        left = name in ("inst", "state")
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    for row in rows:
        remote = row["remote_page_ratio"]
        table.add_row(
            row["name"],
            row["state"],
            _cell(row["node"]),
            str(len(CpuSet.parse(row["cpus"]))),
            _cell(row["requests_running"]),
            _cell(row["requests_waiting"]),
            "-" if row["kv_usage"] is None else f"{row['kv_usage']:.0%}",
            _cell(row["tokens_per_second"]),
            "-" if row["resident_bytes"] is None else gib(row["resident_bytes"]),
            "-" if remote is None else f"{remote:.1%}",
            str(row["restarts"]),
        )
    console.print(table)
    for row in rows:
        if row["phase"] is not None:
            console.print(f"{row['name']}  {row['phase']}")
    proxy = document["proxy"]
    if proxy is not None and proxy["state"] != "ready":
        print_note("warning", f"the proxy is {proxy['state']}.", console)


def print_verify(found: Mapping[str, Any], console: Console) -> None:
    """Print `zenlaunch verify`: a line an instance, its problems below it."""
    for name, one in found.items():
        if "threads" not in one:
            console.print(Text(f"{name}  {'; '.join(one['problems'])}", style="red"))
            continue
        engine = one["engine_threads"]
        parts = [
            f"{sum(1 for n in engine.values() if n)}/{len(engine)} engine CPUs have their thread",
            f"{one['threads']} threads, {len(one['threads_off_plan'])} off plan",
        ]
        if one["local_ratio"] is not None:
            parts.append(f"{one['local_ratio']:.1%} of pages local")
        libraries = [label for label, path in one["libraries"].items() if path]
        parts.append(f"mapped: {', '.join(libraries) or 'none that are known'}")
        console.print(Text.assemble((f"{name}  {'ok' if one['ok'] else 'NOT OK'}  ", "bold"),
                                    "; ".join(parts)))  # fmt: skip
        for problem in one["problems"]:
            print_note("warning", problem, console)


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _duration(seconds: float) -> str:
    minutes, days = int(seconds // 60), int(seconds // 86400)
    if days:
        return f"{days} d {minutes // 60 % 24} h"
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"


_QUIET_STATES = frozenset(
    {State.UNREADY, State.DRAINING, State.STOPPING, State.STOPPED, State.BACKOFF}
)
