"""Recorded requests as an engine would run them: so many at once, a token of each in a step.

The next request begins when one ends (continuous batching), in the order of the file. Every token
counts as a step of its own: which of them are a prompt, that one pass takes, is not used. So this
is decode, as far as the recorded tokens are.

Shapes:  L MoE layers, E experts, K experts of a token, n tokens, Q requests.
"""

from __future__ import annotations

import heapq
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eplb.core.load import LoadHistory
from eplb.errors import ConfigError, HistoryError
from telemetry.formats.routing import check_counts, expert_count


def steps_of_tokens(request_len: NDArray[np.integer], batch: int) -> NDArray[np.int64]:
    """[n] the step of each token, requests one after the other.

    Args:
        request_len: [Q] tokens of each.
        batch: requests that run at once.
    """
    free = [0] * batch  # the step from which on each place of the batch is free
    starts = []
    for length in request_len.tolist():
        start = heapq.heappop(free)
        starts.append(start)
        heapq.heappush(free, start + length)
    first = np.cumsum(request_len) - request_len
    place = np.arange(int(request_len.sum())) - np.repeat(first, request_len)
    steps: NDArray[np.int64] = np.repeat(np.array(starts, dtype=np.int64), request_len) + place
    return steps


def batched_windows(
    path: Path,
    ids: NDArray[Any],
    request_len: NDArray[np.integer],
    batch: int,
    window_tokens: int,
    num_experts: int | None,
) -> LoadHistory:
    """Windows of whole steps, of about so many tokens each.

    Steps after the last one with a full batch are left out: there the trace runs dry.

    Args:
        ids: [L, n, K], -1 for padding.

    Raises:
        ConfigError: a batch below 1.
        HistoryError: fewer than two windows, or ids out of range.
    """
    if batch < 1:
        raise ConfigError(f"a batch of {batch} requests, expected at least 1")
    num_experts = expert_count(path, ids, num_experts)
    step = steps_of_tokens(request_len, batch)
    full = np.flatnonzero(np.bincount(step) == batch) if step.size else np.array([])
    num_steps = int(full[-1]) + 1 if full.size else 0
    each = max(1, window_tokens // batch)
    num_windows = num_steps // each
    if num_windows < 2:
        raise HistoryError(
            f"trace {path} fills a batch of {batch} requests for {num_steps} steps, {num_windows} "
            f"windows of {each}, expected at least 2 windows"
        )
    check_counts(path, ids, num_windows, num_experts)
    counts = np.zeros((num_windows, len(ids), num_experts), dtype=np.int64)
    kept = step < num_windows * each
    window = step[kept] // each
    for layer, chosen in enumerate(ids[:, kept]):
        token, _ = used = np.nonzero(chosen >= 0)
        np.add.at(counts[:, layer], (window[token], chosen[used]), 1)
    first = np.arange(num_windows) * each
    return LoadHistory(counts, first, first + each - 1, "decode")
