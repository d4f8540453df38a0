"""Whether one way to serve is better than another, from the differences of their windows.

A difference of windows has an interval by a bootstrap over blocks of windows: neighbouring windows
resemble each other, and an interval from single ones would be too narrow. Blocks of about the
square root of their number are drawn, as if the windows stood in a circle. Few blocks underestimate
the spread, so the interval is widened as Student's distribution is against the normal one, with one
degree of freedom less than blocks.

Shapes:  T windows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

FEWEST = 8  # judged windows, below which nothing is concluded
DRAWS = 2000
LEVEL = 0.95

Verdict = Literal["better", "worse", "no difference", "cannot tell", "too few windows"]


@dataclass(frozen=True)
class Difference:
    """Mean difference over windows, of one way to serve less the other: above 0 is a gain."""

    mean: float
    interval: tuple[float, float] | None  # None: too few windows
    num_windows: int
    verdict: Verdict

    @property
    def sentence(self) -> str:
        """The verdict with what it stands on."""
        if self.interval is None:
            return f"too few windows to tell: {self.num_windows}, expected {FEWEST} or more"
        low, high = self.interval
        found = f"{self.mean:+.4g}, {LEVEL:.0%} interval {low:+.4g} to {high:+.4g}"
        if self.verdict == "cannot tell":
            return f"cannot tell after {self.num_windows} windows ({found}){self._more()}"
        return f"{self.verdict} ({found}, {self.num_windows} windows)"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        low, high = self.interval or (None, None)
        figures = {"mean": self.mean, "low": low, "high": high, "windows": self.num_windows}
        return figures | {"verdict": self.verdict, "sentence": self.sentence}

    def _more(self) -> str:
        """How many windows would tell if the mean stays, the interval narrowing as their root."""
        if self.interval is None or not self.mean:
            return ""
        half = (self.interval[1] - self.interval[0]) / 2
        needed = int(np.ceil(min(self.num_windows * (half / self.mean) ** 2, 1e9)))
        return f"; about {max(needed, self.num_windows + 1):,} would tell"


def difference_of(series: NDArray[np.float64], seed: int, *, least: float) -> Difference:
    """Judge differences [T] of windows; smaller ones than ``least`` are none."""
    count = len(series)
    mean = float(series.mean()) if count else 0.0
    if count < FEWEST:
        return Difference(mean, None, count, "too few windows")
    low, high = _interval(series, seed)
    verdict: Verdict = "cannot tell"
    if max(abs(low), abs(high)) < least:
        verdict = "no difference"
    elif low > 0 or high < 0:
        verdict = "better" if low > 0 else "worse"
    return Difference(mean, (low, high), count, verdict)


def _interval(series: NDArray[np.float64], seed: int) -> tuple[float, float]:
    from scipy.special import ndtri, stdtrit  # late: every start of the command line pays for it

    count = len(series)
    length = round(count**0.5)
    blocks = count / length
    begin = np.random.default_rng(seed).integers(0, count, size=(DRAWS, -(-count // length)))
    index = (begin[:, :, None] + np.arange(length)) % count
    means = series[index.reshape(DRAWS, -1)[:, :count]].mean(axis=1)
    tail = (1 - LEVEL) / 2
    freedom = max(blocks - 1, 1.0)
    wider = stdtrit(freedom, 1 - tail) / ndtri(1 - tail) * np.sqrt(blocks / freedom)
    mean = series.mean()
    low, high = mean + wider * (np.quantile(means, [tail, 1 - tail]) - mean)
    return float(low), float(high)
