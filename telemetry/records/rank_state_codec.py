"""Rank reports as JSON text, in one form for every store.

version 1   no "version"; typed fields of today among the details
version 2   every field of RankState by its name
"""

from __future__ import annotations

from typing import Any

from telemetry.records.typed_json import VERSION, from_json, from_record, to_json, version_of
from telemetry.store import RankState

RANK_STATE_VERSION = 2
_WHAT = "a rank's report"
# What version 1 kept among the details, and what it meant where it was left out. The version of
# the weights is not among them: a report without it is refused.
_OF_VERSION_1: dict[str, Any] = {
    "prepared": 0,
    "frozen": "",
    "digest_failures": 0,
    "mover_failures": 0,
    "progress_age_s": 0.0,
    "progress_of": "",
}


def rank_state_to_text(state: RankState) -> str:
    """Return a rank's report as JSON text.

    Raises:
        StoreError: a detail that JSON cannot hold.
    """
    return to_json({VERSION: RANK_STATE_VERSION} | vars(state) | {"detail": dict(state.detail)})


def rank_state_from_text(text: str | bytes) -> RankState:
    """Make a rank's report from what ``rank_state_to_text`` gave, or a program before it.

    Raises:
        StoreError: an unknown version, or fields that are missing, unknown or of another type.
    """
    record = from_json(text, _WHAT)
    if version_of(record, _WHAT, (1, RANK_STATE_VERSION)) == 1:
        record = _of_version_1(record)
    return from_record(RankState, record, _WHAT)


def _of_version_1(record: dict[str, Any]) -> dict[str, Any]:
    detail = dict(record.get("detail", {}))
    typed = {name: detail.pop(name, default) for name, default in _OF_VERSION_1.items()}
    if "weights_version" in detail:
        typed["weights_version"] = detail.pop("weights_version")
    return record | typed | {"detail": detail}
