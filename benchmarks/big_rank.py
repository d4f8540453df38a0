"""A rank of DeepSeek-V3's shapes without a checkpoint: made-up weights, real moves.

Records hold seeded bytes that stand for small numbers, so kernels run at full speed and nothing
overflows; what they compute means nothing. Everything that moves them is the real thing.

Shapes:  L MoE layers, E experts, S slots, C slots of a rank, H hidden.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from eplb.errors import MigrationError
from eplb.model import ModelShape
from eplb.placement import EMPTY, Placement
from eplb.topology import Topology
from rebalance.digests import agree_on_digests
from rebalance.links import Peers, PullTransport, RankMemory, SharedPeers
from rebalance.stage_settings import SERVING_BYTES_PER_SECOND
from rebalance.transport import GlooVotes, Record
from runtime.experts import ExpertBank, ExpertSchema, bank_bytes
from runtime.streams import Completion

DEADLINE_S = 120.0


@dataclass(frozen=True)
class Shapes:
    """What a rank is made of; alike on every rank."""

    model: ModelShape
    slots_per_rank: int
    spare_slots: int = 0
    staging_experts: int = 16
    precision: str = "fp8"  # or bfloat16, or float32 on a CPU
    bytes_per_second: float = SERVING_BYTES_PER_SECOND  # of a rank's link while serving

    @property
    def schema(self) -> ExpertSchema:
        """What belongs to an expert."""
        hidden, intermediate = self.model.hidden, self.model.intermediate
        if self.precision == "fp8":
            return ExpertSchema.swiglu_fp8(hidden, intermediate)
        dtype = torch.bfloat16 if self.precision == "bfloat16" else torch.float32
        return ExpertSchema.swiglu(hidden, intermediate, dtype)


def v3(layers: int, experts: int, **others: Any) -> Shapes:
    """DeepSeek-V3's experts, as many layers and experts as fit."""
    model = ModelShape(tuple(range(layers)), experts, 8, hidden=7168, intermediate=2048)
    return Shapes(model, **others)


class NoSlab:
    """In place of a host's slab where every byte comes from peers."""

    num_entries = 4
    bytes_from_other_hosts = 0

    def load(
        self, records: Sequence[Record], *, deadline_s: float, weights_version: int = 0
    ) -> tuple[list[Any], int]:
        """Refuse."""
        raise MigrationError(f"{len(records)} records: this benchmark has no slab")


@dataclass
class BigRank:
    """One rank's memory, filled."""

    rank: int
    shapes: Shapes
    topology: Topology
    placement: Placement
    bank: ExpertBank
    peers: Peers
    votes: GlooVotes
    digests: torch.Tensor
    device: torch.device
    extra: dict[str, Any] = field(default_factory=dict)

    def transport(self, slab: Any = None) -> PullTransport:
        """A transport of its own, with streams of its own."""
        return PullTransport(RankMemory(self.rank, self.bank, slab or NoSlab()), self.peers)


def build(rank: int, num_ranks: int, shapes: Shapes, held: np.ndarray | None = None) -> BigRank:
    """Reserve, fill, map, and agree on digests."""
    from_cuda = torch.cuda.device_count() >= num_ranks
    device = torch.device("cuda", rank) if from_cuda else torch.device("cpu")
    slots = shapes.slots_per_rank + shapes.spare_slots
    topology = Topology.uniform(1, num_ranks, slots)
    placement = Placement(
        first_slots(shapes, num_ranks) if held is None else held, shapes.model.num_experts
    )
    group = dist.group.WORLD
    assert group is not None
    shape = (shapes.schema, shapes.model.num_layers, slots)
    arena: Any = None
    if from_cuda:
        from runtime.symmetric import SymmetricArena

        num_bytes = bank_bytes(*shape, shapes.staging_experts)
        arena = SymmetricArena(num_bytes, group, device)
    bank = ExpertBank(*shape, num_staging=shapes.staging_experts, arena=arena)
    mine = placement.slot_to_expert[:, topology.slots_on(rank)]
    for layer, slot in np.argwhere(mine != EMPTY).tolist():
        fill(bank.live(layer, slot), layer, int(mine[layer, slot]), shapes.schema)
    control = dist.new_group(backend="gloo")
    assert isinstance(control, dist.ProcessGroup)
    votes = GlooVotes(control)
    known = {
        (layer, int(mine[layer, slot])): bank.digest(layer, slot)
        for layer, slot in np.argwhere(mine != EMPTY).tolist()
    }
    sizes = (shapes.model.num_layers, shapes.model.num_experts)
    digests = agree_on_digests(known, *sizes, votes, deadline_s=DEADLINE_S)
    handles: list[str] = [""] * num_ranks
    dist.all_gather_object(handles, bank.handle, group=control)
    peers: Peers
    if from_cuda:
        from rebalance.gpu_links import SymmetricPeers

        peers = SymmetricPeers(rank, topology, bank, arena)
    else:
        peers = SharedPeers(rank, topology, bank, dict(enumerate(handles)))
    return BigRank(rank, shapes, topology, placement, bank, peers, votes, digests, device)


def first_slots(shapes: Shapes, num_ranks: int) -> np.ndarray:
    """Experts in order over the ranks, each rank's other slots with its neighbour's experts."""
    num_experts = shapes.model.num_experts
    own = num_experts // num_ranks
    held = np.full((num_ranks, shapes.slots_per_rank + shapes.spare_slots), EMPTY)
    for rank in range(num_ranks):
        wanted = (rank * own + np.arange(shapes.slots_per_rank)) % num_experts
        held[rank, : shapes.slots_per_rank] = wanted
    return np.tile(held.reshape(-1), (shapes.model.num_layers, 1))


def fill(record: torch.Tensor, layer: int, expert: int, schema: ExpertSchema) -> None:
    """Seeded bytes; every tensor's numbers are small, none is a NaN."""
    random = torch.Generator(record.device).manual_seed(100_003 * layer + expert)
    for name, tensor in schema.views(record).items():
        if tensor.dtype == torch.float8_e4m3fn:
            # Exponents up to 8 of 15: below 4, and 0x7f, the NaN, cannot come.
            raw = torch.randint(
                0, 0x48, tensor.shape, generator=random, device=record.device, dtype=torch.uint8
            )
            tensor.view(torch.uint8).copy_(raw)
        elif name.endswith("_scale"):
            tensor.fill_(1e-3 + 1e-6 * expert)
        else:
            noise = torch.randn(
                tensor.shape, generator=random, device=record.device, dtype=torch.float32
            )
            tensor.copy_(noise.mul_(0.01))


def wait_for(completion: Completion) -> None:
    """Wait for the device, with a deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while not completion.is_complete():
        if time.monotonic() > deadline:
            raise MigrationError(f"the device is not done in {DEADLINE_S:.0f} s")


def seconds(run: Callable[[], None], device: torch.device) -> float:
    """How long ``run`` and everything it orders takes."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started
