"""A record: the tensors of one expert as vLLM's kernels read them, one after the other.

They are what vLLM's processing after the load has left (fused, requantised, swizzled), and never
the bytes of a checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from rebalance.types import Digest
from runtime.memory.shared import digest

NOBODY = -1  # in place of an expert, or of a rank
WORD_BYTES = 8  # a record is a whole number of them for its digest

Tensors = Sequence[torch.Tensor]  # of one expert, one from each of the layer's weights

log = logging.getLogger(__name__)


def rows_of(weights: Tensors, row: int) -> Tensors:
    """The tensors of one slot of a layer."""
    return [weight[row] for weight in weights]


def num_bytes_of(tensors: Tensors) -> int:
    """Bytes of the record of these tensors."""
    return sum(tensor.nbytes for tensor in tensors)


def bytes_of(tensors: Tensors) -> torch.Tensor:
    """[n] the record, on the host."""
    return torch.cat([t.detach().contiguous().view(-1).view(torch.uint8).cpu() for t in tensors])


def write(record: torch.Tensor, tensors: Tensors) -> None:
    """Copy a record, or one with padding behind it, into the tensors of a slot."""
    at = 0
    for tensor in tensors:
        # A copy is aligned to any type; a part of a record is not.
        part = record[at : at + tensor.nbytes].clone()
        tensor.copy_(part.view(tensor.dtype).view(tensor.shape))
        at += tensor.nbytes


def digest_of(record: torch.Tensor) -> Digest:
    """The digest of a record of any length; zeros behind it do not change it."""
    padding = -len(record) % WORD_BYTES
    if padding:
        record = torch.cat([record, record.new_zeros(padding)])
    plain, weighted = digest(record)
    return plain, weighted


def agreed(held: NDArray[np.int64], table: NDArray[np.int64], layer: int) -> dict[int, Digest]:
    """The digest of each expert: that of its first slot.

    Args:
        held: [P] experts by slot.
        table: [P, 2] digests by slot.
        layer: for the log.
    """
    found: dict[int, Digest] = {}
    for slot, expert in enumerate(held.tolist()):
        given = (int(table[slot, 0]), int(table[slot, 1]))
        if expert != NOBODY and found.setdefault(expert, given) != given:
            log.error(
                "layer %d expert %d: the replica in slot %d differs from another",
                layer,
                expert,
                slot,
            )
    return found
