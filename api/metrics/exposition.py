"""Prometheus metrics of the current run, in base units, below a hundred series.

Nothing is counted here. Every figure comes from the store, to which ranks report their counters, so
a counter does not fall when this process restarts. By default there is no series per expert, layer
or rank; the page has those. ``level`` adds more. The library's global registry is not used.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any, get_args

from api.http.routes.events.feed import EventFeed
from api.metrics.definitions import Level, Metric, Scrape, metrics_of
from api.monitor.drift_watch import DriftWatch
from api.monitor.monitor import KEPT_WINDOWS, Monitor
from api.monitor.reader import Reader
from api.monitor.tally import BUCKETS_S, Durations
from eplb.errors import ConfigError
from telemetry.store import LoadStore


class Exposition:
    """A registry of its own, over one monitor.

    Args:
        feed: of the event streams; None: there are none.
        level: ``layer`` adds a series per layer, ``rank`` one per layer and rank as well.

    Raises:
        ImportError: prometheus-client is not installed; the extra ``api`` installs it.
        ConfigError: an unknown level.
    """

    def __init__(
        self,
        store: LoadStore,
        monitor: Monitor,
        level: Level = "default",
        *,
        reader: Reader | None = None,
        feed: EventFeed | None = None,
    ) -> None:
        from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry
        from prometheus_client.registry import Collector

        if level not in get_args(Level):
            known = ", ".join(get_args(Level))
            raise ConfigError(f"unknown metrics level {level!r}, expected one of: {known}")
        self._store, self._monitor, self._level = store, monitor, level
        self._reader = reader or Reader(store, monitor)
        self._feed, self._drift = feed, DriftWatch()
        self.content_type = CONTENT_TYPE_LATEST
        exposition = self

        class OfMonitor(Collector):
            def collect(self) -> Iterator[Any]:
                return exposition.families()

        self._registry = CollectorRegistry()
        self._registry.register(OfMonitor())

    def text(self) -> bytes:
        """Read what is new in the store, and give all metrics in the text format.

        Raises:
            StoreError: the store cannot be read.
        """
        from prometheus_client import generate_latest

        return generate_latest(self._registry)

    def families(self) -> Iterator[Any]:
        """Give the metrics in the library's own form."""
        scrape = self._scrape()
        for metric in metrics_of(scrape, self._level):
            yield _family(metric, scrape.seen.deployment)

    def _scrape(self) -> Scrape:
        reading = self._reader.reading()
        seen = reading.seen
        windows = self._monitor.windows(KEPT_WINDOWS)
        counts = self._store.sample_counts(seen.run) if seen.run is not None else {}
        return Scrape(
            seen=seen,
            judged=reading.judged,
            latest=windows[-1] if windows else None,
            drift=self._drift.update(seen, windows),
            migration=self._store.published(),
            samples_stored=sum(counts.values()),
            leads=reading.leads,
            backend=type(self._store).__name__.removesuffix("Store").lower(),
            received=self._monitor.received() if self._level == "rank" else None,
            event_streams=(self._feed.num_clients, self._feed.dropped) if self._feed else None,
        )


def _family(metric: Metric, deployment: str) -> Any:
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
    )

    family_of = {
        "counter": CounterMetricFamily,
        "gauge": GaugeMetricFamily,
        "histogram": HistogramMetricFamily,
    }
    labels = ("deployment", *metric.labels)
    family = family_of[metric.kind](metric.name, metric.meaning, labels=labels)
    for values, figure in metric.figures.items():
        if isinstance(figure, Durations):
            bounds = [*map(str, BUCKETS_S), "+Inf"]
            buckets = list(zip(bounds, accumulate(figure.counts), strict=True))
            family.add_metric((deployment, *values), buckets, figure.total_s)
        else:
            family.add_metric((deployment, *values), figure)
    return family
