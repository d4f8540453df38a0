"""Recorded routing by windows, and requests as an engine would run them: steps of a batch.

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
from telemetry.formats.bounded import read_arrays
from telemetry.formats.routing import (
    MEMBERS,
    check_counts,
    expert_count,
    layers_first,
    sum_of_lengths,
)
from telemetry.formats.table import read_load
from telemetry.formats.types import Layout, ReadOptions


def load_trace(
    path: Path,
    *,
    window_tokens: int | None = None,
    num_experts: int | None = None,
    layout: Layout | None = None,
) -> LoadHistory:
    """Read recorded routing, or windows that were counted already, of an ``.npz`` file.

    Args:
        path: the file; see ``telemetry.formats.routing``.
        window_tokens: in a window; None: as ``window_of``; not for counted windows.
        num_experts: E, if the trace may never have used the last ones; else the largest id + 1.
        layout: of ``expert_ids``, where the file does not tell.

    Raises:
        HistoryError: a file that is missing, damaged, or holds something else.
        ConfigError: arguments that do not fit the file.
    """
    options = ReadOptions(
        window_tokens=window_tokens, num_experts=num_experts, layout=layout, max_windows=2**31
    )
    return read_load(str(path), options).history


def read_requests(
    path: Path, *, layout: Layout | None = None
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """[L, tokens, K] experts of each token, and [requests] how many tokens each request has.

    Raises:
        HistoryError: as ``read_expert_ids``, or a file without ``request_len``.
    """
    arrays, names = read_arrays(path, MEMBERS)
    if not {"expert_ids", "request_len"} <= arrays.keys():
        raise HistoryError(f"trace {path} holds {names}, expected expert_ids and request_len")
    ids, lengths = layers_first(path, arrays, layout), arrays["request_len"]
    if (total := sum_of_lengths(path, lengths)) != ids.shape[1]:
        raise HistoryError(
            f"trace {path}: request_len sums to {total}, expected {ids.shape[1]} tokens"
        )
    return ids, lengths.astype(np.int64).ravel()


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
    """Windows of whole steps, of about so many tokens each, as an engine would run the requests.

    So many run at once, a token of each in a step, and the next one begins when one ends
    (continuous batching), in the order of the file. Every token counts as a step of its own: which
    of them are a prompt, that one pass takes, is not used. So this is decode, as far as the
    recorded tokens are. Steps after the last one with a full batch are left out: there the trace
    runs dry.

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
