"""The sum of each token's weighted results on one rank, before they travel back.

Shapes:  n rows, T tokens, K places of a token, H columns.
"""

from __future__ import annotations

import torch
import triton.language as tl

from runtime.kernels.launch import expect, kernel, largest_tile

MOST_COLUMNS = 1024  # most columns of a program


def sum_rows(
    results: torch.Tensor, place: torch.Tensor, weights: torch.Tensor, out: torch.Tensor
) -> None:
    """Write sum over k of weight times row into ``out`` [T, H], in the order of k.

    Each row is read once. Computed in float32, rounded once.

    Args:
        results: [n, H].
        place: [T, K] int64, the row of each pair; negative: the pair has none here.
        weights: [T, K] float32.
        out: of the type of ``results``; 0 for a token without a row.
    """
    num_tokens, top_k = place.shape
    columns = results.shape[1]
    expect("results", results, results.dtype, None, (None, 1))
    expect("place", place, torch.int64, None, (top_k, 1))
    expect("weights", weights, torch.float32, (num_tokens, top_k), (top_k, 1))
    expect("out", out, results.dtype, (num_tokens, columns), (None, 1))
    if num_tokens == 0:
        return
    width = largest_tile(columns, MOST_COLUMNS)
    _sum_rows[(num_tokens, columns // width)](
        results,
        place,
        weights,
        out,
        results.stride(0),
        out.stride(0),
        TOP_K=top_k,
        WIDTH=width,
    )


@kernel("place", "weights")
def _sum_rows(
    results: tl.tensor,
    place: tl.tensor,
    weights: tl.tensor,
    out: tl.tensor,
    results_stride: tl.tensor,
    out_stride: tl.tensor,
    TOP_K: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    total = tl.zeros([WIDTH], dtype=tl.float32)
    for k in range(TOP_K):
        row = tl.load(place + token * TOP_K + k)
        if row >= 0:
            weight = tl.load(weights + token * TOP_K + k)
            total += weight * tl.load(results + row * results_stride + column).to(tl.float32)
    tl.store(out + token * out_stride + column, total.to(out.dtype.element_ty))
