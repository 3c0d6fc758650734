"""What is counted, and how it is told to Prometheus.

Counting is plain integers (it happens for every event that passes); prometheus-client turns them
into text when somebody asks. The engines' own metrics are joined line by line: each sample gets an
`instance` label, each family is named once with its type kept, nothing is summed.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar

from zenlaunch.proxy.balancer import State, View

if TYPE_CHECKING:
    from prometheus_client.core import Metric

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
           120.0, 300.0, 900.0)  # fmt: skip
Key = TypeVar("Key", int, str)

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


class Histogram:
    """Counts of durations in seconds by bucket."""

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(SECONDS) + 1)
        self.sum_s = 0.0

    def observe(self, value_s: float) -> None:
        """Count one duration."""
        self.counts[bisect_left(SECONDS, value_s)] += 1
        self.sum_s += value_s

    def buckets(self) -> list[tuple[str, float]]:
        """Return cumulative counts with their bounds, as Prometheus wants them."""
        total = 0
        out: list[tuple[str, float]] = []
        for bound, count in zip((*SECONDS, None), self.counts, strict=True):
            total += count
            out.append(("+Inf" if bound is None else repr(bound), total))
        return out


class Counters:
    """What was counted for one upstream."""

    __slots__ = (
        "bytes_received",
        "bytes_sent",
        "codes",
        "errors",
        "events",
        "first_byte",
        "gaps",
        "retries",
    )

    def __init__(self) -> None:
        self.codes: dict[int, int] = {}
        self.errors: dict[str, int] = {}
        self.retries: dict[str, int] = {}
        self.events = 0
        self.bytes_sent = 0
        self.bytes_received = 0
        self.first_byte = Histogram()
        self.gaps = Histogram()


class Stats:
    """All counters of the proxy; `own` counts the answers it made itself, by status."""

    __slots__ = ("_by_upstream", "cancelled", "own", "queue_waits")

    def __init__(self) -> None:
        self._by_upstream: dict[str, Counters] = {}
        self.own: dict[int, int] = {}
        self.cancelled = 0
        self.queue_waits = Histogram()

    def of(self, upstream: str) -> Counters:
        """Return the counters of one upstream."""
        counters = self._by_upstream.get(upstream)
        if counters is None:
            counters = self._by_upstream[upstream] = Counters()
        return counters

    def items(self) -> Iterable[tuple[str, Counters]]:
        """Return every upstream's counters."""
        return self._by_upstream.items()


def bump(table: dict[Key, int], key: Key) -> None:
    """Add one to a count."""
    table[key] = table.get(key, 0) + 1


class _Collector:
    """The proxy's own families, made from the counters when Prometheus asks."""

    def __init__(
        self, stats: Stats, views: tuple[View, ...], *, queued: int, connections: int
    ) -> None:
        self._stats = stats
        self._views = views
        self._queued = queued
        self._connections = connections

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
        )

        def counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
            return CounterMetricFamily(f"zenlaunch_{name}", text, labels=labels)

        stats = self._stats
        requests = counter("requests", "Requests answered by an instance.", "instance", "code")
        errors = counter("errors", "Attempts that failed, by kind.", "instance", "kind")
        retries = counter("retries", "Attempts that were followed by another.", "instance", "kind")
        events = counter("events_relayed", "Server-sent events relayed.", "instance")
        relayed = counter("bytes_relayed", "Body bytes relayed.", "instance", "direction")
        first = HistogramMetricFamily(
            "zenlaunch_time_to_first_byte_seconds",
            "From the whole request to the first body byte of its answer.",
            labels=["instance"],
        )
        gaps = HistogramMetricFamily(
            "zenlaunch_event_gap_seconds", "Between two events of a stream.", labels=["instance"]
        )
        for name, counters in stats.items():
            for code, count in sorted(counters.codes.items()):
                requests.add_metric([name, str(code)], count)
            for kind, count in sorted(counters.errors.items()):
                errors.add_metric([name, kind], count)
            for kind, count in sorted(counters.retries.items()):
                retries.add_metric([name, kind], count)
            events.add_metric([name], counters.events)
            relayed.add_metric([name, "request"], counters.bytes_sent)
            relayed.add_metric([name, "response"], counters.bytes_received)
            first.add_metric([name], counters.first_byte.buckets(), counters.first_byte.sum_s)
            gaps.add_metric([name], counters.gaps.buckets(), counters.gaps.sum_s)
        yield from (requests, errors, retries, events, relayed, first, gaps)

        own = counter("own_answers", "Answers that the proxy made itself.", "code")
        for code, count in sorted(stats.own.items()):
            own.add_metric([str(code)], count)
        cancelled = counter("cancelled", "Requests whose client left before the end.")
        cancelled.add_metric([], stats.cancelled)
        yield from (own, cancelled)

        up = GaugeMetricFamily(
            "zenlaunch_upstream_up", "1 while requests may go there.", labels=["instance"]
        )
        in_flight = GaugeMetricFamily(
            "zenlaunch_in_flight", "Requests at an instance.", labels=["instance"]
        )
        ejections = counter("ejections", "Times an instance was ejected.", "instance")
        for view in self._views:
            usable = view.state in (State.READY, State.HALF_OPEN)
            up.add_metric([view.name], float(usable))
            in_flight.add_metric([view.name], view.in_flight)
            ejections.add_metric([view.name], view.ejections)
        yield from (up, in_flight, ejections)

        queued = GaugeMetricFamily("zenlaunch_queued", "Requests that wait for an instance.")
        queued.add_metric([], self._queued)
        waits = HistogramMetricFamily("zenlaunch_queue_wait_seconds", "Time spent in the queue.")
        waits.add_metric([], stats.queue_waits.buckets(), stats.queue_waits.sum_s)
        clients = GaugeMetricFamily("zenlaunch_client_connections", "Connections of clients.")
        clients.add_metric([], self._connections)
        yield from (queued, waits, clients)


