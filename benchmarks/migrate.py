"""Moving experts, measured: each phase against the plain copy, and what decode steps feel of it.

    python3 benchmarks/migrate.py --device cuda [--only stage,slab,flip,whole,disk,decode-copy]
    python benchmarks/migrate.py                 # the same on CPU ranks, small

On GPUs it needs four of one host and deep_ep. Shapes are DeepSeek-V3's, made-up weights; a decode
step is four resident MoE layers run fourteen times, 56 layers in all. Seeded; one table.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from big_rank import DEADLINE_S, BigRank, Shapes, build, fill, first_slots, seconds, v3, wait_for
from numpy.typing import NDArray
from preload import write_experts

from eplb.migration import Migration, Move, Pace, Source, build_migration
from eplb.model import ModelShape
from eplb.placement import EMPTY, Placement
from eplb.records import model_to_dict, topology_to_dict
from eplb.topology import Topology
from rebalance.agent import RankAgent
from rebalance.lanes import Pull
from rebalance.parts import AgentSettings, Links, RankParts
from rebalance.phases import RankPhase
from rebalance.slab import HostSlab, SlabAddress, SlabReader, SlabSettings
from rebalance.sources import Sources
from rebalance.stage_settings import SERVING_BYTES_PER_SECOND, StageSettings
from rebalance.staging import Stager
from rebalance.transport import Record
from rebalance.waiting import PhaseBox, drive
from runtime.checkpoint import Checkpoint
from runtime.counters import SlotCounter
from runtime.launch import launch
from runtime.memory import digest
from runtime.routing import RoutingTable
from runtime.streams import Completion
from telemetry import open_store
from telemetry.reporter import Reporter
from telemetry.store import RunInfo

Row = tuple[str, str, str]
DEPLOYMENT = "bench"
NUM_STAGED = 16
REPEATS = 8
LAYER_RUNS = 14  # of four resident layers: a step of 56
PHASE_STEPS = 240
SETTLE_STEPS = 20  # after a change of phase, not counted
TOKENS = 128
VOCABULARY = 1024


def is_cuda() -> bool:
    """Whether ranks run on GPUs here."""
    return torch.cuda.device_count() > 1


# -- stage


class PinnedSlab:
    """Records in locked host memory, as a slab that holds them all already."""

    bytes_from_other_hosts = 0

    def __init__(self, big: BigRank, records: list[Record]) -> None:
        size = big.bank.schema.record_bytes
        whole = torch.empty(len(records) * size, dtype=torch.uint8, pin_memory=is_cuda())
        self._of = dict(zip(records, whole.view(len(records), size), strict=True))
        scratch = big.bank.staging(0)
        for layer, expert in records:
            fill(scratch, layer, expert, big.bank.schema)
            self._of[(layer, expert)].copy_(scratch)

    @property
    def num_entries(self) -> int:
        """All of them, for each rank of the host."""
        return 4 * len(self._of)

    def load(
        self, records: list[Record], *, deadline_s: float, weights_version: int = 0
    ) -> tuple[list[Any], int]:
        """Nothing comes from disk."""
        return [], 0

    def release(self, records: list[Record]) -> None:
        """Nothing to do: all of it stays."""

    def prepare_for_gpu(self, records: list[Record]) -> None:
        """Nothing to do: it is locked."""

    def read_part(self, record: Record, offset: int, into: torch.Tensor) -> None:
        """Order the copy of a part."""
        into.copy_(self._of[record][offset : offset + len(into)], non_blocking=True)


def incoming(big: BigRank, source: Source) -> list[Move]:
    """Sixteen records that the next rank holds, into this one."""
    other = (big.rank + 1) % big.topology.num_ranks
    slots = big.topology.slots_on(other)
    held = big.placement.slot_to_expert[0]
    moves = []
    for number, slot in enumerate(range(slots.start, slots.start + NUM_STAGED)):
        src_slot = slot if source is Source.PEER else EMPTY
        moves.append(Move(0, int(held[slot]), number, source, src_slot))
    return moves


def measure_stage(
    rank: int, num_ranks: int, shapes: Shapes, source: Source, address: SlabAddress | None = None
) -> list[Row]:
    """Ours, digests and all, against one plain copy of each record, in turns.

    Args:
        address: of the host's slab; None: in its place, locked memory of this process.
    """
    big = build(rank, num_ranks, shapes)
    moves = incoming(big, source)
    records = [(move.layer, move.expert) for move in moves]
    slab: Any = None
    if address is not None:
        slab = leased(big, address, records)
    elif source is Source.HOST:
        slab = PinnedSlab(big, records)
    transport = big.transport(slab)
    transport.begin()
    sources = Sources(rank, big.topology, transport.readable, frozenset)
    stager = Stager(transport, sources, big.digests, StageSettings(), time.monotonic)
    box = PhaseBox(RankPhase(generation=0))
    entries = [big.bank.staging(number) for number in range(NUM_STAGED)]

    def ours() -> None:
        held = big.placement.slot_to_expert
        pulls = [Pull(m, e, held) for m, e in zip(moves, entries, strict=True)]
        drive(stager.stage(pulls, lambda: True), box, time.monotonic)

    def plain() -> None:
        for move, entry in zip(moves, entries, strict=True):
            if slab is not None:
                slab.read_part((move.layer, move.expert), 0, entry)
            else:
                place = sources.holders(move, big.placement.slot_to_expert)[0]
                big.peers.read(place, move.layer, 0, entry)

    rows = []
    gigabytes = NUM_STAGED * shapes.schema.record_bytes / 1e9
    for who in ("one rank", "all at once"):
        found: list[tuple[float, float]] = []
        for _ in range(REPEATS + 1):
            times = []
            for run in (plain, ours):
                dist.barrier()
                is_running = who == "all at once" or rank == 0
                times.append(seconds(run, big.device) if is_running else 1.0)
            found.append((times[0], times[1]))
        plain_s, ours_s = (median(pair[n] for pair in found[1:]) for n in (0, 1))
        what = f"stage {shapes.schema.record_bytes / 1e6:.0f} MB experts from "
        host = "the host" if address is None else "the host's slab"
        what += f"{'a peer' if source is Source.PEER else host}, {who}"
        target = ">= 85 %" if source is Source.PEER else ">= 90 %"
        rates = f"{gigabytes / plain_s:.1f} -> {gigabytes / ours_s:.1f} GB/s"
        rows.append((what, f"{rates}, {plain_s / ours_s:.0%} of the plain copy", target))
    right = all(
        digest(entry) == tuple(big.digests[record].tolist())
        for entry, record in zip(entries, records, strict=True)
    )
    rows.append(("every staged record has its digest", str(right), "True"))
    big.votes.close()
    return rows


def leased(big: BigRank, address: SlabAddress, records: list[Record]) -> SlabReader:
    """The host's slab with ``records`` in it; their digests are what the bank goes by."""
    num_experts, size = big.shapes.model.num_experts, big.bank.schema.record_bytes
    reader = SlabReader(
        address, num_experts, size, deadline_s=DEADLINE_S, for_gpu=big.device.type == "cuda"
    )
    found, _ = reader.load(records, deadline_s=DEADLINE_S)
    for (layer, expert), known in zip(records, found, strict=True):
        big.digests[layer, expert] = torch.tensor(known)
    if big.device.type == "cuda":
        reader.prepare_for_gpu(records)
    return reader


