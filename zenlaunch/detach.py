"""Starting a deployment that outlives the terminal, and waiting for it from outside.

Owns the session of its own, where its talk goes, and the question whether it came up. The
deployment itself is an ordinary `zenlaunch up`, told through its arguments that nobody looks at it.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from zenlaunch import control
from zenlaunch.errors import LaunchError

PAUSE_S = 0.2


def start(
    argv: Sequence[str], *, output: Path, environ: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start `argv` in a session of its own, its stdout and stderr added to `output`.

    Raises LaunchError.
    """
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with output.open("ab") as file:
            return subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=environ,
                start_new_session=True,
                cwd="/",
            )
    except OSError as e:
        raise LaunchError(
            f"cannot start in the background: {e.filename or argv[0]}: {e.strerror}",
            hint=f"its talk goes to {output}; XDG_STATE_HOME chooses another folder",
        ) from e


def wait_ready(
    process: subprocess.Popen[bytes],
    socket: Path,
    *,
    on_status: Callable[[Mapping[str, Any]], None] = lambda status: None,
) -> int | None:
    """Wait until the deployment is ready (returns None) or has ended (returns its exit status).

    `on_status` gets each answer to `status` on the way.
    """
    while True:
        code = process.poll()
        if code is not None:
            return code
        status = None
        if socket.exists():
            try:
                status = control.ask(socket, {"do": "status"})["status"]
            except LaunchError:
                status = None  # it has just made the socket, or is just leaving
        # Another deployment of this name may hold the socket until ours has been refused.
        if status is not None and status.get("pid") == process.pid:
            on_status(status)
            if status["state"] == "ready":
                return None
        time.sleep(PAUSE_S)
