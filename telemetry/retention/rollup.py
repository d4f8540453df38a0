"""Roll-ups: what is kept of windows when their samples are forgotten.

A roll-up is the load of one run and phase over a stretch of wall-clock time. Retention makes
roll-ups of a minute from samples, and roll-ups of an hour from those of a minute.

Shapes:  L MoE layers, E experts, R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eplb.core.arrays import freeze, owned
from eplb.core.load import Phase

MINUTE = 60
HOUR = 3600


@dataclass(frozen=True, eq=False)
class Rollup:
    """Tokens of all ranks from ``start`` for ``seconds``, by the ranks' clocks."""

    run: str
    phase: Phase
    seconds: int  # MINUTE or HOUR
    start: float  # seconds since the epoch, a multiple of ``seconds``
    first_step: int
    last_step: int  # inclusive
    num_samples: int
    generations: frozenset[int]  # that served; of a half-swapped migration, its base
    ranks: frozenset[int]  # those that sent samples
    tokens: NDArray[np.int64]  # [L, E] received by each expert, over all its replicas
    received: NDArray[np.int64]  # [L, R] received by each rank

    def __post_init__(self) -> None:
        freeze(self, tokens=owned(self.tokens, np.int64), received=owned(self.received, np.int64))