def stage_from_slab(ranks: int, shapes: Shapes, folder: Path) -> list[Row]:
    """The same from a slab that is filled from a checkpoint, as a server's is."""
    weights = folder / "weights"
    write_experts(weights, shapes.model.num_experts, shapes.schema)
    address = SlabAddress(f"bench-{os.getpid()}", os.urandom(16))
    settings = SlabSettings("full")
    with closing(HostSlab(address, Checkpoint(weights), shapes.model, shapes.schema, settings)):
        rows: list[Row] = launch(
            measure_stage, ranks, shapes, Source.HOST, address, deadline_s=150
        )[0]
    shutil.rmtree(weights)
    return rows


# -- flip


def measure_flip(rank: int, num_ranks: int, device: str) -> list[Row]:
    """A table of 58 layers x 256 experts x 32 replicas, all layers prepared."""
    held = np.concatenate([np.arange(256), np.arange(32)])[None].repeat(58, 0)
    placement = Placement(held, 256)
    table = RoutingTable(placement, max_replicas=32, device=device)
    prepared = table.prepare(placement, range(58))
    times = []
    for _ in range(220):
        if device == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(200_000)  # the host enqueues meanwhile: only the device is timed
            begin.record()
            table.swap(prepared)
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) * 1e3)
        else:
            times.append(seconds(lambda: table.swap(prepared), torch.device("cpu")) * 1e6)
    times = sorted(times[20:])
    found = f"{median(times):.1f} / {times[197]:.1f} us"
    return [("flip of 58 prepared layers, p50 / p99", found, "<= 20 us")]


