"""What the controller asks of the planner: objective, rule, constraints, speeds and a forecast.

All are settings of the deployment. What was asked is recorded with each plan.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eplb.core.constraints import Constraints, room_of
from eplb.core.load import LoadHistory
from eplb.core.problem import Objective
from eplb.core.scenarios import Scenarios
from eplb.core.topology import Topology
from eplb.decision.coverage import Coverage, coverage_of
from eplb.dispatch_rules.rules import DispatchRule
from eplb.errors import ConfigError
from telemetry.forecast.forecasters import Ewma

HALF_LIFE = 4.0  # windows, of the forecast
SHOWN = 32  # uncovered experts that an event lists
SHOWN_TEXT = 4096  # characters of a setting; 320 ranks with speeds of two digits take 2,800


@dataclass(frozen=True)
class PlannerRequest:
    """What a plan is asked for, beside policy, cost and budget.

    Raises:
        ConfigError: a value that no plan can use.
    """

    objective: Objective = "tokens"
    dispatch: str = DispatchRule.WEIGHTED.value  # by which the engine chooses replicas
    min_domains: int = 1  # failure domains of each expert, as far as slots allow
    rank_speed: str = ""  # "rank:speed, ..."; 1 is nominal, and that of all others
    forecast_weight: float = 0.0  # of the forecast beside the past windows; 0: no forecast

    def __post_init__(self) -> None:
        known = [rule.value for rule in DispatchRule]
        if self.dispatch not in known:
            raise ConfigError(f"dispatch is {self.dispatch!r}, expected one of: {', '.join(known)}")
        if self.objective not in ("tokens", "time"):
            raise ConfigError(f"objective is {self.objective!r}, expected one of: tokens, time")
        if self.min_domains < 1:
            raise ConfigError(f"min_domains is {self.min_domains}, expected 1 or more")
        if not 0 <= self.forecast_weight < 1:
            raise ConfigError(
                f"forecast_weight is {self.forecast_weight}, expected 0 or more and below 1"
            )
        speeds_of(self.rank_speed)

    def topology(self, topology: Topology) -> Topology:
        """The topology with the measured speeds.

        Raises:
            ConfigError: a speed of a rank that is not there.
        """
        speeds = speeds_of(self.rank_speed)
        if not speeds:
            return topology
        found: NDArray[np.float64] = topology.rank_speed.copy()
        for rank, speed in speeds.items():
            if rank >= topology.num_ranks:
                raise ConfigError(
                    f"rank_speed names rank {rank}, expected 0..{topology.num_ranks - 1}"
                )
            found[rank] = speed
        return replace(topology, rank_speed=found)

    def coverage(self, past: LoadHistory, topology: Topology, num_groups: int) -> Coverage:
        """Constraints on failure domains that fit, and the experts that they leave out."""
        tokens = past.tokens.sum(axis=0)
        room = room_of(Constraints(), topology, len(tokens))
        return coverage_of(tokens, room, topology, self.min_domains, num_groups)

    def scenarios(self, past: LoadHistory) -> Scenarios | None:
        """The forecast of the next window, or None."""
        if not self.forecast_weight:
            return None
        shares = Ewma(HALF_LIFE).predict(past)  # [L, E]
        tokens = past.tokens.sum(axis=2).mean(axis=0)  # [L]
        windows = (shares * tokens[:, None])[None]
        return Scenarios(windows, np.array([self.forecast_weight]))

    def recorded(self, coverage: Coverage) -> dict[str, Any]:
        """What was asked and what of it does not fit, as details of an event."""
        asked = dict(vars(self))
        if len(self.rank_speed) > SHOWN_TEXT:
            digest = sha256(self.rank_speed.encode()).hexdigest()
            asked["rank_speed"] = f"{len(self.rank_speed)} characters, sha256 {digest}"
        if coverage.uncovered:
            asked["num_uncovered"] = len(coverage.uncovered)
            asked["uncovered"] = [list(one) for one in coverage.uncovered[:SHOWN]]
        if coverage.releases_groups:
            asked["releases_groups"] = True
        return asked


def speeds_of(text: str) -> dict[int, float]:
    """Read "rank:speed, rank:speed".

    Raises:
        ConfigError: something else.
    """
    speeds: dict[int, float] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        rank, _, speed = part.partition(":")
        try:
            number, value = int(rank), float(speed)
        except ValueError:
            number, value = -1, 0.0
        if number < 0 or not 0 < value < float("inf") or number in speeds:
            raise ConfigError(
                f"rank_speed has {part!r}, expected rank:speed for each rank once, such as "
                "'3:0.8, 7:0.9', speeds above 0"
            )
        speeds[number] = value
    return speeds
