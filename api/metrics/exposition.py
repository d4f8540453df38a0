"""Prometheus metrics of the current run, in base units, below a hundred series a deployment.

Nothing is counted here. Every figure comes from the store, to which ranks report their counters, so
a counter does not fall when this process restarts. By default there is no series per expert, layer
or rank; the page has those. ``level`` adds more. The library's global registry is not used.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, get_args

from api.http.routes.events.feed import EventFeed
from api.metrics.definitions import Level, Metric, Scrape, metrics_of
from api.monitor.drift_watch import DriftWatch
from api.monitor.monitor import KEPT_WINDOWS, Monitor
from api.monitor.reader import Reader
from api.monitor.snapshot import Snapshot
from api.monitor.tally import BUCKETS_S, Durations
from eplb.errors import ConfigError, StoreError
from telemetry.load.drift import Drift
from telemetry.load.folder import Window
from telemetry.state.store import StateStore

log = logging.getLogger(__name__)


def metrics_text(of_all: Iterable[Exposition]) -> tuple[bytes, str]:
    """Read what is new in the stores, and give all metrics in the text format, with its type.

    A deployment whose store cannot be read has no series, unless it is the only one.

    Raises:
        StoreError: no store can be read.
    """
    from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
    from prometheus_client.registry import Collector

    merged: dict[str, Any] = {}
    failed = list[StoreError]()
    for one in of_all:
        try:
            found = list(one.families())
        except StoreError as exc:
            failed.append(exc)
            continue
        for family in found:
            known = merged.setdefault(family.name, family)
            if known is not family:
                known.samples.extend(family.samples)
    if failed and not merged:
        raise failed[0]
    for why in failed:
        log.warning("no figures of a deployment: %s", why)

    class Merged(Collector):
        def collect(self) -> Iterator[Any]:
            return iter(merged.values())

    registry = CollectorRegistry()
    registry.register(Merged())
    return generate_latest(registry), CONTENT_TYPE_LATEST


class Exposition:
    """The metrics of one deployment, over its monitor.

    Args:
        feed: of the event streams; None: there are none.
        level: ``layer`` adds a series per layer, ``rank`` one per layer and rank as well.

    Raises:
        ConfigError: an unknown level.
    """

    def __init__(
        self,
        store: StateStore,
        monitor: Monitor,
        level: Level = "default",
        *,
        reader: Reader | None = None,
        feed: EventFeed | None = None,
    ) -> None:
        if level not in get_args(Level):
            known = ", ".join(get_args(Level))
            raise ConfigError(f"unknown metrics level {level!r}, expected one of: {known}")
        self._store, self._monitor, self._level = store, monitor, level
        self._reader = reader or Reader(store, monitor)
        self._feed, self._drift, self._drift_lock = feed, DriftWatch(), threading.Lock()

    def families(self) -> Iterator[Any]:
        """Give the metrics in the library's own form.

        Raises:
            StoreError: the store cannot be read.
        """
        scrape = self._scrape()
        for metric in metrics_of(scrape, self._level):
            yield _family(metric, scrape.seen.deployment)

    def drift(self) -> Drift | None:
        """How far the load is from the one that the serving placement was planned on.

        Raises:
            StoreError: the store cannot be read.
        """
        return self._drift_of(self._reader.reading().seen, self._monitor.windows(KEPT_WINDOWS))

    def _drift_of(self, seen: Snapshot, windows: Sequence[Window]) -> Drift | None:
        with self._drift_lock:
            return self._drift.update(seen, windows)

    def _scrape(self) -> Scrape:
        reading = self._reader.reading()
        seen = reading.seen
        windows = self._monitor.windows(KEPT_WINDOWS)
        counts = self._store.sample_counts(seen.run) if seen.run is not None else {}
        return Scrape(
            seen=seen,
            judged=reading.judged,
            latest=windows[-1] if windows else None,
            drift=self._drift_of(seen, windows),
            migration=self._store.published(),
            samples_stored=sum(counts.values()),
            leads=reading.leads,
            backend=self._store.backend.kind,
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
