"""Rules by which engines start a plan: by steps and balance, not by the gain of a plan.

SGLang  every ``eplb_rebalance_num_iterations`` passes, unless ranks were used better than a
        threshold meanwhile (``eplb_min_rebalancing_utilization_threshold``, pull request 8345).
vLLM    every ``step_interval`` steps, the first time after a quarter of it; load is added up over
        the last ``window_size`` steps. On ROCm a plan that takes less than 5 % off is dropped.
FlashLB a layer whose balance fell below a part of what its latest plan promised, or below a floor.

Shapes:  L MoE layers, R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class SglangRule:
    """Passes from one plan to the next, and how well used ranks need none."""

    num_iterations: int = 1000
    utilization_threshold: float = 1.0  # as shipped: never reached, so every time

    def is_due(self, iteration: int, utilization: float | None) -> bool:
        """Whether to plan after so many passes, counted from 1.

        Args:
            iteration: passes so far.
            utilization: mean over mean-to-busiest of layers since the latest plan; None: unknown.
        """
        if iteration % self.num_iterations:
            return False
        return utilization is None or utilization <= self.utilization_threshold


@dataclass(frozen=True)
class VllmRule:
    """Steps from one plan to the next, and those whose load is added up."""

    step_interval: int = 3000
    window_size: int = 1000

    def is_due(self, step: int) -> bool:
        """Whether to plan after so many steps, counted from 1."""
        return (step + self.step_interval - self.step_interval // 4) % self.step_interval == 0

    def is_recorded(self, step: int) -> bool:
        """Whether the load of a step counts for the next plan."""
        passed = (step + self.step_interval - self.step_interval // 4) % self.step_interval
        return passed == 0 or self.step_interval - passed < self.window_size


@dataclass(frozen=True)
class FlashlbRule:
    """How far a layer's mean-to-busiest ratio may fall before it is planned again."""

    part_of_promise: float = 0.9  # 0.95 below 32 ranks
    floor: float = 0.85  # 0.9 below 32 ranks

    @classmethod
    def for_ranks(cls, num_ranks: int) -> FlashlbRule:
        """Stricter where ranks are few."""
        return cls(0.95, 0.9) if num_ranks < 32 else cls()

    def due_layers(
        self, ratio: NDArray[np.float64], promised: NDArray[np.float64]
    ) -> NDArray[np.bool_]:
        """[L] which layers to plan.

        Args:
            ratio: [L] mean over busiest rank on the windows, under what serves.
            promised: [L] the same as the latest plan had it; 0 before the first.
        """
        fell = (ratio < promised * self.part_of_promise) | (ratio < self.floor)
        due: NDArray[np.bool_] = fell | (promised == 0)
        return due


def utilization(load: NDArray[np.float64]) -> float:
    """Mean over layers of mean over busiest rank load [L, R]; an idle layer counts as 1."""
    busiest = load.max(axis=1)
    ratio = np.divide(load.mean(axis=1), busiest, out=np.ones(len(load)), where=busiest > 0)
    return float(ratio.mean())
