"""The placement check inside SGLang: its group, its store, and how its ranks choose replicas."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from rebalance.engines.common.fsck.rank_check import RankCheck
from rebalance.engines.sglang.fsck_view import SglangView
from rebalance.engines.sglang.store_link import StoreLink
from runtime.group.agreement import gathered_large


def rank_check(group: dist.ProcessGroup, store: StoreLink | None, run: str) -> RankCheck:
    """Make the check of this rank.

    Args:
        group: a CPU group of all ranks that nothing else uses.
        store: where faults go; None: the log alone.
        run: of the store.
    """

    def write(event: str, detail: dict[str, Any]) -> None:
        if store is not None:
            about = {"run": run, "rank": dist.get_rank(group)}
            store.events.append((event, about | detail))

    def gather(value: Any) -> list[Any]:
        return gathered_large(value, group)

    return RankCheck("sglang", gather, write, SglangView.check_choices)
