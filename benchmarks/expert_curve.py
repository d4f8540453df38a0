"""Times of a layer's experts by rows, on one GPU: files that the simulator's cost model reads.

    PYTHONPATH=. python -m benchmarks.expert_curve --out FOLDER [--quick] [--only deepseek-v3-fp8]
    PYTHONPATH=. python -m benchmarks.expert_curve --show FOLDER/FILE
    PYTHONPATH=. python -m benchmarks.expert_curve --start [--only deepseek-v3]

One file for each model and precision; docs/simulator.md has the format. The timed work is what
``runtime.model.compute.GroupedExperts`` launches for rows as a dispatcher gives them (FP8 rows are
quantised already): gate and up, the gate, down. It is captured in a CUDA graph of several launches,
which take turns on several sets of weights, so that no launch finds its weights in the L2 cache.

*Even* rows: each of 2, 9 or 36 slots has the same number. *Uneven* rows: 9 slots share rows by a
seeded Gamma draw at three skews and five batches, with the tiling that serving takes for the mean
(``tiles_for`` in the files; some older ones have the busiest slot's too). ``--show FILE`` prints
what the simulator predicts from the even rows alone beside what the uneven ones took. Measuring
needs torch and triton only. ``--start`` prints what a rank measures at its start beside the even
rows.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import triton

from eplb.core.model import ModelShape
from eplb.decision.expert_times import chosen_curve
from eplb.decision.score import ridge
from runtime.experts import ExpertBank, ExpertSchema, PlainArena, bank_bytes
from runtime.kernels.gemm import (
    BF16_DECODE,
    BF16_PREFILL,
    FP8_TILES,
    MOST_DECODE_ROWS,
    Tiling,
    grouped_gemm,
    grouped_gemm_fp8,
)
from runtime.kernels.quantise import GROUP, Quantised, silu_times_up, silu_times_up_fp8
from runtime.model.compute import GroupedExperts
from runtime.model.expert_times import Launch, captured, measure_experts, times_us

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
ROWS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072)
MOST_ROWS = (4096, 6144, 8192)
SLOTS = (2, 9, 36)
UNEVEN_SLOTS = 9
SKEWS = {"mild": 4.7, "middle": 1.6, "strong": 0.7}  # shape of the Gamma draw, as real layers have
MEAN_ROWS = (8, 64, 256, 1024, 4096)
DRAWS = 4  # draws of each skew and batch
LEAST_WEIGHT_BYTES = 400_000_000  # weights read in turn: eight times the L2 cache of an H200
LEAST_LAUNCHES, LONG_ROWS = 8, 1024  # launches of a graph; with more rows two are enough
POINT_SECONDS = 0.15  # time of one measurement
START_LAYERS, START_RUNS = 8, 3
LAUNCHES, REPLAYS = 4, 9  # launches and replays of each arm, by turns
PROCESSES = 12  # processes that compile at once


@dataclass(frozen=True)
class Shape:
    """Experts to measure: products of FP8 need multiples of 128."""

    model: str
    hidden: int
    intermediate: int
    dtype: str

    @property
    def name(self) -> str:
        """Model and precision, as files have it."""
        return f"{self.model}-{self.dtype}"


SHAPES = (
    Shape("deepseek-v3", 7168, 2048, "fp8"),
    Shape("deepseek-v3", 7168, 2048, "bf16"),
    Shape("gpt-oss", 2880, 2880, "bf16"),
    Shape("qwen3-30b", 2048, 768, "fp8"),
    Shape("qwen3-30b", 2048, 768, "bf16"),
)


class Weights:
    """Sets of slots, one after another in memory; a launch takes the next set."""

    def __init__(self, shape: Shape, num_slots: int) -> None:
        size = 3 * shape.hidden * shape.intermediate * (1 if shape.dtype == "fp8" else 2)
        self.num_sets = max(2, -(-LEAST_WEIGHT_BYTES // (size * num_slots)))
        self.num_slots, self.shape = num_slots, shape
        wide = (2 * shape.intermediate, shape.hidden)
        self.up = [self._matrix(*wide) for _ in range(self.num_sets)]
        self.down = [self._matrix(shape.hidden, shape.intermediate) for _ in range(self.num_sets)]

    def _matrix(self, outputs: int, inputs: int) -> Any:
        values = torch.empty((self.num_slots, outputs, inputs), dtype=BF16).normal_(std=0.05)
        if self.shape.dtype == "bf16":
            return values
        blocks = (self.num_slots, outputs // GROUP, inputs // GROUP)
        return Quantised(values.to(FP8), torch.rand(blocks) + 0.5)

    def taken(self, number: int) -> tuple[Any, Any]:
        """Gate and up, and down, of a launch."""
        chosen = number % self.num_sets
        return self.up[chosen], self.down[chosen]


def tiling_for(shape: Shape, usual: int) -> Tiling:
    """As ``GroupedExperts`` chooses it for usual rows of a slot."""
    if shape.dtype == "fp8":
        return FP8_TILES
    return BF16_DECODE if usual <= MOST_DECODE_ROWS else BF16_PREFILL


def tilings_of(shape: Shape) -> list[dict[str, Any]]:
    """As files have them: rows of tiles, and up to which usual rows a tiling serves."""
    tilings = (FP8_TILES,) if shape.dtype == "fp8" else (BF16_DECODE, BF16_PREFILL)
    found: list[dict[str, Any]] = [
        {"tiles": sorted(tile.BLOCK_M for tile in tiling.tiles)} for tiling in tilings
    ]
    for one in found[:-1]:
        one["most_usual_rows"] = MOST_DECODE_ROWS
    return found


def layer(weights: Weights, counts: torch.Tensor, tiling: Tiling) -> Launch:
    """The launch of a layer's experts on rows that lie slot by slot.

    Args:
        weights: of the slots.
        counts: rows of each slot.
        tiling: of both products.
    """
    starts = (torch.cumsum(counts, 0) - counts).to(torch.int32)
    rows = torch.empty((int(counts.sum()), weights.shape.hidden), dtype=BF16).normal_()
    both = torch.empty((len(rows), 2 * weights.shape.intermediate), dtype=BF16)
    out = torch.empty_like(rows)
    run = _run_fp8 if weights.shape.dtype == "fp8" else _run_bf16
    return run(weights, rows, both, out, (starts, counts), tiling)


def _run_bf16(
    weights: Weights,
    rows: torch.Tensor,
    both: torch.Tensor,
    out: torch.Tensor,
    slots: tuple[torch.Tensor, torch.Tensor],
    tiling: Tiling,
) -> Launch:
    gated = torch.empty((len(rows), weights.shape.intermediate), dtype=BF16)

    def run(number: int) -> None:
        up, down = weights.taken(number)
        grouped_gemm(rows, up, *slots, both, tiling=tiling)
        silu_times_up(both, *slots, gated)
        grouped_gemm(gated, down, *slots, out, tiling=tiling)

    return run


def _run_fp8(
    weights: Weights,
    rows: torch.Tensor,
    both: torch.Tensor,
    out: torch.Tensor,
    slots: tuple[torch.Tensor, torch.Tensor],
    tiling: Tiling,
) -> Launch:
    shape, num_rows = weights.shape, len(rows)
    given = Quantised(rows.to(FP8), torch.rand((num_rows, shape.hidden // GROUP)) + 0.5)
    gated = Quantised(
        torch.empty((num_rows, shape.intermediate), dtype=FP8),
        torch.ones((num_rows, shape.intermediate // GROUP)),
    )

    def run(number: int) -> None:
        up, down = weights.taken(number)
        grouped_gemm_fp8(given, up, *slots, both, tiling=tiling)
        silu_times_up_fp8(both, *slots, gated)
        grouped_gemm_fp8(gated, down, *slots, out, tiling=tiling)

    return run


def least_launches(rows: int) -> int:
    """Of a graph, for so many rows of a slot."""
    return LEAST_LAUNCHES if rows < LONG_ROWS else 2


def measured(
    run: Launch, num_sets: int, *, least: int = LEAST_LAUNCHES, seconds: float = POINT_SECONDS
) -> dict[str, float]:
    """Microseconds of a launch in a replayed graph: median and p99 over replays.

    Args:
        num_sets: of weights, which launches take in turn.
        least: launches of a graph.
        seconds: of measurement.
    """
    launches = max(least, num_sets)
    graph = captured(lambda: [run(number) for number in range(launches)])
    one = times_us(graph.replay, 2)[0]
    found = times_us(graph.replay, min(max(int(1e6 * seconds / one), 5), 100))
    times = torch.tensor(found, dtype=torch.float64, device="cpu") / launches
    return {
        "us": round(float(times.median()), 3),
        "us_p99": round(float(times.quantile(0.99)), 3),
    }


def even(
    shape: Shape, rows: tuple[int, ...], slots: tuple[int, ...], seconds: float = POINT_SECONDS
) -> list[dict[str, Any]]:
    """Points of slots with equal rows, of each tiling."""
    tilings = (FP8_TILES,) if shape.dtype == "fp8" else (BF16_DECODE, BF16_PREFILL)
    points = []
    for num_slots in slots:
        weights = Weights(shape, num_slots)
        for number, tiling in enumerate(tilings):
            for count in rows:
                counts = torch.full((num_slots,), count, dtype=torch.int32)
                run = layer(weights, counts, tiling)
                least = least_launches(count)
                found = measured(run, weights.num_sets, least=least, seconds=seconds)
                point = {"slots": num_slots, "rows": count, "tiling": number, **found}
                points.append(point)
                print(
                    f"{shape.name:20} {num_slots:3} slots {count:5} rows {found['us']:10.1f} us",
                    flush=True,
                )
        del weights
        torch.cuda.empty_cache()
    return points


def at_start(shape: Shape) -> None:
    """Print what a rank measures at its start beside the points of ``even``, and its curve."""
    fp8 = shape.dtype == "fp8"
    sizes = shape.hidden, shape.intermediate
    schema = ExpertSchema.swiglu_fp8(*sizes) if fp8 else ExpertSchema.swiglu(*sizes, BF16)
    num_bytes = bank_bytes(schema, START_LAYERS, UNEVEN_SLOTS, 0)
    arena = PlainArena(num_bytes, torch.device("cuda"))
    bank = ExpertBank(schema, START_LAYERS, UNEVEN_SLOTS, num_staging=0, arena=arena)
    for number in range(START_LAYERS):
        for tensor in bank.weights(number).values():
            tensor.copy_(
                torch.empty(tensor.shape[1:], dtype=BF16).normal_(std=0.05).to(tensor.dtype)
            )
    experts = GroupedExperts(bank, usual_rows=64)
    for run in range(START_RUNS):
        torch.cuda.synchronize()
        begun, before = time.perf_counter(), torch.cuda.memory_reserved()
        torch.cuda.reset_peak_memory_stats()
        found = measure_experts(experts, bank, shape.hidden, fp8_rows=fp8)
        took, peak = time.perf_counter() - begun, torch.cuda.max_memory_reserved() - before
        print(
            f"{shape.name}: run {run}: points {found.seconds:.3f} s, with the first launch "
            f"{took:.2f} s, memory {peak / 1e6:.0f} MB: rows {found.rows}, us {found.us}"
        )
    curve, source = chosen_curve((), [found])
    print(f"{source}; ridge at {ridge(curve):.0f} tokens")
    del experts, bank, arena
    torch.cuda.empty_cache()
    points = even(shape, tuple(found.rows), (UNEVEN_SLOTS,))
    us = {one["rows"]: one["us"] / UNEVEN_SLOTS for one in points if one["tiling"] == 0}
    for rows, own in zip(found.rows, found.us, strict=True):
        print(
            f"{shape.name} {rows:5} rows: start {own:9.2f} us, even {us[rows]:9.2f}, "
            f"{own / us[rows]:.3f}"
        )


def uneven(shape: Shape, batches: tuple[int, ...], draws: int) -> list[dict[str, Any]]:
    """Points of slots that share rows by a Gamma draw."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    weights = Weights(shape, UNEVEN_SLOTS)
    points = []
    for skew, concentration in SKEWS.items():
        for mean in batches:
            for draw in range(draws):
                alpha = torch.full((UNEVEN_SLOTS,), concentration, device="cpu")
                part = torch._standard_gamma(alpha, generator=generator)
                counts = (part / part.sum() * mean * UNEVEN_SLOTS).round().int()
                tiling = tiling_for(shape, mean)
                run = layer(weights, torch.tensor(counts.tolist(), dtype=torch.int32), tiling)
                points.append(
                    {
                        "skew": skew,
                        "mean_rows": mean,
                        "draw": draw,
                        "tiles_for": "mean",
                        "counts": counts.tolist(),
                        **measured(run, weights.num_sets),
                    }
                )
    return points


