"""Promised and realised gains of earlier plans, from which the next gain is estimated.

A plan promises a gain on the windows that it was fitted to. The realised gain is measured on later
windows: each is judged under the placement that served before and under that of the plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from eplb.core.placement import Placement
from eplb.decision.gate import Objective
from eplb.errors import ConfigError

PRIOR = 0.5  # part of a promise that is realised, without a record
PRIOR_GAIN = 0.1  # weight of the prior, as promised imbalance
FORGOTTEN = 0.9  # factor on the record for each further plan
LEAST, MOST = 0.1, 1.0
ENOUGH = 4  # windows on which a plan is judged


@dataclass(frozen=True)
class Record:
    """Gains in imbalance, or time, of earlier plans, summed with decreasing weight.

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
        """Part of a promise that is realised, 0.1 to 1."""
        part = (PRIOR * PRIOR_GAIN + self.given) / (PRIOR_GAIN + self.promised)
        return min(max(part, LEAST), MOST)

    def with_plan(self, promised: float, given: float) -> Record:
        """The record with one more judged plan."""
        return Record(FORGOTTEN * self.promised + promised, FORGOTTEN * self.given + given)


@dataclass(frozen=True, eq=False)
class Promise:
    """A plan that was published, until there are enough windows to judge it."""

    base: Placement
    target: Placement
    gain: float  # of the score by its objective, on the windows that it was fitted to
    objective: Objective = "tokens"
