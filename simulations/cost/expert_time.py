"""Time of a rank's experts by the rows of its slots: g(n), of an engine's kernel or measured.

A measured curve is a file that ``benchmarks/expert_curve.py`` writes; docs/simulator.md has its
format. Its even rows give the time of one slot. Without a file it is that of the kernel that an
engine uses, by the constants of ``simulations.cost.kernels``. Slots add up: each takes its own
time for reading its weights and for its products.

A kernel computes whole tiles: as many of the largest as a slot fills, and for the rest the smallest
one that holds it. Where the file names the tiles, rows count up to the end of the last one: between
measured points a slot would otherwise be too fast, on average by half of a tile.

Shapes:  L MoE layers, S slots, R ranks, P points.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eplb.core.model import ModelShape
from eplb.core.topology import Topology
from eplb.errors import ConfigError
from simulations.cost.kernels import Kernel
from telemetry.formats.bounded import read_json, reading

FORMAT, VERSION = "eplb-expert-time", 1
OCTAVES, IN_OCTAVE = 17, 4  # points of a kernel's curve: up to 131,072 rows
# Standard scores of the 10th, 30th, 50th, 70th and 90th percentile: rows of a slot step by step.
CHANCE = (-1.2816, -0.5244, 0.0, 0.5244, 1.2816)
Rows = NDArray[np.float64]
Tiles = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class ExpertTime:
    """Microseconds of one slot by its rows.

    Args:
        tiles: rows of each, rising; none: any number of rows counts.
        most_usual_rows: of a slot, in the mean of all slots; with more, ``above`` is what runs.

    Raises:
        ConfigError: points that are no curve, or tiles that are none.
    """

    rows: NDArray[np.float64]  # [P] rising
    us: NDArray[np.float64]  # [P]
    source: str  # what was measured
    tiles: Tiles = ()
    kernel: Kernel | None = None  # None: a measured file
    most_usual_rows: float = np.inf
    above: ExpertTime | None = None

    def __post_init__(self) -> None:
        if list(self.tiles) != sorted({tile for tile in self.tiles if tile > 0}):
            raise ConfigError(f"{self.source}: tiles {self.tiles}, expected rising rows above 0")
        points = list(zip(self.rows.tolist(), self.us.tolist(), strict=True))
        if len(points) < 2 or any(one[0] >= two[0] for one, two in pairwise(points)):
            raise ConfigError(
                f"{self.source}: rows {self.rows.tolist()}, expected two or more, rising"
            )
        for rows, us in points:
            if not (rows > 0 and 0 < us < np.inf):
                raise ConfigError(f"{self.source}: {us} us for {rows} rows, expected above 0")

    def error_at(self, rows: float) -> float | None:
        """Median error of a kernel where slots have so many rows; None: a measured file."""
        return None if self.kernel is None else self.kernel.error_at(rows)[0]

    def of_slots(self, rows: Rows) -> Rows:
        """Time of each slot alone; rows are means of steps, so that 0.3 is three steps of ten."""
        if not self.tiles:
            return np.asarray(active(rows) * self.of_counts(rows))
        # A slot with 60 rows in the mean has more than a tile of 64 in every third step.
        steps = [np.maximum(rows + score * np.sqrt(rows), 1.0) for score in CHANCE]
        return np.asarray(active(rows) * np.mean([self.of_counts(one) for one in steps], axis=0))

    def of_counts(self, rows: Rows) -> Rows:
        """Time of each slot alone in a step with so many rows, above 0."""
        counted = self.in_tiles(rows)
        within = np.interp(np.maximum(counted, 1.0), self.rows, self.us)
        # Past the last point each row takes what it takes there; reading is not done again.
        of_row = (self.us[-1] - self.us[-2]) / (self.rows[-1] - self.rows[-2])
        time: Rows = within + np.maximum(counted - self.rows[-1], 0.0) * of_row
        return time

    def in_tiles(self, rows: Rows) -> Rows:
        """Rows up to the end of each slot's last tile."""
        if not self.tiles:
            return rows
        largest = self.tiles[-1]
        whole = np.floor(rows / largest) * largest
        sizes = np.array((0, *self.tiles), dtype=np.float64)
        rest: Rows = sizes[np.searchsorted(sizes, rows - whole)]
        return whole + rest

    def at(self, usual_rows: float) -> ExpertTime:
        """What runs where a slot has so many rows, in the mean of all slots."""
        if self.above is None or usual_rows <= self.most_usual_rows:
            return self
        return self.above.at(usual_rows)

    def of_ranks(self, rows: Rows, topology: Topology) -> Rows:
        """[L, R] time of each rank for rows [L, S], at nominal speed."""
        curve = self.at(float(rows.mean()))
        members = np.eye(topology.num_ranks)[topology.rank_of_slot]
        return curve.of_sum(curve.of_slots(rows) @ members)

    def of_sum(self, slots_us: Rows) -> Rows:
        """Time of ranks from the sums over their slots."""
        if self.kernel is None:
            return slots_us
        # A rank without rows launches nothing.
        return self.kernel.rank_us(slots_us) * (slots_us > 0)


