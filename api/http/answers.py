"""Answers that put together several types of the domain.

Shapes:  L MoE layers, S slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from api.http.problems import ProblemType, Refused
from api.monitor.history import HistoryMark, HistoryPoint
from api.monitor.state import EPOCH, DecisionRecord, MigrationProgress, RebalanceMark, WindowScore
from eplb.declared import Meaning
from telemetry.state import events
from telemetry.state.events import OUTCOME_OF_EVENT, PlanOutcome
from telemetry.state.proposals import Proposal
from telemetry.state.runs import Details
from telemetry.state.store import StateStore
from telemetry.state.tasks import Task, TaskState


@dataclass(frozen=True)
class Imbalance:
    """Imbalance over time, window by window, with the rebalances between them."""

    windows: tuple[WindowScore, ...]
    rebalances: tuple[RebalanceMark, ...]


@dataclass(frozen=True)
class ImbalanceHistory:
    """Imbalance by wall-clock time, over all runs."""

    since: Annotated[float, Meaning("begin of the range", unit=EPOCH)]
    until: Annotated[float, Meaning("end of the range", unit=EPOCH)]
    points: list[HistoryPoint]
    marks: list[HistoryMark]


@dataclass(frozen=True)
class TransactionLine:
    """Layers that swap together."""

    layers: list[int]
    num_moves: int
    num_rounds: int


@dataclass(frozen=True)
class OpenMigration:
    """The open migration, in the order in which it is applied."""

    progress: MigrationProgress
    moves_by_source: dict[str, int]
    transactions: list[TransactionLine]


@dataclass(frozen=True)
class PlanAnswer:
    """The open migration and the last decision."""

    migration: OpenMigration | None
    last_decision: DecisionRecord | None


@dataclass(frozen=True)
class PlanEnding:
    """How a published plan has ended."""

    outcome: PlanOutcome
    reason: str
    time: float


@dataclass(frozen=True)
class TaskAnswer:
    """A request that the controller works off."""

    id: int
    time: float
    kind: str
    request: Details
    state: TaskState
    result: Annotated[
        Details, Meaning("by the kind of task; `error` and `refusal` of a failed one")
    ]
    plan_end: Annotated[
        PlanEnding | None,
        Meaning("end of the plan that the task published; null while it is open"),
    ]


def task_answer(store: StateStore, task: Task) -> TaskAnswer:
    """Give a task with the end of its plan, once it has published one."""
    result = task.result
    facts: dict[str, Any] = {"error": result.error} if result.error else {}
    facts |= {"refusal": result.refusal} if result.refusal else {}
    if task.kind in ("rebalance", "rollback", "approve") and task.state == "done":
        facts |= {"published": result.plan_id > 0, "plan_id": result.plan_id or None}
    shown = dict(result.detail) | facts
    end = plan_end(store, result.plan_id) if result.plan_id else None
    return TaskAnswer(**vars(task) | {"result": shown}, plan_end=end)


def plan_end(store: StateStore, plan_id: int) -> PlanEnding | None:
    """How a plan has ended, and why; None while it is open, or once its event was removed."""
    for event in store.events_backwards(OUTCOME_OF_EVENT):
        end = events.plan_end(event)
        if end is not None and end.plan_id == plan_id:
            return PlanEnding(OUTCOME_OF_EVENT[event.kind], end.reason, event.time)
    return None


@dataclass(frozen=True)
class LayerText:
    """What a plan changes in one layer, and why."""

    layer: Annotated[int, Meaning("the model's layer number")]
    sentences: list[str]


@dataclass(frozen=True, kw_only=True)
class ProposalDetail(Proposal):
    """A proposal with its target."""

    plan: Annotated[dict[str, Any], Meaning("figures per layer, before and after, and by link")]
    move_list: Annotated[
        list[tuple[int, int, int, str, int]],
        Meaning("the model's layer number, expert, to slot, source, from slot; the first 5,000"),
    ]
    explanation: Annotated[list[LayerText], Meaning("the layers that gain most")]
    slot_to_expert: Annotated[list[list[int]], Meaning("[L, S] of the target, -1 is empty")]
    slot_share: Annotated[list[list[float]], Meaning("[L, S] of the target")]
    plan_end: Annotated[PlanEnding | None, Meaning("end of its migration; null: it has not ended")]


def proposal_detail(store: StateStore, found: Proposal) -> ProposalDetail:
    """Give a proposal with its target, moves and explanation.

    Raises:
        Refused: it was forgotten meanwhile.
    """
    content = store.proposal_content(found.id)
    if content is None:
        raise Refused(ProblemType.NO_SUCH_PROPOSAL, f"there is no proposal {found.id}")
    target, detail = content.target, content.detail
    return ProposalDetail(
        **vars(found),
        plan=detail["plan"],
        move_list=[tuple(move) for move in detail["move_list"]],
        explanation=[LayerText(**layer) for layer in detail["explanation"]],
        slot_to_expert=target.slot_to_expert.tolist(),
        slot_share=target.slot_share.tolist(),
        plan_end=plan_end(store, found.plan_id) if found.plan_id else None,
    )
