"""Roll-ups are kept once each, and events are bounded, in every LoadStore."""

from __future__ import annotations

from typing import Any

import numpy as np

from telemetry.retention.rollup import HOUR, MINUTE, Rollup
from telemetry.store import LoadStore


def make_rollup(start: float, **changes: Any) -> Rollup:
    fields: dict[str, Any] = {
        "run": "run-1",
        "phase": "decode",
        "seconds": MINUTE,
        "first_step": 10,
        "last_step": 19,
        "num_samples": 4,
        "generations": frozenset({1, 2}),
        "ranks": frozenset({0, 3}),
        "tokens": [[1, 2**40, 0]],
        "received": [[3, 4, 5, 6]],
    }
    return Rollup(start=start, **(fields | changes))


def starts(rollups: list[Rollup]) -> list[float]:
    return [rollup.start for rollup in rollups]


def same(one: Rollup, other: Rollup) -> bool:
    mine, theirs = vars(one), vars(other)
    return all(np.array_equal(mine[name], theirs[name]) for name in mine)


def test_roll_up_round_trips(store: LoadStore) -> None:
    rollup = make_rollup(60.0)

    assert store.add_rollups([rollup]) == 1

    (found,) = store.rollups(MINUTE)
    assert same(found, rollup)


def test_repeated_roll_up_is_kept_once_as_the_first(store: LoadStore) -> None:
    first = make_rollup(60.0)
    store.add_rollups([first])

    changed = make_rollup(60.0, num_samples=9)
    assert store.add_rollups([changed, make_rollup(120.0)]) == 1
    assert store.add_rollups([]) == 0

    found = store.rollups(MINUTE)
    assert starts(found) == [60.0, 120.0]
    assert same(found[0], first)


def test_roll_ups_are_separate_by_run_phase_and_length(store: LoadStore) -> None:
    others: list[dict[str, Any]] = [{"run": "run-2"}, {"phase": "prefill"}, {"seconds": HOUR}]
    rollups = [make_rollup(3600.0), *(make_rollup(3600.0, **other) for other in others)]

    assert store.add_rollups(rollups) == 4
    assert len(store.rollups(MINUTE)) == 3
    assert [rollup.seconds for rollup in store.rollups(HOUR)] == [HOUR]


def test_roll_ups_are_read_past_a_start_oldest_first(store: LoadStore) -> None:
    store.add_rollups([make_rollup(start) for start in (180.0, 0.0, 60.0, 120.0)])

    assert starts(store.rollups(MINUTE)) == [0.0, 60.0, 120.0, 180.0]
    assert starts(store.rollups(MINUTE, after=60.0)) == [120.0, 180.0]
    assert starts(store.rollups(MINUTE, after=0.0, limit=2)) == [60.0, 120.0]


def test_ended_roll_ups_of_a_length_are_removed(store: LoadStore) -> None:
    store.add_rollups([make_rollup(start) for start in (0.0, 60.0, 120.0)])
    store.add_rollups([make_rollup(0.0, seconds=HOUR)])

    assert store.prune_rollups(MINUTE, 119.0) == 1
    assert store.prune_rollups(MINUTE, 120.0) == 1
    assert store.prune_rollups(MINUTE, 120.0) == 0

    assert starts(store.rollups(MINUTE)) == [120.0]
    assert starts(store.rollups(HOUR)) == [0.0]


def test_roll_ups_end_no_wait(store: LoadStore) -> None:
    before = store.version()

    store.add_rollups([make_rollup(0.0)])

    assert store.version() == before


def test_old_events_are_pruned_and_ids_continue(store: LoadStore) -> None:
    ids = [store.add_event("note", {"n": n}) for n in range(5)]
    version = store.version()

    assert store.prune_events(keep=2) == 3
    assert store.prune_events(keep=2) == 0

    assert [event.id for event in store.events()] == ids[3:]
    assert [event.id for event in store.events(after=ids[3])] == ids[4:]
    assert store.version() == version
    assert store.prune_events(keep=0) == 2
    assert store.events() == []
    assert store.add_event("note", {}) > ids[-1]
    assert len(store.events(after=ids[-1])) == 1
