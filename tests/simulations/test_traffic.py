"""Generated traffic against figures of recorded routing, and against its own model."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from numpy.typing import NDArray

from eplb.errors import ConfigError
from simulations.workloads import (
    TRAFFIC,
    Traffic,
    drawn,
    mixes,
    profiles_of,
    traffic_stream,
    windows_named,
)


def load_of(name: str, num_windows: int = 4) -> NDArray[np.float64]:
    """[L, E] of the first windows."""
    return np.sum(list(islice(traffic_stream(Traffic(**TRAFFIC[name]), 0), num_windows)), axis=0)  # type: ignore[arg-type]


# Mean over layers of one recorded load: expert max / mean, coefficient of variation, and rank
# imbalance of consecutive experts on eight ranks. gpt-oss and V2-Lite: lowest and highest of their
# domains. GLM-5.2: its first layers, 3.41 at 0.46; a Gamma profile peaks within a quarter of that.
@pytest.mark.parametrize(
    ("name", "peak", "spread", "eight_ranks"),
    [
        ("gpt-oss", (2.45, 4.75), (0.70, 1.19), (1.45, 1.90)),
        ("v2-lite", (3.5, 5.7), (0.61, 1.17), (1.35, 1.75)),
        ("glm", (2.55, 4.3), (0.42, 0.55), (1.08, 1.20)),
    ],
)
def test_profiles_are_as_skewed_as_recorded_ones(
    name: str,
    peak: tuple[float, float],
    spread: tuple[float, float],
    eight_ranks: tuple[float, float],
) -> None:
    load = load_of(name)
    relative = load / load.mean(axis=1, keepdims=True)
    ranks = relative.reshape(len(load), 8, -1).mean(axis=2)

    assert peak[0] <= np.median(relative.max(axis=1)) <= peak[1]
    assert spread[0] <= np.median(relative.std(axis=1)) <= spread[1]
    assert eight_ranks[0] <= np.median(ranks.max(axis=1)) <= eight_ranks[1]


def test_few_layers_have_a_super_hot_expert() -> None:
    def hottest(hot_layers: float) -> NDArray[np.float64]:
        """[L] part of the tokens that go to the hottest expert."""
        traffic = Traffic(
            1000, decode=0, domains=1, domain_spread=0.0, shape_low=4.6, hot_layers=hot_layers
        )
        (profile,) = profiles_of(traffic, np.random.default_rng(0))
        share: NDArray[np.float64] = profile.max(axis=1) * traffic.top_k
        return share

    assert hottest(0.0).max() < 0.25
    assert 2 <= (hottest(0.03) > 0.25).sum() <= 20
    assert hottest(0.03).max() <= 0.5


@pytest.mark.parametrize(("spread", "low", "high"), [(0.15, 0.95, 1.0), (0.8, 0.4, 0.75)])
def test_domains_are_as_alike_as_recorded_ones(spread: float, low: float, high: float) -> None:
    traffic = Traffic(domain_spread=spread, domains=2)
    one, two = profiles_of(traffic, np.random.default_rng(0))
    cosine = (one * two).sum(axis=1) / np.sqrt((one**2).sum(axis=1) * (two**2).sum(axis=1))

    assert low <= cosine.mean() <= high


@pytest.mark.parametrize("dispersion", [1.0, 4.0, 30.0])
def test_counts_vary_by_their_dispersion(dispersion: float) -> None:
    rng = np.random.default_rng(0)
    profile = rng.dirichlet(np.full(64, 3.0), 1)
    counts = np.array([drawn(profile, 100_000, dispersion, rng)[0] for _ in range(300)])

    multinomial = 100_000 * profile[0] * (1 - profile[0])
    assert (counts.var(axis=0) / multinomial).mean() == pytest.approx(dispersion, rel=0.1)
    assert (counts.sum(axis=1) == 100_000).all()


def test_mix_keeps_its_spread_over_many_days() -> None:
    traffic = Traffic(windows=4000, window_s=600.0, diurnal=0.0, shift_hours=0.0)
    found = np.array([mix for mix, _ in mixes(traffic, np.random.default_rng(0))])

    early, late = found[:1000].std(), found[-1000:].std()
    assert 0.5 < late / early < 2.0


def test_rate_swings_with_the_hour_and_sudden_shifts_come_as_often_as_asked() -> None:
    traffic = Traffic(windows=8640, window_s=10.0, drift=0.0, diurnal=0.0, shift_hours=2.0)
    found = np.array([mix for mix, _ in mixes(traffic, np.random.default_rng(0))])

    rates = [rate for _, rate in mixes(Traffic(windows=288), np.random.default_rng(0))]

    assert (min(rates), max(rates)) == pytest.approx((0.7, 1.3), abs=0.01)  # with the hour
    shifts = (np.abs(np.diff(found, axis=0)).sum(axis=1) > 0.05).sum()
    assert 6 <= shifts <= 20


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("dispersion=0.5", "dispersion is 0.5, expected 1 to inf"),
        ("hot_share=2.0", "hot_share is 2.0, expected 0.05 to 1"),
        ("windows=1", "windows is 1, expected 2"),
        ("experts=4,top_k=8", "top_k 8 of 4 experts"),
        ("speed=1", "unknown workload setting 'speed'"),
        ("windows=nan", "windows is 'nan', expected a number"),
    ],
)
def test_traffic_that_cannot_be_generated_is_refused(settings: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        windows_named(f"generated:mixed:{settings}", 0)
