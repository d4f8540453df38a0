"""The parts of a rank that act on each batch, made as the deployment's switches say.

    parts = make_batch_parts(switches, rank, model, max_tokens=...)
    dispatcher over parts.topology, with parts.top_k columns
    experts = parts.experts(LoopExperts)
    MoELayer(..., experts, split=parts.split, spread=parts.spread, pulls=parts.pulls)

With all switches off the same code gives a layer without them.

Shapes:  L MoE layers, E experts, R ranks, K top-k.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.distributed as dist

from eplb.core.model import ModelShape
from eplb.core.topology import Topology
from eplb.errors import ConfigError, EplbError, RankError
from eplb.shares.switches import DIFFERENT_PULLS, LATE_COUNTS, BatchSwitches
from runtime.batch.counts import Exchange, PeerCounts, all_gather_counts
from runtime.batch.pull_rule import PullRule
from runtime.batch.pulls import DevicePulls, HostPulls, PulledExperts
from runtime.batch.shared_expert import SharedSpread
from runtime.batch.shared_rule import LEAST
from runtime.batch.split import BatchSplit
from runtime.batch.split_rule import SplitRule
from runtime.counters import SlotCounter
from runtime.experts import ExpertBank, PeerBank, PlainArena, bank_bytes
from runtime.group import first_refusal, gathered
from runtime.memory.symmetric import SymmetricArena
from runtime.model.compute import BankExperts, Experts
from runtime.routing import RoutingTable


@dataclass(frozen=True)
class BatchRules:
    """Figures by which the parts decide; alike on all ranks."""

    split: SplitRule = field(default_factory=SplitRule)
    # ``spare_slots`` and ``pull_rows`` are those of the switches.
    pull: PullRule = field(default_factory=PullRule)
    least_shared: int = LEAST  # tokens of the shared expert that a rank gives away, or none
    # Width of the shared experts together, over that of a routed one; 0: their number.
    shared_weight: float = 0.0


@dataclass(frozen=True)
class BatchRank:
    """The rank that the parts are made for."""

    rank: int  # a source of tokens and a rank of the topology
    topology: Topology  # the placement's
    tokens: dist.ProcessGroup  # all ranks; gathers the counts
    control: dist.ProcessGroup  # all ranks; what they agree on before they serve
    bank: ExpertBank
    table: RoutingTable  # with the switches' extra slots
    counter: SlotCounter  # with the switches' extra slots
    deadline_s: float  # for a pull between processes of a host


@dataclass(frozen=True)
class BatchParts:
    """What a rank's layers, dispatcher and experts need of the switches."""

    topology: Topology  # for the dispatcher: extra slots included
    top_k: int  # columns of the dispatch: K, or one more for the shared expert
    bank: ExpertBank
    # Faults that the device counts without stopping, each [1] int32, by LATE_COUNTS (exchanges that
    # missed their deadline) and DIFFERENT_PULLS (ranks decided differently: outputs are wrong).
    faults: Mapping[str, torch.Tensor]
    split: BatchSplit | None = None
    spread: SharedSpread | None = None
    pulls: HostPulls | DevicePulls | None = None
    spare: ExpertBank | None = None  # one layer: records of the spare slots

    def experts(self, make: Callable[[ExpertBank], BankExperts]) -> Experts:
        """Experts of the rank's slots, spare ones included.

        Args:
            make: gives the experts of a bank, such as the class ``LoopExperts``. Where the shared
                expert is on light ranks they have its weights (``shared``).
        """
        resident = make(self.bank)
        if self.pulls is None or self.spare is None:
            return resident
        return PulledExperts(resident, make(self.spare), self.bank.num_slots, self.pulls)


def make_batch_parts(
    switches: BatchSwitches,
    rank: BatchRank,
    model: ModelShape,
    *,
    max_tokens: int,
    rules: BatchRules | None = None,
) -> BatchParts:
    """Make the parts that are on; collective, before the rank serves.

    Args:
        switches: alike on all ranks.
        rank: the one that the parts are made for.
        model: the MoE layers and their experts.
        max_tokens: most tokens of a batch of this rank, in one layer.
        rules: alike on all ranks; None: the default ones.

    Raises:
        ConfigError: a switch does not fit the model, the device or the ranks' memory; on every rank
            if on one.
        RankError: ranks have different switches or rules.
    """
    rules = rules or BatchRules()
    _agree(switches, rules, rank.control)
    if wrong := first_refusal(_misfit(switches, rank, model), rank.control):
        raise ConfigError(wrong)
    top_k, faults = model.top_k + switches.spreads, dict[str, torch.Tensor]()
    parts = BatchParts(rank.topology.widened(switches.extra_slots), top_k, rank.bank, faults)
    if not switches.split:
        return parts
    exchange: Exchange | PeerCounts = all_gather_counts(rank.tokens)
    if switches.exchange == "peer_memory":
        exchange = PeerCounts.join(model.num_experts, rank.tokens, rank.bank.device)
        faults[LATE_COUNTS] = exchange.late
    split = BatchSplit(
        rank.table,
        exchange,
        source=rank.rank,
        num_sources=rank.topology.num_ranks,
        max_pairs=max_tokens * model.top_k,
        rule=rules.split,
    )
    parts = replace(parts, split=split)
    if switches.spreads:
        weight = rules.shared_weight or float(model.num_shared_experts)
        least = rules.least_shared
        spread = SharedSpread(rank.table, split, top_k=model.top_k, weight=weight, least=least)
        return replace(parts, spread=spread)
    if not switches.pulls:
        return parts
    rule = replace(rules.pull, spare_slots=switches.pulls, pull_rows=switches.pull_rows)
    arena = PlainArena(bank_bytes(rank.bank.schema, 1, switches.pulls, 0), rank.bank.device)
    spare = ExpertBank(rank.bank.schema, 1, switches.pulls, num_staging=0, arena=arena)
    pulls: HostPulls | DevicePulls
    if rank.bank.device.type == "cuda":
        pulls = _device_pulls(split, rank, rule, spare)
        faults[DIFFERENT_PULLS] = pulls.differences
    else:
        pulls = _host_pulls(split, rank, rule, spare)
    return replace(parts, pulls=pulls, spare=spare)


