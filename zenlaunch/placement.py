"""Placement: what is known of where each instance is, from its ready to its end.

Owns the proof taken round a short request at each ready, the last look, and what has become worse
between two of them; tells it to Prometheus as text in a file, which the proxy adds to its own
metrics. Reads processes through observe; starts and ends nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zenlaunch import checks, observe, procfs
from zenlaunch.spec import LaunchSpec

if TYPE_CHECKING:
    from prometheus_client.core import Metric

# Enough for a first request, which may compile. Where users' requests fill the engine for longer,
# its threads work, and nobody shall wait for this answer.
EXERCISE_TIMEOUT_S = 30.0


async def prove(
    spec: LaunchSpec, pid: int, log: Sequence[str], environ: Mapping[str, str]
) -> observe.Verification:
    """Compare the tree under `pid` with its spec in full, after a short request where it takes one.

    `log` are the lines of its start, `environ` is what it inherited, or has. An engine that does
    not answer the request with 200 (a model that makes no text, say) is judged without it.
    """
    before = None
    exercise = spec.evidence.exercise
    if exercise is not None and procfs.counts_nanoseconds():
        before = await asyncio.to_thread(procfs.tree_threads, pid)
        http = checks.Http(host=checks.connect_host(spec.host), port=spec.port)
        variable = exercise.key_variable
        answer = await http.post(
            exercise.path,
            exercise.body,
            key=(spec.env.get(variable) or environ.get(variable)) if variable else None,
            timeout_s=EXERCISE_TIMEOUT_S,
        )
        if answer is None or answer[0] != 200:
            before = None
    return await asyncio.to_thread(observe.verify, spec, pid, log, before=before)


class Placement:
    """The last proof and look of each instance, and how often it became worse."""

    def __init__(self, names: Iterable[str]) -> None:
        self._drifts = dict.fromkeys(names, 0)
        self._problems: dict[str, int] = {}
        self._looks: dict[str, observe.Look] = {}

    def proved(self, name: str, proof: observe.Verification) -> None:
        """Take note of the proof at a ready; what was wrong then is no drift."""
        self._problems[name] = len(proof.problems)
        self._looks[name] = observe.Look.of(proof)

    def looked(self, name: str, look: observe.Look) -> str | None:
        """Take note of a later look; return in words what has become worse, once."""
        worse = observe.drift(self._looks.get(name), look)
        self._looks[name] = look
        if worse is not None:
            self._drifts[name] += 1
        return worse

    def forget(self, name: str) -> None:
        """Take note that a run has ended; what was counted stays."""
        self._problems.pop(name, None)
        self._looks.pop(name, None)

    def seen(self, name: str) -> dict[str, Any]:
        """Return what `status` shows of the last look; {} before the first."""
        look = self._looks.get(name)
        if look is None:
            return {}
        return {
            "remote_page_ratio": look.remote_page_ratio,
            "threads_off_plan": look.threads_off_plan,
        }

    def write(self, path: Path, restarts: Mapping[str, int]) -> None:
        """Write the metrics, whole or not at all; raises OSError.

        `restarts` are those of each instance so far.
        """
        from prometheus_client import CollectorRegistry, generate_latest

        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Families(self._families(restarts)))
        fresh = path.with_name(f"{path.name}.new")
        fresh.write_bytes(generate_latest(registry))
        fresh.replace(path)

    def _families(self, restarts: Mapping[str, int]) -> list[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        label = ["instance"]
        again = CounterMetricFamily(
            "zenlaunch_instance_restarts", "Times it was started again.", labels=label
        )
        drifts = CounterMetricFamily(
            "zenlaunch_instance_drifts", "Times its placement became worse.", labels=label
        )
        problems = GaugeMetricFamily(
            "zenlaunch_instance_problems",
            "What was not as planned when it became ready.",
            labels=label,
        )
        threads = GaugeMetricFamily(
            "zenlaunch_instance_threads_off_plan",
            "Threads that may run outside its CPUs, at the last look.",
            labels=label,
        )
        pages = GaugeMetricFamily(
            "zenlaunch_instance_remote_page_ratio",
            "Share of its pages that is not on its node, at the last look.",
            labels=label,
        )
        for name, drifted in self._drifts.items():
            again.add_metric([name], restarts.get(name, 0))
            drifts.add_metric([name], drifted)
            if name in self._problems:
                problems.add_metric([name], self._problems[name])
            look = self._looks.get(name)
            if look is not None:
                threads.add_metric([name], look.threads_off_plan)
                if look.remote_page_ratio is not None:
                    pages.add_metric([name], look.remote_page_ratio)
        return [again, drifts, problems, threads, pages]


class _Families:
    """Families as a collector, which is what a registry takes."""

    def __init__(self, families: list[Metric]) -> None:
        self._all = families

    def collect(self) -> list[Metric]:
        return self._all
