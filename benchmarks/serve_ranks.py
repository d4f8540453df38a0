"""MoE layers of DeepSeek-V3's shape under real expert parallelism: one process for each GPU.

    python -m benchmarks.routing_file --file routing.npz
    torchrun --nproc-per-node 2 -m benchmarks.serve_ranks --file routing.npz [--precision bf16]

Three layers (hidden 7168, expert 2048, 256 experts and 32 replicas, top-8) in every arm:

    contiguous, greedy, auto   placements planned on earlier routing, shares as planned
    time                       the same, planned for the time of experts in decode
    balanced                   slots in turn: what no placement can beat. Every rank gets the same
                               rows, which is checked

``--shared`` adds a shared expert of a routed one's size, in BF16, whose tokens are computed where
they are while results travel back.

Decode is a CUDA graph over DeepEP's low-latency mode, prefill is eager over its normal mode. Rows
travel in FP8 with FP8 experts. Arms take turns, and each step has another batch. A step takes as
long as its slowest rank: microseconds of a layer, median and 99th percentile over steps. *rows* is
max/mean of rows received by a rank, the mean over layers and batches. Weights are made up; they are
as fast as others, and stay where they are while placements change.

One GPU alone is a group of one rank, which has no balance to gain: it holds all 256 experts.
``--device cpu`` runs small shapes over gloo, to try the program.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from benchmarks.routing_file import NUM_LAYERS, TOP_K, Routing, read, topology_of
from benchmarks.simulator.local_dispatch import LocalDispatcher
from eplb.core.model import ModelShape
from eplb.core.placement import Placement
from runtime.counters import SlotCounter
from runtime.dispatch.all_to_all import AllToAllDispatcher, Dispatcher
from runtime.experts import Arena, ExpertBank, ExpertSchema, PlainArena, bank_bytes
from runtime.group import gathered
from runtime.memory import SymmetricArena
from runtime.model.compute import Experts, GroupedExperts, LoopExperts
from runtime.model.expert_times import captured
from runtime.model.moe import MoELayer
from runtime.routing import RoutingTable, TableLayers

HIDDEN, INTERMEDIATE = 7168, 2048
SMALL_HIDDEN, SMALL_INTERMEDIATE = 64, 32  # on a CPU
SIZES = {"decode": (32, 64, 128), "prefill": (1024, 4096)}  # tokens of a rank
STEPS = {"decode": 100, "prefill": 20}
WARM_UP, COUNTED_BATCHES, SEED = 3, 4, 3
LEAD_CYCLES = 300_000  # cycles of the device, 0.15 ms
MOST_UNEVEN = 1.01  # max/mean of rows under "balanced"

Batch = tuple[torch.Tensor, torch.Tensor]  # experts [L, T, K], seeds [L]


@dataclass(frozen=True)
class Arm:
    """What is launched in a step, and the table that it finds; None: slots in turn, of its own."""

    run: Callable[[Batch], object]
    table: TableLayers | None


@dataclass(frozen=True)
class Group:
    """This rank in the group of all."""

    rank: int
    size: int
    world: dist.ProcessGroup
    device: torch.device

    @property
    def is_cuda(self) -> bool:
        """Whether ranks run on GPUs."""
        return self.device.type == "cuda"

    @property
    def maps_peers(self) -> bool:
        """Whether ranks read each other's GPU memory."""
        return self.is_cuda and self.size > 1


def join(device: str) -> Group:
    """Join the group that torchrun describes, or be one rank alone."""
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555"}.items():
        os.environ.setdefault(name, value)
    rank, size = (
        int(os.environ.get(name, alone)) for name, alone in (("RANK", 0), ("WORLD_SIZE", 1))
    )
    where = torch.device("cpu")
    if device == "cuda":
        where = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(where)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
        rank=rank,
        world_size=size,
        device_id=where if device == "cuda" else None,
    )
    world = dist.group.WORLD
    assert world is not None, "just made"
    return Group(rank, size, world, where)


