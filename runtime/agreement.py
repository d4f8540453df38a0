"""One verdict of all ranks on something that each of them has tried."""

from __future__ import annotations

import torch.distributed as dist


def first_refusal(mine: str, group: dist.ProcessGroup) -> str:
    """What the lowest rank that refuses says; "" if none does. Alike on every rank."""
    said: list[str] = [""] * group.size()
    dist.all_gather_object(said, mine, group=group)
    refusals = [f"rank {rank}: {text}" for rank, text in enumerate(said) if text]
    return refusals[0] if refusals else ""
