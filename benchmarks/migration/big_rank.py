"""A rank of DeepSeek-V3's shapes without a checkpoint: made-up weights, real moves.

Records hold seeded bytes that stand for small numbers, so kernels run at full speed and nothing
overflows; what they compute means nothing. Everything that moves them is the real thing: bank,
peers, votes, digests that all ranks agree on. Without GPUs it is the same on CPU ranks.

Shapes:  L MoE layers, E experts, S slots, C slots of a rank, H hidden.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from benchmarks.publishing import Publisher
from eplb.core.model import ModelShape
from eplb.core.placement import EMPTY, Placement
from eplb.core.topology import Topology
from eplb.errors import MigrationError
from eplb.migration.build import Migration, Pace, Source, build_migration, copy_transactions
from eplb.migration.serialisation import model_to_dict, topology_to_dict
from rebalance.assembly.config import RankConfig
from rebalance.assembly.rank import make_slots, most_replicas
from rebalance.protocol.gloo_votes import GlooVotes
from rebalance.rank.group import Group
from rebalance.rank.rank import Rank
from rebalance.stage.digest_table import agree_on_digests, table_of
from rebalance.stage.share import RankSlots
from rebalance.stage.stage_settings import StageSettings
from rebalance.types import Record
from rebalance.weights.cache.client import HostCacheClient
from rebalance.weights.sources import MappedSlots, WeightSources, map_peers
from runtime.counters import SlotCounter
from runtime.experts import ExpertBank, ExpertSchema, PeerBank, PlainArena, bank_bytes
from runtime.group import gathered
from runtime.routing import RoutingTable
from runtime.streams import Completion
from telemetry import open_store
from telemetry.load.reporter import Reporter
from telemetry.state.runs import RunInfo
from telemetry.state.store import StateStore
from tests.support.local_group import LocalHost

DEADLINE_S = 120.0
MOVES = 4  # experts of each layer that a migration brings to each GPU


@dataclass(frozen=True)
class Shapes:
    """What a rank is made of; alike on every rank."""

    model: ModelShape
    slots_per_rank: int  # that hold an expert, in each layer
    ranks_per_gpu: int = 1  # more: the one process emulates a group, whose slots lie side by side
    spare_slots: int = 0  # EMPTY ones beside them, for flip mode
    staging_experts: int = 16  # of the ring
    precision: str = "fp8"  # or bfloat16, or float32 on a CPU
    bytes_per_second: float = math.inf  # of a rank's link while serving; inf: as fast as it goes

    @property
    def slots_on_gpu(self) -> int:
        """Slots of a process in each layer."""
        return self.ranks_per_gpu * (self.slots_per_rank + self.spare_slots)

    @property
    def schema(self) -> ExpertSchema:
        """The tensors of one expert, which its record holds one after the other."""
        hidden, intermediate = self.model.hidden, self.model.intermediate
        if self.precision == "fp8":
            return ExpertSchema.swiglu_fp8(hidden, intermediate)
        dtype = torch.bfloat16 if self.precision == "bfloat16" else torch.float32
        return ExpertSchema.swiglu(hidden, intermediate, dtype)


def v3(layers: int, experts: int, **others: Any) -> Shapes:
    """Shapes with DeepSeek-V3's experts (7168 x 2048), in as many layers and experts as fit.

    Args:
        others: fields of ``Shapes``; ``slots_per_rank`` has no default.
    """
    model = ModelShape(tuple(range(layers)), experts, 8, hidden=7168, intermediate=2048)
    return Shapes(model, **others)


@dataclass
class BigRank:
    """One rank with its memory filled, its peers' memory mapped, and a group to vote in."""

    rank: int
    shapes: Shapes
    topology: Topology
    placement: Placement  # what the bank holds at the start
    bank: ExpertBank
    peers: dict[int, PeerBank]  # slots of the other ranks of its host
    votes: GlooVotes
    digests: torch.Tensor  # [L, E, 2] of every expert, agreed by all ranks
    device: torch.device

    @property
    def group(self) -> Topology:
        """All ranks, emulated ones too."""
        shapes = self.shapes
        num_ranks = self.topology.num_ranks * shapes.ranks_per_gpu
        return Topology.uniform(1, num_ranks, shapes.slots_on_gpu // shapes.ranks_per_gpu)

    @property
    def moves(self) -> int:
        """Experts into each rank of the group, in each layer of a migration."""
        return MOVES // self.shapes.ranks_per_gpu

    def sources(self, host: HostCacheClient | None = None) -> WeightSources:
        """Make sources that read peers and ``host``, with streams of their own.

        Args:
            host: what the host holds; None: no byte may come from the host.
        """
        return WeightSources(MappedSlots(self.rank, self.bank, self.peers), host or LocalHost({}))


def build(
    rank: int, num_ranks: int, shapes: Shapes, held: NDArray[np.int32] | None = None
) -> BigRank:
    """Reserve a rank's memory, fill it, agree on digests, and map the peers' memory.

    Called by every rank of a group that ``tests.support.launch`` has joined; each waits for all
    others.

    Args:
        held: [L, S] experts of all slots at the start; None: those of ``first_slots``.

    Raises:
        MigrationError: no such memory, or ranks hold different bytes of one expert.
        RankError: a rank is late.
    """
    from_cuda = torch.cuda.device_count() >= num_ranks
    device = torch.device("cuda", rank) if from_cuda else torch.device("cpu")
    slots = shapes.slots_on_gpu
    topology = Topology.uniform(1, num_ranks, slots)
    placement = Placement(
        first_slots(shapes, num_ranks) if held is None else held, shapes.model.num_experts
    )
    group = dist.group.WORLD
    assert group is not None, "launch joins one"
    shape = (shapes.schema, shapes.model.num_layers, slots)
    arena: Any = None
    num_bytes = bank_bytes(*shape, shapes.staging_experts)
    if from_cuda and num_ranks > 1:
        from runtime.memory import SymmetricArena

        arena = SymmetricArena(num_bytes, group, device)
    elif from_cuda:
        arena = PlainArena(num_bytes, device)
    bank = ExpertBank(*shape, num_staging=shapes.staging_experts, arena=arena)
    known = fill_slots(bank, placement.slot_to_expert[:, topology.slots_on(rank)])
    control = dist.new_group(backend="gloo")
    assert isinstance(control, dist.ProcessGroup), "every rank is a member"
    votes = GlooVotes(control)
    sizes = (shapes.model.num_layers, shapes.model.num_experts)
    digests = agree_on_digests(table_of(known, *sizes), votes, deadline_s=DEADLINE_S)
    handles = gathered(bank.handle, control)
    is_mapped = from_cuda and num_ranks > 1
    arena_of = arena.peer if is_mapped else handles.__getitem__
    peers = map_peers(rank, topology, bank, arena_of)
    return BigRank(rank, shapes, topology, placement, bank, peers, votes, digests, device)


def fill_slots(bank: ExpertBank, mine: NDArray[np.int32]) -> dict[Record, tuple[int, int]]:
    """Write this rank's experts, [L, C], into their slots; return the digest of each."""
    known = {}
    for layer, slot in np.argwhere(mine != EMPTY).tolist():
        expert = int(mine[layer, slot])
        fill(bank.live(layer, slot), layer, expert, bank.schema)
        known[(layer, expert)] = bank.digest(layer, slot)
    return known


def first_slots(shapes: Shapes, num_ranks: int) -> NDArray[np.int32]:
    """Give the experts of all slots at the start, [L, S], alike in every layer.

    Experts go over the ranks in order, E / R to each; a rank's other slots hold the first ones of
    the next rank, so that those have a replica; spare slots are EMPTY.
    """
    num_experts, num_ranks = shapes.model.num_experts, num_ranks * shapes.ranks_per_gpu
    own = num_experts // num_ranks
    held = np.full((num_ranks, shapes.slots_per_rank + shapes.spare_slots), EMPTY, dtype=np.int32)
    for rank in range(num_ranks):
        wanted = (rank * own + np.arange(shapes.slots_per_rank)) % num_experts
        held[rank, : shapes.slots_per_rank] = wanted
    return np.tile(held.reshape(-1), (shapes.model.num_layers, 1))


def fill(record: torch.Tensor, layer: int, expert: int, schema: ExpertSchema) -> None:
    """Write an expert's record: seeded by layer and expert, numbers small, none a NaN."""
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
    """Wait until the device has come so far.

    Raises:
        MigrationError: it has not within DEADLINE_S.
    """
    deadline = time.monotonic() + DEADLINE_S
    while not completion.is_complete():
        if time.monotonic() > deadline:
            raise MigrationError(f"the device has not done what was ordered in {DEADLINE_S:.0f} s")


def seconds(run: Callable[[], None], device: torch.device) -> float:
    """Seconds that ``run`` takes with everything that it orders on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


DEPLOYMENT = "bench"
POLL_S = 0.005


@dataclass
class Clockwork:
    """Counts steps of many graph replays each: the agent's clock here."""

    steps: int = 0


def begin_store(path: Path, shapes: Shapes, num_ranks: int) -> None:
    """A store with the first placement and a run."""
    topology = Topology.uniform(1, num_ranks, shapes.slots_on_gpu)
    store = open_store(path, DEPLOYMENT)
    first = Placement(first_slots(shapes, num_ranks), shapes.model.num_experts)
    store.commit(first, expected=None, reason="start")
    model = replace(shapes.model, expert_bytes=shapes.schema.record_bytes)
    info = (model_to_dict(model), topology_to_dict(topology), 64)
    store.begin_run(RunInfo("bench", time.time(), *info))
    store.close()


def agent_of(big: BigRank, path: Path, transport: Any) -> tuple[Rank, Clockwork]:
    """The real rank, over a clock that counts whole steps."""
    store, clock = open_store(path, DEPLOYMENT), Clockwork()
    budget = big.shapes.bytes_per_second
    stage = StageSettings() if budget == math.inf else StageSettings.while_serving(budget)
    of = (big.rank, big.topology, big.bank, big.digests, big.placement)
    is_emulated = big.shapes.ranks_per_gpu > 1
    slots = emulated_slots(*of, emulated=big.group) if is_emulated else make_slots(*of)
    rank = Rank(
        RankConfig(DEPLOYMENT, 16, 1, stage=stage),
        slots,
        SlotCounter(big.placement.num_layers, big.bank.num_slots, big.bank.device),
        store,
        Reporter(store),
        passes=clock,
    )
    rank.enter(Group(big.rank, "bench", big.topology, big.votes), big.placement, transport)
    return rank, clock


def emulated_slots(
    rank: int,
    topology: Topology,
    bank: ExpertBank,
    digests: torch.Tensor,
    placement: Placement,
    *,
    emulated: Topology,
) -> RankSlots:
    """The slots of one rank that stand for those of all ranks of ``emulated``.

    As ``make_slots``, but the routing table has room for the replicas of that whole group.
    """
    table = RoutingTable(
        placement,
        max_replicas=most_replicas(placement, emulated),
        device=bank.device,
    )
    return RankSlots(rank, topology, bank, table, digests)


def emulated_migration(
    base: Placement, target: Placement, topology: Topology, plan_id: int, pace: Pace
) -> Migration:
    """``build_migration`` in copy mode, for one rank that holds an expert in several slots.

    A planned placement never does that; the slots of an emulated group's ranks do.
    """
    transactions = copy_transactions(base, target, topology, pace)
    return Migration(plan_id, base, target.with_generation(base.generation + 1), transactions, pace)


@dataclass
class BackAndForth:
    """The way to the other of two placements, in turns.

    Args:
        store: numbers the plans.
        mode: copy, flip, or host: copy mode with every byte from the host.
    """

    store: StateStore
    big: BigRank
    mode: str
    _ends: tuple[Placement, Placement] = field(init=False)
    _num_made: int = 0

    def __post_init__(self) -> None:
        there = rotated(self.big.placement, self.big.group, self.big.moves)
        self._ends = (self.big.placement, there)

    def next(self, base: Placement) -> Migration:
        """Lead from ``base``, which is committed, to the end where it does not stand."""
        self._num_made += 1
        other, shapes = self._ends[self._num_made % 2], self.big.shapes
        pace = Pace(
            shapes.staging_experts,
            mode="flip" if shapes.spare_slots else "copy",
            spare_slots=shapes.spare_slots,
        )
        plan_id, topology = self.store.next_plan_id(), self.big.topology
        if shapes.ranks_per_gpu > 1:
            made = emulated_migration(base, other, topology, plan_id, pace)
        else:
            made = build_migration(base, other, topology, plan_id=plan_id, pace=pace)
        return from_host(made) if self.mode == "host" else made


def publisher_of(big: BigRank, path: Path, mode: str) -> Publisher:
    """Publish back and forth once it is wanted."""
    store = open_store(path, DEPLOYMENT)
    return Publisher(store, BackAndForth(store, big, mode).next, poll_s=POLL_S)


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
