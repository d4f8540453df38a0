"""Which reason of ``telemetry.state.tasks.Refusal`` an error of a task is."""

from __future__ import annotations

from eplb.errors import (
    ConfigError,
    EplbError,
    HistoryError,
    PlacementError,
    StaleGeneration,
    TopologyError,
)
from telemetry.state.proposals import ProposalEnded
from telemetry.state.tasks import Refusal

OF_TARGET = ("rollback", "approve")  # kinds of tasks that name a placement


class TaskRefused(EplbError):
    """A task that the controller refuses.

    Args:
        refusal: the reason.
        why: the reason, one sentence.
    """

    def __init__(self, refusal: Refusal, why: str) -> None:
        super().__init__(why)
        self.refusal = refusal


def refusal_of(exc: EplbError, kind: str) -> Refusal | None:
    """Return the reason of an error; None: one that is none of them.

    Args:
        exc: that ended the task.
        kind: of the task.
    """
    if isinstance(exc, TaskRefused):
        return exc.refusal
    if isinstance(exc, StaleGeneration):
        return Refusal.GENERATION_MOVED_ON
    if isinstance(exc, ProposalEnded):
        return Refusal.PROPOSAL_ENDED
    if isinstance(exc, HistoryError):
        return Refusal.NO_LOAD
    if isinstance(exc, PlacementError | ConfigError | TopologyError):
        return Refusal.CANNOT_SERVE if kind in OF_TARGET else Refusal.NO_PLAN
    return None
