"""The two sums of a digest on a CPU, compiled: one pass at memory's speed, no interpreter lock.

Imported late, by ``runtime/memory/shared.py``, where numba is installed; its plain sums are the
reference.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from eplb.core.jit import jit


@jit
def lane_sums(lanes: NDArray[np.int32]) -> tuple[int, int]:
    """The sum of ``lanes``, and of lanes times their positions from 1 on, both modulo 2**64."""
    plain = weighted = 0  # 64 bits wide once compiled, so sums wrap
    for index in range(len(lanes)):
        lane = int(lanes[index])
        plain += lane
        weighted += lane * (index + 1)
    return plain, weighted
