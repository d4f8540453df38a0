"""A small MoE on GPU ranks, for the tests beside this file."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from eplb.core.model import ModelShape
from eplb.core.placement import EMPTY, Placement
from eplb.core.topology import Topology
from runtime.checkpoints.checkpoint import Checkpoint
from runtime.checkpoints.own_model import write_random_checkpoint
from runtime.counters import SlotCounter
from runtime.dispatch.deepep import DeepEPByPhase, DeepEPLowLatency, DeepEPShape
from runtime.experts import ExpertBank, ExpertSchema, bank_bytes
from runtime.memory import SymmetricArena
from runtime.model.compute import GroupedExperts
from runtime.model.moe import MoELayer, MoEStack
from runtime.routing import RoutingTable

MODEL = ModelShape((0, 1), 32, 6, hidden=2048, intermediate=512)
NUM_STAGING, NUM_TOKENS = 2, 64
SPARE_SLOTS = 2  # slots of a rank for replicas
LIMIT = {"bfloat16": 3e-2, "fp8": 4e-2}  # BF16 and FP8 activations against float32 ones
TIE = {"bfloat16": 0.1, "fp8": 0.5}

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


def weights_of(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints by precision, for a fixture of a module."""
    folder = tmp_path_factory.mktemp("weights")
    for precision in LIMIT:
        schema = schema_of(precision)
        write_random_checkpoint(folder / precision, MODEL, schema, vocabulary=256, seed=5)
    return {precision: folder / precision for precision in LIMIT}


def tokens_of(rank: int, step: int = 0) -> torch.Tensor:
    random = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(256, (2, NUM_TOKENS // 2), generator=random)


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


def fill(bank: ExpertBank, held: NDArray[np.int32], checkpoint: Checkpoint) -> None:
    """Write the experts [L, C] into a bank's slots."""
    record = torch.empty(bank.schema.record_bytes, dtype=torch.uint8)
    for layer, slots in enumerate(held.tolist()):
        for slot, expert in enumerate(slots):
            checkpoint.repack(layer, expert, bank.schema, record)
            bank.live(layer, slot).copy_(record)


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
        held = placement.slot_to_expert[:, self.topology.slots_on(self.rank)]
        fill(self.bank, held, self.checkpoint)
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
