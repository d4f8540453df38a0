"""Per-request routing as engines return it: which experts each token went to, by layer.

SGLang returns the bytes of int32 ``[tokens, layers, top-k]``, or their base64; they have no shape,
so layers and top-k are asked for. vLLM returns an ``.npy`` file of that shape, int16. Many requests
are one file after the other in order of time: SGLang's bytes can be joined as they are.

Shapes:  L layers, K experts per token.
"""

from __future__ import annotations

import base64
import binascii
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eplb.errors import ConfigError, HistoryError
from telemetry.formats.bounded import read_text_bytes
from telemetry.formats.npz import read_npy
from telemetry.formats.routing import DEFAULT_WINDOW_TOKENS, count_windows, load_trace
from telemetry.formats.types import (
    Layers,
    LoadFile,
    ReadOptions,
    resolve,
    rows_as_hidden,
    rows_in_order,
)

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
    if ids.ndim != 3 or ids.dtype.kind not in "iu" or not ids.size or ids.shape[2] > MAX_TOP_K:
        raise HistoryError(
            f"{path}: found {ids.shape} of {ids.dtype}, expected integers [tokens, layers, top-k]"
        )
    return ids


def read_npz(path: Path, options: ReadOptions) -> LoadFile:
    """Read ``expert_ids`` of an ``.npz`` file; see ``routing.py``."""
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
    each = options.window_tokens or max(1, min(DEFAULT_WINDOW_TOKENS, len(ids) // 2))
    history = count_windows(path, ids.transpose(1, 0, 2)[rows], each, options.num_experts)
    return LoadFile(history, layers, notes=notes)
