"""What the terminal view, the HTTP service and the demo's summary show: one frozen picture.

Shapes:  L MoE layers, E experts, R ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from api.monitor.tally import Carried, Durations
from api.processes.supervision import SupervisionView
from eplb.decision.expert_times import chosen_curve
from eplb.decision.pace import PaceChange, pace_now
from eplb.fitting import Cordon
from eplb.migration.build import Migration
from rebalance.controller.plans.planner_request import curve_of
from telemetry.state.events import Event
from telemetry.state.runs import BATCH, BATCH_FAULTS, LEAST_SILENCE_S, STEP_TIMES, RankState

PHASES = ("aborted", "idle", "preload", "stage", "swap")  # least done first, of a serving rank
# In the order in which they are tried. The last two fill the host cache, not a slot.
SOURCES = ("same_rank", "peer", "host", "other_rank", "other_host", "disk")


@dataclass(frozen=True)
class WindowScore:
    """How even one window was, and how even it would have been without balancing."""

    index: int
    first_step: int
    last_step: int
    measured: float | None  # mean over layers of max / mean of what the ranks received; None: no
    contiguous: float | None  # tokens. The same window, had experts lain on the ranks in order
    generation: int  # the newest that served in this window
    is_complete: bool
    is_migrating: bool  # experts moved in it, or part of a plan served uncommitted
    time: float | None = None  # of its newest sample


@dataclass(frozen=True)
class RebalanceMark:
    """A commit, and the first step that it served."""

    generation: int
    plan_id: int
    step: int | None  # None until a sample of that generation arrives
    time: float
    reason: str


@dataclass(frozen=True)
class Decision:
    """What the controller decided on one plan, why, at whose word, and what came of it."""

    id: int  # of its event
    time: float
    decision: str  # MOVE, RESPLIT or KEEP
    reason: str
    policy: str
    imbalance_before: float | None
    imbalance_after: float | None
    moves: int
    bytes: int
    generation: int
    trigger: str = ""  # one of eplb.decision.triggers.ACTS; "": the event has none
    actor: str = ""  # the controller, or the task of an operator
    stage: str = ""  # of the rollout
    plan_id: int | None = None  # of its migration; None: nothing was published
    outcome: str | None = None  # of that migration; None: it is open, or there is none
    gain_promised: float | None = None  # reduction of imbalance, once it was judged
    gain_realised: float | None = None
    num_uncovered: int = 0  # experts of all layers in fewer failure domains than asked for
    pace_reason: str = ""  # why its migration has the pace that it has; "": nothing was published


@dataclass(frozen=True)
class PaceView:
    """The pace of the next migration, why, and the judgement that it follows from."""

    part: float = 1.0  # of the deployment's own pace
    reason: str = ""
    budget: float = 0.0  # step_time_budget; 0: the pace is fixed
    latest: PaceChange | None = None  # also one under an earlier budget; None: there was none
    changed: float | None = None  # when that judgement was made, in seconds since the epoch


@dataclass(frozen=True)
class MigrationProgress:
    """The open migration: how far the slowest rank is."""

    plan_id: int
    base_generation: int
    target_generation: int
    num_transactions: int
    applied: int  # transactions that serve on every rank
    num_moves: int
    staged_part: float  # of all that is to be staged, 0 to 1
    layers: tuple[int, ...]

    @property
    def fraction(self) -> float:
        """How much is done, 0 to 1: staging is one half, because what is staged does not serve."""
        if not self.num_transactions:
            return 1.0
        return (self.staged_part + self.applied / self.num_transactions) / 2


@dataclass(frozen=True)
class Death:
    """The latest death of ranks on record."""

    time: float
    text: str


@dataclass(frozen=True)
class RankView:
    """The latest report of one rank, and its age."""

    rank: int
    step: int
    generation: int
    phase: str
    is_alive: bool  # it reported lately
    age_s: float | None  # None: it never reported
    step_ms: float | None
    frozen: str  # why its migrations are disabled; empty: they are not
    ahead_s: float = 0.0  # that its report is dated ahead of the reader's clock
    silent_after_s: float = LEAST_SILENCE_S  # age of a report at which it counts as silent
    cordon: Cordon | None = None  # by an operator


@dataclass(frozen=True, eq=False)
class Snapshot:
    """Everything that a viewer may show, at one moment."""

    deployment: str
    run: str | None  # None before the first start
    time: float
    started: float | None
    step: int
    generation: int | None  # of the committed placement; None before the first
    num_layers: int
    layer_ids: tuple[int, ...]  # of the MoE layers, as the model numbers them
    num_experts: int
    num_slots: int
    ranks: tuple[RankView, ...]
    node_of_rank: tuple[int, ...]
    progress_age_s: float | None  # of the step or thread with the least progress, over all ranks
    series: tuple[WindowScore, ...]
    heatmap: NDArray[np.float64] | None  # [L, R] rank load over mean of the latest window
    layer_imbalance: NDArray[np.float64] | None  # [L] of the same window; NaN: without tokens
    expert_heat: NDArray[np.float64] | None  # [L, E] expert load over mean of the same window
    marks: tuple[RebalanceMark, ...]
    phase: str  # of the rank that is furthest behind
    migration: MigrationProgress | None
    bytes_by_source: Mapping[str, int]
    experts_moved: int
    swap_pauses_ms: tuple[float, ...]  # the latest of every rank
    decisions: tuple[Decision, ...]  # oldest first
    events: tuple[Event, ...]  # oldest first
    samples_stored: int
    samples_lost: int
    movement: bool
    observe: bool
    until: float | None = None  # when a pause ends by itself
    progress_of: str = ""  # that thread: its rank, its name, its current work
    ended_plans: Mapping[str, int] = field(default_factory=dict)  # of this run, by outcome
    decided: Mapping[tuple[str, ...], int] = field(default_factory=dict)  # by (policy, decision)
    scrubbed_slots: Mapping[str, int] = field(default_factory=dict)  # of all ranks, by result
    digest_failures: int = 0
    mover_failures: int = 0
    rebalances: Mapping[tuple[str, ...], int] = field(default_factory=dict)  # (trigger, outcome)
    anomalies: Mapping[str, int] = field(default_factory=dict)  # of this run, by type
    samples_excluded: Mapping[str, int] = field(default_factory=dict)  # by what is wrong with them
    plan_s: Durations = field(default_factory=Durations)
    rebalance_s: Durations = field(default_factory=Durations)  # from offered to committed
    store_errors: int = 0  # failed attempts of ranks to write to the store
    uncounted_ranks: tuple[int, ...] = ()  # no token of theirs was counted; see SampleTally
    sample_age_s: float | None = None  # newest sample of the rank that is furthest behind
    token_time: float | None = None  # of the newest sample with a token; None: none in this run
    sample_every_s: float = 0.0  # about, between two samples of a rank; 0: not known
    step_age_s: float | None = None  # since the steps were last seen to advance; None: never seen
    death: Death | None = None  # the latest
    pace: PaceView = field(default_factory=PaceView)
    expert_curve: str = ""  # where the curve is from by which plans measure time
    batch: str = ""  # what acts on each batch beside the placement
    batch_faults: Mapping[str, int] = field(default_factory=dict)  # of this run, by kind
    pace_changes: Mapping[str, int] = field(default_factory=dict)  # judgements, by result
    earlier: Carried = field(default_factory=Carried)  # counters of the runs before this one
    supervision: SupervisionView = field(default_factory=SupervisionView)

    @property
    def silent_ranks(self) -> tuple[int, ...]:
        """Ranks that never reported, or not lately."""
        return tuple(view.rank for view in self.ranks if not view.is_alive)

    @property
    def token_age_s(self) -> float | None:
        """Time since the newest token, by the supervisor of ranks or else by samples."""
        if self.supervision.token_age_s is not None or self.token_time is None:
            return self.supervision.token_age_s
        return max(0.0, self.time - self.token_time)

    @property
    def last_score(self) -> WindowScore | None:
        """The latest window that every rank reported on."""
        complete = (score for score in reversed(self.series) if score.is_complete)
        return next(complete, None)


def slowest_phase(states: Iterable[RankState]) -> str:
    """Return the phase of the rank that is furthest behind on the newest plan; idle if none is."""
    at_work = [state for state in states if state.plan_id]
    if not at_work:
        return "idle"
    newest = max(state.plan_id for state in at_work)
    phases = [state.phase for state in at_work if state.plan_id == newest]
    return min(phases, key=lambda phase: PHASES.index(phase) if phase in PHASES else len(PHASES))


def progress_of(
    migration: Migration | None, states: Iterable[RankState]
) -> MigrationProgress | None:
    """Return how far the ranks are with the open migration."""
    if migration is None:
        return None
    at_work = [state for state in states if state.plan_id == migration.plan_id]
    return MigrationProgress(
        plan_id=migration.plan_id,
        base_generation=migration.base.generation,
        target_generation=migration.target.generation,
        num_transactions=len(migration.transactions),
        applied=min((state.applied for state in at_work), default=0),
        num_moves=len(migration.moves),
        staged_part=_staged_part(at_work, len(migration.transactions)),
        layers=tuple(layer for txn in migration.transactions for layer in txn.layers),
    )


def _staged_part(states: Sequence[RankState], num_transactions: int) -> float:
    """Experts staged, where ranks count them, else whole transactions on the slowest rank."""
    to_stage = detail_sum(states, "to_stage")
    if to_stage and any("staged" in state.detail for state in states):
        return min(1.0, detail_sum(states, "staged") / to_stage)
    prepared = min((state.prepared for state in states), default=0)
    return min(1.0, prepared / num_transactions) if num_transactions else 1.0


def bytes_by_source(states: Iterable[RankState]) -> dict[str, int]:
    """Sum the bytes that came from each source over all ranks, cheapest source first.

    Ranks may count more than these sources, e.g. bytes whose digest was wrong.
    """
    total = Counter(dict.fromkeys(SOURCES, 0))
    for state in states:
        total.update(state.detail.get("bytes_by_source", {}))
    return dict(total)


def detail_sum(states: Iterable[RankState], key: str) -> int:
    """Sum one counter over the ranks that report it."""
    return sum(int(state.detail.get(key, 0)) for state in states)


def swap_pauses_ms(states: Iterable[RankState]) -> tuple[float, ...]:
    """Put together the latest swap pauses of every rank."""
    pauses = (state.detail.get("swap_pauses_ms", ()) for state in states)
    return tuple(float(pause_ms) for of_rank in pauses for pause_ms in of_rank)


def decision_of(event: Event) -> Decision:
    """Read a decision from the controller's event."""
    detail = event.detail
    return Decision(
        id=event.id,
        time=event.time,
        decision=str(detail.get("decision", "")),
        reason=str(detail.get("reason", "")),
        policy=str(detail.get("policy", "")),
        imbalance_before=detail.get("imbalance_before"),
        imbalance_after=detail.get("imbalance_after"),
        moves=int(detail.get("moves", 0)),
        bytes=int(detail.get("bytes", 0)),
        generation=int(detail.get("generation", 0)),
        trigger=str(detail.get("trigger", "")),
        actor=str(detail.get("actor", "")),
        stage=str(detail.get("stage", "")),
        num_uncovered=int(detail.get("asked", {}).get("num_uncovered", 0)),
        pace_reason=str(detail.get("pace_reason", "")),
    )


