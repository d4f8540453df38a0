"""Measures how long a rank's experts take by their rows, before it serves.

    rank.expert_times = measure_experts(experts, rank.bank, hidden)

The curve is that of the implementation, the shapes, the precision and the device that serve. Layers
take turns, so that no launch finds its weights in a cache where a step would not.

Shapes:  C slots of this rank, H hidden.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from statistics import median

import torch

from eplb.decision.expert_times import BUDGET_S, POINTS, ExpertTimes
from runtime.dispatch.all_to_all import Received
from runtime.experts import SCALE_BLOCK, ExpertBank
from runtime.model.compute import Experts

MOST_ROWS = 8192  # at once: with more rows of a slot fewer slots have any
LAUNCHES = 8  # fewest launches that take turns
COLD_BYTES = 400_000_000  # weights read in turn, where the layers have them: a cache holds less
REPLAYS, MOST_REPEATS = 5, 10

Launch = Callable[[int], object]  # its argument: how many launches came before


def measure_experts(
    experts: Experts,
    bank: ExpertBank,
    hidden: int,
    *,
    fp8_rows: bool = False,
    budget_s: float = BUDGET_S,
) -> ExpertTimes:
    """Measure the time of one slot at ``POINTS`` rows, as many of them as the budget allows.

    All slots have the same rows; the time is that of all over their number. On a GPU launches are
    replayed in a CUDA graph, so the implementation must be one that can be captured. It needs
    memory for ``MOST_ROWS`` rows while it measures: 0.4 GB for DeepSeek-V3. A point for which there
    is none is left out.

    Args:
        experts: what serves.
        bank: its weights, which may be any.
        hidden: H.
        fp8_rows: whether the dispatcher delivers rows in FP8, with scales.
        budget_s: for all points; the first run, in which kernels are compiled, is not counted.
    """
    work = _Work(experts, bank, hidden, fp8_rows)
    work.seconds(min(POINTS))
    begun, deadline = time.perf_counter(), time.perf_counter() + budget_s
    us: dict[int, float] = {}
    took: dict[int, float] = {}
    for rows in POINTS:
        started = time.perf_counter()
        # Time grows at most in proportion to rows.
        nearest = max((one for one in took if one < rows), default=0)
        if nearest and started + took[nearest] * rows / nearest > deadline:
            continue
        try:
            us[rows] = 1e6 * work.seconds(rows)
        except torch.OutOfMemoryError:
            continue
        took[rows] = time.perf_counter() - started
    seconds = time.perf_counter() - begun
    del work
    if bank.device.type == "cuda":
        torch.cuda.empty_cache()
    measured = sorted(us)
    found = [round(us[rows], 3) for rows in measured]
    return ExpertTimes(measured, found, _described(experts, bank), round(seconds, 3))


class _Work:
    """Launches of all slots of one layer after another."""

    def __init__(self, experts: Experts, bank: ExpertBank, hidden: int, fp8_rows: bool) -> None:
        self._experts, self._bank, self._device = experts, bank, bank.device
        layer_bytes = bank.num_slots * bank.schema.record_bytes
        wanted = max(LAUNCHES, -(-COLD_BYTES // layer_bytes))
        self._launches = min(wanted, bank.num_layers) if bank.num_layers >= LAUNCHES else LAUNCHES
        dtype = next(iter(bank.weights(0).values())).dtype
        own = torch.bfloat16 if dtype.itemsize == 1 else dtype
        most = max(self._slots(rows) * rows for rows in POINTS)
        random = torch.Generator(device=self._device).manual_seed(0)
        shape = (most, hidden)
        rows = torch.randn(shape, generator=random, device=self._device, dtype=torch.float32)
        self._rows = rows.to(torch.float8_e4m3fn if fp8_rows else own)
        blocks = (most, hidden // SCALE_BLOCK)
        self._scales = torch.ones(blocks, device=self._device) if fp8_rows else None

    def seconds(self, rows: int) -> float:
        """Time of one slot with so many rows."""
        num_slots = self._slots(rows)
        counts = torch.zeros(self._bank.num_slots, dtype=torch.int32, device=self._device)
        counts[:num_slots] = rows
        some = slice(num_slots * rows)
        scales = None if self._scales is None else self._scales[some]
        received = Received(self._rows[some], counts, None, scales)

        def run(number: int) -> object:
            return self._experts.run(number % self._bank.num_layers, received)

        if self._device.type == "cuda":
            found = median(replayed_us(run, self._launches, REPLAYS)) / 1e6
        else:
            found = median(repeated(run, min(self._launches, MOST_REPEATS)))
        return found / num_slots

    def _slots(self, rows: int) -> int:
        """Slots that have rows."""
        return max(1, min(self._bank.num_slots, MOST_ROWS // rows))


def captured(run: Callable[[], object], warm_up: int = 1) -> torch.cuda.CUDAGraph:
    """Capture what is launched, after runs that compile; it may synchronise nothing."""
    for _ in range(warm_up):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def times_us(run: Callable[[], object], count: int) -> list[float]:
    """Microseconds of each of some runs in a row on the current stream, sorted."""
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]  # type: ignore[no-untyped-call]
    for begin, end in marks:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return sorted(begin.elapsed_time(end) * 1e3 for begin, end in marks)


def replayed_us(run: Launch, launches: int, replays: int) -> list[float]:
    """Microseconds of one of some launches in a graph, for each of its replays, sorted."""

    def all_launches() -> None:
        for number in range(launches):
            run(number)

    graph = captured(all_launches)
    graph.replay()  # the first one also brings the graph to the device
    return [us / launches for us in times_us(graph.replay, replays)]


def repeated(run: Launch, launches: int) -> list[float]:
    """Seconds of each of some launches on a CPU."""
    run(0)
    times = []
    for number in range(launches):
        begun = time.perf_counter()
        run(number)
        times.append(time.perf_counter() - begun)
    return times


def _described(experts: Experts, bank: ExpertBank) -> str:
    device = platform.machine()
    if bank.device.type == "cuda":
        device = torch.cuda.get_device_name(bank.device)
    spec = bank.schema.tensors[0]
    kind = str(spec.dtype).removeprefix("torch.")
    return f"{device}, {type(experts).__name__}, {spec.name} {list(spec.shape)} {kind}"
