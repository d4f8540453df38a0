"""Reads of the service under load: 200 requests/s, open loop, 58 x 256 and a day of history.

    python -m benchmarks.operating.reads --seconds 20

The store is SQLite with an hour of samples (32 ranks, windows of 10 s), 1,380 roll-ups of a minute
and 200 placements. A request is late when it was due, not when it was sent: a slow
answer delays none of the others in the figures. Client and service share the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np

from api.app import create_app
from api.http.server import HttpService
from benchmarks.operating.load import Now, Size, fill
from telemetry import open_store
from telemetry.load.rollup import MINUTE, Rollup
from telemetry.state.store import StateStore

RATE = 200.0
READS = (
    "state",
    "history?seconds=900",
    "history?seconds=86400",
    "placement",
    "tasks/1",
    "placement?generation=100",
)
SIZE = Size(ranks=32, windows=360, window_s=10.0, events=1000)


def main() -> None:
    """Print one row for each read."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rate", type=float, default=RATE)
    parser.add_argument("--events", type=int, default=SIZE.events)
    parser.add_argument("--windows", type=int, default=SIZE.windows)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        now = time.time()
        store = open_store(Path(folder) / "store.sqlite", "west")
        begun = time.perf_counter()
        prepare(store, replace(SIZE, events=asked.events, windows=asked.windows), now)
        print(f"filled in {time.perf_counter() - begun:.0f} s", flush=True)
        begun, cpu = time.perf_counter(), time.process_time()
        service = HttpService(create_app(store, is_watching=True))
        service.start()
        answer = httpx.get(f"{service.url}/api/v1/history?seconds=86400", timeout=120.0).json()
        print(
            f"history at hand after {time.perf_counter() - begun:.1f} s "
            f"({time.process_time() - cpu:.1f} s of processor): "
            f"{sum(one['windows'] for one in answer['points'])} windows and minutes",
            flush=True,
        )
        begun, cpu = time.perf_counter(), time.process_time()
        took = asyncio.run(load(service.url, asked.seconds, asked.rate))
        wall = time.perf_counter() - begun
        cpu = time.process_time() - cpu
        service.stop()
        store.close()
    print("| read | requests | errors | p50 ms | p99 ms | processor ms of each, client too |")
    print("|---|---|---|---|---|---|")
    every = [one for times in took.values() for one in times]
    for name, times in (*took.items(), ("all", every)):
        good = np.array([one for one in times if one is not None]) * 1e3
        p50, p99 = (np.quantile(good, part) if len(good) else np.nan for part in (0.5, 0.99))
        shown = f"{1e3 * cpu / len(every):.1f}" if name == "all" else ""
        errors = sum(one is None for one in times)
        print(f"| {name} | {len(times)} | {errors} | {p50:.1f} | {p99:.1f} | {shown} |")
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{len(every)} requests in {wall:.1f} s, peak memory {peak_mb:.0f} MB")


def prepare(store: StateStore, size: Size, now: float) -> None:
    """Fill the store, with a day of roll-ups before its hour of samples."""
    fill(store, size, Now(now))
    rng = np.random.default_rng(size.seed)
    tokens = rng.poisson(400, (size.layers, size.experts)).astype(np.int64)
    received = rng.poisson(12_000, (size.layers, size.ranks)).astype(np.int64)
    first = (now - 86_400) // MINUTE * MINUTE
    ranks, none = frozenset(range(size.ranks)), frozenset({1})
    store.add_rollups(
        [
            Rollup(
                "run-1",
                "decode",
                MINUTE,
                first + MINUTE * at,
                at,
                at,
                12,
                none,
                ranks,
                tokens,
                received,
            )
            for at in range(1380)
        ]
    )
    committed = store.committed()
    assert committed is not None, "fill commits one"
    first_one = committed.placement.generation + 1
    for generation in range(first_one, first_one + 200):
        placement = committed.placement.with_generation(generation)
        store.commit(placement, expected=generation - 1, reason="of the benchmark")
    store.submit("rebalance", {"reason": "of the benchmark"})


async def load(url: str, seconds: float, rate: float) -> dict[str, list[float | None]]:
    """Send requests when they are due; return the seconds each was late, None: an error."""
    took: dict[str, list[float | None]] = {name: [] for name in READS}
    limits = httpx.Limits(max_connections=100)
    async with httpx.AsyncClient(base_url=f"{url}/api/v1/", timeout=30.0, limits=limits) as client:
        begun, sent = time.perf_counter(), []
        for number in range(int(seconds * rate)):
            due = begun + number / rate
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            name = READS[number % len(READS)]
            sent.append(asyncio.create_task(_one(client, name, due, took[name])))
        await asyncio.gather(*sent)
    return took


async def _one(client: httpx.AsyncClient, name: str, due: float, took: list[float | None]) -> None:
    try:
        answer = await client.get(name)
    except httpx.HTTPError:
        took.append(None)
        return
    took.append(time.perf_counter() - due if answer.status_code == 200 else None)


if __name__ == "__main__":
    main()