def show(path: Path) -> None:
    """Print errors of predicted times on uneven rows, by skew and batch; needs no GPU."""
    from simulations.step_time import measured_kernel, predicted_us

    record = json.loads(path.read_text())
    model = ModelShape((0,), 1, 1, record["hidden"], record["intermediate"])
    kernel = measured_kernel(path, model)
    print(f"\n{path.stem}: predicted over measured, mean of draws")
    print(f"{'skew':8}{'rows':>6}{'us':>10}{'ratio':>15}")
    for skew in SKEWS:
        for mean in sorted({point["mean_rows"] for point in record["uneven"]}):
            here = [p for p in record["uneven"] if (p["skew"], p["mean_rows"]) == (skew, mean)]
            ratio = statistics.mean(
                predicted_us(kernel, p["counts"], model) / p["us"] for p in here
            )
            us = statistics.mean(point["us"] for point in here)
            print(f"{skew:8}{mean:6}{us:10.1f}{ratio:15.3f}")


def compiled(task: tuple[Shape, int, Tiling]) -> None:
    """Compile what a case launches, into the cache on disk."""
    shape, num_slots, tiling = task
    torch.set_default_device("cuda")
    layer(Weights(shape, num_slots), torch.ones(num_slots, dtype=torch.int32), tiling)(0)
    torch.cuda.synchronize()


