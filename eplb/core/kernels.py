"""Time of experts in an engine's kernel, from constants that were fitted to measured times.

The planner's curve g(n), its gate and the simulator have their times from this one form:

    fixed + sum over slots of (sqrt(reading**2 + (rows * products)**2) + rows * columns)

A slot with rows reads its weights while it multiplies: the two hide each other as far as a root of
squares says. Columns of its rows are quantised, permuted and summed by kernels of their own. A
kernel that computes whole tiles takes a slot's rows up to the end of its last tile. Where no CUDA
graph holds the launches, their fixed time passes beside the kernels', and the root of squares is
taken of it and the sum. ``benchmarks/fidelity`` fits the constants in ``kernels.json`` to even rows
and judges them on uneven ones, and on shapes that it did not use; what the file calls error is of
those.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eplb.core.model import PRECISIONS, ModelShape
from eplb.errors import ConfigError

Curve = tuple[tuple[float, float], ...]  # (rows of a slot, microseconds), both rising
Rows = NDArray[np.float64]
BINS = (32.0, 256.0, np.inf)  # most rows of a slot, in the mean: errors are told apart by them
ENGINES = ("sglang", "trtllm", "vllm")  # whose kernels have constants; the first is the default
# Cards that no table has, by the data sheet: parts of another card's reading and products.
LIKE = {"h800": ("h100", 1.0, 1.0), "h20": ("h200", 4.0 / 4.8, 148 / 989)}
OCTAVES = 15  # points of a curve: up to 16,384 rows
# Standard scores of the 10th, 30th, 50th, 70th and 90th percentile: rows of a slot step by step.
CHANCE = (-1.2816, -0.5244, 0.0, 0.5244, 1.2816)
Errors = tuple[tuple[float, float], ...]  # for each of the bins: median, 90th percentile


@dataclass(frozen=True)
class Kernel:
    """Constants of one kernel on one card in one precision."""

    card: str
    engine: str  # "": a measured file's
    name: str
    precision: str
    is_prefill: bool
    fixed_us: float
    reads: float  # bytes of weights a second
    flops: float  # a second
    column_ps: float  # time of one row and hidden column: quantising, permuting and summing it
    tile: int = 1  # rows that a slot is filled up to
    is_eager: bool = False  # no CUDA graph: the host launches while kernels run
    other_ps: float = 0.0  # the same of each copy in the whole group: its table has it, serving not
    errors: Errors = ()  # relative errors of uneven rows
    instead_of: str = ""  # the engine that was asked for, whose kernel has no constants

    def slot_us(self, rows: Rows, weights: float | Rows, hidden: float | Rows) -> Rows:
        """Time of slots with so many rows in a step, above 0, and experts with so many weights."""
        filled = np.ceil(rows / self.tile) * self.tile
        reading = weights * PRECISIONS[self.precision] / self.reads * 1e6
        products = 2 * weights * filled / self.flops * 1e6
        us: Rows = np.hypot(reading, products) + filled * hidden * self.column_ps / 1e6
        return us

    def mean_slot_us(self, rows: Rows, model: ModelShape) -> Rows:
        """Time of slots by their mean rows, over steps in which rows come independently."""
        part = -np.expm1(-rows)  # part of the steps in which a slot has a row
        us: Rows = part * self._while_busy(rows, model)
        return us

    def _while_busy(self, rows: Rows, model: ModelShape) -> Rows:
        # A slot with 60 rows in the mean has more than a tile of 64 in every third step.
        scores = CHANCE if self.tile > 1 else (0.0,)
        steps = (np.maximum(rows + score * np.sqrt(rows), 1.0) for score in scores)
        us: Rows = np.mean(
            [self.slot_us(one, model.expert_weights, model.hidden) for one in steps], axis=0
        )
        return us

    def curve(self, model: ModelShape) -> Curve:
        """Time of one slot, as plans read it: between points it is straight within 1.3 %."""
        rows: Rows = 2.0 ** np.arange(OCTAVES, dtype=np.float64)
        return tuple(zip(rows.tolist(), self._while_busy(rows, model).tolist(), strict=True))

    def rank_us(self, slots_us: Rows) -> Rows:
        """Time of ranks with rows, from the sums over their slots."""
        us: Rows = (np.hypot if self.is_eager else np.add)(self.fixed_us, slots_us)
        return us

    def error_at(self, rows: float) -> float | None:
        """Median error where slots have so many rows in the mean; None: it was not measured."""
        return self.errors[sum(rows > most for most in BINS)][0] if self.errors else None

    @property
    def source(self) -> str:
        """The kernel's name in answers."""
        if not self.engine:
            return self.name
        sheet = f", by its data sheet from {LIKE[self.card][0]}" if self.card in LIKE else ""
        asked = f", as {self.instead_of}'s has no constants" if self.instead_of else ""
        return f"{self.engine}'s {self.name} in {self.precision} on {self.card}{sheet}{asked}"


def kernel_for(card: str, precision: str, engine: str | None, *, is_prefill: bool) -> Kernel:
    """The kernel that an engine uses, else that of the first engine that has one.

    Raises:
        ConfigError: no constants for the card and the precision; the nearest ones are named, with
            their error.
    """
    like, reads, flops = LIKE.get(card, (card, 1.0, 1.0))
    engines = (engine, *(one for one in ENGINES if one != engine)) if engine else ENGINES
    of_card = [one for one in known_kernels() if one.card == like]
    # A kernel of decode serves prefill too, where the engine has no other; not the reverse.
    suited = [one for one in of_card if one.precision == precision]
    suited = [one for one in suited if is_prefill or not one.is_prefill]
    suited.sort(key=lambda one: (engines.index(one.engine), one.is_prefill != is_prefill))
    if suited:
        chosen = suited[0]
        return replace(
            chosen,
            card=card,
            reads=chosen.reads * reads,
            flops=chosen.flops * flops,
            instead_of=engine if engine and engine != chosen.engine else "",
        )
    nearest = "; ".join(
        f"{one.source} (error {one.errors[1][0]:.0%} at 33 to 256 rows)" for one in of_card[:3]
    )
    raise ConfigError(
        f"no constants for experts in {precision} on {card}; nearest: {nearest or 'none'}; "
        "expected another --precision, or --expert-times with a measured file"
    )


def known_kernels() -> tuple[Kernel, ...]:
    """All kernels that have constants, in the order of their names."""
    found = (
        Kernel(**(one | {"errors": tuple(map(tuple, one["errors"]))})) for one in _file()["kernels"]
    )
    return tuple(sorted(found, key=lambda one: (one.card, one.engine, one.name)))


def left_out_kernels() -> dict[str, list[list[float]]]:
    """Kernels that the form does not describe, with their errors."""
    found: dict[str, list[list[float]]] = _file()["left_out"]
    return found


@cache
def _file() -> dict[str, Any]:
    text = files("eplb.core").joinpath("kernels.json").read_text(encoding="utf-8")
    record: dict[str, Any] = json.loads(text)
    return record
