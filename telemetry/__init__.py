"""From tokens counted on each rank to windows a planner can use, and the store between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eplb.lazy import lazy_exports
from telemetry.state.events import Event
from telemetry.state.lease import Lease
from telemetry.state.live import Control
from telemetry.state.placements import CommittedPlacement
from telemetry.state.runs import RankState, RunInfo
from telemetry.state.store import StateStore, deployments_of, file_of, open_store
from telemetry.state.tasks import Task, TaskResult

if TYPE_CHECKING:
    from telemetry.load.reporter import Reporter

__all__ = [
    "CommittedPlacement",
    "Control",
    "Event",
    "Lease",
    "RankState",
    "Reporter",
    "RunInfo",
    "StateStore",
    "Task",
    "TaskResult",
    "deployments_of",
    "file_of",
    "open_store",
]

_EXPORTS = {"telemetry.load.reporter": "Reporter"}
__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
