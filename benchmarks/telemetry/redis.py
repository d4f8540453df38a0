"""What the Redis store costs: writers, one append, reading back, memory under retention.

    python -m benchmarks.telemetry.redis [--seconds 60] [--ranks 320] [--appendfsync everysec]

It starts a server of its own. The ranks are split over a few processes, each rank with a store
object and a connection of its own, as reporters have them; the CPU time is that of those processes
while they write, packing included. Prints one table. Seeded.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import tempfile
import time
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Event

import numpy as np

from eplb.core.load import LoadSample
from eplb.errors import StoreError
from telemetry.load.counts import RunShape
from telemetry.load.folder import CutBySteps, WindowFolder
from telemetry.state.store import StateStore
from tests.support.redis_servers import RedisProcess
from tests.support.stores import redis_store

LAYERS, EXPERTS, SLOTS_PER_RANK = 58, 256, 9
PERIOD_S = 0.5
RETENTION_S = 20.0
RUN = "run-1"

Row = tuple[str, str, str]


@dataclass(frozen=True)
class Written:
    """What one process of writers did."""

    num_sent: int
    num_failed: int
    cpu_s: float  # of the process: waiting for the next moment and making the sample too
    append_cpu_s: float  # of the calls of append alone
    append_s: list[float]


def samples_of(rank: int, count: int, seed: int) -> list[LoadSample]:
    """Samples with skewed counts; their times are set when they are sent."""
    draw = np.random.default_rng((seed, rank))
    skew = draw.lognormal(0.0, 1.0, (LAYERS, SLOTS_PER_RANK))
    held = draw.integers(0, EXPERTS, (LAYERS, SLOTS_PER_RANK))
    return [
        LoadSample("demo", RUN, rank, n, 0.0, n, n, "decode", 1, held, draw.poisson(4096 * skew))
        for n in range(count)
    ]


def write(url: str, ranks: range, seconds: float, pipe: Connection) -> None:
    """Send each rank's samples at its own moments, until the time is over."""
    drawn = [samples_of(rank, 16, seed=1) for rank in ranks]
    stores = [redis_store(url, "demo") for _ in ranks]
    pipe.send("ready")
    pipe.recv()
    began, cpu = time.monotonic(), time.process_time()
    append_s: list[float] = []
    num_failed, append_cpu_s = 0, 0.0
    for sequence in range(int(seconds / PERIOD_S)):
        for n, (store, made) in enumerate(zip(stores, drawn, strict=True)):
            due = began + PERIOD_S * (sequence + n / len(stores))
            Event().wait(max(0.0, due - time.monotonic()))
            sample = stamped(made[sequence % len(made)], sequence)
            asked, asked_cpu = time.perf_counter(), time.thread_time()
            try:
                store.append([sample])
            except StoreError:
                num_failed += 1
            append_cpu_s += time.thread_time() - asked_cpu
            append_s.append(time.perf_counter() - asked)
    pipe.send(Written(len(append_s), num_failed, time.process_time() - cpu, append_cpu_s, append_s))
    for store in stores:
        store.close()


def stamped(sample: LoadSample, sequence: int) -> LoadSample:
    """The same counts as a new sample."""
    return LoadSample(
        "demo", RUN, sample.rank, sequence, time.time(), sequence, sequence, "decode", 1,
        sample.slot_to_expert, sample.tokens,
    )  # fmt: skip


def measure_writers(
    server: RedisProcess, num_ranks: int, seconds: float, processes: int
) -> list[Row]:
    """Let all ranks write, with a keeper that prunes, and add up what it took."""
    context = multiprocessing.get_context("spawn")
    pipes, started = [], []
    for ranks in np.array_split(np.arange(num_ranks), processes):
        ours, theirs = context.Pipe()
        share = range(int(ranks[0]), int(ranks[-1]) + 1)
        started.append(context.Process(target=write, args=(server.url, share, seconds, theirs)))
        started[-1].start()
        pipes.append(ours)
    for pipe in pipes:
        assert pipe.recv() == "ready"
    with closing(redis_store(server.url, "demo")) as store:
        server_cpu = cpu_of_server(store)
        for pipe in pipes:
            pipe.send("go")
        memory = list(keep(store, seconds))
        written = [pipe.recv() for pipe in pipes]
        server_cpu = cpu_of_server(store) - server_cpu
        stored = sum(store.sample_counts(RUN).values())
    for process in started:
        process.join()
    return writer_rows(written, stored, server_cpu, seconds, memory)


def keep(store: StateStore, seconds: float) -> Iterable[tuple[float, int]]:
    """Prune every second; give (seconds since the start, bytes of data)."""
    began = time.monotonic()
    for tick in range(int(seconds)):
        Event().wait(max(0.0, began + tick + 1 - time.monotonic()))
        store.prune(time.time() - RETENTION_S)
        yield (
            time.monotonic() - began,
            int(store.backend.link.ask("", "INFO")["used_memory_dataset"]),
        )


def cpu_of_server(store: StateStore) -> float:
    """Seconds of CPU that the server has used."""
    info = store.backend.link.ask("", "INFO")
    return float(info["used_cpu_sys"]) + float(info["used_cpu_user"])


