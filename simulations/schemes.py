"""What serves a window, and what is planned after it: one object for each compared way.

Ours plans with the live planner and passes its gate. A policy of ``simulations.peers`` plans at
each interval and is always taken, as engines do. Engines follow their own triggers
(``simulations/peers/engines.py``). The planner, its gate, the cut at sudden changes and the record
of kept promises are those of the controller, so that what is simulated is what would run.

Oracles are limits that no planner on the past can reach: each looks at the window that it serves.

    oracle:force-balanced  the same tokens in every slot: what benchmarks with forced routing show
    oracle:re-plan         a fresh plan for each window before it comes; its moves cost nothing
    oracle:shares          our placement from the past, with the best shares for the window itself
    oracle:moonep          pieces of any size: the same tokens on each rank, where slots suffice
    oracle:ultraep         no piece below 1,024 tokens, threshold within 1 %

The last two are the balancers of MoonEP and UltraEP: replicas for each batch on its exact load.
First copies stay where they are. Ranks above a threshold give tokens of their heaviest experts to
ranks below it, and each piece takes one redundant slot of the rank that gets it. The lowest
threshold that the slots allow is found by bisection, as UltraEP does. Transfers cost nothing.
Written from published descriptions (Kimi-K3 report 5.2.1; UltraEP 1.0.0, MIN_TOKENS_PER_REPLICA and
EPS), not from their code. A window is taken as one batch.

Shapes:  L MoE layers, E experts, S slots, R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eplb.core.cost import CostModel, Decision, Objective
from eplb.core.dispatch import DispatchRule, effective_shares
from eplb.core.load import LoadHistory, num_full_blocks
from eplb.core.model import ModelShape
from eplb.core.placement import EMPTY, Placement, changed_slots
from eplb.core.problem import Budget, Problem, Record
from eplb.core.topology import Topology
from eplb.decision.alternatives import ENOUGH, Promise, realised
from eplb.measure import live_shares
from eplb.planner import Plan, plan
from eplb.policies.table import Policy, Proposal, greedy_policy
from eplb.shares.resplitting import resplit
from simulations.windows import LatestWindows, Tokens
from telemetry.load.drift import planning_history


@dataclass(frozen=True)
class PlanTerms:
    """What plans are made with, beside the load."""

    topology: Topology
    model: ModelShape | None = None
    budget: Budget = field(default_factory=Budget)
    cost: CostModel = field(default_factory=CostModel)
    seed: int = 0
    past_windows: int = 16  # a plan looks back this far
    cut_at_change: bool = True  # plans forget the load before a sudden change
    dispatch: DispatchRule = DispatchRule.WEIGHTED


class Course:
    """Plans after windows, and takes each plan that the gate lets through.

    Args:
        first: the placement that serves at the start.
    """

    def __init__(self, terms: PlanTerms, policy: str, first: Placement) -> None:
        self._terms, self._policy = terms, policy
        self.serving = first
        self._record, self._since = Record(), -1
        self._promise: Promise | None = None

    def plan_after(self, window: int, seen: LoadHistory) -> Plan:
        """Plan after a window, and serve the plan from the next one.

        Args:
            window: its number, from 0.
            seen: the windows up to it; the latest ones are enough.
        """
        terms = self._terms
        self._judge(window, seen)
        past = seen.latest(min(terms.past_windows, seen.num_windows))
        if terms.cut_at_change:
            past = planning_history(seen, last=terms.past_windows)
        unseen = window - self._since
        if past.num_windows < terms.past_windows:
            unseen = min(unseen, past.num_windows)  # a change of load begins the count anew
        found = plan(
            past,
            terms.topology,
            model=terms.model,
            current=self.serving,
            budget=terms.budget,
            policy=self._policy,
            cost=terms.cost,
            seed=terms.seed,
            dispatch=terms.dispatch,
            unseen=unseen,
            record=self._record,
        )
        if found.decision is Decision.MOVE:
            base, target = as_served(found.base, terms), as_served(found.target, terms)
            gain, objective = found.before - found.after, found.problem.objective
            self._promise = Promise(base, target, gain, objective)
            self._since = window
        if found.decision is not Decision.KEEP:
            self.serving = found.target
        return found

    def _judge(self, window: int, seen: LoadHistory) -> None:
        """Hold the latest plan to its promise once enough windows came under it."""
        terms, came = self._terms, seen.latest(window - self._since)
        tokens = seen.tokens.sum(axis=(1, 2))
        if self._promise is None or num_full_blocks(tokens, came.num_windows) < ENOUGH:
            return
        judged = Problem(came, terms.topology, terms.model, cost=terms.cost)
        given = realised(judged, self._promise)
        self._record = self._record.with_plan(self._promise.gain, given)
        self._promise = None


def as_served(placement: Placement, terms: PlanTerms) -> Placement:
    """The same experts, with the shares that the engine's rule gives to their slots."""
    if terms.dispatch is DispatchRule.WEIGHTED:
        return placement
    share = effective_shares(placement, terms.topology, terms.dispatch).clip(0.0, 1.0)
    return Placement(placement.slot_to_expert, placement.num_experts, placement.generation, share)


