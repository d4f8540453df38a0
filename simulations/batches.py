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
from telemetry.formats.intake import order_of
from telemetry.formats.routing import read_requests as routing_of_requests
from telemetry.formats.routing import read_trace
from telemetry.formats.table import read_load
from telemetry.formats.types import Layout, ReadOptions, check_cells


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
) -> tuple[NDArray[Any], NDArray[np.int64], tuple[str, ...]]:
    """Experts of each token [L, tokens, K], [requests] tokens of each, and notes.

    Args:
        path: a trace, or a folder of vLLM's requests, a file each.
        layout: of ``expert_ids``, where the file does not tell.

    Raises:
        HistoryError: as ``read_trace``, or a file without ``request_len``.
    """
    if path.is_dir():
        paths = sorted(path.glob("*.npy"), key=order_of)
        if not paths:
            raise HistoryError(f"{path} has no .npy files, expected one for each request")
        routing = routing_of_requests(paths)
    else:
        routing = read_trace(path, layout)
    if routing.request_len is None:
        raise HistoryError(f"trace {path} has no request_len, expected the tokens of each request")
    return routing.ids.transpose(1, 0, 2), routing.request_len, routing.notes


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
    options = ReadOptions(num_experts=num_experts)
    num_experts = options.experts_in(f"trace {path}", max(int(ids.max()), 0))
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
    check_cells(f"trace {path}", (num_windows, len(ids), num_experts), ids.nbytes)
    counts = np.zeros((num_windows, len(ids), num_experts), dtype=np.int64)
    kept = step < num_windows * each
    window = step[kept] // each
    for layer, chosen in enumerate(ids[:, kept]):
        token, _ = used = np.nonzero(chosen >= 0)
        np.add.at(counts[:, layer], (window[token], chosen[used]), 1)
    first = np.arange(num_windows) * each
    return LoadHistory(counts, first, first + each - 1, "decode")
