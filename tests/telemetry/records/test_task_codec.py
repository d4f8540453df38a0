"""Results of tasks: error and plan id are fields, and an older version is converted."""

from __future__ import annotations

import json

import pytest

from eplb.errors import StoreError
from telemetry.records.task_codec import result_from_text, result_to_text
from telemetry.store import TaskResult


@pytest.mark.parametrize(
    "result",
    [
        TaskResult(),
        TaskResult("no load"),
        TaskResult("no load", refusal="no-load"),
        TaskResult("", 4, {"moves": [1]}),
    ],
)
def test_task_result_is_read_back_as_it_was_written(result: TaskResult) -> None:
    assert result_from_text(result_to_text(result)) == result


def test_task_result_without_a_refusal_is_one_of_version_2() -> None:
    assert json.loads(result_to_text(TaskResult("no load")))["version"] == 2


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ({}, TaskResult()),
        ({"error": "no load"}, TaskResult("no load")),
        ({"moves": 3, "plan_id": 4}, TaskResult("", 4, {"moves": 3})),
        ({"moves": 3, "plan_id": None}, TaskResult("", 0, {"moves": 3})),
    ],
)
def test_task_result_of_version_1_gets_typed_fields(
    before: dict[str, object], expected: TaskResult
) -> None:
    assert result_from_text(json.dumps(before)) == expected


@pytest.mark.parametrize(
    ("record", "why"),
    [
        ({"version": 4}, "a task's result is of version 4, expected one of: 1, 2, 3"),
        ({"version": 2}, "a task's result lacks error, plan_id, detail"),
        ({"plan_id": "4"}, "plan_id is '4', expected int"),
    ],
)
def test_unreadable_task_result_is_refused(record: dict[str, object], why: str) -> None:
    with pytest.raises(StoreError, match=why):
        result_from_text(json.dumps(record))
