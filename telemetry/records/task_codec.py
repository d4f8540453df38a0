"""Results of tasks as JSON text, in one form for every store.

version 1   no "version"; error and plan id among the details
version 2   every field of TaskResult by its name, but the refusal
version 3   that too; only a result with a refusal is written so, for programs that read version 2
"""

from __future__ import annotations

from typing import Any

from telemetry.records.typed_json import VERSION, from_json, from_record, to_json, version_of
from telemetry.store import TaskResult

RESULT_VERSION = 3
_WHAT = "a task's result"


def result_to_text(result: TaskResult) -> str:
    """Return the result of a task as JSON text.

    Raises:
        StoreError: a detail that JSON cannot hold.
    """
    record = {VERSION: RESULT_VERSION} | vars(result) | {"detail": dict(result.detail)}
    if not result.refusal:
        record |= {VERSION: 2}
        del record["refusal"]
    return to_json(record)


def result_from_text(text: str | bytes) -> TaskResult:
    """Make the result of a task from what ``result_to_text`` gave, or a program before it.

    Raises:
        StoreError: an unknown version, or fields that are missing, unknown or of another type.
    """
    record = from_json(text, _WHAT)
    version = version_of(record, _WHAT, (1, 2, RESULT_VERSION))
    if version == 1:
        record = _of_version_1(record)
    if version < RESULT_VERSION:
        record["refusal"] = ""
    return from_record(TaskResult, record, _WHAT)


def _of_version_1(record: dict[str, Any]) -> dict[str, Any]:
    error, plan_id = record.pop("error", ""), record.pop("plan_id", None)
    return {"error": error, "plan_id": plan_id or 0, "detail": record}
