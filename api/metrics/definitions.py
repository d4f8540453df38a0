"""Definition of every metric: name, meaning, labels and values.

A value that is not known yet has no series, because a 0 would be wrong. Nothing is counted here:
every figure comes from the store, to which ranks report their counters.

Shapes:  L MoE layers, R ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isnan
from statistics import median
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from api.monitor.counts import EXCLUDED
from api.monitor.plans import PHASES
from api.monitor.scores import layer_imbalance
from api.monitor.state import Counts, Durations, Grade, MigrationProgress, Reading, State
from api.processes.supervision import ProcessState
from eplb import __version__
from eplb.migration.build import Migration
from telemetry.load.drift import Drift

Level = Literal["default", "layer", "rank"]
Figure = float | Durations

# Peers are read on a rank's own host.
LINK_OF_SOURCE = {
    "same_rank": "same_rank",
    "peer": "intra",
    "host": "host",
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


class ServiceFigures(NamedTuple):
    """What the HTTP service counts of one deployment."""

    streams: int
    streams_dropped: int
    audit_lost: int


def metrics_of(
    seen: Reading,
    level: Level = "default",
    *,
    drift: Drift | None,
    backend: str,
    received: NDArray[np.int64] | None = None,
    of_service: ServiceFigures | None = None,
) -> Iterator[Metric]:
    """Give every metric of a deployment; one whose figure is not known yet has no series.

    Args:
        backend: kind of the store.
        received: [L, R] tokens over all samples; None: they are not asked for.
        of_service: figures of the HTTP service; None: there is none.
    """
    yield _gauge("build_info", "1; the label is the version.", {__version__: 1}, "version")
    grades = {grade.value: grade is seen.state.verdict for grade in Grade}
    yield _gauge(
        "verdict", "1 for the verdict of now; its reason is on the page.", grades, "verdict"
    )
    yield from _processes(seen)
    if not seen.is_read:
        return  # a counter that began at 0 would seem to have been reset
    yield from _health(seen)
    yield from _supervision(seen)
    yield from _balance(seen, drift)
    yield from _rebalances(seen)
    yield from _moved(seen.counts)
    yield from _telemetry(seen, backend)
    if of_service is not None:
        streams_help = "Open streams of events of this service."
        yield _gauge("event_streams", streams_help, of_service.streams)
        ended_help = "Streams of events that were ended, because they were not read."
        yield _counter("event_streams_dropped", ended_help, of_service.streams_dropped)
        lost_help = "Lines of the audit that neither its file nor the store took; the log has them."
        yield _counter("audit_lost", lost_help, of_service.audit_lost)
    if level != "default":
        yield from _per_layer(seen, received)


def _health(seen: Reading) -> Iterator[Metric]:
    state, counts = seen.state, seen.counts
    offsets_s = [view.ahead_s for view in state.group.ranks if view.age_s is not None]
    offset_help = "How far the clock of a rank's host is ahead of the store's; the largest of all."
    yield _gauge("clock_offset_seconds", offset_help, max(offsets_s, key=abs, default=None))
    silent_help = "Ranks that did not report lately, or never, and did not end as they were asked."
    ended = {view.rank for view in state.group.ranks if view.has_ended}
    yield _gauge("ranks_silent", silent_help, len({*state.group.silent_ranks} - ended))
    uncounted_help = "Ranks whose counters stay at zero while those of others grow."
    yield _gauge("ranks_uncounted", uncounted_help, len(state.load.uncounted_ranks))
    engine_help = "1 while an engine's own balancer plans in place of its plug-in."
    yield _gauge("engine_plans", engine_help, bool(state.plans.engine_plans))
    age_help = "Longest time without progress of a step or of a busy thread on any rank."
    yield _gauge("progress_age_seconds", age_help, state.progress.progress_age_s)
    alive = sum(view.is_alive for view in state.group.ranks)
    yield _gauge("ranks_alive", "Ranks that reported lately.", alive)
    frozen = sum(bool(view.frozen) for view in state.group.ranks)
    yield _gauge("ranks_frozen", "Ranks with migrations disabled.", frozen)
    yield _gauge(
        "step_seconds",
        "Median time of a rank's latest steps; own: without its host's wait for other ranks.",
        _step_times(state),
        *("time", "agg"),
    )
    yield _gauge(
        "state_free_bytes", "Room on the disk of the state folder.", state.store.free_bytes
    )
    full_help = "1 while the store takes no changes: its memory or disk is full."
    yield _gauge("store_full", full_help, bool(state.store.store_full))
    waiting_help = "Lines of the audit that its file could not take; the store has them."
    yield _gauge("audit_waiting", waiting_help, state.store.audit_waiting)
    yield _gauge("paused", "1 while movement is switched off.", not state.orders.movement)
    yield _gauge(
        "placement_version", "Generation of the committed placement.", state.plans.generation
    )
    mismatch_help = "Ranks that serve another generation than the committed one."
    reported = [view for view in state.group.ranks if view.age_s is not None]
    mismatched = sum(view.generation != state.plans.generation for view in reported)
    yield _gauge("placement_mismatch_ranks", mismatch_help, mismatched)
    failures_help = "Failures of mover threads; a second one disables migrations on the rank."
    yield _counter("mover_failures", failures_help, counts.total("mover_failures"))
    anomalies_help = "Anomalies: refused load, no plan, exit of a rank, lost contents of the store."
    yield _counter("anomalies", anomalies_help, counts.by_label("anomalies"), "type")


def _step_times(state: State) -> dict[tuple[str, ...], Figure]:
    """Of the rank in the middle, in step and by its own work; of the slowest, by its own work."""
    times = [
        (one.step_ms, one.wait_ms or 0.0) for one in state.group.ranks if one.step_ms is not None
    ]
    if not times:
        return {}
    own = [step - wait for step, wait in times]
    return {
        ("step", "median"): median(step for step, _ in times) / 1e3,  # alike on all ranks
        ("own", "median"): median(own) / 1e3,
        ("own", "max"): max(own) / 1e3,
    }


def _supervision(seen: Reading) -> Iterator[Metric]:
    controller = seen.state.processes.controller
    yield _gauge("controller_leads", "1 while a controller leads.", not controller.why_none)
    lease_help = "Time since a turn of a controller renewed the lease."
    yield _gauge("controller_lease_age_seconds", lease_help, controller.turn_age_s)
    token_help = "Time since the newest load sample with a token, of any run."
    yield _gauge("token_age_seconds", token_help, seen.state.load.token_age_s)
    unserved_help = "Time without tokens in outages that ended, each from the last token on."
    yield _counter("unserved_seconds", unserved_help, seen.counts.unserved_s)
    serve_on_help = "Deaths after which the survivors served on in their processes."
    yield _counter("serve_on", serve_on_help, seen.counts.total("serve_on"))
    stages_help = "Time that survivors took for it, from the known break to their first pass."
    yield _counter("serve_on_seconds", stages_help, seen.counts.serve_on_s, "stage")


def _processes(seen: Reading) -> Iterator[Metric]:
    report_ages: dict[str, float] = {}
    restarts: dict[str, float] = {}
    up: dict[str, float] = {}
    for view in seen.state.processes.supervision.processes:
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


def _balance(seen: Reading, drift: Drift | None) -> Iterator[Metric]:
    ratio = None
    busiest, by_agg = _with_tokens(_imbalance(seen)), dict[tuple[str, ...], Figure]()
    if busiest.size and seen.latest is not None:
        ratio, phase = float(busiest.max()), seen.latest.phase
        by_agg[phase, "mean"] = float((1 / busiest).mean())
        by_agg[phase, "p95"] = float(1 / np.quantile(busiest, 0.95))
        by_agg[phase, "worst_layer"] = 1 / ratio
        by_agg[phase, "critical_path"] = float(1 / busiest.mean())
    even_help = "Inverse of the imbalance of the latest window, 1 is perfect."
    yield _gauge("balancedness", even_help, by_agg, "phase", "agg")
    yield _gauge("rank_load_ratio_max", "Imbalance of the worst layer.", ratio)
    last = seen.state.plans.decisions[-1].imbalance_after if seen.state.plans.decisions else None
    predicted = 1 / last if last else None
    yield _gauge("balancedness_predicted", "What the last decision expects.", predicted)
    drifts = {}
    if drift is not None:
        drifts = {"all": drift.overall, "worst_layer": float(np.max(drift.per_layer))}
    drift_help = "Jensen-Shannon distance of the load from the load planned on, 0 to 1, less noise."
    yield _gauge("drift_score", drift_help, drifts, "layers")


def _rebalances(seen: Reading) -> Iterator[Metric]:
    state, counts = seen.state, seen.counts
    plans_help, plans = "Stored decisions of the controller.", counts.by_label("plans")
    yield _counter("plans", plans_help, plans, "policy", "outcome")
    yield _histogram("plan_duration_seconds", "Time to find each of those plans.", counts.plan_s)
    ended_help, ended = "Migrations of this run that ended.", counts.by_label("rebalances")
    yield _counter("rebalances", ended_help, ended, "trigger", "outcome")
    took_help = "Time of each committed migration; all: from offered to committed."
    yield _histogram("rebalance_duration_seconds", took_help, counts.rebalance_s, phase="all")
    phases = {phase: phase == state.plans.phase for phase in PHASES}
    yield _gauge("rebalance_phase", "1 for the phase of the slowest rank.", phases, "phase")
    pending_help = "Layers of the open migration that do not serve on every rank yet."
    yield _gauge(
        "layers_pending", pending_help, _layers_pending(seen.open_migration, state.plans.migration)
    )
    pauses_s = np.array(state.moved.swap_pauses_ms) / 1e3
    quantiles = {"p50": 0.5, "p99": 0.99, "max": 1.0} if pauses_s.size else {}
    shown = {agg: float(np.quantile(pauses_s, part)) for agg, part in quantiles.items()}
    yield _gauge("swap_pause_seconds", "Time on the step path of the latest swaps.", shown, "agg")
    part_help = "Part of the deployment's own pace that the next migration has."
    yield _gauge("pace_part", part_help, state.plans.pace.part)
    slower_help = "By what part the latest judged migration lengthened the p95 of step time."
    latest = state.plans.pace.latest
    yield _gauge("migration_slowdown", slower_help, latest.slowdown if latest else None)
    judged_help = "Migrations by which the pace of the next one was judged, by result."
    judged = counts.by_label("pace_judgements")
    yield _counter("pace_judgements", judged_help, judged, "result")
    last_s = seen.marks[-1].time if seen.marks else None
    last_help = "When the latest rebalance was committed, in seconds since the epoch."
    yield _gauge("last_success_timestamp_seconds", last_help, last_s)


def _layers_pending(migration: Migration | None, progress: MigrationProgress | None) -> int:
    if migration is None:
        return 0
    is_known = progress is not None and progress.plan_id == migration.plan_id
    applied = progress.applied if progress is not None and is_known else 0
    return sum(len(one.layers) for one in migration.transactions[applied:])


def _moved(counts: Counts) -> Iterator[Metric]:
    by_link = dict.fromkeys(LINK_OF_SOURCE.values(), 0)
    for source, link in LINK_OF_SOURCE.items():
        by_link[link] += counts.total("bytes_by_source", source)
    bytes_help = "Bytes of experts by link; disk: into the host cache."
    yield _counter("migrated_bytes", bytes_help, by_link, "link")
    moved_help = "Experts swapped into slots."
    yield _counter("migrated_experts", moved_help, counts.total("experts_moved"))
    failures_help = "Records with a wrong checksum, staged or live."
    yield _counter("digest_failures", failures_help, counts.total("digest_failures"))
    scrubbed_help = "Live slots checked in idle steps, by result."
    yield _counter("scrubbed_slots", scrubbed_help, counts.by_label("scrubbed"), "result")


def _telemetry(seen: Reading, backend: str) -> Iterator[Metric]:
    counts = seen.counts
    lost, stored = counts.total("samples_lost"), counts.total("samples_stored")
    samples = {"stored": seen.state.load.samples_stored + stored, "dropped": lost}
    samples |= {name: counts.total("samples_excluded", name) for name in EXCLUDED}
    samples_help = "Load samples: stored, dropped by ranks, excluded by the controller, by reason."
    yield _counter("telemetry_samples", samples_help, samples, "result")
    dropped_help = "Samples that ranks dropped because the store was slow or unreachable."
    yield _counter("telemetry_dropped", dropped_help, lost)
    lag_help = "Age of the newest sample of the rank that is furthest behind."
    yield _gauge("telemetry_lag_seconds", lag_help, seen.state.load.sample_age_s)
    errors_help = "Attempts of ranks to write to the store that failed."
    errors = {backend: counts.total("store_errors")}
    yield _counter("store_errors", errors_help, errors, "backend")


def _per_layer(seen: Reading, received: NDArray[np.int64] | None) -> Iterator[Metric]:
    even_help = "Inverse of the imbalance of the latest window, layer by layer."
    numbers = seen.state.start.layer_ids
    even = zip(numbers, (1 / _imbalance(seen)).tolist(), strict=False)
    by_layer = {str(layer): figure for layer, figure in even if not isnan(figure)}
    yield _gauge("layer_balancedness", even_help, by_layer, "layer")
    if received is not None:
        tokens: dict[tuple[str, ...], Figure] = {
            (str(numbers[layer]), str(rank)): float(count)
            for (layer, rank), count in np.ndenumerate(received)
        }
        tokens_help = "Tokens that each rank received, over all samples that were read."
        yield _counter("tokens", tokens_help, tokens, "layer", "rank")


def _imbalance(seen: Reading) -> NDArray[np.float64]:
    """[L] imbalance of the latest window, NaN for a layer without tokens; [0] without a window."""
    if seen.latest is None or seen.scale is None:
        return np.empty(0)
    return layer_imbalance(seen.latest.received, seen.scale)


def _with_tokens(imbalance: NDArray[np.float64]) -> NDArray[np.float64]:
    """That of layers with tokens; a layer without any is no perfect balance."""
    return imbalance[~np.isnan(imbalance)]


Given = float | None | Mapping[str, float] | Mapping[tuple[str, ...], Figure]


def _gauge(name: str, meaning: str, figures: Given, *labels: str) -> Metric:
    return Metric(f"eplb_{name}", "gauge", meaning, labels, _by_labels(figures))


def _counter(name: str, meaning: str, figures: Given, *labels: str) -> Metric:
    return Metric(f"eplb_{name}_total", "counter", meaning, labels, _by_labels(figures))


def _histogram(name: str, meaning: str, durations: Durations, **labels: str) -> Metric:
    figures = {tuple(labels.values()): durations}
    return Metric(f"eplb_{name}", "histogram", meaning, tuple(labels), figures)


def _by_labels(figures: Given) -> dict[tuple[str, ...], Figure]:
    if figures is None:
        return {}
    if isinstance(figures, Mapping):
        pairs = figures.items()
        return {(key,) if isinstance(key, str) else key: figure for key, figure in pairs}
    return {(): float(figures)}
