"""The policy table: every way to place experts, by name.

A policy is a function: ``Problem -> Placement``, or ``Proposal`` with the result of fewer moves.
A user's own policy is an entry too, added by ``register_policy`` or by an installed package under
the entry point group ``eplb.policies``.

The baselines (contiguous, round robin, the hottest experts on every rank) are legal for any slot
counts and dead ranks, never put an expert on a rank twice, and keep no expert group on a node.

Shapes:  L MoE layers, E experts, S slots, R ranks.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eplb.core.arrays import of_type
from eplb.core.jit import IntArray
from eplb.core.load import LoadHistory, history_of_figures
from eplb.core.placement import EMPTY, Placement
from eplb.core.problem import Problem
from eplb.core.topology import Topology
from eplb.errors import ConfigError
from eplb.policies.greedy import best_fresh, greedy
from eplb.policies.incremental import BalanceCurve, best_improved
from eplb.search.legality import first_violation, repaired
from eplb.search.relabel import in_place, with_most_kept, with_singles_kept


def contiguous_policy(problem: Problem) -> Placement:
    """Consecutive experts on each rank, evenly spread, redundant slots empty: no balancing.

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


def round_robin(problem: Problem) -> Placement:
    """Assign experts to live ranks in turn, again and again while slots are free.

    Does not use the load: neighbours in the model's numbering are on different ranks, and the first
    experts get the replicas. All layers are equal.

    Source of the idea: vLLM's round-robin placement (vllm-project/vllm pull request 28449).
    """
    layer = _round_robin_layer(problem.num_experts, problem.topology)
    return _kept(problem, np.tile(layer, (problem.history.num_layers, 1)))


def topk_everywhere(problem: Problem) -> Placement:
    """Put the hottest experts on every live rank, as many as slots allow; the others greedily.

    Every other expert keeps a slot, and no rank gets more than it has slots. Ranks without slots do
    not count. Remaining slots go to the next hottest experts, as in greedy.

    Source of the idea: ROCm/ATOM pull request 1210.
    """
    topology = problem.topology
    usable = topology.serving
    num_top = _num_everywhere(topology.slots_of_rank[usable], problem.num_experts)
    by_heat = np.argsort(-problem.work.sum(axis=0), axis=1, kind="stable")  # [L, E]
    held = np.full((problem.history.num_layers, topology.num_slots), EMPTY, dtype=np.int64)
    for rank in np.flatnonzero(usable):
        first = topology.first_slot[rank]
        held[:, first : first + num_top] = by_heat[:, :num_top]
    if num_top < problem.num_experts:
        _pack_the_rest(problem, held, by_heat[:, num_top:], usable)
    return _kept(problem, held)