class Layers:
    """The layers of this rank."""

    def __init__(
        self,
        group: Group,
        num_experts: int,
        precision: str,
        mode: str,
        tokens: Sequence[int],
        dispatcher: str,
        *,
        shared: bool = False,
    ) -> None:
        self.group, self.most_tokens = group, max(tokens)
        self.model = ModelShape(
            tuple(range(NUM_LAYERS)),
            num_experts,
            TOP_K,
            hidden=HIDDEN,
            intermediate=INTERMEDIATE,
        )
        self.topology = topology = topology_of(group.size, num_experts)
        slots = int(topology.slots_of_rank[group.rank])
        self.bank = made_up_bank(group, precision, slots)
        self.counter = SlotCounter(NUM_LAYERS, slots, group.device)
        in_order = np.tile(np.arange(topology.num_slots, dtype=np.int32), (NUM_LAYERS, 1))
        start = Placement(in_order % num_experts, num_experts)
        spare = topology.num_slots - num_experts

        def table(placement: Placement, max_replicas: int) -> RoutingTable:
            return RoutingTable(placement, max_replicas=max_replicas, device=group.device)

        self.table = table(start, min(group.size, spare + 1))
        self.in_order = table(Placement(in_order, topology.num_slots), 1)
        self.shared = made_up_bank(group, "bf16", 1) if shared else None
        self.dispatcher = self._dispatcher(
            dispatcher, mode, use_fp8=precision == "fp8" and group.is_cuda
        )

    def _dispatcher(self, name: str, mode: str, *, use_fp8: bool) -> Dispatcher:
        group, topology = self.group, self.topology
        if name == "auto" and group.size == 1:  # normal mode needs several ranks
            name = "deepep" if group.is_cuda and mode == "decode" else "local"
        elif name == "auto":
            name = "deepep" if group.is_cuda else "all_to_all"
        if name == "local":
            return LocalDispatcher(topology.num_slots, self.counter, use_fp8=use_fp8)
        if name == "all_to_all":
            return AllToAllDispatcher(topology, group.world, group.rank, self.counter)
        from runtime.dispatch.deepep import DeepEPLowLatency, DeepEPNormal, DeepEPShape

        kind = DeepEPLowLatency if mode == "decode" else DeepEPNormal
        shape = DeepEPShape(topology, HIDDEN, TOP_K, self.most_tokens)
        return kind(shape, group.world, self.counter, use_fp8=use_fp8)

    def experts(self, tokens: int) -> Experts:
        """For batches of so many tokens of a rank."""
        if not self.group.is_cuda:
            return LoopExperts(self.bank)
        rows = 2 * tokens * self.group.size * TOP_K // self.topology.num_slots
        return GroupedExperts(self.bank, usual_rows=rows)

    def prepared(self, placement: Placement) -> TableLayers:
        """What makes a placement serve."""
        return self.table.prepare(placement, range(NUM_LAYERS))

    def of(self, tokens: int, table: RoutingTable) -> list[MoELayer]:
        """Layers that choose slots by a table."""
        experts, made = self.experts(tokens), []
        for layer in range(NUM_LAYERS):
            shared = self.shared and self.shared.weights(layer)
            pair = (shared["gate_up"][0], shared["down"][0]) if shared else None
            made.append(MoELayer(layer, TOP_K, experts, table, self.dispatcher, pair))
        return made

    def arms(self, tokens: int, placements: dict[str, Placement]) -> dict[str, Arm]:
        """Layers and placement of each arm."""
        hidden, weights = made_up_tokens(self.group, tokens)

        def run_of(table: RoutingTable) -> Callable[[Batch], None]:
            layers = self.of(tokens, table)

            def run(batch: Batch) -> None:
                ids, seeds = batch
                for number, layer in enumerate(layers):
                    layer.forward(hidden, ids[number], weights, salt=seeds)

            return run

        planned = run_of(self.table)
        return {
            **{name: Arm(planned, self.prepared(one)) for name, one in placements.items()},
            "balanced": Arm(run_of(self.in_order), None),
        }


