"""From one placement to the next: moves, their sources, transactions and rounds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb import EMPTY, Migration, Move, Pace, Problem, build_migration
from eplb.core.load import as_history
from eplb.core.placement import Placement, check_fits
from eplb.core.topology import Topology
from eplb.errors import ConfigError, MigrationError, PlacementError
from eplb.migration.build import Source, moves_between
from eplb.migration.candidates import Candidates, candidates_for
from eplb.planner import plan
from eplb.policies.table import POLICIES

TWO_NODES = Topology.uniform(num_nodes=2, ranks_per_node=2, slots_per_rank=2)
BASE = Placement(np.array([[0, 1, 2, 3, 4, 5, 6, 7]]), num_experts=8, generation=3)


def moved(*changes: tuple[int, int]) -> Placement:
    held = BASE.slot_to_expert.copy()
    for slot, expert in changes:
        held[0, slot] = expert
    return Placement(held, num_experts=8)


def test_nearest_holder_is_the_source() -> None:
    # Slots 0 and 1 trade on one rank; 3 and 4 trade across nodes.
    target = moved((0, 1), (1, 0), (3, 4), (4, 3))

    assert moves_between(BASE, target, TWO_NODES) == [
        Move(0, 1, 0, Source.SAME_RANK, 1),
        Move(0, 0, 1, Source.SAME_RANK, 0),
        Move(0, 4, 3, Source.HOST),
        Move(0, 3, 4, Source.HOST),
    ]


def test_peers_that_hold_an_expert_take_turns() -> None:
    topology = Topology.uniform(num_nodes=1, ranks_per_node=4, slots_per_rank=2)
    base = Placement(np.array([[0, 1, 0, 2, 3, EMPTY, 4, EMPTY]]), num_experts=5)
    target = Placement(np.array([[0, 1, 0, 2, 3, 0, 4, 0]]), num_experts=5)

    assert [move.src_slot for move in moves_between(base, target, topology)] == [0, 2]


def test_moves_between_placements_of_different_shapes_are_refused() -> None:
    with pytest.raises(MigrationError, match="expected the same"):
        moves_between(BASE, Placement(np.array([[0, 1]]), num_experts=2), TWO_NODES)


def test_staging_ring_and_pace_limit_a_transaction() -> None:
    base = Placement(np.array([[0, 1, 2, 3]] * 3), num_experts=4)
    target = Placement(np.array([[2, 3, 0, 1]] * 3), num_experts=4)
    topology = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=2)

    def layers_together(staging_experts: int, at_most: int = 0, **more: int) -> list[Any]:
        pace = Pace(staging_experts, experts_per_transaction=at_most, **more)
        migration = build_migration(base, target, topology, plan_id=1, pace=pace)
        return [transaction.layers for transaction in migration.transactions]

    # A layer brings two experts into each rank; half a ring stays free for the next transaction.
    assert layers_together(8) == [(0, 1), (2,)]
    assert layers_together(7) == [(0,), (1,), (2,)]
    assert layers_together(2) == [(0,), (1,), (2,)]
    assert layers_together(16, 2) == [(0,), (1,), (2,)]
    assert layers_together(16, 4) == [(0, 1), (2,)]
    assert layers_together(16, 1) == [(0,), (1,), (2,)], "a layer is never split"
    assert layers_together(16, layers_per_transaction=2) == [(0, 1), (2,)]
    with pytest.raises(MigrationError, match="layer 0 moves 2 experts into rank 0, expected at"):
        build_migration(base, target, topology, plan_id=1, pace=Pace(staging_experts=1))


def test_target_that_cannot_serve_is_refused() -> None:
    doubled = Placement(np.array([[0, 0, 1, 2]]), num_experts=3)
    topology = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=2)

    with pytest.raises(PlacementError, match="more than once"):
        build_migration(Placement(np.array([[0, 1, 0, 2]]), 3), doubled, topology, plan_id=1)


def test_shares_alone_need_a_transaction_without_moves() -> None:
    topology = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=2)
    base = Placement(np.array([[0, 1, 0, 2]]), num_experts=3, generation=5)
    target = Placement(base.slot_to_expert, 3, slot_share=np.array([[0.25, 1, 0.75, 1]]))

    migration = build_migration(base, target, topology, plan_id=1)

    assert [txn.layers for txn in migration.transactions] == [(0,)]
    assert migration.moves == ()
    assert migration.target.generation == 6


def test_hash_covers_what_ranks_must_agree_on() -> None:
    def made(plan_id: int, pace: Pace, target: Placement) -> Migration:
        return build_migration(BASE, target, TWO_NODES, plan_id=plan_id, pace=pace)

    first = made(1, Pace(), moved((0, 1), (1, 0)))
    others = [
        made(2, Pace(), moved((0, 1), (1, 0))),
        made(1, Pace(transactions_per_commit=1), moved((0, 1), (1, 0))),
        made(1, Pace(), moved((2, 3), (3, 2))),
    ]

    assert first.hash == made(1, Pace(), moved((0, 1), (1, 0))).hash
    assert first.hash not in {other.hash for other in others}
    assert 0 <= first.vote_hash < 2**62


# -- flip mode

ONE_SPARE = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=3)
FLIP = Pace(mode="flip", spare_slots=1)
SPARED = Placement(np.array([[0, 1, EMPTY, 2, 3, EMPTY]] * 2), num_experts=4, generation=4)
TRADED = Placement(np.array([[2, 3, EMPTY, 0, 1, EMPTY]] * 2), num_experts=4)


def test_flip_fills_spares_and_frees_what_was_left() -> None:
    target = Placement(np.array([[0, 2, EMPTY, 1, 3, EMPTY], [0, 1, EMPTY, 2, 3, EMPTY]]), 4)

    migration = build_migration(SPARED, target, ONE_SPARE, plan_id=1, pace=FLIP)

    (only,) = migration.transactions
    assert only.layers == (0,)
    assert set(only.moves) == {Move(0, 2, 2, Source.PEER, 3), Move(0, 1, 5, Source.PEER, 1)}
    assert only.frees == ((0, 1), (0, 3))
    assert migration.target.slot_to_expert[0].tolist() == [0, EMPTY, 2, EMPTY, 3, 1]


def test_shares_alone_flip_without_moves() -> None:
    base = Placement(np.array([[0, 1, EMPTY, 0, 2, EMPTY]]), num_experts=3)
    share = np.array([[0.25, 1, 0, 0.75, 1, 0]])
    target = Placement(base.slot_to_expert, 3, slot_share=share)

    migration = build_migration(base, target, ONE_SPARE, plan_id=1, pace=FLIP)

    assert [(txn.layers, txn.moves, txn.frees) for txn in migration.transactions] == [
        ((0,), (), ())
    ]
    assert migration.placement_after(1).slot_share.tolist() == share.tolist()


def test_base_without_its_spares_has_them_after_a_flip() -> None:
    full = Placement(np.array([[0, 1, 2, 3, EMPTY, EMPTY]] * 2), num_experts=4)

    migration = build_migration(full, TRADED, ONE_SPARE, plan_id=1, pace=FLIP)

    in_use = migration.target.slot_to_expert.reshape(2, 2, 3) != EMPTY
    assert in_use.sum(axis=2).tolist() == [[2, 2]] * 2


def test_target_without_its_spares_cannot_be_reached_by_a_flip() -> None:
    full = Placement(np.array([[0, 1, 2, 3, EMPTY, EMPTY]] * 2), num_experts=4)

    with pytest.raises(PlacementError, match="rank 0 has fewer than 1 EMPTY slots"):
        build_migration(TRADED, full, ONE_SPARE, plan_id=1, pace=FLIP)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"mode": "flip"}, "spare_slots is 0, expected 1 or more in flip mode"),
        ({"mode": "fly"}, "mode is 'fly', expected 'copy' or 'flip'"),
        ({"layers_per_transaction": -1}, "layers_per_transaction is -1, expected 0 or more"),
        ({"transactions_per_commit": 0}, "transactions_per_commit is 0, expected 1 or more"),
        ({"experts_per_transaction": -1}, "experts_per_transaction is -1, expected 0 or more"),
        ({"link_part": 0.0}, "link_part is 0.0, expected more than 0 and at most 1"),
        ({"link_part": 1.5}, "link_part is 1.5, expected more than 0 and at most 1"),
    ],
)
def test_pace_that_cannot_be_kept_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Pace(**fields)


def test_hash_covers_what_flips_must_agree_on() -> None:
    def made(**fields: Any) -> str:
        pace = Pace(mode="flip", spare_slots=1, **fields)
        return build_migration(SPARED, TRADED, ONE_SPARE, plan_id=1, pace=pace).hash

    flip = build_migration(SPARED, TRADED, ONE_SPARE, plan_id=1, pace=FLIP)
    second = replace(flip.transactions[1], reads_after=0)
    hashes = {
        flip.hash,
        made(layers_per_transaction=1),
        replace(flip, weights_version=1).hash,
        replace(flip, transactions=(flip.transactions[0], second)).hash,
        replace(flip, transactions=(replace(flip.transactions[0], frees=()), second)).hash,
    }

    assert len(hashes) == 5
    assert made() == flip.hash


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10_000),
    num_ranks=st.integers(1, 5),
    slots=st.integers(1, 4),
    spare_slots=st.integers(1, 2),
    most_layers=st.integers(0, 3),
)
def test_flip_never_writes_what_serves_nor_reads_what_is_not_there(
    seed: int, num_ranks: int, slots: int, spare_slots: int, most_layers: int
) -> None:
    smaller = Topology.uniform(1, num_ranks, slots)
    topology = Topology.uniform(1, num_ranks, slots + spare_slots)
    history = as_history(np.ones((4, max(slots, num_ranks * slots - 3)), dtype=np.int64))
    base, target = (
        widened(POLICIES["random"](Problem(history, smaller, seed=one)), smaller, spare_slots)
        for one in (seed, seed + 1)
    )
    pace = Pace(mode="flip", spare_slots=spare_slots, layers_per_transaction=most_layers)

    migration = build_migration(base, target, topology, plan_id=1, pace=pace)

    check_every_flip(migration, topology)


def widened(placement: Placement, topology: Topology, spare_slots: int) -> Placement:
    """The placement with EMPTY slots after those of each rank."""
    held = [
        np.pad(
            placement.slot_to_expert[:, topology.slots_on(rank)],
            ((0, 0), (0, spare_slots)),
            constant_values=EMPTY,
        )
        for rank in range(topology.num_ranks)
    ]
    return Placement(np.concatenate(held, axis=1), placement.num_experts)


def check_every_flip(migration: Migration, topology: Topology) -> None:
    """Walk the transactions; at any time those from ``reads_after`` on may be staged already."""
    served = [migration.placement_after(n) for n in range(len(migration.transactions) + 1)]
    spares = migration.pace.spare_slots
    for number, txn in enumerate(migration.transactions):
        assert txn.reads_after <= number
        check_fits(served[number + 1], topology)
        empty = (served[number + 1].slot_to_expert == EMPTY).reshape(4, topology.num_ranks, -1)
        assert (empty.sum(axis=2) >= spares).all(), "a rank has lost its spares"
        assert len(txn.layers) <= (migration.pace.layers_per_transaction or 4)
        for move in txn.moves:
            # From when it may be staged until it serves.
            while_staged = [p.slot_to_expert for p in served[txn.reads_after : number + 1]]
            assert all(held[move.layer, move.dst_slot] == EMPTY for held in while_staged)
            assert move.source is Source.PEER
            assert all(held[move.layer, move.src_slot] == move.expert for held in while_staged)
        for earlier in migration.transactions[txn.reads_after : number]:
            written = {(move.layer, move.dst_slot) for move in earlier.moves}
            assert not written & {(move.layer, move.dst_slot) for move in txn.moves}
    assert served[-1].hash == migration.target.hash


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10_000),
    num_ranks=st.integers(1, 5),
    slots=st.integers(1, 4),
    staging=st.integers(4, 9),
)
def test_migration_reaches_its_target_without_contention(
    seed: int, num_ranks: int, slots: int, staging: int
) -> None:
    topology = Topology.uniform(1, num_ranks, slots)
    num_experts = max(slots, num_ranks * slots - 3)
    history = as_history(np.ones((4, num_experts), dtype=np.int64))
    base, target = (
        POLICIES["random"](Problem(history, topology, seed=one)) for one in (seed, seed + 1)
    )

    migration = build_migration(
        base, target, topology, plan_id=1, pace=Pace(staging_experts=staging)
    )

    done = migration.placement_after(len(migration.transactions))
    assert (done.slot_to_expert == target.slot_to_expert).all()
    layers = [layer for txn in migration.transactions for layer in txn.layers]
    assert len(layers) == len(set(layers))
    for transaction in migration.transactions:
        received = [int(topology.rank_of_slot[move.dst_slot]) for move in transaction.moves]
        assert all(received.count(rank) <= staging for rank in received)
        for one_round in transaction.rounds:
            receivers = [int(topology.rank_of_slot[move.dst_slot]) for move in one_round]
            senders = [
                int(topology.rank_of_slot[move.src_slot])
                for move in one_round
                if move.source is Source.PEER
            ]
            assert len(receivers) == len(set(receivers))
            assert len(senders) == len(set(senders))
    for move in migration.moves:
        if move.source in (Source.SAME_RANK, Source.PEER):
            assert base.slot_to_expert[move.layer, move.src_slot] == move.expert


RANKS = Topology.uniform(num_nodes=1, ranks_per_node=8, slots_per_rank=10)


@pytest.mark.parametrize("policy", ["auto", "greedy"])
@pytest.mark.parametrize("seed", range(6))
def test_no_plan_moves_a_weight_within_a_rank(policy: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    load = rng.lognormal(sigma=1.0, size=(1, 4, 64))
    current = plan(load, RANKS, policy=policy).target
    for _ in range(3):
        load = np.concatenate([load, load[-1:] * rng.lognormal(sigma=0.8, size=(1, 4, 64))])[-2:]
        next_plan = plan(load, RANKS, policy=policy, current=current)

        assert not [move for move in next_plan.moves if move.source is Source.SAME_RANK]

        current = next_plan.target


# Two hosts of one rank with three slots each; rank 0 holds experts 0 to 2, rank 1 experts 3 and 0.
TWO_HOSTS = Topology.uniform(num_nodes=2, ranks_per_node=1, slots_per_rank=3)
HELD = Placement(np.array([[0, 1, 2, 3, 0, -1]] * 2), num_experts=4)


def test_expert_that_has_replicas_already_is_as_hot_as_each_of_them() -> None:
    tokens = np.array([[0, 0, 0, 40]] * 2)
    doubled = Placement(np.array([[0, 1, 2, 3, 3, 3]] * 2), num_experts=4)

    assert candidates_for(tokens, HELD, TWO_HOSTS).of(0) == ((0, 3), (1, 3))
    assert candidates_for(tokens // 2, doubled, TWO_HOSTS).of(0) == ((0, 3), (1, 3))
    evenly = np.array([[10, 10, 10, 30]] * 2)  # 10 for each of its three replicas, the mean is 15
    assert candidates_for(evenly, doubled, TWO_HOSTS).of(0) == ()


def test_one_host_lacks_nothing_and_a_dead_rank_holds_nothing() -> None:
    tokens = np.array([[40, 0, 0, 0]] * 2)
    one_host = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=3)
    without_rank_1 = replace(TWO_HOSTS, alive=np.array([True, False]))

    assert candidates_for(tokens, HELD, one_host) == Candidates(((),))
    assert candidates_for(tokens, HELD, without_rank_1).of(1) == ((0, 0), (1, 0))
