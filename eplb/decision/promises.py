"""What earlier plans promised and what they gave: how far the next promise may be believed.

A plan promises a gain on the windows that it was fitted to. Once it has served, the windows that
came show what it gave: each is judged under the placement that served before and under the plan's.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

import numpy as np
from numpy.typing import NDArray

from eplb.core.placement import Placement
from eplb.core.topology import Topology
from eplb.errors import ConfigError
from eplb.measure.balance import imbalance

PRIOR = 0.5  # of a promise that is kept, as long as nothing is on record
PRIOR_GAIN = 0.1  # imbalance promised that the prior counts as
FORGOTTEN = 0.9  # of the record that each further plan leaves
LEAST, MOST = 0.1, 1.0
ENOUGH = 4  # windows that tell what a plan gave


@dataclass(frozen=True)
class Record:
    """Gains in imbalance of earlier plans, summed, the latest counting most.

    Raises:
        ConfigError: a sum that is not finite, or a promise below 0.
    """

    promised: float = 0.0
    given: float = 0.0

    def __post_init__(self) -> None:
        if not (isfinite(self.given) and isfinite(self.promised) and self.promised >= 0):
            raise ConfigError(
                f"record: promised {self.promised} and given {self.given}, expected finite sums, "
                "promised 0 or more"
            )

    @property
    def kept(self) -> float:
        """Part of a promise that is kept, 0.1 to 1."""
        part = (PRIOR * PRIOR_GAIN + self.given) / (PRIOR_GAIN + self.promised)
        return min(max(part, LEAST), MOST)

    def with_plan(self, promised: float, given: float) -> Record:
        """The record once one more plan has been judged."""
        return Record(FORGOTTEN * self.promised + promised, FORGOTTEN * self.given + given)


@dataclass(frozen=True, eq=False)
class Promise:
    """A plan that was taken, until enough windows have come to judge it."""

    base: Placement
    target: Placement
    gain: float  # imbalance, on the windows that it was fitted to

    def given(self, tokens: NDArray[np.int64], topology: Topology) -> float:
        """Less imbalance on ``tokens`` [T, L, E] than what served before would have had."""
        before = imbalance(tokens, self.base, topology).mean()
        return float(before - imbalance(tokens, self.target, topology).mean())