SlotLoad = NDArray[np.float64]  # [L, S]


@dataclass(frozen=True, eq=False)
class Taken:
    """A placement that serves from the next window on."""

    base: Placement
    target: Placement
    reason: str


def by_rank(load: SlotLoad, topology: Topology) -> NDArray[np.float64]:
    """[L, R] tokens of each rank; the ranks of a replay never change, so a product is enough."""
    found: NDArray[np.float64] = load @ _members(topology)
    return found


@lru_cache(maxsize=16)
def _members(topology: Topology) -> NDArray[np.float64]:
    """[S, R] 1 where a slot is on a rank."""
    members: NDArray[np.float64] = np.eye(topology.num_ranks)[topology.rank_of_slot]
    return members


class SlotSplit:
    """Tokens of slots under a placement, by the shares that the dispatch rule gives."""

    def __init__(self, placement: Placement, terms: PlanTerms) -> None:
        share, _ = live_shares(as_served(placement, terms), terms.topology)
        held = placement.slot_to_expert
        rows = np.arange(placement.num_layers)[:, None] * placement.num_experts
        self._share = np.where(held == EMPTY, 0.0, share)
        self._index = rows + np.maximum(held, 0)
        self.placement = placement

    def of(self, tokens: Tokens) -> SlotLoad:
        """[L, S] tokens of each slot."""
        load: SlotLoad = np.multiply(tokens.ravel()[self._index], self._share, dtype=np.float64)
        return load


class Scheme:
    """One compared way to serve: a placement, for ever where a subclass plans no other."""

    is_oracle = False  # looks at the window that it serves: a limit, not a competitor
    is_async = False  # weights move while steps go on; else serving waits for them

    def __init__(self, terms: PlanTerms, first: Placement) -> None:
        self.terms, self.num_kept = terms, 0  # plans that were not worth moving to
        self.objectives: set[Objective] = set()  # of the plans that were made
        self._split = SlotSplit(first, terms)  # made once for each placement

    @property
    def serving(self) -> Placement:
        """What serves now."""
        return self._split.placement

    def serve(self, tokens: Tokens) -> SlotLoad:
        """[L, S] tokens of each slot in a window."""
        return self._split.of(tokens)

    def plan(self, window: int, tokens: Tokens, past: LatestWindows) -> Taken | None:
        """Look at a window that came, the latest of ``past``; None: nothing changes."""
        return None

    def take(self, target: Placement, reason: str) -> Taken | None:
        """Serve another placement from now on; None where experts and shares stay the same."""
        base = self.serving
        if not changed_slots(base, target).any() and np.array_equal(
            base.slot_share, target.slot_share
        ):
            self.num_kept += 1
            return None
        self._split = SlotSplit(target, self.terms)
        return Taken(base, target, reason)


class Ours(Scheme):
    """A policy with the live planner, gate and record of promises.

    Args:
        every: windows from one plan to the next.
    """

    is_async = True

    def __init__(self, terms: PlanTerms, first: Placement, policy: str, every: int) -> None:
        super().__init__(terms, first)
        self._course, self._every = Course(terms, policy, first), every

    def plan(self, window: int, tokens: Tokens, past: LatestWindows) -> Taken | None:
        """Plan at each interval, from the first window on, and take what the gate lets through."""
        if window % self._every:
            return None
        found = self._course.plan_after(window, past.history)
        self.objectives.add(found.problem.objective)
        if found.decision is Decision.KEEP:
            self.num_kept += 1
            return None
        return self.take(found.target, found.reason)


class AlwaysTaken(Scheme):
    """A policy whose plan is taken at each interval, without a gate."""

    def __init__(self, terms: PlanTerms, first: Placement, policy: Policy, every: int) -> None:
        super().__init__(terms, first)
        self._policy, self._every = policy, every

    def plan(self, window: int, tokens: Tokens, past: LatestWindows) -> Taken | None:
        """Plan on the latest windows."""
        if window % self._every:
            return None
        terms = self.terms
        problem = Problem(
            past.history.latest(terms.past_windows),
            terms.topology,
            terms.model,
            self.serving,
            terms.budget,
            terms.cost,
            terms.seed,
            dispatch=terms.dispatch,
        )
        found = self._policy(problem)
        target = found.placement if isinstance(found, Proposal) else found
        return self.take(target, "at each interval")


ULTRA_EP_LEAST, ULTRA_EP_TOLERANCE = 1024, 0.01
EXACT = 1e-4  # part of the mean rank load
Load = NDArray[np.float64]


class Piece(NamedTuple):
    """Tokens of an expert that a rank with a free slot gets."""

    slot: int  # the slot that gives the tokens
    rank: int  # the rank that gets the tokens
    tokens: float


