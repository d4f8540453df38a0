"""Live settings as text: read back as written, old switches converted, damage refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from eplb.errors import StoreError
from telemetry.live import Control, LiveChange, LiveSettings, LiveState
from telemetry.records.live_codec import live_from_text, live_to_text, with_switches

STATE = LiveState(
    7,
    LiveSettings(movement=True, pay_back_s=60.0),
    LiveSettings(movement=False, max_moves=3),
    {"movement": LiveChange(5, 9.5, "incident"), "max_moves": LiveChange(7, 10.5, "slow link")},
    {"movement": 69.5},
)


@pytest.mark.parametrize("state", [LiveState(), STATE])
def test_live_settings_are_read_back_as_they_were_written(state: LiveState) -> None:
    assert live_from_text(live_to_text(state)) == state


def test_value_of_a_program_without_expiry_does_not_end_by_itself() -> None:
    record = json.loads(live_to_text(STATE))
    del record["until"]

    found = live_from_text(json.dumps(record))

    assert (found.control, found.until) == (STATE.control, {})


def test_switches_of_version_1_that_were_set_count_as_live() -> None:
    state = live_from_text('{"movement": false, "observe": false}')

    assert (state.control, state.live) == (Control(movement=False), LiveSettings(movement=False))
    assert (state.revision, list(state.changes)) == (1, ["movement"])
    assert live_from_text('{"movement": true, "observe": false}') == LiveState()


def test_switch_that_an_older_program_sets_wins_over_a_live_one() -> None:
    paused = with_switches(STATE, Control(movement=True, observe=True))

    assert paused.control == Control(movement=True, observe=True)
    assert (paused.revision, paused.live.max_moves) == (7, 3)
    assert with_switches(STATE, STATE.control) is STATE


def test_live_setting_of_a_later_program_is_left_out() -> None:
    record = json.loads(live_to_text(STATE))
    record["live"]["later"] = 1
    record["changes"]["later"] = {"odd": True}

    assert live_from_text(json.dumps(record)) == STATE


def changed(**changes: Any) -> str:
    return json.dumps(json.loads(live_to_text(STATE)) | changes)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (changed(version=3), "the record of live settings is of version 3, expected one of: 1, 2"),
        (changed(live={"movement": "off"}), "cannot be read: movement is 'off', expected a value"),
        (changed(live=None), "the record of live settings cannot be read: AttributeError"),
        (changed(changes={"movement": {"revision": 5}}), "change of movement lacks time, reason"),
        ('{"version": 2}', "cannot be read: KeyError: 'revision'"),
        ('{"movement": 1, "observe": false}', "movement is 1, expected bool"),
        ('{"movement": false}', "the record of live settings lacks observe"),
    ],
)
def test_unreadable_live_settings_are_refused(text: str, why: str) -> None:
    with pytest.raises(StoreError, match=why):
        live_from_text(text)
