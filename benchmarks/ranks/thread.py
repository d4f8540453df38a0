"""The steel thread, measured: dispatch, counters, swaps, tables, and decode steps under migrations.

    python3 -m benchmarks.ranks.thread --device cuda [--ranks 4] [--steps 10000] [--swap-every 50]
    python -m benchmarks.ranks.thread              # the decode part alone, on CPU ranks
    python -m benchmarks.ranks.thread --seconds 3600 --swap-every 0       # the soak

On GPUs it needs that many of one host, and deep_ep. Prints one table; losing rows too. Seeded.

A soak looks at the bytes of all live slots at every percent, and keeps a bounded sample of step
times.

    soak     the processes and their rows
    serving  one rank that serves, and what is migrated
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.ranks.children import preload_modules
from benchmarks.ranks.serving import Decode, Length
from benchmarks.ranks.soak import measure_decode
from benchmarks.result_table import Row, keep, show
from eplb.core.placement import Placement
from eplb.core.topology import Topology
from runtime.counters import SlotCounter
from runtime.dispatch.deepep import DeepEPLowLatency, DeepEPShape
from runtime.dispatch.table import Trial, routing_cases
from runtime.experts import ExpertBank, ExpertSchema
from runtime.model.expert_times import times_us
from runtime.routing import RoutingTable
from tests.support.launch import launch

# -- The steel thread's kernels on a GPU: the dispatcher's seam, counters, swaps and tables.

WARM_UP = 20


def timed(run: Callable[[], Any], repeats: int) -> list[float]:
    """Microseconds of each call, sorted, after some that warm up."""
    for _ in range(WARM_UP):
        run()
    return times_us(run, repeats)


def paired(first: Callable[[], Any], second: Callable[[], Any]) -> tuple[float, float]:
    """Medians of two things timed in turns, so that a drifting clock meets both."""
    runs = [(timed(first, 50), timed(second, 50)) for _ in range(6)]
    return median(x for a, _ in runs for x in a), median(x for _, b in runs for x in b)


def measure_dispatch(rank: int, num_ranks: int) -> list[Row]:
    """DeepEP low latency through the seam against the raw calls; with and without counters."""
    device = torch.device("cuda", rank)
    group = dist.group.WORLD
    assert group is not None, "launch joins one"
    topology = Topology.uniform(1, num_ranks, 72)
    trial = Trial(topology, 7168, 8, 128, device, torch.bfloat16)
    counter = SlotCounter(1, 72, device)
    shape = DeepEPShape(topology, trial.hidden, trial.top_k, trial.num_tokens)
    dispatcher = DeepEPLowLatency(shape, group, counter)
    _, slots = next(iter(routing_cases(trial, rank)))
    slots = slots.to(device)
    tokens = torch.randn((128, 7168), device=device, dtype=torch.bfloat16)
    weights = torch.rand(slots.shape, device=device)
    buffer = dispatcher._buffer

    def raw(stats: torch.Tensor | None) -> None:
        rows, _, handle, _, _ = buffer.low_latency_dispatch(
            tokens,
            slots,
            128,
            topology.num_slots,
            use_fp8=False,
            cumulative_local_expert_recv_stats=stats,
        )
        buffer.low_latency_combine(rows, slots, weights, handle)

    ours = through_seam(dispatcher, tokens, slots, weights)
    raw_us, ours_us = paired(lambda: raw(counter.row(0)), ours)
    bare_us, counted_us = paired(lambda: raw(None), lambda: raw(counter.row(0)))
    cut = timed(counter.cut, 100)
    return [
        (
            "dispatcher against the raw deep_ep calls, p50",
            f"{raw_us:.1f} -> {ours_us:.1f} us ({ours_us / raw_us - 1:+.1%})",
            "<= +3 %",
        ),
        (
            "counters, in the dispatch kernel, p50",
            f"{bare_us:.1f} -> {counted_us:.1f} us ({counted_us / bare_us - 1:+.2%})",
            "<= +0.3 % of a layer",
        ),
        ("cutting the counters, once a sample", f"{median(cut):.1f} us", "-"),
    ]


def through_seam(
    dispatcher: DeepEPLowLatency, tokens: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor
) -> Callable[[], None]:
    """One dispatch and combine through the seam."""

    def run() -> None:
        received = dispatcher.dispatch(0, tokens, slots, weights)
        dispatcher.combine(0, received.rows, received)

    return run


def measure_swap(rank: int, num_ranks: int) -> list[Row]:
    """Four experts of DeepSeek-V3 (FP8 with scales, 44 MB) into live slots, and the table."""
    device = torch.device("cuda", rank)
    schema = ExpertSchema.swiglu_fp8(7168, 2048)

    class Plain:
        handle = ""
        bytes = torch.empty(8 * schema.record_bytes, dtype=torch.uint8, device=device)

    bank = ExpertBank(schema, 1, 4, num_staging=4, arena=Plain())
    held = np.concatenate([np.arange(256), np.arange(32)])[None].repeat(58, 0)
    placement = Placement(held, 256)
    table = RoutingTable(placement, max_replicas=32, device=device)
    prepared = table.prepare(placement, [7])

    def swap() -> None:
        for slot in range(4):
            bank.swap(0, slot, slot)
        table.swap(prepared)

    times = timed(swap, 100)
    return [
        (
            f"swap of 4 experts of {schema.record_bytes / 1e6:.1f} MB and the table, p50 / p99",
            f"{median(times):.0f} / {times[98]:.0f} us",
            "<= 110 us",
        ),
        (
            "memory of tables, 58 x 256 experts, at most 32 replicas",
            f"{table._entries.nbytes / 1e6:.2f} MB",
            "<= 8 MB",
        ),
    ]


def main() -> None:
    """Measure, and print one table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=0, help="10000 on cuda, 1000 on the cpu")
    parser.add_argument("--seconds", type=float, default=0.0, help="in place of steps: a soak")
    parser.add_argument("--swap-every", type=int, default=50)
    parser.add_argument("--precision", default="", help="bfloat16 or fp8, on cuda")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    is_cuda, rows = given.device == "cuda", list[Row]()
    if is_cuda:
        rows += launch(measure_dispatch, given.ranks, deadline_s=120)[0]
        rows += launch(measure_swap, 1, deadline_s=60)[0]
    wanted = Decode(
        given.device,
        given.ranks,
        given.precision or ("bfloat16" if is_cuda else "float32"),
        Length(given.steps or (10_000 if is_cuda else 1_000), given.seconds),
        given.swap_every,
    )
    preload_modules("benchmarks.ranks.serving")
    rows += measure_decode(wanted)
    show(rows, max(len(row[0]) for row in rows))
    keep(rows, given.json)


if __name__ == "__main__":
    main()
