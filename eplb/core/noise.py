"""Imbalance by chance, which no placement planned on the past avoids in the next window.

A window of n routed tokens on R ranks is a random sample: even under a perfect placement the
busiest rank is about z sqrt(R / n) above the mean, where z is the expected maximum of R normal
samples. Requests differ, so real windows fluctuate by more; this is estimated from several windows.

Shapes:  T windows, L MoE layers, R ranks.
"""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

FEWEST_WINDOWS = 4  # with fewer, one sudden change would count as noise


def fluctuation(load: NDArray[np.float64]) -> NDArray[np.float64]:
    """[L] imbalance above 1 by fluctuation between windows; 0 with fewer than FEWEST_WINDOWS.

    Half the squared difference of neighbouring windows is their variance without slow drift; the
    median over neighbours also excludes a sudden change, which a plan must follow.

    Args:
        load: [T, L, R] under one placement, in units of the mean rank load.
    """
    num_windows, num_layers, num_ranks = load.shape
    if num_windows < FEWEST_WINDOWS or num_ranks < 2:
        return np.zeros(num_layers)
    variance = np.square(np.diff(load, axis=0)).mean(axis=2) / 2  # [T - 1, L]
    spread = num_ranks / (num_ranks - 1)  # as in sampling_noise: ranks share one total
    deviation: NDArray[np.float64] = np.sqrt(np.median(variance, axis=0) * spread)
    return deviation * _largest_of(num_ranks)


def sampling_noise(tokens_per_window: float, num_ranks: int) -> float:
    """Imbalance above 1 of one layer's window if tokens were independent samples.

    Args:
        tokens_per_window: tokens times experts per token, of one layer.
        num_ranks: ranks that are alive.

    Source: multinomial draw, checked against the batches of DeepSeek-V2-Lite (top-6, 8 ranks):
    32 tokens 1.29 (measured 1.26 to 1.31), 512 tokens 1.07 (measured 1.06 to 1.08).
    """
    if num_ranks < 2 or tokens_per_window <= 0:
        return 0.0
    # The load of a rank deviates by sqrt((R - 1) / n). Loads have a fixed sum, so they are
    # negatively correlated, which adds a factor of sqrt(R / (R - 1)).
    deviation: float = (num_ranks / tokens_per_window) ** 0.5
    return _largest_of(num_ranks) * deviation


def sampling_noises(routed: NDArray[np.number], num_ranks: int) -> NDArray[np.float64]:
    """[L] ``sampling_noise`` of layers with so many routed tokens [L]."""
    return np.array([sampling_noise(float(each), num_ranks) for each in routed])


def _largest_of(num_ranks: int) -> float:
    """Blom's approximation of the expected maximum of so many standard normal samples."""
    return NormalDist().inv_cdf((num_ranks - 0.375) / (num_ranks + 0.25))
