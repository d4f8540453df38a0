"""Plans that wait for an approval: carried out once, rejected, expired, forgotten."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from eplb.core.placement import Placement
from eplb.core.topology import Topology
from eplb.errors import StaleGeneration
from eplb.migration.build import Migration, build_migration
from telemetry.state.proposals import (
    KEPT_PROPOSALS,
    Approval,
    Content,
    Proposal,
    ProposalEnded,
    standing,
)
from telemetry.state.store import StateStore

TOPOLOGY = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=2)
BASE = Placement(np.array([[0, 1, 2, -1]]), num_experts=3, generation=1)
TARGET = Placement(np.array([[0, 1, 2, 0]]), 3, 2, np.array([[0.25, 1.0, 1.0, 0.75]]))
FAR = 1e12  # seconds since the epoch
PLAIN = Proposal(
    time=5.0,
    expires=FAR,
    base_generation=1,
    base_hash=BASE.hash,
    by="alice",
    trigger="request",
    reason="hot expert",
    target_generation=2,
    decision="MOVE",
    plan_reason="worth it",
    policy="auto",
    imbalance_before=1.6,
    imbalance_after=1.1,
    expected_gain=2.0,
    moves=1,
    bytes=24,
    cost_s=0.5,
)
CONTENT = Content(TARGET, {})


def proposed(store: StateStore, **changes: object) -> Proposal:
    if store.committed() is None:
        store.commit(BASE, expected=None, reason="start")
    return store.propose(replace(PLAIN, **changes), CONTENT)  # type: ignore[arg-type]


def migration_of(store: StateStore) -> Migration:
    return build_migration(BASE, TARGET, TOPOLOGY, plan_id=store.next_plan_id())


def test_proposals_have_ids_of_their_own_and_are_events(store: StateStore) -> None:
    first, second = proposed(store), proposed(store)

    assert first.id < second.id < store.next_plan_id()
    found = [event.detail for event in store.events() if event.kind == "proposal"]
    assert [detail["proposal"] for detail in found] == [first.id, second.id]
    assert found[0]["state"] == "open"
    assert (found[0]["actor"], found[0]["reason"]) == ("alice", "hot expert")
    content = store.proposal_content(first.id)
    assert content is not None
    assert np.array_equal(content.target.slot_share, TARGET.slot_share)


def test_approved_proposal_is_the_published_migration_once(store: StateStore) -> None:
    added, migration = proposed(store), migration_of(store)

    store.publish(migration, approval=Approval(added.id, "bob", "looks right"))

    (found,) = store.proposals()
    assert (found.state, found.plan_id) == ("approved", migration.plan_id)
    assert (found.ended_by, found.end_reason) == ("bob", "looks right")
    assert store.published() is not None
    store.withdraw(migration.plan_id, outcome="aborted", reason="too late")
    with pytest.raises(ProposalEnded, match=rf"{added.id} is approved \(looks right\)"):
        store.publish(migration_of(store), approval=Approval(added.id, "carol", "again"))
    assert store.published() is None


def test_rejected_proposal_is_not_carried_out(store: StateStore) -> None:
    added = proposed(store)

    ended = store.reject(added.id, by="bob", reason="not tonight")

    assert (ended.state, ended.ended_by) == ("rejected", "bob")
    with pytest.raises(ProposalEnded, match=r"is rejected \(not tonight\)"):
        store.publish(migration_of(store), approval=Approval(added.id, "carol", "go"))
    for unknown in (added.id, added.id + 1):
        with pytest.raises(ProposalEnded, match=f"{unknown}"):
            store.reject(unknown, by="bob", reason="twice")
    assert store.published() is None


def test_proposal_ends_when_its_base_moves_on(store: StateStore) -> None:
    added = proposed(store)
    store.commit(TARGET, expected=1, reason="by hand")

    (found,) = store.proposals()
    assert found.state == "expired"
    moved = "base moved on: found generation 2 committed, expected generation 1"
    assert found.end_reason == moved
    with pytest.raises(ProposalEnded, match=moved):
        store.reject(added.id, by="bob", reason="late")
    with pytest.raises(StaleGeneration, match=moved):
        proposed(store)


def test_state_of_a_proposal_follows_from_clock_and_base(store: StateStore) -> None:
    base = (1, BASE.hash)
    proposed(store, expires=6.0)

    (found,) = store.proposals()
    assert (found.state, found.ended) == ("expired", 6.0)
    assert standing(PLAIN, FAR - 1, base).state == "open"
    assert standing(PLAIN, FAR, base).state == "expired"
    for moved in ((1, "another"), None):
        assert standing(PLAIN, 0.0, moved).end_reason.startswith("base moved on")
    rejected = replace(PLAIN, state="rejected")
    assert standing(rejected, FAR, None) == rejected


def test_ended_proposals_are_forgotten_before_open_ones(store: StateStore) -> None:
    ids = [proposed(store).id for _ in range(KEPT_PROPOSALS)]
    store.reject(ids[7], by="bob", reason="no")

    added = [proposed(store).id for _ in range(2)]

    assert [one.id for one in store.proposals()] == [*ids[1:7], *ids[8:], *added]
