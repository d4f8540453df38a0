"""Kills a rank during decode: measures detection by the others, and the time until recovery.

    python3 -m benchmarks.ranks.death --device cuda [--ranks 4] [--unwatched]
    python -m benchmarks.ranks.death --device cpu

DeepEP v1.2.1 has no masks here, and its kernels wait about 100 s for a dead peer before they trap.
So a wait for a kernel also watches the liveness connections, by which the host detects the death;
then the workers restart from the cache of their host, which outlives them. ``--unwatched`` shows
the library without this: two ranks for each mode, of which one is killed.
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
import torch.distributed as dist

from api.demo.checking import MAX_RELATIVE_ERROR, ROUTE_TIE
from benchmarks.ranks.children import Child, Parent, preload_modules
from benchmarks.ranks.serving import (
    VOCABULARY,
    RankPlan,
    begin_run,
    build_bench_rank,
    plan_of,
    received_message,
    run_host_cache,
)
from eplb.core.topology import Topology
from eplb.errors import RankError
from runtime.checkpoints.checkpoint import Checkpoint
from runtime.counters import SlotCounter
from runtime.dispatch.table import Trial, choose_dispatcher, routing_cases
from runtime.group import Rendezvous, reach
from runtime.model.moe import Forward
from runtime.model.reference import ReferenceModel
from runtime.streams import Completion

KILL_AFTER_STEPS = 20
PATIENCE_S = 5.0  # for reports of survivors; after it they are ended
UNWATCHED_DEADLINE_S = 150.0
GPU_DISPATCHERS = ("deepep_low_latency", "deepep_normal", "all_to_all")


def print_row(what: str, found: str) -> None:
    """Print one row at once: a death may end this program too."""
    print(f"{what:<62} {found}", flush=True)


def run_decode(parent: Parent, plan: RankPlan, rank: int) -> None:
    """Serve until a peer dies; the first answer goes to the parent, to be checked."""
    begun = threading.Event()
    parent.receive_commands(lambda _: begun.set())
    built = build_bench_rank(plan, rank)
    parent.send("ready", os.getpid())
    assert begun.wait(120), "no command to begin"
    built.agent.start()
    random = torch.Generator().manual_seed(rank)
    ids = torch.randint(VOCABULARY, plan.batch_shape, generator=random)
    # Once: a copy from pageable memory waits for the stream, and so for a dead peer, without end.
    on_device = ids.to(built.device)
    is_cuda = plan.deployment.device == "cuda"
    in_flight = Completion(is_cuda=is_cuda)
    try:
        while built.agent.step():
            answer = built.model.forward(on_device, salt=built.passes.begin())
            built.agent.wait(in_flight)
            in_flight = Completion(is_cuda=is_cuda)
            if built.passes.steps == 1:
                built.agent.wait(in_flight)
                on_host = Forward(answer.hidden.cpu(), answer.experts.cpu())
                parent.send("first answer", (time.monotonic(), ids, on_host))
            if built.passes.steps == KILL_AFTER_STEPS:
                parent.send("in mid-decode")
    except RankError as exc:
        parent.send("served", (time.monotonic(), str(exc)))


def start(plan: RankPlan, num_ranks: int) -> tuple[list[Child], list[int]]:
    """Start all ranks and wait until they can serve."""
    ranks = [Child(f"rank {r}", run_decode, plan, r) for r in range(num_ranks)]
    return ranks, [received_message(child, "ready", 240) for child in ranks]


def first_answers(ranks: list[Child], reference: ReferenceModel) -> tuple[float, float, int]:
    """(when the last rank had answered, largest error of its answer, wrong routes in it)."""
    for child in ranks:
        child.command("begin")
    answers = [received_message(child, "first answer", 60) for child in ranks]
    when = max(at for at, _, _ in answers)
    # Of one rank: the reference takes seconds for each, and a rank's answer holds all ranks' work.
    _, ids, answer = answers[-1]
    check = reference.check(ids, answer)
    return when, check.max_error, check.wrong_routes


def kill_last(ranks: list[Child], pids: list[int]) -> float:
    """Kill the last rank during decode, print detection times; return the time of the kill."""
    for child in ranks:
        received_message(child, "in mid-decode", 120)
    killed_at = time.monotonic()
    os.kill(pids[-1], signal.SIGKILL)
    ranks[-1].process.join(PATIENCE_S)
    print_row("detected by the supervisor after", f"{(time.monotonic() - killed_at) * 1e3:.0f} ms")
    for child in ranks[:-1]:
        left_s = max(0.0, killed_at + PATIENCE_S - time.monotonic())
        if child.messages.poll(left_s):
            at, words = received_message(child, "served", 1)
            took_ms = (at - killed_at) * 1e3
            print_row(f"detected by {child.name} after", f"{took_ms:.0f} ms: {words}")
        else:
            print_row(f"detected by {child.name} after", f"not within {PATIENCE_S:.0f} s")
    return killed_at


def measure(plan: RankPlan, num_ranks: int, reference: ReferenceModel) -> None:
    """Serve, kill, stop, start again, check."""
    print_row(f"-- {plan.dispatcher}, {num_ranks} ranks, {plan.deployment.device}", "")
    ranks, pids = start(plan, num_ranks)
    _, error, wrong = first_answers(ranks, reference)
    print_row("before: largest error, wrong routes", f"{error:.1e}, {wrong}")
    killed_at = kill_last(ranks, pids)
    stopping_at = time.monotonic()
    for child in ranks:
        child.stop(0.0)
    stopped_at = time.monotonic()
    ranks, _ = start(plan, num_ranks)
    ready_at = time.monotonic()
    right_at, error, wrong = first_answers(ranks, reference)
    is_right = error <= MAX_RELATIVE_ERROR[plan.precision] and wrong == 0
    print_row("stopping all workers takes", f"{stopped_at - stopping_at:.2f} s")
    print_row(
        "new workers, loaded from the host cache, are ready after another",
        f"{ready_at - stopped_at:.2f} s",
    )
    print_row("from the kill to right tokens", f"{right_at - killed_at:.2f} s")
    print_row("after: largest error, wrong routes, right", f"{error:.1e}, {wrong}, {is_right}")
    for child in ranks:
        child.stop(0.0)


def run_unwatched(parent: Parent, name: str, rank: int, first_gpu: int, handle: str) -> None:
    """Two ranks dispatch and combine for ever; this one says what its library does at the end."""
    parent.receive_commands(lambda _: None)
    device = torch.device("cuda", first_gpu + rank)
    torch.cuda.set_device(device)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "cpu:gloo,cuda:nccl",
        store=reach(handle, UNWATCHED_DEADLINE_S),
        rank=rank,
        world_size=2,
        device_id=device,
    )
    group = dist.group.WORLD
    assert group is not None
    trial = Trial(Topology.uniform(1, 2, 16), 2048, 8, 128, device, torch.bfloat16)
    counter = SlotCounter(1, 16, device)
    dispatcher, _ = choose_dispatcher(name, trial, counter, group, max_tokens=128)
    _, slots = next(iter(routing_cases(trial, rank)))
    slots = slots.to(device)
    tokens = torch.randn((128, 2048), device=device, dtype=torch.bfloat16)
    weights = torch.rand(slots.shape, device=device)
    torch.cuda.synchronize()
    parent.send("ready", os.getpid())
    while True:
        step_at = time.monotonic()
        try:
            received = dispatcher.dispatch(0, tokens, slots, weights)
            dispatcher.combine(0, received.rows, received)
            torch.cuda.synchronize()
        except Exception as exc:  # whatever the library throws is what is to be found out
            parent.send("ended", (time.monotonic() - step_at, f"{type(exc).__name__}: {exc}"))
            break
    try:
        torch.ones(1, device=device).item()
        parent.send("afterwards", "the device can be used")
    except Exception as exc:
        parent.send("afterwards", f"{type(exc).__name__}: {exc}".split("\n")[0])


def measure_unwatched() -> None:
    """Both modes of DeepEP at once, on two GPUs each."""
    modes: dict[str, tuple[Any, list[Child], list[int]]] = {}
    for number, name in enumerate(("deepep_low_latency", "deepep_normal")):
        rendezvous = Rendezvous()
        pair = [
            Child(f"{name} {rank}", run_unwatched, name, rank, 2 * number, rendezvous.handle)
            for rank in range(2)
        ]
        modes[name] = (rendezvous, pair, [received_message(child, "ready", 120) for child in pair])
    for _, _, pids in modes.values():
        os.kill(pids[1], signal.SIGKILL)
    deadline = time.monotonic() + UNWATCHED_DEADLINE_S
    for name, (_, (survivor, killed), _) in modes.items():
        what = f"unwatched, {name}"
        if survivor.messages.poll(max(0.0, deadline - time.monotonic())):
            message = survivor.receive()
            kind, body = message or ("ended", (0.0, f"its process: {survivor.exit_text()}"))
            print_row(
                what, f"after {body[0]:.1f} s: {body[1]}"[:300] if kind == "ended" else str(body)
            )
            if message is not None and survivor.messages.poll(10):
                after = survivor.receive()
                print_row(f"{what}, afterwards", str(after[1] if after else survivor.exit_text()))
        else:
            print_row(what, f"nothing within {UNWATCHED_DEADLINE_S:.0f} s")
        for child in (survivor, killed):
            child.stop(0.0)


def main() -> None:
    """Kill a rank, time the others, restart, check."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--unwatched", action="store_true", help="on cuda, with four GPUs")
    given = parser.parse_args()
    is_cuda = given.device == "cuda"
    precision = "bfloat16" if is_cuda else "float32"
    preload_modules("benchmarks.ranks.serving")
    # Ranks spin beside the reference, which would wait for the slowest of many threads.
    torch.set_num_threads(min(8, os.cpu_count() or 1))
    with tempfile.TemporaryDirectory() as folder:
        plan = plan_of(Path(folder), given.ranks, device=given.device, precision=precision)
        store = begin_run(plan)
        reference = ReferenceModel(
            plan.model, Checkpoint(plan.weights).reference_weights(), tie=ROUTE_TIE[precision]
        )
        host_cache = Child("host_cache", run_host_cache, plan)
        received_message(host_cache, "ready", 60)
        for name in GPU_DISPATCHERS if is_cuda else ("all_to_all",):
            measure(replace(plan, dispatcher=name), given.ranks, reference)
        host_cache.stop(0.0)
        store.close()
    if given.unwatched:
        measure_unwatched()


if __name__ == "__main__":
    main()
