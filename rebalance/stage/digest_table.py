"""The expected digest of every expert, agreed by all ranks before they serve.

Every expert is live somewhere. Each rank tells the digests that it knows: of what its own slots
hold at a start, of all experts where it serves already, of none where it joins. One vote then makes
one table, alike on every rank, and proves on the way that no two ranks know different bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from eplb.errors import BrokenGroup, MigrationError
from rebalance.types import Digest, Outcome, PendingVote, Record, VoteGroup

_HIGHEST = torch.iinfo(torch.int64).max  # twice: a digest that is not known
CHECK_S = 0.02  # from one look at whether the agreement is still wanted to the next


def table_of(known: Mapping[Record, Digest], num_layers: int, num_experts: int) -> torch.Tensor:
    """[L, E, 2] the digests that a rank knows, of all experts."""
    table = torch.full((num_layers, num_experts, 2), _HIGHEST, dtype=torch.int64)
    for record, digest in known.items():
        table[record] = torch.tensor(digest)
    return table


def agree_on_digests(
    known: torch.Tensor,
    votes: VoteGroup,
    *,
    deadline_s: float,
    check: Callable[[], object] | None = None,
) -> torch.Tensor:
    """Return the digests [L, E, 2] of all experts; collective, the next vote of the group.

    Args:
        known: [L, E, 2] those that this rank knows; see ``table_of``.
        votes: the group.
        deadline_s: for all ranks to have told theirs.
        check: called while others are waited for; what it raises ends the wait.

    Raises:
        MigrationError: two ranks know different bytes of one expert, or no rank knows one.
        BrokenGroup: a rank died or missed the deadline.
    """
    vote = cast_digests(known, votes)
    left_s = deadline_s
    while check is not None and left_s > CHECK_S and vote.poll(CHECK_S)[0] is Outcome.LATE:
        check()
        left_s -= CHECK_S
    return read_digests(vote, known, deadline_s=left_s)


def cast_digests(known: torch.Tensor, votes: VoteGroup) -> PendingVote:
    """Tell the other ranks the digests that this one knows."""
    is_known = (known != _HIGHEST).any(dim=2, keepdim=True)
    # The complement turns the order around without an overflow: its smallest is of the largest.
    complement = torch.where(is_known, ~known, _HIGHEST)
    return votes.cast(torch.stack([known, complement]).flatten().tolist())


def read_digests(vote: PendingVote, known: torch.Tensor, *, deadline_s: float) -> torch.Tensor:
    """Read the combined digests of all ranks; see ``agree_on_digests``."""
    outcome, reduced = vote.poll(deadline_s)
    if outcome is not Outcome.VALUE:
        raise BrokenGroup(
            "a rank died or timed out during the agreement on digests, "
            f"expected all within {deadline_s:g} s"
        )
    table = torch.tensor(reduced).view(2, *known.shape)
    agreed: torch.Tensor = table[0]
    differing = torch.nonzero((agreed != ~table[1]).any(dim=2)).tolist()
    if differing:
        layer, expert = differing[0]
        raise MigrationError(
            f"layer {layer} expert {expert}: ranks hold different bytes for it, "
            "expected the same in all its replicas"
        )
    return agreed
