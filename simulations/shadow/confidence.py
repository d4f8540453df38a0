"""How sure a mean difference of windows is: an interval by a moving-block bootstrap.

Neighbouring windows resemble each other, so single windows must not be drawn alone: an interval
from them would be too narrow. Blocks of about the cube root of their number are drawn instead, as
if the windows stood in a circle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

FEWEST = 8  # judged windows, below which nothing is concluded
DRAWS = 2000
LEVEL = 0.95
LEAST = 1e-4  # of imbalance: smaller differences are none

Verdict = Literal["better", "worse", "no difference", "cannot tell", "too few windows"]


@dataclass(frozen=True)
class Gain:
    """Mean difference over windows, with its interval."""

    mean: float
    low: float
    high: float
    num_windows: int
    verdict: Verdict

    @property
    def sentence(self) -> str:
        """The verdict with what it stands on."""
        found = f"{self.mean:+.4f}, {LEVEL:.0%} interval {self.low:+.4f} to {self.high:+.4f}"
        if self.verdict == "too few windows":
            return f"too few windows to tell: {self.num_windows}, expected {FEWEST} or more"
        if self.verdict == "cannot tell":
            return f"cannot tell after {self.num_windows} windows ({found}){self._more()}"
        return f"{self.verdict} ({found}, {self.num_windows} windows)"

    def _more(self) -> str:
        """How many windows would tell if the mean stays, the interval narrowing as their root."""
        half = (self.high - self.low) / 2
        if abs(self.mean) < LEAST:
            return ""
        return f"; about {int(np.ceil(self.num_windows * (half / self.mean) ** 2))} would tell"


def gain_of(difference: NDArray[np.float64], seed: int) -> Gain:
    """Judge differences [T] of imbalance, the engine's less ours: above 0 is a gain."""
    count = len(difference)
    if not count:
        return Gain(0.0, 0.0, 0.0, 0, "too few windows")
    mean = float(difference.mean())
    low, high = _interval(difference, seed)
    verdict: Verdict = "cannot tell"
    if count < FEWEST:
        verdict = "too few windows"
    elif max(abs(low), abs(high)) < LEAST:
        verdict = "no difference"
    elif low > 0 or high < 0:
        verdict = "better" if low > 0 else "worse"
    return Gain(mean, low, high, count, verdict)


def _interval(difference: NDArray[np.float64], seed: int) -> tuple[float, float]:
    count = len(difference)
    length = max(1, round(count ** (1 / 3)))
    rng = np.random.default_rng(seed)
    begin = rng.integers(0, count, size=(DRAWS, -(-count // length)))
    index = (begin[:, :, None] + np.arange(length)) % count
    means = difference[index.reshape(DRAWS, -1)[:, :count]].mean(axis=1)
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
