"""What telemetry costs, and what it loses when a store goes away: one table, fixed seed.

    python -m benchmarks.telemetry.costs [--seconds 10] [--only WORDS] [--seed 1]

Samples are of 58 layers x 9 slots, as on each of 32 ranks of DeepSeek-V3. Rows:

- the step path: ``offer`` and ``state`` after each step of a loop that keeps the interpreter busy
  for a millisecond, with the store alive, dead, and back with a backlog; beside it what the same
  clock shows of nothing at all, which is the noise of the host;
- SQLite: 64 processes, a sample a second from each, each with its own reporter and spool;
- the fold of 16 windows of 320 ranks into a history;
- Redis: 320 ranks in 4 processes, two samples a second from each, and samples older than a third
  of the run forgotten, each written at once and several together; and with the server killed for
  a while (AOF, appendfsync always).

The report's figures are of ``--seconds 600``; Redis is killed for 60 s then, else for a quarter.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import platform
import re
import resource
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eplb.core.load import LoadSample
from eplb.errors import RankError, StoreError
from telemetry import open_store
from telemetry.load.counts import RunShape
from telemetry.load.folder import CutBySteps, WindowFolder, history
from telemetry.load.reporter import AT_ONCE, Reporter, ReporterStats, Tempo
from telemetry.load.sample_codec import sample_to_bytes
from telemetry.load.spool import Spool
from telemetry.state.runs import RankState
from telemetry.state.store import StateStore
from tests.support.redis_servers import RedisProcess

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


# -- Rows of the benchmark of telemetry that need a Redis server, which they start and kill.

DEADLINE_S = 120.0
NUM_RANKS = 320


class Sweeper:
    """Forgets old samples, as a controller does, and notes the server's memory."""

    def __init__(self, server: RedisProcess, keep_s: float) -> None:
        self._server, self._keep_s = server, keep_s
        self.num_pruned, self.used_mb = 0, list[float]()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with closing(open_store(self._server.url, DEPLOYMENT)) as store:
            while not self._stop.wait(self._keep_s / 6):
                self.num_pruned += store.prune(time.time() - self._keep_s)
                found = re.search(r"used_memory\D+(\d+)", str(self._server.ask("INFO", "memory")))
                assert found is not None, "every server says how much memory it uses"
                self.used_mb.append(int(found[1]) / 1e6)

    def close(self) -> None:
        """Stop."""
        self._stop.set()
        self._thread.join(DEADLINE_S)


def redis_load(run: Run) -> Iterator[Row]:
    what = f"Redis, {NUM_RANKS} ranks x 2 samples/s, {run.seconds:.0f} s, written"
    target = "0 lost, 25 % of a core, memory flat"
    for how, tempo in (("at once", AT_ONCE), ("every 2 s", Tempo(store_interval=2.0))):
        with RedisProcess(run.folder / how.replace(" ", "-")) as server:
            yield Row(f"{what} {how}", _redis_load(server, run, tempo), target)


