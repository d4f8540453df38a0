"""Fits the constants of kernels to even rows.

A kernel's are fitted to the even rows of every second shape that its table has, or of every second
number of ranks where it has one shape. All uneven rows judge them, and so do shapes that the fit
did not see. TensorRT-LLM's wide-EP table has no even rows: its fixed time is fitted to the rows
that its balancer spread over 288 slots, of the shapes that the fit saw, and reading and products
stay those of the layer table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from benchmarks.fidelity.cases import Cases
from benchmarks.fidelity.tables import Measured, Serving
from eplb.core.kernels import Kernel
from simulations.step_time import fitted

MOST_ROWS = 600  # rows of a fit: more do not change its constants
START = {"fixed_us": 20.0, "reads": 2e12, "flops": 5e14, "column_ps": 10.0, "other_ps": 1.0}


def shape_of(one: Measured) -> tuple[int, ...]:
    return one.hidden * one.intermediate, one.hidden, one.spread.experts, one.spread.top_k


def ranks_of(one: Measured) -> tuple[int, ...]:
    return (one.spread.ranks,)


def half_of(rows: Sequence[Measured], key: Callable[[Measured], tuple[int, ...]]) -> list[Measured]:
    """Rows of every second key."""
    chosen = set(sorted({key(one) for one in rows})[::2])
    kept = [one for one in rows if key(one) in chosen]
    return kept[:: max(1, len(kept) // MOST_ROWS)]


def even_part(rows: Sequence[Measured]) -> list[Measured]:
    """Even rows that a fit sees."""
    even = [one for one in rows if one.is_even]
    # The contiguous product takes whole tiles, and its even rows were measured without filling.
    even = [one for one in even if not one.serving.is_prefill or not one.rows % 128]
    return half_of(even, shape_of if len({shape_of(one) for one in even}) > 1 else ranks_of)


def fit(serving: Serving, rows: Sequence[Measured]) -> Kernel:
    """Constants with the least relative error on even rows."""
    seen = even_part(rows)
    constants: dict[str, Any] = asdict(serving) | START
    start = Kernel(**constants)
    if serving.is_prefill:
        start = replace(start, tile=128, is_eager=True)
    names = list(START)
    if not seen[0].has_all_tokens:
        names.remove("other_ps")
        start = replace(start, other_ps=0.0)
    cases = Cases(seen)
    kernel = fitted(start, names, cases.predicted_us, cases.us)
    shapes = {shape_of(one) for one in seen}
    balanced = [one for one in rows if (one.spread.slots or 0) > one.spread.experts]
    balanced = [one for one in balanced if shape_of(one) in shapes]
    if balanced:
        cases = Cases(balanced)
        kernel = fitted(kernel, ["fixed_us"], cases.predicted_us, cases.us)
    return kernel