def in_turns(runs: dict[str, Launch]) -> dict[str, float]:
    """Microseconds of a launch: median over replays of each arm's graph, arms by turns."""
    graphs = [
        captured(lambda run=run: [run(number) for number in range(LAUNCHES)])
        for run in runs.values()
    ]
    turns = [[times_us(graph.replay, 1)[0] for graph in graphs] for _ in range(REPLAYS + 1)]
    of_arms = zip(*turns[1:], strict=True)  # the first turn warms up
    times = [statistics.median(found) / LAUNCHES for found in of_arms]
    return dict(zip(runs, times, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder of the files")
    parser.add_argument("--show", type=Path, help="a file that was written: predict its rows")
    parser.add_argument("--only", default="", help="shapes whose name has this text")
    parser.add_argument("--start", action="store_true", help="what a rank measures at its start")
    parser.add_argument("--quick", action="store_true", help="few points, to try the script")
    arguments = parser.parse_args()
    if arguments.show is not None:
        show(arguments.show)
    if arguments.start:
        torch.set_default_device("cuda")
        for shape in (shape for shape in SHAPES if arguments.only in shape.name):
            at_start(shape)
    if arguments.out is not None:
        measure(arguments.out, arguments.only, is_quick=arguments.quick)


def measure(out: Path, only: str, *, is_quick: bool) -> None:
    """Write a file for each shape."""
    torch.manual_seed(0)
    torch.set_default_device("cuda")
    out.mkdir(parents=True, exist_ok=True)
    rows = (1, 64, 1024) if is_quick else (*ROWS, *MOST_ROWS)
    slots = (UNEVEN_SLOTS,) if is_quick else SLOTS
    batches, draws = ((64, 1024), 1) if is_quick else (MEAN_ROWS, DRAWS)
    for shape in (shape for shape in SHAPES if only in shape.name):
        begun = time.perf_counter()
        points, found = even(shape, rows, slots), uneven(shape, batches, draws)
        record = {
            "format": "eplb-expert-time",
            "version": 1,
            "device": torch.cuda.get_device_name(),
            "date": f"{datetime.now(UTC):%Y-%m-%d}",
            "kernel": f"eplb grouped GEMM, CUDA graph, torch {torch.__version__}, "
            f"triton {triton.__version__}, python {platform.python_version()}",
            "model": shape.model,
            "dtype": shape.dtype,
            "hidden": shape.hidden,
            "intermediate": shape.intermediate,
            "tilings": tilings_of(shape),
            "even": points,
            "uneven": found,
        }
        path = out / f"expert-time-{shape.name}.json"
        path.write_text(json.dumps(record) + "\n")
        print(f"{path}: {time.perf_counter() - begun:.0f} s\n", flush=True)


if __name__ == "__main__":
    main()
