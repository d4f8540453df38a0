"""The expected digest of every expert, agreed by all ranks before they serve.

Every expert is live somewhere. Each rank digests what its own slots hold; one vote then makes one
table, alike on every rank, and proves on the way that all replicas of an expert hold the same
bytes.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from eplb.errors import BrokenGroup, MigrationError
from rebalance.preload.cache.server import Digest
from rebalance.protocol.ballot import Outcome
from rebalance.transport.interface import PendingVote, Record, VoteGroup

_HIGHEST = torch.iinfo(torch.int64).max


def agree_on_digests(
    mine: Mapping[Record, Digest],
    num_layers: int,
    num_experts: int,
    votes: VoteGroup,
    *,
    deadline_s: float,
) -> torch.Tensor:
    """Return the digests [L, E, 2] of all experts.

    Raises:
        MigrationError: two ranks hold different bytes for one expert.
        BrokenGroup: a rank died or missed the deadline.
    """
    vote = cast_digests(mine, num_layers, num_experts, votes)
    return agreed_digests(vote, num_layers, num_experts, deadline_s=deadline_s)


def cast_digests(
    mine: Mapping[Record, Digest], num_layers: int, num_experts: int, votes: VoteGroup
) -> PendingVote:
    """Send the digests of this rank's slots to the other ranks."""
    smallest = torch.full((num_layers, num_experts, 2), _HIGHEST, dtype=torch.int64)
    # The complement turns the order around without an overflow: its smallest is of the largest.
    complement = torch.full_like(smallest, _HIGHEST)
    for (layer, expert), digest in mine.items():
        smallest[layer, expert] = torch.tensor(digest)
        complement[layer, expert] = ~smallest[layer, expert]
    return votes.cast(torch.stack([smallest, complement]).flatten().tolist())


def agreed_digests(
    vote: PendingVote, num_layers: int, num_experts: int, *, deadline_s: float
) -> torch.Tensor:
    """Read the combined digests of all ranks; see ``agree_on_digests``."""
    outcome, reduced = vote.poll(deadline_s)
    if outcome is not Outcome.VALUE:
        raise BrokenGroup(
            "a rank died or timed out during the agreement on digests, "
            f"expected all within {deadline_s:g} s"
        )
    table = torch.tensor(reduced).view(2, num_layers, num_experts, 2)
    agreed: torch.Tensor = table[0]
    differing = torch.nonzero((agreed != ~table[1]).any(dim=2)).tolist()
    if differing:
        layer, expert = differing[0]
        raise MigrationError(
            f"layer {layer} expert {expert}: ranks hold different bytes for it, "
            "expected the same in all its replicas"
        )
    return agreed