def own_exposition(
    stats: Stats, views: tuple[View, ...], *, queued: int, connections: int
) -> bytes:
    """Return the proxy's own metrics as Prometheus text."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(stats, views, queued=queued, connections=connections))
    return generate_latest(registry)


# A sample of the text format 0.0.4: name, labels, value, and perhaps a time.
_LABEL = r'[ \t]*[a-zA-Z_]\w*="(?:[^"\\]|\\.)*"[ \t]*'
_SAMPLE = re.compile(
    r"(?P<name>[a-zA-Z_:][\w:]*)(?:[ \t]*\{(?P<labels>(?:LABEL(?:,LABEL)*,?)?)\})?"
    r"(?P<rest>[ \t]+[+-]?(?:\d+\.?\d*(?:e[+-]?\d+)?|\.\d+(?:e[+-]?\d+)?|inf|nan)"
    r"(?:[ \t]+-?\d+)?)[ \t]*".replace("LABEL", _LABEL),
    re.ASCII | re.IGNORECASE,
)
_PAIR = re.compile(r'(\w+)="(?:[^"\\]|\\.)*"', re.ASCII)
_META = re.compile(
    r"# (?:HELP (?P<helped>[a-zA-Z_:][\w:]*)(?: .*)?"
    r"|TYPE (?P<typed>[a-zA-Z_:][\w:]*) (?:counter|gauge|histogram|summary|untyped))",
    re.ASCII,
)


class Aggregate:
    """Join the metrics of several instances into one exposition."""

    __slots__ = ("_families",)

    def __init__(self) -> None:
        # family -> its HELP/TYPE lines and its samples, in the order of first sight
        self._families: dict[str, tuple[list[str], list[str]]] = {}

    def add(self, instance: str | None, text: str) -> None:
        """Add one exposition, each sample labelled with `instance`; with None as it is.

        A label `instance` that is there already becomes `exported_instance`, as in Prometheus.
        Lines that are no metrics are left out: one of them would make the whole unreadable.
        """
        family = ""
        described: set[str] = set()
        for line in text.split("\n"):
            if line.startswith("#"):
                meta = _META.fullmatch(line)
                if meta is None:
                    continue
                family = meta["helped"] or meta["typed"]
                known, _ = self._families.setdefault(family, ([], []))
                kind = line[:7] + family
                if kind not in described and not any(m.startswith(kind + " ") for m in known):
                    known.append(line)
                described.add(kind)
                continue
            sample = _SAMPLE.fullmatch(line)
            if sample is None:
                continue
            if instance is not None:
                line = _labelled(sample, instance)
            name = sample["name"]
            owner = family if family and name.startswith(family) else name
            self._families.setdefault(owner, ([], []))[1].append(line)

    def text(self) -> str:
        """Return the joined exposition."""
        lines: list[str] = []
        for meta, samples in self._families.values():
            lines += meta
            lines += samples
        return "\n".join(lines) + "\n" if lines else ""


def _labelled(sample: re.Match[str], instance: str) -> str:
    labels = sample["labels"] or ""
    if 'instance="' in labels:
        labels = _PAIR.sub(
            lambda pair: f"exported_{pair[0]}" if pair[1] == "instance" else pair[0], labels
        )
    comma = "," if labels.strip() else ""
    return f'{sample["name"]}{{instance="{instance}"{comma}{labels}}}{sample["rest"]}'
