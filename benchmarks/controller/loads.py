"""Loads of benchmarks of the controller: drawn with a seed, from popularities that drift or change.

Shapes:  T windows, L MoE layers, E experts.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

SKEW = 0.8  # of the logarithm of popularity


def drawn(
    random: np.random.Generator, shares: NDArray[np.float64], tokens: int
) -> NDArray[np.int64]:
    """[L, E] tokens of a window."""
    return np.stack([random.multinomial(tokens, row) for row in shares])


def drifting(
    seed: int,
    num_windows: int,
    num_layers: int,
    num_experts: int,
    *,
    tokens: int,
    half_life: float = 60.0,
    jump_every: int = 0,
) -> NDArray[np.int64]:
    """[T, L, E] windows whose popularity wanders, and jumps now and then.

    Args:
        tokens: routed in each layer of a window.
        half_life: windows after which half of the logarithm of popularity is another one.
        jump_every: windows from one sudden change to the next; 0: there is none.
    """
    random = np.random.default_rng(seed)
    kept = 0.5 ** (1.0 / half_life)
    shape = num_layers, num_experts
    log_weight = random.standard_normal(shape)
    windows = []
    for window in range(num_windows):
        if jump_every and window and window % jump_every == 0:
            log_weight = random.standard_normal(shape)
        weight = np.exp(SKEW * log_weight)
        windows.append(drawn(random, weight / weight.sum(axis=1, keepdims=True), tokens))
        log_weight = kept * log_weight + np.sqrt(1 - kept**2) * random.standard_normal(shape)
    return np.stack(windows)
