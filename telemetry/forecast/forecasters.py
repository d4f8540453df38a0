"""Forecasters: the load of the next window, from the windows so far.

A forecaster is a frozen value with one pure method: windows in, shares of the next window out. It
keeps nothing between calls, so it may be tried on any stretch of history; what it has learnt is
part of it. None is best everywhere: ``telemetry/forecast/backtest.py`` measures each on the
deployment's own history and picks one.

Shapes:  T windows, L MoE layers, E experts, D domains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from eplb.core.arrays import freeze, owned
from eplb.core.load import LoadHistory
from eplb.errors import ConfigError, HistoryError
from telemetry.drift.detector import LOOK_BACK, last_change, shares_of
from telemetry.forecast.domains import learn_domains, mix_of

Shares = NDArray[np.float64]  # [L, E], each layer sums to 1
TINY = 1e-12  # keeps a ratio of two shares finite


class Forecaster(Protocol):
    """Forecasts the next window of one phase."""

    @property
    def name(self) -> str:
        """Its name in tables."""

    def predict(self, history: LoadHistory) -> Shares:
        """[L, E] shares of the window that follows ``history``.

        Raises:
            HistoryError: the history is too short for it.
        """


@dataclass(frozen=True)
class LastWindow:
    """Persistence: the next window is as the last. What every other forecaster must beat."""

    name: str = "last window"

    def predict(self, history: LoadHistory) -> Shares:
        """The last window's shares."""
        return shares_of(history.tokens[-1])


@dataclass(frozen=True)
class Mean:
    """The mean of the latest windows, all weighing alike."""

    windows: int

    @property
    def name(self) -> str:
        """With its length."""
        return f"mean of {self.windows}"

    def predict(self, history: LoadHistory) -> Shares:
        """The mean of as many windows as there are, up to ``windows``."""
        return _mean_of(shares_of(history.tokens[-self.windows :]))


@dataclass(frozen=True)
class Ewma:
    """A mean in which a window weighs half as much as one ``half_life`` windows younger."""

    half_life: float

    def __post_init__(self) -> None:
        if not self.half_life > 0:
            raise ConfigError(f"half_life is {self.half_life}, expected more than 0 windows")

    @property
    def name(self) -> str:
        """With its half-life."""
        return f"ewma, half-life {self.half_life:g}"

    def predict(self, history: LoadHistory) -> Shares:
        """The weighted mean over all windows that still weigh anything."""
        kept = history.tokens[-max(1, int(20 * self.half_life)) :]  # older ones weigh under 1e-6
        age = np.arange(len(kept))[::-1]
        weight = 0.5 ** (age / self.half_life)
        found: Shares = np.einsum("t,tle->le", weight / weight.sum(), shares_of(kept))
        return found


@dataclass(frozen=True)
class SinceChange:
    """The mean of the windows since the last sudden change of load."""

    most: int = LOOK_BACK
    name: str = "mean since a change"

    def predict(self, history: LoadHistory) -> Shares:
        """The mean of at most ``most`` windows, none from before the change."""
        recent = history.latest(self.most)
        change = last_change(recent)
        return _mean_of(shares_of(recent.tokens[change.index if change is not None else 0 :]))


@dataclass(frozen=True)
class DayProfile:
    """The load of earlier days at the same time.

    With ``is_relative`` it takes from those days only how the load changed from this hour to the
    next, and applies that to ``level``'s forecast, so that a slow change of the mix is followed.
    """

    period: int  # windows in a day
    is_relative: bool = False
    level: Ewma = field(default_factory=lambda: Ewma(1.0))

    def __post_init__(self) -> None:
        if self.period < 1:
            raise ConfigError(f"period is {self.period} windows, expected 1 or more")

    @property
    def name(self) -> str:
        """Of the two kinds."""
        return "day profile, change" if self.is_relative else "day profile"

    def predict(self, history: LoadHistory) -> Shares:
        """The mean of the windows 1, 2, ... days before the next one.

        Raises:
            HistoryError: less than a day of windows.
        """
        most = history.num_windows
        if most <= self.period:
            raise HistoryError(
                f"{most} windows for a day profile, expected more than {self.period}, a whole day"
            )
        following = np.arange(most - self.period, -1, -self.period)
        usual = _mean_of(shares_of(history.tokens[following]))
        if not self.is_relative:
            return usual
        before = following[following > 0] - 1
        usual_now = _mean_of(shares_of(history.tokens[before]))
        usual = _mean_of(shares_of(history.tokens[before + 1]))
        return shares_of(self.level.predict(history) * (usual + TINY) / (usual_now + TINY))


@dataclass(frozen=True, eq=False)
class DomainMix:
    """The mix of learnt domains that the latest windows show: few figures, so little noise."""

    profiles: NDArray[np.float64]  # [D, L, E]
    recent: int = 1  # windows that the mix is fitted to

    def __post_init__(self) -> None:
        freeze(self, profiles=owned(self.profiles, np.float64))

    @property
    def name(self) -> str:
        """With its number of domains."""
        return f"mix of {len(self.profiles)} domains"

    def predict(self, history: LoadHistory) -> Shares:
        """The latest windows, as far as the domains explain them.

        Raises:
            HistoryError: windows of another shape than those it has learnt from.
        """
        if history.tokens.shape[1:] != self.profiles.shape[1:]:
            raise HistoryError(
                f"windows of {history.tokens.shape[1:]} layers and experts, "
                f"expected {self.profiles.shape[1:]}, the shape of the domains"
            )
        weights = mix_of(self.profiles, history.latest(self.recent).total())
        mixed: Shares = np.einsum("d,dle->le", weights, self.profiles)
        return mixed


def candidates(
    training: LoadHistory, *, period: int | None = None, seed: int = 0
) -> Sequence[Forecaster]:
    """Return all forecasters worth trying, persistence first; those that learn have learnt.

    Args:
        training: windows that none of them will be judged on.
        period: windows in a day, if the history is long enough to show days.
        seed: of the learnt domains.
    """
    found: list[Forecaster] = [LastWindow(), Mean(4), Mean(16), SinceChange()]
    found += [Ewma(half_life) for half_life in (0.5, 1.0, 4.0)]
    if period is not None:
        found += [DayProfile(period), DayProfile(period, is_relative=True)]
    found += [
        DomainMix(learn_domains(training, num_domains, seed=seed))
        for num_domains in (4, 16)
        if 2 * num_domains <= training.num_windows
    ]
    return found


def _mean_of(shares: NDArray[np.float64]) -> Shares:
    mean: Shares = shares.mean(axis=0)
    return mean
