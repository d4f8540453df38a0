"""Answers of the HTTP service.

Shapes:  T windows, L MoE layers, E experts, S slots, R ranks.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from api.monitor.verdict import Grade
from eplb.fitting import Cordon


class Answer(BaseModel):
    """An answer made from a dataclass of the same field names."""

    model_config = ConfigDict(from_attributes=True)


class ControlAnswer(Answer):
    """The switches as they are now."""

    movement: bool
    observe: bool
    until: float | None = Field(
        description="when movement resumes by itself, seconds since the epoch; null: it does not"
    )


class Health(Answer):
    """Alive, or ready; a problem otherwise."""

    status: Literal["ok"] = "ok"
    detail: str


class Score(Answer):
    """One window."""

    index: int
    first_step: int
    last_step: int
    measured: float | None = Field(description="null: no tokens")
    contiguous: float | None
    generation: int
    is_complete: bool
    is_migrating: bool = Field(description="served by more than that one placement")
    time: float | None = Field(description="of its newest sample")


class Mark(Answer):
    """One commit."""

    generation: int
    plan_id: int
    step: int | None
    time: float
    reason: str


class DecisionAnswer(Answer):
    """One decision of the controller."""

    id: int = Field(description="of its event")
    time: float
    decision: str
    reason: str
    policy: str
    imbalance_before: float | None
    imbalance_after: float | None
    moves: int
    bytes: int
    generation: int
    trigger: str = Field(description="what made the plan due, `request` or `rollback`")
    actor: str = Field(description="the controller, or the task of an operator")
    stage: str = Field(description="of the rollout")
    plan_id: int | None = Field(description="of its migration; null: nothing was published")
    outcome: Literal["committed", "aborted", "rejected"] | None = Field(
        description="of that migration; null: it is open, or there is none"
    )
    gain_promised: float | None = Field(description="reduction of imbalance, once it was judged")
    gain_realised: float | None
    num_uncovered: int = Field(
        description="experts of all layers in fewer failure domains than `min_domains`"
    )
    pace_reason: str = Field(description="of its migration's pace; empty: nothing was published")


class PaceChangeAnswer(Answer):
    """What a migration did to the ranks' steps, and the pace before and after it."""

    plan_id: int
    slowdown: float | None = Field(
        description="by what part it lengthened the p95 of step time; null: not measured"
    )
    budget: float = Field(description="`step_time_budget` at that time")
    part_before: float = Field(description="of the deployment's own pace, that it had")
    part: float = Field(description="that the next one has")
    reason: str


class PaceAnswer(Answer):
    """The pace of the next migration."""

    part: float = Field(description="of the deployment's own pace")
    reason: str
    budget: float = Field(description="`step_time_budget`; 0: the pace is fixed")
    latest: PaceChangeAnswer | None = Field(description="judgement; null: there was none")
    changed: float | None = Field(description="when that was")


class HistoryPointAnswer(Answer):
    """The windows of one stretch of time."""

    time: float
    measured: float | None = Field(description="mean of its windows; null: no tokens")
    contiguous: float | None
    generation: int
    run: str
    is_migrating: bool
    is_joined: bool = Field(description="to the point before it; false: there is a gap")
    windows: int


class HistoryMarkAnswer(Answer):
    """A restart, a death, a rebalance or a switch."""

    time: float
    kind: Literal["restart", "death", "MOVE", "RESPLIT", "HELD", "ROLLBACK", "pause", "resume"]
    text: str
    generation: int | None


class HistoryAnswer(Answer):
    """Imbalance by wall-clock time, over all runs."""

    since: float
    until: float
    points: list[HistoryPointAnswer]
    marks: list[HistoryMarkAnswer]


