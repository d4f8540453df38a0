"""The known ways to place experts, by name. A policy is a function: ``Problem -> Placement``.

A researcher adds one by adding a function here; the table is a plain dict.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from eplb.errors import ConfigError
from eplb.greedy import greedy, in_place, refined
from eplb.incremental import incremental
from eplb.kernels import IntArray
from eplb.load import LoadHistory
from eplb.placement import EMPTY, Placement
from eplb.problem import Problem

Policy = Callable[[Problem], Placement]


def contiguous_policy(problem: Problem) -> Placement:
    """Consecutive experts on each rank, evenly spread, further slots empty: no balancing at all.

    With as many slots as experts it is the identity.
    """
    return Placement(contiguous_slots(problem), problem.num_experts)


def contiguous_slots(problem: Problem) -> NDArray[np.int32]:
    """[L, S] of the contiguous policy."""
    topology, num_experts = problem.topology, problem.num_experts
    room = np.where(topology.alive, topology.slots_of_rank, 0)
    level = next(
        level for level in range(1, num_experts + 1) if np.minimum(room, level).sum() >= num_experts
    )
    count = np.minimum(room, level)
    surplus = int(count.sum()) - num_experts
    count[np.flatnonzero(count == level)[::-1][:surplus]] -= 1
    held = np.full((problem.history.num_layers, topology.num_slots), EMPTY, dtype=np.int32)
    first = 0
    for rank, num_held in enumerate(count.tolist()):
        slot = topology.slots_on(rank).start
        held[:, slot : slot + num_held] = np.arange(first, first + num_held)
        first += num_held
    return held


def greedy_policy(problem: Problem) -> Placement:
    """Replicate the hottest, pack heaviest first, swap; looks at the summed load only."""
    return _placed(problem, greedy(problem))


def auto_policy(problem: Problem) -> Placement:
    """Few moves from the current placement; without one, greedy and a search over the windows."""
    if problem.current is None:
        return _placed(problem, refined(problem))
    # A chain of changes may bring an expert back to its rank in another slot: that is no move.
    return _placed(problem, incremental(problem, problem.current))


def random_policy(problem: Problem) -> Placement:
    """Greedy on load drawn from the seed: legal, as even in slots, and blind to the real load."""
    drawn = np.random.default_rng(problem.seed).integers(
        1, 1000, size=problem.history.tokens.shape[1:]
    )
    return _placed(problem, greedy(replace(problem, history=LoadHistory(drawn[None]))))


POLICIES: dict[str, Policy] = {
    "auto": auto_policy,
    "contiguous": contiguous_policy,
    "greedy": greedy_policy,
    "random": random_policy,
}


def policy_named(name: str) -> Policy:
    """Look a policy up.

    Raises:
        ConfigError: an unknown name; the message lists the known ones.
    """
    if name not in POLICIES:
        raise ConfigError(
            f"unknown policy {name!r}, expected one of: {', '.join(sorted(POLICIES))}"
        )
    return POLICIES[name]


def _placed(problem: Problem, held: IntArray) -> Placement:
    current = problem.current
    base = current.slot_to_expert if current is not None else contiguous_slots(problem)
    kept = in_place(held, base, problem.topology)
    return Placement(kept.astype(np.int32), problem.num_experts)
