"""Time of a step from the tokens of its slots: dispatch, experts and combine, layer by layer.

Ranks wait for each other at dispatch and at combine, so a layer takes

    max over ranks of dispatch + max of experts + max of combine

and the shared expert and what is outside of the MoE layer on top, which balance does not change.
With two-batch overlap a layer takes the longer of communication and computation.

Tokens start evenly on all live ranks, or on attention ranks of other nodes. In decode (DeepEP's
low-latency mode) each copy of a token crosses its links alone. In prefill (normal mode) a token
crosses the network once for each node that it goes to, and reaches a rank once. Its rows are made
from it there, and their results summed: passes over memory that count beside the experts
(``StepModel.around_experts``). Sorting rows by slot, and the host's launches and its wait for the
counts, are not modelled: prefill of few tokens takes longer than is predicted.

The time of a rank's experts is that of the kernel that an engine uses, by the constants of
``eplb.core.kernels``, or by constants that are fitted here to the even rows of a measured file,
which ``benchmarks/expert_curve.py`` writes (docs/simulator.md has its format).

NVLink: DeepEP's dispatch and combine on H200 reached 0.6 of the data sheet (benchmarks/reports,
2026-11-20), which is assumed of the other cards.

Shapes:  L MoE layers, S slots, R ranks, N nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eplb.core.cost import CostModel
from eplb.core.kernels import BINS, Errors, Kernel
from eplb.core.model import PRECISIONS, ModelShape
from eplb.core.topology import Topology
from eplb.errors import ConfigError
from telemetry.formats.bounded import read_json, reading

Rows = NDArray[np.float64]
LINKS = 0.6  # part of the data sheet that is reached
MANY_ROWS = 10_000.0  # rows of a rank for which links take longer than their least time


@dataclass(frozen=True)
class Hardware:
    """One accelerator and its links, per direction, at the rates that are reached.

    Raises:
        ConfigError: a figure that is not above 0.
    """

    name: str
    memory_bytes: float
    node_bytes_s: float  # rate to another rank of the node
    network_bytes_s: float  # rate of one port, to ranks of other nodes
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
FEWEST_ROWS = 4  # numbers of even rows, for as many constants
REACH = 1e3  # a fit finds constants within a thousandth and a thousand times their start


def fitted(
    start: Kernel, names: Sequence[str], predicted_us: Callable[[Kernel], Rows], us: Rows
) -> Kernel:
    """The kernel whose constants of these names have the least relative error."""
    from scipy.optimize import least_squares  # late: slow to import, and few commands fit

    def kernel(logarithms: Rows) -> Kernel:
        return replace(start, **dict(zip(names, np.exp(logarithms).tolist(), strict=True)))

    first = np.log([getattr(start, name) for name in names])
    found = least_squares(
        lambda at: np.log(predicted_us(kernel(at)) / us),
        first,
        loss="soft_l1",
        f_scale=0.1,
        bounds=(first - np.log(REACH), first + np.log(REACH)),
    )
    return kernel(found.x)


def measured_kernel(path: Path, model: ModelShape) -> Kernel:
    """The kernel of a file of measured times: constants by its even rows, errors by its uneven.

    Raises:
        ConfigError: not such a file, or of experts of another size.
    """
    with reading(path, "a file of expert times"):
        record = read_json(path)
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise ConfigError(f"{path} is no file of expert times, expected format {FORMAT!r}")
    if record.get("version") != VERSION:
        raise ConfigError(f"{path} has version {record.get('version')!r}, expected {VERSION}")
    found = record.get("hidden"), record.get("intermediate")
    if found != (model.hidden, model.intermediate):
        raise ConfigError(
            f"{path} was measured for experts of {found[0]} x {found[1]}, "
            f"the model has {model.hidden} x {model.intermediate}"
        )
    try:
        return _kernel_of(record, model, str(path))
    except (KeyError, TypeError, ValueError) as exc:
        raise ConfigError(f"{path}: a point lacks or has a wrong {exc}") from exc


def _kernel_of(record: dict[str, Any], model: ModelShape, where: str) -> Kernel:
    precision, tilings = record["dtype"], record.get("tilings", ({"tiles": (1,)},))
    if precision not in PRECISIONS:
        raise ConfigError(f"{where}: dtype is {precision!r}, expected one of {list(PRECISIONS)}")
    points = [
        (point["rows"], point["slots"], point["us"])
        for point in record["even"]
        if point.get("tiling", 0) == _tiling_at(point["rows"], tilings)
    ]
    rows, slots, us = np.array(points, dtype=np.float64).reshape(-1, 3).T
    if len(set(rows.tolist())) < FEWEST_ROWS or not (rows > 0).all():
        raise ConfigError(f"{where}: rows {rows.tolist()}, expected {FEWEST_ROWS} numbers above 0")
    if not (np.isfinite(us) & (us > 0)).all():
        raise ConfigError(f"{where}: us {us.tolist()}, expected times above 0")
    least, most = us.argmin(), (rows * slots).argmax()
    start = Kernel(
        card=str(record["device"]),
        engine="",
        name=f"{record['model']} {precision} on {record['device']}, {record['date']}",
        precision=precision,
        is_prefill=False,
        fixed_us=us[least] / 10,
        reads=model.expert_weights * PRECISIONS[precision] * slots[least] / us[least] * 1e6,
        flops=2 * model.expert_weights * (rows * slots / us)[most] * 1e6,
        column_ps=(us / rows / slots)[most] / model.hidden * 1e5,
        tile=max(tilings[0]["tiles"]),
    )
    names = ("fixed_us", "reads", "flops", "column_ps")
    sizes = model.expert_weights, model.hidden
    kernel = fitted(start, names, lambda one: one.rank_us(slots * one.slot_us(rows, *sizes)), us)
    return replace(kernel, errors=_errors(kernel, record.get("uneven", ()), model))


def _tiling_at(rows: float, tilings: Sequence[dict[str, Any]]) -> int:
    """The tiling that serves slots with so many rows."""
    ends = (one.get("most_usual_rows", np.inf) for one in tilings)
    return next(number for number, most in enumerate(ends) if rows <= most)


def _errors(kernel: Kernel, uneven: Sequence[dict[str, Any]], model: ModelShape) -> Errors:
    """Median and 90th percentile by bins of mean rows, where each bin has some; else none."""
    sizes: list[list[float]] = [[] for _ in BINS]
    for point in uneven:
        us = predicted_us(kernel, point["counts"], model)
        sizes[sum(point["mean_rows"] > most for most in BINS)].append(abs(us / point["us"] - 1))
    if not all(sizes):
        return ()
    return tuple((float(np.median(one)), float(np.quantile(one, 0.9))) for one in sizes)


def predicted_us(kernel: Kernel, counts: Sequence[int], model: ModelShape) -> float:
    """Microseconds of one rank whose slots have so many rows in every step."""
    rows = np.array([count for count in counts if count], dtype=np.float64)
    return float(kernel.rank_us(kernel.slot_us(rows, model.expert_weights, model.hidden).sum()))


@dataclass(frozen=True)
class Transport:
    """Times of dispatch and combine beside the rates of links: FP8 with scales, BF16 back."""

    dispatch_us: float = 0.0  # time of few tokens
    combine_us: float = 0.0
    dispatch_rate: float = 1.0  # part of the rate of the link that takes longer
    combine_rate: float = 1.0
    dispatch_bytes: float = 1 + 4 / 128  # bytes of each of a row's columns
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
    """Everything that decides the time of a step beside its tokens.

    Raises:
        ConfigError: times below 0.
    """

    model: ModelShape
    topology: Topology
    hardware: Hardware
    kernel: Kernel
    is_prefill: bool = False
    other_us: float = 0.0  # time of a layer outside its MoE part: attention, norms, router
    is_overlapped: bool = False  # two batches in turns
    is_separate: bool = False  # tokens start on attention ranks, and all cross the network
    transport: Transport | None = None  # None: DeepEP, by mode and nodes

    def __post_init__(self) -> None:
        if not self.other_us >= 0:
            raise ConfigError(f"other_us is {self.other_us}, expected 0 or more")
        if not (self.model.hidden and self.model.intermediate):
            raise ConfigError("the model has no sizes of experts, expected hidden and intermediate")

    @property
    def around_experts(self) -> Kernel:
        """The kernel, and what else passes over a row's columns in prefill over normal mode.

        Tokens are quantised before they travel; their rows are gathered by slot, and read again to
        be summed into one row of each token. These bytes take their time at the rate at which the
        kernel reads weights: what it reaches of the memory's. Tables of engines are of the whole
        operation and have it already; a measured file has rows as a dispatcher gives them.
        """
        if self.kernel.engine or not self.is_prefill:
            return self.kernel
        by, ranks, top_k = self._transport, int(self.topology.serving.sum()), self.model.top_k
        tokens_of_row = ranks / top_k * (1 - (1 - 1 / ranks) ** top_k)  # that reach a rank, even
        quantised = (by.combine_bytes + by.dispatch_bytes) / top_k
        gathered, summed = 2 * by.dispatch_bytes, by.combine_bytes * (1 + tokens_of_row)
        column_ps = (quantised + gathered + summed) / self.kernel.reads * 1e12
        return replace(self.kernel, column_ps=self.kernel.column_ps + column_ps)

    @property
    def _transport(self) -> Transport:
        return self.transport or deepep(self.topology.num_nodes, is_prefill=self.is_prefill)

    def of(self, rows: NDArray[np.float64]) -> StepTime:
        """Times of one step with rows [L, S] in its slots."""
        topology, serving = self.topology, self.topology.serving
        members = np.eye(topology.num_ranks)[topology.rank_of_slot]
        kernel = self.around_experts
        slots_us = kernel.mean_slot_us(rows, self.model)
        by_rank = rows @ members
        # A rank without rows launches nothing.
        of_ranks = (kernel.rank_us(slots_us @ members) * (by_rank > 0))[:, serving]
        return self._step(by_rank, (of_ranks / topology.rank_speed[serving]).max(axis=1))

    def bound(self, rows: NDArray[np.float64]) -> StepTime:
        """Times below those of any placement, for rows [L, E] of experts: no expert is read twice.

        Ranks share the work of experts by their speed, and rows cross links evenly.
        """
        serving = self.topology.serving
        by_rank = rows.sum(axis=1, keepdims=True) * (serving / serving.sum())
        kernel = self.around_experts
        slots_us = kernel.mean_slot_us(rows, self.model).sum(axis=1)
        speed = float(self.topology.rank_speed[serving].sum())
        return self._step(by_rank, kernel.rank_us(slots_us / speed) * (slots_us > 0))

    def in_prices(self, cost: CostModel) -> CostModel:
        """A planner's prices with these times, where it has none."""
        if cost.curve:
            return cost
        return replace(cost, row_us=self._row_us()).with_kernel(self.around_experts, self.model)

    def _row_us(self) -> float:
        """Time that one more row of a rank adds to dispatch and combine, beside even load."""
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
        by = self._transport
        dispatch = self._link_us(near, far, by.dispatch_bytes) / by.dispatch_rate
        combine = self._link_us(near, far, by.combine_bytes) / by.combine_rate
        dispatch, combine = dispatch + by.dispatch_us * busy, combine + by.combine_us * busy
        tokens = by_rank.sum(axis=1) / self.model.top_k / max(int(serving.sum()), 1)
        shared_us = self.kernel.mean_slot_us(tokens, self.model)
        shared = self.model.num_shared_experts * shared_us / speed.min()
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
        here = (ranks_of_node / ranks_of_node.sum())[topology.node_of_rank]  # part of the tokens
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
    network: NDArray[np.float64]  # [L] time of dispatch and combine in which ports are busy

    @property
    def parts_us(self) -> tuple[float, float, float, float]:
        """Microseconds of the step: dispatch, experts, combine, and the rest."""
        rest = float(self.shared.sum()) + self.other_us * len(self.experts)
        links = float(self.dispatch.sum()), float(self.combine.sum())
        return links[0], float(self.experts.sum()), links[1], rest

    @property
    def network_part(self) -> float:
        """Part of the step in which its rows pass through the busiest network port."""
        return min(1.0, float(self.network.sum()) / self.us) if self.us else 0.0

    @property
    def layers_us(self) -> NDArray[np.float64]:
        """[L] microseconds of each layer."""
        links, products = self.dispatch + self.combine, self.experts + self.shared + self.other_us
        if self.is_overlapped:
            overlapped: NDArray[np.float64] = np.maximum(links, products)
            return overlapped
        summed: NDArray[np.float64] = links + products
        return summed

    @property
    def us(self) -> float:
        """Microseconds of the step."""
        return float(self.layers_us.sum())
