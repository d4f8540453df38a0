"""What calls of a store cost: samples, decisions, leases, and a day of history.

    python -m benchmarks.telemetry.state sqlite:FILE
    python -m benchmarks.telemetry.state redis://127.0.0.1:6379

The store must be empty. Prints the median and the 99th percentile of each row in microseconds of
wall time, and the microseconds of this process's processor time a call. It uses the public
interface alone, so that two versions of the program can be compared: run both in turn, on the same
machine, and quote ratios.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import numpy as np

from eplb import LoadSample, Placement, Topology
from eplb.migration.build import build_migration
from telemetry import RankState, RunInfo, TaskResult, open_store

LAYERS, EXPERTS, RANKS, SLOTS = 58, 256, 32, 9
DAY_S = 86_400.0
SEED = 7


def samples(rank: int, first: int, number: int, rng: np.random.Generator) -> list[LoadSample]:
    """Samples of one rank, a minute apart."""
    held = rng.integers(0, EXPERTS, (LAYERS, SLOTS))
    return [
        LoadSample(
            "cost", "run-1", rank, n, 60.0 * n, 8 * n, 8 * n + 7, "decode", 1, held,
            rng.poisson(3000, (LAYERS, SLOTS)),
        )
        for n in range(first, first + number)
    ]  # fmt: skip


def placements(rng: np.random.Generator) -> Iterator[Placement]:
    """Placements that follow one another by a few moves."""
    slots = np.arange(RANKS * SLOTS) % EXPERTS
    held = np.tile(slots, (LAYERS, 1))
    generation = 0
    while True:
        generation += 1
        yield Placement(held.copy(), EXPERTS, generation)
        for layer in rng.integers(0, LAYERS, 8):
            held[layer, EXPERTS:] = rng.permutation(held[layer, EXPERTS:])


def measured(calls: list[Callable[[], Any]]) -> dict[str, float]:
    """Microseconds of each call: median, 99th percentile, processor time."""
    wall, began_cpu = [], time.process_time()
    for call in calls:
        began = time.perf_counter()
        call()
        wall.append(time.perf_counter() - began)
    cpu = (time.process_time() - began_cpu) / len(calls)
    return {
        "p50": round(float(np.median(wall)) * 1e6, 1),
        "p99": round(float(np.quantile(wall, 0.99)) * 1e6, 1),
        "cpu": round(cpu * 1e6, 1),
    }


def run(url: str) -> dict[str, dict[str, float]]:
    """Measure each row over a new store."""
    rng = np.random.default_rng(SEED)
    rows: dict[str, dict[str, float]] = {}
    with closing(open_store(url, "cost")) as store:
        store.begin_run(RunInfo("run-1", 0.0, {}, {}, 8))
        batches = [samples(n % RANKS, 8 * (n // RANKS), 8, rng) for n in range(400)]
        rows["append of 8 samples"] = measured([lambda b=b: store.append(b) for b in batches])
        one = [samples(RANKS, n, 1, rng) for n in range(400)]
        rows["append of 1 sample"] = measured([lambda b=b: store.append(b) for b in one])
        state = RankState("run-1", 0, 0.0, 1, 1, "idle", 0, 0, 1, 0, detail={"bytes": {}})
        rows["report of a rank"] = measured([lambda: store.report(state)] * 400)
        rows["lease renewed"] = measured([lambda: store.acquire_lease("one", 30.0)] * 300)
        lease = store.acquire_lease("one", 30.0)
        assert lease is not None

        made = placements(rng)
        follow = [next(made) for _ in range(121)]
        store.commit(follow[0], expected=None, reason="start")
        topology = Topology.uniform(num_nodes=4, ranks_per_node=8, slots_per_rank=SLOTS)
        plans = [
            build_migration(base, target, topology, plan_id=store.next_plan_id())
            for base, target in itertools.pairwise(follow)
        ]
        publishing, committing = [], []
        for plan in plans:
            publishing += [lambda p=plan: store.publish(p, fence=lease.token)]
            committing += [
                lambda p=plan: store.commit(
                    p.target, expected=p.base.generation, plan_id=p.plan_id, reason="moved"
                )
            ]
        publishing[0]()  # the first of each is not counted: it opens what later ones find open
        committing[0]()
        publish_us, commit_us = [], []
        for publish, commit in zip(publishing[1:], committing[1:], strict=True):
            publish_us.append(measured([publish])["p50"])
            commit_us.append(measured([commit])["p50"])
        for name, figures in (("publish", publish_us), ("commit", commit_us)):
            rows[name] = {
                "p50": round(float(np.median(figures)), 1),
                "p99": round(float(np.quantile(figures, 0.99)), 1),
            }
        rows["committed, unchanged"] = measured([store.committed] * 300)
        rows["published, none"] = measured([store.published] * 300)

        rows["task submitted"] = measured([lambda: store.submit("rebalance", {})] * 150)
        claimed = []
        rows["task claimed"] = measured(
            [lambda: claimed.append(store.claim(fence=lease.token))] * 150
        )
        ends = [
            lambda t=task: store.finish(t.id, "done", TaskResult(), fence=lease.token)
            for task in claimed
            if task is not None
        ]
        rows["task finished"] = measured(ends)
        rows["claim, none queued"] = measured([lambda: store.claim(fence=lease.token)] * 300)
        rows["event"] = measured([lambda: store.add_event("note", {"n": 1})] * 300)
        rows["live settings read"] = measured([store.live] * 300)
        store.change_live({"max_moves": 3}, reason="a cost")
        rows["reports of a run read"] = measured([lambda: store.rank_states("run-1")] * 300)

        def day() -> None:
            after = num = 0
            while page := store.samples_before(DAY_S, since=0.0, after=after, limit=1000):
                after, num = page[-1][0], num + len(page)
            assert num > 3000, f"{num} samples"

        rows["a day read"] = measured([day] * 5)
        rows["a minute read"] = measured([lambda: store.samples_before(1260.0, since=1200.0)] * 100)
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("store", help="URL of an empty store")
    print(json.dumps(run(parser.parse_args().store)))
