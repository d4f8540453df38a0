"""Whether balancing is worth enabling: each answer with a load that makes it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from eplb.core.topology import Topology
from simulations.schemes import PlanTerms
from simulations.verdict import Judge, Verdict

LAYERS, EXPERTS, RANKS = 3, 32, 4
MANY, FEW = 20_000, 50  # tokens of a layer in a window
EVEN = np.full((LAYERS, EXPERTS), 1 / EXPERTS)


def terms(redundant: int) -> PlanTerms:
    return PlanTerms(Topology.uniform(1, RANKS, EXPERTS // RANKS + redundant))


def judged(windows: Sequence[np.ndarray]) -> Verdict:
    judge = Judge(terms(0), terms(1))
    for tokens in windows:
        judge.add(tokens)
    return judge.verdict


def draws(shares: Sequence[np.ndarray], tokens: int, seed: int = 0) -> list[np.ndarray]:
    """Windows of independent tokens, one of each [L, E] of shares."""
    rng = np.random.default_rng(seed)
    return [np.array([rng.multinomial(tokens, row) for row in share]) for share in shares]


def hot(part: float) -> np.ndarray:
    """[L, E] one expert that gets this part of all tokens."""
    share = np.full((LAYERS, EXPERTS), (1 - part) / (EXPERTS - 1))
    share[:, 5] = part
    return share


def first_rank_hot() -> np.ndarray:
    """[L, E] the experts of the first rank get three times the tokens of others, all alike."""
    share = np.tile(np.where(np.arange(EXPERTS) < EXPERTS // RANKS, 3.0, 1.0), (LAYERS, 1))
    return np.asarray(share / share.sum(axis=1, keepdims=True))


def jumping(windows: int) -> list[np.ndarray]:
    """[L, E] shares that have nothing to do with those of the window before."""
    share = np.random.default_rng(1).gamma(0.5, size=(windows, LAYERS, EXPERTS))
    return list(share / share.sum(axis=2, keepdims=True))


def test_even_load_is_not_worth_it() -> None:
    found = judged(draws([EVEN] * 16, MANY))

    assert found.worth == "even"
    assert found.sentence.startswith("not worth enabling: the ranks are even: experts in order")
    assert found.figures["in_order"] == pytest.approx(found.figures["chance"], abs=0.005)


def test_experts_that_can_be_exchanged_need_moves_alone() -> None:
    found = judged(draws([first_rank_hot()] * 16, MANY))

    assert found.worth == "moves"
    assert "moves help: imbalance" in found.sentence
    assert found.figures["in_order"] == pytest.approx(2.0, abs=0.02)  # 8 x 3 of 48, over a fourth
    assert found.figures["moves"] < 1.05


def test_expert_hotter_than_a_rank_needs_a_replica() -> None:
    found = judged(draws([hot(0.6)] * 16, MANY))

    assert found.worth == "replica"
    assert "a replica is needed, a move does not help" in found.sentence
    assert found.figures["moves"] >= 0.6 * RANKS - 0.05  # its rank has 0.6 of all tokens at least
    assert found.figures["replicas"] < 1.5


def test_load_of_another_routing_in_each_window_changes_too_fast() -> None:
    found = judged(draws(jumping(24), MANY))

    assert found.worth == "too fast"
    assert "changes faster than plans can" in found.sentence
    assert found.figures["hindsight"] < 1.05 < 1.2 < found.figures["moves"]


def test_few_tokens_show_nothing_and_how_many_would() -> None:
    found = judged(draws([EVEN] * 16, FEW))

    assert found.worth == "too few"
    assert "800 in a layer show an imbalance above" in found.sentence
    shown = found.figures["shown"] - 1
    assert f"about {800 * (shown / 0.02) ** 2:,.0f} show 1.02" in found.sentence


def test_few_windows_are_too_few_whatever_they_show() -> None:
    found = judged(draws([hot(0.6)] * 6, MANY))

    assert found.worth == "too few"
    assert "5 windows with tokens came after the first, expected 8 or more" in found.sentence


def test_idle_windows_do_not_count_as_windows() -> None:
    nights = draws([EVEN] * 30, 5) + draws([hot(0.6)] * 4, MANY)

    assert judged(nights).worth == "too few"


@pytest.mark.parametrize("seed", range(4))
def test_even_load_stays_even_beside_idle_windows_whatever_the_draw(seed: int) -> None:
    busy, idle = draws([EVEN] * 12, MANY, seed), draws([EVEN] * 12, 5, seed)
    turns = [window for pair in zip(busy, idle, strict=True) for window in pair]

    assert judged(turns).worth == "even"


@pytest.mark.parametrize("windows", [[], draws([EVEN], MANY)])
def test_fewer_than_two_windows_with_tokens_are_too_few(windows: list[np.ndarray]) -> None:
    idle = np.zeros((LAYERS, EXPERTS), dtype=np.int64)

    assert judged([*windows, idle]).worth == "too few"
