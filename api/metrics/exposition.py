"""Prometheus metrics of the current run, in base units, at most 130 series a deployment.

Every figure comes from the store, so a counter does not fall when this process restarts. By default
there is no series per expert, layer or rank; the page has those. ``level`` adds more. The library's
global registry is not used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from api.metrics.definitions import Level, Metric, ServiceFigures, metrics_of
from api.monitor.reader import BackgroundReader
from api.monitor.state import BUCKETS_S, Durations
from eplb.errors import StoreError

log = logging.getLogger(__name__)


def metrics_text(of_all: Iterable[Callable[[], Iterator[Any]]]) -> tuple[bytes, str]:
    """Read what is new in the stores, and give all metrics in the text format, with its type.

    A deployment whose store cannot be read has no series, unless it is the only one.

    Args:
        of_all: give the ``metric_families`` of each deployment.

    Raises:
        StoreError: no store can be read.
    """
    merged: dict[str, Any] = {}
    failed = list[StoreError]()
    for one in of_all:
        try:
            found = list(one())
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


def metric_families(
    reader: BackgroundReader,
    level: Level = "default",
    of_service: ServiceFigures | None = None,
) -> Iterator[Any]:
    """Give the metrics of one deployment in the library's own form.

    Args:
        reader: of its store.
        level: ``layer`` adds a series per layer, ``rank`` one per layer and rank as well.
        of_service: figures of the HTTP service; None: there is none.

    Raises:
        StoreError: the store cannot be read.
    """
    seen, monitor = reader.reading(), reader.monitor
    found = metrics_of(
        seen,
        level,
        drift=monitor.drift(seen),
        backend=monitor.store.backend.kind,
        received=monitor.received() if level == "rank" else None,
        of_service=of_service,
    )
    for metric in found:
        yield _family(metric, seen.state.store.deployment)


def _family(metric: Metric, deployment: str) -> Any:
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
