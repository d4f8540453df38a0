"""Whether balancing is worth enabling for a load: one sentence with the figures that it stands on.

Each window is served in four ways: by experts in order, without redundant slots; by plans of
earlier windows in the same slots, where experts can only move; by such plans with redundant slots,
where they can have replicas; and by a plan of the window itself, which is hindsight. What decides
are differences of their imbalance, with their intervals (``simulations.differences``), and what the
number of tokens can show:

    a perfectly even load is uneven by chance. A window of n tokens on R ranks shows at least the
    imbalance of n draws of R equal ranks; all windows together, whose tokens come in whole requests
    and count ``dispersion`` times less, show no imbalance below what passes such draws once in 20.

    windows and sum as even as chance                     the ranks are even, or too few tokens to
                                                          show the planner's target imbalance
    moves gain half of what replicas gain, or more        moves help
    replicas gain                                         a replica is needed
    hindsight gains                                       the load changes faster than plans can

Plans are those of the live planner: a plan whose moves do not pay for themselves is not taken.

Shapes:  T windows, L MoE layers, E experts, R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from math import sqrt
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from eplb.core.load import LoadHistory, num_full_blocks
from eplb.core.placement import Placement
from eplb.errors import EplbError, counted
from eplb.measure import imbalance
from eplb.planner import plan
from simulations.differences import FEWEST, Difference, difference_of
from simulations.replay import in_order
from simulations.schemes import Course, PlanTerms, as_served
from simulations.windows import mean_by_tokens
from telemetry.load.drift import LOOK_BACK, dispersion

Worth = Literal["even", "moves", "replica", "too fast", "too few"]
Tokens = NDArray[np.int64]  # [L, E] of a window

CHANCE = 0.05  # of an even load to show as much imbalance
DRAWS = 400  # of even ranks, for the imbalance that chance makes in a window
LEAST = 1e-4  # smaller differences of imbalance are none
MOST_PART = 0.5  # of the gain of replicas that moves have where no replica is needed


@dataclass(frozen=True)
class Verdict:
    """Whether balancing is worth enabling, and the figures that say so."""

    worth: Worth
    sentence: str
    figures: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {"worth": self.worth, "sentence": self.sentence, **self.figures}


@dataclass
class Judge:
    """Serves windows in four ways, one by one.

    Args:
        plain: how plans are made in the fewest slots, which hold each expert once.
        redundant: the same with redundant slots.
        policy: of the plans.
        every: windows from one plan to the next.
    """

    plain: PlanTerms
    redundant: PlanTerms
    policy: str = "auto"
    every: int = 1
    _courses: list[tuple[Course, PlanTerms]] = field(default_factory=list)  # moves, replicas
    _start: Placement | None = None
    _seen: list[Tokens] = field(default_factory=list)
    _rows: list[tuple[float, ...]] = field(default_factory=list)  # of each judged window
    _total: Tokens | None = None
    _num_windows: int = 0

    def add(self, tokens: Tokens) -> None:
        """Serve a window by what was planned before it, then plan after it."""
        if not tokens.any():
            return
        if self._start is None:
            self._start = in_order(self.plain.topology, tokens)
            for terms in (self.plain, self.redundant):
                first = in_order(terms.topology, tokens)
                self._courses.append((Course(terms, self.policy, first), terms))
        else:
            self._rows.append((float(tokens.sum()), *self._served(tokens), self._chance(tokens)))
        self._total = tokens if self._total is None else self._total + tokens
        self._seen = [*self._seen[1 - LOOK_BACK :], tokens]
        for course, _ in self._courses if self._num_windows % self.every == 0 else ():
            try:
                course.plan_after(self._num_windows, LoadHistory(np.stack(self._seen)))
            except EplbError:  # no plan: what serves goes on
                continue
        self._num_windows += 1

    def _served(self, tokens: Tokens) -> list[float]:
        """Imbalance in order, by moves, by replicas and by hindsight, mean over layers."""
        assert self._start is not None, "begun"
        own = plan(tokens, self.redundant.topology, policy="greedy").target
        ways = [(self._start, self.plain)]
        ways += [(course.serving, terms) for course, terms in self._courses]
        ways += [(own, self.redundant)]
        return [
            float(imbalance(tokens, as_served(held, terms), terms.topology).mean())
            for held, terms in ways
        ]

    def _chance(self, tokens: Tokens) -> float:
        """Imbalance of even ranks by chance, mean over layers."""
        num_ranks = int(self.plain.topology.serving.sum())
        return float(np.mean([_even(_rounded(n), num_ranks) for n in tokens.sum(axis=1).tolist()]))

    @property
    def verdict(self) -> Verdict:
        """The answer so far."""
        if self._total is None or self._start is None:
            return Verdict("too few", "too few tokens to say: no window has any", {})
        routed, *ways, chance = np.array(self._rows).reshape(-1, 6).T
        means = [mean_by_tokens(way, routed) for way in (*ways, chance)]
        in_order_, moved, replicated, hindsight, by_chance = means
        topology = self.plain.topology
        together = float(imbalance(self._total, self._start, topology).mean())
        a_layer = float(self._total.sum(axis=1).mean())
        drawn = a_layer / dispersion(LoadHistory(np.stack(self._seen)))
        shown = 1.0 + _shown_by(drawn, int(topology.serving.sum()))
        target = self.plain.budget.target_imbalance
        figures = {
            "in_order": in_order_,
            "moves": moved,
            "replicas": replicated,
            "hindsight": hindsight,
            "chance": by_chance,
            "windows": float(len(routed)),
            "tokens": a_layer,
            "together": together,
            "shown": shown,
        }
        full = num_full_blocks(routed, len(routed)) if len(routed) else 0
        if full < FEWEST:
            return Verdict(
                "too few",
                f"too few tokens to say: {counted(full, 'window')} with tokens came after the "
                f"first, expected {FEWEST} or more",
                figures,
            )

        def gain(less: NDArray[np.float64]) -> Difference:
            part = routed / routed.mean()
            return difference_of((ways[0] - less) * part, self.plain.seed, least=LEAST)

        uneven = gain(chance)
        is_even = uneven.verdict != "better" or in_order_ - by_chance <= target - 1.0
        in_windows = (
            f"experts in order have imbalance {in_order_:.3f} where chance alone makes "
            f"{by_chance:.3f}"
        )
        if is_even and together <= max(shown, target):
            if shown <= target:
                return Verdict(
                    "even",
                    f"not worth enabling: the ranks are even: {in_windows}, and all windows "
                    f"together {together:.3f}",
                    figures,
                )
            needed = a_layer * ((shown - 1.0) / (target - 1.0)) ** 2
            return Verdict(
                "too few",
                f"too few tokens to say: {a_layer:,.0f} in a layer show an imbalance above "
                f"{shown:.3f}, and all windows together have {together:.3f}; about {needed:,.0f} "
                f"show {target:g}, the planner's target",
                figures,
            )
        slots = int(self.redundant.topology.slots_of_rank.max() - topology.slots_of_rank.max())
        with_slots = f"{counted(slots, 'redundant slot')} a rank"
        judged = f"{len(routed)} windows that no plan had seen"
        by_moves, by_replicas = gain(ways[1]), gain(ways[2])
        helps, most = by_moves.verdict == "better", max(by_replicas.mean, by_moves.mean)
        if helps and by_moves.mean >= MOST_PART * most:
            return Verdict(
                "moves",
                f"worth enabling: moves help: imbalance {in_order_:.3f} in order, {moved:.3f} "
                f"with moves and no redundant slot, {replicated:.3f} with {with_slots}; {judged}; "
                f"chance alone makes {by_chance:.3f}",
                figures,
            )
        if by_replicas.verdict == "better":
            return Verdict(
                "replica",
                f"worth enabling with redundant slots: a replica is needed, a move does not help: "
                f"imbalance {in_order_:.3f} in order, {moved:.3f} with moves alone, "
                f"{replicated:.3f} with {with_slots}; {judged}; chance alone makes {by_chance:.3f}",
                figures,
            )
        if gain(np.maximum(ways[3], chance)).verdict == "better":
            return Verdict(
                "too fast",
                f"not worth enabling: the load changes faster than plans can: imbalance "
                f"{in_order_:.3f} in order, {moved:.3f} with moves and {replicated:.3f} with "
                f"{with_slots} by plans of earlier windows, {hindsight:.3f} by a plan of each "
                f"window itself; {judged}; chance alone makes {by_chance:.3f}",
                figures,
            )
        return Verdict(
            "too few",
            f"too few tokens to say: {in_windows}, and {judged} do not tell whether plans help: "
            f"{moved:.3f} with moves, {replicated:.3f} with {with_slots}",
            figures,
        )


def _shown_by(tokens: float, num_ranks: int) -> float:
    """Imbalance above 1 that even ranks with so many tokens pass with CHANCE, in one layer."""
    if num_ranks < 2 or tokens <= 0:
        return 0.0
    most = NormalDist().inv_cdf((1.0 - CHANCE) ** (1.0 / num_ranks))
    return most * sqrt(num_ranks / tokens)


def _rounded(tokens: int) -> int:
    """Two digits of a number of tokens: imbalance by chance hardly depends on the others."""
    return int(float(f"{tokens:.1e}"))


@lru_cache(maxsize=4096)
def _even(tokens: int, num_ranks: int) -> float:
    """Mean imbalance of even ranks that so many tokens are drawn to."""
    if not tokens:
        return 1.0
    drawn = np.random.default_rng(0).multinomial(tokens, np.full(num_ranks, 1 / num_ranks), DRAWS)
    return float(drawn.max(axis=1).mean()) * num_ranks / tokens
