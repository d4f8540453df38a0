"""Answers of the HTTP service.

Shapes:  L MoE layers, S slots.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


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


class ProposalsPage(Answer):
    """Proposals, newest first."""

    proposals: list[ProposalLine]
    next: int | None = Field(description="give as `before` to continue; null: there are no more")
