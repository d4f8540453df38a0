"""Whether a better placement is worth moving to: pure figures in, a decision and its reason out.

Two things speak against a move: it costs time, and part of what looks like imbalance is chance,
which ``eplb/noise.py`` estimates. A gain that would lie below it is not one.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from eplb.errors import ConfigError


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


def decide(outlook: Outlook, cost: CostModel) -> tuple[Decision, str]:
    """Move or keep, and the reason in words.

    The gain is counted down to the noise floor only: what lies below it will not be seen again.
    """
    floor = 1.0 + outlook.noise
    reachable = max(outlook.after, floor)
    gain = (outlook.before - reachable) / outlook.before
    change = f"imbalance {outlook.before:.3f} -> {outlook.after:.3f}"
    if outlook.before <= floor:
        return Decision.KEEP, f"{change}, within the sampling noise of a window ({floor:.3f})"
    if outlook.num_moves == 0 and outlook.before <= outlook.after:
        return Decision.KEEP, f"the plan is the current placement, {change}"
    if gain < cost.min_gain:
        counted = f" down to the sampling noise ({floor:.3f})" if outlook.after < floor else ""
        return Decision.KEEP, f"{change}: gain {gain:.1%}{counted} < {cost.min_gain:.1%}"
    lost = outlook.busiest_moves * cost.seconds_per_expert
    saved = gain * cost.seconds_per_window * cost.horizon_windows
    if lost > saved:
        return Decision.KEEP, f"{change}: moving costs {lost:.3g} s, saves {saved:.3g} s"
    return Decision.MOVE, f"{change}: gain {gain:.1%} for {outlook.num_moves} moves"
