"""The known ways to place experts, by name. A policy is a function: ``Problem -> Placement``.

A researcher adds one with ``register``, or here; the table is a plain dict. A policy that knows how
far each part of the budget takes it may give a ``Proposal`` as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eplb.core.kernels import IntArray
from eplb.core.load import LoadHistory
from eplb.core.placement import EMPTY, Placement
from eplb.core.problem import Problem
from eplb.errors import ConfigError
from eplb.policies.baselines import round_robin, topk_everywhere
from eplb.policies.frontier import Curve
from eplb.policies.greedy import frame_of, greedy, in_place
from eplb.policies.incremental import repaired
from eplb.policies.legality import why_it_cannot_serve
from eplb.policies.objectives import best_fresh, best_improved
from eplb.policies.relabel import with_singles_kept

Policy = Callable[[Problem], Placement]


class Proposal(NamedTuple):
    """What a policy aims at, and what fewer moves would have brought."""

    placement: Placement
    curve: Curve | None = None  # None: the policy knows only the whole of it


def contiguous_policy(problem: Problem) -> Placement:
    """Consecutive experts on each rank, evenly spread, further slots empty: no balancing at all.

    With as many slots as experts it is the identity.
    """
    return Placement(contiguous_slots(problem), problem.num_experts)


def contiguous_slots(problem: Problem) -> NDArray[np.int32]:
    """[L, S] of the contiguous policy."""
    room = problem.room
    if (room == room[0]).all():
        return np.repeat(_contiguous_layer(problem, room[0])[None], len(room), axis=0)
    return np.array([_contiguous_layer(problem, row) for row in room])


def _contiguous_layer(problem: Problem, room: NDArray[np.int64]) -> NDArray[np.int32]:
    """[S] for slots [R] that may be used."""
    num_experts, topology = problem.num_experts, problem.topology
    levels = np.arange(1, int(room.max()) + 1)
    level = 1 + int(np.argmax(np.minimum(room, levels[:, None]).sum(axis=1) >= num_experts))
    count = np.minimum(room, level)
    surplus = int(count.sum()) - num_experts
    count[np.flatnonzero(count == level)[::-1][:surplus]] -= 1
    place = np.arange(topology.num_slots) - np.repeat(
        topology.first_slot[:-1], topology.slots_of_rank
    )
    held = np.full(topology.num_slots, EMPTY, dtype=np.int32)
    held[place < count[topology.rank_of_slot]] = np.arange(num_experts)
    return held


def greedy_policy(problem: Problem) -> Placement:
    """Replicate the hottest, pack heaviest first, swap; looks at the summed load only."""
    return _placed(problem, greedy(problem))


def auto_policy(problem: Problem) -> Placement:
    """Few moves from the current placement; without one, greedy and a search over the windows."""
    return _auto(problem).placement


def _auto(problem: Problem) -> Proposal:
    if problem.current is None:
        return Proposal(_placed(problem, best_fresh(problem)))
    improved = best_improved(problem, problem.current)
    # A chain of changes may bring an expert back to its rank in another slot: that is no move.
    return Proposal(_placed(problem, improved.held), improved.curve)


def random_policy(problem: Problem) -> Placement:
    """Greedy on load drawn from the seed: legal, as even in slots, and blind to the real load."""
    drawn = np.random.default_rng(problem.seed).integers(
        1, 1000, size=problem.history.tokens.shape[1:]
    )
    return _placed(problem, greedy(replace(problem, history=LoadHistory(drawn[None]))))


def exact_policy(problem: Problem) -> Placement:
    """Proved, or with its gap; for small or offline problems (``solve_exact``)."""
    from eplb.policies.exact import exact  # late: it brings OR-tools

    return exact(problem)


POLICIES: dict[str, Policy] = {
    "auto": auto_policy,
    "contiguous": contiguous_policy,
    "exact": exact_policy,
    "greedy": greedy_policy,
    "random": random_policy,
    "round_robin": round_robin,
    "topk_everywhere": topk_everywhere,
}


def register(name: str, policy: Policy) -> None:
    """Add a policy of a user's own; the same again changes nothing.

    Raises:
        ConfigError: another policy has that name.
    """
    if POLICIES.setdefault(name, policy) is not policy:
        raise ConfigError(f"policy {name!r} is registered already, expected a name of its own")


def propose(name: str, problem: Problem) -> Proposal:
    """Let the policy of that name plan.

    Raises:
        ConfigError: an unknown name; the message lists the known ones.
    """
    policy = policy_named(name)
    if policy is auto_policy:
        return _auto(problem)
    placement = policy(problem)
    if policy is greedy_policy:  # it looks at constraints itself
        return Proposal(placement)
    if why_it_cannot_serve(problem, placement) is None:
        return Proposal(placement)
    # A policy may know nothing of constraints, or of the load that they are about: what it proposes
    # is mended.
    held = placement.slot_to_expert.astype(np.int64)
    return Proposal(_placed(problem, repaired(problem, frame_of(problem), held)))


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
    kept = in_place(with_singles_kept(problem, held, base), base, problem.topology, problem.room)
    # The number that it gets if it is taken: a placement is costly to make twice.
    generation = current.generation + 1 if current is not None else 1
    return Placement(kept.astype(np.int32), problem.num_experts, generation)
