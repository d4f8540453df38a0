"""A rank that serves with the parts that its configuration switches on, spawned by ``launch``."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from eplb.core.model import ModelShape
from eplb.core.topology import Topology
from eplb.errors import EplbError
from rebalance.assembly.config import RankConfig
from rebalance.assembly.experts import RankPlace
from rebalance.assembly.group import RankGroups, join_votes
from rebalance.assembly.rank import BuiltRank, build_rank
from rebalance.weights.cache.address import HostCacheAddress
from runtime.batch.split import BatchSplit
from runtime.batch.split_rule import EVERY_BATCH, SplitRule
from runtime.checkpoints.checkpoint import Checkpoint
from runtime.checkpoints.own_model import layer_name
from runtime.dispatch.all_to_all import AllToAllDispatcher
from runtime.experts import ExpertSchema
from runtime.model.compute import LoopExperts
from runtime.model.moe import MoELayer, MoEStack
from runtime.model.reference import ReferenceModel
from telemetry import open_store
from tests.support.two_ranks import begin_run

NUM_SEQUENCES, LENGTH = 3, 8  # of a rank's batch
CPU = torch.device("cpu")


@dataclass(frozen=True)
class BatchingSetup:
    configs: tuple[RankConfig, ...]  # one start after the other
    topology: Topology
    host_cache: HostCacheAddress
    model: ModelShape
    schema: ExpertSchema
    weights: Path
    store: str
    batches: tuple[tuple[int, ...], ...]  # the experts that every token of a batch is routed to
    rules: tuple[SplitRule, ...] = (EVERY_BATCH, EVERY_BATCH)  # by rank


@dataclass(frozen=True)
class Served:
    refusal: str = ""
    max_error: float = 0.0
    routed: int = 0  # rows in the first layer
    reported: str = ""  # what the rank says is on
    before: str = ""  # the same, before the split was made


def serve_switches(rank: int, num_ranks: int, setup: BatchingSetup) -> list[list[Served]]:
    """Of every configuration and batch, what this rank found."""
    groups = join_votes(setup.configs[0].network)
    return [_serve(rank, setup, config, groups) for config in setup.configs]


def _serve(rank: int, setup: BatchingSetup, config: RankConfig, groups: RankGroups) -> list[Served]:
    run = f"run-{os.getppid()}-{config.batch}"
    place = RankPlace(rank, run, setup.topology, groups, CPU, setup.host_cache)
    with closing(open_store(setup.store, config.deployment)) as store:
        begin_run(store, run, model=setup.model, topology=setup.topology)
    built = build_rank(config, place, setup.model, setup.schema, setup.store)
    before = str(built.agent.describe().detail.get("batch", "off"))
    try:
        split = built.batch_split(NUM_SEQUENCES * LENGTH, setup.rules[rank])
    except EplbError as exc:
        built.close()
        return [Served(f"{type(exc).__name__}: {exc}")]
    stack = _stack(rank, setup, built, split)
    found = [_batch(rank, setup, built, stack, chosen, before) for chosen in setup.batches]
    built.close()
    return found


def _stack(rank: int, setup: BatchingSetup, built: BuiltRank, split: BatchSplit | None) -> MoEStack:
    dispatcher = AllToAllDispatcher(setup.topology, built.place.groups.tokens, rank, built.counter)
    checkpoint, layers = Checkpoint(setup.weights), range(setup.model.num_layers)
    experts = LoopExperts(built.bank)
    made = [
        MoELayer(
            layer,
            setup.model.top_k,
            experts,
            built.table,
            dispatcher,
            shared=_shared(checkpoint, layer),
            split=split,
        )
        for layer in layers
    ]
    return MoEStack(setup.model, checkpoint.dense_weights(), made)


def _shared(checkpoint: Checkpoint, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    weights, name = checkpoint.reference_weights(), f"{layer_name(layer)}.mlp.shared_experts"
    gate_up = torch.cat([weights[f"{name}.{part}_proj.weight"] for part in ("gate", "up")])
    return gate_up, weights[f"{name}.down_proj.weight"]


def _batch(
    rank: int,
    setup: BatchingSetup,
    built: BuiltRank,
    stack: MoEStack,
    chosen: tuple[int, ...],
    before: str,
) -> Served:
    """Serve one batch, and compare it with the model in one process."""
    random = torch.Generator().manual_seed(rank)
    ids = torch.randint(64, (NUM_SEQUENCES, LENGTH), generator=random)
    forced = torch.tensor(chosen).expand(setup.model.num_layers, ids.numel(), len(chosen))
    received = built.counter.received[0].clone()
    answer = stack.forward(ids, salt=rank, forced=forced)
    received = built.counter.received[0] - received
    weights = Checkpoint(setup.weights).reference_weights()
    check = ReferenceModel(setup.model, weights).check(ids, answer, forced=True)
    dist.barrier()
    return Served(
        max_error=check.max_error,
        routed=int(received.sum()),
        reported=str(built.agent.describe().detail.get("batch", "off")),
        before=before,
    )
