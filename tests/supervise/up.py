"""A zenlaunch of its own, to be killed by tests: `up.py FOLDER NAME COUNT [engine flags]`.

Prints the name of each event, with its member, and answers on FOLDER/NAME/control.sock.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

from supervise.world import deployment, engine
from zenlaunch import commands, control, deployments
from zenlaunch.events import Event, LogLines, Spawned, StateChanged
from zenlaunch.supervisor import Supervisor, run


async def main() -> int:
    folder, name, count, *flags = sys.argv[1:]
    start_timeout_s = float(os.environ.get("START_TIMEOUT_S", "30"))
    specs = [
        engine(f"i{n}", *flags, drain_s=600.0, start_timeout_s=start_timeout_s)
        for n in range(int(count))
    ]
    wanted = deployment(Path(folder), *specs, name=name)
    with deployments.claim(Path(folder), name, wanted.instances) as claim:
        held: list[Supervisor] = []

        async def handle(request: dict[str, Any]) -> dict[str, Any]:
            return await commands.answer(held[0], request, about={"name": name, "pid": os.getpid()})

        def show(event: Event) -> None:
            if isinstance(event, Spawned):
                claim.remember_session(event.session)
            if not isinstance(event, LogLines):
                state = f" {event.state}" if isinstance(event, StateChanged) else ""
                print(type(event).__name__, getattr(event, "name", "-"), state, flush=True)

        async with control.control(claim.control_socket, handle):
            outcome = await run(wanted, on_event=show, on_start=held.append)
    return outcome.exit_code


sys.exit(asyncio.run(main()))
