"""Records as JSON text: read back as written, and refused where they are not of their type."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest

from eplb.decision.pace import PaceChange
from eplb.errors import StoreError
from eplb.migration.candidates import Candidates
from eplb.migration.recovery import Recovery
from telemetry.state.codec import decode, pack, to_json, unpack
from telemetry.state.events import PlanEnd
from telemetry.state.lease import Lease
from telemetry.state.live import LiveChange, LiveState
from telemetry.state.runs import RankState
from telemetry.state.tasks import Task, TaskResult

LIVE = LiveState(
    7,
    {"movement": True, "pay_back_s": 60.0},
    {"movement": False, "max_moves": 3},
    {"movement": LiveChange(5, 9.5, "incident"), "max_moves": LiveChange(7, 10.5, "slow link")},
    {"movement": 69.5},
)
RANK = RankState(
    "run-1", 2, 9.5, 6, 4, "swap", 7, 1, 30, 3, 2, "torn", 1, 2, 0.5, "mover", {"moved": [1, 2.5]}
)
TASK = Task(4, 9.5, "rebalance", {"n": [1]}, "done", TaskResult("", 4, {"moves": [1]}))


@pytest.mark.parametrize(
    "record",
    [
        LiveState(),
        LIVE,
        RANK,
        TASK,
        TaskResult("no load", refusal="no-load"),
        Lease("one", 3, 9.5, 0.0, 1.5, 2, "deployment"),
        Recovery(1, "run-1", (0, 2), 5, 7, 1, "rank 1 died", 9.5),
        Candidates((((0, 3), (1, 2)), ())),
        PaceChange(3, None, 0.02, 1.0, 0.5, "slow"),
        PlanEnd(None, 3, "dropped"),
    ],
    ids=lambda record: type(record).__name__,
)
def test_record_is_read_back_as_it_was_written(record: Any) -> None:
    assert decode(type(record), to_json(record), "a record") == record
    assert decode(type(record), to_json(record).encode(), "a record") == record


def test_settings_that_are_not_set_are_left_out() -> None:
    assert json.loads(to_json(LIVE))["live"] == {"movement": False, "max_moves": 3}


def test_value_that_may_be_none_is_written_where_it_has_no_default() -> None:
    assert json.loads(to_json(PlanEnd(None, 3, "dropped")))["generation"] is None


def changed(record: Any, **changes: object) -> str:
    return json.dumps(asdict(record) | changes)


@pytest.mark.parametrize(
    ("cls", "text", "figures"),
    [
        (RankState, changed(RANK, weights_version=None), "weights_version is None, expected int"),
        (RankState, changed(RANK, weights_version="3"), "weights_version is '3', expected int"),
        (RankState, changed(RANK, applied=True), "applied is True, expected int"),
        (RankState, changed(RANK, applied=1.5), r"applied is 1\.5, expected int"),
        (RankState, changed(RANK, surprise=1), "unknown fields surprise.*another version"),
        (RankState, changed(RANK, detail=[1]), r"detail is \[1\]"),
        (RankState, "[]", "list"),
        (RankState, "{", "JSON"),
        (RankState, '{"run": "run-1"}', "lacks rank, time, step"),
        (Task, changed(TASK, state="lost"), "state is 'lost', expected .*'queued'"),
        (Task, changed(TASK, result={"error": ""}), "result lacks plan_id, detail, refusal"),
        (LiveState, changed(LIVE, live={"movement": "off"}), ": movement is 'off'"),
        (LiveState, changed(LIVE, live={"max_moves": None}), "live is .*|max_moves is None"),
        (LiveState, changed(LIVE, live=None), "live is None"),
        (LiveState, changed(LIVE, changes={"observe": {"revision": 5}}), "lacks time, reason"),
        (Recovery, '{"survivors": 3}', "lacks membership"),
    ],
)
def test_unreadable_record_is_refused_with_the_place(cls: type, text: str, figures: str) -> None:
    with pytest.raises(StoreError, match=f"^record 7.*{figures}"):
        decode(cls, text, "record 7")


def test_bytes_after_metadata_are_read_back() -> None:
    record = pack({"reason": "a\nb", "n": 1.5}, b"\n\x00blob\n")

    assert unpack(record, "a record") == ({"reason": "a\nb", "n": 1.5}, b"\n\x00blob\n")
    with pytest.raises(StoreError, match="a record"):
        unpack(b"no metadata", "a record")
