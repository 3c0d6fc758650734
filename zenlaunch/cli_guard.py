"""`zenlaunch guard`: the command that the units call, three times in the life of an instance.

Apart from the other commands, so that no option parser but the standard library's is imported: it
runs twice in every start, for all instances at once, on CPUs that the engines want.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path


def run(argv: Sequence[str]) -> int:
    """Run `guard check|ready|drain`; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="zenlaunch guard", description="What the units of `zenlaunch render systemd` ask."
    )
    parser.add_argument(
        "question",
        choices=("check", "ready", "drain"),
        help="before the start: may it? after it: does it serve? before the stop: no more requests",
    )
    parser.add_argument("--plan", type=Path, required=True, help="the plan file of the units")
    parser.add_argument("--instance", required=True, help="which instance")
    given = parser.parse_args(argv[1:])
    from zenlaunch import guard

    guarded = guard.read_plan_file(given.plan, given.instance)
    if given.question == "check":
        guard.check(guarded, _say)
    elif given.question == "drain":
        guard.drain(guarded, _say)
    else:
        pid = os.environ.get("MAINPID", "")
        guard.ready(guarded, int(pid) if pid.isdigit() else None, _say)
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
