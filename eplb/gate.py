"""Whether a better placement is worth moving to: pure figures in, a decision and its reason out.

Two things speak against a move: it costs time, and part of what looks like imbalance is chance.
A window of n routed tokens on R ranks is a draw: even under a perfect placement the busiest rank
stands about z sqrt(R / n) above the mean, z being the expected largest of R normal draws.
No placement planned on the past can beat that on the next window, so a gain below it is not one.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from eplb.errors import ConfigError

FEWEST_WINDOWS = 4  # with fewer, one sudden switch would pass for noise


class Decision(Enum):
    """What to do with a plan."""

    MOVE = "MOVE"  # weights move
    RESPLIT = "RESPLIT"  # only shares change
    KEEP = "KEEP"  # the current placement goes on


@dataclass(frozen=True)
class CostModel:
    """What a rebalance must earn.

    The time rule joins in once ``seconds_per_expert`` is measured: the busiest receiving rank's
    moves must cost less than the imbalance saves over ``horizon_windows``.

    Raises:
        ConfigError: a negative figure.
    """

    min_gain: float = 0.03  # relative, of the mean imbalance over layers
    seconds_per_expert: float = 0.0  # serving time lost for each expert that one rank receives
    seconds_per_window: float = 1.0  # serving time of a window, bound by the busiest rank
    horizon_windows: float = 100.0  # windows for which a placement is expected to serve

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value >= 0:
                raise ConfigError(f"cost: {name} is {value}, expected 0 or more")


@dataclass(frozen=True)
class Outlook:
    """What a plan promises: the figures that the gate decides on."""

    before: float  # mean imbalance over layers, on the history
    after: float  # the same under the planned placement
    noise: float  # imbalance that chance alone makes of one window
    num_moves: int
    busiest_moves: int  # experts that the busiest receiving rank gets


def window_noise(load: NDArray[np.float64], tokens_per_window: float) -> float:
    """Imbalance above 1 that no placement planned on the past can avoid in one window.

    The larger of ``sampling_noise`` and what the windows show: requests differ, so real load
    fluctuates by more than independent tokens would. Half the squared difference of neighbouring
    windows measures that; their median leaves out slow drift, and a sudden switch as well, which
    is what a plan must answer to.

    Args:
        load: [T, L, R] of live ranks under one placement, in units of a fair rank's load.
        tokens_per_window: tokens times experts per token, of one layer.
    """
    num_windows, _, num_ranks = load.shape
    by_chance = sampling_noise(tokens_per_window, num_ranks)
    if num_windows < FEWEST_WINDOWS or num_ranks < 2:
        return by_chance
    variance = np.square(np.diff(load, axis=0)).mean(axis=2) / 2  # [T - 1, L]
    spread = num_ranks / (num_ranks - 1)  # as in sampling_noise: ranks share one total
    deviation = np.sqrt(np.median(variance, axis=0) * spread)  # [L]
    return max(by_chance, float(deviation.mean()) * _largest_of(num_ranks))


def sampling_noise(tokens_per_window: float, num_ranks: int) -> float:
    """Imbalance above 1 that chance makes of one layer's window under perfect placement.

    Source: multinomial draw, checked against the batches of DeepSeek-V2-Lite (top-6, 8 ranks):
    32 tokens 1.29 (measured 1.26 to 1.31), 512 tokens 1.07 (measured 1.06 to 1.08).
    """
    if num_ranks < 2 or tokens_per_window <= 0:
        return 0.0
    # A rank deviates by sqrt((R - 1) / n); since ranks share one total, what one gains the others
    # lose, which spreads them by another sqrt(R / (R - 1)).
    deviation: float = (num_ranks / tokens_per_window) ** 0.5
    return _largest_of(num_ranks) * deviation


def _largest_of(num_ranks: int) -> float:
    """Blom's approximation of the expected largest of so many standard normal draws."""
    return NormalDist().inv_cdf((num_ranks - 0.375) / (num_ranks + 0.25))


def decide(outlook: Outlook, cost: CostModel) -> tuple[Decision, str]:
    """Move or keep, and the reason in words.

    The gain is counted down to the noise floor only: what lies below it will not be seen again.
    """
    floor = 1.0 + outlook.noise
    reachable = max(outlook.after, floor)
    gain = (outlook.before - reachable) / outlook.before
    change = f"imbalance {outlook.before:.3f} -> {outlook.after:.3f}"
    if outlook.num_moves == 0 and outlook.before <= outlook.after:
        return Decision.KEEP, f"no move improves on imbalance {outlook.before:.3f}"
    if outlook.before <= floor:
        return Decision.KEEP, f"{change}, within the sampling noise of a window ({floor:.3f})"
    if gain < cost.min_gain:
        counted = f" down to the sampling noise ({floor:.3f})" if outlook.after < floor else ""
        return Decision.KEEP, f"{change}: gain {gain:.1%}{counted} < {cost.min_gain:.1%}"
    lost = outlook.busiest_moves * cost.seconds_per_expert
    saved = gain * cost.seconds_per_window * cost.horizon_windows
    if lost > saved:
        return Decision.KEEP, f"{change}: moving costs {lost:.3g} s, saves {saved:.3g} s"
    return Decision.MOVE, f"{change}: gain {gain:.1%} for {outlook.num_moves} moves"
