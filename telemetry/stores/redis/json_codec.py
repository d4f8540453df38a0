"""Conversion between the Redis store's JSON texts and stream entries and LoadStore's types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eplb.migration.serialisation import placement_from_bytes
from telemetry.records.task_codec import result_from_text, result_to_text
from telemetry.store import CommittedPlacement, Event, RunInfo, Task
from telemetry.stores.commit_rules import details_from_text, details_to_text

Entry = tuple[bytes, Mapping[bytes, bytes]]  # of a stream: id, fields


def run_to_text(info: RunInfo) -> str:
    """Return a start as JSON text."""
    detail = vars(info) | {"model": dict(info.model), "topology": dict(info.topology)}
    if not info.window_seconds:  # so that programs that do not know it yet can read all others
        del detail["window_seconds"]
    return details_to_text(detail)


def run_from_text(text: bytes | str) -> RunInfo:
    """Return a start from what ``run_to_text`` gave."""
    return RunInfo(**_details(text))


def task_to_text(task: Task) -> str:
    """Return a task as JSON text."""
    result = details_from_text(result_to_text(task.result))
    return details_to_text(vars(task) | {"request": dict(task.request), "result": result})


def task_from_text(text: bytes | str) -> Task:
    """Return a task from what ``task_to_text`` gave."""
    record = _details(text)
    result = result_from_text(details_to_text(record.pop("result")))
    return Task(**record, result=result)


def event_of(entry: Entry) -> Event:
    """Return an event from an entry of the events."""
    entry_id, fields = entry
    detail = _details(fields[b"detail"])
    return Event(first_of(entry_id), float(fields[b"time"]), fields[b"kind"].decode(), detail)


def placement_of(entry: Entry) -> CommittedPlacement:
    """Return a committed placement from an entry of the placements."""
    _, fields = entry
    return CommittedPlacement(
        placement_from_bytes(fields[b"record"]),
        float(fields[b"time"]),
        int(fields[b"plan_id"]),
        fields[b"reason"].decode(),
    )


def first_of(entry_id: bytes) -> int:
    """Return the number before the dash of a stream's id."""
    return int(entry_id.partition(b"-")[0])


def _details(text: bytes | str) -> dict[str, Any]:
    return details_from_text(text if isinstance(text, str) else text.decode())
