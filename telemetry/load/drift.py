"""Drift of the load: distances between windows, corrected for noise.

Two counts of the same routing differ by chance. With G = 2 (n1 + n2) times their Jensen-Shannon
divergence in nats, each weighed by its tokens, G is the log-likelihood ratio of "two profiles"
against "one", and chance alone makes it E - 1 per layer if tokens are independent draws. They are
not: a window holds whole requests, and all layers see the same tokens. So the floor is measured
too, on neighbouring windows, and is never taken to be less than that of independent draws.

    windows -> G of neighbours -> noise     windows before | after a split -> G     G over noise?

The evidence G of two windows is a sum over all layers and experts. A mix of few domains varies in
few directions, so the parts of that sum rise and fall together: it scatters far more than
independent parts would, while its mean is the same. How far is learnt twice from the windows, and
the larger answer counts: from the scatter of G over the pairs, and from the products of their
differences. Differences of pairs that share no window are independent draws, so the square of their
product has the mean that half the variance of G has; T windows give T**2 / 2 such products, where
they give T values of G.

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

from eplb.core.arrays import freeze, owned
from eplb.core.load import FEWEST_WINDOWS, LoadHistory, blocks
from eplb.errors import HistoryError

# Neighbouring pairs share a window, so that T - 2 of them tell as much as this many times fewer.
PAIRS_PER_FACT = 1.5
MOST_CHANGES = 4  # one pair in so many may be a change
# Windows taken together; 4 as well found one switch of recorded text 2 windows later.
SPANS = (1, 2)
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


FALSE_ALARM = 0.01  # of one look at a history in which nothing changed
LOOK_BACK = 32  # windows; longer ones cost time and would find slow drift, not its end


@dataclass(frozen=True, eq=False)
class Drift:
    """Jensen-Shannon distance between two loads, 0 to 1, after the noise is taken off."""

    per_layer: NDArray[np.float64]  # [L]
    overall: float  # of all layers together: one layer alone hardly moves it
    noise: float  # the distance that chance alone would show

    def __post_init__(self) -> None:
        freeze(self, per_layer=owned(self.per_layer, np.float64))


@dataclass(frozen=True)
class LoadChange:
    """A sudden change of load that is too large to be chance."""

    index: int  # of the first window of the new load
    strength: float  # evidence over what chance passes once in 1 / false_alarm looks; above 1


def drift(planned_on: LoadHistory, latest: LoadHistory) -> Drift:
    """Return how far the latest windows are from those that a placement was planned on.

    Args:
        planned_on: the windows that the plan looked at.
        latest: of the same model; four or more also show how much windows fluctuate.

    Raises:
        HistoryError: histories of different shapes.
    """
    if planned_on.tokens.shape[1:] != latest.tokens.shape[1:]:
        raise HistoryError(
            f"load of {latest.tokens.shape[1:]} layers and experts cannot be compared with "
            f"load of {planned_on.tokens.shape[1:]}, expected the same"
        )
    then, now = planned_on.total(), latest.total()
    is_counted = (then.sum(axis=1) > 0) & (now.sum(axis=1) > 0)  # an idle layer has no profile
    floor = _floor(then, now) * max(dispersion(planned_on), dispersion(latest))
    divergence = js_divergence(then, now)
    above = np.where(is_counted, divergence - floor, 0.0)
    overall = above[is_counted].mean() if is_counted.any() else 0.0
    noise = floor[is_counted].mean() if is_counted.any() else 0.0
    return Drift(
        np.sqrt(np.maximum(above, 0.0)),
        math.sqrt(max(float(overall), 0.0)),
        min(1.0, math.sqrt(float(noise))),
    )


def js_divergence(first: Counts, second: Counts) -> NDArray[np.float64]:
    """[..., L] Jensen-Shannon divergence in bits, 0 to 1, of the shares of two loads [..., L, E].

    Whichever holds more tokens, both weigh the same. A layer that is idle in one of them is 0.
    """
    a, b = shares_of(first), shares_of(second)
    entropy = x_log_x(a) + x_log_x(b) - 2 * x_log_x((a + b) / 2)
    found: NDArray[np.float64] = entropy.sum(axis=-1) / (2 * math.log(2))
    is_idle = (first.sum(axis=-1) == 0) | (second.sum(axis=-1) == 0)
    return np.where(is_idle, 0.0, np.maximum(found, 0.0))


def shares_of(tokens: Counts) -> NDArray[np.float64]:
    """[..., E] each layer's tokens over their sum; an idle layer's are all alike."""
    total = tokens.sum(axis=-1, keepdims=True)
    shares = np.full(tokens.shape, 1 / tokens.shape[-1])
    np.divide(tokens, total, out=shares, where=total > 0)
    return shares


def dispersion(history: LoadHistory) -> float:
    """How many times more neighbouring windows differ than independent draws would; 1 or more.

    The median over pairs, so that one sudden change does not count as noise. With fewer than four
    windows there is no estimate, and it is 1. Windows with few tokens are taken together.
    """
    starts = blocks(history.tokens.sum(axis=(1, 2)))
    if len(starts) < FEWEST_WINDOWS:
        return 1.0
    pairs = pairs_of(np.add.reduceat(history.tokens, starts, axis=0))
    return max(1.0, float(np.median(pairs.evidence)) / pairs.freedom) if pairs.freedom else 1.0


def last_change(history: LoadHistory, *, false_alarm: float = FALSE_ALARM) -> LoadChange | None:
    """Find the latest sudden change of load, or None.

    The split with the most evidence is tried first, then what follows it, until nothing more is
    found. Fewer than four windows show no change, because a switch would pass for noise. Windows
    with few tokens are taken together with the next: they scatter by less than the noise of the
    others, which is mostly that of whole requests, so with them any busy window would be a change.

    Args:
        history: of which the latest LOOK_BACK windows are looked at.
        false_alarm: the chance that a history without any change shows one.
    """
    latest = history.tokens[-LOOK_BACK:]
    starts = blocks(latest.sum(axis=(1, 2)))
    tokens = np.add.reduceat(latest, starts, axis=0)  # [B, L, E]
    first, strength = 0, 0.0
    while len(tokens) - first >= FEWEST_WINDOWS:
        split = _strongest_split(tokens[first:], false_alarm)
        if split is None:
            break
        first, strength = first + split.index, split.strength
    if not first:
        return None
    return LoadChange(history.num_windows - len(latest) + int(starts[first]), strength)


def windows_since_change(history: LoadHistory, *, false_alarm: float = FALSE_ALARM) -> int:
    """Return the number of latest windows since the latest sudden change; all where there is none.

    Args:
        history: as ``last_change``.
        false_alarm: as ``last_change``.
    """
    change = last_change(history, false_alarm=false_alarm)
    return history.num_windows - (change.index if change is not None else 0)


def planning_history(history: LoadHistory, *, last: int) -> LoadHistory:
    """Return the windows that a plan should look at: the latest ones, none from before a change.

    Where a change led back to a load that was seen before, both loads stay: see ``remembered``.

    Args:
        history: more windows than ``last``, so that a change can be distinguished from noise.
        last: windows that a plan looks at when nothing changes.
    """
    num_new = windows_since_change(history)
    earlier = remembered(history, num_new, last=last)
    return history.of_windows(np.append(earlier, np.arange(-min(last, num_new), 0)))


def remembered(history: LoadHistory, num_new: int, *, last: int) -> NDArray[np.intp]:
    """Return the windows before a sudden change that a plan should look at, oldest first.

    None, unless some of them have the load that the change led to: then loads come and go, and the
    next change may lead back again. Both are planned for, each with half of the windows at most.

    Args:
        history: as many windows as a load is remembered for.
        num_new: the latest ones, after the change.
        last: windows that a plan looks at.
    """
    num_old, spare = history.num_windows - num_new, last - num_new
    if num_old == 0 or spare <= 0:
        return np.zeros(0, dtype=np.intp)
    tokens = history.tokens
    apart = js_divergence(tokens[:num_old], tokens[num_old:].sum(axis=0)).mean(axis=1)
    between = np.median(apart[-FEWEST_WINDOWS:])  # the two loads
    alike = np.median(js_divergence(tokens[:-1], tokens[1:]).mean(axis=1)) * (1 + 1 / num_new) / 2
    is_back = apart < (alike + between) / 2
    if not is_back.any():
        return np.zeros(0, dtype=np.intp)
    back = np.flatnonzero(is_back)[::-1][: max(last // 2 - num_new, 0)]
    others = np.flatnonzero(~is_back)[::-1][: spare - len(back)]
    return np.sort(np.concatenate([back, others]))


def _strongest_split(tokens: NDArray[np.int64], false_alarm: float) -> LoadChange | None:
    if not tokens.any():
        return None
    before = tokens.cumsum(axis=0, dtype=np.float64)
    evidence = evidence_of(before[:-1], before[-1] - before[:-1]).sum(axis=1)  # [T - 1]
    split = int(evidence.argmax()) + 1  # chance alone would make all splits alike
    strength = float(evidence[split - 1]) / limit_at(tokens, split, false_alarm / len(evidence))
    return LoadChange(split, strength) if strength > 1 else None


def _floor(first: NDArray[np.int64], second: NDArray[np.int64]) -> NDArray[np.float64]:
    """[L] Jensen-Shannon divergence in bits that independent draws of one profile would show."""
    used = ((first + second) > 0).sum(axis=1)
    inverse = 1 / np.maximum(first.sum(axis=1), 1) + 1 / np.maximum(second.sum(axis=1), 1)
    floor: NDArray[np.float64] = np.maximum(used - 1, 0) * inverse / (8 * math.log(2))
    return floor
