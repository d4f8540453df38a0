"""Times of a layer's experts by rows, on one GPU: files that the simulator's cost model reads.

    PYTHONPATH=. python -m benchmarks.expert_curve --out FOLDER [--quick] [--only deepseek-v3-fp8]

One file for each model and precision; docs/simulator.md has the format. The timed work is what
``runtime.model.compute.GroupedExperts`` launches for rows as a dispatcher gives them (FP8 rows are
quantised already): gate and up, the gate, down. It is captured in a CUDA graph of several launches,
which take turns on several sets of weights, so that no launch finds its weights in the L2 cache.

*Even* rows: each of 2, 9 or 36 slots has the same number. *Uneven* rows: 9 slots share rows by a
seeded Gamma draw at three skews and five batches, with the tiling that serving takes for the mean
(``tiles_for`` in the files; some older ones have the busiest slot's too). The table at the end
compares two predictions from the even rows alone: "sum of maxima" adds the time that each slot
would take (whichever is longer, reading its weights or its products), "max of sums" adds both up
over the slots and takes the longer sum. Needs torch and triton only.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import triton

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

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
ROWS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072)
MOST_ROWS = (4096, 6144, 8192)
SLOTS = (2, 9, 36)
UNEVEN_SLOTS = 9
SKEWS = {"mild": 4.7, "middle": 1.6, "strong": 0.7}  # shape of the Gamma draw, as real layers have
MEAN_ROWS = (8, 64, 256, 1024, 4096)
DRAWS = 4  # of each skew and batch
LEAST_WEIGHT_BYTES = 400_000_000  # in turn: eight times the L2 cache of an H200
LEAST_LAUNCHES = 8  # of a graph
POINT_SECONDS = 0.15  # of measurement

Launch = Callable[[int], None]  # told how many launches came before


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


def tiling_for(shape: Shape, usual: int) -> Tiling:
    """As ``GroupedExperts`` chooses it for usual rows of a slot."""
    if shape.dtype == "fp8":
        return FP8_TILES
    return BF16_DECODE if usual <= MOST_DECODE_ROWS else BF16_PREFILL


def layer(weights: Weights, counts: torch.Tensor, tiling: Tiling) -> Launch:
    """The launch of a layer's experts on rows that lie slot by slot."""
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
        chosen = number % weights.num_sets
        grouped_gemm(rows, weights.up[chosen], *slots, both, tiling=tiling)
        silu_times_up(both, *slots, gated)
        grouped_gemm(gated, weights.down[chosen], *slots, out, tiling=tiling)

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
        chosen = number % weights.num_sets
        grouped_gemm_fp8(given, weights.up[chosen], *slots, both, tiling=tiling)
        silu_times_up_fp8(both, *slots, gated)
        grouped_gemm_fp8(gated, weights.down[chosen], *slots, out, tiling=tiling)

    return run


def measured(run: Launch, num_sets: int) -> dict[str, float]:
    """Microseconds of a launch in a replayed graph: median and p99 over replays."""
    launches = max(LEAST_LAUNCHES, num_sets)
    for number in range(2):
        run(number)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(launches):
            run(number)
    graph.replay()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    graph.replay()
    torch.cuda.synchronize()
    one = time.perf_counter() - begun
    count = min(max(int(POINT_SECONDS / one), 5), 100)
    marks = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(count)
    ]
    for begin, end in marks:
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    times = torch.tensor(
        [begin.elapsed_time(end) * 1000 / launches for begin, end in marks], device="cpu"
    )
    graph.reset()
    return {
        "us": round(float(times.median()), 3),
        "us_p99": round(float(times.quantile(0.99)), 3),
    }


def even(shape: Shape, rows: tuple[int, ...], slots: tuple[int, ...]) -> list[dict[str, Any]]:
    """Points of slots with equal rows."""
    points = []
    for num_slots in slots:
        weights = Weights(shape, num_slots)
        for count in rows:
            counts = torch.full((num_slots,), count, dtype=torch.int32)
            found = measured(layer(weights, counts, tiling_for(shape, count)), weights.num_sets)
            points.append({"slots": num_slots, "rows": count, **found})
            print(
                f"{shape.name:20} {num_slots:3} slots {count:5} rows {found['us']:10.1f} us",
                flush=True,
            )
        del weights
        torch.cuda.empty_cache()
    return points


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


def predicted(points: list[dict[str, Any]], counts: list[int]) -> tuple[float, float]:
    """Microseconds by the even rows: sum of maxima, and maximum of sums."""
    rows = [point["rows"] for point in points]
    each = [point["us"] / point["slots"] for point in points]
    sum_of_maxima = sum(interpolated(rows, each, count) for count in counts if count)
    reading = min(each)
    per_row = min(us / count for us, count in zip(each, rows, strict=True))
    active = sum(count > 0 for count in counts)
    return sum_of_maxima, max(reading * active, per_row * sum(counts))


def interpolated(rows: list[int], us: list[float], count: int) -> float:
    """By straight lines; beyond the last point in proportion to rows."""
    if count >= rows[-1]:
        return us[-1] * count / rows[-1]
    for low, high, first, last in zip(rows, rows[1:], us, us[1:], strict=False):
        if count <= high:
            return first + (last - first) * max(count - low, 0) / (high - low)
    raise AssertionError("rows rise")


def show(shape: Shape, points: list[dict[str, Any]], found: list[dict[str, Any]]) -> None:
    """Errors of both predictions, by skew and batch."""
    of_nine = [point for point in points if point["slots"] == UNEVEN_SLOTS]
    print(f"\n{shape.name}: predicted over measured, mean of draws")
    print(f"{'skew':8}{'rows':>6}{'us':>10}{'sum of max':>12}{'max of sums':>12}")
    for skew in SKEWS:
        for mean in sorted({point["mean_rows"] for point in found}):
            here = [p for p in found if (p["skew"], p["mean_rows"]) == (skew, mean)]
            ratios = [
                [value / point["us"] for value in predicted(of_nine, point["counts"])]
                for point in here
            ]
            us = sum(point["us"] for point in here) / len(here)
            one, two = (sum(column) / len(here) for column in zip(*ratios, strict=True))
            print(f"{skew:8}{mean:6}{us:10.1f}{one:12.3f}{two:12.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the files")
    parser.add_argument("--only", default="", help="shapes whose name has this text")
    parser.add_argument("--quick", action="store_true", help="few points, to try the script")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_default_device("cuda")
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows = (1, 64, 1024) if arguments.quick else (*ROWS, *MOST_ROWS)
    slots = (UNEVEN_SLOTS,) if arguments.quick else SLOTS
    batches, draws = ((64, 1024), 1) if arguments.quick else (MEAN_ROWS, DRAWS)
    for shape in (shape for shape in SHAPES if arguments.only in shape.name):
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
            "even": points,
            "uneven": found,
        }
        path = arguments.out / f"expert-time-{shape.name}.json"
        path.write_text(json.dumps(record) + "\n")
        show(shape, points, found)
        print(f"{path}: {time.perf_counter() - begun:.0f} s\n", flush=True)


if __name__ == "__main__":
    main()
