"""A record: the tensors of one expert as vLLM's kernels read them, one after the other.

They are what vLLM's processing after the load has left (fused, requantised, swizzled), and never
the bytes of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rebalance.types import Digest
from runtime.memory.shared import digest

WORD_BYTES = 8  # a record is a whole number of them for its digest

Tensors = Sequence[torch.Tensor]  # of one expert, one from each of the layer's weights


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
