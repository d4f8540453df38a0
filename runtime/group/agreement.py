"""Exchange of messages between ranks at the start: JSON in tensors of a fixed size, no pickles.

The object collectives of torch unpickle what a peer sends, so an attacker in the place of a peer
could run code in every rank. Nothing here executes what it reads.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from eplb.core.bounded_json import MAX_JSON_BYTES, decode_json
from eplb.errors import RankError

MAX_MESSAGE_BYTES = 8192
MAX_REFUSAL_CHARACTERS = 600  # each takes 12 bytes of JSON at most


def gathered(mine: Any, group: dist.ProcessGroup) -> list[Any]:
    """Return every rank's message, by rank: a collective of ``group``.

    Args:
        mine: ready for JSON, at most ``MAX_MESSAGE_BYTES`` as such. Tuples arrive as lists.
        group: all of its ranks call this.

    Raises:
        RankError: the message is too large, or a rank sent no JSON.
        RuntimeError: a rank died or was late.
    """
    text = json.dumps(mine).encode()
    if len(text) > MAX_MESSAGE_BYTES:
        raise RankError(
            f"rank {group.rank()}: a message of {len(text)} bytes, "
            f"expected at most {MAX_MESSAGE_BYTES}"
        )
    return _exchanged(text, MAX_MESSAGE_BYTES, group)


def gathered_large(mine: Any, group: dist.ProcessGroup) -> list[Any]:
    """As ``gathered``, for messages of up to ``MAX_JSON_BYTES``: two collectives.

    Raises:
        RankError: some rank's message is too large, on all ranks alike; or a rank sent no JSON.
        RuntimeError: a rank died or was late.
    """
    text = json.dumps(mine).encode()
    longest = torch.tensor([len(text)], dtype=torch.int64, device=_device_of(group))
    dist.all_reduce(longest, dist.ReduceOp.MAX, group=group)
    if (size := int(longest)) > MAX_JSON_BYTES:
        raise RankError(
            f"rank {group.rank()}: the largest message of all ranks has {size} bytes, "
            f"expected at most {MAX_JSON_BYTES}"
        )
    return _exchanged(text, size, group)


def _exchanged(text: bytes, size: int, group: dist.ProcessGroup) -> list[Any]:
    # Padded with blanks, which JSON allows at the end: no length to be believed.
    padded = np.frombuffer(text.ljust(size), dtype=np.uint8).copy()
    sent = torch.from_numpy(padded).to(_device_of(group))
    rows = [torch.empty_like(sent) for _ in range(group.size())]
    dist.all_gather(rows, sent, group=group)
    return [_decoded(rank, row) for rank, row in enumerate(rows)]


def _decoded(rank: int, row: torch.Tensor) -> Any:
    try:
        return decode_json(row.cpu().numpy().tobytes())
    except ValueError as exc:
        raise RankError(f"rank {rank} sent no message: {exc}") from exc


def _device_of(group: dist.ProcessGroup) -> torch.device:
    """Return a device that the group's backends exchange tensors of; the CPU if they do."""
    devices = group._device_types
    if torch.device("cpu") in devices:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def first_refusal(mine: str, group: dist.ProcessGroup) -> str:
    """The refusal of the lowest rank that refuses; "" if none does. The same on every rank."""
    texts = gathered(mine[:MAX_REFUSAL_CHARACTERS], group)
    refusals = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text]
    return refusals[0] if refusals else ""