def writer_rows(
    written: list[Written],
    stored: int,
    server_cpu: float,
    seconds: float,
    memory: list[tuple[float, int]],
) -> list[Row]:
    """The part of the table about writers."""
    sent, cpu_s = sum(one.num_sent for one in written), sum(one.cpu_s for one in written)
    append_cpu_s = sum(one.append_cpu_s for one in written)
    append_ms = np.concatenate([one.append_s for one in written]) * 1e3
    flat = [used / 1e6 for at, used in memory if at > RETENTION_S + 5] or [memory[-1][1] / 1e6]
    rows = [
        ("samples sent / lost", f"{sent:,} / {sent - stored:,}", "0 lost"),
        ("CPU of all writers together", f"{100 * cpu_s / seconds:.1f} % of a core", "<= 25 %"),
        ("of it inside append", f"{100 * append_cpu_s / seconds:.1f} % of a core", ""),
        ("CPU of one append", f"{1e6 * append_cpu_s / sent:.0f} us", ""),
        ("CPU of the server", f"{100 * server_cpu / seconds:.1f} % of a core", ""),
    ]
    p50, p99 = np.percentile(append_ms, [50, 99])
    rows.append(("one append under that load, p50 / p99", f"{p50:.2f} / {p99:.2f} ms", ""))
    bounds = f"{min(flat):.1f} .. {max(flat):.1f} MB"
    rows.append((f"server memory, {RETENTION_S:g} s kept, once it is full", bounds, "flat"))
    per_sample = float(np.median(flat)) * 1e3 / (RETENTION_S * sent / seconds)
    rows.append(("server memory for one sample", f"{per_sample:.1f} kB", ""))
    failed = sum(one.num_failed for one in written)
    return [*rows, ("appends that failed", f"{failed:,}", "0")]


def measure_append(server: RedisProcess) -> Row:
    """One writer with the server to itself."""
    with closing(redis_store(server.url, "alone")) as store:
        taken = []
        for n, sample in enumerate(samples_of(0, 2000, seed=2)):
            alone = LoadSample(
                "alone", RUN, 0, n, 1.0, n, n, "decode", 1, sample.slot_to_expert, sample.tokens
            )
            asked = time.perf_counter()
            store.append([alone])
            taken.append(time.perf_counter() - asked)
    p50, p99 = np.percentile(taken, [50, 99]) * 1e3
    return "one append, alone, p50 / p99", f"{p50:.2f} / {p99:.2f} ms", ""


def measure_reading(server: RedisProcess, num_ranks: int, num_windows: int = 16) -> list[Row]:
    """Read back and fold windows of all ranks."""
    with closing(redis_store(server.url, "demo")) as store:
        for rank in range(num_ranks):
            made = samples_of(rank, num_windows, seed=3)
            store.append(
                [
                    LoadSample(
                        "demo",
                        "read",
                        rank,
                        n,
                        1.0,
                        n,
                        n,
                        "decode",
                        1,
                        one.slot_to_expert,
                        one.tokens,
                    )
                    for n, one in enumerate(made)
                ]
            )
        read_ms, fold_ms = [], []
        for _ in range(5):
            asked = time.perf_counter()
            found = [sample for _, sample in store.samples("read", limit=num_ranks * num_windows)]
            read_ms.append(1e3 * (time.perf_counter() - asked))
            asked = time.perf_counter()
            first = found[0]
            shape = RunShape(first.deployment, first.run, num_ranks, EXPERTS, len(first.tokens))
            folder = WindowFolder(CutBySteps(1), shape)
            folder.add_all(found)
            assert len(folder.windows()) == num_windows
            fold_ms.append(1e3 * (time.perf_counter() - asked))
    what = f"{num_windows} windows of {num_ranks} ranks ({len(found):,} samples)"
    return [
        (f"read back and unpacked, {what}", f"{np.median(read_ms):.0f} ms", ""),
        ("folded into windows", f"{np.median(fold_ms):.0f} ms", "<= 50 ms"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--ranks", type=int, default=320)
    parser.add_argument("--processes", type=int, default=4, help="that the ranks are split over")
    parser.add_argument("--appendfsync", choices=("always", "everysec", "no"), default="everysec")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        settings = {"appendonly": "yes", "appendfsync": asked.appendfsync}
        with RedisProcess(Path(folder), settings) as server:
            version = server.link().ask("", "INFO")["redis_version"]
            print(f"Redis {version}, appendfsync {asked.appendfsync}, {os.cpu_count()} cores,")
            print(f"{platform.machine()}, load {os.getloadavg()[0]:.1f}; {asked.ranks} ranks x")
            print(
                f"{1 / PERIOD_S:g} samples/s of {LAYERS} x {SLOTS_PER_RANK} for {asked.seconds:g} s"
            )
            rows = [measure_append(server), *measure_reading(server, asked.ranks)]
            server.ask("FLUSHALL")
            rows += measure_writers(server, asked.ranks, asked.seconds, asked.processes)
    for what, found, target in rows:
        print(f"{what:66} {found:>24}  {target}")


if __name__ == "__main__":
    main()
