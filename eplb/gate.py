"""Whether a better placement is worth moving to: pure figures in, a decision and its reason out.

Two things speak against a move: it costs time, and part of what looks like imbalance is chance,
which ``eplb/noise.py`` estimates. A gain that would lie below it is not one.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from math import inf
from numbers import Real  # numpy's numbers too

from eplb.errors import ConfigError

Curve = tuple[tuple[float, float], ...]

# Microseconds of one expert of 7168 x 4096 in a grouped GEMM of 16 in BF16 on an H200, by its
# tokens: flat while the weights are what is read, then in proportion to tokens. Measured with
# torch 2.11's grouped_mm on 2026-11-20; the times of 1 to 256 tokens, 263 to 348 us for all 16
# without order, are taken as one flat stretch.
GROUPED_GEMM_H200: Curve = ((1.0, 20.4), (256.0, 20.8), (512.0, 40.5), (1024.0, 80.1))


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
    min_share_gain: float = 0.01  # the same for shares, of a layer and of all
    node_traffic: float = 0.0  # imbalance that counts like all tokens crossing nodes; 0: no matter
    tokens_of_node: tuple[float, ...] = ()  # part that starts on each; (): by live ranks
    seconds_per_expert: float = 0.0  # serving time lost for each expert that one rank receives
    seconds_per_window: float = 1.0  # serving time of a window, bound by the busiest rank
    horizon_windows: float = 100.0  # windows for which a placement is expected to serve
    far_moves: float = 1.1  # near moves that one from another node counts as in the search
    curve: Curve = GROUPED_GEMM_H200  # (tokens of a replica in a step, time): objective "time"

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, Real) and not float(value) >= 0:
                raise ConfigError(f"cost: {name} is {value}, expected 0 or more")
        if any(not 0 <= part < inf for part in self.tokens_of_node):
            raise ConfigError(
                f"cost: tokens_of_node is {self.tokens_of_node}, expected finite parts, 0 or more"
            )
        tokens, times = zip(*self.curve, strict=True) if len(self.curve) > 1 else ((), ())
        rises = all(one < two < inf for one, two in pairwise(tokens))
        if not tokens or not rises or tokens[0] <= 0 or not all(0 < one < inf for one in times):
            raise ConfigError(
                f"cost: curve is {self.curve}, expected two points or more, tokens above 0 and "
                "rising, times above 0"
            )
        if any(two < one for one, two in pairwise(times)):
            raise ConfigError(f"cost: curve is {self.curve}, expected times that never fall")


@dataclass(frozen=True)
class Outlook:
    """What a plan promises: the figures that the gate decides on."""

    before: float  # mean imbalance over layers, on the history
    after: float  # the same under the planned placement
    noise: float  # imbalance that chance alone makes of one window
    num_moves: int
    busiest_moves: int  # experts that the busiest receiving rank gets
    of: str = "imbalance"  # what the figures are, in words


def decide(outlook: Outlook, cost: CostModel) -> tuple[Decision, str]:
    """Move, take new shares alone (an outlook without moves) or keep, and the reason in words.

    The gain is counted down to the noise floor only: what lies below it will not be seen again.
    """
    floor = 1.0 + outlook.noise
    reachable = max(outlook.after, floor)
    gain = (outlook.before - reachable) / outlook.before
    change = f"{outlook.of} {outlook.before:.3f} -> {outlook.after:.3f}"
    if outlook.before <= floor:
        return Decision.KEEP, f"{change}, within the sampling noise of a window ({floor:.3f})"
    if outlook.num_moves == 0 and outlook.before <= outlook.after:
        return Decision.KEEP, f"the plan is the current placement, {change}"
    least = cost.min_gain if outlook.num_moves else cost.min_share_gain
    if gain < least:
        counted = f" down to the sampling noise ({floor:.3f})" if outlook.after < floor else ""
        return Decision.KEEP, f"{change}: gain {gain:.1%}{counted} < {least:.1%}"
    if outlook.num_moves == 0:
        return Decision.RESPLIT, f"{change}: gain {gain:.1%} by new shares alone"
    lost = outlook.busiest_moves * cost.seconds_per_expert
    saved = gain * cost.seconds_per_window * cost.horizon_windows
    if lost > saved:
        return Decision.KEEP, f"{change}: moving costs {lost:.3g} s, saves {saved:.3g} s"
    return Decision.MOVE, f"{change}: gain {gain:.1%} for {outlook.num_moves} moves"
