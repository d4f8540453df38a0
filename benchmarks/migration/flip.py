"""The flip, measured: routing tables of all layers, prepared before, made to serve at once."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.migration.big_rank import seconds
from benchmarks.result_table import Row
from eplb.core.placement import Placement
from runtime.routing import RoutingTable

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