class RebalanceAnswer(Answer):
    """One migration: what it was to bring, what it cost, and what it brought."""

    plan_id: int
    generation: int
    decision_id: int | None = Field(description="of the event that decided it")
    decision: str
    trigger: str
    actor: str
    stage: str
    reason: str
    offered: float
    ended: float | None = Field(description="null: it is open")
    outcome: Literal["committed", "aborted", "rejected"] | None
    end_reason: str | None
    moves: int
    bytes: int
    imbalance_before: float | None
    imbalance_predicted: float | None
    gain_promised: float | None = Field(description="reduction of imbalance, once it was judged")
    gain_realised: float | None


class Progress(Answer):
    """The open migration."""

    plan_id: int
    base_generation: int
    target_generation: int
    num_transactions: int
    applied: int
    num_moves: int
    staged_part: float
    layers: list[int]
    fraction: float


class Rank(Answer):
    """One rank."""

    rank: int
    step: int
    generation: int
    phase: str
    is_alive: bool
    age_s: float | None
    step_ms: float | None
    frozen: str
    cordon: Cordon | None = Field(description="by an operator; see /api/v1/ranks")


class EventAnswer(Answer):
    """Something that happened."""

    id: int
    time: float
    kind: str
    detail: dict[str, Any]


class EventsPage(Answer):
    """Events, oldest first."""

    events: list[EventAnswer]
    next: int | None = Field(description="for `after`, of the next page; null: no more now")


class State(Answer):
    """Everything at a glance, without matrices of history."""

    verdict: Grade = Field(description="stopped, blind, degraded or serving")
    reason: str = Field(description="of the verdict, in one sentence")
    deployment: str
    run: str | None
    time: float
    started: float | None
    step: int
    generation: int | None
    leader: str = Field(description="the controller that leads; empty: none does")
    starting: str = Field(description="a controller that compiles; empty: none, or one leads")
    led_s: float = Field(description="how long the leader has held the lease; 0: none leads")
    turn_age_s: float | None = Field(
        description="since a turn of a controller renewed the lease, at a third of its time to live"
    )
    problems: list[str] = Field(description="all that is wrong; empty: it serves as it should")
    num_layers: int
    layer_ids: list[int] = Field(description="[L] of the MoE layers, as the model numbers them")
    num_experts: int
    num_slots: int
    ranks: list[Rank]
    node_of_rank: list[int]
    silent_ranks: list[int]
    progress_age_s: float | None = Field(
        description="of the step or thread with the least progress"
    )
    progress_of: str = Field(description="its rank, its thread, and the current work")
    last_score: Score | None
    token_age_s: float | None = Field(description="since the newest token; null: none in this run")
    heatmap: list[list[float] | None] | None = Field(
        description="[L, R] rank load over mean; null for a layer without tokens"
    )
    expert_heat: list[list[float] | None] | None = Field(
        description="[L, E] expert load over mean; null for a layer without tokens"
    )
    phase: str
    migration: Progress | None
    pace: PaceAnswer
    expert_curve: str = Field(description="where plans have the time of experts by tokens from")
    batch: str = Field(description="what acts on each batch beside the placement, or off")
    bytes_by_source: dict[str, int]
    experts_moved: int
    swap_pauses_ms: list[float] = Field(description="the latest of every rank")
    decisions: list[DecisionAnswer]
    last_rebalance: RebalanceAnswer | None
    samples_stored: int
    samples_lost: int
    movement: bool
    observe: bool
    until: float | None = Field(
        description="when a pause ends by itself, seconds since the epoch; null: it does not"
    )


class Imbalance(Answer):
    """Imbalance over time."""

    windows: list[Score]
    rebalances: list[Mark]


class DriftAnswer(Answer):
    """Jensen-Shannon distance of the latest load from the load planned on, 0 to 1, less noise."""

    generation: int | None = Field(description="that serves")
    overall: float | None = Field(
        description="of all layers; null: the load planned on is not known, or none came since"
    )
    layers: list[float] | None = Field(description="[L]")
    noise: float | None = Field(description="the distance that chance alone would show")


class LoadWindow(Answer):
    """Steps or time of one window."""

    index: int
    first_step: int
    last_step: int
    phase: str
    generations: list[int]
    missing_ranks: list[int]
    is_complete: bool