# -- decode steps under migrations


def rotated(placement: Placement, topology: Topology, num_moves: int) -> Placement:
    """Each rank hands ``num_moves`` experts of each layer to the next, which lacks them."""
    held = placement.slot_to_expert.copy()
    for layer in range(len(held)):
        parts = [held[layer, topology.slots_on(r)].copy() for r in range(topology.num_ranks)]
        given = []
        for rank, part in enumerate(parts):
            after = parts[(rank + 1) % len(parts)]
            sole = [s for s, e in enumerate(part) if e != EMPTY and e not in after]
            given.append(sole[:num_moves])
        for rank, slots in enumerate(given):
            target = (rank + 1) % len(parts)
            into = given[target]
            span = topology.slots_on(target)
            for source, slot in zip(slots, into, strict=True):
                held[layer, span.start + slot] = parts[rank][source]
    return Placement(held, placement.num_experts, placement.generation)


def from_host(migration: Migration) -> Migration:
    """The same, every byte from the host."""
    transactions = tuple(
        replace(
            txn,
            rounds=tuple(
                tuple(replace(m, source=Source.HOST, src_slot=EMPTY) for m in one_round)
                for one_round in txn.rounds
            ),
        )
        for txn in migration.transactions
    )
    return replace(migration, transactions=transactions)


class Clockwork:
    """Counts steps of many graph replays each: the agent's clock here."""

    def __init__(self) -> None:
        self.steps = 0


class Publisher:
    """Publishes the way to the other of two placements as soon as one is committed."""

    def __init__(self, path: Path, big: BigRank, mode: str, num_moves: int) -> None:
        self._store = open_store(path, DEPLOYMENT)
        self._big, self._mode = big, mode
        topology = big.topology
        self._ends = (big.placement, rotated(big.placement, topology, num_moves))
        self._is_wanted = threading.Event()
        self.num_published = 0
        self.published_at: list[float] = []
        threading.Thread(target=self._run, daemon=True).start()

    def want(self, is_wanted: bool) -> None:
        """Publish from now on, or no more."""
        self._is_wanted.set() if is_wanted else self._is_wanted.clear()

    def _run(self) -> None:
        version = -1
        while self._is_wanted.wait():
            version = self._store.wait(version, 0.005)
            is_open = (
                self._store.published() is not None
            )  # first: what is committed then is the base
            committed = self._store.committed()
            if is_open or committed is None:
                continue
            self._store.publish(self._next(committed.placement))
            self.published_at.append(time.monotonic())
            self.num_published += 1

    def _next(self, base: Placement) -> Migration:
        spares = self._big.shapes.spare_slots
        other = self._ends[(self.num_published + 1) % 2]
        pace = Pace(
            self._big.shapes.staging_experts,
            mode="flip" if spares else "copy",
            spare_slots=spares,
        )
        plan_id = self._store.next_plan_id()
        made = build_migration(base, other, self._big.topology, plan_id=plan_id, pace=pace)
        return from_host(made) if self._mode == "host" else made


