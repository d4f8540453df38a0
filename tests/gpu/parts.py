"""A small MoE on GPU ranks, for the tests beside this file."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from eplb.core.model import ModelShape
from eplb.core.placement import EMPTY, Placement
from eplb.core.topology import Topology
from runtime.checkpoints.checkpoint import Checkpoint
from runtime.counters import SlotCounter
from runtime.dispatch.deepep import DeepEPByPhase, DeepEPLowLatency, DeepEPShape
from runtime.experts import ExpertBank, ExpertSchema, bank_bytes
from runtime.memory.symmetric import SymmetricArena
from runtime.model.compute import GroupedExperts
from runtime.model.moe import MoELayer, MoEStack
from runtime.routing import RoutingTable

MODEL = ModelShape((0, 1), 32, 6, hidden=2048, intermediate=512)
NUM_STAGING, NUM_TOKENS = 2, 64
SPARE_SLOTS = 2  # of a rank, for replicas

needs_two_gpus = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="needs two GPUs of one host"
)
needs_deep_ep = pytest.mark.skipif(find_spec("deep_ep") is None, reason="deep_ep is not installed")


def slots_per_rank(num_ranks: int) -> int:
    """Slots for every expert, however few ranks there are, and for some replicas."""
    return -(-MODEL.num_experts // num_ranks) + SPARE_SLOTS


def schema_of(precision: str) -> ExpertSchema:
    if precision == "fp8":
        return ExpertSchema.swiglu_fp8(MODEL.hidden, MODEL.intermediate)
    return ExpertSchema.swiglu(MODEL.hidden, MODEL.intermediate, torch.bfloat16)


def random_placement(num_ranks: int, seed: int) -> Placement:
    """Every expert somewhere, the other slots filled at random, never twice on a rank."""
    rng = np.random.default_rng(seed)
    held = np.full((MODEL.num_layers, num_ranks, slots_per_rank(num_ranks)), EMPTY)
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
    dispatcher: DeepEPByPhase | DeepEPLowLatency
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


def build(
    rank: int, num_ranks: int, path: Path, precision: str, *, by_phase: bool = False
) -> GpuRank:
    group = dist.group.WORLD
    assert group is not None
    device = torch.device("cuda", rank)
    num_slots = slots_per_rank(num_ranks)
    topology = Topology.uniform(1, num_ranks, num_slots)
    schema, checkpoint = schema_of(precision), Checkpoint(path)
    num_bytes = bank_bytes(schema, MODEL.num_layers, num_slots, NUM_STAGING)
    arena = SymmetricArena(num_bytes, group, device)
    bank = ExpertBank(schema, MODEL.num_layers, num_slots, num_staging=NUM_STAGING, arena=arena)
    start = random_placement(num_ranks, 0)
    table = RoutingTable(start, max_replicas=num_ranks, device=device)
    counter = SlotCounter(MODEL.num_layers, num_slots, device)
    shape = DeepEPShape(topology, MODEL.hidden, MODEL.top_k, NUM_TOKENS)
    kind = DeepEPByPhase if by_phase else DeepEPLowLatency
    dispatcher = kind(shape, group, counter)
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
