"""Recorded routing as windows of load.

A trace is an ``.npz`` file that holds one of these:

    expert_ids  [L, tokens, K] or [tokens, L, K], integers: which K experts each token went to in
                each layer, tokens in order; -1 pads. Cut into windows of as many tokens as asked.
    load        [T, L, E], integers or floats: windows that were counted already.

Which axis of ``expert_ids`` counts tokens is told, in this order, by: the ``layout`` argument;
``request_len`` in the file, whose sum is the number of tokens; one axis being at least 4 times
as long as the other, since no model has that many layers. Anything else is refused.

Shapes:  T windows, L MoE layers, E experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from eplb.core.load import LoadHistory, as_history
from eplb.errors import ConfigError, HistoryError
from telemetry.formats.npz import read_arrays

Layout = Literal["layers-first", "tokens-first"]
DEFAULT_WINDOW_TOKENS = 4096
CLEARLY_LONGER = 4

MEMBERS = ("expert_ids", "load", "request_len")
# Counted windows may take so many times the bytes of the ids, and this much in any case: an id of
# 2**31 asks for a column for each expert below it.
COUNTS_PER_ID_BYTE = 16
SMALL_COUNTS_BYTES = 32 * 2**20


def load_trace(
    path: Path,
    *,
    window_tokens: int | None = None,
    num_experts: int | None = None,
    layout: Layout | None = None,
) -> LoadHistory:
    """Read a trace and cut it into windows; what is left of the last one is dropped.

    Args:
        path: the ``.npz`` file.
        window_tokens: tokens in a window, 4096 if not given; not for traces of ``load``.
        num_experts: E, if the trace may never have used the last ones; else the largest id + 1.
        layout: of ``expert_ids``, where the file does not tell.

    Raises:
        HistoryError: a file that is missing, damaged, or holds something else.
        ConfigError: arguments that do not fit the file.
    """
    arrays, names = read_arrays(path, MEMBERS)
    if "expert_ids" in arrays:
        ids = _layers_first(path, arrays, layout)
        return count_windows(path, ids, window_tokens or DEFAULT_WINDOW_TOKENS, num_experts)
    if "load" not in arrays:
        raise HistoryError(f"trace {path} holds {names}, expected expert_ids or load")
    if window_tokens is not None or layout is not None:
        raise ConfigError(
            f"trace {path} holds windows that are counted already, expected no window or layout"
        )
    load = arrays["load"]
    if load.ndim != 3 or num_experts not in (None, load.shape[-1]):
        raise HistoryError(
            f"trace {path}: load has shape {load.shape}, "
            f"expected [windows, layers, {num_experts or 'experts'}]"
        )
    try:
        return as_history(load)
    except HistoryError as exc:
        raise HistoryError(f"trace {path}: {exc}") from exc


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
    ids, lengths = _layers_first(path, arrays, layout), arrays["request_len"]
    if (total := _sum_of_lengths(path, lengths)) != ids.shape[1]:
        raise HistoryError(
            f"trace {path}: request_len sums to {total}, expected {ids.shape[1]} tokens"
        )
    return ids, lengths.astype(np.int64).ravel()


def read_expert_ids(path: Path, *, layout: Layout | None = None) -> NDArray[Any]:
    """[L, tokens, K] which experts each token of a trace went to, -1 for padding.

    Raises:
        HistoryError: a file that is missing, damaged, or holds no ``expert_ids``.
    """
    arrays, names = read_arrays(path, MEMBERS)
    if "expert_ids" not in arrays:
        raise HistoryError(f"trace {path} holds {names}, expected expert_ids")
    return _layers_first(path, arrays, layout)


def _layers_first(
    path: Path, arrays: Mapping[str, NDArray[Any]], layout: Layout | None
) -> NDArray[Any]:
    ids = arrays["expert_ids"]
    if ids.ndim != 3 or ids.dtype.kind not in "iu" or not ids.size:
        raise HistoryError(
            f"trace {path}: expert_ids has shape {ids.shape} and dtype {ids.dtype}, "
            "expected integers [layers, tokens, top-k] or [tokens, layers, top-k]"
        )
    if layout is None:
        layout = _told_layout(path, ids.shape, arrays.get("request_len"))
    if layout not in get_args(Layout):
        raise ConfigError(
            f"unknown layout {layout!r}, expected one of: {', '.join(get_args(Layout))}"
        )
    return ids if layout == "layers-first" else ids.transpose(1, 0, 2)


def _told_layout(
    path: Path, shape: tuple[int, ...], request_len: NDArray[np.int64] | None
) -> Layout:
    first, second, _ = shape
    if request_len is not None and first != second:
        tokens = _sum_of_lengths(path, request_len)
        if tokens == second:
            return "layers-first"
        if tokens == first:
            return "tokens-first"
        raise HistoryError(
            f"trace {path}: request_len sums to {tokens} tokens, expected {first} or {second}, "
            f"the axes of expert_ids {shape}"
        )
    if second >= CLEARLY_LONGER * first:
        return "layers-first"
    if first >= CLEARLY_LONGER * second:
        return "tokens-first"
    raise ConfigError(
        f"trace {path}: expert_ids {shape} may be layers-first or tokens-first, "
        "expected the layout to be named"
    )


def _sum_of_lengths(path: Path, request_len: NDArray[Any]) -> int:
    """Sum the lengths of requests; none is so large that the sum could overflow."""
    most = 2**31 - 1
    if request_len.dtype.kind not in "iu" or request_len.ndim > 1:
        raise HistoryError(
            f"trace {path}: request_len has shape {request_len.shape} and dtype "
            f"{request_len.dtype}, expected integers [requests]"
        )
    if request_len.size and not (request_len.min() >= 0 and request_len.max() <= most):
        raise HistoryError(
            f"trace {path}: request_len is {request_len.min()}..{request_len.max()}, "
            f"expected 0..{most}"
        )
    return int(request_len.sum())


def count_windows(
    path: Path, ids: NDArray[Any], window_tokens: int, num_experts: int | None
) -> LoadHistory:
    """Count ``ids`` [L, tokens, K] by window, layer and expert."""
    num_layers, num_tokens, _ = ids.shape
    num_experts = expert_count(path, ids, num_experts)
    if window_tokens < 1:
        raise ConfigError(f"windows of {window_tokens} tokens, expected at least 1")
    num_windows = num_tokens // window_tokens
    if num_windows < 2:
        raise HistoryError(
            f"trace {path} holds {num_tokens} tokens, {num_windows} windows of {window_tokens}, "
            "expected at least 2 windows"
        )
    check_counts(path, ids, num_windows, num_experts)
    tokens = np.zeros((num_windows, num_layers, num_experts), dtype=np.int64)
    for window, layer in np.ndindex(num_windows, num_layers):
        chosen = ids[layer, window * window_tokens : (window + 1) * window_tokens]
        # One bin more, in front, collects the padding.
        shifted = chosen.astype(np.int64).ravel() + 1
        tokens[window, layer] = np.bincount(shifted, minlength=num_experts + 1)[1:]
    return LoadHistory(tokens)


def expert_count(path: Path, ids: NDArray[Any], num_experts: int | None) -> int:
    """E of a trace: as asked for, else the largest id + 1.

    Raises:
        HistoryError: ids out of range.
    """
    largest = int(ids.max())
    num_experts = num_experts or largest + 1
    if largest >= num_experts or int(ids.min()) < -1:
        raise HistoryError(
            f"trace {path} names experts {ids.min()}..{largest}, expected 0..{num_experts - 1}, "
            "or -1 for padding"
        )
    return num_experts


def check_counts(path: Path, ids: NDArray[Any], num_windows: int, num_experts: int) -> None:
    """Refuse counts [T, L, E] that would take far more memory than the ids.

    Raises:
        HistoryError: they would.
    """
    num_bytes = num_windows * len(ids) * num_experts * np.dtype(np.int64).itemsize
    most = max(SMALL_COUNTS_BYTES, COUNTS_PER_ID_BYTE * ids.nbytes)
    if num_bytes > most:
        raise HistoryError(
            f"trace {path} names experts up to {num_experts - 1}: counts of {num_windows} windows "
            f"x {len(ids)} layers x {num_experts} experts take {num_bytes} bytes, expected at most "
            f"{most} for ids of {ids.nbytes} bytes"
        )
