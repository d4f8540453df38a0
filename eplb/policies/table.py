"""The policy table: every way to place experts, by name.

A policy is a function: ``Problem -> Placement``, or ``Proposal`` with the result of fewer moves.
A user's own policy is an entry too, added by ``register_policy`` or by an installed package under
the entry point group ``eplb.policies``.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from typing import NamedTuple

import numpy as np

from eplb.core.jit import IntArray
from eplb.core.load import LoadHistory
from eplb.core.placement import Placement
from eplb.core.problem import Problem
from eplb.errors import ConfigError
from eplb.policies.baselines import (
    contiguous_policy,
    contiguous_slots,
    round_robin,
    topk_everywhere,
)
from eplb.policies.greedy import best_fresh, greedy
from eplb.policies.incremental import BalanceCurve, best_improved
from eplb.search.legality import first_violation, repaired
from eplb.search.relabel import in_place, with_most_kept, with_singles_kept

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
    from eplb.policies.exact import exact

    return exact(problem)


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
        ConfigError: another policy has that name.
    """
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
