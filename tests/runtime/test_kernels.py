"""Draws are even and independent everywhere; kernels agree with them where triton can be had."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from scipy.stats import chisquare

from eplb.core import placement
from runtime.draws import DRAW_BITS, EMPTY, choose_by_draw, reference_draws

INTERPRETED = "interpreted_kernels.py"
FOLDER = Path(__file__).parent
LEAST_P = 1e-3  # seeds are fixed, so a test that passes once passes always
SHARES = (0.5, 0.3, 0.2)


def seed_of(value: int) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.int64)


def draws(num_tokens: int, top_k: int, seed: int, expert: int = 0) -> torch.Tensor:
    return reference_draws(torch.full((num_tokens, top_k), expert), seed_of(seed))


def p_of_pairs(first: torch.Tensor, second: torch.Tensor) -> float:
    """Chance of a table of pairs at least as uneven as this one, were the two independent."""
    cell = (first >> (DRAW_BITS - 4)) * 16 + (second >> (DRAW_BITS - 4))
    return float(chisquare(torch.bincount(cell.flatten(), minlength=256).numpy()).pvalue)


def one_expert(*shares: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots 10, 11, ... of an only expert, and its cumulative shares; one entry of padding."""
    slots = torch.tensor([[*range(10, 10 + len(shares)), EMPTY]], dtype=torch.int32)
    up_to = torch.tensor(shares).cumsum(0).mul(2**DRAW_BITS).round().to(torch.int32)
    return slots, torch.cat([up_to, up_to[-1:]])[None]


def counts_of_replicas(num_tokens: int, seed: int) -> torch.Tensor:
    slots, cumulative = one_expert(*SHARES)
    experts = torch.zeros((num_tokens, 2), dtype=torch.int64)
    chosen = choose_by_draw(slots, cumulative, experts, seed_of(seed))
    return torch.bincount(chosen.flatten() - 10, minlength=3)


def p_of_shares(counts: torch.Tensor) -> float:
    expected = torch.tensor(SHARES, dtype=torch.float64) * counts.sum()
    return float(chisquare(counts.numpy(), expected.numpy()).pvalue)


def test_draws_fill_their_range_evenly() -> None:
    found = draws(2**DRAW_BITS, 8, seed=1)

    assert (int(found.min()), int(found.max())) == (0, 2**DRAW_BITS - 1)
    assert chisquare(torch.bincount(found.flatten() >> 6).numpy()).pvalue > LEAST_P


def test_neighbouring_tokens_draw_independently() -> None:
    found = draws(40_000, 1, seed=2)

    assert p_of_pairs(found[:-1], found[1:]) > LEAST_P


def test_ks_of_a_token_draw_independently() -> None:
    found = draws(20_000, 8, seed=3)

    assert all(p_of_pairs(found[:, 0], found[:, k]) > LEAST_P for k in range(1, 8))


@pytest.mark.parametrize("other", [5, 6, 4 + 2**32, -4, 4 + 2**63 - 2**62])
def test_steps_and_ranks_with_other_seeds_draw_independently(other: int) -> None:
    assert p_of_pairs(draws(20_000, 2, seed=4), draws(20_000, 2, seed=other)) > LEAST_P


def test_experts_draw_independently_in_one_place() -> None:
    first, second = (draws(20_000, 2, seed=7, expert=expert) for expert in (0, 1))

    assert p_of_pairs(first, second) > LEAST_P


def test_replicas_get_their_shares_over_tokens() -> None:
    assert p_of_shares(counts_of_replicas(50_000, seed=8)) > LEAST_P


def test_replicas_get_their_shares_over_the_small_steps_of_four_ranks() -> None:
    # A seed as a serving process would make it: the step counts up, the rank sits further up.
    seeds = [step + (rank << 40) for step in range(300) for rank in range(4)]

    total = sum((counts_of_replicas(16, seed) for seed in seeds), torch.zeros(3, dtype=torch.int64))

    assert p_of_shares(total) > LEAST_P


def test_one_place_gets_its_shares_over_steps() -> None:
    slots, cumulative = one_expert(*SHARES)
    first = torch.zeros((1, 1), dtype=torch.int64)
    seeds = range(3000)

    chosen = [int(choose_by_draw(slots, cumulative, first, seed_of(seed))) for seed in seeds]

    assert p_of_shares(torch.bincount(torch.tensor(chosen) - 10, minlength=3)) > LEAST_P


def test_seed_decides_the_draws() -> None:
    assert torch.equal(draws(9, 3, seed=-1), draws(9, 3, seed=-1))
    assert not torch.equal(draws(9, 3, seed=-1), draws(9, 3, seed=1))


def test_padding_goes_to_no_slot_and_moves_no_other_draw() -> None:
    slots, cumulative = one_expert(0.5, 0.5)
    experts = torch.zeros((30, 2), dtype=torch.int64)
    full = choose_by_draw(slots, cumulative, experts, seed_of(9))
    experts[::3, 1] = -1

    chosen = choose_by_draw(slots, cumulative, experts, seed_of(9))

    assert placement.EMPTY == EMPTY
    assert torch.equal(chosen == EMPTY, experts < 0)
    assert torch.equal(chosen[experts >= 0], full[experts >= 0])
    assert set(full.flatten().tolist()) == {10, 11}


@pytest.mark.system
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_kernels_agree_with_torch_and_numpy_in_the_interpreter() -> None:
    # In a process of its own: triton decides at import whether its interpreter runs the kernels.
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(FOLDER / INTERPRETED)],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=FOLDER.parent,
        capture_output=True,
        text=True,
    )

    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]
