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
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from tests.support.engines.gauge import value_of
from tests.support.engines.ranks import NUM_RANKS, config_in, on_ranks, popularity_of
from tests.support.engines.vllm_ranks import Rank, make_rank
from tests.support.redis_servers import RedisProcess, free_port

INTERVAL, LIMIT_MS, DEADLINE_S, BLOCKS = 16, 1.0, 60.0, 5
Row = tuple[float, float, int, int]  # ms elapsed, ms of the processor, preempted, waited


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


def timed_step(made: Rank) -> Row:
    """One step of vLLM, with the plug-in where it is installed."""
    before = resource.getrusage(resource.RUSAGE_THREAD)
    began, spent = time.perf_counter(), time.thread_time()
    made.state.step()
    elapsed, spent = time.perf_counter() - began, time.thread_time() - spent
    after = resource.getrusage(resource.RUSAGE_THREAD)
    preempted, waited = after.ru_nivcsw - before.ru_nivcsw, after.ru_nvcsw - before.ru_nvcsw
    return 1e3 * elapsed, 1e3 * spent, preempted, waited


def interval_of(made: Rank) -> list[Row]:
    """The steps up to a rebalance, rank by rank, and then its own."""
    rows = []
    popularity = popularity_of(made.passes // INTERVAL)
    for rank in range(NUM_RANKS):
        dist.barrier()
        for _ in range(INTERVAL - 1) if rank == made.rank else ():
            made.route(popularity)
            rows.append(timed_step(made))
            made.passes += 1
    dist.barrier()
    made.forward(popularity)
    made.passes += 1
    made.check_weights()
    return rows


def condition(rank: int, config: Path | None, port: int, is_gone: bool, rounds: int) -> list[Row]:
    """The timed steps of one rank."""
    server = None
    if config is not None and rank == 0:
        server = RedisProcess(config.parent / "redis", {"port": str(port)})
    made = make_rank(rank, config, interval=INTERVAL)
    while made.state.expert_rearrangement_step:  # up to the first rebalance
        made.state.step()
    rows = []
    for _ in range(rounds):
        if is_gone and server is not None:
            until("samples are stored", is_reporting)
            server.kill()
            shutil.rmtree(server.folder.parent / "spool", ignore_errors=True)
        rows += interval_of(made)
        if is_gone and server is not None:
            until("the gauge reports the outage", lambda: not is_reporting())
            server.start()
    if server is not None:
        server.kill()
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
            rounds, port, config = -(-outages // BLOCKS), free_port(), None
            if name != "without the plug-in":
                config = config_in(
                    Path(folder),
                    deployment__store=f"redis://127.0.0.1:{port}",
                    telemetry__spool_dir=f"{folder}/spool",
                    telemetry__sample_steps=1,
                )
            for rows in on_ranks(condition, config, port, "gone" in name, rounds):
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
