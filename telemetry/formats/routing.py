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
are asked for. vLLM returns an ``.npy`` file of that shape: int16, since 0.26 uint8 or uint16. Many
requests are a folder of files, or one file after the other in order of time for SGLang's bytes.

Shapes:  T windows, L MoE layers, E experts, K experts of a token, n tokens, Q requests.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from eplb.core.load import LARGEST_TOP_K, LoadHistory, repeats_expert
from eplb.errors import ConfigError, HistoryError
from telemetry.formats.bounded import MAGIC, read_arrays, read_npy, read_text_bytes, whole_array
from telemetry.formats.types import (
    Layers,
    Layout,
    LoadFile,
    ReadOptions,
    as_layers,
    rows_as_hidden,
    rows_in_order,
)

DEFAULT_WINDOW_TOKENS = 4096
FEWEST_WINDOWS = 24  # that a trace is cut into, where the user names no size
CLEARLY_LONGER = 4

MEMBERS = ("expert_ids", "load", "request_len", "layer_ids")
# Counted windows may take so many times the bytes of the ids, and this much in any case: an id of
# 2**31 asks for a column for each expert below it.
COUNTS_PER_ID_BYTE = 16
SMALL_COUNTS_BYTES = 32 * 2**20


def unread_keys(path: Path) -> tuple[str, ...]:
    """A note where an ``.npz`` trace has arrays that nothing reads."""
    _, names = read_arrays(path, ())
    unread = [name for name in names.split(", ") if name not in MEMBERS]
    return (f"{path.name}: not read: {', '.join(unread)}",) if unread else ()


def read_expert_ids(path: Path) -> NDArray[Any]:
    """[L, tokens, K] which experts each token of a trace went to, -1 for padding.

    Raises:
        HistoryError: a file that is missing, damaged, or holds no ``expert_ids``.
    """
    arrays, names = read_arrays(path, MEMBERS)
    if "expert_ids" not in arrays:
        raise HistoryError(f"trace {path} holds {names}, expected expert_ids")
    return layers_first(path, arrays, None)


def layers_of(ids: Any, num_rows: int) -> Layers:
    """Layers of a table by the numbers in its file; None: rows are MoE layers in order."""
    if ids is None:
        return rows_in_order(num_rows)
    numbers = whole_array(np.asarray(ids), (num_rows,), "layer_ids", high=2**16)
    return as_layers(numbers.tolist())


def layers_first(
    path: Path, arrays: Mapping[str, NDArray[Any]], layout: Layout | None
) -> NDArray[Any]:
    """[L, tokens, K] the experts of a trace.

    Raises:
        HistoryError: no integers of three axes.
        ConfigError: the layout is not known.
    """
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
        tokens = sum_of_lengths(path, request_len)
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


def sum_of_lengths(path: Path, request_len: NDArray[Any]) -> int:
    """Sum the lengths of requests; none is so large that the sum could overflow."""
    lengths = np.atleast_1d(request_len)
    return int(whole_array(lengths, (None,), f"trace {path}: request_len", high=2**31 - 1).sum())


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


MAX_RAW_BYTES = 8 * 2**30
BASE64 = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/=\r\n")


def read_sglang(paths: Sequence[Path], options: ReadOptions) -> LoadFile:
    """Read raw int32, or its base64, of requests in order; rows are all hidden layers."""
    if options.num_layers is None or options.top_k is None:
        raise ConfigError("raw routing has no shape, expected --num-layers and --top-k")
    parts = [_sglang_ids(path, options.num_layers, options.top_k) for path in paths]
    ids = parts[0] if len(parts) == 1 else np.concatenate(parts)
    # A dense layer's entries were never written: all alike, which no top-k is.
    idle = np.zeros(options.num_layers, dtype=np.bool_)
    if options.top_k > 1:
        idle = (ids == ids[:, :, :1]).all(axis=(0, 2))
        check_distinct(ids[:, ~idle], paths[0])
    found = _counted(paths[0], ids, rows_as_hidden(options.num_layers), options)
    tokens = np.where(idle[None, :, None], 0, found.history.tokens)
    return replace(found, history=LoadHistory(tokens))


