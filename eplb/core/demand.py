"""The load to balance: windows of the past with their noise reduced, and scenarios.

Windows differ partly by chance: a window of n tokens is a random sample. A plan that is fitted to
the sample is worse on the next window, so each window is shrunk towards the mean of all, by the
part of their variance that chance explains; where it explains all, windows equal their mean.

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
from eplb.core.cost import Curve
from eplb.core.jit import FloatArray
from eplb.core.model import ModelShape
from eplb.core.topology import Topology
from eplb.errors import ConfigError, HistoryError

TAIL = 0.05  # weight of the worst windows in the score; more made held-out windows worse
TAIL_SIZE = 0.125  # part of all windows that counts as the worst
SURE = 2.0  # standard deviations above chance before windows count as different


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


def without_noise(work: NDArray[np.float64], tokens: NDArray[np.float64]) -> NDArray[np.float64]:
    """Windows ``work`` [T, L, E] shrunk towards their mean by the variance that chance explains.

    Args:
        work: tokens times their cost; only proportional to ``tokens`` within an expert.
        tokens: [T, L] tokens of each window and layer, as drawn.
    """
    num_windows, _, num_experts = work.shape
    total = work.sum(axis=2, keepdims=True)
    share = np.divide(work, total, out=np.zeros(work.shape), where=total > 0)
    mean = work.sum(axis=0) / np.maximum(total.sum(axis=0), 1e-300)  # [L, E]
    busy = (total[:, :, 0] > 0).sum(axis=0)  # [L] windows
    off = np.where(total > 0, share - mean, 0.0)
    freedom = np.maximum(busy - 1, 1)
    variance = np.square(off).sum(axis=(0, 2)) / freedom
    drawn = np.maximum(tokens, 1.0)
    by_chance = (
        (mean * (1 - mean)).sum(axis=1)
        * np.where(tokens > 0, 1.0 / drawn, 0.0).sum(axis=0)
        / np.maximum(busy, 1)
    )
    # Standard deviation of a sum of squares of that many draws, relative to its mean.
    sure = 1.0 + SURE * np.sqrt(2.0 / (freedom * max(num_experts - 1, 1)))
    real = np.where(
        variance > by_chance * sure, 1.0 - by_chance / np.maximum(variance, 1e-300), 0.0
    )
    # sqrt: keeps the variance of the real part, because windows stand for future ones.
    keep = np.sqrt(np.maximum(real, 0.0))[:, None]
    smooth: NDArray[np.float64] = total * (mean + keep * off)
    return smooth if num_windows > 1 else work


class Demand(NamedTuple):
    """The load to balance, over windows that may differ in weight."""

    tokens: FloatArray  # [L, E, T]
    rate: FloatArray  # [L, T] time per token, or per microsecond of the curve; 0: an idle window
    extra: FloatArray  # [L, T] time of the shared experts, which every live rank computes
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
    *,
    curve: Curve = (),
    model: ModelShape | None = None,
) -> Demand:
    """Windows as the kernels read them.

    Args:
        windows: [T, L, E] tokens times each expert's cost.
        steps: [T] that each window spans; they count only with a curve.
        weight: [T], sums to 1.
        topology: ranks that serve, and their speeds.
        curve: for the time of a replica by its tokens; without one time is proportional to tokens.
        model: with the shared experts that a rank computes; only with a curve.
    """
    # A copy in any case: the kernels are compiled once, for arrays that may be written.
    tokens = np.array(windows.transpose(1, 2, 0), order="C")  # [L, E, T]
    points = np.array(curve, dtype=np.float64).reshape(-1, 2)
    shared = np.zeros((len(tokens), len(weight)))  # time of a rank's shared experts
    total = tokens.sum(axis=1)
    if curve:
        tokens /= steps
        if model is not None:  # a rank computes the shared experts for its own tokens of a step
            own = tokens.sum(axis=1) / model.top_k / topology.alive.sum()
            shared = model.num_shared_experts * _times(own, points)
        total = _times(tokens, points).sum(axis=1) + shared * topology.serving.sum()
    together = topology.rank_speed[topology.serving].sum()
    rate = np.divide(together, total, out=np.zeros(total.shape), where=total > 0)
    return Demand(
        tokens,
        rate,
        shared * rate,
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
