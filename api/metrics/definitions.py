"""Definition of every metric: name, meaning, labels and values.

A value that is not known yet has no series, because a 0 would be wrong.

Shapes:  L MoE layers, R ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isnan
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from api.monitor.drift_watch import largest_layer
from api.monitor.health import Leadership
from api.monitor.snapshot import PHASES, Snapshot
from api.monitor.tally import Durations
from api.monitor.verdict import Grade, Verdict, verdict
from api.processes.supervision import ProcessState
from eplb import __version__
from eplb.migration.build import Migration
from eplb.shares.switches import DIFFERENT_PULLS, LATE_COUNTS
from telemetry.load.drift import Drift
from telemetry.load.folder import Window

Level = Literal["default", "layer", "rank"]
Figure = float | Durations

# Peers are read on a rank's own host; other hosts fill this one's memory, or their ranks send it.
LINK_OF_SOURCE = {
    "same_rank": "same_rank",
    "peer": "intra",
    "host": "host",
    "other_rank": "inter",
    "other_host": "inter",
    "disk": "disk",
}


@dataclass(frozen=True)
class Metric:
    """One name, and its figures by the values of its labels."""

    name: str  # a counter's ends in _total
    kind: Literal["gauge", "counter", "histogram"]
    meaning: str
    labels: tuple[str, ...]
    figures: Mapping[tuple[str, ...], Figure]


@dataclass(frozen=True, eq=False)
class Scrape:
    """Input of the metrics at one moment."""

    seen: Snapshot
    latest: Window | None
    drift: Drift | None
    migration: Migration | None  # the open one
    samples_stored: int
    backend: str  # kind of store
    leads: Leadership
    received: NDArray[np.int64] | None = None  # [L, R] if requested
    judged: Verdict | None = None  # None: by the snapshot alone
    event_streams: tuple[int, int] | None = None  # open, and dropped as too slow


def metrics_of(scrape: Scrape, level: Level = "default") -> Iterator[Metric]:
    """Give every metric of a deployment; one whose figure is not known yet has no series."""
    seen = scrape.seen
    yield _gauge("build_info", "1; the label is the version.", {__version__: 1}, "version")
    yield from _verdict(scrape)
    yield from _health(seen)
    yield from _leader(scrape)
    yield from _supervision(seen)
    yield from _balance(scrape)
    yield from _plans(seen)
    yield from _rebalances(scrape)
    yield from _bytes_and_experts(seen)
    yield from _batch_faults(seen)
    yield from _telemetry(scrape)
    yield from _event_streams(scrape)
    if level != "default":
        yield from _per_layer(scrape)


def _verdict(scrape: Scrape) -> Iterator[Metric]:
    judged = scrape.judged or verdict(scrape.seen)
    grades = {grade.value: float(grade is judged.grade) for grade in Grade}
    yield _gauge(
        "verdict", "1 for the verdict of now; its reason is on the page.", grades, "verdict"
    )
    silent_help = "Ranks that did not report lately, or never."
    yield _gauge("ranks_silent", silent_help, len(scrape.seen.silent_ranks))
    uncounted_help = "Ranks whose counters stay at zero while those of others grow."
    yield _gauge("ranks_uncounted", uncounted_help, len(scrape.seen.uncounted_ranks))


def _event_streams(scrape: Scrape) -> Iterator[Metric]:
    if scrape.event_streams is None:
        return
    num_open, num_dropped = scrape.event_streams
    yield _gauge("event_streams", "Open streams of events of this service.", num_open)
    dropped_help = "Streams of events that were dropped, because they were read too slowly."
    yield _counter("event_streams_dropped", dropped_help, num_dropped)


def _health(seen: Snapshot) -> Iterator[Metric]:
    reported = [view for view in seen.ranks if view.age_s is not None]
    mismatched = [view for view in reported if view.generation != seen.generation]
    age_help = "Longest time without progress of a step or of a busy thread on any rank."
    yield _gauge("progress_age_seconds", age_help, seen.progress_age_s)
    alive = sum(view.is_alive for view in seen.ranks)
    yield _gauge("ranks_alive", "Ranks that reported lately.", alive)
    frozen = sum(bool(view.frozen) for view in seen.ranks)
    yield _gauge("ranks_frozen", "Ranks with migrations disabled.", frozen)
    yield _gauge("paused", "1 while movement is switched off.", float(not seen.movement))
    yield _gauge("placement_version", "Generation of the committed placement.", seen.generation)
    mismatch_help = "Ranks that serve another generation than the committed one."
    yield _gauge("placement_mismatch_ranks", mismatch_help, len(mismatched))
    failures_help = "Failures of mover threads; a second one disables migrations on the rank."
    yield _counter(
        "mover_failures", failures_help, seen.mover_failures + seen.earlier.mover_failures
    )
    anomalies_help = "Anomalies: refused load, no plan, exit of a rank, lost contents of the store."
    yield _counter("anomalies", anomalies_help, seen.anomalies, "type")


def _leader(scrape: Scrape) -> Iterator[Metric]:
    leads = scrape.leads
    leads_help = "1 while a controller leads."
    yield _gauge("controller_leads", leads_help, float(not leads.why_none))
    # By a clock that never jumps where this process supervises the controller.
    seen_s = scrape.seen.supervision.lease_age_s
    lease_help = "Time since a turn of a controller renewed the lease."
    age_s = leads.turn_age_s if seen_s is None else seen_s
    yield _gauge("controller_lease_age_seconds", lease_help, age_s)


def _supervision(seen: Snapshot) -> Iterator[Metric]:
    report_ages: dict[str, float] = {}
    restarts: dict[str, float] = {}
    up: dict[str, float] = {}
    for view in seen.supervision.processes:
        if view.report_age_s is not None:
            report_ages[view.kind] = max(view.report_age_s, report_ages.get(view.kind, 0.0))
        restarts[view.kind] = restarts.get(view.kind, 0.0) + view.restarts
        is_up = view.state is ProcessState.RUNNING
        up[view.kind] = min(float(is_up), up.get(view.kind, 1.0))
    report_age_help = "Longest time since a report of a process of this kind."
    yield _gauge("process_report_age_seconds", report_age_help, report_ages, "process")
    up_help = "1 while every process of this kind runs; serving continues without them."
    yield _gauge("process_up", up_help, up, "process")
    restarts_help = "Restarts of processes that do not serve, since the deployment was started."
    yield _counter("process_restarts", restarts_help, restarts, "process")
    token_help = "Time since the newest token, by steps of all ranks or else by load samples."
    yield _gauge("token_age_seconds", token_help, seen.token_age_s)
    unserved = seen.supervision.unserved_s
    unserved_help = "Time without tokens around restarts of ranks, from the last token on."
    yield _counter("unserved_seconds", unserved_help, {} if unserved is None else unserved)


def _balance(scrape: Scrape) -> Iterator[Metric]:
    seen, ratio = scrape.seen, None
    busiest = _with_tokens(seen.layer_imbalance)
    figures: dict[tuple[str, ...], Figure] = {}
    if busiest is not None and scrape.latest is not None:
        by_agg = {
            "mean": (1 / busiest).mean(),
            "p95": 1 / np.quantile(busiest, 0.95),
            "worst_layer": 1 / busiest.max(),
            "critical_path": 1 / busiest.mean(),
        }
        figures = {(scrape.latest.phase, agg): float(value) for agg, value in by_agg.items()}
        ratio = float(busiest.max())
    even_help = "Inverse of the imbalance of the latest window, 1 is perfect."
    yield Metric("eplb_balancedness", "gauge", even_help, ("phase", "agg"), figures)
    yield _gauge("rank_load_ratio_max", "Imbalance of the worst layer.", ratio)
    last = seen.decisions[-1].imbalance_after if seen.decisions else None
    predicted = 1 / last if last else None
    yield _gauge("balancedness_predicted", "What the last decision expects.", predicted)
    found = scrape.drift
    drifts = {} if found is None else {"all": found.overall, "worst_layer": largest_layer(found)}
    drift_help = "Jensen-Shannon distance of the load from the load planned on, 0 to 1, less noise."
    yield _gauge("drift_score", drift_help, drifts, "layers")


def _plans(seen: Snapshot) -> Iterator[Metric]:
    plans_help = "Stored decisions of the controller."
    yield Metric("eplb_plans_total", "counter", plans_help, ("policy", "outcome"), seen.decided)
    yield _histogram("plan_duration_seconds", "Time to find each of those plans.", seen.plan_s)


def _rebalances(scrape: Scrape) -> Iterator[Metric]:
    seen = scrape.seen
    ended_help, labels = "Migrations of this run that ended.", ("trigger", "outcome")
    yield Metric("eplb_rebalances_total", "counter", ended_help, labels, seen.rebalances)
    took_help = "Time of each committed migration; all: from offered to committed."
    yield _histogram("rebalance_duration_seconds", took_help, seen.rebalance_s, phase="all")
    phases = {phase: float(phase == seen.phase) for phase in PHASES}
    yield _gauge("rebalance_phase", "1 for the phase of the slowest rank.", phases, "phase")
    pending_help = "Layers of the open migration that do not serve on every rank yet."
    yield _gauge("layers_pending", pending_help, _layers_pending(scrape))
    pauses_s = np.array(seen.swap_pauses_ms) / 1e3
    quantiles = {"p50": 0.5, "p99": 0.99, "max": 1.0} if pauses_s.size else {}
    shown = {agg: float(np.quantile(pauses_s, part)) for agg, part in quantiles.items()}
    yield _gauge("swap_pause_seconds", "Time on the step path of the latest swaps.", shown, "agg")
    yield from _pace(seen)
    last_s = seen.marks[-1].time if seen.marks else None
    last_help = "When the latest rebalance was committed, in seconds since the epoch."
    yield _gauge("last_success_timestamp_seconds", last_help, last_s)


def _pace(seen: Snapshot) -> Iterator[Metric]:
    part_help = "Part of the deployment's own pace that the next migration has."
    yield _gauge("pace_part", part_help, seen.pace.part)
    slower_help = "By what part the latest judged migration lengthened the p95 of step time."
    latest = seen.pace.latest
    yield _gauge("migration_slowdown", slower_help, latest.slowdown if latest else None)
    judged_help = "Migrations by which the pace of the next one was judged, by result."
    yield _counter("pace_judgements", judged_help, seen.pace_changes, "result")


def _layers_pending(scrape: Scrape) -> int:
    migration, progress = scrape.migration, scrape.seen.migration
    if migration is None:
        return 0
    is_known = progress is not None and progress.plan_id == migration.plan_id
    applied = progress.applied if progress is not None and is_known else 0
    return sum(len(one.layers) for one in migration.transactions[applied:])


def _bytes_and_experts(seen: Snapshot) -> Iterator[Metric]:
    before = seen.earlier
    by_link = dict.fromkeys(LINK_OF_SOURCE.values(), 0)
    for source, link in LINK_OF_SOURCE.items():
        by_link[link] += seen.bytes_by_source.get(source, 0)
        by_link[link] += before.bytes_by_source.get(source, 0)
    bytes_help = (
        "Bytes of experts by link; disk: into the host cache; inter: from another host, into the "
        "host cache or into a rank."
    )
    yield _counter("migrated_bytes", bytes_help, by_link, "link")
    moved_help = "Experts swapped into slots."
    yield _counter("migrated_experts", moved_help, seen.experts_moved + before.experts_moved)
    failures_help = "Records with a wrong checksum, staged or live."
    yield _counter("digest_failures", failures_help, seen.digest_failures + before.digest_failures)
    scrubbed_help = "Live slots checked in idle steps, by result."
    scrubbed = {
        result: count + before.scrubbed.get(result, 0)
        for result, count in seen.scrubbed_slots.items()
    }
    yield _counter("scrubbed_slots", scrubbed_help, scrubbed, "result")


def _batch_faults(seen: Snapshot) -> Iterator[Metric]:
    faults_help = (
        "Faults counted on devices in this run; late_counts: exchanges of a batch's counts that "
        "missed their deadline; different_pulls: decisions on pulls that differed between ranks."
    )
    faults = dict.fromkeys((LATE_COUNTS, DIFFERENT_PULLS), 0) | dict(seen.batch_faults)
    yield _counter("batch_faults", faults_help, faults, "kind")


def _telemetry(scrape: Scrape) -> Iterator[Metric]:
    before = scrape.seen.earlier
    lost = scrape.seen.samples_lost + before.samples_lost
    stored = scrape.samples_stored + before.samples_stored
    samples = {"stored": stored, "dropped": lost} | dict(scrape.seen.samples_excluded)
    samples_help = "Load samples: stored, dropped by ranks, excluded by the controller, by reason."
    yield _counter("telemetry_samples", samples_help, samples, "result")
    dropped_help = "Samples that ranks dropped because the store was slow or unreachable."
    yield _counter("telemetry_dropped", dropped_help, lost)
    lag_help = "Age of the newest sample of the rank that is furthest behind."
    yield _gauge("telemetry_lag_seconds", lag_help, scrape.seen.sample_age_s)
    errors_help = "Attempts of ranks to write to the store that failed."
    errors = {scrape.backend: scrape.seen.store_errors + before.store_errors}
    yield _counter("store_errors", errors_help, errors, "backend")


def _with_tokens(imbalance: NDArray[np.float64] | None) -> NDArray[np.float64] | None:
    """Those of layers with tokens; None: no layer has any, which is no perfect balance."""
    if imbalance is None or np.isnan(imbalance).all():
        return None
    return imbalance[~np.isnan(imbalance)]


def _per_layer(scrape: Scrape) -> Iterator[Metric]:
    found = scrape.seen.layer_imbalance
    even = {} if found is None else dict(enumerate((1 / found).tolist()))
    even = {layer: figure for layer, figure in even.items() if not isnan(figure)}
    even_help = "Inverse of the imbalance of the latest window, layer by layer."
    by_layer = {str(layer): figure for layer, figure in even.items()}
    yield _gauge("layer_balancedness", even_help, by_layer, "layer")
    if scrape.received is None:
        return
    tokens: dict[tuple[str, ...], Figure] = {
        (str(layer), str(rank)): float(count)
        for (layer, rank), count in np.ndenumerate(scrape.received)
    }
    tokens_help = "Tokens that each rank received, over all samples that were read."
    yield Metric("eplb_tokens_total", "counter", tokens_help, ("layer", "rank"), tokens)


def _gauge(
    name: str, meaning: str, figures: float | Mapping[str, float] | None, *labels: str
) -> Metric:
    return Metric(f"eplb_{name}", "gauge", meaning, labels, _by_label(figures))


def _counter(name: str, meaning: str, figures: float | Mapping[str, float], *labels: str) -> Metric:
    return Metric(f"eplb_{name}_total", "counter", meaning, labels, _by_label(figures))


def _histogram(name: str, meaning: str, durations: Durations, **labels: str) -> Metric:
    figures = {tuple(labels.values()): durations}
    return Metric(f"eplb_{name}", "histogram", meaning, tuple(labels), figures)


def _by_label(figures: float | Mapping[str, float] | None) -> dict[tuple[str, ...], Figure]:
    if figures is None:
        return {}
    if isinstance(figures, Mapping):
        return {(value,): float(figure) for value, figure in figures.items()}
    return {(): float(figures)}
