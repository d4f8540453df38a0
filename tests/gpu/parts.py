"""A small MoE on GPU ranks, for the tests beside this file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from eplb.core.model import ModelShape
from eplb.core.placement import EMPTY, Placement
from eplb.core.topology import Topology
from runtime.checkpoint import Checkpoint
from runtime.counters import SlotCounter
from runtime.dispatch.deepep import DeepEPLowLatency, DeepEPShape
from runtime.experts import ExpertBank, ExpertSchema, bank_bytes
from runtime.memory.symmetric import SymmetricArena
from runtime.model.compute import GroupedExperts
from runtime.model.moe import MoELayer, MoEStack
from runtime.routing import RoutingTable

MODEL = ModelShape((0, 1), 32, 6, hidden=2048, intermediate=512)
SLOTS_PER_RANK, NUM_STAGING, NUM_TOKENS = 10, 2, 64


def schema_of(precision: str) -> ExpertSchema:
    if precision == "fp8":
        return ExpertSchema.swiglu_fp8(MODEL.hidden, MODEL.intermediate)
    return ExpertSchema.swiglu(MODEL.hidden, MODEL.intermediate, torch.bfloat16)


def random_placement(num_ranks: int, seed: int) -> Placement:
    """Every expert somewhere, the other slots filled at random, never twice on a rank."""
    rng = np.random.default_rng(seed)
    held = np.full((MODEL.num_layers, num_ranks, SLOTS_PER_RANK), EMPTY)
    for layer in held:
        for number, expert in enumerate(rng.permutation(MODEL.num_experts)):
            layer[number % num_ranks, number // num_ranks] = expert
        for rank in layer:
            spare = np.flatnonzero(rank == EMPTY)
            absent = np.setdiff1d(np.arange(MODEL.num_experts), rank)
            rank[spare] = rng.choice(absent, size=len(spare), replace=False)
    return Placement(held.reshape(MODEL.num_layers, -1), MODEL.num_experts)


@dataclass
class GpuRank:
    rank: int
    topology: Topology
    schema: ExpertSchema
    checkpoint: Checkpoint
    arena: SymmetricArena
    bank: ExpertBank
    table: RoutingTable
    counter: SlotCounter
    dispatcher: DeepEPLowLatency
    stack: MoEStack
    device: torch.device

    def take_over(self, placement: Placement) -> None:
        """Load every slot and the table, as if the rank had started with this placement."""
        record = torch.empty(self.schema.record_bytes, dtype=torch.uint8)
        held = placement.slot_to_expert[:, self.topology.slots_on(self.rank)]
        for layer, slots in enumerate(held.tolist()):
            for slot, expert in enumerate(slots):
                self.checkpoint.repack(layer, expert, self.schema, record)
                self.bank.live(layer, slot).copy_(record)
        self.table.load(placement, range(placement.num_layers))
        torch.cuda.synchronize()
        dist.barrier()


def build(rank: int, num_ranks: int, path: Path, precision: str) -> GpuRank:
    group = dist.group.WORLD
    assert group is not None
    device = torch.device("cuda", rank)
    topology = Topology.uniform(1, num_ranks, SLOTS_PER_RANK)
    schema, checkpoint = schema_of(precision), Checkpoint(path)
    num_bytes = bank_bytes(schema, MODEL.num_layers, SLOTS_PER_RANK, NUM_STAGING)
    arena = SymmetricArena(num_bytes, group, device)
    bank = ExpertBank(
        schema, MODEL.num_layers, SLOTS_PER_RANK, num_staging=NUM_STAGING, arena=arena
    )
    start = random_placement(num_ranks, 0)
    table = RoutingTable(start, max_replicas=num_ranks, device=device)
    counter = SlotCounter(MODEL.num_layers, SLOTS_PER_RANK, device)
    shape = DeepEPShape(topology, MODEL.hidden, MODEL.top_k, NUM_TOKENS)
    dispatcher = DeepEPLowLatency(shape, group, counter)
    dense = {name: t.to(device) for name, t in checkpoint.dense_weights().items()}
    experts = GroupedExperts(bank, usual_rows=64)
    layers = [
        MoELayer(layer, MODEL.top_k, experts, table, dispatcher)
        for layer in range(MODEL.num_layers)
    ]
    stack = MoEStack(MODEL, dense, layers)
    return GpuRank(
        rank,
        topology,
        schema,
        checkpoint,
        arena,
        bank,
        table,
        counter,
        dispatcher,
        stack,
        device,
    )
