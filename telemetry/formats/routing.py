"""Recorded routing: which experts each token went to, by layer; and its windows of load.

Engines return routing by request. SGLang returns the bytes of int32 ``[tokens, layers, top-k]``, or
their base64; they have no shape, so layers and top-k are asked for. vLLM returns an ``.npy`` file
of that shape: int16, since 0.26 uint8 or uint16. Many requests are a folder of files, or one file
after the other in order of time for SGLang's bytes.

A trace is an ``.npz`` file with ``expert_ids`` [L, tokens, K] or [tokens, L, K], integers, tokens
in order; -1 pads. What decides which axis counts tokens, in this order: the ``layout`` argument;
``request_len`` in the file, whose sum is the number of tokens; one axis being at least 4 times as
long as the other, since no model has that many layers. Anything else is refused.

Shapes:  T windows, L MoE layers, E experts, K experts of a token, n tokens, Q requests.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from eplb.core.load import LARGEST_TOP_K, LoadHistory, repeats_expert
from eplb.errors import ConfigError, HistoryError
from telemetry.formats.bounded import (
    MAGIC,
    read_arrays,
    read_npy,
    read_text_bytes,
    whole_array,
)
from telemetry.formats.types import (
    Layers,
    Layout,
    LoadFile,
    ReadOptions,
    check_cells,
    count_ids,
    numbered_layers,
    rows_as_hidden,
    rows_in_order,
)

DEFAULT_WINDOW_TOKENS = 4096
FEWEST_WINDOWS = 24  # that a trace is cut into, where the user names no size
CLEARLY_LONGER = 4
MAX_RAW_BYTES = 8 * 2**30
BASE64 = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/=\r\n")


class Routing(NamedTuple):
    """Experts of tokens in order, and the requests that they are of."""

    ids: NDArray[Any]  # [n, L, K]; -1 pads
    layers: Layers
    request_len: NDArray[np.int64] | None = None  # [Q] tokens of each; None: not known
    notes: tuple[str, ...] = ()


def window_of(num_tokens: int) -> int:
    """Tokens of a window: 4096, or fewer so that a short trace has enough windows to judge."""
    return max(1, min(DEFAULT_WINDOW_TOKENS, num_tokens // FEWEST_WINDOWS))


def as_load(routing: Routing, path: Path, options: ReadOptions) -> LoadFile:
    """The load of routing, by windows of as many tokens."""
    ids = routing.ids
    each = options.window_tokens or window_of(len(ids))
    num_experts = options.experts_in(f"trace {path}", max(int(ids.max()), 0))
    num_windows, num_layers = len(ids) // each, ids.shape[1]
    if num_windows < 2:
        raise HistoryError(
            f"trace {path} holds {len(ids)} tokens, {num_windows} windows of {each}, expected at "
            "least 2 windows"
        )
    stated = (options.num_layers, options.layer_ids, options.first_moe_layer, options.layout)
    if len(ids) < num_layers and stated == (None, None, None, None):
        raise ConfigError(
            f"{len(ids)} tokens of {num_layers} layers: as if ids were [layers, tokens, top-k], "
            f"expected [tokens, layers, top-k], or --num-layers {num_layers}"
        )
    check_cells(f"trace {path}", (num_windows, num_layers, num_experts), ids.nbytes)
    tokens = np.zeros((num_windows, num_layers, num_experts), dtype=np.int64)
    for window, layer in np.ndindex(num_windows, num_layers):
        chosen = ids[window * each : (window + 1) * each, layer]
        tokens[window, layer] = count_ids(chosen, num_experts)
    notes = routing.notes
    if rest := len(ids) % each:
        text = f"{rest} of {len(ids)} tokens, behind the last whole window of {each}, are not used"
        notes = (*notes, text)
    return LoadFile(LoadHistory(tokens), routing.layers, notes=notes, top_k=ids.shape[2])


def read_trace(path: Path, layout: Layout | None = None) -> Routing:
    """Read ``expert_ids`` of an ``.npz`` file, and the requests and layers that it names.

    Raises:
        HistoryError: a file that is missing, damaged, or holds something else.
        ConfigError: the layout is not known.
    """
    members = ("expert_ids", "request_len", "layer_ids", "load")
    arrays, names = read_arrays(path, members)
    if "expert_ids" not in arrays:
        raise HistoryError(f"trace {path} holds {names}, expected expert_ids")
    ids, lengths = arrays["expert_ids"], arrays.get("request_len")
    if ids.ndim != 3 or ids.dtype.kind not in "iu" or not ids.size:
        raise HistoryError(
            f"trace {path}: expert_ids has shape {ids.shape} and dtype {ids.dtype}, "
            "expected integers [layers, tokens, top-k] or [tokens, layers, top-k]"
        )
    if ids.min() < -1:
        found = f"trace {path} names experts {ids.min()}..{ids.max()}"
        raise HistoryError(f"{found}, expected 0, 1, 2, ..., or -1 for padding")
    if lengths is not None:  # none is so large that the sum could overflow
        where = f"trace {path}: request_len"
        lengths = whole_array(np.atleast_1d(lengths), (None,), where, high=2**31 - 1)
        lengths = lengths.astype(np.int64)
    if layout is None:
        layout = _layout_of(path, ids.shape, lengths)
    if layout not in get_args(Layout):
        raise ConfigError(
            f"unknown layout {layout!r}, expected one of: {', '.join(get_args(Layout))}"
        )
    ids = ids.transpose(1, 0, 2) if layout == "layers-first" else ids
    if lengths is not None and lengths.sum() != len(ids):
        raise HistoryError(
            f"trace {path}: request_len sums to {lengths.sum()} tokens, expected {len(ids)}"
        )
    unread = [name for name in names.split(", ") if name not in members]
    notes = (f"{path.name}: not read: {', '.join(unread)}",) if unread else ()
    return Routing(ids, numbered_layers(arrays.get("layer_ids"), ids.shape[1]), lengths, notes)


def _layout_of(path: Path, shape: tuple[int, ...], lengths: NDArray[np.int64] | None) -> Layout:
    first, second, _ = shape
    if lengths is not None and first != second:
        return "tokens-first" if lengths.sum() == first else "layers-first"
    if second >= CLEARLY_LONGER * first:
        return "layers-first"
    if first >= CLEARLY_LONGER * second:
        return "tokens-first"
    raise ConfigError(
        f"trace {path}: expert_ids {shape} may be layers-first or tokens-first, "
        "expected the layout to be named"
    )


def read_raw(paths: Sequence[Path], options: ReadOptions) -> LoadFile:
    """Read raw int32 of SGLang, or its base64, of requests in order; rows are hidden layers."""
    num_layers, top_k = options.num_layers, options.top_k
    if num_layers is None or top_k is None:
        raise ConfigError("raw routing has no shape, expected --num-layers and --top-k")
    raw = np.concatenate([_raw_ids(path, num_layers, top_k) for path in paths])
    ids = whole_array(raw, (None, None, None), "raw routing", low=-1, high=2**31 - 1)
    # A dense layer's entries were never written: all alike, which no top-k is.
    idle = np.zeros(num_layers, dtype=np.bool_)
    if top_k > 1:
        idle = (ids == ids[:, :, :1]).all(axis=(0, 2))
        _check_distinct(ids[:, ~idle], paths[0])
    ids = np.where(idle[None, :, None] & (ids >= 0), -1, ids)
    return as_load(Routing(ids, rows_as_hidden(num_layers)), paths[0], options)


def _raw_ids(path: Path, num_layers: int, top_k: int) -> NDArray[np.int32]:
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


def of_request(values: Any, path: Path, options: ReadOptions) -> LoadFile:
    """The load of vLLM's ids [n, L, K] that were read already; rows are MoE layers in order."""
    ids = _checked_ids(values, path)
    return as_load(Routing(ids, rows_in_order(ids.shape[1])), path, options)