def made_up_tokens(group: Group, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states [T, H] and even weights [T, K]."""
    width, dtype = (HIDDEN, torch.bfloat16) if group.is_cuda else (SMALL_HIDDEN, torch.float32)
    random = torch.Generator(group.device).manual_seed(SEED + group.rank)
    hidden = torch.randn((tokens, width), generator=random, device=group.device, dtype=dtype)
    return hidden, torch.full((tokens, TOP_K), 1 / TOP_K, device=group.device)


def made_up_bank(group: Group, precision: str, slots: int) -> ExpertBank:
    """Weights that overflow nowhere."""
    if not group.is_cuda:
        schema = ExpertSchema.swiglu(SMALL_HIDDEN, SMALL_INTERMEDIATE)
        return ExpertBank(schema, NUM_LAYERS, slots, num_staging=0)
    if precision == "fp8":
        schema = ExpertSchema.swiglu_fp8(HIDDEN, INTERMEDIATE)
    else:
        schema = ExpertSchema.swiglu(HIDDEN, INTERMEDIATE, torch.bfloat16)
    size = bank_bytes(schema, NUM_LAYERS, slots, 0)
    arena: Arena = PlainArena(size, group.device)
    if group.maps_peers:
        arena = SymmetricArena(size, group.world, group.device)
    bank = ExpertBank(schema, NUM_LAYERS, slots, num_staging=0, arena=arena)
    for layer in range(NUM_LAYERS):
        for name, tensor in bank.weights(layer).items():
            for slot in tensor:  # one by one: the values before rounding take four times the room
                plain = torch.randn(slot.shape, device=group.device)
                slot.copy_(plain.abs() * 1e-3 if name.endswith("scale") else plain * 0.02)
    return bank


class Step:
    """One size of batch: input buffers, and each arm as something to launch."""

    def __init__(self, layers: Layers, tokens: int, *, in_graph: bool) -> None:
        self.layers, self.tokens, self._in_graph = layers, tokens, in_graph
        device = layers.group.device
        ids = torch.zeros((NUM_LAYERS, tokens, TOP_K), dtype=torch.int64, device=device)
        self.batch = (ids, torch.zeros(NUM_LAYERS, dtype=torch.int64, device=device))
        self._even = torch.from_numpy(even_slots(layers, tokens)).to(device)
        self._launches: dict[Callable[[Batch], object], Callable[[], object]] = {}

    def feed(self, arm: Arm, routing: Routing, number: int) -> None:
        """Bring the batch of a step, and the placement, to where the arm reads them."""
        group, (ids, seeds) = self.layers.group, self.batch
        if arm.table is None:
            ids.copy_(self._even.expand_as(ids))
        else:
            self.layers.table.swap(arm.table)
            found = routing.window(number, group.rank, group.size, self.tokens)
            ids.copy_(torch.from_numpy(found.astype(np.int64)))
        seeds.fill_(number * group.size + group.rank)

    def launch(self, arm: Arm) -> None:
        """Run all layers once."""
        if arm.run not in self._launches:
            launch = partial(arm.run, self.batch)
            self._launches[arm.run] = captured(launch, WARM_UP).replay if self._in_graph else launch
        self._launches[arm.run]()


def even_slots(layers: Layers, tokens: int) -> NDArray[np.int64]:
    """[tokens, K] distinct slots of each token, every slot as often as any other."""
    num_slots = layers.topology.num_slots
    stride = num_slots // TOP_K + 1
    while np.gcd(stride, num_slots) > 1:
        stride += 1
    pairs = np.arange(tokens * TOP_K) + layers.group.rank * tokens * TOP_K
    return (pairs * stride % num_slots).reshape(tokens, TOP_K)


def timed(step: Step, arms: dict[str, Arm], routing: Routing, steps: int) -> NDArray[np.float64]:
    """[steps, arms] microseconds of a layer on the slowest rank."""
    group, marks = step.layers.group, list[tuple[Any, Any]]()
    ready = torch.zeros(1, device=group.device)
    for number in range(-WARM_UP, steps):
        for arm in arms.values():
            step.feed(arm, routing, number % steps)
            dist.all_reduce(ready)  # ranks begin together
            if group.is_cuda:  # and find the launch there: how long it takes does not count
                torch.cuda._sleep(LEAD_CYCLES)  # type: ignore[no-untyped-call]
            begin = marker(group)
            step.launch(arm)
            if number >= 0:
                marks.append((begin, marker(group)))
    if group.is_cuda:
        torch.cuda.synchronize()
    mine = [between_us(group, *pair) / NUM_LAYERS for pair in marks]
    slowest = torch.tensor(mine, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.view(steps, len(arms)).numpy()


def marker(group: Group) -> Any:
    """A point of this rank's time."""
    if not group.is_cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def between_us(group: Group, begin: Any, end: Any) -> float:
    """Microseconds from one marker to another."""
    return float(1e3 * begin.elapsed_time(end) if group.is_cuda else 1e6 * (end - begin))


def received_rows(step: Step, arm: Arm, routing: Routing, batches: int) -> NDArray[np.float64]:
    """[batches, L, S] rows that slots receive; all ranks have as many slots."""
    group, found = step.layers.group, []
    counts = step.layers.counter.received[:, : step.layers.bank.num_slots]
    for number in range(batches):
        step.feed(arm, routing, number)
        step.launch(arm)  # a first launch warms up and captures, and counts more than once
        before = counts.clone()
        step.launch(arm)
        rows = gathered((counts - before).tolist(), group.world)  # [R, L, C]
        of_slots = np.concatenate(rows, axis=1).astype(np.float64)
        sent = group.size * step.tokens * TOP_K
        assert (of_slots.sum(axis=1) == sent).all(), f"{sent} rows were sent, found {of_slots}"
        found.append(of_slots)
    return np.array(found)


def unevenness(rows: NDArray[np.float64], num_ranks: int) -> float:
    """Max/mean of rows that ranks receive, the mean over layers and batches."""
    by_rank = rows.reshape(*rows.shape[:2], num_ranks, -1).sum(axis=3)
    return float((by_rank.max(axis=2) / by_rank.mean(axis=2)).mean())


def show(
    step: Step, mode: str, routing: Routing, arms: dict[str, Arm], steps: int, counted: int
) -> dict[str, NDArray[np.float64]]:
    """Print one line for each arm; the last is what the others are compared with.

    Args:
        counted: batches whose rows are counted.

    Returns:
        The rows of slots, by what was measured and its time.
    """
    *_, best = arms
    of_slots = {name: received_rows(step, arm, routing, counted) for name, arm in arms.items()}
    rows = {name: unevenness(found, step.layers.group.size) for name, found in of_slots.items()}
    times = timed(step, arms, routing, steps)
    uneven = [name for name, arm in arms.items() if not arm.table and rows[name] > MOST_UNEVEN]
    if uneven:
        raise RuntimeError(f"max/mean of rows is {rows[uneven[0]]:.3f} under balanced, expected 1")
    if step.layers.group.rank:
        return {}
    middle = dict(zip(arms, np.median(times, axis=0), strict=True))
    late = dict(zip(arms, np.quantile(times, 0.99, axis=0), strict=True))
    for name in arms:
        print(
            f"{mode:9}{step.tokens:7} {routing.name:9}{name:24}{middle[name]:9.1f}"
            f"{late[name]:9.1f}{middle[best] / middle[name]:8.1%}{rows[name]:7.3f}",
            flush=True,
        )
    same = f"{mode} {step.tokens} {routing.name}"
    return {f"{same} {name} {middle[name]:.2f}": rows for name, rows in of_slots.items()}


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--file", type=Path, required=True, help="of benchmarks.routing_file")
    parser.add_argument("--precision", choices=("fp8", "bf16"), default="fp8")
    parser.add_argument("--modes", nargs="+", choices=("decode", "prefill"), default=list(STEPS))
    parser.add_argument("--tokens", nargs="+", type=int, help="of a rank, instead of the usual")
    parser.add_argument("--steps", type=int, help="of each line, instead of the usual")
    parser.add_argument("--shared", action="store_true")
    parser.add_argument("--arms", nargs="+", help="these alone, besides balanced")
    parser.add_argument("--out", type=Path, help="file for benchmarks.fidelity.own_layers")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--dispatcher", choices=("auto", "deepep", "all_to_all", "local"), default="auto"
    )
    return parser


