"""One death: a rank is killed in mid-decode. What do others see, and how soon is all right again?

    python3 benchmarks/gpu_death.py [--ranks 4]

DeepEP v1.2.1 has no masks, and a low-latency kernel that waits for a dead peer waits about 100 s
before it traps. So nobody may wait in a kernel: the vote, on the host, tells survivors first, and
the way back is a restart of the workers from the host's slab, which outlives them.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_thread import MODEL, plan_of, random_placement, told

from api.processes import Child, Parent, preload_modules
from api.worker_plan import DEPLOYMENT, MAX_RELATIVE_ERROR, ROUTE_TIE, WorkerPlan
from api.worker_rank import build_rank
from api.worker_slab import run_slab
from eplb.errors import RankError
from eplb.records import model_to_dict, topology_to_dict
from runtime.checkpoint import Checkpoint
from runtime.moe import Forward
from runtime.reference import ReferenceModel
from runtime.streams import Completion
from telemetry import open_store
from telemetry.store import RunInfo


def run_decode(parent: Parent, plan: WorkerPlan, rank: int) -> None:
    """Serve until a peer dies; the first answer goes to the parent, to be checked."""
    begun = threading.Event()
    parent.listen(lambda _: begun.set())
    built = build_rank(plan, rank)
    parent.tell("ready", os.getpid())
    assert begun.wait(120), "not told to begin"
    built.agent.start()
    random = torch.Generator().manual_seed(rank)
    ids = torch.randint(4096, plan.batch_shape, generator=random)
    in_flight = Completion(is_cuda=True)
    try:
        while built.agent.step():
            answer = built.model.forward(ids.to(built.device), salt=built.dispatcher.steps)
            built.agent.wait(in_flight)
            in_flight = Completion(is_cuda=True)
            if built.dispatcher.steps == 1:
                on_host = Forward(answer.hidden.cpu(), answer.experts.cpu())
                parent.tell("first answer", (time.monotonic(), ids, on_host))
    except RankError as exc:
        parent.tell("served", (time.monotonic(), str(exc)))


def start(plan: WorkerPlan, num_ranks: int) -> tuple[list[Child], list[int]]:
    """Start all ranks and wait until they can serve."""
    ranks = [Child(f"rank {r}", run_decode, plan, r) for r in range(num_ranks)]
    return ranks, [told(child, "ready", 240) for child in ranks]


def first_answers(ranks: list[Child], reference: ReferenceModel) -> tuple[float, float, int]:
    """(when the last rank had answered, largest error, wrong routes)."""
    for child in ranks:
        child.command("begin")
    answers = [told(child, "first answer", 60) for child in ranks]
    checks = [reference.check(ids, answer) for _, ids, answer in answers]
    when = max(at for at, _, _ in answers)
    return when, max(c.max_error for c in checks), sum(c.wrong_routes for c in checks)


def main() -> None:
    """Kill a rank, time the others, restart, check."""
    from torch._C._distributed_c10d import TCPStore

    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=4)
    num_ranks = parser.parse_args().ranks
    preload_modules("api.worker_rank", "api.worker_slab")
    rows: list[tuple[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        plan = plan_of(Path(folder), num_ranks, "bfloat16", rendezvous.port)
        store = open_store(plan.store, DEPLOYMENT)
        placement = random_placement(num_ranks, np.random.default_rng(0))
        store.commit(placement, expected=None, reason="start")
        store.begin_run(
            RunInfo(
                plan.run,
                time.time(),
                model_to_dict(MODEL),
                topology_to_dict(plan.topology),
                plan.window_steps,
            )
        )
        reference = ReferenceModel(
            plan.model, Checkpoint(plan.weights).reference_weights(), tie=ROUTE_TIE["bfloat16"]
        )
        slab = Child("slab", run_slab, plan, 0)
        told(slab, "ready", 60)
        ranks, pids = start(plan, num_ranks)
        _, error, wrong = first_answers(ranks, reference)
        rows.append(("before: largest error, wrong routes", f"{error:.1e}, {wrong}"))
        time.sleep(2)  # serving: thousands of steps; the moment of the kill does not matter
        killed_at = time.monotonic()
        os.kill(pids[-1], signal.SIGKILL)
        for child in ranks[:-1]:
            at, words = told(child, "served", 150)
            rows.append((f"{child.name} knows after", f"{(at - killed_at) * 1e3:.0f} ms: {words}"))
        for child in ranks:
            child.stop(0.0)
        stopped_at = time.monotonic()
        again = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        plan = replace(plan, rendezvous_port=again.port)
        ranks, _ = start(plan, num_ranks)
        ready_at = time.monotonic()
        right_at, error, wrong = first_answers(ranks, reference)
        is_right = error <= MAX_RELATIVE_ERROR["bfloat16"] and wrong == 0
        rows += [
            ("from the kill until all workers are stopped", f"{stopped_at - killed_at:.2f} s"),
            (
                "until new workers are loaded from the slab and ready",
                f"{ready_at - killed_at:.2f} s",
            ),
            ("until right tokens again", f"{right_at - killed_at:.2f} s"),
            ("after: largest error, wrong routes, right", f"{error:.1e}, {wrong}, {is_right}"),
        ]
        for child in (*ranks, slab):
            child.stop(0.0)
        store.close()
    for what, found in rows:
        print(f"{what:<55} {found}")


if __name__ == "__main__":
    main()
