"""What is forgotten was rolled up before; a keeper killed anywhere loses and doubles nothing."""

from __future__ import annotations

import itertools
import os
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eplb.core.load import LoadSample
from eplb.core.model import ModelShape
from eplb.core.topology import Topology
from eplb.errors import ConfigError, StoreError
from eplb.migration.serialisation import model_to_dict, topology_to_dict
from telemetry.load import pruning
from telemetry.load.pruning import Keeper, Retention, hours_of
from telemetry.load.rollup import HOUR, MINUTE, Rollup
from telemetry.state.runs import RunInfo
from telemetry.state.store import StateStore
from tests.support.stores import MemoryStore, sqlite_store
from tests.support.stores import make_sample as make_any_sample

DAY = 24 * HOUR
START = 100 * DAY  # of the simulated clock

# Two ranks of two slots, one layer, three experts.
MODEL = ModelShape((0,), 3, 1, hidden=16, intermediate=8)
TWO_RANKS = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=2)
SHORT = Retention(
    keep_samples_s=120.0, keep_minutes_s=2.0 * HOUR, keep_hours_s=10.0 * HOUR, keep_events=5
)


def make_run(run: str) -> RunInfo:
    return RunInfo(run, 5.0, model_to_dict(MODEL), topology_to_dict(TWO_RANKS), 10)


def make_sample(rank: int, sequence: int, time: float, **changes: Any) -> LoadSample:
    steps = {"first_step": sequence * 10, "last_step": sequence * 10 + 9}
    fields = {"time": START + time, "slot_to_expert": [[0, rank + 1]], "tokens": [[10, 1]]} | steps
    return make_any_sample(rank, sequence, **(fields | changes))


def started(store: StateStore, *runs: str) -> StateStore:
    for run in runs or ("run-1",):
        store.begin_run(make_run(run))
    return store


def summary(rollup: Rollup) -> tuple[float, list[list[int]], list[list[int]]]:
    return rollup.start - START, rollup.tokens.tolist(), rollup.received.tolist()


def test_samples_older_than_they_are_kept_become_roll_ups_of_a_minute(store: StateStore) -> None:
    started(store)
    store.append([make_sample(rank, n, time=20.0 * n) for n in range(9) for rank in (0, 1)])

    turn = Keeper(store, SHORT).turn(START + 250.0)

    # Kept are samples of the last 120 s, and what their minute began with: 120..160.
    assert [s.time - START for _, s in store.samples("run-1") if s.rank == 0] == [120, 140, 160]
    assert [summary(rollup) for rollup in store.rollups(MINUTE)] == [
        (0.0, [[60, 3, 3]], [[33, 33]]),
        (60.0, [[60, 3, 3]], [[33, 33]]),
    ]
    first = store.rollups(MINUTE)[0]
    assert (first.run, first.phase, first.num_samples) == ("run-1", "decode", 6)
    assert (first.first_step, first.last_step) == (0, 29)
    assert (first.generations, first.ranks) == ({1}, {0, 1})
    assert (turn.minutes, turn.samples, turn.excluded, turn.standing) == (2, 12, 0, 0)
    again = Keeper(store, SHORT).turn(START + 250.0)
    assert (again.minutes, again.hours, again.samples, again.standing) == (0, 0, 0, 0)
    assert store.sample_counts("run-1") == {0: 9, 1: 9}


def test_hour_has_all_its_minutes_where_retention_runs_every_minute(store: StateStore) -> None:
    started(store)
    keeper = Keeper(
        store, Retention(keep_samples_s=120.0, keep_minutes_s=600.0, keep_hours_s=10.0 * HOUR)
    )
    due: list[int] = []  # minutes at which an hour was rolled up
    for minute in range(1, 140):
        if minute <= 120:
            store.append([make_sample(0, minute, time=60.0 * (minute - 1))])
        due += [minute] * keeper.turn(START + 60.0 * minute).hours

    assert due == [70, 130]  # each hour as a whole, once its last minute is ten minutes old
    assert [summary(rollup) for rollup in store.rollups(HOUR)] == [
        (0.0, [[600, 60, 0]], [[660, 0]]),
        (3600.0, [[600, 60, 0]], [[660, 0]]),
    ]


def test_samples_that_do_not_fit_their_run_are_excluded_and_counted(store: StateStore) -> None:
    started(store)
    store.begin_run(RunInfo("run-3", 6.0, {"no": "model"}, {}, 10))
    store.append([make_sample(0, 0, time=0.0), make_sample(7, 0, time=0.0)])
    store.append([make_sample(0, 0, time=0.0, run=run) for run in ("run-2", "run-3")])

    turn = Keeper(store, SHORT).turn(START + 250.0)

    assert (turn.minutes, turn.samples, turn.excluded) == (1, 4, 3)
    assert turn.reason == "run 'run-3' is not recorded, expected its start"
    assert store.rollups(MINUTE)[0].num_samples == 1


def test_backlog_of_hours_is_rolled_up_a_piece_at_a_time(
    store: StateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pruning, "_MOST_MINUTES", 3)
    monkeypatch.setattr(pruning, "_PAGE", 4)
    monkeypatch.setattr(pruning, "_ROLLUPS", 2)
    started(store, "run-1", "run-2", "run-3")
    rng = np.random.default_rng(1)
    times = rng.permutation(np.arange(0.0, 40 * 60.0, 40.0))
    for run in ("run-1", "run-2", "run-3"):
        store.append([make_sample(0, n, time=time, run=run) for n, time in enumerate(times)])

    turn = Keeper(store, SHORT).turn(START + 4.0 * HOUR)

    assert (turn.samples, turn.excluded, turn.standing) == (180, 0, 0)
    assert [(hour.run, hour.num_samples) for hour in store.rollups(HOUR)] == [
        ("run-1", 60),
        ("run-2", 60),
        ("run-3", 60),
    ]
    assert store.rollups(MINUTE) == []


