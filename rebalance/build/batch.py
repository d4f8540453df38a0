"""Parts of a rank's model that follow the counts of each batch, as its configuration has them."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from eplb.core.model import ModelShape
from eplb.core.topology import Topology
from eplb.errors import ConfigError
from rebalance.build.config import BatchConfig
from runtime.batch_split import BatchSplit, Exchange, all_gather_counts
from runtime.peer_counts import PeerCounts
from runtime.routing import RoutingTable
from runtime.shared_spread import SharedSpread


@dataclass(frozen=True)
class BatchParts:
    """What the layers of a rank and its dispatcher take; nothing is switched on by default."""

    topology: Topology  # of the dispatcher: the placement's, with the extra slots
    top_k: int  # columns of the dispatcher
    split: BatchSplit | None  # of each ``MoELayer``
    spread: SharedSpread | None  # of each ``MoELayer``, in place of ``shared``
    peers: PeerCounts | None

    def fault(self) -> str:
        """What went wrong in exchanges of counts, in words; "" if nothing. Waits for the device."""
        return "" if self.peers is None else self.peers.late()


def make_batch_parts(
    config: BatchConfig,
    rank: int,
    topology: Topology,
    model: ModelShape,
    table: RoutingTable,
    group: dist.ProcessGroup,
    *,
    max_tokens: int,
    exchange: Exchange | None = None,
) -> BatchParts:
    """Make the parts that a configuration switches on; collective.

    Args:
        config: alike on every rank.
        rank: this one.
        topology: of the placement.
        model: the MoE layers and their experts.
        table: of this rank, made for this configuration.
        group: of all ranks, which exchanges counts on the device of the table.
        max_tokens: of a batch of this rank.
        exchange: gathers the counts in place of what ``config.exchange`` names.

    Raises:
        ConfigError: the model has no shared expert to spread, or the GPUs of the group cannot map
            each other's memory.
    """
    wide, top_k = topology.widened(config.extra_slots), model.top_k
    if not config.split:
        return BatchParts(wide, top_k, None, None, None)
    peers = None
    if exchange is None and config.exchange == "peers":
        peers = PeerCounts.join(model.num_experts, group, table.slots.device)
    split = BatchSplit(
        table,
        exchange or peers or all_gather_counts(group),
        source=rank,
        num_sources=topology.num_ranks,
        max_pairs=max_tokens * top_k,
        rule=config.rule,
    )
    if config.shared_expert == "home":
        return BatchParts(wide, top_k, split, None, peers)
    if not model.num_shared_experts:
        raise ConfigError(
            'batch.shared_expert is "light_ranks", expected "home": the model has no shared expert'
        )
    spread = SharedSpread(
        table,
        split,
        top_k=top_k,
        weight=float(model.num_shared_experts),
        least=config.shared_least,
    )
    return BatchParts(wide, top_k + 1, split, spread, peers)
