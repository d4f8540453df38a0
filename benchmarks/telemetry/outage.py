"""Rows of the benchmark of telemetry that need a Redis server, which they start and kill."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import closing

from benchmarks.telemetry.ranks import DEPLOYMENT, RUN, Row, Run, Writing, result_text, writing
from eplb.errors import StoreError
from telemetry import open_store
from telemetry.reporter.drain import AT_ONCE, Tempo
from telemetry.stores.redis.connection.local_server import RedisProcess

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
    for how, tempo in (("at once", AT_ONCE), ("every 2 s", Tempo(write_s=2.0))):
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