class Load(Answer):
    """Windows of load, oldest first."""

    windows: list[LoadWindow]
    tokens: list[list[list[int]]] = Field(description="[T, L, E] tokens routed to each expert")
    rank_load: list[list[list[int]]] = Field(description="[T, L, R] tokens received by each rank")


class WhoAnswer(Answer):
    """Who sends the request."""

    name: str
    role: Literal["viewer", "operator", "admin"]


class AuditAnswer(Answer):
    """One line of the audit."""

    number: int
    time: float
    deployment: str = Field(description="that the change is of")
    actor: str
    role: str
    address: str
    request: str = Field(description="the same in both lines of one request")
    action: str
    reason: str
    outcome: str = Field(description="asked, then the status of the answer")
    hash: str


class AuditPage(Answer):
    """Lines of the audit, newest first."""

    entries: list[AuditAnswer]
    next: int | None = Field(description="for `before`, of the next page; null: there is none")


class TransactionAnswer(Answer):
    """Layers that swap together."""

    layers: list[int]
    num_moves: int
    num_rounds: int


class MigrationAnswer(Answer):
    """The open migration, in the order in which it is applied."""

    progress: Progress
    moves_by_source: dict[str, int]
    transactions: list[TransactionAnswer]


class PlanAnswer(Answer):
    """The open migration and the last decision."""

    migration: MigrationAnswer | None
    last_decision: DecisionAnswer | None


class PlanEnd(Answer):
    """How a published plan has ended."""

    outcome: Literal["committed", "aborted", "rejected"]
    reason: str
    time: float


class ProposalLine(Answer):
    """A proposal: a plan that waits for an approval."""

    id: int
    time: float
    expires: float = Field(description="after which it cannot be approved")
    state: Literal["open", "approved", "rejected", "expired"]
    by: str = Field(description="who asked for it; controller: its own, in the stage propose")
    trigger: str
    reason: str = Field(description="why it was asked for")
    base_generation: int = Field(description="it is carried out on this one or not at all")
    target_generation: int
    decision: str
    plan_reason: str
    policy: str
    imbalance_before: float | None
    imbalance_after: float
    expected_gain: float
    moves: int
    bytes: int
    cost_s: float = Field(description="serving time that its moves and swaps take")
    ended: float | None
    ended_by: str
    end_reason: str
    plan_id: int | None = Field(description="of the migration that carried it out")


class LayerText(Answer):
    """What a plan changes in one layer, and why."""

    layer: int
    sentences: list[str]


class ProposalAnswer(ProposalLine):
    """A proposal with its target."""

    plan: dict[str, Any] = Field(description="figures per layer, before and after, and by link")
    move_list: list[tuple[int, int, int, str, int]] = Field(
        description="layer, expert, to slot, source, from slot; the first 5,000"
    )
    explanation: list[LayerText] = Field(description="of the layers that gain most")
    slot_to_expert: list[list[int]] = Field(description="[L, S] of the target, -1 is empty")
    slot_share: list[list[float]] = Field(description="[L, S] of the target")
    plan_end: PlanEnd | None = Field(description="how its migration ended; null: it has not")


class TaskAnswer(Answer):
    """A request that the controller works off."""

    id: int
    time: float
    kind: str
    request: dict[str, Any]
    state: Literal["queued", "running", "done", "failed"]
    result: dict[str, Any]
    plan_end: PlanEnd | None = Field(
        None,
        description="of the plan that the task published; null while it is open",
    )


class TasksPage(Answer):
    """Tasks in a state, oldest first."""

    tasks: list[TaskAnswer]
    next: int | None = Field(description="for `after`, of the next page; null: no more now")


class RebalancesPage(Answer):
    """Migrations, newest first."""

    rebalances: list[RebalanceAnswer]
    next: int | None = Field(description="give as `before` to continue; null: there are no more")


class ProposalsPage(Answer):
    """Proposals, newest first."""

    proposals: list[ProposalLine]
    next: int | None = Field(description="give as `before` to continue; null: there are no more")