def agent_of(
    big: BigRank, path: Path, table: RoutingTable, counter: SlotCounter, transport: Any
) -> tuple[RankAgent, Clockwork]:
    """The real agent, over a clock that counts whole steps."""
    store, clock = open_store(path, DEPLOYMENT), Clockwork()
    stage = (
        StageSettings.while_serving(big.shapes.bytes_per_second) if is_cuda() else StageSettings()
    )
    settings = AgentSettings(DEPLOYMENT, "bench", big.topology, sample_steps=16, stage=stage)
    parts: Any = RankParts(big.rank, big.bank, table, counter, clock, big.digests)  # type: ignore[arg-type]
    links = Links(big.votes, transport, store, Reporter(store))
    return RankAgent(settings, parts, links, big.placement), clock


def begin_store(path: Path, shapes: Shapes, num_ranks: int) -> None:
    """A store with the first placement and a run."""
    slots = shapes.slots_per_rank + shapes.spare_slots
    topology = Topology.uniform(1, num_ranks, slots)
    store = open_store(path, DEPLOYMENT)
    first = Placement(first_slots(shapes, num_ranks), shapes.model.num_experts)
    store.commit(first, expected=None, reason="start")
    model = replace(shapes.model, expert_bytes=shapes.schema.record_bytes)
    info = (model_to_dict(model), topology_to_dict(topology), 64)
    store.begin_run(RunInfo("bench", time.time(), *info))
    store.close()


