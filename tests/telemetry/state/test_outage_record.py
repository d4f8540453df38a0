"""Outages on record: each once, whichever service finds it and in whatever order."""

from __future__ import annotations

from dataclasses import replace

from telemetry.state.events import OUTAGES, Outage, outage_of
from telemetry.state.store import StateStore

FIRST = Outage(100.0, 114.0, 14.0, "rank 1 was killed")
SECOND = Outage(200.0, 290.0, 90.0, "no step was completed")


def recorded(store: StateStore) -> list[Outage | None]:
    return [outage_of(event) for event in store.events() if event.kind == "outage"]


def test_outage_that_two_services_find_is_on_record_once(any_store: StateStore) -> None:
    for one in (FIRST, SECOND, FIRST, replace(SECOND, start=199.2, unserved_s=90.8)):
        any_store.add_outage(one)

    assert recorded(any_store) == [FIRST, SECOND]


def test_outage_after_the_store_s_clock_was_set_back_is_on_record(any_store: StateStore) -> None:
    any_store.add_outage(SECOND)
    any_store.add_outage(FIRST)

    assert recorded(any_store) == [SECOND, FIRST]


def test_record_of_old_outages_is_pruned_and_their_events_stay(any_store: StateStore) -> None:
    later = replace(SECOND, start=1e6, end=1e6 + 90)
    for one in (FIRST, later):
        any_store.add_outage(one)

    assert recorded(any_store) == [FIRST, later]
    assert [key for key, _ in any_store.backend.scan(OUTAGES.table)] == [repr(later.start)]
