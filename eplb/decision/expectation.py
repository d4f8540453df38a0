"""Estimates the gain of a plan on windows that it was not fitted to, before it is published.

Two sources. The record of earlier plans gives the part of promised gains that was realised.
Cross-fitting gives it for this plan: the windows that the serving placement was not fitted to are
divided into runs; for each run the search plans on the other windows, at the same price, and is
judged on the run. Windows next to a run share its requests: a gain on these ends with them, so they
are not planned on. Both are combined by their variances. A later judgement compares the realised
gain with the estimate; the decision uses less than the estimate, by a multiple of its deviation.

Shapes:  T windows, L MoE layers, U unseen windows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from eplb.core.cost import Objective
from eplb.core.dispatch import DispatchRule
from eplb.core.jit import BoolArray, FloatArray
from eplb.core.placement import Placement
from eplb.core.problem import Problem
from eplb.decision.score import measured
from eplb.policies.incremental import incremental

ENOUGH = 4  # windows on which a plan is judged
FEWEST = 3  # windows for cross-fitting
FOLDS = 4
GAP = 2  # windows on either side of a run that the search does not see, where enough remain
SAMPLED = 16  # layers, at most, that are planned again
PRIOR_DOUBT = 0.5  # standard deviation of the record's estimate, relative to it
CAUTION = 0.5  # standard deviations that are subtracted at first
LOOKS = 16  # windows of one load after which one more is: each look may find gains by chance
MOST_CAUTION = 3.0


@dataclass(frozen=True, eq=False)
class Promise:
    """A plan that was published, until there are enough windows to judge it."""

    base: Placement
    target: Placement
    gain: float  # its score's, on the windows that it was fitted to
    objective: Objective = "tokens"


class Expected(NamedTuple):
    """Part of a promised gain that is expected on future windows."""

    part: float  # the estimate
    sure: float  # the estimate minus a multiple of its deviation: the part that a decision uses
    is_judged: bool  # whether unseen windows are part of the estimate


def expected_part(problem: Problem, promised: FloatArray, changed: BoolArray) -> Expected:
    """Part of the promised gain that is expected, and the part that a decision uses.

    Args:
        problem: with a current placement, which can serve.
        promised: [L] gain of the score on the problem's windows.
        changed: [L] layers that the plan changes.
    """
    gain = float(promised.mean())
    unseen = problem.num_unseen
    if gain <= 0 or not unseen:
        return Expected(0.0, 0.0, False)
    part = problem.record.kept
    doubt = PRIOR_DOUBT * part
    seen = _crossfitted(problem, changed) if problem.complete.sum() >= FEWEST else np.zeros(0)
    if len(seen) < 2:
        # The record alone does not change with more windows, so repeated planning finds nothing by
        # chance, and a long-serving placement must not block every gain.
        return Expected(part, part - CAUTION * doubt, False)
    # With few runs their deviation is uncertain, so it is increased.
    spread = seen.std(ddof=1) / len(seen) ** 0.5 * (len(seen) + 1) / (len(seen) - 1)
    scale = float(changed.mean()) / gain
    evidence, error = float(seen.mean()) * scale, max(float(spread) * scale, 1e-9)
    weight = doubt**2 / (error**2 + doubt**2)
    part, doubt = part + weight * (evidence - part), doubt * (1 - weight) ** 0.5
    # A load that has not changed for long is looked at as often, whatever moved meanwhile.
    looks = max(problem.unseen or 0, int(problem.complete.sum()))
    return Expected(part, part - min(CAUTION + looks / LOOKS, MOST_CAUTION) * doubt, True)


def _crossfitted(problem: Problem, changed: BoolArray) -> FloatArray:
    """Gain on each run of unseen windows by plans without that run, mean over changed layers."""
    current = problem.current
    assert current is not None, "there is a placement to compare with"
    kept = np.flatnonzero(problem.complete)
    layers = np.flatnonzero(changed)
    layers = layers[np.linspace(0, len(layers) - 1, min(SAMPLED, len(layers))).astype(int)]
    serving = current.of_layers(layers)
    unseen = np.arange(len(kept))[-problem.num_unseen :]
    gains = []
    for run in np.array_split(unseen, min(FOLDS, len(unseen))):
        near = np.arange(max(run[0] - GAP, 0), min(run[-1] + GAP + 1, len(kept)))
        hidden = near if len(near) <= len(kept) // 2 + 1 else run
        others = problem.history.of_windows(np.delete(kept, hidden))
        part = replace(problem, history=others, scenarios=None).of_layers(layers)
        held, _ = incremental(part)
        tested = replace(
            problem,
            history=problem.history.of_windows(kept[run]),
            scenarios=None,
            dispatch=DispatchRule.WEIGHTED,
        ).of_layers(layers)
        promise = Promise(
            serving, Placement(held.astype(np.int32), problem.num_experts), 0.0, problem.objective
        )
        gains.append(realised(tested, promise))
    return np.array(gains)


def realised(problem: Problem, promise: Promise) -> float:
    """Reduction of the promise's score on the problem's windows against the placement before."""
    pair = (promise.base, promise.target)
    before, after = (measured(problem, one, promise.objective).mean() for one in pair)
    return float(before - after)
