from __future__ import annotations

import numpy as np
import pytest

from rebalance.engines.vllm.decisions import Decision, Decisions, repeats_of
from rebalance.engines.vllm.replica_lists import (
    ENTRIES,
    apportioned,
    chosen_replicas,
    layer_lists,
    repetitions,
)

SEED = 20261122
HELD = np.array([0, 1, 0, 2, 0, 1, 2])  # expert 0 on three slots, experts 1 and 2 on two


def split(share: list[float], rows: int, expert: int) -> np.ndarray:
    """The part of consecutive rows that each of an expert's slots gets."""
    repeats = repetitions(HELD, np.array(share))
    entries, lengths = layer_lists(HELD, repeats, 3, 1024)
    chosen = chosen_replicas(np.arange(rows), entries[expert, : lengths[expert]])
    slots = np.flatnonzero(expert == HELD)
    return np.bincount(chosen, minlength=len(HELD))[slots] / rows


@pytest.mark.parametrize(("rows", "most"), [(64, 0.02), (4096, 0.005)])
def test_shares_over_consecutive_rows_are_within_the_target(rows: int, most: float) -> None:
    drawn = np.random.default_rng(SEED)
    off = []
    for _ in range(200):
        parts = drawn.dirichlet([2.0, 2.0, 2.0])
        share = [parts[0], 0.7, parts[1], 0.5, parts[2], 0.3, 0.5]
        off.append(np.abs(split(share, rows, 0) - parts).max())
        off.append(np.abs(split(share, rows, 1) - [0.7, 0.3]).max())

    assert max(off) <= most


def test_expert_with_equal_shares_of_two_replicas_keeps_the_list_of_vllm() -> None:
    share = np.array([0.5, 0.6, 0.3, 0.5, 0.2, 0.4, 0.5])
    repeats = repetitions(HELD, share)
    entries, lengths = layer_lists(HELD, repeats, 3, 1024)

    assert repeats[HELD == 2].tolist() == [0, 0]
    assert lengths.tolist() == [ENTRIES, ENTRIES, 2]
    assert entries[2, :3].tolist() == [3, 6, -1]


def test_lists_name_only_slots_that_hold_the_expert() -> None:
    drawn = np.random.default_rng(SEED)
    for _ in range(50):
        held = np.concatenate([np.arange(8), drawn.integers(0, 8, 6), [-1, -1]])
        weight = np.where(held >= 0, drawn.random(len(held)) + 0.01, 0.0)
        total = np.bincount(held[held >= 0], weight[held >= 0], 8)
        share = np.where(held >= 0, weight / total[held], 0.0)
        entries, lengths = layer_lists(held, repetitions(held, share), 8, 1024)

        for expert in range(8):
            listed = entries[expert, : lengths[expert]]
            assert set(listed.tolist()) == set(np.flatnonzero(held == expert).tolist())
            assert (entries[expert, lengths[expert] :] == -1).all()


def test_apportioned_parts_sum_up_and_none_is_empty() -> None:
    assert apportioned(np.array([0.999, 0.0005, 0.0005]), 8).tolist() == [6, 1, 1]
    assert apportioned(np.array([0.55, 0.30, 0.15]), 16).tolist() == [9, 5, 2]


def test_list_wider_than_the_tensor_of_vllm_is_refused() -> None:
    repeats = repetitions(HELD, np.array([0.4, 0.6, 0.3, 0.7, 0.3, 0.4, 0.3]))

    with pytest.raises(ValueError, match="a list of 256 entries, expected 128 at most"):
        layer_lists(HELD, repeats, 3, 128)


def test_decision_is_found_by_the_row_that_it_asked_for_alone() -> None:
    held = np.stack([HELD, HELD[::-1]])
    share = np.array([[0.4, 0.6, 0.3, 0.5, 0.3, 0.4, 0.5], [0.5, 0.4, 0.3, 0.5, 0.3, 0.6, 0.4]])
    decision = Decision(held[::-1].copy(), held, repeats_of(held, share, 64), 3, 1024)
    decisions = Decisions()
    decisions.add(decision)

    assert decisions.of_layer(HELD, 0, 2, 3) is decision
    assert decisions.of_layer(HELD, 1, 2, 3) is None
    assert decisions.of_map(held, 3) is decision
    assert not decisions.keeps_layer(HELD, 0, 2, 3)
    assert np.abs(decision.shares() - share).max() < 1 / 64
