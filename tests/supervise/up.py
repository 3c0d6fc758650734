"""A zenlaunch of its own, to be killed by tests: `up.py FOLDER NAME COUNT [engine flags]`.

Prints the name of each event, with its member.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from supervise.world import deployment, engine
from zenlaunch.events import Event, LogLines, StateChanged
from zenlaunch.supervisor import run


def show(event: Event) -> None:
    if not isinstance(event, LogLines):
        state = f" {event.state}" if isinstance(event, StateChanged) else ""
        print(type(event).__name__, getattr(event, "name", "-"), state, flush=True)


folder, name, count, *flags = sys.argv[1:]
specs = [engine(f"i{n}", *flags, drain_s=600.0) for n in range(int(count))]
outcome = asyncio.run(run(deployment(Path(folder), *specs, name=name), on_event=show))
sys.exit(outcome.exit_code)
