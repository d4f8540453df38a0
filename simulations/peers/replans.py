"""Greedy planning as in engines: after every window, on one load that represents the past.

Engines differ in what that load is: the last window alone (SGLang's recorder starts anew after each
plan), the sum of a sliding window (vLLM, TensorRT-LLM), or a moving average (omni-infer, 0.6 of it
the past).

Shapes:  T windows, L MoE layers, E experts.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from eplb.core.load import LoadHistory, as_history
from eplb.core.placement import Placement
from eplb.core.problem import Problem
from eplb.policies.table import greedy_policy

KEPT = 0.6  # of the moving average when a window comes


def greedy_on_last(problem: Problem) -> Placement:
    """Greedy on the latest window."""
    return _greedy_on(problem, problem.history.latest(1))


def greedy_on_sum(problem: Problem) -> Placement:
    """Greedy on all windows of the history added up."""
    return greedy_policy(problem)


def greedy_on_average(problem: Problem) -> Placement:
    """Greedy on a moving average of the windows, each by the part of its tokens."""
    return _greedy_on(problem, as_history(moving_average(problem.history)[None]))


def moving_average(history: LoadHistory) -> NDArray[np.float64]:
    """[L, E] tokens of a window, the older the less."""
    weight = (1 - KEPT) * KEPT ** np.arange(history.num_windows)[::-1]
    weight[0] /= 1 - KEPT  # the average begins with the first window
    average: NDArray[np.float64] = np.tensordot(weight, history.tokens, axes=1)
    return average


def _greedy_on(problem: Problem, history: LoadHistory) -> Placement:
    return greedy_policy(replace(problem, history=history))
