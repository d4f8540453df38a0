"""The load to balance: windows of the past as they were, and scenarios.

Windows differ partly by chance, and the next one will differ as much. A plan on windows with their
noise gives replicas to experts whose load fluctuates; one on their mean does not.

Two objectives. ``tokens``: the time of a rank is proportional to its tokens. ``time``: the time of
a replica is that of a measured curve at its tokens per step, and every rank also computes the
shared experts; there a replica with few tokens costs as much as one with many, so fewer replicas
may be faster.

Shapes:  T windows, K scenarios, L MoE layers, E experts, P points of a curve.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from eplb.core.arrays import freeze, on_host, owned
from eplb.core.cost import CostModel
from eplb.core.jit import FloatArray
from eplb.core.model import ModelShape
from eplb.core.topology import Topology
from eplb.errors import ConfigError, HistoryError

TAIL = 0.05  # weight of the worst windows in the score; more made held-out windows worse
TAIL_SIZE = 0.125  # part of all windows that counts as the worst


@dataclass(frozen=True, eq=False)
class Scenarios:
    """Possible future windows, such as a tenant's burst.

    Raises:
        HistoryError: loads that cannot be planned on.
        ConfigError: weights that do not fit.
    """

    windows: NDArray[np.float64]  # [K, L, E] tokens
    weight: NDArray[np.float64]  # [K] sum below 1; past windows have the remaining weight

    def __post_init__(self) -> None:
        windows = owned(self.windows, np.float64)
        weight = owned(self.weight, np.float64)
        freeze(self, windows=windows, weight=weight)
        if windows.ndim != 3 or not windows.size:
            raise HistoryError(
                f"scenarios have shape {windows.shape}, expected [scenarios, layers, experts]"
            )
        wrong = np.argwhere(~(np.isfinite(windows) & (windows >= 0)))
        if wrong.size:
            number, layer, expert = wrong[0]
            raise HistoryError(
                f"scenario {number}, layer {layer}, expert {expert}: load is "
                f"{windows[number, layer, expert]}, expected a finite number, 0 or more"
            )
        if weight.shape != (len(windows),) or not (weight > 0).all() or not weight.sum() < 1:
            raise ConfigError(
                f"scenarios: weights are {weight.tolist()}, expected {len(windows)} above 0 "
                "that sum to less than 1"
            )


def as_scenarios(scenarios: Scenarios | ArrayLike, num_windows: int) -> Scenarios:
    """Scenarios from an array [K, L, E], each with the weight of one past window.

    Raises:
        HistoryError: loads that cannot be planned on.
    """
    if isinstance(scenarios, Scenarios):
        return scenarios
    windows = np.asarray(on_host(scenarios), dtype=np.float64)
    each = 1.0 / (num_windows + len(windows)) if windows.ndim == 3 else 1.0
    return Scenarios(windows, np.full(len(windows), each))


class Demand(NamedTuple):
    """The load to balance, over windows that may differ in weight."""

    tokens: FloatArray  # [L, E, T]
    rate: FloatArray  # [L, T] time per token, or per microsecond of the curve; 0: an idle window
    extra: FloatArray  # [L, T] time of each rank beside its replicas: launches, shared experts
    weight: FloatArray  # [T], sums to 1
    tail: float  # how much of the score is the mean over the worst windows
    tail_size: float  # part of the windows, by weight, that counts as the worst
    curve_tokens: FloatArray  # [P] a replica's time by its tokens; empty: time equals tokens
    curve_time: FloatArray  # [P]


def demand_of(
    windows: FloatArray,
    steps: FloatArray,
    weight: FloatArray,
    topology: Topology,
    timed: CostModel | None = None,
    model: ModelShape | None = None,
) -> Demand:
    """Windows as the kernels read them.

    Args:
        windows: [T, L, E] tokens times each expert's cost.
        steps: [T] that each window spans; they count only with ``timed``.
        weight: [T], sums to 1.
        topology: ranks that serve, and their speeds.
        timed: has the curve, see ``CostModel.timed``; None: time is proportional to tokens.
        model: with the shared experts that a rank computes; they count only with ``timed``.
    """
    # A copy in any case: the kernels are compiled once, for arrays that may be written.
    tokens = np.array(windows.transpose(1, 2, 0), order="C")  # [L, E, T]
    points = np.array(timed.curve if timed else (), dtype=np.float64).reshape(-1, 2)
    beside = np.zeros((len(tokens), len(weight)))  # time of a rank beside its replicas
    total = tokens.sum(axis=1)
    if timed is not None:
        tokens /= steps
        if model is not None:  # a rank computes the shared experts for its own tokens of a step
            own = tokens.sum(axis=1) / model.top_k / topology.alive.sum()
            beside = model.num_shared_experts * _times(own, points)
        beside = beside + timed.rank_us * (total > 0)
        total = _times(tokens, points).sum(axis=1) + beside * topology.serving.sum()
    together = topology.rank_speed[topology.serving].sum()
    rate = np.divide(together, total, out=np.zeros(total.shape), where=total > 0)
    return Demand(
        tokens,
        rate,
        beside * rate,
        weight,
        TAIL if len(weight) > 1 else 0.0,
        TAIL_SIZE,
        np.ascontiguousarray(points[:, 0]),
        np.ascontiguousarray(points[:, 1]),
    )


def time_of(tokens: FloatArray, demand: Demand) -> FloatArray:
    """Time of replicas that get so many tokens a step, by the demand's curve."""
    return _times(tokens, np.stack([demand.curve_tokens, demand.curve_time], axis=1))


def _times(tokens: FloatArray, points: FloatArray) -> FloatArray:
    """``eplb.search.layer.curve_at`` of an array."""
    busy = np.interp(tokens, points[:, 0], points[:, 1])
    (before, last), (below, top) = points[-2:, 0], points[-2:, 1]
    beyond = top + (tokens - last) * (top - below) / (last - before)
    times: FloatArray = np.where(tokens > last, beyond, busy) * -np.expm1(-tokens)
    return times
