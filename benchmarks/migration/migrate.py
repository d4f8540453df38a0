"""Moving experts, measured: each phase against the plain copy, and what decode steps feel of it.

    python3 -m benchmarks.migration.migrate --device cuda [--only stage,host_cache,flip,whole,disk]
    python -m benchmarks.migration.migrate    # the same on CPU ranks, small

On GPUs it needs four of one host and deep_ep; decode-copy and decode-host run on one as well, with
``--ranks 1``, where batches are split besides. Shapes are DeepSeek-V3's, made-up weights; a decode
step is four resident MoE layers run fourteen times, 56 layers in all. Seeded; one table.

``--budget`` (bytes a second of a rank's link) and ``--staging`` (experts of its ring) go to every
measurement that moves experts under an agent: whole, and every decode. The others are without a
budget and stage sixteen.

    stage.py      rows stage, host_cache
    flip.py       row flip
    whole.py      row whole
    preload.py    row disk
    decode.py     rows decode-copy, decode-flip, decode-host
    agent.py      the agent and the plans of the last two files
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.migration import preload
from benchmarks.migration.big_rank import (
    BigRank,
    Clockwork,
    Shapes,
    agent_of,
    begin_store,
    build,
    publisher_of,
    seconds,
    v3,
    wait_for,
)
from benchmarks.migration.decode import measure_decode
from benchmarks.migration.stage import LAUNCH_DEADLINE_S, measure_stage, stage_from_host_cache
from benchmarks.publishing import Publisher
from benchmarks.result_table import Row, keep, show
from eplb.core.model import ModelShape
from eplb.core.placement import Placement
from eplb.migration.build import Source
from rebalance.rank.rank import Rank
from rebalance.stage.stage_settings import SERVING_BYTES_PER_SECOND
from runtime.routing import RoutingTable
from tests.support.launch import launch

# -- The flip, measured: routing tables of all layers, prepared before, made to serve at once.

NUM_FLIPS = 220
WARM_UP = 20
HOST_AHEAD_CYCLES = 200_000  # of the GPU's clock, about 0.1 ms


def measure_flip(rank: int, num_ranks: int, device: str) -> list[Row]:
    """A table of 58 layers x 256 experts x 32 replicas, all layers prepared."""
    held = np.concatenate([np.arange(256), np.arange(32)])[None].repeat(58, 0)
    placement = Placement(held, 256)
    table = RoutingTable(placement, max_replicas=32, device=device)
    prepared = table.prepare(placement, range(58))
    time_one = on_device if device == "cuda" else on_host
    times = [time_one(lambda: table.swap(prepared)) for _ in range(NUM_FLIPS)]
    times = sorted(times[WARM_UP:])
    found = f"{median(times):.1f} / {times[int(len(times) * 0.99) - 1]:.1f} us"
    return [("flip of 58 prepared layers, p50 / p99", found, "<= 20 us")]


def on_device(run: Callable[[], Any]) -> float:
    """Microseconds on the compute stream, without what the host needs to order it."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    # The host enqueues meanwhile, so that only the device is timed.
    torch.cuda._sleep(HOST_AHEAD_CYCLES)  # type: ignore[no-untyped-call]
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) * 1e3


def on_host(run: Callable[[], Any]) -> float:
    """Microseconds of the call."""
    return seconds(run, torch.device("cpu")) * 1e6


# -- A whole rebalance, timed: from the moment it is published until every layer serves.

FIRST_STEPS = 4  # before it begins, so that all threads and votes run


def measure_whole(
    rank: int, num_ranks: int, shapes: Shapes, path: Path, step_s: float
) -> list[Row]:
    """From published to committed, four experts a rank in every layer, steps of ``step_s``."""
    big = build(rank, num_ranks, shapes)
    agent, clock = agent_of(big, path, big.sources())
    publisher = publisher_of(big, path, "copy") if rank == 0 else None
    agent.start()
    for _ in range(FIRST_STEPS):
        agent.step()
        clock.steps += 1
    dist.barrier()
    took_s = step_until_committed(agent, clock, publisher, step_s)
    wait_for(big.bank.mark())
    wrong = sum(
        big.bank.digest(layer, slot) != tuple(big.digests[layer, expert].tolist())
        for layer, slot, expert in agent.held()
    )
    moved = agent.figures.experts_moved
    if publisher is not None:
        publisher.close()
    agent.leave()
    amounts = (clock.steps - FIRST_STEPS, moved, wrong)
    return whole_rows(big, took_s, step_s, amounts)


def step_until_committed(
    agent: Rank, clock: Clockwork, publisher: Publisher | None, step_s: float
) -> float:
    """Publish one migration, step until it is committed, and return the seconds that took."""
    started, begun_at = time.monotonic(), clock.steps
    if publisher is not None:
        publisher.want(True)
    while agent.figures.rebalances == 0:
        assert agent.step(), "nobody asked for an end"
        if publisher is not None:
            publisher.check()
            if publisher.num_published:
                publisher.want(False)
        next_at = started + (clock.steps - begun_at + 1) * step_s
        # In place of a forward pass, which this measurement does not need.
        time.sleep(max(0.0, next_at - time.monotonic()))
        clock.steps += 1
    return time.monotonic() - started


