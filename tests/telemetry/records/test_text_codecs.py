"""Records as text: read back as written, older versions converted, the rest refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from eplb.errors import StoreError
from telemetry.live import Control, LiveChange, LiveSettings, LiveState
from telemetry.records.live_codec import live_from_text, live_to_text, with_switches
from telemetry.records.rank_state_codec import rank_state_from_text, rank_state_to_text
from telemetry.records.task_codec import result_from_text, result_to_text
from telemetry.store import RankState, TaskResult


class Codec(NamedTuple):
    """To text and back."""

    write: Callable[[Any], str]
    read: Callable[[str], object]


LIVE = Codec(live_to_text, live_from_text)
REPORT = Codec(rank_state_to_text, rank_state_from_text)
RESULT = Codec(result_to_text, result_from_text)

STATE = LiveState(
    7,
    LiveSettings(movement=True, pay_back_s=60.0),
    LiveSettings(movement=False, max_moves=3),
    {"movement": LiveChange(5, 9.5, "incident"), "max_moves": LiveChange(7, 10.5, "slow link")},
    {"movement": 69.5},
)
RANK = RankState(
    "run-1", 2, 9.5, 6, 4, "swap", 7, 1, 30, 3, 2, "torn", 1, 2, 0.5, "mover", {"moved": [1, 2.5]}
)
RANK_1 = {
    "run": "run-1",
    "rank": 2,
    "time": 9.5,
    "step": 6,
    "generation": 4,
    "phase": "swap",
    "plan_id": 7,
    "applied": 1,
    "sequence": 30,
}  # of version 1


@pytest.mark.parametrize(
    ("codec", "record"),
    [
        (LIVE, LiveState()),
        (LIVE, STATE),
        (REPORT, RANK),
        (RESULT, TaskResult()),
        (RESULT, TaskResult("no load")),
        (RESULT, TaskResult("no load", refusal="no-load")),
        (RESULT, TaskResult("", 4, {"moves": [1]})),
    ],
)
def test_record_is_read_back_as_it_was_written(codec: Codec, record: object) -> None:
    assert codec.read(codec.write(record)) == record


@pytest.mark.parametrize(
    ("codec", "before", "expected"),
    [
        (RESULT, {}, TaskResult()),
        (RESULT, {"error": "no load"}, TaskResult("no load")),
        (RESULT, {"moves": 3, "plan_id": 4}, TaskResult("", 4, {"moves": 3})),
        (RESULT, {"moves": 3, "plan_id": None}, TaskResult("", 0, {"moves": 3})),
        (
            REPORT,
            RANK_1
            | {"detail": {"weights_version": 3, "frozen": "x", "mover_failures": 2, "moved": 5}},
            RankState(
                "run-1", 2, 9.5, 6, 4, "swap", 7, 1, 30, 3, 0, "x", 0, 2, detail={"moved": 5}
            ),
        ),
        (LIVE, {"movement": True, "observe": False}, LiveState()),
    ],
)
def test_record_of_an_older_version_gets_typed_fields(
    codec: Codec, before: dict[str, object], expected: object
) -> None:
    assert codec.read(json.dumps(before)) == expected


def test_switches_of_version_1_that_were_set_count_as_live() -> None:
    state = live_from_text('{"movement": false, "observe": false}')

    assert (state.control, state.live) == (Control(movement=False), LiveSettings(movement=False))
    assert (state.revision, list(state.changes)) == (1, ["movement"])


def test_switch_that_an_older_program_sets_wins_over_a_live_one() -> None:
    paused = with_switches(STATE, Control(movement=True, observe=True))

    assert paused.control == Control(movement=True, observe=True)
    assert (paused.revision, paused.live.max_moves) == (7, 3)
    assert with_switches(STATE, STATE.control) is STATE


def test_live_settings_of_other_programs_may_lack_expiry_and_have_more_settings() -> None:
    record = json.loads(live_to_text(STATE))
    del record["until"]
    assert live_from_text(json.dumps(record)).until == {}

    record = json.loads(live_to_text(STATE))
    record["live"]["later"] = 1
    record["changes"]["later"] = {"odd": True}
    assert live_from_text(json.dumps(record)) == STATE


def test_task_result_without_a_refusal_is_one_of_version_2() -> None:
    assert json.loads(result_to_text(TaskResult("no load")))["version"] == 2


def live(**changes: Any) -> str:
    return json.dumps(json.loads(live_to_text(STATE)) | changes)


def report(**changes: Any) -> str:
    return json.dumps(json.loads(rank_state_to_text(RANK)) | changes)


@pytest.mark.parametrize(
    ("codec", "text", "figures"),
    [
        (LIVE, live(version=3), "version 3, .*1, 2"),
        (LIVE, live(live={"movement": "off"}), "movement is 'off'"),
        (LIVE, live(live=None), "AttributeError"),
        (LIVE, live(changes={"movement": {"revision": 5}}), "movement lacks time, reason"),
        (LIVE, '{"version": 2}', "'revision'"),
        (LIVE, '{"movement": 1, "observe": false}', "movement is 1, expected bool"),
        (LIVE, '{"movement": false}', "observe"),
        (REPORT, json.dumps(RANK_1 | {"detail": {}}), "weights_version"),
        (REPORT, report(version=3), "version 3, .*1, 2"),
        (REPORT, report(version="2"), "version '2'"),
        (REPORT, report(version=True), "version True"),
        (REPORT, report(weights_version=None), "weights_version is None, expected int"),
        (REPORT, report(weights_version="3"), "weights_version is '3', expected int"),
        (REPORT, report(applied=True), "applied is True, expected int"),
        (REPORT, report(applied=1.5), r"applied is 1\.5, expected int"),
        (REPORT, report(surprise=1), "surprise"),
        (REPORT, "[]", "list"),
        (REPORT, "{", "JSON"),
        (RESULT, '{"version": 4}', "version 4, .*1, 2, 3"),
        (RESULT, '{"version": 2}', "error, plan_id, detail"),
        (RESULT, '{"plan_id": "4"}', "plan_id is '4', expected int"),
    ],
)
def test_unreadable_record_is_refused(codec: Codec, text: str, figures: str) -> None:
    with pytest.raises(StoreError, match=figures):
        codec.read(text)
