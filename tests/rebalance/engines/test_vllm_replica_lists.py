from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from rebalance.engines.vllm.decisions import (
    ENTRIES,
    MapDecision,
    ServedMap,
    chosen_entries,
    next_served,
    repetitions,
    shares_by,
)

SEED = 20261122
HELD = np.array([0, 1, 0, 2, 0, 1, 2])  # expert 0 on three slots, experts 1 and 2 on two


def apportioned(parts: Any, total: int) -> list[int]:
    """One at a time by the largest remainder: the slow reference."""
    exact = parts / parts.sum() * total
    whole = np.maximum(np.floor(exact), 1)
    while whole.sum() < total:
        whole[np.argmax(exact - whole)] += 1
    while whole.sum() > total:
        whole[np.argmax(np.where(whole > 1, whole - exact, -np.inf))] -= 1
    return [int(one) for one in whole]


def list_of(slots: list[int], times: list[int]) -> list[int]:
    """The list of one expert by exact fractions: the slow reference."""
    turns = [
        (Fraction(2 * turn + 1, 2 * count), place, slot)
        for place, (slot, count) in enumerate(zip(slots, times, strict=True))
        for turn in range(count)
    ]
    entries = [0] * len(turns)
    for row, (_, _, slot) in enumerate(sorted(turns)):
        entries[row * 2654435769 % 2**32 % len(turns)] = slot
    return entries


def decided(held: NDArray[np.int64], repeats: NDArray[np.int64]) -> MapDecision:
    """A decision that changes nothing but the lists."""
    return MapDecision(held, repeats, int(held.max()) + 1)


def drawn_layers(seed: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Maps of 3 layers with empty slots, and shares of which some are tiny and some equal."""
    drawn = np.random.default_rng(seed)
    spare = drawn.integers(0, 8, (3, 14))
    held = np.concatenate([np.tile(np.arange(8), (3, 1)), spare, np.full((3, 2), -1)], axis=1)
    weight = np.where(drawn.random(held.shape) < 0.2, 1e-5, drawn.random(held.shape))
    weight[0] = 1.0
    share = np.zeros(held.shape)
    for layer, expert in np.ndindex(3, 8):
        own = held[layer] == expert
        share[layer, own] = weight[layer, own] / weight[layer, own].sum()
    return held, share


@pytest.mark.parametrize("seed", range(6))
def test_lists_equal_those_of_the_slow_reference(seed: int) -> None:
    held, share = drawn_layers(seed)

    repeats = repetitions(held, share, 64)
    decision = decided(held, repeats)

    for layer, expert in np.ndindex(3, 8):
        slots = np.flatnonzero(held[layer] == expert)
        experts, entries = decision.lists_of(layer)
        parts = share[layer, slots]
        is_power = len(slots) & (len(slots) - 1) == 0
        if len(slots) == 1 or (is_power and (np.abs(parts * len(slots) - 1) < 2e-3).all()):
            assert expert not in experts
            assert not repeats[layer, slots].any()
            continue
        times = apportioned(parts, 64)
        assert repeats[layer, slots].tolist() == times
        assert entries[experts == expert].tolist() == [list_of(slots.tolist(), times)]
    assert not repeats[held < 0].any()


@pytest.mark.parametrize(("rows", "most"), [(64, 0.02), (4096, 0.005)])
def test_shares_over_consecutive_rows_are_within_the_target(rows: int, most: float) -> None:
    drawn = np.random.default_rng(SEED)
    off = []
    for _ in range(50):
        parts = drawn.dirichlet([2.0, 2.0, 2.0])
        share = np.array([parts[0], 0.7, parts[1], 0.5, parts[2], 0.3, 0.5])
        decision = decided(HELD[None], repetitions(HELD[None], share[None]))
        for expert, entries in zip(*decision.lists_of(0), strict=True):
            slots = np.flatnonzero(expert == HELD)
            chosen = entries[chosen_entries(rows, ENTRIES)]
            split = np.bincount(chosen, minlength=len(HELD))[slots] / rows
            off.append(np.abs(split - share[slots]).max())

    assert len(off) == 100
    assert max(off) <= most


def test_expert_with_equal_shares_of_two_replicas_keeps_the_list_of_vllm() -> None:
    share = np.array([0.5, 0.6, 0.3, 0.5, 0.2, 0.4, 0.5])
    repeats = repetitions(HELD[None], share[None])
    experts, entries = decided(HELD[None], repeats).lists_of(0)

    assert repeats[0, HELD == 2].tolist() == [0, 0]
    assert experts.tolist() == [0, 1]
    assert entries.shape == (2, ENTRIES)


def test_share_of_almost_nothing_gets_one_entry() -> None:
    share = np.array([[0.999, 0.0005, 0.0005]])

    assert repetitions(np.zeros((1, 3), dtype=np.int64), share, 8).tolist() == [[6, 1, 1]]


def test_layers_with_equal_shares_need_no_lists() -> None:
    held = np.array([[0, 1, 0, 1]])
    decision = decided(held, repetitions(held, np.full((1, 4), 0.5)))

    assert [len(part) for part in decision.lists_of(0)] == [0, 0]


def test_consecutive_rows_visit_every_entry_of_a_list_once() -> None:
    assert sorted(chosen_entries(ENTRIES, ENTRIES)) == list(range(ENTRIES))


def test_decision_is_found_by_the_row_that_it_asked_for_alone() -> None:
    held = np.stack([HELD, HELD[::-1]])
    share = np.array([[0.4, 0.6, 0.3, 0.5, 0.3, 0.4, 0.5], [0.5, 0.4, 0.3, 0.5, 0.3, 0.6, 0.4]])
    decision = MapDecision(held, repetitions(held, share, 64), 3)
    served = ServedMap(None, held[::-1].copy(), np.zeros_like(held), decision)

    assert served.decision_of_layer(HELD, 0) is decision
    assert served.decision_of_layer(HELD, 1) is None
    assert np.abs(shares_by(held, decision.repeats) - share).max() < 1 / 64


def test_models_with_equal_maps_are_asked_for_in_turn() -> None:
    maps = [np.array([HELD]), np.array([HELD]), np.array([HELD[::-1]])]
    draft, target, other = (ServedMap(None, held, np.zeros_like(held)) for held in maps)
    every = [draft, target, other]

    assert next_served(every, maps[0], None) is draft
    assert next_served(every, maps[0], draft) is target
    assert next_served(every, maps[0], target) is draft
    assert next_served(every, maps[2], draft) is other, "the map alone tells"
    assert next_served(every, maps[0] + 1, draft) is None
