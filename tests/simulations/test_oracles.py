"""Balancers that see the batch: exact where slots suffice, pieces of a least size."""

from __future__ import annotations

import numpy as np
import pytest

from eplb import Topology
from simulations.oracles import lowest, pieces_at
from simulations.replay import Scenario, replay_all
from simulations.windows import Tokens, Windows
from simulations.workloads import windows_named

# Two ranks of two experts and one free slot each: 90 + 10 tokens on rank 0, 10 + 10 on rank 1.
RANKS = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=3)
HELD = np.array([0, 1, -1, 2, 3, -1], dtype=np.int32)
LOAD = np.array([90.0, 10.0, 0.0, 10.0, 10.0, 0.0])


def test_pieces_make_ranks_equal_where_slots_suffice() -> None:
    (piece,) = lowest(LOAD, HELD, RANKS, least=0, tolerance=1e-4)

    assert (piece.slot, piece.rank, piece.tokens) == (0, 1, 40.0)


def test_pieces_are_of_the_least_size_and_need_a_free_slot_on_a_live_rank() -> None:
    full = np.array([0, 1, 4, 2, 3, 5], dtype=np.int32)
    dead = Topology(RANKS.node_of_rank, RANKS.slots_of_rank, alive=np.array([True, False]))

    assert [one.tokens for one in pieces_at(95.0, LOAD, HELD, RANKS, least=50) or []] == [50.0]
    assert lowest(LOAD, HELD, RANKS, least=100, tolerance=1e-4) == []
    assert lowest(LOAD, full, RANKS, least=0, tolerance=1e-4) == []
    assert pieces_at(60.0, LOAD, full, RANKS, least=0) is None
    assert pieces_at(60.0, LOAD, HELD, dead, least=0) is None


@pytest.mark.parametrize("window", [np.array([[90, 10, 10, 10]]), np.array([[0, 0, 0, 0]])])
def test_oracle_serves_every_token(window: Tokens) -> None:
    windows = Windows(1, 4, lambda: (window.copy() for _ in range(3)))

    (found,) = replay_all(Scenario(RANKS, load=windows), ["oracle:moonep"])

    assert found.is_oracle
    assert found.last_load.sum() == window.sum()
    assert found.mean == pytest.approx(1.0)


def test_ultra_ep_is_within_its_published_range_at_its_set_up() -> None:
    # 64 ranks of 4 experts and 2 redundant slots, 65,536 rows a rank: 1.01 to 1.04 is published.
    text = "generated:prefill:layers=2,experts=256,windows=3,tokens=524288,shape_low=1,shape_high=1"
    scenario = Scenario(Topology.uniform(8, 8, 6), load=windows_named(text, 0))

    none, moon, ultra = replay_all(scenario, ["none", "oracle:moonep", "oracle:ultraep"])

    assert none.mean > 2.0
    assert 1.0 <= moon.mean <= ultra.mean <= 1.04
