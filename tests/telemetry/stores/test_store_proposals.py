"""Proposals in every LoadStore: stored, listed, approved with a migration, rejected, expired."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from eplb.core.placement import Placement
from eplb.core.topology import Topology
from eplb.errors import StaleGeneration
from eplb.migration.build import Migration, build_migration
from telemetry.proposals import (
    KEPT_PROPOSALS,
    Approval,
    Content,
    Proposal,
    ProposalEnded,
    content_from_bytes,
    content_to_bytes,
    proposal_from_text,
    proposal_to_text,
    standing,
    to_forget,
)
from telemetry.store import LoadStore

OpenStore = Callable[[str], LoadStore]
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
    summary={"decision": "MOVE", "moves": 1},
)
CONTENT = Content(TARGET, {"explanation": [{"layer": 0, "sentences": ["a", "b"]}]})


def proposed(store: LoadStore, **changes: object) -> Proposal:
    if store.committed() is None:
        store.commit(BASE, expected=None, reason="start")
    return store.propose(replace(PLAIN, **changes), CONTENT)  # type: ignore[arg-type]


def migration_of(store: LoadStore, target: Placement = TARGET) -> Migration:
    return build_migration(BASE, target, TOPOLOGY, plan_id=store.next_plan_id())


def test_proposal_is_read_back_with_its_target_by_another_process(open_stores: OpenStore) -> None:
    added = proposed(open_stores("demo"))

    other = open_stores("demo")
    assert other.proposals() == [added]
    assert added == replace(PLAIN, id=added.id)
    content = other.proposal_content(added.id)
    assert content is not None
    assert (content.target.hash, content.target.generation) == (TARGET.hash, 2)
    assert content.detail == CONTENT.detail
    assert other.proposal_content(added.id + 1) is None


def test_proposals_have_ids_of_their_own_and_are_events(store: LoadStore) -> None:
    first, second = proposed(store), proposed(store)

    assert first.id < second.id < store.next_plan_id()
    found = [event.detail for event in store.events() if event.kind == "proposal"]
    assert [detail["proposal"] for detail in found] == [first.id, second.id]
    assert found[0]["state"] == "open"
    assert (found[0]["actor"], found[0]["reason"]) == ("alice", "hot expert")


def test_approved_proposal_is_the_published_migration(store: LoadStore) -> None:
    added = proposed(store)
    migration = migration_of(store)

    store.publish(migration, approval=Approval(added.id, "bob", "looks right"))

    (found,) = store.proposals()
    assert (found.state, found.plan_id) == ("approved", migration.plan_id)
    assert (found.ended_by, found.end_reason) == ("bob", "looks right")
    assert store.published() is not None


def test_proposal_is_carried_out_once(store: LoadStore) -> None:
    added = proposed(store)
    first = migration_of(store)
    store.publish(first, approval=Approval(added.id, "bob", "go"))
    store.withdraw(first.plan_id, outcome="aborted", reason="too late")

    with pytest.raises(
        ProposalEnded, match=rf"proposal {added.id} is approved \(go\), expected it"
    ):
        store.publish(migration_of(store), approval=Approval(added.id, "carol", "again"))

    assert store.published() is None


def test_rejected_proposal_is_not_carried_out(store: LoadStore) -> None:
    added = proposed(store)

    ended = store.reject(added.id, by="bob", reason="not tonight")

    assert (ended.state, ended.ended_by) == ("rejected", "bob")
    with pytest.raises(ProposalEnded, match=r"is rejected \(not tonight\), expected it open"):
        store.publish(migration_of(store), approval=Approval(added.id, "carol", "go"))
    with pytest.raises(ProposalEnded, match="is rejected"):
        store.reject(added.id, by="bob", reason="twice")
    with pytest.raises(ProposalEnded, match=f"there is no proposal {added.id + 1}"):
        store.reject(added.id + 1, by="bob", reason="which?")
    assert store.published() is None


def test_proposal_ends_when_its_base_moves_on(store: LoadStore) -> None:
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


def test_proposal_expires_by_the_clock(store: LoadStore) -> None:
    proposed(store, expires=6.0)

    (found,) = store.proposals()
    assert (found.state, found.ended) == ("expired", 6.0)


def test_proposals_beyond_the_kept_ones_are_forgotten(store: LoadStore) -> None:
    over = proposed(store)
    store.reject(over.id, by="bob", reason="no")
    kept = [proposed(store).id for _ in range(KEPT_PROPOSALS)]

    assert [one.id for one in store.proposals()] == kept
    assert store.proposal_content(over.id) is None


def test_ended_proposals_are_forgotten_before_open_ones() -> None:
    many = [replace(PLAIN, id=number) for number in range(1, KEPT_PROPOSALS)]
    ended = replace(PLAIN, id=KEPT_PROPOSALS, state="rejected")

    assert to_forget([*many, ended]) == [KEPT_PROPOSALS]
    assert to_forget(many) == []


def test_state_of_a_proposal_follows_from_clock_and_base() -> None:
    base = (1, BASE.hash)

    assert standing(PLAIN, FAR - 1, base).state == "open"
    assert standing(PLAIN, FAR, base).state == "expired"
    assert standing(PLAIN, 0.0, (1, "another")).end_reason.startswith("base moved on: found gener")
    assert standing(PLAIN, 0.0, None).end_reason.startswith("base moved on: found no placement")
    rejected = replace(PLAIN, state="rejected")
    assert standing(rejected, FAR, None) == rejected


def test_records_of_a_proposal_are_read_back_as_they_were() -> None:
    content = content_from_bytes(content_to_bytes(CONTENT))

    assert proposal_from_text(proposal_to_text(PLAIN)) == PLAIN
    assert np.array_equal(content.target.slot_share, TARGET.slot_share)
