"""Three gloo ranks that pull experts, for tests of just-in-time replicas."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from eplb.core.model import ModelShape
from eplb.core.placement import EMPTY, Placement
from eplb.core.topology import Topology
from runtime.batch.counts import Exchange, all_gather_counts
from runtime.batch.pull_rule import PullRule
from runtime.batch.pulls import HostPulls, PulledExperts
from runtime.batch.split import BatchSplit
from runtime.batch.split_rule import SplitRule
from runtime.checkpoints.checkpoint import Checkpoint
from runtime.counters import SlotCounter
from runtime.dispatch.all_to_all import AllToAllDispatcher
from runtime.experts import ExpertBank, ExpertSchema, PeerBank, PlainArena, bank_bytes
from runtime.group import gathered
from runtime.model.compute import LoopExperts
from runtime.model.moe import MoELayer, MoEStack
from runtime.model.reference import ReferenceModel
from runtime.routing import RoutingTable
from tests.support.limits import NEVER_S

# Eight experts on ranks of four, three and four slots: 0 has a replica, a slot is empty.
TOPOLOGY = Topology(node_of_rank=np.zeros(3, int), slots_of_rank=np.array([4, 3, 4]))
HELD = np.array([[0, 1, 2, 3, 4, 5, 0, 6, 7, EMPTY, 5], [7, 6, 0, 1, 5, 4, 3, 2, 1, 0, EMPTY]])
SWAPPED = np.array([[7, 6, 0, 1, 5, 4, 3, 2, 1, 0, EMPTY], [0, 1, 2, 3, 4, 5, 0, 6, 7, EMPTY, 5]])
START, OTHER = (Placement(held, num_experts=8, generation=1) for held in (HELD, SWAPPED))
EAGER = PullRule(least_rows=1, least_gain=1, most_readers=3)
ALWAYS = SplitRule(least=1, worth=-math.inf)
ONE_DOMAIN = np.zeros(3, np.int64)


@dataclass(frozen=True)
class Weights:
    model: ModelShape
    schema: ExpertSchema
    checkpoint: Checkpoint


@dataclass(frozen=True)
class PullingRank:
    weights: Weights
    rank: int
    bank: ExpertBank
    table: RoutingTable
    counter: SlotCounter
    stack: MoEStack
    first_layer: MoELayer

    def take_over(self, placement: Placement) -> None:
        """What a swap between two steps does: live slots, then the table."""
        load(self.weights, self.bank, placement, self.rank)
        self.table.load(placement, range(placement.num_layers))

    def error(self, ids: torch.Tensor, forced: torch.Tensor) -> float:
        """Of a forward pass, against the model in one process."""
        answer = self.stack.forward(ids, salt=0, forced=forced)
        reference = ReferenceModel(self.weights.model, self.weights.checkpoint.reference_weights())
        return reference.check(ids, answer, forced=True).max_error if ids.numel() else 0.0

    @property
    def received_by_spares(self) -> int:
        return int(self.counter.received[:, self.bank.num_slots :].sum())


def load(weights: Weights, bank: ExpertBank, placement: Placement, rank: int) -> None:
    for layer, held in enumerate(placement.slot_to_expert[:, TOPOLOGY.slots_on(rank)].tolist()):
        for slot, expert in enumerate(held):
            if expert != EMPTY:
                weights.checkpoint.repack(layer, expert, weights.schema, bank.live(layer, slot))


def spare_bank(schema: ExpertSchema, spare_slots: int) -> ExpertBank:
    arena = PlainArena(bank_bytes(schema, 1, spare_slots, 0), torch.device("cpu"))
    return ExpertBank(schema, 1, spare_slots, num_staging=0, arena=arena)


def build(
    rank: int,
    weights: Weights,
    rule: PullRule = EAGER,
    *,
    exchange: Exchange | None = None,
    peers: Callable[[Mapping[int, PeerBank]], Mapping[int, PeerBank]] = lambda found: found,
    deadline_s: float = NEVER_S,
) -> PullingRank:
    group = dist.group.WORLD
    assert group is not None
    model, schema, spare_slots = weights.model, weights.schema, rule.spare_slots
    bank = ExpertBank(schema, model.num_layers, int(TOPOLOGY.slots_of_rank[rank]), num_staging=1)
    load(weights, bank, START, rank)
    spares = spare_bank(schema, spare_slots)
    found = {
        other: PeerBank(handle, bank, int(TOPOLOGY.slots_of_rank[other]))
        for other, handle in enumerate(gathered(bank.handle, group))
        if other != rank
    }
    table = RoutingTable(START, max_replicas=3, topology=TOPOLOGY, extra_slots=spare_slots)
    counter = SlotCounter(model.num_layers, bank.num_slots, extra_slots=spare_slots)
    split = BatchSplit(
        table,
        exchange or all_gather_counts(group),
        source=rank,
        num_sources=3,
        max_pairs=400,
        rule=ALWAYS,
    )
    pulls = HostPulls(
        split,
        TOPOLOGY,
        rank,
        ONE_DOMAIN,
        rule,
        peers(found),
        spares,
        all_gather_counts(group),
        counter,
        deadline_s=deadline_s,
    )
    dispatcher = AllToAllDispatcher(TOPOLOGY.widened(spare_slots), group, rank, counter)
    experts = PulledExperts(LoopExperts(bank), LoopExperts(spares), bank.num_slots, pulls)
    layers = [
        MoELayer(layer, model.top_k, experts, table, dispatcher, split=split, pulls=pulls)
        for layer in range(model.num_layers)
    ]
    stack = MoEStack(model, weights.checkpoint.dense_weights(), layers)
    return PullingRank(weights, rank, bank, table, counter, stack, layers[0])
