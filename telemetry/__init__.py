"""From tokens counted on each rank to windows a planner can use, and the store between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eplb.lazy import lazy_exports
from telemetry.store import (
    CommittedPlacement,
    Control,
    Event,
    Lease,
    LoadStore,
    RankState,
    RunInfo,
    Task,
    TaskResult,
)
from telemetry.stores.opener import deployments_of, file_of, open_store

if TYPE_CHECKING:
    from telemetry.reporter.reporter import Reporter
    from telemetry.stores.memory import MemoryStore
    from telemetry.stores.redis.store import RedisStore
    from telemetry.stores.sqlite.store import SqliteStore

__all__ = [
    "CommittedPlacement",
    "Control",
    "Event",
    "Lease",
    "LoadStore",
    "MemoryStore",
    "RankState",
    "RedisStore",
    "Reporter",
    "RunInfo",
    "SqliteStore",
    "Task",
    "TaskResult",
    "deployments_of",
    "file_of",
    "open_store",
]

_EXPORTS = {
    "telemetry.reporter.reporter": "Reporter",
    "telemetry.stores.memory": "MemoryStore",
    "telemetry.stores.redis.store": "RedisStore",
    "telemetry.stores.sqlite.store": "SqliteStore",
}
__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
