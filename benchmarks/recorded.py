"""Recorded routing of real models: where it lies, and its windows.

Traces lie where EPLB_DATA points, or at ../shared/data beside the repository.

Shapes:  T windows, L MoE layers, E experts, K experts of a token.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

DATA = Path(os.environ.get("EPLB_DATA", Path(__file__).parents[2] / "shared" / "data"))

Tokens = NDArray[np.int64]


def windows(ids: Tokens, tokens: int, num_experts: int) -> Tokens:
    """[T, L, E] counts of whole windows of ids [L, tokens, K]."""
    num_layers, num_tokens, top_k = ids.shape
    num_windows = num_tokens // tokens
    cut = ids[:, : num_windows * tokens].reshape(num_layers, num_windows, tokens * top_k)
    place = np.arange(num_layers)[:, None, None] * num_windows + np.arange(num_windows)[:, None]
    flat = np.bincount(
        (place * num_experts + cut).ravel(), minlength=num_layers * num_windows * num_experts
    )
    counts: Tokens = flat.reshape(num_layers, num_windows, num_experts).swapaxes(0, 1)
    return np.ascontiguousarray(counts)
