"""How far load has moved: distances small enough to check by hand, and alarms that are counted."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from eplb.core.load import LoadHistory
from eplb.core.topology import Topology
from eplb.errors import HistoryError
from simulations import Scenario, generate, replay
from telemetry.load.drift import (
    FALSE_ALARM,
    LOOK_BACK,
    dispersion,
    drift,
    js_divergence,
    last_change,
    planning_history,
)
from tests.support.repository import DATA

ONE_HOT, OTHER_HOT = [[80, 10, 10, 0]], [[0, 10, 10, 80]]  # one layer of four experts


def steady(windows: int, seed: int = 0, tokens: int = 1000) -> LoadHistory:
    """Independent draws of one profile: two layers of eight experts."""
    rng = np.random.default_rng(seed)
    profile = rng.dirichlet(np.full(8, 2.0), 2)
    return LoadHistory(rng.multinomial(tokens, profile, size=(windows, 2)))


def joined(*parts: LoadHistory) -> LoadHistory:
    return LoadHistory(np.concatenate([part.tokens for part in parts]))


# -- distances


def test_divergence_is_0_for_equal_1_for_disjoint_profiles_and_symmetric() -> None:
    half, other_half = np.array([[5, 5, 0, 0]]), np.array([[0, 0, 9, 9]])
    one, two = np.array([[1, 1]]), np.array([[1, 0]])

    assert js_divergence(half, 3 * half).tolist() == [0.0]
    assert js_divergence(half, other_half) == pytest.approx([1.0])
    # Their mean is (3/4, 1/4): h(3/4) - h(1/2) / 2 = 0.8113 - 0.5 bits.
    assert js_divergence(one, two) == pytest.approx([0.3113], abs=1e-4)
    assert js_divergence(two, one) == pytest.approx(js_divergence(one, two))


def test_drift_is_near_0_for_draws_of_one_profile_and_large_after_a_switch() -> None:
    same, other = steady(8), steady(8, seed=1)
    none = drift(same.of_windows(np.arange(4)), same.latest(4))
    moved = drift(same, other)

    assert none.overall < none.noise
    assert moved.overall > 10 * moved.noise
    assert moved.per_layer.shape == (2,)


def test_noise_is_taken_off() -> None:
    """The mean over draws is near 0, far below the distance that chance makes."""
    few = [steady(2, seed, tokens=50) for seed in range(40)]
    raw = [js_divergence(one.tokens[0], one.tokens[1]).mean() for one in few]
    # Squared, because the root of what chance makes now positive, now negative is never negative.
    left = [drift(one.of_windows(np.arange(1)), one.latest(1)).overall ** 2 for one in few]

    assert np.mean(left) < 0.35 * np.mean(raw)


def test_windows_of_few_requests_are_known_to_fluctuate_more() -> None:
    size = "layers=2,experts=16,windows=16,drift=0.0,domains=1"
    many = generate(f"generated:gamma:{size},dispersion=1.0", seed=0)
    few = generate(f"generated:gamma:{size},dispersion=30.0", seed=0)

    assert dispersion(many) == pytest.approx(1.0, abs=0.3)
    assert dispersion(few) > 10
    assert dispersion(few.of_windows(np.arange(3))) == 1.0, "three windows do not tell"


def test_loads_of_different_models_are_not_compared() -> None:
    with pytest.raises(HistoryError, match=r"\(1, 4\)"):
        drift(steady(1), LoadHistory([ONE_HOT]))


# -- changes


@pytest.mark.parametrize(
    ("load", "index"),
    [
        (joined(steady(10), steady(1, seed=1)), 10),
        (joined(steady(10), steady(5, seed=1)), 10),
        (joined(steady(6), steady(6, seed=1), steady(4, seed=2)), 12),  # the latest of two
        (joined(steady(8), steady(5, seed=1), steady(3)), 13),  # a return to an earlier load
        (joined(steady(3), steady(1, seed=1)), 3),
    ],
)
def test_latest_switch_is_found_where_it_was(load: LoadHistory, index: int) -> None:
    change = last_change(load)

    assert change is not None
    assert change.index == index
    assert change.strength > 1


@pytest.mark.parametrize(
    "load",
    [
        joined(steady(2), steady(1, seed=1)),  # fewer than four windows
        LoadHistory(np.zeros((8, 2, 4), dtype=np.int64)),  # idle
        LoadHistory(np.array([[[9, 0]]] * 8)),  # one expert used
    ],
)
def test_load_that_shows_no_change(load: LoadHistory) -> None:
    assert last_change(load) is None


# Windows of whole requests from one domain fluctuate far more than independent draws do. With
# few requests of several domains the mix itself jumps: then more alarms come than stated.
STEADY = [
    ({"dispersion": 1.0, "domains": 1}, 2 * FALSE_ALARM),
    ({"dispersion": 30.0, "domains": 1, "requests": 32}, 3 * FALSE_ALARM),
    ({"dispersion": 30.0, "domains": 4, "requests": 256}, 3 * FALSE_ALARM),
]


@pytest.mark.slow
@pytest.mark.parametrize(("drawn", "most"), STEADY)
def test_false_alarms_are_as_rare_as_stated(drawn: dict[str, float], most: float) -> None:
    size = {"layers": 4, "experts": 32, "drift": 0.0, "windows": 16, "tokens": 4096}
    settings = ",".join(f"{name}={value}" for name, value in (size | drawn).items())
    steady_loads = [generate(f"generated:gamma:{settings}", seed) for seed in range(200)]

    assert sum(last_change(load) is not None for load in steady_loads) <= most * 200


@pytest.mark.parametrize("domains", [1, 6])
def test_change_test_layers_of_the_same_tokens_rarely_alarm(domains: int) -> None:
    """What all layers see rises and falls together: independent draws would not."""
    loads = [same_tokens(32, seed, domains) for seed in range(20)]

    # The scatter of independent layers alone would call more than half of these a change.
    assert sum(last_change(load) is not None for load in loads) <= 0.02 * len(loads) + 1


def test_change_test_load_that_wanders_alarms_rarely() -> None:
    """A window shares half of its tokens with the one before it, as long requests make it."""
    alarms = 0
    for seed in range(20):
        halves = same_tokens(33, seed).tokens
        alarms += last_change(LoadHistory(halves[:-1] + halves[1:])) is not None

    assert alarms <= 4  # 19 when neighbours alone tell how far it wanders


def test_change_test_windows_of_long_requests_rarely_alarm() -> None:
    """Requests last four windows on average; all alarm without the correlation factor."""
    alarms = sum(last_change(long_requests(32, seed)) is not None for seed in range(20))

    assert alarms <= 1


def night_and_day(seed: int, num_idle: int, *, switch: bool = False) -> LoadHistory:
    """Four nights of few tokens and days of 16 requests a window; another routing on the last."""
    rng = np.random.default_rng(seed)
    bases = rng.dirichlet(np.full(12, 0.5), (2, 6))
    counts = []
    for window in range(32):
        base = bases[int(switch and window >= 24)]
        requests, tokens = (1, 5) if window % 8 < num_idle else (16, 256)
        profile = rng.gamma(base * 12 + 1e-3, size=(requests, 6, 12))
        share = profile / profile.sum(axis=2, keepdims=True)
        counts.append(rng.multinomial(tokens, share).sum(axis=0))
    return LoadHistory(np.array(counts))


@pytest.mark.parametrize("num_idle", [4, 6, 7])
def test_change_test_days_between_idle_nights_rarely_alarm(num_idle: int) -> None:
    """Neighbours at night differ by less than requests do by day: with them 66 of 120 alarm."""
    alarms = sum(last_change(night_and_day(seed, num_idle)) is not None for seed in range(40))

    assert alarms <= 2


@pytest.mark.parametrize("num_idle", [4, 6, 7])
def test_change_test_another_load_by_day_is_found_in_its_night(num_idle: int) -> None:
    for seed in range(10):
        change = last_change(night_and_day(seed, num_idle, switch=True))

        assert change is not None
        assert 24 <= change.index <= 24 + num_idle


def test_change_test_finds_a_switch_of_dependent_layers_and_of_long_requests() -> None:
    for drawn, before in ((same_tokens, 16), (long_requests, 32)):
        for after in (1, 3):
            change = last_change(joined(drawn(before, seed=0), drawn(after, seed=1)))

            assert change is not None
            assert change.index == before


def long_requests(windows: int, seed: int) -> LoadHistory:
    """16 requests at once, each of a profile of its own and of four windows on average."""
    base = np.random.default_rng(9 if seed % 2 else 8).dirichlet(np.full(12, 0.5), 6)
    rng = np.random.default_rng(seed)
    profile = rng.gamma(base * 12 + 1e-3, size=(16, 6, 12))
    counts = []
    for _ in range(windows):
        has_ended = rng.random(16) < 0.25
        profile[has_ended] = rng.gamma(base * 12 + 1e-3, size=(int(has_ended.sum()), 6, 12))
        share = profile / profile.sum(axis=2, keepdims=True)
        counts.append(rng.multinomial(64, share).sum(axis=0))
    return LoadHistory(np.array(counts))


@pytest.mark.slow
@pytest.mark.parametrize("trace", ["dsv2lite_intent", "dsv2lite_summary", "gptoss20b_decode"])
def test_change_test_recorded_tokens_in_random_order_rarely_alarm(trace: str) -> None:
    """Drawn again and again from a recording, so that nothing changes: as the controller looks."""
    path = DATA / f"{trace}.npz"
    if not path.is_file():
        pytest.skip(f"recorded routing is not at {path}: set EPLB_DATA")
    recorded = np.load(path)["expert_ids"].astype(np.int64)
    ids = recorded.transpose(1, 0, 2) if trace.startswith("gpt") else recorded
    rng = np.random.default_rng(3)
    alarms = looks = 0
    for _ in range(4):
        drawn = ids[:, rng.integers(ids.shape[1], size=(40, 512))]  # [L, T, tokens, K]
        load = np.stack([counted(window) for window in drawn.swapaxes(0, 1)])
        for end in range(4, len(load) + 1):
            looks += 1
            alarms += last_change(LoadHistory(load[max(0, end - LOOK_BACK) : end])) is not None

    assert alarms <= 0.02 * looks


def counted(expert_ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """[L, E] of ids [L, tokens, K]."""
    return np.stack([np.bincount(layer.ravel(), minlength=64) for layer in expert_ids])


def same_tokens(windows: int, seed: int, domains: int = 6) -> LoadHistory:
    """Tokens that are alike in each of 16 layers: of a domain, which tells most of their expert."""
    rng = np.random.default_rng(seed)
    of_token = rng.integers(domains, size=(windows, 300))
    chosen = rng.dirichlet(np.full(12, 0.3), domains).cumsum(axis=1)
    pick = (rng.random((windows, 300, 1)) > chosen[of_token]).sum(axis=2).clip(max=11)
    named = np.stack([rng.permutation(12) for _ in range(16)])  # experts are named anew in a layer
    counts = [[np.bincount(layer[window], minlength=12) for layer in named] for window in pick]
    return LoadHistory(np.array(counts))


# -- what a plan looks at


def test_plan_uses_the_latest_windows_and_none_before_a_change() -> None:
    changed = joined(steady(10), steady(2, seed=1))
    changed_long_ago = joined(steady(5), steady(9, seed=1))

    assert planning_history(steady(12), last=4).first_step.tolist() == [8, 9, 10, 11]
    assert planning_history(changed, last=4).first_step.tolist() == [10, 11]
    assert planning_history(changed_long_ago, last=4).num_windows == 4


def test_plan_after_a_load_came_back_uses_windows_of_both_loads() -> None:
    there_and_back = joined(steady(8), steady(6, seed=1), steady(2))

    seen = planning_history(there_and_back, last=8).first_step.tolist()

    # Half of them of either load: the two new ones, and the latest before them.
    assert seen == [6, 7, 10, 11, 12, 13, 14, 15]


def test_load_that_was_not_seen_before_brings_no_window_back() -> None:
    three = joined(steady(6), steady(6, seed=1), steady(2, seed=2))

    assert planning_history(three, last=8).first_step.tolist() == [12, 13]


def test_load_that_is_back_for_as_long_as_a_plan_looks_is_planned_for_alone() -> None:
    long_back = joined(steady(8), steady(6, seed=1), steady(8))

    assert planning_history(long_back, last=8).first_step.tolist() == list(range(14, 22))


@pytest.mark.system
def test_ignoring_load_before_a_change_saves_moves_and_imbalance() -> None:
    moves, imbalance = {}, {}
    for cuts in (False, True):
        found = [replay(after_a_switch(seed, cuts=cuts), "auto") for seed in range(8)]
        moves[cuts] = sum(one.moves for one in found)
        imbalance[cuts] = np.mean([one.per_window[SWITCH:] for one in found])

    # A plan made on both loads is mended once more windows of the second are there.
    assert moves[True] < 0.85 * moves[False]
    assert imbalance[True] < imbalance[False] - 0.02


SWITCH = 6  # the first window of the second load


def after_a_switch(seed: int, *, cuts: bool) -> Scenario:
    """Two layers of 32 experts on four ranks of ten slots; windows of independent draws."""
    rng = np.random.default_rng(seed)
    profiles = rng.gamma(1.5, size=(2, 2, 32))
    profiles /= profiles.sum(axis=2, keepdims=True)
    windows = [rng.multinomial(20_000, one, size=(SWITCH, 2)) for one in profiles]
    ranks = Topology.uniform(num_nodes=1, ranks_per_node=4, slots_per_rank=10)
    load = LoadHistory(np.concatenate(windows))
    return Scenario(ranks, load=load, past_windows=4, cut_at_change=cuts)