def _num_everywhere(slots_of_rank: NDArray[np.int32], num_experts: int) -> int:
    most = min(int(slots_of_rank.min()), num_experts)
    if len(slots_of_rank) == 1:
        return most
    spare = int(slots_of_rank.sum()) - num_experts
    return min(most, spare // (len(slots_of_rank) - 1))


def _pack_the_rest(
    problem: Problem,
    held: NDArray[np.int64],
    rest: NDArray[np.int64],
    usable: NDArray[np.bool_],
) -> None:
    """Plan the experts ``rest`` [L, ...] greedily on the slots that ``held`` leaves empty."""
    topology = problem.topology
    num_top = problem.num_experts - rest.shape[1]
    slots = np.where(usable, topology.slots_of_rank - num_top, topology.slots_of_rank)
    narrow = replace(topology, slots_of_rank=slots)
    # As work, which includes each expert's cost per token.
    work = np.take_along_axis(problem.work, rest[None], axis=2)
    packed = greedy(Problem(history_of_figures(work), narrow))
    experts = np.take_along_axis(rest, np.maximum(packed, 0), axis=1)
    for rank in range(topology.num_ranks):
        into = slice(topology.first_slot[rank + 1] - slots[rank], topology.first_slot[rank + 1])
        here = narrow.slots_on(rank)
        held[:, into] = np.where(packed[:, here] == EMPTY, EMPTY, experts[:, here])


def _round_robin_layer(num_experts: int, topology: Topology) -> NDArray[np.int64]:
    """[S] of one layer."""
    room = topology.usable_slots.tolist()
    on_rank: list[list[int]] = [[] for _ in room]
    turn = 0
    for _ in range(max(room)):  # an upper bound of the turns
        for expert in range(num_experts):
            for step in range(len(room)):
                rank = (turn + step) % len(room)
                if len(on_rank[rank]) < room[rank] and expert not in on_rank[rank]:
                    on_rank[rank].append(expert)
                    turn = rank + 1
                    break
    held = np.full(topology.num_slots, EMPTY, dtype=np.int64)
    for rank, experts in enumerate(on_rank):
        first = int(topology.first_slot[rank])
        held[first : first + len(experts)] = experts
    return held


def _kept(problem: Problem, held: NDArray[np.int64]) -> Placement:
    """As a placement; experts that stay on a rank stay in their slots there."""
    if problem.current is not None:
        held = in_place(held, problem.current.slot_to_expert, problem.topology)
    return Placement(held.astype(np.int32), problem.num_experts)


ENTRY_POINTS = "eplb.policies"


class Proposal(NamedTuple):
    """The placement of a policy, and the balance that fewer moves would give."""

    placement: Placement
    curve: BalanceCurve | None = None  # None: not known


Policy = Callable[[Problem], Placement | Proposal]


@dataclass(frozen=True)
class PolicyEntry:
    """A policy, and how the planner uses its placements.

    Args:
        policy: places experts.
        keeps_constraints: its placements meet the constraints, and are not checked.
        resplits: the planner then also optimises token shares of replicas, node traffic and the
            engine's dispatch rule.
    """

    policy: Policy
    keeps_constraints: bool = False
    resplits: bool = False

    def __call__(self, problem: Problem) -> Placement:
        """Place experts."""
        return self.propose(problem).placement

    def propose(self, problem: Problem) -> Proposal:
        """Place experts; a placement that violates constraints is repaired."""
        found = self.policy(problem)
        proposal = found if isinstance(found, Proposal) else Proposal(found)
        if self.keeps_constraints or first_violation(problem, proposal.placement) is None:
            return proposal
        held = proposal.placement.slot_to_expert.astype(np.int64)
        return Proposal(_placed(problem, repaired(problem, problem.frame, held)))


def greedy_policy(problem: Problem) -> Placement:
    """Replicate the hottest, pack heaviest first, swap; uses the summed load only."""
    return _placed(problem, greedy(problem))


def auto_policy(problem: Problem) -> Proposal:
    """Few moves from the current placement; without one, greedy and a search over the windows."""
    if problem.current is None:
        return Proposal(_placed(problem, best_fresh(problem)))
    held, curve = best_improved(problem)
    # A chain of changes may return an expert to its rank in another slot: that is not a move.
    return Proposal(_placed(problem, held), curve)


def fresh_policy(problem: Problem) -> Placement:
    """As ``auto`` without a serving placement; equal ranks are numbered so that fewest move."""
    held = best_fresh(problem)
    if problem.current is not None:
        held = with_most_kept(problem, held, problem.current.slot_to_expert)
    return _placed(problem, held)


def random_policy(problem: Problem) -> Placement:
    """Greedy on random load drawn from the seed: legal, and independent of the real load."""
    drawn = np.random.default_rng(problem.seed).integers(
        1, 1000, size=problem.history.tokens.shape[1:]
    )
    return _placed(problem, greedy(replace(problem, history=LoadHistory(drawn[None]))))


def exact_policy(problem: Problem) -> Placement:
    """Optimal, or with its gap; for small or offline problems (``solve_exact``)."""
    from eplb.policies.exact import solve_exact

    return solve_exact(problem).placement


class PolicyTable(UserDict[str, PolicyEntry]):
    """Entries by name. Those of installed packages are in it, and are loaded when they are used."""

    def __missing__(self, name: str) -> PolicyEntry:
        """Load the policy of an installed package."""
        for point in entry_points(group=ENTRY_POINTS, name=name):
            self[name] = _as_entry(point.load())
            return self.data[name]
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        """Names in order."""
        installed = (point.name for point in entry_points(group=ENTRY_POINTS))
        return iter(sorted({*self.data, *installed}))

    def __len__(self) -> int:
        """Number of names."""
        return len(list(iter(self)))

    def __contains__(self, name: object) -> bool:
        """Whether the table has the name, loaded or not."""
        return name in self.data or name in list(self)


POLICIES = PolicyTable(
    {
        "auto": PolicyEntry(auto_policy, keeps_constraints=True, resplits=True),
        "contiguous": PolicyEntry(contiguous_policy),
        "exact": PolicyEntry(exact_policy),
        "fresh": PolicyEntry(fresh_policy, keeps_constraints=True, resplits=True),
        "greedy": PolicyEntry(greedy_policy, keeps_constraints=True),
        "random": PolicyEntry(random_policy),
        "round_robin": PolicyEntry(round_robin),
        "topk_everywhere": PolicyEntry(topk_everywhere),
    }
)


def register_policy(name: str, policy: Policy | PolicyEntry) -> None:
    """Add a user's own policy to the table; adding the same one again changes nothing.

    Raises:
        ConfigError: another policy has that name, or it is no function.
    """
    if not isinstance(name, str) or not name.isprintable() or not name:
        raise ConfigError(f"policy name is {name!r}, expected text that can be printed")
    if not isinstance(policy, PolicyEntry) and not callable(policy):
        raise ConfigError(
            f"policy {name!r} is {policy!r}, expected a function from a Problem to a Placement"
        )
    entry = _as_entry(policy)
    if POLICIES.setdefault(name, entry) != entry:
        raise ConfigError(f"policy {name!r} is registered already, expected an unused name")


def _as_entry(policy: Policy | PolicyEntry) -> PolicyEntry:
    return policy if isinstance(policy, PolicyEntry) else PolicyEntry(policy)


def policy_named(name: str) -> PolicyEntry:
    """Look a policy up: in the table, then among entry points of installed packages.

    Raises:
        ConfigError: an unknown name; the message lists the known ones.
    """
    of_type("policy", name, str)
    try:
        return POLICIES[name]
    except KeyError as exc:
        known = ", ".join(POLICIES)
        raise ConfigError(f"unknown policy {name!r}, expected one of: {known}") from exc


def _placed(problem: Problem, held: IntArray) -> Placement:
    current = problem.current
    base = current.slot_to_expert if current is not None else contiguous_slots(problem)
    kept = in_place(with_singles_kept(problem, held, base), base, problem.topology, problem.room)
    # The generation that it gets if it is chosen: a second Placement would cost time.
    generation = current.generation + 1 if current is not None else 1
    return Placement(kept.astype(np.int32), problem.num_experts, generation)