def _sglang_ids(path: Path, num_layers: int, top_k: int) -> NDArray[np.int32]:
    data = read_text_bytes(path, MAX_RAW_BYTES)
    if data and BASE64.issuperset(data):
        try:
            data = base64.b64decode(data, validate=False)
        except binascii.Error as exc:
            raise HistoryError(f"no base64: {exc}") from exc
    if data.startswith(MAGIC):
        raise HistoryError(
            f"{path.name} is an array of numpy, as vLLM returns it, expected int32 alone: decode "
            "it into a file named .npy"
        )
    each = 4 * num_layers * top_k
    if not data or len(data) % each:
        raise HistoryError(
            f"{len(data)} bytes, expected a multiple of {each}: int32, {num_layers} layers "
            f"x top-{top_k}"
        )
    return np.frombuffer(data, dtype="<i4").reshape(-1, num_layers, top_k)


def of_vllm(values: Any, path: Path, options: ReadOptions) -> LoadFile:
    """The load of ids [tokens, L, K] that were read already; rows are MoE layers in order."""
    ids = _checked_ids(values, path)
    return _counted(path, ids, rows_in_order(ids.shape[1]), options)


def check_distinct(ids: NDArray[Any], path: Path) -> None:
    """Refuse ids [tokens, L, K] of which a token names an expert twice in a layer.

    Raises:
        HistoryError: the first such place.
    """
    if (wrong := repeats_expert(ids)) is not None:
        token, layer = wrong
        raise HistoryError(
            f"{path.name}: token {token}, row {layer} names experts {ids[token, layer].tolist()}, "
            "expected different ones: these are counts, or layers and top-k are other numbers"
        )


def read_vllm_requests(paths: Sequence[Path]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """[L, tokens, K] of requests, a ``.npy`` file each, in their order.

    Returns:
        The experts of each token, and [requests] how many tokens each has.

    Raises:
        HistoryError: no files, or files of different layers or top-k.
    """
    requests = [_checked_ids(read_npy(path), path) for path in paths]
    for path, ids in zip(paths, requests, strict=True):
        if ids.shape[1:] != requests[0].shape[1:]:
            raise HistoryError(
                f"{path} has layers and top-k {ids.shape[1:]}, expected {requests[0].shape[1:]} as "
                f"{paths[0].name}"
            )
    lengths = np.array([len(ids) for ids in requests], dtype=np.int64)
    return np.concatenate(requests).transpose(1, 0, 2), lengths


def _checked_ids(values: Any, path: Path) -> NDArray[Any]:
    where = f"{path}: the array [tokens, layers, top-k]"
    ids = whole_array(values, (None, None, None), where, low=-1, high=2**31 - 1)
    if not ids.size or ids.shape[2] > LARGEST_TOP_K:
        raise HistoryError(f"{where} has shape {ids.shape}, expected a top-k of 1..{LARGEST_TOP_K}")
    check_distinct(ids, path)
    return ids


def read_npz(path: Path, options: ReadOptions) -> LoadFile:
    """Read ``expert_ids`` of an ``.npz`` file."""
    arrays, names = read_arrays(path, MEMBERS)
    if "expert_ids" not in arrays:
        raise HistoryError(f"the file holds {names}, expected expert_ids")
    ids = layers_first(path, arrays, options.layout).transpose(1, 0, 2)
    layers = layers_of(arrays.get("layer_ids"), ids.shape[1])
    return replace(_counted(path, ids, layers, options), notes=unread_keys(path))


def _counted(path: Path, ids: NDArray[Any], layers: Layers, options: ReadOptions) -> LoadFile:
    each = options.window_tokens or window_of(len(ids))
    history = count_windows(path, ids.transpose(1, 0, 2), each, options.num_experts)
    return LoadFile(history, layers, top_k=ids.shape[2])
