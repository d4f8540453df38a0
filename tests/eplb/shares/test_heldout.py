"""Plans and shares on recorded routing, judged on windows that they have not seen."""

import numpy as np
import pytest
from numpy.typing import NDArray

from eplb import Topology, imbalance, plan, resplit
from tests.support.repository import DATA

RANKS = Topology.uniform(num_nodes=1, ranks_per_node=8, slots_per_rank=5)
NUM_EXPERTS, WINDOW, HISTORY = 32, 4096, 16

Tokens = NDArray[np.int64]


@pytest.fixture(scope="module")
def decode() -> NDArray[np.int64]:
    """[L, tokens, K] experts of gpt-oss-20b, as recorded."""
    trace = DATA / "gptoss20b_decode.npz"
    if not trace.is_file():
        pytest.skip(f"recorded routing is not at {trace}: set EPLB_DATA")
    recorded: NDArray[np.int64] = np.load(trace)["expert_ids"].astype(np.int64)
    return recorded.transpose(1, 0, 2)


def windows(expert_ids: NDArray[np.int64]) -> Tokens:
    """[T, L, E] counts of whole windows."""
    num_layers, num_tokens, _ = expert_ids.shape
    counts = np.zeros((num_tokens // WINDOW, num_layers, NUM_EXPERTS), dtype=np.int64)
    for window, layer in np.ndindex(*counts.shape[:2]):
        chosen = expert_ids[layer, window * WINDOW : (window + 1) * WINDOW]
        counts[window, layer] = np.bincount(chosen.ravel(), minlength=NUM_EXPERTS)
    return counts


def judged(load: Tokens) -> tuple[float, float, float]:
    """Excess over 1 on the next window: of greedy, of it with shares from history, and of auto."""
    excess = []
    for window in range(HISTORY, len(load)):
        seen, unseen = load[window - HISTORY : window], load[window]
        greedy = plan(seen, RANKS, policy="greedy").target
        plans = (greedy, resplit(seen, greedy, RANKS), plan(seen, RANKS).target)
        excess.append([imbalance(unseen, placement, RANKS).mean() - 1 for placement in plans])
    greedy_excess, shared, auto = np.mean(excess, axis=0).tolist()
    return greedy_excess, shared, auto


@pytest.mark.slow
def test_requests_in_order_leave_auto_three_quarters_of_greedys_excess(
    decode: NDArray[np.int64],
) -> None:
    greedy, shared, auto = judged(windows(decode))

    assert auto <= 0.75 * greedy
    assert shared <= greedy


@pytest.mark.slow
def test_resplit_of_mixed_requests_gains_and_loses_nothing(
    decode: NDArray[np.int64],
) -> None:
    mixed = np.random.default_rng(0).permutation(decode.shape[1])

    greedy, shared, auto = judged(windows(decode[:, mixed]))

    assert auto <= greedy
    assert shared <= greedy
