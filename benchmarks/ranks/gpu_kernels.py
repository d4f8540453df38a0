"""Times of the GPU kernels at the sizes of DeepSeek-V3: one table, fixed seed.

    PYTHONPATH=. python -m benchmarks.ranks.gpu_kernels [--launches 200]

"launch" is one launch between two events, so a short kernel shows the price of launching too;
"replay" is a launch's part of a CUDA graph of ten. Weights of 16 slots are larger than the L2
cache; digests and replica choices take turns on several inputs. TB/s counts the bytes that must
move, TFLOP/s the products of used rows. Needs torch and triton only.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import cycle

import torch
import triton

from runtime.kernels.digest import digest_records
from runtime.kernels.gemm import (
    BF16_DECODE,
    BF16_PREFILL,
    MOST_DECODE_ROWS,
    grouped_gemm,
    grouped_gemm_fp8,
)
from runtime.kernels.quantise import Quantised, quantise_rows, silu_times_up, silu_times_up_fp8
from runtime.kernels.replicas import choose_replicas
from runtime.model.graph_times import Launch, replayed_us, times_us

HIDDEN, INTERMEDIATE, NUM_SLOTS = 7168, 2048, 16
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
LAUNCHES_IN_A_GRAPH = 10
EXPERT_BYTES = 44_040_192 + 12_288  # FP8, with its scales, in whole pages


@dataclass(frozen=True)
class Case:
    """One line of the table; ``launch`` is told how many launches came before."""

    name: str
    launch: Launch
    num_bytes: int = 0
    num_flops: int = 0
    target: str = ""


def measure(case: Case, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Times of launches, and of launches in a replayed graph."""
    for number in range(5):
        case.launch(number)
    torch.cuda.synchronize()
    numbers = cycle(range(LAUNCHES_IN_A_GRAPH))
    launched = times_us(lambda: case.launch(next(numbers)), count)
    replays = max(20, count // LAUNCHES_IN_A_GRAPH)
    replayed = replayed_us(case.launch, LAUNCHES_IN_A_GRAPH, replays)
    return torch.tensor(launched), torch.tensor(replayed)


def line(case: Case, launched: torch.Tensor, replayed: torch.Tensor) -> str:
    middle = float(replayed.median())
    figures = [
        f"{float(times.quantile(share)):9.1f}"
        for times in (launched, replayed)
        for share in (0.5, 0.99)
    ]
    rate = f"{case.num_bytes / middle / 1e6:7.2f}" if case.num_bytes else f"{'-':>7}"
    flops = f"{case.num_flops / middle / 1e6:8.0f}" if case.num_flops else f"{'-':>8}"
    return f"{case.name:44}" + "".join(figures) + rate + flops + f"  {case.target}"


def replica_cases() -> list[Case]:
    slots = torch.randint(0, 288, (256, 8), dtype=torch.int32)
    cumulative = torch.randint(0, 65536, (256, 8), dtype=torch.int32).sort(1).values.contiguous()
    cumulative[:, -1] = 65536
    seed, strays = torch.tensor([1]), torch.zeros(1, dtype=torch.int32)

    def case(num_tokens: int, target: str) -> Case:
        experts = torch.randint(0, 256, (LAUNCHES_IN_A_GRAPH, num_tokens, 8))
        out = torch.empty_like(experts[0])
        return Case(
            f"choose replicas, {num_tokens} x top-8",
            lambda n: choose_replicas(slots, cumulative, experts[n], seed, out, strays),
            target=target,
        )

    return [case(128, ""), case(4096, "<= 12 us")]


def digest_cases() -> list[Case]:
    records = torch.randint(0, 256, (LAUNCHES_IN_A_GRAPH, EXPERT_BYTES), dtype=torch.uint8)
    one, four = torch.empty((1, 2), dtype=torch.int64), torch.empty((4, 2), dtype=torch.int64)
    return [
        Case(
            "digest of an FP8 expert",
            lambda n: digest_records(records[n : n + 1], one),
            EXPERT_BYTES,
            target="12..20 us",
        ),
        Case(
            "digest of four FP8 experts",
            lambda n: digest_records(records[n % 7 : n % 7 + 4], four),
            4 * EXPERT_BYTES,
        ),
    ]


def even_slots(rows_of_slot: int) -> tuple[torch.Tensor, torch.Tensor]:
    counts = torch.full((NUM_SLOTS,), rows_of_slot, dtype=torch.int32)
    return torch.arange(NUM_SLOTS, dtype=torch.int32) * rows_of_slot, counts


def quantise_cases() -> list[Case]:
    cases = []
    for num_rows in (128, 1024, 16_384):
        starts, counts = even_slots(num_rows // NUM_SLOTS)
        rows = torch.randn((num_rows, HIDDEN), dtype=BF16)
        both = torch.randn((num_rows, 2 * INTERMEDIATE), dtype=BF16)
        rows8 = empty_fp8(num_rows, HIDDEN)
        gated8 = empty_fp8(num_rows, INTERMEDIATE)
        gated = torch.empty((num_rows, INTERMEDIATE), dtype=BF16)
        cases += [
            Case(
                f"quantise {num_rows} x {HIDDEN}",
                lambda _, rows=rows, into=rows8: quantise_rows(rows, into),
                3 * rows.numel(),
            ),
            Case(
                f"silu times up {num_rows} x {INTERMEDIATE}, BF16",
                lambda _, a=(both, starts, counts, gated): silu_times_up(*a),
                3 * both.numel(),
            ),
            Case(
                f"silu times up {num_rows} x {INTERMEDIATE}, FP8",
                lambda _, a=(both, starts, counts, gated8): silu_times_up_fp8(*a),
                5 * both.numel() // 2,
            ),
        ]
    return cases


def empty_fp8(num_rows: int, columns: int) -> Quantised:
    return Quantised(
        torch.empty((num_rows, columns), dtype=FP8), torch.ones((num_rows, columns // 128))
    )


def gemm_cases(outputs: int, inputs: int, rows_of_slot: int) -> list[Case]:
    starts, counts = even_slots(rows_of_slot)
    num_rows = NUM_SLOTS * rows_of_slot
    weights = torch.empty((NUM_SLOTS, outputs, inputs), dtype=BF16).normal_()
    rows = torch.randn((num_rows, inputs), dtype=BF16)
    weights8 = Quantised(weights.to(FP8), torch.ones((NUM_SLOTS, outputs // 128, inputs // 128)))
    rows8 = Quantised(rows.to(FP8), torch.ones((num_rows, inputs // 128)))
    out = torch.empty((num_rows, outputs), dtype=BF16)
    ends = starts + counts
    tiling = BF16_DECODE if rows_of_slot <= MOST_DECODE_ROWS else BF16_PREFILL
    name = f"{NUM_SLOTS} slots {outputs} x {inputs}, {rows_of_slot} rows"
    flops = 2 * num_rows * outputs * inputs
    target = ">= 2.8 TB/s" if rows_of_slot <= 64 else ""
    return [
        Case(
            f"BF16 {name}",
            lambda _: grouped_gemm(rows, weights, starts, counts, out, tiling=tiling),
            2 * weights.numel(),
            flops,
            target,
        ),
        Case(
            f"FP8  {name}",
            lambda _: grouped_gemm_fp8(rows8, weights8, starts, counts, out),
            weights.numel(),
            flops,
        ),
        Case(
            f"torch grouped_mm {rows_of_slot} rows",
            lambda _: torch.nn.functional.grouped_mm(rows, weights.mT, offs=ends),
            2 * weights.numel(),
            flops,
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--launches", type=int, default=200)
    count = parser.parse_args().launches
    torch.manual_seed(0)
    torch.set_default_device("cuda")
    print(
        f"{datetime.now(UTC):%Y-%m-%d} {torch.cuda.get_device_name()}, torch {torch.__version__}, "
        f"triton {triton.__version__}, python {platform.python_version()}; "
        f"median and p99 of {count} launches, in microseconds"
    )
    print(f"{'':44}{'launch':>9}{'p99':>9}{'replay':>9}{'p99':>9}{'TB/s':>7}{'TFLOP/s':>8}  target")
    shapes = [(2 * INTERMEDIATE, HIDDEN, rows) for rows in (1, 16, 32, 64, 128, 256, 1024)]
    shapes += [(HIDDEN, INTERMEDIATE, rows) for rows in (16, 64, 1024)]
    makers: list[Callable[[], list[Case]]] = [replica_cases, digest_cases, quantise_cases]
    makers += [partial(gemm_cases, *shape) for shape in shapes]
    for make in makers:
        for case in make():
            print(line(case, *measure(case, count)), flush=True)


if __name__ == "__main__":
    main()
