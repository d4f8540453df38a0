"""A serving engine's process, as small as it can be, with one rank embedded in it.

Spawned by ``tests.support.launch``, which forms the default group as an engine would.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from eplb.core.model import ModelShape
from eplb.core.placement import Placement
from eplb.core.topology import Topology
from eplb.migration.build import Pace, build_migration
from rebalance.assembly.change import committed_placement
from rebalance.assembly.config import RankConfig
from rebalance.assembly.group import join_votes
from rebalance.assembly.rank import build_rank
from rebalance.rank.rank import Rank
from rebalance.weights.cache.address import HostCacheAddress
from runtime.checkpoints.checkpoint import Checkpoint
from runtime.experts import ExpertBank, ExpertSchema
from runtime.memory import digest
from runtime.model.compute import GroupedExperts, LoopExperts
from telemetry import open_store

PUBLISH_AT = 8  # the step before which the first rank publishes a migration
NUM_TOKENS = 64  # of a rank, in every layer and step


@dataclass(frozen=True)
class EngineSetup:
    """What the engine's launcher gives to every process alike."""

    config: RankConfig
    run: str
    topology: Topology
    host_caches: tuple[HostCacheAddress, ...]
    model: ModelShape
    schema: ExpertSchema
    weights: Path
    store: str  # its URL
    target: Placement  # of the migration
    has_own_weights: bool  # the engine fills the slots itself
    on_gpus: bool = False  # a GPU for each rank


@dataclass(frozen=True)
class Embedded:
    """What a process found at its end."""

    foreign: list[str]  # packages that a serving process must not load
    generation: int
    num_wrong: int  # live slots whose bytes are not those of their expert
    num_moved: int
    num_steps: int
    bytes_by_source: dict[str, int]


def serve(rank: int, num_ranks: int, setup: EngineSetup) -> Embedded:
    """Serve until the migration is committed on every rank."""
    host = int(setup.topology.host_of_rank[rank])
    device = torch.device("cuda", rank) if setup.on_gpus else torch.device("cpu")
    group = join_votes(setup.config, setup.topology, run=setup.run, device=device)
    experts = own_weights(rank, setup) if setup.has_own_weights else setup.schema
    cache = setup.host_caches[host]
    built = build_rank(setup.config, group, cache, setup.model, experts, setup.store)
    # On GPUs the measurement is a CUDA graph, which a loop on the host cannot be captured in.
    made = GroupedExperts(built.bank, usual_rows=64) if setup.on_gpus else LoopExperts(built.bank)
    built.measure_experts(made)
    built.start()
    num_steps = run_steps(rank, setup, built)
    found = Embedded(
        sorted({"api", "fastapi", "typer"} & sys.modules.keys()),
        built.placement.generation,
        num_wrong_slots(rank, setup, built.bank, built.placement),
        built.figures.experts_moved,
        num_steps,
        dict(built.describe().detail["bytes_by_source"]),
    )
    built.close()
    return found


def run_steps(rank: int, setup: EngineSetup, built: Rank) -> int:
    """The engine's loop; returns how many forward passes it ran."""
    random = torch.Generator().manual_seed(rank)
    step = 0
    while built.step(step, "decode"):
        forward(rank, setup, built, random, step)
        step += 1
        if rank == 0 and step == PUBLISH_AT:
            publish(setup, built)
        if built.placement.hash == setup.target.hash and built.phase == "idle":
            built.request_halt()
    return step


def forward(rank: int, setup: EngineSetup, built: Rank, random: torch.Generator, step: int) -> None:
    """Route tokens in every layer, and count what each slot receives."""
    own = setup.topology.slots_on(rank)
    for layer in range(setup.model.num_layers):
        shape = (NUM_TOKENS, setup.model.top_k)
        experts = torch.randint(setup.model.num_experts, shape, generator=random)
        slots = built.table.choose(layer, experts.to(built.bank.device), salt=step)
        received = torch.bincount(slots.flatten(), minlength=setup.topology.num_slots)
        dist.all_reduce(received)
        built.counter.add(layer, received[own].to(torch.int32))


def publish(setup: EngineSetup, built: Rank) -> None:
    """Stand in for the controller: one migration, copied through the staging ring."""
    base, plan_id = built.placement, built.store.next_plan_id()
    pace = Pace(staging_experts=setup.config.staging_experts)
    built.store.publish(
        build_migration(base, setup.target, setup.topology, plan_id=plan_id, pace=pace)
    )


def own_weights(rank: int, setup: EngineSetup) -> ExpertBank:
    """The engine's memory, filled by the engine."""
    placement = committed_placement(open_store(setup.store, setup.config.deployment))
    num_slots = int(setup.topology.slots_of_rank[rank])
    num_staging = setup.config.staging_experts
    bank = ExpertBank(setup.schema, setup.model.num_layers, num_slots, num_staging=num_staging)
    for layer, slot, expert in held(rank, setup, placement):
        Checkpoint(setup.weights).repack(layer, expert, setup.schema, bank.live(layer, slot))
    return bank


def num_wrong_slots(rank: int, setup: EngineSetup, bank: ExpertBank, placement: Placement) -> int:
    """Compare every live slot with the checkpoint."""
    record, wrong = torch.empty(setup.schema.record_bytes, dtype=torch.uint8), 0
    for layer, slot, expert in held(rank, setup, placement):
        Checkpoint(setup.weights).repack(layer, expert, setup.schema, record.zero_())
        wrong += bank.digest(layer, slot) != digest(record)
    return wrong


def held(rank: int, setup: EngineSetup, placement: Placement) -> list[tuple[int, int, int]]:
    """(layer, slot of this rank, expert) of every slot."""
    mine = placement.slot_to_expert[:, setup.topology.slots_on(rank)].tolist()
    return [
        (layer, slot, expert)
        for layer, slots in enumerate(mine)
        for slot, expert in enumerate(slots)
    ]
