"""From tokens counted on each rank to windows a planner can use, and the store between them.

Names are imported when they are first used, as in ``eplb``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from eplb.packages import lazy_exports

if TYPE_CHECKING:
    from telemetry.load.reporter import Reporter
    from telemetry.state.events import Event
    from telemetry.state.lease import Lease
    from telemetry.state.live import Control
    from telemetry.state.placements import CommittedPlacement
    from telemetry.state.runs import RankState, RunInfo
    from telemetry.state.store import StateStore, deployments_of, file_of, open_store
    from telemetry.state.tasks import Task, TaskResult

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

_EXPORTS = {
    "telemetry.load.reporter": "Reporter",
    "telemetry.state.events": "Event",
    "telemetry.state.lease": "Lease",
    "telemetry.state.live": "Control",
    "telemetry.state.placements": "CommittedPlacement",
    "telemetry.state.runs": "RankState RunInfo",
    "telemetry.state.store": "StateStore deployments_of file_of open_store",
    "telemetry.state.tasks": "Task TaskResult",
}
__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
