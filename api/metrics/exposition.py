"""Prometheus metrics of the current run, in base units, below a hundred series a deployment.

Every figure comes from the store, so a counter does not fall when this process restarts. By default
there is no series per expert, layer
or rank; the page has those. ``level`` adds more. The library's global registry is not used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import Any

from api.metrics.definitions import Level, Metric, metrics_of
from api.monitor.monitor import Monitor
from api.monitor.reader import BackgroundReader
from api.monitor.state import BUCKETS_S, Durations
from eplb.errors import StoreError

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
        level: ``layer`` adds a series per layer, ``rank`` one per layer and rank as well.
        event_streams: gives how many are open, and how many were ended as too slow; None: there
            are none.
    """

    def __init__(
        self,
        monitor: Monitor,
        level: Level = "default",
        *,
        reader: BackgroundReader | None = None,
        event_streams: Callable[[], tuple[int, int]] | None = None,
    ) -> None:
        self._monitor, self._level = monitor, level
        self._reader, self._event_streams = reader or BackgroundReader(monitor), event_streams

    def families(self) -> Iterator[Any]:
        """Give the metrics in the library's own form.

        Raises:
            StoreError: the store cannot be read.
        """
        seen, store = self._reader.reading(), self._monitor.store
        run = seen.state.run
        found = metrics_of(
            seen,
            self._level,
            drift=self._monitor.drift(seen),
            migration=store.published(),
            samples_stored=sum(store.sample_counts(run).values()) if run is not None else 0,
            backend=store.backend.kind,
            received=self._monitor.received() if self._level == "rank" else None,
            event_streams=self._event_streams() if self._event_streams else None,
        )
        for metric in found:
            yield _family(metric, seen.state.deployment)


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
