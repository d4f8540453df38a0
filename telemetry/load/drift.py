"""Drift of the load: distances between windows, corrected for noise.

Two counts of the same routing differ by chance. With G = 2 (n1 + n2) times their Jensen-Shannon
divergence in nats, each weighed by its tokens, G is the log-likelihood ratio of "two profiles"
against "one", and chance alone makes it E - 1 per layer if tokens are independent draws. They are
not: a window holds whole requests, and all layers see the same tokens. So the floor is measured
too, on neighbouring windows, and is never taken to be less than that of independent draws; see
``telemetry/load/chance.py``.

    windows -> G of neighbours -> noise     windows before | after a split -> G     G over noise?

Shapes:  T windows, L MoE layers, E experts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eplb.core.arrays import freeze, owned
from eplb.core.load import LoadHistory
from eplb.core.noise import FEWEST_WINDOWS
from eplb.errors import ConfigError, HistoryError
from telemetry.load.chance import (
    Counts,
    evidence_of,
    limit_at,
    pairs_of,
    x_log_x,
)

FALSE_ALARM = 0.01  # of one look at a history in which nothing changed
LOOK_BACK = 32  # windows; longer ones cost time and would find slow drift, not its end


@dataclass(frozen=True, eq=False)
class Drift:
    """Jensen-Shannon distance between two loads, 0 to 1, after the noise is taken off."""

    per_layer: NDArray[np.float64]  # [L]
    overall: float  # of all layers together: one layer alone hardly moves it
    noise: float  # the distance that chance alone would show

    def __post_init__(self) -> None:
        freeze(self, per_layer=owned(self.per_layer, np.float64))


@dataclass(frozen=True)
class Change:
    """A sudden change of load that is too large to be chance."""

    index: int  # of the first window of the new load
    strength: float  # evidence over what chance passes once in 1 / false_alarm looks; above 1


def drift(planned_on: LoadHistory, latest: LoadHistory) -> Drift:
    """Return how far the latest windows are from those that a placement was planned on.

    Args:
        planned_on: the windows that the plan looked at.
        latest: of the same model; four or more also show how much windows fluctuate.

    Raises:
        HistoryError: histories of different shapes.
    """
    if planned_on.tokens.shape[1:] != latest.tokens.shape[1:]:
        raise HistoryError(
            f"load of {latest.tokens.shape[1:]} layers and experts cannot be compared with "
            f"load of {planned_on.tokens.shape[1:]}, expected the same"
        )
    then, now = planned_on.total(), latest.total()
    is_counted = (then.sum(axis=1) > 0) & (now.sum(axis=1) > 0)  # an idle layer has no profile
    floor = _floor(then, now) * max(dispersion(planned_on), dispersion(latest))
    divergence = js_divergence(then, now)
    above = np.where(is_counted, divergence - floor, 0.0)
    overall = above[is_counted].mean() if is_counted.any() else 0.0
    noise = floor[is_counted].mean() if is_counted.any() else 0.0
    return Drift(
        np.sqrt(np.maximum(above, 0.0)),
        math.sqrt(max(float(overall), 0.0)),
        min(1.0, math.sqrt(float(noise))),
    )


def js_divergence(first: Counts, second: Counts) -> NDArray[np.float64]:
    """[..., L] Jensen-Shannon divergence in bits, 0 to 1, of the shares of two loads [..., L, E].

    Whichever holds more tokens, both weigh the same. A layer that is idle in one of them is 0.
    """
    a, b = shares_of(first), shares_of(second)
    entropy = x_log_x(a) + x_log_x(b) - 2 * x_log_x((a + b) / 2)
    found: NDArray[np.float64] = entropy.sum(axis=-1) / (2 * math.log(2))
    is_idle = (first.sum(axis=-1) == 0) | (second.sum(axis=-1) == 0)
    return np.where(is_idle, 0.0, np.maximum(found, 0.0))


def shares_of(tokens: Counts) -> NDArray[np.float64]:
    """[..., E] each layer's tokens over their sum; an idle layer's are all alike."""
    total = tokens.sum(axis=-1, keepdims=True)
    shares = np.full(tokens.shape, 1 / tokens.shape[-1])
    np.divide(tokens, total, out=shares, where=total > 0)
    return shares


def dispersion(history: LoadHistory) -> float:
    """How many times more neighbouring windows differ than independent draws would; 1 or more.

    The median over pairs, so that one sudden change does not count as noise. With fewer than four
    windows there is no estimate, and it is 1.
    """
    if history.num_windows < FEWEST_WINDOWS:
        return 1.0
    pairs = pairs_of(history.tokens)
    return max(1.0, float(np.median(pairs.evidence)) / pairs.freedom) if pairs.freedom else 1.0


def last_change(history: LoadHistory, *, false_alarm: float = FALSE_ALARM) -> Change | None:
    """Find the latest sudden change of load, or None.

    The split with the most evidence is tried first, then what follows it, until nothing more is
    found. Fewer than four windows show no change, because a switch would pass for noise.

    Args:
        history: of which the latest LOOK_BACK windows are looked at.
        false_alarm: the chance that a history without any change shows one.

    Raises:
        ConfigError: a chance that is not between 0 and 1.
    """
    if not 0 < false_alarm < 1:
        raise ConfigError(f"false_alarm is {false_alarm}, expected more than 0 and less than 1")
    first = max(0, history.num_windows - LOOK_BACK)
    found: Change | None = None
    while history.num_windows - first >= FEWEST_WINDOWS:
        split = _strongest_split(history.tokens[first:], false_alarm)
        if split is None:
            break
        found = Change(first + split.index, split.strength)
        first = found.index
    return found


def windows_since_change(history: LoadHistory, *, false_alarm: float = FALSE_ALARM) -> int:
    """Return the number of latest windows since the latest sudden change; all where there is none.

    Args:
        history: as ``last_change``.
        false_alarm: as ``last_change``.
    """
    change = last_change(history, false_alarm=false_alarm)
    return history.num_windows - (change.index if change is not None else 0)


def planning_history(
    history: LoadHistory, *, last: int, false_alarm: float = FALSE_ALARM
) -> LoadHistory:
    """Return the windows that a plan should look at: the latest ones, none from before a change.

    Args:
        history: more windows than ``last``, so that a change can be distinguished from noise.
        last: windows that a plan looks at when nothing changes.
    """
    return history.latest(min(last, windows_since_change(history, false_alarm=false_alarm)))


def _strongest_split(tokens: NDArray[np.int64], false_alarm: float) -> Change | None:
    if not tokens.any():
        return None
    before = tokens.cumsum(axis=0, dtype=np.float64)
    evidence = evidence_of(before[:-1], before[-1] - before[:-1]).sum(axis=1)  # [T - 1]
    split = int(evidence.argmax()) + 1  # chance alone would make all splits alike
    strength = float(evidence[split - 1]) / limit_at(tokens, split, false_alarm / len(evidence))
    return Change(split, strength) if strength > 1 else None


def _floor(first: NDArray[np.int64], second: NDArray[np.int64]) -> NDArray[np.float64]:
    """[L] Jensen-Shannon divergence in bits that independent draws of one profile would show."""
    used = ((first + second) > 0).sum(axis=1)
    inverse = 1 / np.maximum(first.sum(axis=1), 1) + 1 / np.maximum(second.sum(axis=1), 1)
    floor: NDArray[np.float64] = np.maximum(used - 1, 0) * inverse / (8 * math.log(2))
    return floor