def read_requests(paths: Sequence[Path]) -> Routing:
    """Routing of vLLM's requests, a ``.npy`` file each, in their order.

    Raises:
        HistoryError: files of different layers or top-k.
    """
    requests = [_checked_ids(read_npy(path), path) for path in paths]
    for path, ids in zip(paths, requests, strict=True):
        if ids.shape[1:] != requests[0].shape[1:]:
            raise HistoryError(
                f"{path} has layers and top-k {ids.shape[1:]}, expected {requests[0].shape[1:]} as "
                f"{paths[0].name}"
            )
    lengths = np.array([len(ids) for ids in requests], dtype=np.int64)
    return Routing(np.concatenate(requests), rows_in_order(requests[0].shape[1]), lengths)


def _checked_ids(values: Any, path: Path) -> NDArray[Any]:
    where = f"{path}: the array [tokens, layers, top-k]"
    ids = whole_array(values, (None, None, None), where, low=-1, high=2**31 - 1)
    if not ids.size or ids.shape[2] > LARGEST_TOP_K:
        raise HistoryError(f"{where} has shape {ids.shape}, expected a top-k of 1..{LARGEST_TOP_K}")
    _check_distinct(ids, path)
    return ids


def _check_distinct(ids: NDArray[Any], path: Path) -> None:
    if (wrong := repeats_expert(ids)) is not None:
        token, layer = wrong
        raise HistoryError(
            f"{path.name}: token {token}, row {layer} names experts {ids[token, layer].tolist()}, "
            "expected different ones, -1 for padding: or they are counts, or layers or top-k differ"
        )
