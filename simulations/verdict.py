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
        if self._total is None or self._start is None or not self._rows:
            return Verdict("too few", "too few tokens to say: fewer than two windows have any", {})
        routed, in_order, moves, replicas, hindsight, chance = np.array(self._rows).T
        topology, wide = self.plain.topology, self.redundant.topology
        tokens = float(self._total.sum(axis=1).mean())
        drawn = tokens / dispersion(LoadHistory(np.stack(self._seen)))
        return Evidence(
            routed=routed,
            in_order=in_order,
            moves=moves,
            replicas=replicas,
            hindsight=hindsight,
            chance=chance,
            tokens=tokens,
            together=float(imbalance(self._total, self._start, topology).mean()),
            shown=1.0 + _shown_by(drawn, int(topology.serving.sum())),
            target=self.plain.budget.target_imbalance,
            slots=int(wide.slots_of_rank.max() - topology.slots_of_rank.max()),
            seed=self.plain.seed,
        ).verdict


Series = NDArray[np.float64]


@dataclass(frozen=True, eq=False, kw_only=True)
class Evidence:
    """What the judged windows show."""

    routed: Series  # [T] tokens of each window
    in_order: Series  # [T] imbalance of each way to serve, mean over layers
    moves: Series
    replicas: Series
    hindsight: Series
    chance: Series  # [T] of even ranks
    tokens: float  # of a layer, in all windows
    together: float  # imbalance of all windows as one, in order
    shown: float  # imbalance that even ranks with so many tokens pass with CHANCE
    target: float  # imbalance up to which the planner changes nothing
    slots: int  # redundant ones of a rank
    seed: int

    @property
    def verdict(self) -> Verdict:
        """The first answer that holds."""
        full = num_full_blocks(self.routed, len(self.routed))
        if full < FEWEST:
            return self._answer(
                "too few",
                f"too few tokens to say: {counted(full, 'window')} with tokens came after the "
                f"first, expected {FEWEST} or more",
            )
        if self._is_even():
            return self._even() if self.shown <= self.target else self._too_few()
        by_moves, by_replicas = self._gain(self.moves), self._gain(self.replicas)
        whole = max(by_moves.mean, by_replicas.mean)
        if by_moves.verdict == "better" and by_moves.mean >= MOST_PART * whole:
            return self._answer("moves", f"worth enabling: moves help: {self._by_plans()}")
        if by_replicas.verdict == "better":
            return self._answer(
                "replica",
                "worth enabling with redundant slots: a replica is needed, a move does not help: "
                f"{self._by_plans()}",
            )
        if self._gain(np.maximum(self.hindsight, self.chance)).verdict == "better":
            return self._answer(
                "too fast",
                "not worth enabling: the load changes faster than plans can: "
                f"{self._by_plans()}; a plan of each window itself gives "
                f"{self._mean(self.hindsight):.3f}",
            )
        return self._answer(
            "too few", f"too few tokens to say whether plans help: {self._by_plans()}"
        )

    def _is_even(self) -> bool:
        """Whether neither windows nor their sum show more than chance and the target."""
        above = self._mean(self.in_order) - self._mean(self.chance)
        is_uneven = self._gain(self.chance).verdict == "better" and above > self.target - 1.0
        return not is_uneven and self.together <= max(self.shown, self.target)

    def _even(self) -> Verdict:
        return self._answer(
            "even",
            "not worth enabling: the ranks are even: experts in order have imbalance "
            f"{self._mean(self.in_order):.3f} where chance alone makes "
            f"{self._mean(self.chance):.3f}, and all windows together {self.together:.3f}",
        )

    def _too_few(self) -> Verdict:
        needed = self.tokens * ((self.shown - 1.0) / (self.target - 1.0)) ** 2
        return self._answer(
            "too few",
            f"too few tokens to say: {self.tokens:,.0f} in a layer show an imbalance above "
            f"{self.shown:.3f}, and all windows together have {self.together:.3f}; about "
            f"{needed:,.0f} show {self.target:g}, the planner's target",
        )

    def _by_plans(self) -> str:
        """Imbalance of the ways that plans of earlier windows serve."""
        return (
            f"imbalance {self._mean(self.in_order):.3f} in order, {self._mean(self.moves):.3f} "
            f"with moves and no redundant slot, {self._mean(self.replicas):.3f} with "
            f"{counted(self.slots, 'redundant slot')} a rank, on {len(self.routed)} windows that "
            f"no plan had seen; chance alone makes {self._mean(self.chance):.3f}"
        )

    def _mean(self, series: Series) -> float:
        return mean_by_tokens(series, self.routed)

    def _gain(self, less: Series) -> Difference:
        """What another imbalance gains over experts in order."""
        part = self.routed / self.routed.mean()
        return difference_of((self.in_order - less) * part, self.seed, least=LEAST)

    def _answer(self, worth: Worth, sentence: str) -> Verdict:
        series = ("in_order", "moves", "replicas", "hindsight", "chance")
        figures = {name: self._mean(getattr(self, name)) for name in series}
        own = {"tokens": self.tokens, "together": self.together, "shown": self.shown}
        return Verdict(worth, sentence, figures | own | {"windows": float(len(self.routed))})


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