def test_hour_is_the_sum_of_its_minutes_whatever_their_order() -> None:
    def minute(n: int, start: float) -> Rollup:
        span, members = (int(start), int(start) + 9, 2), (frozenset({n}), frozenset({n % 2}))
        counts = np.array([[n, 1]]), np.array([[n + 1]])
        return Rollup("run-1", "decode", MINUTE, start, *span, *members, *counts)

    minutes = [minute(n, start) for n, start in enumerate((0.0, 60.0, 3540.0, 3600.0))]

    for order in itertools.permutations(minutes):
        first, second = hours_of(order)
        assert (first.start, first.seconds, first.num_samples) == (0.0, HOUR, 6)
        assert (first.first_step, first.last_step) == (0, 3549)
        assert (first.generations, first.ranks) == ({0, 1, 2}, {0, 1})
        assert (first.tokens.tolist(), first.received.tolist()) == ([[3, 3]], [[6]])
        assert (second.start, second.tokens.tolist()) == (3600.0, [[3, 1]])


@pytest.mark.parametrize(
    "changes",
    [{"keep_samples_s": 0.0}, {"keep_minutes_s": -1.0}, {"keep_hours_s": 0.0}, {"keep_events": -1}],
)
def test_lengths_that_make_no_sense_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(changes))):
        Retention(**changes)


# -- killed at every step

WRITES = ("add_rollups", "prune", "prune_rollups", "prune_events")


class Mortal:
    """A store that calls ``die`` at one of its writes: before it, or after."""

    def __init__(self, store: StateStore, dies_at: int, die: Callable[[], object]) -> None:
        self._store, self._left, self._die = store, dies_at, die

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        if name not in WRITES:
            return method

        def write(*args: Any) -> Any:
            self._count_down()
            written = method(*args)
            self._count_down()
            return written

        return write

    def _count_down(self) -> None:
        if self._left == 0:
            self._die()
        self._left -= 1


def with_five_hours_of_load(store: StateStore) -> StateStore:
    started(store, "run-1", "run-2")
    for run in ("run-1", "run-2"):
        samples = [make_sample(rank, n, 240.0 * n, run=run) for n in range(75) for rank in (0, 1)]
        store.append(samples)
    for n in range(9):
        store.add_event("note", {"n": n})
    return store


def content(store: StateStore) -> Any:
    return (
        [(s.run, s.rank, s.sequence) for run in ("run-1", "run-2") for _, s in store.samples(run)],
        [(vars(r)["run"], *summary(r)) for r in store.rollups(MINUTE) + store.rollups(HOUR)],
        [dict(event.detail) for event in store.events()],
    )


def samples_kept(store: StateStore) -> Counter[str]:
    """Samples of each run that are somewhere: as they are, or else in the longest roll-up."""
    found = Counter({run: len(store.samples(run)) for run in ("run-1", "run-2")})
    for rollup in store.rollups(MINUTE) + store.rollups(HOUR):
        found[rollup.run] += rollup.num_samples
    return found


NOW = START + 5.0 * HOUR - 100.0  # the last samples are 140 s old
NUM_STEPS = 16  # a turn writes 8 times, since 74 minutes are more than are held at once


def settled(store: StateStore) -> Any:
    Keeper(store, SHORT).turn(NOW)
    return content(store)


@pytest.fixture(scope="module")
def wanted() -> Any:
    return settled(with_five_hours_of_load(MemoryStore("demo")))


def give_up() -> None:
    raise StoreError("the store is gone")


@pytest.mark.parametrize("step", range(NUM_STEPS + 1))
def test_turn_that_fails_at_any_step_is_made_good_by_the_next(
    store: StateStore, step: int, wanted: Any
) -> None:
    with_five_hours_of_load(store)
    mortal: Any = Mortal(store, step, give_up)

    if step < NUM_STEPS:
        with pytest.raises(StoreError, match="gone"):
            Keeper(mortal, SHORT).turn(NOW)
    else:
        Keeper(mortal, SHORT).turn(NOW)

    assert all(kept >= 150 for kept in samples_kept(store).values()), "something is lost"
    assert settled(store) == wanted
    assert set(samples_kept(store).values()) == {150}


def turn_until_killed(_: Connection, path: Path, step: int) -> None:
    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    mortal: Any = Mortal(sqlite_store(path, "demo"), step, die)
    Keeper(mortal, SHORT).turn(NOW)


@pytest.mark.system
@pytest.mark.parametrize("step", range(1, NUM_STEPS, 3))
def test_sigkill_of_retention_loses_and_duplicates_nothing(
    tmp_path: Path, step: int, wanted: Any, fork: Callable[..., Any]
) -> None:
    path = tmp_path / "store.sqlite"
    with closing(sqlite_store(path, "demo")) as store:
        with_five_hours_of_load(store)

    assert fork(turn_until_killed, path, step).ends() == -signal.SIGKILL

    with closing(sqlite_store(path, "demo")) as store:
        assert all(kept >= 150 for kept in samples_kept(store).values()), "something is lost"
        assert settled(store) == wanted


def test_two_keepers_in_turns_do_the_work_once(store: StateStore, wanted: Any) -> None:
    with_five_hours_of_load(store)

    turns = [Keeper(store, SHORT).turn(NOW) for _ in range(2)]

    assert content(store) == wanted
    assert [turn.standing for turn in turns] == [0, 0]
    assert sum(turn.samples for turn in turns) == 296
    assert [event.detail["n"] for event in store.events()] == [4, 5, 6, 7, 8]
