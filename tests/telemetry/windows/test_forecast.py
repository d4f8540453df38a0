"""What the next window will be: each way on numbers small enough to check, and the choice."""

from __future__ import annotations

import numpy as np
import pytest

from eplb.core.load import LoadHistory
from eplb.core.topology import Topology
from eplb.errors import ConfigError, HistoryError
from telemetry.forecast.backtest import Choice, choose_forecaster
from telemetry.forecast.domains import learn_domains, mix_of
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


def said(forecaster: Forecaster, history: LoadHistory) -> list[float]:
    forecast: list[float] = forecaster.predict(history)[0].round(6).tolist()
    return forecast


# -- each way to say it


def test_persistence_forecasts_the_last_window() -> None:
    assert said(LastWindow(), load([9, 1], [60, 40])) == [0.6, 0.4]


def test_mean_weighs_windows_alike_however_many_tokens_they_hold() -> None:
    assert said(Mean(2), load([0, 9], [800, 200], [6, 4])) == [0.7, 0.3]


def test_ewma_halves_the_weight_of_a_window_with_its_half_life() -> None:
    assert said(Ewma(1.0), load([10, 0], [0, 10])) == [0.333333, 0.666667]
    assert said(Ewma(2.0), load([10, 0], [0, 10], [0, 10])) == pytest.approx([0.2265, 0.7735], 1e-3)


def test_mean_since_a_change_ignores_earlier_windows() -> None:
    history = load(*[[9000, 1000]] * 6, [2000, 8000], [2100, 7900])

    assert said(SinceChange(), history.first(6)) == [0.9, 0.1]
    assert said(SinceChange(), history) == [0.205, 0.795]


def test_day_profile_gives_the_load_of_earlier_days_at_that_time() -> None:
    three_days = load(*[[90, 10], [10, 90], [50, 50]] * 3)

    assert said(DayProfile(period=3), three_days) == [0.9, 0.1]
    assert said(DayProfile(period=3), three_days.first(7)) == [0.1, 0.9]


def test_relative_day_profile_takes_from_earlier_days_only_the_change() -> None:
    two_days = load([50, 50], [80, 20], [50, 50], [80, 20], [20, 80])
    # Then from 1:1 to 4:1, four times as much; now 1:4 four times as much is 1:1.
    assert said(DayProfile(2, True, Ewma(0.01)), two_days) == pytest.approx([0.5, 0.5], abs=1e-3)


def test_less_than_a_day_is_no_day_profile() -> None:
    with pytest.raises(HistoryError, match="3 windows for a day profile, expected more than 3"):
        DayProfile(3).predict(load([1, 1], [1, 1], [1, 1]))


def test_mix_of_known_domains_is_found_again() -> None:
    tokens = drawn([0.3], tokens=100_000).tokens[0]

    assert mix_of(DOMAINS, tokens) == pytest.approx([0.3, 0.7], abs=0.02)


def test_no_weight_of_a_mix_is_negative_even_outside_the_domains() -> None:
    weights = mix_of(DOMAINS, np.array([[97, 1, 1, 1], [1, 97, 1, 1]]))

    assert weights == pytest.approx([1.0, 0.0], abs=1e-6)
    assert (weights >= 0).all()


def test_domains_are_learnt_from_windows_in_which_their_mix_varies() -> None:
    history = drawn(np.random.default_rng(1).random(40).tolist(), tokens=20_000)
    learnt = learn_domains(history, 2, seed=0)
    forecast = DomainMix(learnt).predict(drawn([0.25], 2000, seed=5))

    assert learnt.sum(axis=2) == pytest.approx(np.ones((2, 2)))
    assert forecast == pytest.approx(0.25 * DOMAINS[0] + 0.75 * DOMAINS[1], abs=0.03)


def test_same_seed_learns_the_same_domains() -> None:
    history = drawn([0.1, 0.5, 0.9, 0.4], tokens=1000)

    assert (learn_domains(history, 2, seed=3) == learn_domains(history, 2, seed=3)).all()


@pytest.mark.parametrize("num_domains", [0, 3])
def test_more_domains_than_windows_are_refused(num_domains: int) -> None:
    with pytest.raises(ConfigError, match=f"{num_domains} domains from 2 windows"):
        learn_domains(load([1, 1], [2, 1]), num_domains, seed=0)


def test_mix_is_not_fitted_to_another_model() -> None:
    with pytest.raises(HistoryError, match=r"expected \(2, 4\), the shape of the domains"):
        DomainMix(DOMAINS).predict(load([1, 1]))


def test_every_forecast_is_of_shares_even_of_idle_windows() -> None:
    history = LoadHistory(np.zeros((32, 2, 4), dtype=np.int64))

    for forecaster in candidates(history, period=4):
        forecast = forecaster.predict(history)
        assert forecast.sum(axis=1) == pytest.approx([1.0, 1.0]), forecaster.name


# -- the choice


def chosen(history: LoadHistory, **more: int) -> Choice:
    return choose_forecaster(history, topology=TWO_RANKS, **more)


def test_persistence_stays_where_load_walks_and_windows_are_large() -> None:
    walk = 0.5 + 0.4 * np.sin(np.arange(48) / 5)
    choice = chosen(drawn(walk.tolist(), tokens=50_000))

    assert choice.forecaster == LastWindow()
    assert "no other is surely better" in choice.reason


def test_forecaster_picks_a_long_mean_for_steady_load_in_small_windows() -> None:
    choice = choose_forecaster(drawn([0.5] * 64, tokens=60))

    assert choice.forecaster in (Mean(16), Ewma(4.0), SinceChange())
    assert "skill 0." in choice.reason


def test_day_profile_is_picked_where_days_repeat() -> None:
    days = [0.9, 0.1, 0.5, 0.2] * 12
    choice = choose_forecaster(drawn(days, tokens=20_000), period=4)

    assert isinstance(choice.forecaster, DayProfile)


def test_domains_are_picked_where_their_mix_jumps_and_windows_are_small() -> None:
    walk = np.random.default_rng(0).random(16).repeat(4)
    choice = choose_forecaster(drawn(walk.tolist(), tokens=40))

    assert isinstance(choice.forecaster, DomainMix)


def test_every_forecaster_has_its_row_losers_too() -> None:
    choice = chosen(drawn([0.5] * 24, tokens=100))
    rows = choice.rows()
    of_persistence = next(row for row in rows if row["forecaster"] == "last window")

    assert len(rows) == len(choice.scores) == len(candidates(drawn([0.5] * 12, 100)))
    assert [row["skill_balance"] for row in rows] == sorted(
        (row["skill_balance"] for row in rows), reverse=True
    )
    assert of_persistence["skill_tokens"] == of_persistence["skill_balance"] == 0.0
    assert of_persistence["imbalance"] >= 1.0


def test_few_windows_are_not_enough_to_choose_by() -> None:
    with pytest.raises(HistoryError, match="12 windows to choose a forecaster by, expected at le"):
        choose_forecaster(drawn([0.5] * 12, tokens=100))
