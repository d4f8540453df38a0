"""Noise of load windows: the difference of neighbouring windows when nothing changes.

The evidence G of two windows is a sum over all layers and experts. All layers see the same tokens,
and a mix of few domains varies in few directions, so the parts of that sum rise and fall together:
it scatters far more than independent parts would, while its mean is the same. How far is learnt
twice from the windows, and the larger answer counts: from the scatter of G over the pairs, and from
the products of their differences. Differences of pairs that share no window are independent draws,
so the square of their product has the mean that half the variance of G has; T windows give T**2 / 2
such products, where they give T values of G.

Windows that share requests are alike, and windows further apart are not: such a load wanders, and
neighbours alone show too little of it. So neighbouring pairs of windows, taken together, are
looked at as well; chance alone makes no difference between the two. And the limit is raised by the
serial correlation of the windows on either side of the split (``correlation_factor``): a split
compares means of many windows, which scatter as the long-run variance does.

    counts of T windows -> pairs_of -> without_changes -> noise_of -> limit: what G passes by chance
                     `---> correlation_factor -----------------------> x

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
SPANS = (
    1,
    2,
)  # windows taken together; 4 as well found one switch of recorded text 2 windows later
LEAST_PAIRS = 4  # that share no window, needed for a span above 1
# Windows apart up to which serial correlation is summed. Of 3, 4, 5 and 8, 4 made the fewest false
# alarms on 16 recorded requests at once; all found the switches of recorded text at once.
LAGS = 4
MOST_BIAS = 0.8  # of the long-run variance, that short histories hide

Counts = NDArray[np.int64] | NDArray[np.float64]


@dataclass(frozen=True)
class Noise:
    """What G of two neighbouring windows is when nothing changes."""

    mean: float
    freedom: float  # effective degrees of freedom: estimated from its scatter
    facts: float  # independent pairs that this was learnt from


@dataclass(frozen=True, eq=False)
class Pairs:
    """Neighbouring spans of windows and how they differ."""

    span: int  # windows on either side
    index: NDArray[np.int64]  # [P] of the first window of each
    evidence: NDArray[np.float64]  # [P] G
    product: NDArray[np.float64]  # [P, P] of their differences, in units of independent draws
    freedom: float  # mean of G if all parts were independent draws

    def only(self, kept: NDArray[np.intp]) -> Pairs:
        """These pairs, in their order."""
        kept = np.sort(kept)
        product = self.product[np.ix_(kept, kept)]
        return Pairs(self.span, self.index[kept], self.evidence[kept], product, self.freedom)


def pairs_of(tokens: NDArray[np.int64], span: int = 1) -> Pairs:
    """Compare each span of the windows [T, L, E] with the one that follows it."""
    before = np.concatenate([np.zeros_like(tokens[:1]), tokens.cumsum(axis=0)])
    together = before[span:] - before[:-span]
    first, second = together[:-span], together[span:]
    used = (tokens.sum(axis=0) > 0).sum(axis=1)  # [L]; an expert that is never used varies never
    freedom = float(np.maximum(used - 1, 0).sum())
    difference = _differences(first, second)
    evidence = evidence_of(first, second).sum(axis=1)
    return Pairs(span, np.arange(len(evidence)), evidence, difference @ difference.T, freedom)


def limit_at(tokens: NDArray[np.int64], split: int, chance: float) -> float:
    """What the evidence for a change at window ``split`` passes by chance, from other pairs."""
    limits, splits = [], np.array([split])
    for span in SPANS:
        if 2 * span > len(tokens):
            break
        pairs = pairs_of(tokens, span)
        if not pairs.freedom:
            return math.inf
        # Pairs that straddle a change would take it for noise.
        ends = pairs.index[:, None] + 2 * span
        clear = np.flatnonzero(((ends <= splits) | (pairs.index[:, None] >= splits)).all(axis=1))
        if span > 1 and len(clear) < LEAST_PAIRS * span:
            break
        steady = without_changes(pairs.only(clear), chance)
        noise = noise_of(steady)
        limits.append(limit(noise, chance))
        others = np.setdiff1d(pairs.index[clear], steady.index)
        splits = np.concatenate([splits, others + span])
        if span == 1:
            correlated = correlation_factor(tokens, splits, noise.mean)
    return max(limits) * correlated


def correlation_factor(tokens: NDArray[np.int64], splits: NDArray[np.int64], noise: float) -> float:
    """How many times the mean of G of many windows is that of two neighbours; 1 or more.

    Between two runs of windows G has the mean of the long-run variance of a window: its variance
    and twice its covariance with later windows, up to LAGS apart. Both are taken around the mean of
    each stretch between changes, so that no change is part of them; the division corrects for what
    these means take away.

    Args:
        tokens: counts [T, L, E].
        splits: the first window of each stretch but the first.
        noise: mean of G of two neighbouring windows.

    Source: Newey and West (1987), with Bartlett's weights.
    """
    total = tokens.sum(axis=2, keepdims=True)
    pooled = tokens.sum(axis=0) / np.maximum(total.sum(axis=0), 1)  # [L, E]
    share = tokens / np.maximum(total, 1)
    apart = (share - pooled) * np.sqrt(total / np.where(pooled > 0, pooled, 1.0))
    stretches = np.split(apart.reshape(len(tokens), -1), np.unique(splits))
    stretches = [one for one in stretches if len(one) > 1]
    num_windows = sum(len(one) for one in stretches)
    if not num_windows:
        return 1.0
    weight = 1.0 - np.arange(LAGS + 1) / (LAGS + 1)
    weight[1:] *= 2
    found = 0.0
    for stretch in stretches:
        centred = stretch - stretch.mean(axis=0)
        product = centred @ centred.T
        found += sum(w * np.trace(product, offset=lag) for lag, w in enumerate(weight.tolist()))
    hidden = min(MOST_BIAS, float(weight.sum()) * len(stretches) / num_windows)
    return max(1.0, found / num_windows / (1.0 - hidden) / noise)


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
    """Estimate the noise from pairs without a change; never below that of independent draws."""
    mean = max(float(pairs.evidence.mean()), pairs.freedom)
    variance = 2 * mean**2 / pairs.freedom
    if len(pairs.index) > 1:
        variance = max(variance, float(pairs.evidence.var(ddof=1)))
    is_apart = np.abs(pairs.index[:, None] - pairs.index) >= 2 * pairs.span
    if is_apart.any():
        variance = max(variance, 2 * float(np.square(pairs.product[is_apart]).mean()))
    # Satterthwaite's match of a scaled chi-square.
    num_facts = len(pairs.index) / (PAIRS_PER_FACT * pairs.span)
    return Noise(mean, 2 * mean**2 / variance, num_facts)


def limit(noise: Noise, chance: float) -> float:
    """What G of one pair passes with that chance: the quantile of a scaled F distribution.

    Source: Paulson's approximation (1942), built on Wilson and Hilferty's cube root.
    """
    z = NormalDist().inv_cdf(1 - chance)
    a, b = 2 / (9 * noise.freedom), 2 / (9 * noise.freedom * noise.facts)
    square, linear = (1 - b) ** 2 - z * z * b, (1 - a) * (1 - b)
    if square <= 0:  # too little is known of the noise for a decision
        return math.inf
    root = (linear + math.sqrt(linear**2 - square * ((1 - a) ** 2 - z * z * a))) / square
    return noise.mean * root**3


def x_log_x(values: Counts) -> NDArray[np.float64]:
    """0 where a value is 0."""
    logarithm: NDArray[np.float64] = np.log(np.where(values > 0, values, 1.0))
    return np.multiply(values, logarithm, dtype=np.float64)


def _differences(first: NDArray[np.int64], second: NDArray[np.int64]) -> NDArray[np.float64]:
    """[P, L * E] shares of counts [P, L, E] subtracted, over what independent draws make of that.

    The squares of a row sum to Pearson's statistic, which G is nearly equal to.
    """
    a, b = (np.maximum(one.sum(axis=2, keepdims=True), 1) for one in (first, second))
    pooled = (first + second) / (a + b)
    variance = pooled * (1 / a + 1 / b)
    scaled: NDArray[np.float64] = (first / a - second / b) / np.sqrt(
        np.where(variance > 0, variance, 1.0)
    )
    return scaled.reshape(len(scaled), -1)
