"""Calls of the library with what it cannot take: each is refused in words, none is guessed at."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from eplb import DispatchRule, Placement, Topology, imbalance, plan, register_policy
from eplb.errors import EplbError
from eplb.measure import lower_bound

RANKS = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=2)
HELD = Placement(np.array([[0, 1, 0, 2]]), num_experts=3, generation=1)
WIDE, FOUR = Placement(np.arange(32)[None], 32, 1), Topology.uniform(1, 4, 8)
LOAD: Any = np.array([[60, 20, 20]])
NONE: Any = None

CALLS: dict[str, tuple[Callable[[], object], str]] = {
    "NaN": (lambda: imbalance(LOAD * math.nan, HELD, RANKS), "load has nan tokens"),
    "infinity": (lambda: imbalance(LOAD * math.inf, HELD, RANKS), "load has inf tokens"),
    "negative load": (lambda: imbalance(-LOAD, HELD, RANKS), "load has -60 tokens"),
    "load of others": (lambda: imbalance(np.ones((1, 5)), WIDE, FOUR), "expected .* 32 experts"),
    "load of text": (lambda: imbalance("abc", HELD, RANKS), "load has dtype <U3"),
    "no load": (lambda: imbalance(NONE, HELD, RANKS), "load has dtype object"),
    "ragged load": (lambda: imbalance([[1, 2], [3]], HELD, RANKS), "load is no array"),
    "no placement": (lambda: imbalance(LOAD, NONE, RANKS), "placement is None, expected Placement"),
    "no topology": (lambda: imbalance(LOAD, HELD, NONE), "topology is None, expected Topology"),
    "bound of text": (lambda: lower_bound("ab", RANKS), "load has dtype <U2"),
    "fractions": (lambda: Placement([[0.5, 1.9]], 2), "has 0.5, expected whole"),
    "ragged slots": (lambda: Placement([[0, 1], [0]], 2), "slot_to_expert is no array"),
    "generation NaN": (lambda: Placement([[0, 1]], 2, math.nan), "generation is nan"),
    "generation below 0": (lambda: Placement(np.array([[0, 1]]), 2, -1), "generation is -1"),
    "generation past all": (lambda: Placement(np.array([[0, 1]]), 2, 2**70), "generation is 118"),
    "experts past all": (lambda: Placement(np.array([[0, 1]]), 2**62), "num_experts is 4611"),
    "half a slot": (lambda: Topology.uniform(1, 2, 1.5), "1.5 slots"),
    "ranks past all": (lambda: Topology.uniform(10**6, 10**6, 2), "at most 65,536 ranks"),
    "slots past all": (lambda: Topology.uniform(1, 2, 10**12), "of 65,536 slots"),
    "policy 3": (lambda: register_policy("x", 3), "policy 'x' is 3"),
    "policy's name": (lambda: register_policy("a\nb", lambda p: HELD), "expected text that can"),
    "policy of a list": (lambda: plan(LOAD, RANKS, policy=[]), r"policy is \[\], expected str"),
    "plan without ranks": (lambda: plan(LOAD, NONE), "topology is None, expected Topology"),
    "current": (
        lambda: plan(LOAD, RANKS, current="x"),
        "current is 'x', expected Placement or None",
    ),
    "model": (lambda: plan(LOAD, RANKS, model=3), "model is 3, expected ModelShape or None"),
    "budget": (lambda: plan(LOAD, RANKS, budget=3), "budget is 3, expected Budget"),
    "budget 0": (lambda: plan(LOAD, RANKS, budget=0), "budget is 0, expected Budget"),
    "constraints": (lambda: plan(LOAD, RANKS, constraints="x"), "constraints is 'x'"),
    "cost": (lambda: plan(LOAD, RANKS, cost=math.nan), "cost is nan, expected CostModel"),
    "seed": (lambda: plan(LOAD, RANKS, seed="x"), "seed is 'x', expected a whole number"),
    "seed below 0": (lambda: plan(LOAD, RANKS, seed=-1), "seed is -1, expected 0"),
    "seed past all": (lambda: plan(LOAD, RANKS, seed=2**80), "seed is 1208"),
    "redundant past all": (
        lambda: plan(LOAD, Topology.uniform(1, 4, 16_384), dispatch=DispatchRule.SGLANG_STATIC),
        "65,533 of them redundant, take 4,294,",
    ),
    "expert": (lambda: plan(LOAD, RANKS).explain(0, 1.5), "expert is 1.5, expected a whole"),
}


@pytest.mark.parametrize("call", CALLS)
def test_call_with_what_it_cannot_take_is_refused_in_words(call: str) -> None:
    made, words = CALLS[call]

    with pytest.raises(EplbError, match=words):
        made()
