"""Shared parts of all kernels: typed access to triton, argument checks, and the grid.

Where only the device knows the number of rows, work is divided over a fixed grid. Rows of slot c
are ``starts[c]`` up to ``starts[c] + counts[c]``. That covers rows grouped one slot after another,
and padded blocks of M rows a slot, flattened, with ``starts = c * M``. Work is cut into blocks of
rows, numbered through all slots; each program takes every n-th. A grid sized by the most rows that
a slot could hold would consist of idle programs instead: with 64 slots of at most 512 rows, 97 % of
them when the mean is 16.

Shapes:  C slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

# Without a device kernels run in triton's interpreter, one program after another: a few are enough
# to see that work is divided rightly.
INTERPRETED_MULTIPROCESSORS = 2


def kernel(*varying: str) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function at its first launch.

    Args:
        varying: parameters whose values say nothing about the next launch, such as a number of
            tokens, or a pointer into the middle of a table. By default triton compiles again when a
            number becomes 1 or a multiple of 16, and when a pointer is no longer aligned: that
            would stop serving for a second at an arbitrary step.
    """

    def compiled(function: Callable[..., Any]) -> Any:
        return triton.jit(function, do_not_specialize=list(varying))

    return compiled


def check(holds: bool, found: str, expected: str) -> None:
    """Refuse arguments of a shape, type or layout that a kernel would misread.

    Raises:
        ValueError: ``holds`` is false.
    """
    if not holds:
        raise ValueError(f"found {found}, expected {expected}")


def check_slots(starts: torch.Tensor, counts: torch.Tensor) -> None:
    """Refuse slot descriptions that are not two int32 vectors of one length."""
    alike = starts.shape == counts.shape and starts.dtype == counts.dtype == torch.int32
    check(
        alike and counts.dim() == 1 and starts.is_contiguous() and counts.is_contiguous(),
        f"starts {describe(starts)} and counts {describe(counts)}",
        "two contiguous int32 vectors [C]",
    )


def expect(
    name: str,
    tensor: torch.Tensor,
    dtype: torch.dtype,
    shape: Sequence[int | None] | None = None,
    strides: Sequence[int | None] | None = None,
) -> None:
    """Refuse a tensor of another type, shape or layout than a kernel reads.

    Args:
        name: of the argument.
        tensor: its value.
        dtype: expected.
        shape: expected; None stands for any, of one dimension or of all.
        strides: expected, in the same way; by default the tensor must be contiguous.

    Raises:
        ValueError: it is another one.
    """
    is_laid_out = tensor.is_contiguous() if strides is None else _fits(tensor.stride(), strides)
    if tensor.dtype == dtype and _fits(tensor.shape, shape) and is_laid_out:
        return
    kind = str(dtype).removeprefix("torch.")
    sizes = "of any shape" if shape is None else _shown(shape)
    layout = "contiguous" if strides is None else f"with strides {_shown(strides)}"
    raise ValueError(
        f"found {name} {describe(tensor)} with strides {list(tensor.stride())}, "
        f"expected {kind} {sizes} {layout}"
    )


def _fits(found: Sequence[int], expected: Sequence[int | None] | None) -> bool:
    if expected is None:
        return True
    each = zip(found, expected, strict=False)
    return len(found) == len(expected) and all(e is None or f == e for f, e in each)


def _shown(expected: Sequence[int | None]) -> str:
    return f"[{', '.join('any' if one is None else str(one) for one in expected)}]"


def describe(tensor: torch.Tensor) -> str:
    """Type and shape, as error messages give them."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def largest_tile(size: int, most: int) -> int:
    """Return the largest power of two that divides ``size`` and is at most ``most``."""
    return min(size & -size, most)


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a device: grids are multiples of it, whatever the number of tokens."""
    if device.type != "cuda":
        return INTERPRETED_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@kernel()
def ends_of_slots(
    counts: tl.tensor,
    num_slots: tl.tensor,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
) -> tl.tensor:
    """[SLOTS] pieces of work up to and with each slot: PARTS for each block of BLOCK rows."""
    slot = tl.arange(0, SLOTS)
    count = tl.load(counts + slot, mask=slot < num_slots, other=0)
    return tl.cumsum((count + BLOCK - 1) // BLOCK * PARTS, 0)


@kernel()
def locate(piece: tl.tensor, ends: tl.tensor) -> tl.tensor:
    """(slot, first piece of the slot, pieces of the slot) for a piece of work."""
    is_before = ends <= piece
    slot = tl.sum(is_before.to(tl.int32), 0)
    first = tl.max(tl.where(is_before, ends, 0), 0)
    # Of the slots that are not before, the piece's own ends first.
    end = tl.min(tl.where(is_before, tl.max(ends, 0), ends), 0)
    return slot, first, end - first
