"""Time of a step from the tokens of its slots: dispatch, experts and combine, layer by layer.

Ranks wait for each other at dispatch and at combine, so a layer takes

    max over ranks of dispatch + max of experts + max of combine

and the shared expert and what is outside of the MoE layer on top, which balance does not change.
With two-batch overlap a layer takes the longer of communication and computation.

Tokens start evenly on all live ranks, or on attention ranks of other nodes. In decode (DeepEP's
low-latency mode) each copy of a token crosses its links alone. In prefill (normal mode) a token
crosses the network once for each node that it goes to, and reaches a rank once.

The time of a rank's experts is g(n), by the rows of its slots: that of the kernel that an engine
uses, by the constants of ``eplb.core.kernels``, or a measured curve, a file that
``benchmarks/expert_curve.py`` writes (docs/simulator.md has its format; its even rows give the time
of one slot). Slots add up: each takes its own time for reading its weights and for its products.

A kernel computes whole tiles: as many of the largest as a slot fills, and for the rest the smallest
one that holds it. Where the file names the tiles, rows count up to the end of the last one: between
measured points a slot would otherwise be too fast, on average by half of a tile.

NVLink: DeepEP's dispatch and combine on H200 reached 0.6 of the data sheet (benchmarks/reports,
2026-11-20), which is assumed of the other cards.

Shapes:  L MoE layers, S slots, R ranks, N nodes, P points.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eplb.core.cost import CostModel
from eplb.core.kernels import Kernel
from eplb.core.model import ModelShape
from eplb.core.topology import Topology
from eplb.errors import ConfigError
from telemetry.formats.bounded import read_json, reading

Rows = NDArray[np.float64]
LINKS = 0.6  # part of the data sheet that is reached
MANY_ROWS = 10_000.0  # of a rank: links take longer than their least time


@dataclass(frozen=True)
class Hardware:
    """One accelerator and its links, per direction, at the rates that are reached.

    Raises:
        ConfigError: a figure that is not above 0.
    """

    name: str
    memory_bytes: float
    node_bytes_s: float  # to another rank of the node
    network_bytes_s: float  # of one port, to ranks of other nodes
    port_ranks: int = 1  # neighbours of a node that share a port

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name != "name" and not value > 0:
                raise ConfigError(f"hardware {self.name}: {name} is {value}, expected above 0")


def _card(name: str, gb: float, nvlink_gb: float) -> Hardware:
    # DeepEP over one port of 400 Gbit/s, as its authors measured: 46 GB/s.
    return Hardware(name, gb * 1e9, nvlink_gb * 1e9 * LINKS, 46e9)


HARDWARE = {
    "h20": _card("h20", 96, 450),
    "h100": _card("h100", 80, 450),
    "h200": _card("h200", 141, 450),
    "h800": _card("h800", 80, 200),
    "b200": _card("b200", 180, 900),
    "gb200": _card("gb200", 186, 900),
}


def by_port(of_ranks: NDArray[np.float64], topology: Topology, port_ranks: int) -> Rows:
    """[..., R] what passes through the port of each rank, for what each rank sends or receives."""
    if port_ranks == 1:
        return of_ranks
    node, ports = topology.node_of_rank, np.zeros(topology.num_ranks, dtype=np.int64)
    for first in np.unique(node):
        here = np.flatnonzero(node == first)
        ports[here] = here[0] + np.arange(len(here)) // port_ranks  # numbers of no other node
    together: Rows = of_ranks @ (ports[:, None] == ports[None, :]).astype(np.float64)
    return together


def hardware_named(name: str) -> Hardware:
    """Look a card up.

    Raises:
        ConfigError: an unknown name; the message lists the known ones.
    """
    if name not in HARDWARE:
        known = ", ".join(sorted(HARDWARE))
        raise ConfigError(f"unknown hardware {name!r}, expected one of: {known}")
    return HARDWARE[name]


FORMAT, VERSION = "eplb-expert-time", 1
OCTAVES, IN_OCTAVE = 17, 4  # points of a kernel's curve: up to 131,072 rows
# Standard scores of the 10th, 30th, 50th, 70th and 90th percentile: rows of a slot step by step.
CHANCE = (-1.2816, -0.5244, 0.0, 0.5244, 1.2816)
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
    tiles = (kernel.tile,) if kernel.tile > 1 else ()
    return ExpertTime(rows, kernel.slot_us(rows, model), kernel.source, tiles, kernel)


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


@dataclass(frozen=True)
class Transport:
    """What dispatch and combine take beside the rates of links: FP8 with scales, and BF16 back."""

    dispatch_us: float = 0.0  # of few tokens
    combine_us: float = 0.0
    dispatch_rate: float = 1.0  # part of the rate of the link that takes longer
    combine_rate: float = 1.0
    dispatch_bytes: float = 1 + 4 / 128  # of each of a row's columns
    combine_bytes: float = 2.0


# DeepEP by the nodes of a group, of even load (benchmarks/fidelity/links.py).
LOW_LATENCY = {
    1: Transport(14.9, 11.3, 1.06, 0.88),
    2: Transport(19.6, 24.8, 1.02, 1.01),
    4: Transport(25.3, 25.3, 1.04, 0.99),
    8: Transport(27.2, 25.8, 1.04, 1.01),
}
NORMAL = {
    1: Transport(34.5, 51.8, 1.23, 1.26),
    2: Transport(60.9, 93.2, 0.87, 0.69),
    4: Transport(92.9, 121.9, 0.99, 0.96),
    8: Transport(121.1, 134.4, 0.49, 0.47),
}


def deepep(nodes: int, *, is_prefill: bool) -> Transport:
    """DeepEP between the ranks of so many nodes: what was measured on the nearest number."""
    known = NORMAL if is_prefill else LOW_LATENCY
    return known[min(known, key=lambda one: abs(np.log(one / nodes)))]


@dataclass(frozen=True)
class StepModel:
    """What decides the time of a step beside its tokens.

    Raises:
        ConfigError: times below 0.
    """

    model: ModelShape
    topology: Topology
    hardware: Hardware
    experts: ExpertTime
    is_prefill: bool = False
    other_us: float = 0.0  # of a layer outside its MoE part: attention, norms, router
    is_overlapped: bool = False  # two batches in turns
    is_separate: bool = False  # tokens start on attention ranks, and all cross the network
    transport: Transport | None = None  # None: DeepEP, by mode and nodes

    def __post_init__(self) -> None:
        if not self.other_us >= 0:
            raise ConfigError(f"other_us is {self.other_us}, expected 0 or more")
        if not (self.model.hidden and self.model.intermediate):
            raise ConfigError("the model has no sizes of experts, expected hidden and intermediate")

    def of(self, rows: NDArray[np.float64]) -> StepTime:
        """Times of one step with rows [L, S] in its slots."""
        topology, serving = self.topology, self.topology.serving
        by_rank = rows @ np.eye(topology.num_ranks)[topology.rank_of_slot]
        of_ranks = self.experts.of_ranks(rows, topology)[:, serving]
        return self._step(by_rank, (of_ranks / topology.rank_speed[serving]).max(axis=1))

    def bound(self, rows: NDArray[np.float64]) -> StepTime:
        """Times below those of any placement, for rows [L, E] of experts: no expert is read twice.

        Ranks share the work of experts by their speed, and rows cross links evenly.
        """
        serving = self.topology.serving
        by_rank = rows.sum(axis=1, keepdims=True) * (serving / serving.sum())
        slots_us = self.experts.at(float(rows.mean())).of_slots(rows).sum(axis=1)
        speed = float(self.topology.rank_speed[serving].sum())
        return self._step(by_rank, self.experts.of_sum(slots_us / speed))

    def in_prices(self, cost: CostModel) -> CostModel:
        """A planner's prices with these times, where it has none."""
        if cost.curve:
            return cost
        cost = replace(cost, row_us=self._row_us())
        if self.experts.kernel is not None:
            return cost.with_kernel(self.experts.kernel, self.model)
        us = np.maximum.accumulate(self.experts.us)
        return replace(cost, curve=tuple(zip(self.experts.rows.tolist(), us.tolist(), strict=True)))

    def _row_us(self) -> float:
        """What one more row of a rank adds to dispatch and combine, beside even load."""
        serving = self.topology.serving.astype(np.float64)
        even, more = serving * MANY_ROWS, np.diag(serving)[self.topology.serving]
        step = self._step(np.vstack([even, even + more]), np.zeros(1 + len(more)))
        links = step.dispatch + step.combine
        return float((links[1:] - links[0]).mean())

    def _step(self, by_rank: NDArray[np.float64], experts: NDArray[np.float64]) -> StepTime:
        """Times of a step with rows [L, R] of ranks, and the longest experts [L]."""
        topology, serving = self.topology, self.topology.serving
        speed = topology.rank_speed[serving]
        near, far = self._copies(by_rank)
        busy = by_rank.sum(axis=1) > 0
        far = by_port(far, topology, self.hardware.port_ranks)
        by = self.transport or deepep(topology.num_nodes, is_prefill=self.is_prefill)
        dispatch = self._link_us(near, far, by.dispatch_bytes) / by.dispatch_rate
        combine = self._link_us(near, far, by.combine_bytes) / by.combine_rate
        dispatch, combine = dispatch + by.dispatch_us * busy, combine + by.combine_us * busy
        tokens = by_rank.sum(axis=1) / self.model.top_k / max(int(serving.sum()), 1)
        shared = self.model.num_shared_experts * self.experts.of_slots(tokens) / speed.min()
        network = self._network_us(far, by)
        return StepTime(
            dispatch, experts, combine, shared, self.other_us, self.is_overlapped, network
        )

    def _copies(
        self, by_rank: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """[L, R] rows that reach each rank from its node, and from others."""
        topology, num_nodes = self.topology, self.topology.num_nodes
        ranks_of_node = np.bincount(topology.node_of_rank[topology.serving], minlength=num_nodes)
        here = (ranks_of_node / ranks_of_node.sum())[topology.node_of_rank]  # of the tokens
        here = np.zeros_like(here) if self.is_separate else here
        if not self.is_prefill:
            return by_rank * here, by_rank * (1 - here)
        total = by_rank.sum(axis=1, keepdims=True)
        of_node = by_rank @ np.eye(num_nodes)[topology.node_of_rank]
        part = np.divide(of_node, total, out=np.zeros_like(of_node), where=total > 0)
        reached = total / self.model.top_k * (1 - (1 - part) ** self.model.top_k)  # [L, N] tokens
        each = reached / np.maximum(ranks_of_node, 1)
        part = np.divide(by_rank, total, out=np.zeros_like(by_rank), where=total > 0)
        once = total / self.model.top_k * (1 - (1 - part) ** self.model.top_k)  # [L, R] tokens
        return once, each[:, topology.node_of_rank] * (1 - here)

    def _link_us(
        self, near: NDArray[np.float64], far: NDArray[np.float64], width: float
    ) -> NDArray[np.float64]:
        """[L] microseconds of the rank whose links take longest."""
        scale = self.model.hidden * width * 1e6
        times = np.maximum(
            near * scale / self.hardware.node_bytes_s, far * scale / self.hardware.network_bytes_s
        )
        slowest: NDArray[np.float64] = times.max(axis=1)
        return slowest

    def _network_us(self, far: NDArray[np.float64], by: Transport) -> NDArray[np.float64]:
        """[L] microseconds in which rows pass through the busiest port, both ways together."""
        width = by.dispatch_bytes + by.combine_bytes
        longest: NDArray[np.float64] = far.max(axis=1) * (
            self.model.hidden * width * 1e6 / self.hardware.network_bytes_s
        )
        return longest


@dataclass(frozen=True, eq=False)
class StepTime:
    """Microseconds of each layer's parts, of the rank that the others wait for."""

    dispatch: NDArray[np.float64]  # [L]
    experts: NDArray[np.float64]  # [L]
    combine: NDArray[np.float64]  # [L]
    shared: NDArray[np.float64]  # [L]
    other_us: float
    is_overlapped: bool
    network: NDArray[np.float64]  # [L] of dispatch and combine, in which network ports are busy

    @property
    def parts_us(self) -> tuple[float, float, float, float]:
        """Of the step: dispatch, experts, combine, and the rest."""
        rest = float(self.shared.sum()) + self.other_us * len(self.experts)
        links = float(self.dispatch.sum()), float(self.combine.sum())
        return links[0], float(self.experts.sum()), links[1], rest

    @property
    def network_part(self) -> float:
        """Of the step, in which its rows pass through the busiest network port."""
        return min(1.0, float(self.network.sum()) / self.us) if self.us else 0.0

    @property
    def layers_us(self) -> NDArray[np.float64]:
        """[L] of each layer."""
        links, products = self.dispatch + self.combine, self.experts + self.shared + self.other_us
        if self.is_overlapped:
            overlapped: NDArray[np.float64] = np.maximum(links, products)
            return overlapped
        summed: NDArray[np.float64] = links + products
        return summed

    @property
    def us(self) -> float:
        """Of the step."""
        return float(self.layers_us.sum())
