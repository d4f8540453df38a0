"""What the next window will be: each way on numbers small enough to check, and the choice."""

from __future__ import annotations

import numpy as np
import pytest

from eplb.core.load import LoadHistory
from eplb.core.topology import Topology
from eplb.errors import ConfigError, HistoryError
from telemetry.forecast.backtest import choose_forecaster
from telemetry.forecast.domains import learn_domains
from telemetry.forecast.forecasters import (
    DayProfile,
    DomainMix,
    Ewma,
    Forecaster,
    LastWindow,
    Mean,
    SinceChange,
    candidates,
)

TWO_RANKS = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=3)
# Two domains of two layers by four experts.
DOMAINS = np.array([[[7, 1, 1, 1], [1, 7, 1, 1]], [[1, 1, 1, 7], [1, 1, 7, 1]]]) / 10


def load(*windows: list[int]) -> LoadHistory:
    """One layer."""
    return LoadHistory(np.array(windows)[:, None])


def drawn(mixes: list[float], tokens: int, seed: int = 0) -> LoadHistory:
    """Windows in which the first domain has the shares ``mixes``."""
    rng = np.random.default_rng(seed)
    profiles = [mix * DOMAINS[0] + (1 - mix) * DOMAINS[1] for mix in mixes]
    return LoadHistory(np.array([rng.multinomial(tokens, profile) for profile in profiles]))


DAYS = load(*[[90, 10], [10, 90], [50, 50]] * 3)
TWO_DAYS = load([50, 50], [80, 20], [50, 50], [80, 20], [20, 80])


@pytest.mark.parametrize(
    ("forecaster", "history", "share"),
    [
        (LastWindow(), load([9, 1], [60, 40]), 0.6),
        (Mean(2), load([0, 9], [800, 200], [6, 4]), 0.7),
        (Ewma(1.0), load([10, 0], [0, 10]), 0.3333),
        (Ewma(2.0), load([10, 0], [0, 10], [0, 10]), 0.2265),
        (SinceChange(), load(*[[9000, 1000]] * 6), 0.9),
        (SinceChange(), load(*[[9000, 1000]] * 6, [2000, 8000], [2100, 7900]), 0.205),
        (DayProfile(period=3), DAYS, 0.9),
        (DayProfile(period=3), DAYS.first(7), 0.1),
        # Then from 1:1 to 4:1, four times as much; now 1:4 four times as much is 1:1.
        (DayProfile(2, True, Ewma(0.01)), TWO_DAYS, 0.5),
    ],
)
def test_forecast_of_two_experts(
    forecaster: Forecaster, history: LoadHistory, share: float
) -> None:
    assert forecaster.predict(history)[0] == pytest.approx([share, 1 - share], abs=1e-3)


def test_domains_are_learnt_from_windows_in_which_their_mix_varies() -> None:
    history = drawn(np.random.default_rng(1).random(40).tolist(), tokens=20_000)
    learnt = learn_domains(history, 2, seed=0)
    forecast = DomainMix(learnt).predict(drawn([0.25], 2000, seed=5))

    assert forecast == pytest.approx(0.25 * DOMAINS[0] + 0.75 * DOMAINS[1], abs=0.03)


def test_every_candidate_forecasts_shares_and_has_its_row_losers_too() -> None:
    history = drawn([0.9, 0.1, 0.5, 0.2] * 8, tokens=20_000)
    by_tokens = choose_forecaster(history, period=4)
    by_balance = choose_forecaster(history, topology=TWO_RANKS, period=4)
    named = {row["forecaster"]: row for row in by_balance.rows()}

    assert isinstance(by_tokens.forecaster, DayProfile)
    assert by_balance.forecaster == LastWindow()  # no other balances better
    assert len(named) == len(by_balance.scores) > 8
    assert named["last window"]["skill_tokens"] == named["last window"]["skill_balance"] == 0.0
    idle = LoadHistory(np.zeros((32, 2, 4), dtype=np.int64))
    for forecaster in candidates(idle, period=4):
        assert forecaster.predict(idle).sum(axis=1) == pytest.approx([1.0, 1.0]), forecaster.name


def test_load_that_forecasts_cannot_use_is_refused() -> None:
    with pytest.raises(HistoryError, match=r"3 windows .*more than 3"):
        DayProfile(3).predict(load([1, 1], [1, 1], [1, 1]))
    with pytest.raises(HistoryError, match=r"\(2, 4\)"):
        DomainMix(DOMAINS).predict(load([1, 1]))
    with pytest.raises(HistoryError, match="12 windows"):
        choose_forecaster(drawn([0.5] * 12, tokens=100))
    for num_domains in (0, 3):
        with pytest.raises(ConfigError, match=f"{num_domains} domains from 2 windows"):
            learn_domains(load([1, 1], [2, 1]), num_domains, seed=0)