def expert_curve(asked: str, states: Iterable[RankState]) -> str:
    """Return where the controller has the curve of the experts' time from, as it would now.

    Args:
        asked: the setting; "": none.
        states: of the ranks that serve.
    """
    measured = [one.expert_times for one in states]
    return chosen_curve(curve_of(asked), [one for one in measured if one is not None]).source


def batch_parts(states: Iterable[RankState]) -> str:
    """Return what acts on batches, by the ranks' reports; alike on all unless an engine is not."""
    return "; ".join(sorted({str(one.detail.get(BATCH, "off")) for one in states})) or "off"


def batch_faults(states: Iterable[RankState]) -> Mapping[str, int]:
    """Return the faults that ranks counted in batches, by kind."""
    total: Counter[str] = Counter()
    for state in states:
        total.update(state.detail.get(BATCH_FAULTS, {}))
    return total


def pace_view(
    budget: float, judged: tuple[PaceChange, float] | None, states: Iterable[RankState]
) -> PaceView:
    """Return the pace of the next migration, as the controller would give it now.

    Args:
        budget: of step time, as it applies.
        judged: the latest judgement and its time; None: there was none.
        states: of the ranks that serve.
    """
    latest, changed = (None, None) if judged is None else judged
    now = pace_now(budget, latest, is_measured=any(STEP_TIMES in one.detail for one in states))
    return PaceView(now.part, now.reason, budget, latest, changed)
