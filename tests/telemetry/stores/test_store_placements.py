"""Placements and migrations are compare-and-set, in every LoadStore."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from eplb.core.placement import Placement
from eplb.core.topology import Topology
from eplb.errors import StaleGeneration
from eplb.migration.build import Migration, build_migration
from eplb.migration.recovery import Recovery
from telemetry.store import LoadStore

TWO_RANKS = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=2)


def make_placement(generation: int, held: list[int] | None = None) -> Placement:
    return Placement(np.array([held or [0, 1, 0, 2]]), num_experts=3, generation=generation)


def make_migration(base: Placement, plan_id: int) -> Migration:
    target = Placement(np.array([[0, 1, 2, 1]]), num_experts=3)
    return build_migration(base, target, TWO_RANKS, plan_id=plan_id)


def kinds(store: LoadStore) -> list[str]:
    return [event.kind for event in store.events()]


def with_open_migration(store: LoadStore) -> Migration:
    base = make_placement(1)
    store.commit(base, expected=None, reason="first")
    migration = make_migration(base, store.next_plan_id())
    store.publish(migration)
    return migration


# -- placements


def test_commits_are_kept_newest_first(store: LoadStore) -> None:
    assert store.committed() is None

    assert store.commit(make_placement(1), expected=None, reason="first")
    assert store.commit(make_placement(4, [2, 1, 0, 2]), expected=1, plan_id=3, reason="skew")

    committed = store.committed()
    assert committed is not None
    assert committed.placement.slot_to_expert.tolist() == [[2, 1, 0, 2]]
    assert (committed.plan_id, committed.reason) == (3, "skew")
    assert [line.placement.generation for line in store.placements()] == [4, 1]
    assert [line.placement.generation for line in store.placements(limit=1)] == [4]
    assert [line.placement.generation for line in store.placements(before=4)] == [1]
    assert store.placements(before=1) == []
    assert store.events()[-1].detail == {"generation": 4, "plan_id": 3, "reason": "skew"}


def test_placement_is_found_by_its_generation(store: LoadStore) -> None:
    assert store.placement(1) is None
    for generation, held in ((1, [0, 1, 0, 2]), (4, [2, 1, 0, 2])):
        expected = 1 if generation == 4 else None
        store.commit(make_placement(generation, held), expected=expected, reason="test")

    found = store.placement(1)

    assert found is not None
    assert found.placement.slot_to_expert.tolist() == [[0, 1, 0, 2]]
    assert store.placement(2) is None
    committed, latest = store.committed(), store.placement(4)
    assert committed is not None
    assert latest is not None
    assert latest.placement.hash == committed.placement.hash


def test_every_rank_may_commit_and_the_first_writes(store: LoadStore) -> None:
    def commit(rank: int) -> bool:
        return store.commit(make_placement(1), expected=None, reason=f"rank {rank}")

    with ThreadPoolExecutor(4) as pool:
        written = list(pool.map(commit, range(8)))

    assert written.count(True) == 1
    assert kinds(store) == ["commit"]


def test_rank_that_commits_late_finds_its_placement_in_the_past(store: LoadStore) -> None:
    store.commit(make_placement(1), expected=None, reason="first")
    store.commit(make_placement(2), expected=1, reason="second")

    assert not store.commit(make_placement(1), expected=None, reason="late")


@pytest.mark.parametrize(
    ("generation", "expected", "message"),
    [
        (3, 1, "generation 3 follows generation 1, found generation 2 committed"),
        (3, None, "generation 3 follows generation None, found generation 2"),
        (1, 2, "found generation 1 to commit, expected more than 2"),
        (2, 2, "found generation 2 to commit, expected more than 2"),
    ],
)
def test_stale_commit_is_refused(
    store: LoadStore, generation: int, expected: int | None, message: str
) -> None:
    store.commit(make_placement(2), expected=None, reason="first")

    with pytest.raises(StaleGeneration, match=message):
        store.commit(make_placement(generation, [2, 1, 0, 2]), expected=expected, reason="stale")

    assert len(store.placements()) == 1
    assert kinds(store) == ["commit"]


# -- migrations


def test_plan_ids_are_never_given_out_twice(store: LoadStore) -> None:
    with ThreadPoolExecutor(4) as pool:
        plan_ids = list(pool.map(lambda _: store.next_plan_id(), range(12)))

    assert sorted(plan_ids) == list(range(1, 13))


def test_published_migration_is_open_until_its_commit(store: LoadStore) -> None:
    migration = with_open_migration(store)

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


def test_second_open_migration_is_refused(store: LoadStore) -> None:
    with_open_migration(store)

    with pytest.raises(StaleGeneration, match="plan 2 cannot be published: plan 1 is open"):
        store.publish(make_migration(make_placement(1), store.next_plan_id()))


@pytest.mark.parametrize("base", [make_placement(2), make_placement(1, [2, 1, 0, 2])])
def test_migration_from_another_base_is_refused(store: LoadStore, base: Placement) -> None:
    store.commit(make_placement(1), expected=None, reason="first")

    with pytest.raises(StaleGeneration, match="plan 1 starts from generation"):
        store.publish(make_migration(base, 1))

    assert store.published() is None


def test_migration_before_the_first_commit_is_refused(store: LoadStore) -> None:
    with pytest.raises(StaleGeneration, match="found no committed placement"):
        store.publish(make_migration(make_placement(1), 1))


def test_plan_id_cannot_be_published_twice(store: LoadStore) -> None:
    migration = with_open_migration(store)
    store.withdraw(1, outcome="rejected", reason="a rank said no")

    with pytest.raises(StaleGeneration, match="plan id 1 was published before"):
        store.publish(migration)


def test_withdrawn_migration_is_closed_once(store: LoadStore) -> None:
    with_open_migration(store)

    assert not store.withdraw(9, outcome="aborted", reason="another plan")
    assert store.withdraw(1, outcome="aborted", reason="rank 1 died")
    assert not store.withdraw(1, outcome="aborted", reason="again")

    assert store.published() is None
    assert kinds(store) == ["commit", "publish", "abort"]
    assert store.events()[-1].detail == {"generation": 1, "plan_id": 1, "reason": "rank 1 died"}


def test_aborted_migration_commits_the_layers_that_serve(store: LoadStore) -> None:
    migration = with_open_migration(store)
    serving = migration.placement_after(1).with_generation(2)

    store.commit(serving, expected=1, plan_id=1, reason="switched off", outcome="aborted")

    assert store.published() is None
    assert kinds(store)[-1] == "abort"


def test_commit_from_elsewhere_rejects_the_open_migration(store: LoadStore) -> None:
    with_open_migration(store)

    store.commit(make_placement(5), expected=1, reason="restart")

    assert store.published() is None
    assert kinds(store) == ["commit", "publish", "reject", "commit"]


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
    store: LoadStore,
) -> None:
    migration = with_open_migration(store)
    plan_id, target = migration.plan_id, migration.target
    store.recover(record_of(migration), expected_membership=0)

    assert store.published() is None
    assert kinds(store)[-2:] == ["recovery", "abort"]
    assert store.events()[-1].detail["reason"] == "rank 1 died"
    with pytest.raises(StaleGeneration, match=r"survivors of a death dropped that plan"):
        store.commit(target, expected=1, plan_id=plan_id, reason="served", outcome="committed")
    committed = store.committed()
    assert committed is not None
    assert committed.placement.generation == 1


def test_survivors_that_roll_a_plan_forward_commit_it(store: LoadStore) -> None:
    migration = with_open_migration(store)
    target = migration.target
    record = record_of(migration, generation=target.generation, applied=1)
    store.recover(record, expected_membership=0)

    assert store.published() is not None
    assert store.commit(target, expected=1, plan_id=migration.plan_id, reason="rolled forward")


def test_recovery_older_than_the_committed_placement_is_refused(store: LoadStore) -> None:
    migration = with_open_migration(store)
    store.commit(migration.target, expected=1, plan_id=migration.plan_id, reason="a last write")

    assert store.recover(record_of(migration), expected_membership=0) is None
    assert store.recovery() is None
    assert kinds(store)[-1] == "commit"
