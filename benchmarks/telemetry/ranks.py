"""Ranks that report to a store, for the benchmark of telemetry: real reporters in forked processes.

The samples are of 58 layers x 9 slots, with token counts as a decode step leaves them. Processes
are forked from one that never imported torch, so that 64 of them fit on a small host.
"""

from __future__ import annotations

import logging
import multiprocessing
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eplb.core.load import LoadSample
from eplb.errors import RankError
from telemetry import open_store
from telemetry.load.reporter import AT_ONCE, Reporter, ReporterStats, Tempo
from telemetry.load.sample_codec import sample_to_bytes
from telemetry.load.spool import Spool
from telemetry.state.runs import RankState
from telemetry.state.store import StateStore

LAYERS, SLOTS, EXPERTS = 58, 9, 256
DEPLOYMENT, RUN = "bench", "bench-1"
FLUSH_S = 60.0


def token_counts(seed: int, num_kinds: int = 8) -> NDArray[np.int64]:
    """[kinds, L, C] counts with the long tail of real experts."""
    rng = np.random.default_rng(seed)
    return rng.gamma(0.6, 900.0, (num_kinds, LAYERS, SLOTS)).astype(np.int64)


def sample_of(rank: int, sequence: int, counts: NDArray[np.int64]) -> LoadSample:
    held = (np.arange(LAYERS * SLOTS).reshape(LAYERS, SLOTS) + rank * SLOTS) % EXPERTS
    tokens = counts[sequence % len(counts)]
    step = 10 * sequence
    fields = (DEPLOYMENT, RUN, rank, sequence, time.time(), step, step + 9, "decode", 1)
    return LoadSample(*fields, held, tokens)


def state_of(rank: int, step: int) -> RankState:
    return RankState(RUN, rank, time.time(), step, 1, "idle", 0, 0, step, 0)


@dataclass(frozen=True)
class Writing:
    """Which ranks write where, and how often."""

    url: str
    folder: Path  # of the spools
    num_processes: int
    ranks_each: int
    samples_per_s: float  # of each rank
    seconds: float
    seed: int
    tempo: Tempo = AT_ONCE

    @property
    def num_ranks(self) -> int:
        """Of all processes."""
        return self.num_processes * self.ranks_each

    @property
    def expected(self) -> int:
        """Samples of each rank."""
        return round(self.samples_per_s * self.seconds)


@dataclass
class Written:
    """What came of it."""

    stats: list[ReporterStats] = field(default_factory=list)
    append_ms: list[float] = field(default_factory=list)  # of writes that the store took
    cpu_s: float = 0.0  # of all writers
    wall_s: float = 0.0

    def total(self, name: str) -> int:
        """Sum of a figure of all reporters."""
        return sum(getattr(stats, name) for stats in self.stats)


@contextmanager
def writing(plan: Writing) -> Iterator[Written]:
    """Run the ranks; what they wrote is complete when the block has ended."""
    context = multiprocessing.get_context("fork")
    pipes, processes = list[Connection](), list[Any]()
    for number in range(plan.num_processes):
        ours, theirs = context.Pipe()
        process = context.Process(target=_write, args=(plan, number, theirs), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    for pipe in pipes:
        _hear(pipe, FLUSH_S)  # ready
    started = time.monotonic()
    for pipe in pipes:
        pipe.send("start")
    written = Written()
    yield written
    left_s = started + plan.seconds + 2 * FLUSH_S - time.monotonic()
    for pipe, process in zip(pipes, processes, strict=True):
        stats, append_ms, cpu_s = _hear(pipe, left_s)
        written.stats += stats
        written.append_ms += append_ms
        written.cpu_s += cpu_s
        process.join(FLUSH_S)
    written.wall_s = time.monotonic() - started


def _hear(pipe: Connection, timeout_s: float) -> Any:
    assert pipe.poll(timeout_s), f"a writer was silent for {timeout_s:.0f} s"
    return pipe.recv()


def _write(plan: Writing, number: int, pipe: Connection) -> None:
    logging.getLogger("telemetry").setLevel(logging.ERROR)  # 320 ranks would tell of one outage
    append_ms: list[float] = []
    store = _timed(open_store(plan.url, DEPLOYMENT), append_ms)
    ranks = range(number * plan.ranks_each, (number + 1) * plan.ranks_each)
    counts = token_counts(plan.seed)
    reporters = [
        Reporter(store, spool=Spool(plan.folder / f"rank-{rank}"), tempo=plan.tempo, seed=rank)
        for rank in ranks
    ]
    sample_to_bytes(sample_of(0, 0, counts))  # imports what a rank that serves has long imported
    store.append([])
    append_ms.clear()
    pipe.send("ready")
    _hear(pipe, FLUSH_S)
    begun = resource.getrusage(resource.RUSAGE_SELF)
    period_s, started, bell = 1 / plan.samples_per_s, time.monotonic(), threading.Event()
    for sequence in range(plan.expected):
        for at, (rank, reporter) in enumerate(zip(ranks, reporters, strict=True)):
            # Spread over the period, as ranks that were started one after the other are.
            phase = (number + at * plan.num_processes) / plan.num_ranks
            bell.wait(max(0.0, started + (sequence + phase) * period_s - time.monotonic()))
            reporter.offer(sample_of(rank, sequence, counts))
            reporter.state(state_of(rank, sequence))
    for reporter in reporters:
        try:
            reporter.close(FLUSH_S)
        except RankError as exc:
            print(exc)
    ended = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = ended.ru_utime + ended.ru_stime - begun.ru_utime - begun.ru_stime
    pipe.send(([reporter.stats() for reporter in reporters], append_ms, cpu_s))


def _timed(store: StateStore, append_ms: list[float]) -> StateStore:
    append = store.append

    def timed(samples: Any) -> int:
        started = time.perf_counter()
        num_new = append(samples)
        append_ms.append((time.perf_counter() - started) * 1e3)
        return num_new

    store.append = timed  # type: ignore[method-assign]
    return store


# -- the table


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    what: str
    found: str
    target: str


@dataclass(frozen=True)
class Run:
    """What every row is told."""

    seconds: float
    seed: int
    folder: Path


def milliseconds(values: list[float]) -> str:
    if not values:
        return "none"
    p50, p99 = np.percentile(values, [50, 99])
    return f"p50 {p50:.1f} ms, p99 {p99:.1f} ms, worst {max(values):.1f} ms"


def result_text(plan: Writing, written: Written, store: StateStore) -> str:
    stored = sum(store.sample_counts(RUN).values())
    lost = plan.expected * plan.num_ranks - stored
    share = written.cpu_s / written.wall_s
    return (
        f"{stored} stored, {lost} lost, {written.total('repeated')} repeats; "
        f"write {milliseconds(written.append_ms)}; all writers {share:.0%} of a core"
    )
