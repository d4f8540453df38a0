"""What every expert's bytes must digest to, agreed by all ranks before they serve.

Every expert is live somewhere at the start. Each rank digests what its own slots hold; two
collectives then make one table, alike on every rank, and prove on the way that all replicas of an
expert hold the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from eplb.errors import MigrationError, RankError
from rebalance.slab import Digest
from rebalance.transport import Record

_HIGHEST = torch.iinfo(torch.int64).max
_LOWEST = torch.iinfo(torch.int64).min


def agree_on_digests(
    mine: Mapping[Record, Digest], num_layers: int, num_experts: int, group: dist.ProcessGroup
) -> torch.Tensor:
    """Return the digests [L, E, 2] of all experts.

    Raises:
        MigrationError: two ranks hold different bytes for one expert.
        RankError: a rank died or missed the group's deadline.
    """
    smallest = torch.full((num_layers, num_experts, 2), _HIGHEST, dtype=torch.int64)
    largest = torch.full_like(smallest, _LOWEST)
    for (layer, expert), digest in mine.items():
        smallest[layer, expert] = largest[layer, expert] = torch.tensor(digest)
    try:
        dist.all_reduce(smallest, dist.ReduceOp.MIN, group=group)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    except RuntimeError as exc:
        raise RankError(f"a rank died or was late while digests were agreed on: {exc}") from exc
    differing = torch.nonzero((smallest != largest).any(dim=2)).tolist()
    if differing:
        layer, expert = differing[0]
        raise MigrationError(
            f"layer {layer} expert {expert}: ranks start with different bytes for it, "
            "expected the same in all its replicas"
        )
    return smallest