def measure_decode(rank: int, num_ranks: int, shapes: Shapes, mode: str, path: Path) -> list[Row]:
    """Steps without, with and again without migrations, in one run."""
    big = build(rank, num_ranks, shapes)
    forward, table, counter = decode_step(big)
    slab: Any = None
    if mode == "host":
        back_and_forth = rotated(big.placement, big.topology, 4)
        held = (big.placement, back_and_forth)
        span = big.topology.slots_on(rank)
        new = held[0].slot_to_expert[:, span] != held[1].slot_to_expert[:, span]
        records = {
            (layer, int(p.slot_to_expert[layer, span.start + slot]))
            for layer, slot in np.argwhere(new).tolist()
            for p in held
        }
        slab = PinnedSlab(big, sorted(records))
    agent, clock = agent_of(big, path, table, counter, big.transport(slab))
    publisher = Publisher(path, big, mode, 4) if rank == 0 else None
    agent.start()
    marks: list[Any] = []
    in_flight = Completion(is_cuda=True)
    for step in range(5 * PHASE_STEPS):
        if publisher is not None and step % PHASE_STEPS == 0:
            publisher.want(step // PHASE_STEPS % 2 == 1)
        marks.append(torch.cuda.Event(enable_timing=True))
        marks[-1].record()
        assert agent.step(), "nobody asked for an end"
        forward(step)
        agent.wait(in_flight)
        in_flight = Completion(is_cuda=True)
        clock.steps += 1
    torch.cuda.synchronize()
    step_us = np.array([a.elapsed_time(b) * 1e3 for a, b in itertools.pairwise(marks)])
    figures = agent.figures
    agent.close()
    phases = [step_us[n * PHASE_STEPS + SETTLE_STEPS : (n + 1) * PHASE_STEPS] for n in range(5)]
    quiet, busy = np.concatenate(phases[0::2]), np.concatenate(phases[1::2])
    return decode_rows(mode, shapes, quiet, busy, figures)


def decode_rows(
    mode: str, shapes: Shapes, quiet: NDArray[Any], busy: NDArray[Any], figures: Any
) -> list[Row]:
    """p50 and p99 without and with."""
    name = {"copy": "copy mode, from peers", "flip": "flip mode, from peers"}.get(
        mode, "copy mode, from the host"
    )
    target = {"copy": "<= +2 % / +0.5 %", "flip": "<= +0.7 % / +0.3 %", "host": "<= +3 %"}[mode]
    (q50, q99), (b50, b99) = (np.percentile(part, (50, 99)) for part in (quiet, busy))
    found = (
        f"p99 {q99:.0f} -> {b99:.0f} us ({b99 / q99 - 1:+.2%}), "
        f"p50 {q50:.0f} -> {b50:.0f} us ({b50 / q50 - 1:+.2%})"
    )
    amount = f"{figures.rebalances} migrations, {figures.experts_moved} experts into rank 0"
    return [
        (f"decode step while rebalancing, {name}", found, target),
        (f"  in that run, {len(quiet)} + {len(busy)} steps", amount, "-"),
    ]


def decode_step(
    big: BigRank,
) -> tuple[Callable[[int], None], RoutingTable, SlotCounter]:
    """A captured graph of all resident layers, and its parts."""
    from runtime.compute import GroupedExperts
    from runtime.deepep import DeepEPLowLatency, DeepEPShape
    from runtime.graphs import CapturedStack
    from runtime.moe import MoELayer, MoEStack

    model, device = big.shapes.model, big.device
    group = dist.group.WORLD
    assert group is not None
    counter = SlotCounter(model.num_layers, big.bank.num_slots, device)
    dispatcher = DeepEPLowLatency(
        DeepEPShape(big.topology, model.hidden, model.top_k, TOKENS), group, counter
    )
    table = RoutingTable(big.placement, max_replicas=big.topology.num_ranks, device=device)
    usual = 2 * TOKENS * big.topology.num_ranks * model.top_k // big.topology.num_slots
    experts = GroupedExperts(big.bank, usual_rows=usual)
    layers = [
        MoELayer(layer, model.top_k, experts, table, dispatcher)
        for layer in range(model.num_layers)
    ]
    stack = MoEStack(model, dense_weights(model, device), layers)
    captured = CapturedStack(
        stack, dispatcher, shape=(2, TOKENS // 2), num_layers=model.num_layers, device=device
    )
    random = torch.Generator().manual_seed(big.rank)
    ids = torch.randint(VOCABULARY, (16, 2, TOKENS // 2), generator=random).to(device)

    def forward(step: int) -> None:
        for number in range(LAYER_RUNS):
            captured.forward(ids[(step + number) % 16], salt=LAYER_RUNS * step + number)

    return forward, table, counter


def dense_weights(model: ModelShape, device: torch.device) -> dict[str, torch.Tensor]:
    """Seeded weights of everything but the experts."""
    random = torch.Generator(device).manual_seed(1)
    shapes = {"model.embed_tokens.weight": (VOCABULARY, model.hidden)}
    for layer in range(model.num_layers):
        name = f"model.layers.{layer}"
        shapes[f"{name}.self_attn.qkv_proj.weight"] = (3 * model.hidden, model.hidden)
        shapes[f"{name}.self_attn.o_proj.weight"] = (model.hidden, model.hidden)
        shapes[f"{name}.mlp.gate.weight"] = (model.num_experts, model.hidden)
    return {
        name: (torch.randn(shape, generator=random, device=device) * shape[-1] ** -0.5).bfloat16()
        for name, shape in shapes.items()
    }


# -- a whole rebalance


def measure_whole(
    rank: int, num_ranks: int, shapes: Shapes, path: Path, step_s: float
) -> list[Row]:
    """From published to committed, four experts a rank in every layer, steps of 30 ms."""
    big = build(rank, num_ranks, shapes)
    device = big.device
    counter = SlotCounter(shapes.model.num_layers, big.bank.num_slots, device)
    table = RoutingTable(big.placement, max_replicas=num_ranks, device=device)
    agent, clock = agent_of(big, path, table, counter, big.transport())
    publisher = Publisher(path, big, "copy", 4) if rank == 0 else None
    agent.start()
    for _ in range(4):
        agent.step()
        clock.steps += 1
    dist.barrier()
    started, begun_at = time.monotonic(), clock.steps
    if publisher is not None:
        publisher.want(True)
    while agent.figures.rebalances == 0:
        assert agent.step(), "nobody asked for an end"
        if publisher is not None and publisher.num_published:
            publisher.want(False)
        next_at = started + (clock.steps - begun_at + 1) * step_s
        # In place of a forward pass, which this measurement does not need.
        time.sleep(max(0.0, next_at - time.monotonic()))
        clock.steps += 1
    took, steps = time.monotonic() - started, clock.steps - begun_at
    wait_for(big.bank.mark())
    wrong = sum(
        big.bank.digest(layer, slot) != tuple(big.digests[layer, expert].tolist())
        for layer, slot, expert in agent.held()
    )
    moved = agent.figures.experts_moved
    agent.close()
    size = shapes.schema.record_bytes
    what = f"whole rebalance, {shapes.model.num_layers} layers x 4 experts a rank of "
    return [
        (
            f"{what}{size / 1e6:.2g} MB, steps of {step_s * 1e3:.0f} ms",
            f"{took:.2f} s, {steps} steps, {moved * size / 1e9:.1f} GB into rank 0",
            "<= 3 s",
        ),
        ("  slots with wrong bytes afterwards", str(wrong), "0"),
        (
            "  staging memory of a rank",
            f"{shapes.staging_experts} experts, {shapes.staging_experts * size / 1e6:.0f} MB",
            "16 experts",
        ),
    ]


def runs(
    device: str, ranks: int, folder: Path, budget: float
) -> dict[str, Callable[[], Iterator[Row]]]:
    """Every measurement by name."""
    on_gpu = device == "cuda"
    small = ModelShape(tuple(range(4)), 64, 8, hidden=512, intermediate=256)
    tiny = Shapes(small, 20, precision="float32")

    def stage() -> Iterator[Row]:
        for precision in ("fp8", "bfloat16") if on_gpu else ("float32",):
            made = (
                v3(1, 16 * ranks, slots_per_rank=16, precision=precision)
                if on_gpu
                else replace(tiny, slots_per_rank=16, model=replace(small, layer_ids=(0,)))
            )
            for source in (Source.PEER, Source.HOST):
                yield from launch(measure_stage, ranks, made, source, deadline_s=150)[0]

    def slab() -> Iterator[Row]:
        one_layer = replace(tiny, slots_per_rank=16, model=replace(small, layer_ids=(0,)))
        made = v3(1, 16 * ranks, slots_per_rank=16) if on_gpu else one_layer
        yield from stage_from_slab(ranks, made, folder)

    def flip() -> Iterator[Row]:
        yield from launch(measure_flip, 1, device, deadline_s=60)[0]

    def decode(mode: str) -> Iterator[Row]:
        spares = 4 if mode == "flip" else 0
        made = v3(4, 64 * ranks, slots_per_rank=72, spare_slots=spares, bytes_per_second=budget)
        path = folder / f"{mode}.sqlite"
        begin_store(path, made, ranks)
        yield from launch(measure_decode, ranks, made, mode, path, deadline_s=200)[0]

    def whole() -> Iterator[Row]:
        made = v3(58, 16 * ranks, slots_per_rank=20) if on_gpu else tiny
        path = folder / "whole.sqlite"
        begin_store(path, made, ranks)
        yield from launch(measure_whole, ranks, made, path, 0.03, deadline_s=150)[0]

    def disk() -> Iterator[Row]:
        from preload import measure

        yield from measure(folder)

    every = {"stage": stage, "slab": slab, "flip": flip, "whole": whole, "disk": disk}
    decodes = {f"decode-{m}": partial(decode, m) for m in ("copy", "flip", "host")}
    return every | decodes if on_gpu else every


def main() -> None:
    """Measure, and print one table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--only", default="", help="names, with commas between")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--budget", type=float, default=SERVING_BYTES_PER_SECOND)
    given = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        every = runs(given.device, given.ranks, Path(folder), given.budget)
        for name in given.only.split(",") if given.only else every:
            for what, found, target in every[name]():
                rows.append((what, found, target))
                print(f"{what:<72}  {found}   (target {target})", flush=True)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
