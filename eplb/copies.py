"""The change that alters how many replicas an expert has, compiled: a slot takes another expert.

The replica that the slot held goes, so its other replicas get busier; the replicas of the new
expert get less busy. Where a replica costs time of its own (small batches), a slot may also be
emptied.

Shapes:  T windows, E experts, S slots, R ranks.
"""

from __future__ import annotations

import numpy as np

from eplb.changes import FREE, Change, Outline, Search, may_leave
from eplb.jit import jit
from eplb.kernels import Demand, Ranks
from eplb.layer import Layer, replica_time


@jit
def best_copy(search: Search, bound: Outline, score: float) -> tuple[float, Change]:
    """The best new replica above ``score``: of an expert of the hot rank, or in place of one."""
    layer, ranks, hot = search.layer, search.ranks, bound.hot
    best = (-1, -1, -1, -1)
    slow = ranks.slowness[hot]
    everyone = np.arange(len(layer.replicas))
    is_linear = len(search.demand.curve_tokens) == 0
    on_hot = everyone[layer.holds[hot] & (bound.relief * slow > score * FREE)]
    for rank in range(len(ranks.zone)):
        if rank != hot and (len(on_hot) == 0 or bound.gap[rank] <= 0):
            continue
        least = bound.least[rank]
        first, slow_there = ranks.first_slot[rank], ranks.slowness[rank]
        for slot in range(first, first + ranks.room[search.number, rank]):
            leaves = layer.held[slot]
            if (leaves < 0 and rank == hot) or (leaves >= 0 and layer.replicas[leaves] < 2):
                continue
            if search.is_bound and leaves >= 0 and not may_leave(search, leaves, rank, -1):
                continue
            gone = bound.each[leaves] if leaves >= 0 else 0.0
            # Written out here: a call would take longer than what it does.
            heavier, nearest, most = 0.0, -1, np.inf
            if leaves >= 0:
                replicas = layer.replicas[leaves]
                if is_linear:
                    heavier = bound.each[leaves] / (replicas - 1)
                else:
                    heavier = _heavier(layer, search.demand, bound, leaves)
                for other in layer.holders[leaves, :replicas]:
                    left = bound.gap[other] - heavier * ranks.slowness[other]
                    if other not in (rank, hot) and left < most:
                        nearest, most = other, left
            on_both = leaves >= 0 and rank != hot and layer.holds[hot, leaves]
            added = heavier * slow if on_both else 0.0
            # The hot rank must get lighter, and this one stay lighter than that one was.
            slack = bound.gap[rank] + gone * slow_there
            candidates = everyone if rank == hot else on_hot
            if nearest >= 0 and most <= score * least:
                # Nothing helps but what relieves that holder as well.
                candidates = layer.held[ranks.first_slot[nearest] : ranks.first_slot[nearest + 1]]
            for candidate in candidates:
                expert = int(candidate)
                if expert < 0 or not (rank == hot or layer.holds[hot, expert]):
                    continue
                gain = slack - (bound.each[expert] - bound.relief[expert]) * slow_there
                if rank != hot:
                    gain = min(gain, bound.relief[expert] * slow - added)
                # One that the new replica relieves too gets less heavy than that.
                if nearest >= 0 and not layer.holds[nearest, expert]:
                    gain = min(gain, most)
                if gain <= score * least or layer.holds[rank, expert]:
                    continue
                weight = least
                if search.thrifty:
                    weight = max(search.fee[rank, expert], least)
                if gain <= score * weight or layer.zone_of_expert[expert] != ranks.zone[rank]:
                    continue
                gain = _copy_gain(
                    search.layer, search.demand, ranks, bound, rank, leaves, expert, score * weight
                )
                if gain > score * weight:
                    score = gain / weight
                    best = (slot, expert, -1, -1)
    return score, best


@jit
def _heavier(layer: Layer, demand: Demand, bound: Outline, leaves: int) -> float:
    """What each other replica of ``leaves`` takes on when one goes."""
    heavier = 0.0
    for window in bound.windows[: bound.num_hot]:
        then = replica_time(layer, demand, leaves, window, layer.replicas[leaves] - 1)
        heavier += layer.counts[window] * (then - layer.each[leaves, window])
    return heavier


@jit
def best_drop(search: Search, bound: Outline, score: float) -> tuple[float, Change]:
    """The best slot of the hot rank to empty, above ``score``: that moves nothing."""
    layer, ranks, hot = search.layer, search.ranks, bound.hot
    best = (-1, -1, -1, -1)
    for slot in range(ranks.first_slot[hot], ranks.first_slot[hot + 1]):
        leaves = layer.held[slot]
        if leaves < 0 or layer.replicas[leaves] < 2:
            continue
        if search.is_bound and not may_leave(search, leaves, hot, -1):
            continue
        gain = _copy_gain(layer, search.demand, ranks, bound, hot, leaves, -1, score)
        if gain > score:
            score = gain
            best = (slot, -1, -1, -1)
    return score, best


@jit
def _copy_gain(
    layer: Layer,
    demand: Demand,
    ranks: Ranks,
    bound: Outline,
    rank: int,
    leaves: int,
    expert: int,
    needed: float,
) -> float:
    """Sum over windows of how much the busiest time falls when ``expert`` replaces ``leaves``."""
    hot, gain = bound.hot, 0.0
    for place in range(len(bound.windows)):
        window = bound.windows[place]
        if place >= bound.num_hot and gain <= needed:
            return gain
        share = lighter = gone = heavier = 0.0
        if expert >= 0:
            share = replica_time(layer, demand, expert, window, layer.replicas[expert] + 1)
            lighter = layer.each[expert, window] - share
        if leaves >= 0:
            gone = layer.each[leaves, window]
            heavier = replica_time(layer, demand, leaves, window, layer.replicas[leaves] - 1) - gone
        worst = layer.time[rank, window] + (share - gone) * ranks.slowness[rank]
        if rank != hot:
            at = layer.time[hot, window]
            if expert >= 0 and layer.holds[hot, expert]:
                at -= lighter * ranks.slowness[hot]
            if leaves >= 0 and layer.holds[hot, leaves]:
                at += heavier * ranks.slowness[hot]
            worst = max(worst, at)
        if leaves >= 0:
            for other in layer.holders[leaves, : layer.replicas[leaves]]:
                if other not in (rank, hot):
                    less = lighter if expert >= 0 and layer.holds[other, expert] else 0.0
                    at = layer.time[other, window] + (heavier - less) * ranks.slowness[other]
                    worst = max(worst, at)
        if place >= bound.num_hot:
            # Here another rank is the busiest: it stays so unless it is relieved too.
            for other in layer.top[window]:
                if other < 0 or other in (hot, rank):
                    continue
                less = lighter if expert >= 0 and layer.holds[other, expert] else 0.0
                worst = max(worst, layer.time[other, window] - less * ranks.slowness[other])
                if less == 0.0:
                    break
        gain += layer.counts[window] * (layer.time[layer.top[window, 0], window] - worst)
    return gain
