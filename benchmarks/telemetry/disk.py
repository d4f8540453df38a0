"""What a day of load takes on disk, with roll-ups: samples, minutes and hours in a SQLite store.

    python -m benchmarks.telemetry.disk [--hours 24] [--ranks 32] [--slots 9] [--window-s 5]

DeepSeek-V3's 58 MoE layers of 256 experts on a decode cluster; every rank sends one sample for each
window. The clock is simulated, and the keeper has its turn once a simulated minute. Each expert's
heat is drawn from a gamma distribution and drifts by the hour. Prints one table. Seeded.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from eplb.core.load import LoadSample
from eplb.core.model import PRESETS
from eplb.core.topology import Topology
from eplb.migration.serialisation import model_to_dict, topology_to_dict
from telemetry.load.pruning import Keeper
from telemetry.load.rollup import HOUR, MINUTE, rollup_to_bytes
from telemetry.load.sample_codec import sample_to_bytes
from telemetry.state.runs import RunInfo
from telemetry.state.store import StateStore
from tests.support.stores import sqlite_store

START = 20_000 * 24 * HOUR  # of the simulated clock
TOKENS_PER_SECOND = 32 * 128 * 20 * 8  # 32 ranks x 128 requests x 20 steps/s, top-8


def windows(
    args: argparse.Namespace, held: NDArray[np.int32], rng: np.random.Generator
) -> Iterator[tuple[float, list[LoadSample]]]:
    """Yield (time, one sample of every rank) for each window."""
    num_layers, num_ranks, _ = held.shape
    heat = rng.gamma(1.5, size=(num_layers, 256))
    for number in range(int(args.hours * HOUR / args.window_s)):
        now = number * args.window_s
        if now % HOUR == 0:
            heat = 0.7 * heat + 0.3 * rng.gamma(1.5, size=heat.shape)
            share = heat / heat.sum(axis=1, keepdims=True)
            replicas = np.stack([np.bincount(row.ravel(), minlength=256) for row in held])
            layers = np.arange(num_layers)[:, None, None]
            mean = (share / replicas)[layers, held] * TOKENS_PER_SECOND * args.window_s
        tokens = rng.poisson(mean)
        taken = START + now
        yield (
            taken,
            [
                LoadSample(
                    "v3-decode",
                    "run-1",
                    rank,
                    number,
                    taken,
                    number * 100,
                    number * 100 + 99,
                    "decode",
                    1,
                    held[:, rank],
                    tokens[:, rank],
                )
                for rank in range(num_ranks)
            ],
        )


def placed(args: argparse.Namespace, rng: np.random.Generator) -> NDArray[np.int32]:
    """[L, R, C] every expert at least once, the rest drawn."""
    num_slots = args.ranks * args.slots
    assert num_slots >= 256, f"{num_slots} slots, expected one for each of 256 experts"
    rows = [
        rng.permutation(np.concatenate((np.arange(256), rng.integers(0, 256, num_slots - 256))))
        for _ in range(58)
    ]
    return np.array(rows, dtype=np.int32).reshape(58, args.ranks, args.slots)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--ranks", type=int, default=32)
    parser.add_argument("--slots", type=int, default=9)
    parser.add_argument("--window-s", type=float, default=5.0)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    began = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store.sqlite"
        with closing(sqlite_store(path, "v3-decode", clock=lambda: START)) as store:
            topology = Topology.uniform(
                num_nodes=1, ranks_per_node=args.ranks, slots_per_rank=args.slots
            )
            model = model_to_dict(PRESETS["deepseek-v3"])
            store.begin_run(RunInfo("run-1", START, model, topology_to_dict(topology), 100))
            keeper, turns_s = Keeper(store), []
            for now, samples in windows(args, placed(args, rng), rng):
                store.append(samples)
                if now % MINUTE == 0:
                    turn_began = time.process_time()
                    keeper.turn(now)
                    turns_s.append(time.process_time() - turn_began)
            report(store, path, samples, turns_s)
    print(f"all of it took {time.process_time() - began:.0f} s of CPU time")


def report(store: StateStore, path: Path, samples: list[LoadSample], turns_s: list[float]) -> None:
    """Print what is kept, and what it takes."""
    minutes, hours = store.rollups(MINUTE, limit=10**6), store.rollups(HOUR, limit=10**6)
    num_samples = len(store.samples_before(np.inf, limit=10**9))
    total = sum(found.stat().st_size for found in path.parent.iterdir())
    print("| what | number | bytes each |")
    print("|---|---|---|")
    print(f"| samples, the last hour | {num_samples:,} | {np.mean(sizes(samples)):,.0f} |")
    for name, rollups in (("a minute", minutes), ("an hour", hours)):
        each = np.mean([len(rollup_to_bytes(rollup)) for rollup in rollups]) if rollups else 0
        print(f"| roll-ups of {name} | {len(rollups):,} | {each:,.0f} |")
    print(f"| files of the store, MB | | {total / 1e6:,.1f} |")
    median, p99 = np.quantile(turns_s, (0.5, 0.99)) * 1e3
    turns = f"{len(turns_s):,} | {median:.0f} / {p99:.0f}"
    print(f"| a turn of the keeper, CPU ms, median / p99 | {turns} |")


def sizes(samples: list[LoadSample]) -> list[int]:
    """Bytes of each packed sample."""
    return [len(sample_to_bytes(sample)) for sample in samples]


if __name__ == "__main__":
    main()
