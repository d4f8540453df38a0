"""The score of a layer, compiled: the mean over its windows, and the mean over the worst of them.

In each window the busiest rank's time counts, which is the imbalance. The worst windows have extra
weight in the score, so that a plan neither ignores peaks nor is fitted to one of them.

Shapes:  T windows, R ranks.
"""

from __future__ import annotations

import numpy as np

from eplb.core.jit import jit
from eplb.search.layer import Layer


@jit
def measure(layer: Layer) -> float:
    """Find the busiest ranks, weigh the windows, and return the score."""
    times, top, counts, weight = layer.time, layer.top, layer.counts, layer.weight
    for window in range(len(weight)):
        first, second, third = -1.0, -1.0, -1.0
        at_first, at_second, at_third = -1, -1, -1
        for rank in range(len(times)):
            time = times[rank, window]
            if time > first:
                third, second, first = second, first, time
                at_third, at_second, at_first = at_second, at_first, rank
            elif time > second:
                third, second = second, time
                at_third, at_second = at_second, rank
            elif time > third:
                third, at_third = time, rank
        top[window, 0], top[window, 1], top[window, 2] = at_first, at_second, at_third
        counts[window] = weight[window] * (1.0 - layer.tail)
    if layer.tail > 0:
        _count_worst(layer)
    score = 0.0
    for window in range(len(weight)):
        score += counts[window] * times[top[window, 0], window]
    return score


@jit
def _count_worst(layer: Layer) -> None:
    """Add the tail's part of the score to the weights of the worst windows."""
    times, top, weight = layer.time, layer.top, layer.weight
    left, share = layer.tail_size, layer.tail / max(layer.tail_size, 1e-12)
    counted = np.zeros(len(weight), dtype=np.bool_)
    while left > 1e-12:
        worst, most = -1, -1.0
        for window in range(len(weight)):
            time = times[top[window, 0], window]
            if not counted[window] and time > most:
                worst, most = window, time
        if worst < 0:
            return
        counted[worst] = True
        taken = min(left, weight[worst])
        layer.counts[worst] += share * taken
        left -= taken
