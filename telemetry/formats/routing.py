"""Recorded routing as windows of load.

A trace is an ``.npz`` file that holds one of these:

    expert_ids  [L, tokens, K] or [tokens, L, K], integers: which K experts each token went to in
                each layer, tokens in order; -1 pads. Cut into windows of as many tokens as asked.
    load        [T, L, E], integers or floats: windows that were counted already.

What decides which axis of ``expert_ids`` counts tokens, in this order: the ``layout`` argument;
``request_len`` in the file, whose sum is the number of tokens; one axis being at least 4 times
as long as the other, since no model has that many layers. Anything else is refused.

Engines return routing by request: which experts each token went to, by layer. SGLang returns the
bytes of int32 ``[tokens, layers, top-k]``, or their base64; they have no shape, so layers and top-k
are asked for. vLLM returns an ``.npy`` file of that shape, int16. Many requests are one file after
the other in order of time: SGLang's bytes can be joined as they are.

Shapes:  T windows, L MoE layers, E experts, K experts of a token, n tokens, Q requests.
"""

from __future__ import annotations

import base64
import binascii
import heapq
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from eplb.core.load import LoadHistory, as_history
from eplb.errors import ConfigError, HistoryError
from telemetry.formats.bounded import check_whole, read_arrays, read_npy, read_text_bytes
from telemetry.formats.types import (
    Layers,
    LoadFile,
    ReadOptions,
    resolve,
    rows_as_hidden,
    rows_in_order,
)

Layout = Literal["layers-first", "tokens-first"]
DEFAULT_WINDOW_TOKENS = 4096
FEWEST_WINDOWS = 24  # that a trace is cut into, where the user names no size
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
        window_tokens: in a window; None: as ``window_of``; not for traces of ``load``.
        num_experts: E, if the trace may never have used the last ones; else the largest id + 1.
        layout: of ``expert_ids``, where the file does not tell.

    Raises:
        HistoryError: a file that is missing, damaged, or holds something else.
        ConfigError: arguments that do not fit the file.
    """
    arrays, names = read_arrays(path, MEMBERS)
    if "expert_ids" in arrays:
        ids = _layers_first(path, arrays, layout)
        return count_windows(path, ids, window_tokens or window_of(ids.shape[1]), num_experts)
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


def read_expert_ids(path: Path) -> NDArray[Any]:
    """[L, tokens, K] which experts each token of a trace went to, -1 for padding.

    Raises:
        HistoryError: a file that is missing, damaged, or holds no ``expert_ids``.
    """
    arrays, names = read_arrays(path, MEMBERS)
    if "expert_ids" not in arrays:
        raise HistoryError(f"trace {path} holds {names}, expected expert_ids")
    return _layers_first(path, arrays, None)


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
        layout = _layout_of(path, ids.shape, arrays.get("request_len"))
    if layout not in get_args(Layout):
        raise ConfigError(
            f"unknown layout {layout!r}, expected one of: {', '.join(get_args(Layout))}"
        )
    return ids if layout == "layers-first" else ids.transpose(1, 0, 2)


def _layout_of(path: Path, shape: tuple[int, ...], request_len: NDArray[np.int64] | None) -> Layout:
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
    lengths = np.atleast_1d(request_len)
    check_whole(lengths, (None,), f"trace {path}: request_len", high=2**31 - 1)
    return int(request_len.sum())


def window_of(num_tokens: int) -> int:
    """Tokens of a window: 4096, or fewer so that a short trace has enough windows to judge."""
    return max(1, min(DEFAULT_WINDOW_TOKENS, num_tokens // FEWEST_WINDOWS))


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


MAX_RAW_BYTES = 8 * 2**30
BASE64 = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/=\r\n")
MAX_TOP_K = 64


def read_sglang(path: Path, options: ReadOptions) -> LoadFile:
    """Read raw int32, or its base64; rows are all hidden layers of the model."""
    if options.num_layers is None or options.top_k is None:
        raise ConfigError("raw routing has no shape, expected --num-layers and --top-k")
    data = read_text_bytes(path, MAX_RAW_BYTES)
    if data and BASE64.issuperset(data):
        try:
            data = base64.b64decode(data, validate=False)
        except binascii.Error as exc:
            raise HistoryError(f"no base64: {exc}") from exc
    each = 4 * options.num_layers * options.top_k
    if not data or len(data) % each:
        raise HistoryError(
            f"{len(data)} bytes, expected a multiple of {each}: int32, {options.num_layers} layers "
            f"x top-{options.top_k}"
        )
    ids = np.frombuffer(data, dtype="<i4").reshape(-1, options.num_layers, options.top_k)
    # A dense layer's entries were never written: all alike, which no top-k is.
    idle = np.zeros(options.num_layers, dtype=np.bool_)
    if options.top_k > 1:
        idle = (ids == ids[:, :, :1]).all(axis=(0, 2))
    return _counted(path, ids, rows_as_hidden(options.num_layers), options, idle)


def read_vllm(path: Path, options: ReadOptions) -> LoadFile:
    """Read an ``.npy`` file [tokens, L, K]; rows are MoE layers in order."""
    ids = _vllm_ids(path)
    return _counted(path, ids, rows_in_order(ids.shape[1]), options, None)


def read_vllm_requests(folder: Path) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """[L, tokens, K] of the requests in a folder, a ``.npy`` file each in order of their names.

    Returns:
        The experts of each token, and [requests] how many tokens each has.

    Raises:
        HistoryError: no files, or files of different layers or top-k.
    """
    paths = sorted(folder.glob("*.npy"))
    if not paths:
        raise HistoryError(f"{folder} has no .npy files, expected one for each request")
    requests = [_vllm_ids(path) for path in paths]
    for path, ids in zip(paths, requests, strict=True):
        if ids.shape[1:] != requests[0].shape[1:]:
            raise HistoryError(
                f"{path} has layers and top-k {ids.shape[1:]}, expected {requests[0].shape[1:]} as "
                f"{paths[0].name}"
            )
    lengths = np.array([len(ids) for ids in requests], dtype=np.int64)
    return np.concatenate(requests).transpose(1, 0, 2), lengths


def _vllm_ids(path: Path) -> NDArray[Any]:
    ids = read_npy(path)
    where = f"{path}: the array [tokens, layers, top-k]"
    check_whole(ids, (None, None, None), where, low=-1, high=2**31 - 1)
    if not ids.size or ids.shape[2] > MAX_TOP_K:
        raise HistoryError(f"{where} has shape {ids.shape}, expected a top-k of 1..{MAX_TOP_K}")
    return ids


def read_npz(path: Path, options: ReadOptions) -> LoadFile:
    """Read ``expert_ids`` of an ``.npz`` file."""
    history = load_trace(path, window_tokens=options.window_tokens, num_experts=options.num_experts)
    _, layers, notes = resolve(rows_in_order(history.num_layers), options)
    return LoadFile(history, layers, notes=notes)


def _counted(
    path: Path,
    ids: NDArray[Any],
    found: Layers,
    options: ReadOptions,
    idle: NDArray[np.bool_] | None,
) -> LoadFile:
    rows, layers, notes = resolve(found, options, idle=idle)
    each = options.window_tokens or window_of(len(ids))
    history = count_windows(path, ids.transpose(1, 0, 2)[rows], each, options.num_experts)
    return LoadFile(history, layers, notes=notes)
