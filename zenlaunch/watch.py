"""Watching one server: when it is ready, when it stops answering, when it hangs.

Owns the questions and their pace; the answers go out as lifecycle events. A hang is no progress
while requests run, for a time that is generous even to a long prefill on a CPU: `/health` says 200
while an engine stands still, and an engine that is merely busy moves its counter. What happened
while zenlaunch itself was stopped (SIGSTOP, Ctrl-Z) was not seen, and is no evidence.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from zenlaunch import checks
from zenlaunch import lifecycle as lc
from zenlaunch.spec import LaunchSpec

MISSES = 3
SLACK_S = 2.0  # by which a round of questions may take longer than all its patience
LOOKS = 30  # at the progress counter in the time after which an engine counts as hung


async def until_ready(spec: LaunchSpec, http: checks.Http, *, any_answer: bool) -> None:
    """Return when the server answers 200 on its health path, or anything with `any_answer`."""
    while not await _answers(spec, http, any_answer=any_answer):
        await asyncio.sleep(min(spec.health.interval_s, 1.0))


async def while_serving(
    spec: LaunchSpec, http: checks.Http, tell: Callable[[lc.Event], None], *, any_answer: bool
) -> None:
    """Tell `Unready`, `Ready` again, and at last `Doomed`; returns after the last.

    An engine without requests is not hung, one whose counter moves is not either, and one that
    says nothing about itself is judged by its health path alone.
    """
    health = spec.health
    longest_round_s = health.interval_s + 2 * _patience_s(spec) + SLACK_S
    misses = 0
    quiet_since: float | None = None
    stuck_since: float | None = None
    last: float | None = None
    measure_at = 0.0
    while True:
        begun = time.monotonic()
        await asyncio.sleep(health.interval_s)
        asked = time.monotonic()
        answered = await _answers(spec, http, any_answer=any_answer)
        if answered:
            if misses >= MISSES:
                tell(lc.Ready(spec.name))
            misses, quiet_since = 0, None
        else:
            misses += 1
            quiet_since = asked if quiet_since is None else quiet_since
            if misses == MISSES:
                tell(lc.Unready(spec.name))
        running, progress = None, None
        if answered and asked >= measure_at:
            running, progress = await _progress(spec, http)
            measure_at = asked + health.hang_s / LOOKS
        if running is not None and progress is not None:
            if running == 0 or progress != last:
                stuck_since = None
            elif stuck_since is None:
                stuck_since = asked
            last = progress
        now = time.monotonic()
        if now - begun > longest_round_s:
            quiet_since, stuck_since = None, None
        elif running and stuck_since is not None and now - stuck_since >= health.hang_s:
            reason = f"hung: {running:.0f} requests running and no progress"
            break
        elif misses >= MISSES and quiet_since is not None and now - quiet_since >= health.hang_s:
            reason = f"hung: no answer on {health.path}"
            break
    tell(lc.Doomed(spec.name, f"{reason} for {health.hang_s:g} s"))


def _patience_s(spec: LaunchSpec) -> float:
    return max(1.0, min(10.0, spec.health.hang_s / MISSES))


async def _answers(spec: LaunchSpec, http: checks.Http, *, any_answer: bool) -> bool:
    answer = await http.get(spec.health.path, timeout_s=_patience_s(spec))
    return answer is not None and (any_answer or answer[0] == 200)


async def _progress(spec: LaunchSpec, http: checks.Http) -> tuple[float | None, float | None]:
    """Return (requests running, progress counter); None where the server does not say."""
    health = spec.health
    if not (health.metrics_path and health.progress_metric and health.running_metric):
        return None, None
    answer = await http.get(health.metrics_path, timeout_s=_patience_s(spec))
    if answer is None or answer[0] != 200:
        return None, None
    return (
        checks.metric(answer[1], health.running_metric),
        checks.metric(answer[1], health.progress_metric),
    )
