"""Backtest of forecasters on the deployment's own history, and the choice of one.

Each forecaster sees the windows before one and is judged on that one, again and again over the
later part of the history; those that learn have learnt on the earlier part. Skill is how much of
persistence's error a forecaster saves: 0 is no better than the last window, 1 is perfect, and below
0 it does harm. Skill is given for the shares, and of what they are for: the balance of a plan made
from the forecast.

Shapes:  T windows, L MoE layers, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eplb.core.load import LoadHistory, as_history
from eplb.core.topology import Topology
from eplb.errors import HistoryError
from eplb.measure.balance import imbalance
from eplb.planner import plan
from telemetry.drift.detector import js_divergence, shares_of
from telemetry.forecast.forecasters import Forecaster, LastWindow, Shares, candidates

FEWEST_JUDGED = 8  # with fewer, the best of ten forecasters is the luckiest
SURE = 2.0  # standard errors by which persistence must be beaten


@dataclass(frozen=True)
class Judge:
    """Plans from a forecast and sees how even that makes the window that came."""

    topology: Topology
    policy: str = "greedy"  # fresh from one load, and fast; how plans differ is not the question

    def excess(self, forecast: Shares, tokens: NDArray[np.int64]) -> float:
        """Imbalance above 1, mean over layers."""
        placement = plan(as_history(forecast), self.topology, policy=self.policy).target
        return float(imbalance(tokens, placement, self.topology).mean()) - 1.0


@dataclass(frozen=True, eq=False)
class Score:
    """One forecaster's errors, window by window."""

    forecaster: Forecaster
    distance: NDArray[np.float64]  # Jensen-Shannon, mean over layers
    moved: NDArray[
        np.float64
    ]  # part of the tokens that went elsewhere than forecast, mean over layers
    excess: NDArray[np.float64]  # imbalance above 1 of the plan; empty without a topology


@dataclass(frozen=True, eq=False)
class Choice:
    """The forecaster to use, and all that was tried."""

    forecaster: Forecaster
    reason: str
    scores: tuple[Score, ...] = field(repr=False)  # persistence first

    def rows(self) -> list[dict[str, Any]]:
        """One JSON-ready row for each forecaster, best first; losers too."""
        rows = [_row(score, self.scores[0]) for score in self.scores]
        by = "skill_balance" if "skill_balance" in rows[0] else "skill_tokens"
        return sorted(rows, key=lambda row: -float(row[by]))


def choose_forecaster(
    history: LoadHistory,
    *,
    topology: Topology | None = None,
    period: int | None = None,
    most: int = 64,
    seed: int = 0,
) -> Choice:
    """Try every forecaster on the later half of the history, and pick the one that does best.

    Persistence stays unless it is beaten by two standard errors over the judged windows.

    Args:
        history: windows of one phase; the earlier half is learnt from.
        topology: judges by the balance of plans; without it, by the tokens that went elsewhere.
        period: windows in a day, to try day profiles too.
        most: windows judged, evenly spaced.
        seed: of what is drawn while learning.

    Raises:
        HistoryError: too few windows to judge on.
    """
    half = history.num_windows // 2
    if history.num_windows - half < FEWEST_JUDGED:
        raise HistoryError(
            f"{history.num_windows} windows to choose a forecaster by, "
            f"expected at least {2 * FEWEST_JUDGED}"
        )
    known_days = period if period is not None and half > period else None
    tried = candidates(history.first(half), period=known_days, seed=seed)
    judge = Judge(topology) if topology is not None else None
    judged = np.unique(np.linspace(half, history.num_windows - 1, most).astype(int))
    scores = back_test(history, tried, judged.tolist(), judge)
    return _chosen(scores)


def back_test(
    history: LoadHistory,
    forecasters: Sequence[Forecaster],
    judged: Sequence[int],
    judge: Judge | None = None,
) -> tuple[Score, ...]:
    """Judge each forecaster on the windows ``judged``, from what came before each of them."""
    assert isinstance(forecasters[0], LastWindow), "skill is measured against persistence"
    return tuple(_score(history, forecaster, judged, judge) for forecaster in forecasters)


def _score(
    history: LoadHistory, forecaster: Forecaster, judged: Sequence[int], judge: Judge | None
) -> Score:
    found: list[tuple[float, float]] = []
    excess: list[float] = []
    for window in judged:
        forecast, came = forecaster.predict(history.first(window)), history.tokens[window]
        distance = np.sqrt(js_divergence(forecast, came))
        moved = np.abs(forecast - shares_of(came)).sum(axis=1) / 2
        found.append((float(distance.mean()), float(moved.mean())))
        if judge is not None:
            excess.append(judge.excess(forecast, came))
    both = np.array(found)
    return Score(forecaster, both[:, 0], both[:, 1], np.array(excess))


def _chosen(scores: tuple[Score, ...]) -> Choice:
    known = scores[0]
    best, lead = known, 0.0
    for score in scores[1:]:
        saved = _error(known) - _error(score)
        is_sure = saved.mean() > SURE * saved.std(ddof=1) / len(saved) ** 0.5
        if is_sure and saved.mean() > lead:
            best, lead = score, float(saved.mean())
    of = "imbalance above 1" if known.excess.size else "misplaced tokens"
    summary = f"{of} {_error(best).mean():.4f} on {len(_error(best))} windows"
    if best is known:
        reason = f"{known.forecaster.name}: {summary}, and no other is surely better"
    else:
        reason = (
            f"{best.forecaster.name}: {summary}, {_error(known).mean():.4f} with the last window: "
            f"skill {_skill(_error(best), _error(known)):.2f}"
        )
    return Choice(best.forecaster, reason, scores)


def _error(score: Score) -> NDArray[np.float64]:
    return score.excess if score.excess.size else score.moved


def _row(score: Score, known: Score) -> dict[str, Any]:
    row: dict[str, Any] = {
        "forecaster": score.forecaster.name,
        "windows": len(score.moved),
        "distance": float(score.distance.mean()),
        "skill_distance": _skill(score.distance, known.distance),
        "misplaced_tokens": float(score.moved.mean()),
        "skill_tokens": _skill(score.moved, known.moved),
    }
    if score.excess.size:
        row["imbalance"] = 1.0 + float(score.excess.mean())
        row["skill_balance"] = _skill(score.excess, known.excess)
    return row


def _skill(error: NDArray[np.float64], of_persistence: NDArray[np.float64]) -> float:
    base = float(of_persistence.mean())
    return 1.0 - float(error.mean()) / base if base > 0 else 0.0
