"""The parts of a rank that act on each batch, made as the deployment's switches say.

    parts = make_batch_parts(switches, rank, model, max_tokens=...)
    dispatcher over parts.topology, with parts.top_k columns
    MoELayer(..., experts, split=parts.split, spread=parts.spread)

With all switches off the same code gives a layer without them.

Shapes:  L MoE layers, E experts, R ranks, K top-k.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from eplb.core.model import ModelShape
from eplb.core.topology import Topology
from eplb.errors import ConfigError, RankError
from eplb.shares.switches import LATE_COUNTS, BatchSwitches
from runtime.batch.counts import Exchange, PeerCounts, all_gather_counts
from runtime.batch.shared_expert import SharedSpread
from runtime.batch.shared_rule import LEAST
from runtime.batch.split import BatchSplit
from runtime.batch.split_rule import SplitRule
from runtime.group import first_refusal, gathered
from runtime.routing import RoutingTable


@dataclass(frozen=True)
class BatchRules:
    """Figures by which the parts decide; alike on all ranks."""

    split: SplitRule = field(default_factory=SplitRule)
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
    table: RoutingTable  # with the switches' extra slots


@dataclass(frozen=True)
class BatchParts:
    """What a rank's layers, dispatcher and experts need of the switches."""

    topology: Topology  # for the dispatcher: extra slots included
    top_k: int  # columns of the dispatch: K, or one more for the shared expert
    # Faults that the device counts without stopping, each [1] int32: LATE_COUNTS, exchanges that
    # missed their deadline.
    faults: Mapping[str, torch.Tensor]
    split: BatchSplit | None = None
    spread: SharedSpread | None = None


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
        ConfigError: a switch does not fit the model or the device; on every rank if on one.
        RankError: ranks have different switches or rules.
    """
    rules = rules or BatchRules()
    _agree(switches, rules, rank.control)
    if wrong := first_refusal(_misfit(switches, rank, model), rank.control):
        raise ConfigError(wrong)
    top_k, faults = model.top_k + switches.spreads, dict[str, torch.Tensor]()
    parts = BatchParts(rank.topology.widened(switches.extra_slots), top_k, faults)
    if not switches.split:
        return parts
    exchange: Exchange | PeerCounts = all_gather_counts(rank.tokens)
    if switches.exchange == "peer_memory":
        exchange = PeerCounts.join(model.num_experts, rank.tokens, rank.table.device)
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
    if not switches.spreads:
        return parts
    weight = rules.shared_weight or float(model.num_shared_experts)
    least = rules.least_shared
    spread = SharedSpread(rank.table, split, top_k=model.top_k, weight=weight, least=least)
    return replace(parts, spread=spread)


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
    is_cuda = rank.table.device.type == "cuda"
    if switches.exchange == "peer_memory" and not is_cuda:
        return 'batch.exchange is "peer_memory" on a CPU, expected "group"'
    return ""