class MoonEp(Scheme):
    """Pieces of any size."""

    is_oracle = True
    least, tolerance = 0, EXACT

    def serve(self, tokens: Tokens) -> SlotLoad:
        """[L, S] under pieces for these tokens."""
        load = super().serve(tokens)
        for layer, row in enumerate(self.serving.slot_to_expert):
            pieces = lowest(load[layer], row, self.terms.topology, self.least, self.tolerance)
            give(pieces, load[layer], row, self.terms.topology)
        return load


class UltraEp(MoonEp):
    """Pieces of a least size."""

    least, tolerance = ULTRA_EP_LEAST, ULTRA_EP_TOLERANCE


def lowest(
    load: Load, held: NDArray[np.int32], topology: Topology, least: int, tolerance: float
) -> list[Piece]:
    """Pieces of one layer at the lowest threshold that can be reached.

    Args:
        load: [S] tokens of the slots.
        held: [S] their experts; EMPTY slots can take pieces.
        least: tokens of a piece.
        tolerance: of the threshold, relative to the mean.
    """
    serving, speed = topology.serving, topology.rank_speed
    by_rank = np.bincount(topology.rank_of_slot, load, topology.num_ranks)
    fair = by_rank.sum() / speed[serving].sum()  # time of each rank at perfect balance
    low, high = fair, float((by_rank / speed)[serving].max())
    best: list[Piece] = []
    found = pieces_at(low, load, held, topology, least)
    if found is not None:
        return found
    while high - low > tolerance * fair:
        middle = (low + high) / 2
        found = pieces_at(middle, load, held, topology, least)
        if found is None:
            low = middle
        else:
            high, best = middle, found
    return best


def pieces_at(
    threshold: float, load: Load, held: NDArray[np.int32], topology: Topology, least: int
) -> list[Piece] | None:
    """Pieces that leave no rank above a threshold; None where the heaviest-first search finds none.

    Args:
        threshold: time of a rank, in tokens at nominal speed.
    """
    rank_of_slot = topology.rank_of_slot
    by_rank = np.bincount(rank_of_slot, load, topology.num_ranks)
    room = np.where(topology.serving, threshold * topology.rank_speed, 0.0) - by_rank
    free = np.bincount(rank_of_slot[held == EMPTY], minlength=topology.num_ranks)
    slack = 1e-9 * max(threshold, 1.0)
    pieces: list[Piece] = []
    for giver in np.argsort(room, kind="stable"):
        slots = np.flatnonzero((rank_of_slot == giver) & (held != EMPTY))
        for slot in slots[np.argsort(-load[slots], kind="stable")]:
            left = load[slot]
            while room[giver] < -slack:
                taker = int(np.argmax(np.where((free > 0) & topology.serving, room, -np.inf)))
                part = min(max(-room[giver], least), left, room[taker])
                if part < max(least, slack) or not free[taker]:
                    break
                pieces.append(Piece(int(slot), taker, float(part)))
                room[giver] += part
                room[taker] -= part
                free[taker] -= 1
                left -= part
        if room[giver] < -slack:
            return None
    return pieces


def give(
    pieces: list[Piece], load: Load, held: NDArray[np.int32], topology: Topology
) -> NDArray[np.int32]:
    """Move the tokens of pieces to free slots, in place; [S] experts of the slots then."""
    held = held.copy()
    for slot, rank, tokens in pieces:
        free = np.flatnonzero((topology.rank_of_slot == rank) & (held == EMPTY))[0]
        held[free] = held[slot]
        load[slot] -= tokens
        load[free] += tokens
    return held


class ForceBalanced(Scheme):
    """Every live rank gets the same tokens, and every slot of a rank."""

    is_oracle = True

    def serve(self, tokens: Tokens) -> SlotLoad:
        """[L, S] equal parts."""
        topology = self.terms.topology
        size = np.maximum(topology.slots_of_rank, 1)
        part = np.where(topology.serving, 1.0 / topology.serving.sum(), 0.0) / size
        load: SlotLoad = tokens.sum(axis=1)[:, None] * part[topology.rank_of_slot]
        return load


class RePlan(Scheme):
    """Greedy on the window itself."""

    is_oracle = True

    def serve(self, tokens: Tokens) -> SlotLoad:
        """[L, S] under a plan for these tokens."""
        if not tokens.any():
            return super().serve(tokens)
        problem = Problem(LoadHistory(tokens[None]), self.terms.topology, self.terms.model)
        return SlotSplit(greedy_policy(problem), self.terms).of(tokens)


class WindowShares(Ours):
    """Ours, whose replicas get the shares that suit the window itself."""

    is_oracle = True

    def serve(self, tokens: Tokens) -> SlotLoad:
        """[L, S] under the best shares."""
        if not tokens.any():
            return super().serve(tokens)
        topology = self.terms.topology
        placement = resplit(LoadHistory(tokens[None]), self.serving, topology, trust=1.0)
        return SlotSplit(placement, self.terms).of(tokens)


ORACLES: dict[str, type[Scheme]] = {
    "oracle:force-balanced": ForceBalanced,
    "oracle:re-plan": RePlan,
    "oracle:shares": WindowShares,
    "oracle:moonep": MoonEp,
    "oracle:ultraep": UltraEp,
}