def whole_rows(
    big: BigRank, took_s: float, step_s: float, amounts: tuple[int, int, int]
) -> list[Row]:
    """Rows of (steps, experts moved into this rank, wrong slots)."""
    (steps, moved, wrong), shapes = amounts, big.shapes
    size = shapes.schema.record_bytes
    what = f"whole rebalance, {shapes.model.num_layers} layers x 4 experts a rank of "
    return [
        (
            f"{what}{size / 1e6:.2g} MB, steps of {step_s * 1e3:.0f} ms",
            f"{took_s:.2f} s, {steps} steps, {moved * size / 1e9:.1f} GB into rank 0",
            "<= 3 s",
        ),
        ("  slots with wrong bytes afterwards", str(wrong), "0"),
        (
            "  staging memory of a rank",
            f"{shapes.staging_experts} experts, {shapes.staging_experts * size / 1e6:.0f} MB",
            "16 experts",
        ),
    ]


DECODE_DEADLINE_S = 200.0
STEP_S = 0.03  # of a whole rebalance
RANKS_ON_ONE_GPU = 4  # that one GPU alone emulates
WIDTH = 72
SMALL = ModelShape(tuple(range(4)), 64, 8, hidden=512, intermediate=256)
ONE_SMALL_LAYER = replace(SMALL, layer_ids=(0,))

Measurements = dict[str, Callable[[], Iterator[Row]]]


@dataclass(frozen=True)
class Runs:
    """What every measurement is given."""

    is_on_gpu: bool
    ranks: int
    folder: Path
    budget: float  # bytes a second of a rank's link; inf: as fast as it goes
    staging_experts: int

    def every(self) -> Measurements:
        """Every measurement that can run here, by name."""
        named: Measurements = {
            "stage": self.stage,
            "host_cache": self.host_cache,
            "flip": self.flip,
            "whole": self.whole,
            "disk": self.disk,
        }
        if self.is_on_gpu:
            named |= {
                "decode-copy": lambda: self.decode("copy"),
                "decode-host": lambda: self.decode("host"),
            }
        if self.is_on_gpu and self.ranks > 1:
            named["decode-flip"] = lambda: self.decode("flip")
        return named

    def stage(self) -> Iterator[Row]:
        """Sixteen experts into staging memory, from a peer and from locked host memory."""
        for precision in ("fp8", "bfloat16") if self.is_on_gpu else ("float32",):
            for source in (Source.PEER, Source.HOST):
                what = (measure_stage, self.ranks, self._one_layer(precision), source)
                yield from launch(*what, deadline_s=LAUNCH_DEADLINE_S)[0]

    def host_cache(self) -> Iterator[Row]:
        """The same from a host cache's process that has read a checkpoint."""
        shapes = self._one_layer("fp8" if self.is_on_gpu else "float32")
        yield from stage_from_host_cache(self.ranks, shapes, self.folder)

    def flip(self) -> Iterator[Row]:
        """Prepared tables that serve at once."""
        device = "cuda" if self.is_on_gpu else "cpu"
        yield from launch(measure_flip, 1, device, deadline_s=60)[0]

    def whole(self) -> Iterator[Row]:
        """A rebalance from published to committed."""
        shapes = self._under_an_agent(
            v3(58, 16 * self.ranks, slots_per_rank=20)
            if self.is_on_gpu
            else Shapes(SMALL, 20, precision="float32")
        )
        path = self.folder / "whole.sqlite"
        begin_store(path, shapes, self.ranks)
        yield from launch(
            measure_whole, self.ranks, shapes, path, STEP_S, deadline_s=LAUNCH_DEADLINE_S
        )[0]

    def disk(self) -> Iterator[Row]:
        """Cold records into a host cache."""
        yield from preload.measure(self.folder)

    def decode(self, mode: str) -> Iterator[Row]:
        """Decode steps with and without migrations; ``mode`` is copy, flip or host."""
        spares = 4 if mode == "flip" else 0
        emulated = 1 if self.ranks > 1 else RANKS_ON_ONE_GPU
        slots = 72 // emulated
        shapes = self._under_an_agent(
            v3(
                4,
                64 * self.ranks,
                slots_per_rank=slots,
                spare_slots=spares,
                ranks_per_gpu=emulated,
            )
        )
        path = self.folder / f"{mode}.sqlite"
        begin_store(path, shapes, self.ranks)
        yield from launch(
            measure_decode, self.ranks, shapes, mode, path, deadline_s=DECODE_DEADLINE_S
        )[0]

    def _one_layer(self, precision: str) -> Shapes:
        if self.is_on_gpu:
            return v3(1, 16 * self.ranks, slots_per_rank=16, precision=precision)
        return Shapes(ONE_SMALL_LAYER, 16, precision=precision)

    def _under_an_agent(self, shapes: Shapes) -> Shapes:
        return replace(shapes, bytes_per_second=self.budget, staging_experts=self.staging_experts)


def main() -> None:
    """Measure, and print one table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--only", default="", help="names, with commas between")
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--budget", type=float, help=f"on cuda {SERVING_BYTES_PER_SECOND:g}, else none"
    )
    parser.add_argument("--staging", type=int, default=16, help="experts of a rank's ring")
    given = parser.parse_args()
    is_on_gpu = given.device == "cuda"
    usual = SERVING_BYTES_PER_SECOND if is_on_gpu else math.inf
    budget = usual if given.budget is None else given.budget
    if not budget > 0:
        parser.error(f"--budget is {budget}, expected more than 0 bytes a second")
    if given.staging < 1:
        parser.error(f"--staging is {given.staging}, expected 1 or more experts")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        every = Runs(is_on_gpu, given.ranks, Path(folder), budget, given.staging).every()
        wanted = given.only.split(",") if given.only else list(every)
        if unknown := [name for name in wanted if name not in every]:
            parser.error(f"--only names {unknown[0]!r}, expected some of: {', '.join(every)}")
        for name in wanted:
            for row in every[name]():
                rows.append(row)
                show([row], WIDTH)
    keep(rows, given.json)


if __name__ == "__main__":
    main()
