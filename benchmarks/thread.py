"""The steel thread, measured: dispatch, counters, swaps, tables, and decode steps under migrations.

    python3 benchmarks/thread.py --device cuda [--ranks 4] [--steps 10000] [--swap-every 50]
    python benchmarks/thread.py              # the decode part alone, on CPU ranks

On GPUs it needs that many of one host, and deep_ep. Prints one table; losing rows too. Seeded.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from workers import VOCABULARY, begin_run, plan_of, random_placement, told

from api.processes import Child, Parent, preload_modules
from api.worker_build import build_rank
from api.worker_plan import DEPLOYMENT, WorkerPlan
from api.worker_slab import run_slab
from eplb.migration import Pace, build_migration
from eplb.placement import EMPTY, Placement
from eplb.topology import Topology
from runtime.counters import SlotCounter
from runtime.deepep import DeepEPLowLatency, DeepEPShape
from runtime.experts import ExpertBank, ExpertSchema
from runtime.launch import launch
from runtime.routing import RoutingTable
from runtime.selftest import Trial, routing_cases
from runtime.streams import Completion
from telemetry import open_store

Row = tuple[str, str, str]
MOVES_PER_LAYER = 4  # into one rank


def timed(run: Callable[[], Any], repeats: int = 200, warm_up: int = 20) -> list[float]:
    """Microseconds of each call on the current stream."""
    for _ in range(warm_up):
        run()
    marks = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(repeats)
    ]
    for begin, end in marks:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return sorted(begin.elapsed_time(end) * 1e3 for begin, end in marks)


def paired(first: Callable[[], Any], second: Callable[[], Any]) -> tuple[float, float]:
    """Medians of two things timed in turns, so that a drifting clock meets both."""
    runs = [(timed(first, 50), timed(second, 50)) for _ in range(6)]
    return median(x for a, _ in runs for x in a), median(x for _, b in runs for x in b)


def measure_dispatch(rank: int, num_ranks: int) -> list[Row]:
    """DeepEP low latency through the seam against the raw calls; with and without counters."""
    device = torch.device("cuda", rank)
    group = dist.group.WORLD
    assert group is not None
    topology = Topology.uniform(1, num_ranks, 72)
    trial = Trial(topology, 7168, 8, 128, device, torch.bfloat16)
    counter = SlotCounter(1, 72, device)
    shape = DeepEPShape(topology, trial.hidden, trial.top_k, trial.num_tokens)
    dispatcher = DeepEPLowLatency(shape, group, counter)
    _, slots = next(iter(routing_cases(trial, rank)))
    slots = slots.to(device)
    tokens = torch.randn((128, 7168), device=device, dtype=torch.bfloat16)
    weights = torch.rand(slots.shape, device=device)
    buffer = dispatcher._buffer

    def raw(stats: torch.Tensor | None) -> None:
        rows, _, handle, _, _ = buffer.low_latency_dispatch(
            tokens,
            slots,
            128,
            topology.num_slots,
            use_fp8=False,
            cumulative_local_expert_recv_stats=stats,
        )
        buffer.low_latency_combine(rows, slots, weights, handle)

    ours = through_seam(dispatcher, tokens, slots, weights)
    raw_us, ours_us = paired(lambda: raw(counter.row(0)), ours)
    bare_us, counted_us = paired(lambda: raw(None), lambda: raw(counter.row(0)))
    cut = timed(counter.cut, 100)
    return [
        (
            "dispatcher against the raw deep_ep calls, p50",
            f"{raw_us:.1f} -> {ours_us:.1f} us ({ours_us / raw_us - 1:+.1%})",
            "<= +3 %",
        ),
        (
            "counters, in the dispatch kernel, p50",
            f"{bare_us:.1f} -> {counted_us:.1f} us ({counted_us / bare_us - 1:+.2%})",
            "<= +0.3 % of a layer",
        ),
        ("cutting the counters, once a sample", f"{median(cut):.1f} us", "-"),
    ]


def through_seam(
    dispatcher: DeepEPLowLatency, tokens: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor
) -> Callable[[], None]:
    """One dispatch and combine through the seam."""

    def run() -> None:
        received = dispatcher.dispatch(0, tokens, slots, weights)
        dispatcher.combine(0, received.rows, received)

    return run


def measure_swap(rank: int, num_ranks: int) -> list[Row]:
    """Four experts of DeepSeek-V3 (FP8 with scales, 44 MB) into live slots, and the table."""
    device = torch.device("cuda", rank)
    schema = ExpertSchema.swiglu_fp8(7168, 2048)

    class Plain:
        handle = ""
        bytes = torch.empty(8 * schema.record_bytes, dtype=torch.uint8, device=device)

    bank = ExpertBank(schema, 1, 4, num_staging=4, arena=Plain())
    held = np.concatenate([np.arange(256), np.arange(32)])[None].repeat(58, 0)
    placement = Placement(held, 256)
    table = RoutingTable(placement, max_replicas=32, device=device)
    prepared = table.prepare(placement, [7])

    def swap() -> None:
        for slot in range(4):
            bank.swap(0, slot, slot)
        table.swap(prepared)

    times = timed(swap, 100)
    return [
        (
            f"swap of 4 experts of {schema.record_bytes / 1e6:.1f} MB and the table, p50 / p99",
            f"{median(times):.0f} / {times[98]:.0f} us",
            "<= 110 us",
        ),
        (
            "memory of tables, 58 x 256 experts, at most 32 replicas",
            f"{table.num_bytes / 1e6:.2f} MB",
            "<= 8 MB",
        ),
    ]


def publish_for_ever(plan: WorkerPlan, steps: Callable[[], int], swap_every: int) -> None:
    """Publish a random placement of two swaps when one is committed and the steps are due."""
    store = open_store(plan.store, DEPLOYMENT)
    rng, due, version = np.random.default_rng(plan.seed), swap_every, -1
    while True:
        version = store.wait(version, 0.01)
        is_open = store.published() is not None  # first: what is committed then is the base
        committed = store.committed()
        if is_open or committed is None or steps() < due:
            continue
        target = committed.placement
        fresh = random_placement(plan, rng)
        # Two layers at a time, and in place where an expert stays: a few moves, as a plan has.
        layers = rng.choice(plan.model.num_layers, size=2, replace=False)
        target = target.with_layers(in_place(target, fresh, plan.topology), layers.tolist())
        # As much as one layer needs: each layer is a transaction, and a swap, of its own.
        most = most_moves(committed.placement, target, plan.topology)
        store.publish(
            build_migration(
                committed.placement,
                target,
                plan.topology,
                plan_id=store.next_plan_id(),
                pace=Pace(max(1, most)),
            )
        )
        due = steps() + 2 * swap_every


def most_moves(base: Placement, target: Placement, topology: Topology) -> int:
    """Experts that one layer brings into one rank, at most."""
    is_new = base.slot_to_expert != target.slot_to_expert
    per_rank = [
        is_new[:, topology.slots_on(rank)].sum(axis=1) for rank in range(topology.num_ranks)
    ]
    return int(np.max(per_rank))


def in_place(base: Placement, fresh: Placement, topology: Topology) -> Placement:
    """``MOVES_PER_LAYER`` changed experts a rank at most; the others stay where they are."""
    held = base.slot_to_expert.copy()
    for layer in range(len(held)):
        for rank in range(topology.num_ranks):
            span = topology.slots_on(rank)
            now, wanted = held[layer, span], fresh.slot_to_expert[layer, span]
            new = np.setdiff1d(wanted, now)[:MOVES_PER_LAYER]
            for expert in new.tolist():
                count = np.bincount(held[layer][held[layer] >= 0], minlength=base.num_experts)
                spare = [
                    s
                    for s in range(span.start, span.stop)
                    if held[layer, s] == EMPTY or count[held[layer, s]] > 1
                ]
                if spare:
                    held[layer, spare[0]] = expert
    return Placement(held, base.num_experts, base.generation)


@dataclass(frozen=True)
class Length:
    """How long to serve: steps, or seconds where they are given."""

    steps: int
    seconds: float = 0.0

    def part(self, steps: int, since: float) -> float:
        """How much of it is over."""
        if self.seconds:
            return (time.monotonic() - since) / self.seconds
        return steps / self.steps


def run_decode(
    parent: Parent, plan: WorkerPlan, rank: int, length: Length, swap_every: int
) -> None:
    """Serve decode steps under migrations, and prove what is left in memory."""
    begun = threading.Event()
    parent.listen(lambda _: begun.set())
    built = build_rank(plan, rank)
    agent, dispatcher = built.agent, built.dispatcher
    parent.tell("ready")
    assert begun.wait(120), "not told to begin"
    agent.start()
    if rank == 0:
        threading.Thread(
            target=publish_for_ever, daemon=True, args=(plan, lambda: dispatcher.steps, swap_every)
        ).start()
    random = torch.Generator().manual_seed(rank)
    batches = torch.randint(VOCABULARY, (16, *plan.batch_shape), generator=random).to(built.device)
    is_cuda = plan.device == "cuda"
    in_flight, times, memory = Completion(is_cuda=is_cuda), [], list[int]()
    since = time.monotonic()
    while agent.step():
        started = time.perf_counter()
        built.model.forward(batches[dispatcher.steps % 16], salt=dispatcher.steps)
        agent.wait(in_flight)
        in_flight = Completion(is_cuda=is_cuda)
        times.append((time.perf_counter() - started) * 1e6)
        part = length.part(dispatcher.steps, since)
        if part >= 0.1 and not memory:
            memory.append(used_memory(is_cuda))
        if part >= 1.0:
            agent.request_halt()
    agent.wait(in_flight)
    memory.append(used_memory(is_cuda))
    agent.close()
    wrong = wrong_slots(plan, built, rank)
    parent.tell(
        "served",
        {
            "steps": dispatcher.steps,
            "dispatcher": built.figures.dispatcher,
            "captures": getattr(built.model, "num_captures", None),
            "rebalances": agent.figures.rebalances,
            "moved": agent.figures.experts_moved,
            "pauses_ms": agent.figures.swap_pauses_ms,
            "step_us": times[100:],
            "memory": memory,
            "wrong_slots": wrong,
            "hash": agent.placement.hash,
            "bytes": agent.describe().detail["bytes_by_source"],
        },
    )


def used_memory(is_cuda: bool) -> int:
    """Bytes of the device that are taken, or of this process on a CPU."""
    if is_cuda:
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return total - free
    resident = Path("/proc/self/statm").read_text().split()[1]
    return int(resident) * os.sysconf("SC_PAGESIZE")


def wrong_slots(plan: WorkerPlan, built: Any, rank: int) -> int:
    """Live slots whose bytes are not those of the expert that the placement says they hold."""
    held = built.agent.placement.slot_to_expert[:, plan.topology.slots_on(rank)]
    parts = built.agent._parts
    return sum(
        parts.bank.digest(layer, slot) != tuple(parts.digests[layer, expert].tolist())
        for layer, slots in enumerate(held.tolist())
        for slot, expert in enumerate(slots)
        if expert != EMPTY
    )


def measure_decode(
    device: str, num_ranks: int, length: Length, swap_every: int, precision: str
) -> list[Row]:
    """Real ranks, agents, votes, store and slab; only the plans are random."""
    from torch._C._distributed_c10d import TCPStore

    rendezvous = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        plan = plan_of(Path(folder), num_ranks, rendezvous.port, device=device, precision=precision)
        store = begin_run(plan)
        slab = Child("slab", run_slab, plan, 0)
        told(slab, "ready", 120)
        ranks = [
            Child(f"rank {r}", run_decode, plan, r, length, swap_every) for r in range(num_ranks)
        ]
        for child in ranks:
            told(child, "ready", 240)
        for child in ranks:
            child.command("begin")
        reports = [told(child, "served", 400 + length.seconds) for child in ranks]
        for child in (*ranks, slab):
            child.stop(1.0)
        store.close()
    return rows_of(reports, precision, swap_every)


def rows_of(reports: list[dict[str, Any]], precision: str, swap_every: int) -> list[Row]:
    """Sum the ranks' reports up."""
    first = reports[0]
    pauses = sorted(p for r in reports for p in r["pauses_ms"])
    step_us = sorted(us for r in reports for us in r["step_us"])
    drop = max(abs(r["memory"][0] - r["memory"][-1]) for r in reports) / 2**20
    what = (
        f"{first['steps']} {precision} decode steps, a swap every {swap_every} or as soon as done"
    )
    return [
        (
            what,
            f"{len(first['pauses_ms'])} swaps in {first['rebalances']} migrations,"
            f" {sum(r['moved'] for r in reports)} experts moved,"
            f" {sum(r['bytes'].get('peer', 0) for r in reports) / 1e9:.1f} GB from peers",
            "-",
        ),
        ("graph captures", f"{first['captures'] or 'no graph'}", "1, on cuda"),
        ("slots with wrong bytes at the end", f"{sum(r['wrong_slots'] for r in reports)}", "0"),
        ("placements at the end", f"{len({r['hash'] for r in reports})}", "1"),
        ("memory, change from 10 % of the steps to the end", f"{drop:.1f} MiB", "flat"),
        (
            "boundary with a swap, host time, p50 / p99",
            f"{median(pauses):.2f} / {pauses[int(len(pauses) * 0.99)]:.2f} ms",
            "-",
        ),
        (
            "decode step, host time, p50 / p99",
            f"{median(step_us):.0f} / {step_us[int(len(step_us) * 0.99)]:.0f} us",
            "-",
        ),
    ]


def main() -> None:
    """Measure, and print one table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=0, help="10000 on cuda, 1000 on the cpu")
    parser.add_argument("--seconds", type=float, default=0.0, help="in place of steps: a soak")
    parser.add_argument("--swap-every", type=int, default=50)
    parser.add_argument("--precision", default="", help="bfloat16 or fp8, on cuda")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    is_cuda, rows = given.device == "cuda", list[Row]()
    if is_cuda:
        rows += launch(measure_dispatch, given.ranks, deadline_s=120)[0]
        rows += launch(measure_swap, 1, deadline_s=60)[0]
    preload_modules("api.worker_rank", "api.worker_slab")
    rows += measure_decode(
        given.device,
        given.ranks,
        Length(given.steps or (10_000 if is_cuda else 1_000), given.seconds),
        given.swap_every,
        given.precision or ("bfloat16" if is_cuda else "float32"),
    )
    width = max(len(row[0]) for row in rows)
    for what, found, target in rows:
        print(f"{what:<{width}}  {found}   (target {target})")
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
