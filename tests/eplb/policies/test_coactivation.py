"""Experts that work together: counted by hand, and brought to one node."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from eplb import Placement, Problem, Topology, imbalance, plan
from eplb.core.load import LoadHistory
from eplb.errors import ConfigError
from eplb.policies.coactivation import coactivation, colocate_coactivated, nodes_per_token
from tests.support.repository import DATA

TWO_NODES = Topology.uniform(num_nodes=2, ranks_per_node=1, slots_per_rank=2)
# Tokens choose experts 0 and 2, or 1 and 3; as many of either.
PAIRED = np.array([[[0, 2], [1, 3], [2, 0], [3, 1]]])
APART = Placement(np.array([[0, 1, 2, 3]]), num_experts=4)
EVEN = Problem(LoadHistory([[[10, 10, 10, 10]]]), TWO_NODES)


def test_coactivation_counts_pairs_and_leaves_padding_out() -> None:
    padded = np.array([[[0, 2], [1, -1]]])

    assert coactivation(PAIRED, 4)[0, 0].tolist() == [0.0, 0.0, 0.5, 0.0]
    assert coactivation(padded, 3)[0].sum(axis=1).tolist() == [0.5, 0.0, 0.5]


def test_nodes_per_token_counts_a_node_once() -> None:
    both = Placement(np.array([[0, 2, 1, 3]]), num_experts=4)

    assert nodes_per_token(PAIRED, APART, TWO_NODES).tolist() == [2.0]
    assert nodes_per_token(PAIRED, both, TWO_NODES).tolist() == [1.0]


def test_nodes_per_token_of_a_replica_on_each_node_is_by_its_share() -> None:
    replicated = Placement(np.array([[0, 1, 0, 2]]), num_experts=3)
    # Expert 1 is on node 0; of expert 0 half is there: one node or two.
    assert nodes_per_token(np.array([[[0, 1]]]), replicated, TWO_NODES).tolist() == [1.5]


def test_colocate_coactivated_pairs_share_a_node_and_balance_stays() -> None:
    found = colocate_coactivated(EVEN, APART, coactivation(PAIRED, 4), price=0.1, steps=200)

    assert nodes_per_token(PAIRED, found, TWO_NODES).tolist() == [1.0]
    assert imbalance(np.array([[10, 10, 10, 10]]), found, TWO_NODES).tolist() == [1.0]


def test_colocate_coactivated_same_seed_gives_the_same_placement() -> None:
    found = [
        colocate_coactivated(EVEN, APART, coactivation(PAIRED, 4), price=0.1) for _ in range(2)
    ]

    assert found[0].hash == found[1].hash


def test_colocate_coactivated_wrong_input_is_refused() -> None:
    with pytest.raises(ConfigError, match="price of a pair is nan, expected 0 or more"):
        colocate_coactivated(EVEN, APART, coactivation(PAIRED, 4), price=float("nan"))
    with pytest.raises(ConfigError, match=r"coactivation has shape \(1, 5, 5\)"):
        colocate_coactivated(EVEN, APART, np.zeros((1, 5, 5)), price=0.1)


@pytest.mark.slow
def test_colocated_v2_lite_sends_a_tenth_fewer_copies_on_unseen_requests() -> None:
    path = DATA / "dsv2lite_intent.npz"
    if not path.is_file():
        pytest.skip(f"recorded routing is not at {path}: set EPLB_DATA")
    ids = np.load(path)["expert_ids"][::5].astype(np.int64)
    mixed = ids[:, np.random.default_rng(0).permutation(ids.shape[1])]
    seen, unseen = np.array_split(mixed, 2, axis=1)
    ranks = Topology.uniform(num_nodes=2, ranks_per_node=4, slots_per_rank=9)
    windows = [[counted(one) for one in np.array_split(part, 8, axis=1)] for part in (seen, unseen)]
    problem = Problem(LoadHistory(np.array(windows[0])), ranks)
    start = plan(problem.history, ranks).target

    found = colocate_coactivated(problem, start, coactivation(seen, 64), price=0.02)

    nodes = [nodes_per_token(unseen, one, ranks).mean() for one in (start, found)]
    balance = [imbalance(np.array(windows[1]), one, ranks).mean() for one in (start, found)]
    assert nodes[1] <= 0.9 * nodes[0]
    assert balance[1] <= balance[0] + 0.01  # 0.008: this half of the windows alone tells little


def counted(expert_ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """[L, E] of ids [L, tokens, K]."""
    return np.stack([np.bincount(layer.ravel(), minlength=64) for layer in expert_ids])
