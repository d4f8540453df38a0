"""What neighbouring windows differ by when nothing changes, and how far chance takes that.

The evidence G of two windows is a sum over all layers and experts. All layers see the same tokens,
and a mix of few domains varies in few directions, so the parts of that sum rise and fall together:
it scatters far more than independent parts would, while its mean is the same. How far is learnt
twice from the windows, and the larger answer counts: from the scatter of G over the pairs, and from
the products of their differences. Differences of pairs that share no window are independent draws,
so the square of their product has the mean that half the variance of G has; T windows give T**2 / 2
such products, where they give T values of G.

    counts of T windows -> Pairs -> noise_of -> limit: what G passes with a given chance

Shapes:  T windows, P = T - 1 pairs of neighbours, L MoE layers, E experts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

# Neighbouring pairs share a window, so that T - 2 of them tell as much as this many times fewer.
PAIRS_PER_FACT = 1.5
MOST_CHANGES = 4  # one pair in so many may be a change

Counts = NDArray[np.int64] | NDArray[np.float64]


@dataclass(frozen=True)
class Noise:
    """What G of two neighbouring windows is when nothing changes."""

    mean: float
    freedom: float  # effective degrees of freedom: what its scatter tells
    facts: float  # independent pairs that this was learnt from


@dataclass(frozen=True, eq=False)
class Pairs:
    """Neighbouring windows and how they differ."""

    index: NDArray[np.int64]  # [P] of the first window of each
    evidence: NDArray[np.float64]  # [P] G
    product: NDArray[np.float64]  # [P, P] of their differences, in units of independent draws
    freedom: float  # mean of G if all parts were independent draws

    def only(self, kept: NDArray[np.intp]) -> Pairs:
        """These pairs, in their order."""
        kept = np.sort(kept)
        product = self.product[np.ix_(kept, kept)]
        return Pairs(self.index[kept], self.evidence[kept], product, self.freedom)


def pairs_of(tokens: NDArray[np.int64]) -> Pairs:
    """Compare each window [T, L, E] with the next."""
    evidence = evidence_of(tokens[:-1], tokens[1:]).sum(axis=1)
    used = (tokens.sum(axis=0) > 0).sum(axis=1)  # [L]; an expert that is never used varies never
    difference = _differences(tokens)
    freedom = float(np.maximum(used - 1, 0).sum())
    return Pairs(np.arange(len(evidence)), evidence, difference @ difference.T, freedom)


def evidence_of(first: Counts, second: Counts) -> NDArray[np.float64]:
    """[..., L] log-likelihood ratio G of two profiles against one, of counts [..., L, E]."""
    apart = x_log_x(first) + x_log_x(second) - x_log_x(first + second)
    a, b = first.sum(axis=-1), second.sum(axis=-1)
    found: NDArray[np.float64] = 2 * (apart.sum(axis=-1) - x_log_x(a) - x_log_x(b) + x_log_x(a + b))
    return found


def without_changes(pairs: Pairs, chance: float) -> Pairs:
    """Leave out pairs that are changes themselves: they would hide all others among noise.

    As many as still stand out from the rest, up to a fourth; taken together, because two changes
    would excuse one another (Rosner's generalised test for outliers, 1983).
    """
    order = np.argsort(pairs.evidence, kind="stable")
    for num_out in range(len(order) // MOST_CHANGES, 0, -1):
        rest = pairs.only(order[:-num_out])
        if pairs.evidence[order[-num_out]] > limit(noise_of(rest), chance):
            return rest
    return pairs


def noise_of(pairs: Pairs) -> Noise:
    """Learn from pairs that hold no change; never less noise than independent draws have."""
    mean = max(float(pairs.evidence.mean()), pairs.freedom)
    variance = 2 * mean**2 / pairs.freedom
    if len(pairs.index) > 1:
        variance = max(variance, float(pairs.evidence.var(ddof=1)))
    is_apart = np.abs(pairs.index[:, None] - pairs.index) > 1
    if is_apart.any():
        variance = max(variance, 2 * float(np.square(pairs.product[is_apart]).mean()))
    # Satterthwaite's match of a scaled chi-square.
    return Noise(mean, 2 * mean**2 / variance, len(pairs.index) / PAIRS_PER_FACT)


def limit(noise: Noise, chance: float) -> float:
    """What G of one pair passes with that chance: the quantile of a scaled F distribution.

    Source: Paulson's approximation (1942), built on Wilson and Hilferty's cube root.
    """
    z = NormalDist().inv_cdf(1 - chance)
    a, b = 2 / (9 * noise.freedom), 2 / (9 * noise.freedom * noise.facts)
    square, linear = (1 - b) ** 2 - z * z * b, (1 - a) * (1 - b)
    if square <= 0:  # so little is known of the noise that nothing can be told from it
        return math.inf
    root = (linear + math.sqrt(linear**2 - square * ((1 - a) ** 2 - z * z * a))) / square
    return noise.mean * root**3


def x_log_x(values: Counts) -> NDArray[np.float64]:
    """0 where a value is 0."""
    logarithm: NDArray[np.float64] = np.log(np.where(values > 0, values, 1.0))
    return np.multiply(values, logarithm, dtype=np.float64)


def _differences(tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """[P, L * E] neighbours' shares subtracted, over what independent draws make of that.

    The squares of a row sum to Pearson's statistic, which G is nearly equal to.
    """
    total = tokens.sum(axis=2, keepdims=True).astype(np.float64)
    share = tokens / np.maximum(total, 1.0)
    first, second = total[:-1], total[1:]
    pooled = (tokens[:-1] + tokens[1:]) / np.maximum(first + second, 1.0)
    variance = pooled * (1 / np.maximum(first, 1.0) + 1 / np.maximum(second, 1.0))
    is_counted = (variance > 0) & (first > 0) & (second > 0)
    scaled = (share[:-1] - share[1:]) / np.sqrt(np.where(is_counted, variance, 1.0))
    return np.where(is_counted, scaled, 0.0).reshape(len(scaled), -1)
