"""Replays windows of load and lets a policy plan between them, as the controller would.

Each window is judged under the placement planned before it; then the policy plans on the windows
seen so far. The planner and its gate are the live ones, ``eplb.plan``, so what is simulated is
what would run. At the start the experts stand contiguously.

Shapes:  T windows, L MoE layers, R ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from eplb.core.load import LoadHistory
from eplb.core.model import ModelShape
from eplb.core.placement import Placement
from eplb.core.problem import Budget
from eplb.core.topology import Topology
from eplb.decision.gate import CostModel, Decision
from eplb.errors import ConfigError, HistoryError
from eplb.measure.balance import imbalance_of, rank_load
from eplb.measure.noise import sampling_noise
from eplb.planner import plan
from eplb.policies.table import policy_named
from simulations.course import Course, Terms


@dataclass(frozen=True)
class Scenario:
    """What all compared policies share.

    Raises:
        HistoryError: fewer than two windows.
        ConfigError: counts that no replay can use.
    """

    history: LoadHistory
    topology: Topology
    model: ModelShape | None = None
    budget: Budget = field(default_factory=Budget)
    cost: CostModel = field(default_factory=CostModel)
    seed: int = 0
    past_windows: int = 16  # the planner looks back this far
    plan_every: int = 1  # windows from one plan to the next
    cut_at_change: bool = True  # plans forget the load before a sudden change, as the live ones do

    def __post_init__(self) -> None:
        if self.history.num_windows < 2:
            raise HistoryError(
                f"{self.history.num_windows} windows, expected at least 2: one to plan on, "
                "one to judge"
            )
        for name in ("past_windows", "plan_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected at least 1")

    @property
    def noise_floor(self) -> float:
        """Imbalance that chance alone makes of a window under a perfect placement."""
        tokens = float(self.history.tokens.sum(axis=2).mean())
        return 1.0 + sampling_noise(tokens, int(self.topology.alive.sum()))


@dataclass(frozen=True)
class Rebalance:
    """One plan that was taken."""

    window: int  # planned after this window, serving from the next
    moves: int
    bytes_by_link: dict[str, int]
    reason: str
    target: Placement


@dataclass(frozen=True, eq=False)
class Replay:
    """How one policy did, window by window; the first window is only planned on."""

    policy: str
    imbalance: NDArray[np.float64]  # [T - 1, L] of windows 1, 2, ...
    rebalances: tuple[Rebalance, ...]
    num_kept: int  # plans that were not worth moving to
    plan_ms: NDArray[np.float64]  # wall time of each plan
    first_load: NDArray[np.float64]  # [L, R] of the last window under the first placement
    last_load: NDArray[np.float64]  # [L, R] of the last window under the last placement
    first_placement: Placement
    last_placement: Placement

    @property
    def per_window(self) -> NDArray[np.float64]:
        """[T - 1] mean over layers."""
        mean: NDArray[np.float64] = self.imbalance.mean(axis=1)
        return mean

    @property
    def placements(self) -> list[Placement]:
        """The placement under which each window 1, 2, ... was judged."""
        serving = [self.first_placement] * (len(self.imbalance) + 1)
        for rebalance in self.rebalances:
            later = len(serving) - rebalance.window - 1
            serving[rebalance.window + 1 :] = [rebalance.target] * later
        return serving[1:]

    @property
    def moves(self) -> int:
        """Weights moved in all."""
        return sum(rebalance.moves for rebalance in self.rebalances)

    @property
    def bytes_by_link(self) -> Counter[str]:
        """Bytes moved in all, by kind of link."""
        total: Counter[str] = Counter()
        for rebalance in self.rebalances:
            total.update(rebalance.bytes_by_link)
        return total


def replay_all(scenario: Scenario, policies: Sequence[str]) -> list[Replay]:
    """Replay every policy on the same windows.

    Raises:
        ConfigError: no policy, one named twice, or an unknown one.
    """
    if not policies or len(set(policies)) != len(policies):
        raise ConfigError(f"policies are {list(policies)}, expected distinct names")
    for name in policies:
        policy_named(name)  # before anything is replayed
    return [replay(scenario, name) for name in policies]


def replay(scenario: Scenario, policy: str) -> Replay:
    """Replay one policy."""
    history, topology = scenario.history, scenario.topology
    alone = plan(history.latest(1), topology, model=scenario.model, policy="contiguous")
    first = alone.base
    terms = Terms(
        topology,
        scenario.model,
        scenario.budget,
        scenario.cost,
        scenario.seed,
        scenario.past_windows,
        scenario.cut_at_change,
    )
    course = Course(terms, policy, first)
    judged: list[NDArray[np.float64]] = []
    taken: list[Rebalance] = []
    num_kept = 0
    plan_ms: list[float] = []
    for window in range(history.num_windows):
        if window:
            load = rank_load(history.tokens[window], course.serving, topology)
            judged.append(imbalance_of(load, topology))
        if window % scenario.plan_every or window == history.num_windows - 1:
            continue  # a plan after the last window would serve none
        begin = perf_counter()
        found = course.plan_after(window, history.first(window + 1))
        plan_ms.append((perf_counter() - begin) * 1000)
        if found.decision is Decision.KEEP:
            num_kept += 1
            continue
        taken.append(
            Rebalance(window, found.num_moves, found.bytes_by_link, found.reason, found.target)
        )
    last = history.tokens[-1]
    return Replay(
        policy=policy,
        imbalance=np.array(judged),
        rebalances=tuple(taken),
        num_kept=num_kept,
        plan_ms=np.array(plan_ms),
        first_load=rank_load(last, first, topology),
        last_load=rank_load(last, course.serving, topology),
        first_placement=first,
        last_placement=course.serving,
    )
