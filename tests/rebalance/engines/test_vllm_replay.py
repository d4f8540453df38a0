from __future__ import annotations

import numpy as np
import pytest
import torch

from eplb.core.load import LoadHistory
from eplb.errors import HistoryError
from rebalance.engines.vllm.replay import LayerRouting, parts_of

SEED, EXPERTS, TOP_K, ROWS = 20261122, 32, 4, 512
CPU = torch.device("cpu")


def trace(num_windows: int = 3, num_layers: int = 2) -> LoadHistory:
    drawn = np.random.default_rng(SEED)
    tokens = drawn.lognormal(5, 0.8, (num_windows, num_layers, EXPERTS)).astype(np.int64)
    return LoadHistory(tokens)


def routing(history: LoadHistory, passes: int = 1, layer: int = 0) -> LayerRouting:
    return LayerRouting(parts_of(history)[:, layer], passes)


def counts(ids: torch.Tensor) -> np.ndarray:
    return np.bincount(ids.numpy().ravel(), minlength=EXPERTS)


def expected(history: LoadHistory, window: int, layer: int, top_k: int = TOP_K) -> np.ndarray:
    """Tokens of a pass that has the parts of the window; no expert serves a row twice."""
    tokens = history.tokens[window, layer]
    return tokens / tokens.sum() * ROWS * top_k


def test_load_of_each_pass_is_that_of_its_window_within_two_tokens() -> None:
    history = trace()
    layers = [routing(history, passes=2, layer=layer) for layer in range(2)]

    for step in range(8):  # two passes of each window, and then the first again
        window = step // 2 % 3
        for number, layer in enumerate(layers):
            ids = layer.experts_of(ROWS, EXPERTS, TOP_K, CPU)
            assert ids.shape == (ROWS, TOP_K)
            assert np.abs(counts(ids) - expected(history, window, number)).max() < 5
            assert all(len(set(row)) == TOP_K for row in ids.tolist())


def test_loads_of_many_passes_add_up_to_the_trace() -> None:
    history = trace(1, 1)
    layer = routing(history)
    found = sum(counts(layer.experts_of(ROWS, EXPERTS, TOP_K, CPU)) for _ in range(200))

    assert np.abs(found / 200 - expected(history, 0, 0)).max() < 0.1


def test_expert_with_more_tokens_than_rows_gets_every_row_and_no_row_twice() -> None:
    tokens = np.ones((1, 1, EXPERTS), dtype=np.int64)
    tokens[0, 0, 7] = 1000
    layer = routing(LoadHistory(tokens))
    ids = layer.experts_of(ROWS, EXPERTS, TOP_K, CPU)

    assert counts(ids)[7] == ROWS
    assert all(len(set(row)) == TOP_K for row in ids.tolist())


def test_trace_with_one_busy_expert_spreads_the_other_choices() -> None:
    tokens = np.zeros((1, 1, EXPERTS), dtype=np.int64)
    tokens[0, 0, 7] = 1000
    ids = routing(LoadHistory(tokens)).experts_of(ROWS, EXPERTS, TOP_K, CPU)

    others = np.delete(counts(ids), 7)
    assert others.max() - others.min() <= 4


def test_model_with_other_experts_and_trace_without_tokens_are_refused() -> None:
    with pytest.raises(HistoryError, match=r"32 experts.* 64"):
        routing(trace()).experts_of(ROWS, 64, TOP_K, CPU)
    with pytest.raises(HistoryError, match="no window"):
        parts_of(LoadHistory(np.zeros((2, 2, 4), dtype=np.int64)))
