"""Plans for SGLang's map, without the engine: lists, records, and the rule that is booked."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from eplb.errors import PlacementError, StoreError
from rebalance.engines.sglang.planning import (
    RULES,
    Terms,
    answer,
    answer_of,
    list_weights,
    make_plan,
    replica_lists,
    request_record,
    shares_of,
)

EXPERTS, SLOTS = 8, 12
TRIVIAL = np.tile(np.arange(SLOTS) % EXPERTS, (3, 1))
MOVABLE = np.array([False, True, True])


def terms(algorithm: str, **changes: float) -> Terms:
    given = {"list_length": 12, "pay_back_s": 1e9, "target_imbalance": 1.0, "max_moved": 1.0}
    return Terms(
        algorithm, num_ranks=4, num_nodes=1, num_groups=1, expert_bytes=8, **given | changes
    )  # type: ignore[arg-type]


def load(seed: int) -> np.ndarray:
    drawn = np.random.default_rng(seed).lognormal(0, 1.0, (2, 3, EXPERTS)) * 1e4
    drawn[:, ~MOVABLE] = 0
    return np.rint(drawn).astype(np.int64)


def test_list_names_each_slot_as_often_as_its_weight() -> None:
    held = np.array([[0, 1, 0, 2]])
    weights = np.array([[3, 1, 1, 1]])

    assert replica_lists(held, weights, 3).tolist() == [
        [[0, 0, 2, 0], [1, -1, -1, -1], [3, -1, -1, -1]]
    ]


@pytest.mark.parametrize("seed", range(20))
def test_random_lists_have_their_weights_and_balanced_prefixes(seed: int) -> None:
    random = np.random.default_rng(seed)
    held = np.stack([random.permutation(np.arange(SLOTS) % EXPERTS) for _ in range(3)])
    weights = random.integers(1, 5, held.shape)

    lists = replica_lists(held, weights, EXPERTS)

    for row, expert in np.ndindex(*lists.shape[:2]):
        entries = [slot for slot in lists[row, expert].tolist() if slot >= 0]
        slots = np.flatnonzero(held[row] == expert).tolist()
        assert Counter(entries) == {slot: weights[row, slot] for slot in slots}
        assert (lists[row, expert, len(entries) :] == -1).all(), "padding stands last"
        for length in range(1, len(entries) + 1):
            seen = Counter(entries[:length])
            for slot in slots:
                due = length * weights[row, slot] / len(entries)
                assert abs(seen[slot] - due) <= 1.0, "a prefix is split as nearly as it can be"


def test_list_longer_than_the_engines_map_is_refused() -> None:
    with pytest.raises(PlacementError, match="list of expert 0 has 5 entries, expected 4 at most"):
        replica_lists(np.array([[0, 1, 0, 2]]), np.array([[4, 1, 1, 1]]), 3)


def test_expert_without_a_slot_is_refused() -> None:
    with pytest.raises(PlacementError, match="row 0: expert 2 has no slot"):
        replica_lists(np.array([[0, 1, 0, 1]]), np.ones((1, 4), dtype=np.int64), 3)


def test_weights_follow_shares_by_largest_remainder() -> None:
    held = np.array([[0, 0, 0, 1]])

    weights = list_weights(held, np.array([[0.55, 0.30, 0.15, 1.0]]), 2, 20)

    assert weights.tolist() == [[10, 6, 4, 1]]
    assert shares_of(held, weights).tolist() == [[0.5, 0.3, 0.2, 1.0]]


def test_even_shares_have_the_shortest_list() -> None:
    held = np.array([[0, 0, 1]])

    assert list_weights(held, np.array([[0.5, 0.5, 1.0]]), 2, 64).tolist() == [[1, 1, 1]]


@pytest.mark.parametrize("algorithm", sorted(RULES))
def test_plan_leaves_rows_without_routed_experts(algorithm: str) -> None:
    planned = make_plan(load(1), TRIVIAL, MOVABLE, terms(algorithm))

    assert planned.moves
    assert (planned.slot_to_expert[0] == TRIVIAL[0]).all()
    assert planned.effective < planned.before
    if algorithm != "dynamic":  # whose plans may weigh, and need not
        assert (planned.weights == 1).all()


def test_plan_for_static_books_the_effective_split() -> None:
    planned = make_plan(load(2), TRIVIAL, MOVABLE, terms("static"))

    assert planned.effective == pytest.approx(planned.after, abs=0.05)
    assert planned.effective < planned.booked + 0.05


def test_answer_is_the_same_on_every_call() -> None:
    question = request_record(load(3), TRIVIAL, MOVABLE, terms("static"))

    assert answer(question) == answer(question)


def test_damaged_answer_is_refused() -> None:
    record = bytearray(answer(request_record(load(4), TRIVIAL, MOVABLE, terms("dynamic"))))
    record[len(record) // 2] ^= 1

    with pytest.raises(StoreError, match="digest"):
        answer_of(bytes(record))
