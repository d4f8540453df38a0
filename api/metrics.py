"""What Prometheus scrapes: figures of the current run, in base units, a few dozen series in all.

Nothing is counted here. Every figure comes from the store, where ranks keep theirs for as long as
they live, so a counter does not fall when this process is started again. There is no series per
expert, layer or rank: those are for the page. Nothing is registered with the library's own global
registry.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from api.monitor import Monitor
from api.snapshot import PHASES, SOURCES, Snapshot
from eplb import __version__
from telemetry.store import LoadStore


@dataclass(frozen=True)
class Metric:
    """One name, and its figures by the values of its labels."""

    name: str  # a counter's ends in _total
    kind: Literal["gauge", "counter"]
    meaning: str
    labels: tuple[str, ...]
    figures: Mapping[tuple[str, ...], float]


class Exposition:
    """A registry of its own, over one monitor.

    Raises:
        ImportError: prometheus-client is not installed; the extra ``api`` brings it.
    """

    def __init__(self, store: LoadStore, monitor: Monitor) -> None:
        from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry
        from prometheus_client.registry import Collector

        self._store, self._monitor = store, monitor
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
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        family_of = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
        self._monitor.refresh()
        seen = self._monitor.snapshot()
        counts = self._store.sample_counts(seen.run) if seen.run is not None else {}
        for metric in metrics_of(seen, samples_stored=sum(counts.values())):
            labels = ("deployment", *metric.labels)
            family = family_of[metric.kind](metric.name, metric.meaning, labels=labels)
            for values, figure in metric.figures.items():
                family.add_metric((seen.deployment, *values), figure)
            yield family


def metrics_of(seen: Snapshot, *, samples_stored: int) -> Iterator[Metric]:
    """Give every metric of a deployment; one whose figure is not known yet has no series."""
    yield _gauge("build_info", "1; the label is the version.", {__version__: 1}, "version")
    yield from _health(seen)
    yield from _balance(seen)
    yield from _rebalances(seen)
    yield from _bytes_and_experts(seen)
    samples = {"stored": samples_stored, "lost": seen.samples_lost}
    yield _counter("telemetry_samples", "Load samples of the ranks.", samples, "result")


def _health(seen: Snapshot) -> Iterator[Metric]:
    reported = [view for view in seen.ranks if view.age_s is not None]
    mismatched = [view for view in reported if view.generation != seen.generation]
    age_help = "Age of the step, or of the thread at work, that has got on least on any rank."
    yield _gauge("progress_age_seconds", age_help, seen.progress_age_s)
    alive = sum(view.is_alive for view in seen.ranks)
    yield _gauge("ranks_alive", "Ranks that reported lately.", alive)
    frozen = sum(bool(view.frozen) for view in seen.ranks)
    yield _gauge("ranks_frozen", "Ranks that take part in no migration any more.", frozen)
    yield _gauge("paused", "1 while movement is switched off.", float(not seen.movement))
    yield _gauge("placement_version", "Generation of the committed placement.", seen.generation)
    mismatch_help = "Ranks that serve another generation than the committed one."
    yield _gauge("placement_mismatch_ranks", mismatch_help, len(mismatched))
    failures_help = "Failures of the threads that bring bytes; a second one freezes a rank."
    yield _counter("mover_failures", failures_help, seen.mover_failures)


def _balance(seen: Snapshot) -> Iterator[Metric]:
    figures: dict[str, float] = {}
    ratio = None
    if seen.heatmap is not None:
        busiest = seen.heatmap.max(axis=1)  # [L] max over mean rank load
        figures = {
            "mean": float((1 / busiest).mean()),
            "worst_layer": float(1 / busiest.max()),
            "critical_path": float(1 / busiest.mean()),
        }
        ratio = float(busiest.max())
    even_help = "Mean over busiest rank load of the latest window, 1 is even."
    yield _gauge("balancedness", even_help, figures, "agg")
    yield _gauge("rank_load_ratio_max", "Busiest rank over mean, of the worst layer.", ratio)
    last = seen.decisions[-1].imbalance_after if seen.decisions else None
    predicted = 1 / last if last else None
    yield _gauge("balancedness_predicted", "What the last decision expects.", predicted)


def _rebalances(seen: Snapshot) -> Iterator[Metric]:
    yield _counter("rebalances", "Migrations of this run that ended.", seen.ended_plans, "outcome")
    phases = {phase: float(phase == seen.phase) for phase in PHASES}
    yield _gauge("rebalance_phase", "1 for the phase of the slowest rank.", phases, "phase")
    pauses_s = np.array(seen.swap_pauses_ms) / 1e3
    quantiles = {"p50": 0.5, "p99": 0.99, "max": 1.0} if pauses_s.size else {}
    shown = {agg: float(np.quantile(pauses_s, part)) for agg, part in quantiles.items()}
    yield _gauge("swap_pause_seconds", "Time on the step path of the latest swaps.", shown, "agg")
    last_s = seen.marks[-1].time if seen.marks else None
    last_help = "When the latest rebalance was committed, in seconds since the epoch."
    yield _gauge("last_success_timestamp_seconds", last_help, last_s)
    plans_help = "Decisions of the controller."
    yield Metric("eplb_plans_total", "counter", plans_help, ("policy", "outcome"), seen.decided)


def _bytes_and_experts(seen: Snapshot) -> Iterator[Metric]:
    by_source = {source: seen.bytes_by_source.get(source, 0) for source in SOURCES}
    bytes_help = "Bytes brought from each source; other_host and disk: into the host's memory."
    yield _counter("migrated_bytes", bytes_help, by_source, "source")
    yield _counter("migrated_experts", "Experts swapped into slots.", seen.experts_moved)
    failures_help = "Records whose bytes were not those of their expert, staged or live."
    yield _counter("digest_failures", failures_help, seen.digest_failures)
    scrubbed_help = "Live slots looked at in idle steps, by what came of it."
    yield _counter("scrubbed_slots", scrubbed_help, seen.scrubbed_slots, "result")


def _gauge(
    name: str, meaning: str, figures: float | Mapping[str, float] | None, *labels: str
) -> Metric:
    return Metric(f"eplb_{name}", "gauge", meaning, labels, _by_label(figures))


def _counter(name: str, meaning: str, figures: float | Mapping[str, float], *labels: str) -> Metric:
    return Metric(f"eplb_{name}_total", "counter", meaning, labels, _by_label(figures))


def _by_label(figures: float | Mapping[str, float] | None) -> dict[tuple[str, ...], float]:
    if figures is None:
        return {}
    if isinstance(figures, Mapping):
        return {(value,): float(figure) for value, figure in figures.items()}
    return {(): float(figures)}
