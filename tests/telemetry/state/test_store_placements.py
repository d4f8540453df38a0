"""Placements and migrations are compare-and-set: who may commit, publish, withdraw."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import closing
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eplb.core.placement import Placement
from eplb.core.topology import Topology
from eplb.errors import StaleGeneration
from eplb.migration.build import Migration, build_migration
from eplb.migration.recovery import Recovery
from telemetry.state.store import StateStore
from tests.support.processes import ForkedProcess
from tests.support.stores import kinds, make_placement, sqlite_store

TWO_RANKS = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=2)


def make_migration(base: Placement, plan_id: int) -> Migration:
    target = Placement(np.array([[0, 1, 2, 1]]), num_experts=3)
    return build_migration(base, target, TWO_RANKS, plan_id=plan_id)


@pytest.fixture
def first(store: StateStore) -> Placement:
    """The committed placement."""
    placement = make_placement(1)
    store.commit(placement, expected=None, reason="first")
    return placement


@pytest.fixture
def migration(store: StateStore, first: Placement) -> Migration:
    """The open migration, of plan 1."""
    published = make_migration(first, store.next_plan_id())
    store.publish(published)
    return published


def test_commit_is_made_once_and_known_later_as_one_of_the_past(
    store: StateStore, first: Placement
) -> None:
    assert not store.commit(first, expected=None, reason="another rank")
    assert store.commit(make_placement(4, [2, 1, 0, 2]), expected=1, plan_id=3, reason="skew")
    assert not store.commit(first, expected=None, reason="late")

    assert [line.placement.generation for line in store.placements()] == [4, 1]
    assert store.events()[-1].detail == {"generation": 4, "plan_id": 3, "reason": "skew"}
    assert kinds(store) == ["commit", "commit"]


@pytest.mark.parametrize(
    ("generation", "expected", "figures"),
    [
        (3, 1, "generation 3 .*generation 1, .*generation 2"),
        (3, None, "generation 3 .*None, .*generation 2"),
        (1, 2, "generation 1 .*more than 2"),
        (2, 2, "generation 2 .*more than 2"),
    ],
)
def test_stale_commit_is_refused(
    store: StateStore, generation: int, expected: int | None, figures: str
) -> None:
    store.commit(make_placement(2), expected=None, reason="first")

    with pytest.raises(StaleGeneration, match=figures):
        store.commit(make_placement(generation, [2, 1, 0, 2]), expected=expected, reason="stale")

    assert len(store.placements()) == 1
    assert kinds(store) == ["commit"]


def test_published_migration_is_open_until_its_commit(
    store: StateStore, migration: Migration
) -> None:
    found = store.published()
    assert found is not None
    assert found.hash == migration.hash
    assert store.events()[-1].detail == {
        "plan_id": 1,
        "base_generation": 1,
        "generation": 2,
        "moves": 2,
        "transactions": 1,
    }

    store.commit(migration.target, expected=1, plan_id=1, reason="skew")
    assert store.published() is None
    assert kinds(store) == ["commit", "publish", "commit"]


def test_second_open_migration_and_a_plan_id_published_before_are_refused(
    store: StateStore, migration: Migration
) -> None:
    with pytest.raises(StaleGeneration, match=r"plan 2.*plan 1"):
        store.publish(make_migration(make_placement(1), store.next_plan_id()))
    store.withdraw(1, outcome="rejected", reason="a rank said no")
    with pytest.raises(StaleGeneration, match="plan id 1"):
        store.publish(migration)

    assert store.published() is None


@pytest.mark.parametrize("base", [make_placement(2), make_placement(1, [2, 1, 0, 2])])
def test_migration_from_another_base_or_before_the_first_commit_is_refused(
    store: StateStore, base: Placement
) -> None:
    with pytest.raises(StaleGeneration):
        store.publish(make_migration(base, 1))
    store.commit(make_placement(1), expected=None, reason="first")
    with pytest.raises(StaleGeneration, match="plan 1"):
        store.publish(make_migration(base, 1))

    assert store.published() is None


def test_withdrawn_migration_is_closed_once(store: StateStore, migration: Migration) -> None:
    assert not store.withdraw(9, outcome="aborted", reason="another plan")
    assert store.withdraw(migration.plan_id, outcome="aborted", reason="rank 1 died")
    assert not store.withdraw(migration.plan_id, outcome="aborted", reason="again")

    assert store.published() is None
    assert kinds(store) == ["commit", "publish", "abort"]
    assert store.events()[-1].detail == {"generation": 1, "plan_id": 1, "reason": "rank 1 died"}


def test_aborted_migration_commits_the_layers_that_serve(
    store: StateStore, migration: Migration
) -> None:
    serving = migration.placement_after(1).with_generation(2)

    store.commit(serving, expected=1, plan_id=1, reason="switched off", outcome="aborted")

    assert store.published() is None
    assert kinds(store)[-1] == "abort"


@pytest.mark.usefixtures("migration")
def test_commit_from_elsewhere_rejects_the_open_migration(store: StateStore) -> None:
    store.commit(make_placement(5), expected=1, reason="restart")

    assert store.published() is None
    assert kinds(store) == ["commit", "publish", "reject", "commit"]


# -- after a death


def record_of(migration: Migration, **changes: Any) -> Recovery:
    fields: dict[str, Any] = {
        "membership": 1,
        "run": "run-1",
        "survivors": (0,),
        "generation": migration.base.generation,
        "plan_id": migration.plan_id,
        "applied": 0,
        "reason": "rank 1 died",
        "time": 9.5,
    }
    return Recovery(**(fields | changes))


def test_plan_dropped_by_survivors_rejects_the_late_commit_of_a_dead_rank(
    store: StateStore, migration: Migration
) -> None:
    store.recover(record_of(migration), expected_membership=0)

    assert store.published() is None
    assert kinds(store)[-2:] == ["recovery", "abort"]
    assert store.events()[-1].detail["reason"] == "rank 1 died"
    with pytest.raises(StaleGeneration, match=r"of membership 0 cannot .* membership 1 was"):
        store.commit(
            migration.target, expected=1, plan_id=migration.plan_id, reason="served", membership=0
        )
    assert [line.placement.generation for line in store.placements()] == [1]


def commit_after_a_stop(pipe: Connection, path: Path, migration: Migration) -> None:
    """Be a rank that is stopped between what it has read and its commit."""
    with closing(sqlite_store(path, "test")) as store:
        epoch = store.epoch()
        pipe.send(os.getpid())
        os.kill(os.getpid(), signal.SIGSTOP)
        given = {"plan_id": migration.plan_id, "reason": "served", "membership": epoch}
        try:
            store.commit(migration.target, expected=1, **given)
        except StaleGeneration as exc:
            pipe.send(str(exc))


@pytest.mark.system
def test_commit_of_a_process_that_was_stopped_while_others_recovered_is_refused(
    tmp_path: Path, fork: Callable[..., ForkedProcess]
) -> None:
    path, first = tmp_path / "store.sqlite", make_placement(1)
    with closing(sqlite_store(path, "test")) as store:
        store.commit(first, expected=None, reason="first")
        migration = make_migration(first, store.next_plan_id())
        store.publish(migration)
    late = fork(commit_after_a_stop, path, migration)
    pid = late.receive()
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)

    with closing(sqlite_store(path, "test")) as store:
        store.recover(record_of(migration), expected_membership=0)
        os.kill(pid, signal.SIGCONT)
        refusal = late.receive()

        assert late.ends() == 0
        assert "of membership 0 cannot" in refusal
        assert "membership 1 was" in refusal
        assert [line.placement.generation for line in store.placements()] == [1]


def test_survivors_that_roll_a_plan_forward_commit_it(
    store: StateStore, migration: Migration
) -> None:
    target = migration.target
    record = record_of(migration, generation=target.generation, applied=1)
    store.recover(record, expected_membership=0)

    assert store.published() is not None
    late = partial(store.commit, target, expected=1, plan_id=migration.plan_id, reason="forward")
    # The dead rank may have swapped more of that plan than survivors have.
    with pytest.raises(StaleGeneration, match="a group of membership 1 was recorded"):
        late(membership=0)
    assert late(membership=1)


def test_recovery_older_than_the_committed_placement_is_refused(
    store: StateStore, migration: Migration
) -> None:
    store.commit(migration.target, expected=1, plan_id=migration.plan_id, reason="a last write")

    assert store.recover(record_of(migration), expected_membership=0) is None
    assert store.recovery() is None
    assert kinds(store)[-1] == "commit"
