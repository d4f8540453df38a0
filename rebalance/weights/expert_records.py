"""Experts as records of their tensors, offered to the host cache by the ranks that hold them.

A record is the tensors of one expert as kernels read them, one after the other: what an engine's
processing after the load has left (fused, requantised, swizzled), and never the bytes of a
checkpoint. Who has offered them gets them back from ``cache/engine_records.py``.

Shapes:  L MoE layers, E experts, C slots of this rank.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import TypeVar

import torch
import torch.distributed as dist

from eplb.errors import MigrationError, reason_of
from rebalance.types import Digest, Record
from rebalance.weights.cache.client import HostCacheClient
from rebalance.weights.disk.record_file import RecordOrigin
from runtime.group import first_refusal
from runtime.memory import SharedArena, digest, whole_pages

OFFER_S = 120.0  # for one batch, a slow disk included
BATCH_BYTES = 2**26
WORD_BYTES = 8  # a record is a whole number of them for its digest

T = TypeVar("T")
Tensors = Sequence[torch.Tensor]  # the tensors of one expert, one from each of the layer's weights

log = logging.getLogger(__name__)


def rows_of(weights: Tensors, row: int) -> Tensors:
    """The tensors of one slot of a layer."""
    return [weight[row] for weight in weights]


def num_bytes_of(tensors: Tensors) -> int:
    """Bytes of the record of these tensors."""
    return sum(tensor.nbytes for tensor in tensors)


def bytes_of(tensors: Tensors) -> torch.Tensor:
    """[n] the record, on the device of its tensors."""
    return torch.cat([t.detach().contiguous().view(-1).view(torch.uint8) for t in tensors])


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
    plain, weighted = digest(_padded(record))
    return plain, weighted


def digests_of(records: Sequence[Tensors]) -> list[Digest]:
    """The digests of several records; on a GPU the host waits once, for all of them."""
    if not records or not records[0][0].is_cuda:
        return [digest_of(bytes_of(tensors)) for tensors in records]
    from runtime.kernels.digest import digest_records

    sums = torch.empty((len(records), 2), dtype=torch.int64, device=records[0][0].device)
    for row, tensors in zip(sums, records, strict=True):
        digest_records(_padded(bytes_of(tensors)).view(1, -1), row.view(1, 2))
    return [(plain, weighted) for plain, weighted in sums.tolist()]


def _padded(record: torch.Tensor) -> torch.Tensor:
    padding = -len(record) % WORD_BYTES
    return torch.cat([record, record.new_zeros(padding)]) if padding else record


def together(act: Callable[[], T], group: dist.ProcessGroup) -> T:
    """Act on every rank, and go on where all have succeeded.

    Raises:
        MigrationError: on all ranks alike, with the reason of the first that failed.
    """
    refusal = ""
    try:
        done = act()
    except Exception as exc:  # reported to the other ranks, which wait in the next collective
        log.debug("records", exc_info=True)
        refusal = reason_of(exc)
    if why_not := first_refusal(refusal, group):
        raise MigrationError(why_not)
    return done


def origin_of(weights: list[Tensors], digests: torch.Tensor, model: str) -> RecordOrigin:
    """Name the records by their bytes: what is kept of other weights is never taken for these."""
    sizes = {num_bytes_of(rows_of(layer, 0)) for layer in weights}
    if len(sizes) != 1:
        raise MigrationError(f"layers have records of {sorted(sizes)} bytes, expected one size")
    kinds = repr([(tuple(one.shape[1:]), str(one.dtype)) for one in weights[0]])
    contents = hashlib.blake2b(model.encode(), digest_size=16)
    contents.update(digests.numpy().tobytes())
    return RecordOrigin(
        hashlib.blake2b(kinds.encode(), digest_size=16).hexdigest(),
        contents.hexdigest(),
        num_layers=digests.shape[0],
        num_experts=digests.shape[1],
        record_bytes=whole_pages(sizes.pop()),
    )


def offer(
    client: HostCacheClient,
    weights: list[Tensors],
    digests: torch.Tensor,
    own: dict[Record, int],
    record_bytes: int,
) -> None:
    """Offer records as far as the host cache lacks them.

    Args:
        client: of the host cache.
        weights: [L] of the tensors [C, ...] of each layer.
        digests: [L, C, 2] of the slots.
        own: the records, and the slot of each.
        record_bytes: in whole pages.
    """
    lacking = client.lacks(list(own), deadline_s=OFFER_S)
    at_once = max(1, min(len(lacking), BATCH_BYTES // record_bytes))
    num_kept: dict[str, int] = {"memory": 0, "disk": 0, "": 0}
    with closing(SharedArena("eplb-offer", at_once * record_bytes)) as arena:
        entries = arena.bytes.view(-1, record_bytes)
        for start in range(0, len(lacking), len(entries)):
            offered: list[tuple[Record, Digest]] = []
            for entry, (layer, expert) in zip(entries, lacking[start:], strict=False):
                row = own[layer, expert]
                record = bytes_of(rows_of(weights[layer], row))
                entry[: len(record)] = record
                plain, weighted = digests[layer, row].tolist()
                offered.append(((layer, expert), (plain, weighted)))
            for place in client.offer(offered, arena, deadline_s=OFFER_S):
                num_kept[place] += 1
    client.hint([record for record in own if record not in set(lacking)])
    log.info(
        "records of %d experts: %d were kept already, %d are in memory now, %d on disk alone, "
        "%d nowhere",
        len(own),
        len(own) - len(lacking),
        num_kept["memory"],
        num_kept["disk"],
        num_kept[""],
    )