def active(rows: Rows) -> Rows:
    """Part of the steps in which a slot has a row, if they come independently."""
    part: Rows = -np.expm1(-rows)
    return part


def of_kernel(kernel: Kernel, model: ModelShape) -> ExpertTime:
    """The curve of a kernel for the experts of a model."""
    rows = 2.0 ** (np.arange(OCTAVES * IN_OCTAVE + 1) / IN_OCTAVE)
    reading, row = kernel.reading_us(model.expert_weights), kernel.row_us(model.expert_weights)
    us: Rows = np.hypot(reading, row * rows) + rows * model.hidden * kernel.column_ps / 1e6
    tiles = (kernel.tile,) if kernel.tile > 1 else ()
    return ExpertTime(rows, us, kernel.source, tiles, kernel)


def read_expert_time(path: Path, slots_per_rank: float) -> ExpertTime:
    """A measured curve: the points of the nearest number of slots.

    Raises:
        ConfigError: not such a file.
    """
    with reading(path, "a file of expert times"):
        record = read_json(path)
    where = str(path)
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise ConfigError(f"{where} is no file of expert times, expected format {FORMAT!r}")
    if record.get("version") != VERSION:
        raise ConfigError(f"{where} has version {record.get('version')!r}, expected {VERSION}")
    try:
        return curve_of(record, slots_per_rank, where)
    except (KeyError, TypeError, ValueError) as exc:
        raise ConfigError(f"{where}: a point lacks or has a wrong {exc}") from exc


def check_fits(path: Path, model: ModelShape) -> None:
    """Refuse a curve that was measured for experts of another size.

    Raises:
        ConfigError: hidden or intermediate size differs.
    """
    record = read_json(path)
    found = record.get("hidden"), record.get("intermediate")
    if found != (model.hidden, model.intermediate):
        raise ConfigError(
            f"{path} was measured for experts of {found[0]} x {found[1]}, "
            f"the model has {model.hidden} x {model.intermediate}"
        )


def curve_of(record: dict[str, Any], slots_per_rank: float, where: str) -> ExpertTime:
    """The curve of a file's record; ``where`` is for errors."""
    points = record["even"]
    counts = sorted({int(point["slots"]) for point in points})
    if not counts:
        raise ConfigError(f"{where} has no even rows, expected some")
    wanted = np.log(max(slots_per_rank, 1e-9))
    slots = min(counts, key=lambda count: abs(float(np.log(count)) - wanted))
    source = f"{record['model']} {record['dtype']} on {record['device']}, {record['date']}"
    curve: ExpertTime | None = None
    for number, tiling in reversed(list(enumerate(record.get("tilings", ({"tiles": ()},))))):
        chosen = sorted(
            (float(p["rows"]), float(p["us"]) / slots)
            for p in points
            if p["slots"] == slots and p.get("tiling", 0) == number
        )
        rows, us = np.array(chosen).reshape(-1, 2).T
        curve = ExpertTime(
            rows,
            us,
            f"{source}, {slots} slots",
            tuple(int(tile) for tile in tiling["tiles"]),
            most_usual_rows=float(tiling.get("most_usual_rows", np.inf)),
            above=curve,
        )
    if curve is None:
        raise ConfigError(f"{where} has no tilings, expected one or more, or none named")
    return curve


def predicted_us(curve: ExpertTime, counts: Sequence[int]) -> float:
    """Microseconds of one rank whose slots have so many rows in every step."""
    rows = np.array(counts, dtype=np.float64)
    curve, rows = curve.at(float(rows.mean())), rows[rows > 0]
    return float(curve.of_counts(rows).sum())
