"""Samples are kept once each, in order of arrival, in every LoadStore."""

from __future__ import annotations

from typing import Any

import pytest

from eplb.core.load import LoadSample
from eplb.errors import ConfigError, HistoryError
from telemetry.store import LoadStore


def make_sample(rank: int, sequence: int, **changes: Any) -> LoadSample:
    fields: dict[str, Any] = {
        "deployment": "demo",
        "run": "run-1",
        "time": float(sequence),
        "first_step": sequence,
        "last_step": sequence,
        "phase": "decode",
        "generation": 1,
        "slot_to_expert": [[0, 1]],
        "tokens": [[rank, sequence]],
    }
    return LoadSample(rank=rank, sequence=sequence, **(fields | changes))


def test_samples_past_a_cursor_are_in_order_of_arrival(store: LoadStore) -> None:
    assert store.append([make_sample(1, 0), make_sample(0, 0)]) == 2
    assert store.append([make_sample(0, 1)]) == 1
    store.append([make_sample(0, 0, run="run-2")])

    first = store.samples("run-1", limit=2)
    rest = store.samples("run-1", after=first[-1][0])

    assert [(s.rank, s.sequence) for _, s in first] == [(1, 0), (0, 0)]
    assert [(s.rank, s.sequence) for _, s in rest] == [(0, 1)]
    assert store.samples("run-1", after=rest[-1][0]) == []
    assert rest[0][1].tokens.tolist() == [[0, 1]]


def test_repeated_sample_is_stored_once(store: LoadStore) -> None:
    store.append([make_sample(0, 0)])

    assert store.append([make_sample(0, 0), make_sample(0, 1), make_sample(0, 1)]) == 1
    assert store.append([]) == 0
    assert store.sample_counts("run-1") == {0: 2}


def test_samples_are_counted_by_rank_of_one_run(store: LoadStore) -> None:
    store.append([make_sample(rank, n) for rank in (1, 0) for n in range(rank + 1)])
    store.append([make_sample(0, 0, run="run-2")])

    assert store.sample_counts("run-1") == {0: 1, 1: 2}
    assert store.sample_counts("run-3") == {}


def test_sample_of_another_deployment_is_refused_and_nothing_is_stored(store: LoadStore) -> None:
    with pytest.raises(ConfigError, match="deployment 'other', expected 'demo'"):
        store.append([make_sample(0, 0), make_sample(0, 1, deployment="other")])

    assert store.sample_counts("run-1") == {}


def test_prune_removes_old_samples_and_cursors_keep_growing(store: LoadStore) -> None:
    store.append([make_sample(0, n) for n in range(4)])
    cursor = store.samples("run-1")[-1][0]

    assert store.prune(before_time=4.0) == 4
    store.append([make_sample(0, 4)])

    assert [s.sequence for _, s in store.samples("run-1", after=cursor)] == [4]


def test_samples_that_were_pruned_still_count_as_stored(store: LoadStore) -> None:
    store.append([make_sample(rank, n) for rank in (0, 1) for n in range(3)])
    store.append([make_sample(1, 0, run="run-2")])

    assert [store.prune(before_time=time) for time in (1.0, 1.0, 2.0)] == [3, 0, 2]

    assert [s.sequence for _, s in store.samples("run-1")] == [2, 2]
    assert store.sample_counts("run-1") == {0: 3, 1: 3}
    assert store.sample_counts("run-2") == {1: 1}


def test_samples_due_for_pruning_can_be_read_before(store: LoadStore) -> None:
    store.append([make_sample(0, n) for n in (3, 0, 1, 2)])
    store.append([make_sample(0, 0, run="run-2")])

    old = store.samples_before(2.0)

    assert [(s.run, s.sequence) for _, s in old] == [("run-1", 0), ("run-1", 1), ("run-2", 0)]
    assert [c for c, _ in store.samples_before(2.0, limit=1)] == [old[0][0]]
    assert [c for c, _ in store.samples_before(2.0, after=old[0][0])] == [c for c, _ in old[1:]]
    assert store.prune(2.0) == 3
    assert store.samples_before(2.0) == []


def test_samples_of_a_stretch_of_time_are_read_alone(store: LoadStore) -> None:
    store.append([make_sample(0, n) for n in (3, 0, 1, 2)])
    store.append([make_sample(0, 1, run="run-2")])

    found = store.samples_before(3.0, since=1.0)

    assert [(s.run, s.sequence) for _, s in found] == [("run-1", 1), ("run-1", 2), ("run-2", 1)]
    assert [c for c, _ in store.samples_before(3.0, since=1.0, limit=1)] == [found[0][0]]
    rest = store.samples_before(3.0, since=1.0, after=found[0][0])
    assert [c for c, _ in rest] == [c for c, _ in found[1:]]
    assert store.samples_before(9.0, since=4.0) == []


def test_store_that_reads_all_its_records_refused_none(store: LoadStore) -> None:
    store.append([make_sample(0, 0)])
    store.samples("run-1")

    assert store.refused() == {}


@pytest.mark.parametrize("time", [float("nan"), float("inf")])
def test_sample_without_a_time_is_refused(store: LoadStore, time: float) -> None:
    with pytest.raises(HistoryError, match=r"sample 1 of rank 0 was taken at .*, expected a time"):
        store.append([make_sample(0, 0), make_sample(0, 1, time=time)])

    assert store.sample_counts("run-1") == {}