def _agree(switches: BatchSwitches, rules: BatchRules, control: dist.ProcessGroup) -> None:
    """Refuse ranks with other switches or rules: each would send tokens by decisions of its own."""
    texts = gathered([repr(switches), repr(rules)], control)
    for other, found in enumerate(texts):
        for name, one, first in zip(("switches", "rules"), found, texts[0], strict=True):
            if one != first:
                raise RankError(
                    f"the batch {name} of the ranks differ: found {one} on rank {other}, "
                    f"expected {first} as on rank 0"
                )


def _misfit(switches: BatchSwitches, rank: BatchRank, model: ModelShape) -> str:
    """Refusal of switches that do not fit this rank; "" if they fit."""
    if rank.table.extra_slots != switches.extra_slots:
        return (
            f"the routing table has {rank.table.extra_slots} extra slots, expected "
            f"{switches.extra_slots}, those of the batch switches ({switches})"
        )
    if switches.spreads and not model.num_shared_experts:
        return (
            'batch.shared_expert is "light_ranks" and the model has no shared expert, '
            'expected "home"'
        )
    is_cuda = rank.bank.device.type == "cuda"
    if switches.exchange == "peer_memory" and not is_cuda:
        return 'batch.exchange is "peer_memory" on a CPU, expected "group"'
    arena = rank.bank.arena
    if switches.pulls and not (isinstance(arena, SymmetricArena) if is_cuda else arena.handle):
        return (
            f"batch.pulls is {switches.pulls}, and other ranks cannot map the memory of this "
            f"rank's experts, which is a {type(arena).__name__}, expected "
            f"{'a SymmetricArena' if is_cuda else 'shared memory'}, or pulls = 0"
        )
    return ""


def _device_pulls(
    split: BatchSplit, rank: BatchRank, rule: PullRule, spare: ExpertBank
) -> DevicePulls:
    """Pulls over the ranks of one symmetric allocation, each of which has mapped all others."""
    arena, num_ranks = rank.bank.arena, rank.topology.num_ranks
    assert isinstance(arena, SymmetricArena), "refused before"
    # Closing exchanges run on a side stream: over a group of the tokens they would wait for it.
    members = dist.get_process_group_ranks(rank.tokens)
    closing = dist.new_group(members, backend="nccl", use_local_synchronization=True)
    assert isinstance(closing, dist.ProcessGroup), "this rank is a member"
    return DevicePulls(
        split,
        rank.topology,
        rank.rank,
        np.zeros(num_ranks, dtype=np.int64),
        rule,
        [arena.peer(other).data_ptr() for other in range(num_ranks)],
        spare,
        all_gather_counts(closing),
        rank.counter,
    )


def _host_pulls(split: BatchSplit, rank: BatchRank, rule: PullRule, spare: ExpertBank) -> HostPulls:
    """Pulls from the live slots of the other ranks of this host; collective.

    Raises:
        ConfigError: a rank cannot attach those of another one.
    """
    hosts, slots = rank.topology.host_of_rank, rank.topology.slots_of_rank
    peers: dict[int, PeerBank] = {}
    wrong = ""
    for other, handle in enumerate(gathered(rank.bank.handle, rank.control)):
        if other == rank.rank or hosts[other] != hosts[rank.rank]:
            continue
        try:
            peers[other] = PeerBank(str(handle), rank.bank, int(slots[other]))
        except EplbError as exc:
            wrong = f"batch.pulls: the slots of rank {other} cannot be attached: {exc}"
    if refusal := first_refusal(wrong, rank.control):
        raise ConfigError(refusal)
    return HostPulls(
        split,
        rank.topology,
        rank.rank,
        hosts.astype(np.int64),
        rule,
        peers,
        spare,
        all_gather_counts(rank.tokens),
        rank.counter,
        deadline_s=rank.deadline_s,
    )
