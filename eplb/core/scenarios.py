"""Windows to balance: those of the past with noise reduced, and scenarios.

Windows differ partly by chance: a window of n tokens is a random sample. A plan that is fitted to
the sample is worse on the next window, so each window is shrunk towards the mean of all, by the
part of their variance that chance explains; where it explains all, windows equal their mean.

Shapes:  T windows, K scenarios, L MoE layers, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from eplb.core.arrays import freeze, on_host, owned
from eplb.errors import ConfigError, HistoryError

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
