"""One death: a rank is killed in mid-decode. What do others see, and how soon is all right again?

    python3 benchmarks/death.py --device cuda [--ranks 4]
    python benchmarks/death.py --device cpu

DeepEP v1.2.1 has no masks, and a low-latency kernel that waits for a dead peer waits about 100 s
before it traps. So nobody may wait for a kernel alone: the vote, on the host, tells survivors, and
the way back is a restart of the workers from the slab of their host, which outlives them.
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

import torch
from workers import VOCABULARY, begin_run, plan_of, told

from api.processes import Child, Parent, preload_modules
from api.worker_plan import MAX_RELATIVE_ERROR, ROUTE_TIE, WorkerPlan
from api.worker_rank import build_rank
from api.worker_slab import run_slab
from eplb.errors import RankError
from runtime.checkpoint import Checkpoint
from runtime.moe import Forward
from runtime.reference import ReferenceModel
from runtime.streams import Completion

KILL_AFTER_STEPS = 20


def run_decode(parent: Parent, plan: WorkerPlan, rank: int) -> None:
    """Serve until a peer dies; the first answer goes to the parent, to be checked."""
    begun = threading.Event()
    parent.listen(lambda _: begun.set())
    built = build_rank(plan, rank)
    parent.tell("ready", os.getpid())
    assert begun.wait(120), "not told to begin"
    built.agent.start()
    random = torch.Generator().manual_seed(rank)
    ids = torch.randint(VOCABULARY, plan.batch_shape, generator=random)
    is_cuda = plan.device == "cuda"
    in_flight = Completion(is_cuda=is_cuda)
    try:
        while built.agent.step():
            answer = built.model.forward(ids.to(built.device), salt=built.dispatcher.steps)
            built.agent.wait(in_flight)
            in_flight = Completion(is_cuda=is_cuda)
            if built.dispatcher.steps == 1:
                on_host = Forward(answer.hidden.cpu(), answer.experts.cpu())
                parent.tell("first answer", (time.monotonic(), ids, on_host))
            if built.dispatcher.steps == KILL_AFTER_STEPS:
                parent.tell("in mid-decode")
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
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=4)
    given = parser.parse_args()
    num_ranks, device = given.ranks, given.device
    precision = "bfloat16" if device == "cuda" else "float32"
    preload_modules("api.worker_rank", "api.worker_slab")
    rows: list[tuple[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        plan = plan_of(Path(folder), num_ranks, rendezvous.port, device=device, precision=precision)
        store = begin_run(plan)
        reference = ReferenceModel(
            plan.model, Checkpoint(plan.weights).reference_weights(), tie=ROUTE_TIE[precision]
        )
        slab = Child("slab", run_slab, plan, 0)
        told(slab, "ready", 60)
        ranks, pids = start(plan, num_ranks)
        _, error, wrong = first_answers(ranks, reference)
        rows.append(("before: largest error, wrong routes", f"{error:.1e}, {wrong}"))
        for child in ranks:
            told(child, "in mid-decode", 120)
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
        is_right = error <= MAX_RELATIVE_ERROR[precision] and wrong == 0
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
