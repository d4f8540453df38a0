"""Rank reports: every field is stored, an older version is converted, the rest is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from eplb.errors import StoreError
from telemetry.records.rank_state_codec import rank_state_from_text, rank_state_to_text
from telemetry.store import RankState

STATE = RankState(
    "run-1", 2, 9.5, 6, 4, "swap", 7, 1, 30, 3, 2, "torn", 1, 2, 0.5, "mover", {"moved": [1, 2.5]}
)
OF_VERSION_1 = {
    "run": "run-1",
    "rank": 2,
    "time": 9.5,
    "step": 6,
    "generation": 4,
    "phase": "swap",
    "plan_id": 7,
    "applied": 1,
    "sequence": 30,
}


def test_rank_report_is_read_back_as_it_was_written() -> None:
    assert rank_state_from_text(rank_state_to_text(STATE)) == STATE


def test_rank_report_of_version_1_gets_typed_fields_from_its_details() -> None:
    detail = {"weights_version": 3, "frozen": "torn", "mover_failures": 2, "moved": 5}

    found = rank_state_from_text(json.dumps(OF_VERSION_1 | {"detail": detail}))

    assert (found.weights_version, found.frozen, found.mover_failures) == (3, "torn", 2)
    assert (found.prepared, found.digest_failures, found.progress_of) == (0, 0, "")
    assert found.detail == {"moved": 5}


def test_rank_report_of_version_1_without_weights_version_is_refused() -> None:
    with pytest.raises(StoreError, match="a rank's report lacks weights_version, expected run,"):
        rank_state_from_text(json.dumps(OF_VERSION_1 | {"detail": {}}))


def changed(**changes: Any) -> str:
    return json.dumps(json.loads(rank_state_to_text(STATE)) | changes)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (changed(version=3), "of version 3, expected one of: 1, 2; it was written by another"),
        (changed(version="2"), "of version '2', expected one of: 1, 2"),
        (changed(version=True), "of version True, expected one of"),
        (changed(weights_version=None), "weights_version is None, expected int"),
        (changed(weights_version="3"), "weights_version is '3', expected int"),
        (changed(applied=True), "applied is True, expected int"),
        (changed(applied=1.5), r"applied is 1\.5, expected int"),
        (changed(surprise=1), "unknown fields surprise"),
        ("[]", "is list, expected a JSON object"),
        ("{", "is not JSON"),
    ],
)
def test_unreadable_rank_report_is_refused(text: str, why: str) -> None:
    with pytest.raises(StoreError, match=why):
        rank_state_from_text(text)
