"""The weights of a digest's second sum, by the place of a lane in its record.

Weights 1, 2, 3, ... gave two orders of small numbers one digest. These are numbers of 32 bits that
look like chance, alike on a host and in a kernel.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

LANE_BYTES = 4  # a digest is over 32-bit lanes
LANES_AT_ONCE = (
    2**15
)  # summed together: as 64-bit numbers, with their weights, they stay in a cache
# Multipliers of ``mixed``, odd, so that different numbers stay different.
MIX_FIRST, MIX_SECOND = 0x9E3779B1, 0x85EBCA77

Number = TypeVar("Number", int, NDArray[np.int64])


def mixed(numbers: Number) -> Number:
    """Spread numbers of 32 bits over 32 bits, each to another one."""
    spread = numbers * MIX_FIRST & 0xFFFFFFFF
    spread = (spread ^ spread >> 15) * MIX_SECOND & 0xFFFFFFFF
    return spread ^ spread >> 13


# The weights of a block's lanes; those of block b are these times ``factor_of(b)``.
LANE_WEIGHTS = mixed(np.arange(1, LANES_AT_ONCE + 1, dtype=np.int64))


def factor_of(block: int) -> int:
    """The factor of a block of LANES_AT_ONCE lanes: odd, so that no bit of its sum is lost."""
    return mixed(block + 1) | 1