def main() -> None:
    """Measure every trace at every size."""
    asked = arguments().parse_args()
    group = join(asked.device)
    traces, found = read(asked.file, group.size), dict[str, NDArray[np.float64]]()
    if not group.rank:
        where = torch.cuda.get_device_name() if group.is_cuda else "CPU"
        print(f"{group.size} x {where}, torch {torch.__version__}, {asked.precision}", end="")
        print(f", dispatcher {asked.dispatcher}")
        print(f"{'mode':9}{'tokens':>7} {'trace':9}{'arm':24}{'us':>9}{'p99':>9}", end="")
        print(f"{'speed':>8}{'rows':>7}", flush=True)
    for mode in asked.modes:
        tokens_of_rank = asked.tokens or SIZES[mode]
        layers = Layers(
            group,
            traces[0].num_experts,
            asked.precision,
            mode,
            tokens_of_rank,
            asked.dispatcher,
            shared=asked.shared,
        )
        # The sizes of the all-to-all are on the host, which no graph can hold.
        has_sizes_on_host = isinstance(layers.dispatcher, AllToAllDispatcher)
        in_graph = group.is_cuda and mode == "decode" and not has_sizes_on_host
        for tokens, routing in product(tokens_of_rank, traces):
            step = Step(layers, tokens, in_graph=in_graph)
            arms = layers.arms(tokens, routing.placements)
            if asked.arms:
                arms = {name: arms[name] for name in (*asked.arms, "balanced")}
            steps = asked.steps or STEPS[mode]
            counted = steps if asked.out else COUNTED_BATCHES
            found |= show(step, mode, routing, arms, steps, counted)
        if hasattr(layers.dispatcher, "close"):  # DeepEP's buffers
            layers.dispatcher.close()
        del layers, step, arms
    if asked.out and not group.rank:
        np.savez_compressed(asked.out, **{name: rows.astype("u2") for name, rows in found.items()})
    dist.destroy_process_group()


if __name__ == "__main__":
    with torch.inference_mode():
        main()