def _redis_load(server: RedisProcess, run: Run, tempo: Tempo) -> str:
    plan = _redis_plan(server, run, tempo)
    with writing(plan) as written, closing(Sweeper(server, run.seconds / 3)) as sweeper:
        threading.Event().wait(run.seconds)
    with closing(open_store(server.url, DEPLOYMENT)) as store:
        found = result_text(plan, written, store)
    middle, end = sweeper.used_mb[len(sweeper.used_mb) // 2], sweeper.used_mb[-1]
    return f"{found}; {sweeper.num_pruned} forgotten, memory {middle:.0f} MB half way, {end:.0f} MB"


def redis_killed(run: Run) -> Iterator[Row]:
    away_s = min(60.0, run.seconds / 4)
    settings = {"appendonly": "yes", "appendfsync": "always"}
    with RedisProcess(run.folder / "redis-killed", settings) as server:
        plan = _redis_plan(server, run, AT_ONCE)
        with writing(plan) as written:
            threading.Event().wait(run.seconds / 4)
            server.kill()
            threading.Event().wait(away_s)
            server.start()
            back = time.monotonic()
            fresh_s, whole_s = _recovery(server, plan, back - away_s - run.seconds / 4, back)
        with closing(open_store(server.url, DEPLOYMENT)) as store:
            found = result_text(plan, written, store)
    found += (
        f"; {written.total('spooled')} spooled, {written.total('dropped')} dropped; after its "
        f"return new samples of every rank in {fresh_s:.1f} s, the backlog in {whole_s:.1f} s"
    )
    yield Row(f"  the same at once, killed for {away_s:.0f} s", found, "0 lost, back within 5 s")


def _redis_plan(server: RedisProcess, run: Run, tempo: Tempo) -> Writing:
    num_processes = 4
    each, spools = NUM_RANKS // num_processes, server.folder / "spools"
    return Writing(server.url, spools, num_processes, each, 2.0, run.seconds, run.seed, tempo)


def _recovery(
    server: RedisProcess, plan: Writing, started: float, back: float
) -> tuple[float, float]:
    """Seconds until every rank has written again, and until the store has what is due by then."""
    fresh_s = 0.0
    first = int(plan.samples_per_s * (back - started))  # sequence of the first sample after it
    with closing(open_store(server.url, DEPLOYMENT)) as store:
        while time.monotonic() < back + DEADLINE_S:
            since_s = time.monotonic() - back
            states = store.rank_states(RUN)
            if not fresh_s and sum(state.step >= first for state in states) == plan.num_ranks:
                fresh_s = since_s
            due = plan.num_ranks * min(
                plan.expected, int((since_s - 1.0) * plan.samples_per_s) + first
            )
            if fresh_s and sum(store.sample_counts(RUN).values()) >= due:
                return fresh_s, since_s
            threading.Event().wait(0.05)
    raise StoreError(f"not recovered within {DEADLINE_S:g} s of the server's return")


# -- the step path


def steps(reporter: Reporter | None, run: Run, seconds: float) -> str:
    """Cost of what a step adds, in microseconds."""
    counts, work = token_counts(run.seed), np.ones((160, 160))
    costs: list[float] = []
    first = reporter.stats().offered if reporter is not None else 0
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        step_ends = time.perf_counter() + 1e-3
        while time.perf_counter() < step_ends:
            work @ work
        sequence = first + len(costs)
        sample, state = sample_of(0, sequence, counts), state_of(0, sequence)
        started = time.perf_counter()
        if reporter is not None:
            reporter.offer(sample)
            reporter.state(state)
        costs.append((time.perf_counter() - started) * 1e6)
    p50, p99 = np.percentile(costs, [50, 99])
    return f"p50 {p50:.1f} us, p99 {p99:.1f} us, worst {max(costs):.0f} us of {len(costs)}"


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Another writer sleeps in its transaction: nobody else can write."""
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield
        other.execute("ROLLBACK")


def step_path(run: Run) -> Iterator[Row]:
    target = "p99 <= 50 us"
    seconds = min(run.seconds, 30.0)
    path = run.folder / "steps.sqlite"
    yield Row("step path: nothing, the host's noise", steps(None, run, seconds), "")
    with closing(open_store(path, DEPLOYMENT)) as store:
        reporter = Reporter(store, spool=Spool(run.folder / "steps-spool"))
        yield Row("step path: store alive", steps(reporter, run, seconds), target)
        with locked(path):
            yield Row("step path: store dead (locked)", steps(reporter, run, seconds), target)
            waiting = reporter.stats().waiting
        found = steps(reporter, run, min(seconds, 2.0))
        yield Row(f"step path: store back, {waiting} samples replayed", found, target)
        reporter.close(DEADLINE_S)
        stats = reporter.stats()
        lost = stats.offered - sum(store.sample_counts(RUN).values())
        yield Row("  of these", f"{stats.offered} offered, {lost} lost", "0 lost")


# -- stores under load


def sqlite_load(run: Run) -> Iterator[Row]:
    path = run.folder / "load.sqlite"
    plan = Writing(str(path), run.folder / "spools", 64, 1, 1.0, run.seconds, run.seed)
    open_store(path, DEPLOYMENT).close()
    with writing(plan) as written:
        pass
    with closing(open_store(path, DEPLOYMENT)) as store:
        found = result_text(plan, written, store)
    yield Row(f"SQLite, 64 processes x 1 sample/s, {run.seconds:.0f} s", found, "0 lost, p99 20 ms")


def folding(run: Run) -> Iterator[Row]:
    counts, num_windows = token_counts(run.seed), 16
    samples = [sample_of(rank, n, counts) for n in range(num_windows) for rank in range(NUM_RANKS)]
    taken_ms: list[float] = []
    first = samples[0]
    shape = RunShape(first.deployment, first.run, NUM_RANKS, EXPERTS, len(first.tokens))
    # Compiled, if it is, and not counted.
    WindowFolder(CutBySteps(10), shape).add_all(samples)
    for _ in range(5):
        started = time.perf_counter()
        folder = WindowFolder(CutBySteps(10), shape)
        folder.add_all(samples)
        folded = history(folder.windows(), last=num_windows)
        taken_ms.append((time.perf_counter() - started) * 1e3)
        assert folded is not None, "every window is complete"
        assert len(folded.tokens) == num_windows, "every window is complete"
    yield Row(
        f"fold of {num_windows} windows of {NUM_RANKS} ranks", milliseconds(taken_ms), "50 ms"
    )


ROWS: dict[str, Callable[[Run], Iterator[Row]]] = {
    "step": step_path,
    "sqlite": sqlite_load,
    "fold": folding,
    "redis": redis_load,
    "killed": redis_killed,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default=",".join(ROWS), help=f"of {', '.join(ROWS)}")
    given = parser.parse_args()
    host = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"{datetime.now(UTC):%Y-%m-%d}, {host}, load {load} before, seed {given.seed}\n")
    print("| what | found | target |\n|---|---|---|")
    for name in given.only.split(","):
        with tempfile.TemporaryDirectory(prefix="telemetry-") as folder:
            for row in ROWS[name](Run(given.seconds, given.seed, Path(folder))):
                print(f"| {row.what} | {row.found} | {row.target} |", flush=True)


if __name__ == "__main__":
    main()
