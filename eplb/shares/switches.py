"""Which parts act on each batch, beside the placement: alike on all ranks, off by default."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from eplb.declared import Setting, check_fields
from eplb.errors import ConfigError

CountExchange = Literal["group", "peer_memory"]
LATE_COUNTS = "late_counts"  # a fault that devices count


@dataclass(frozen=True)
class BatchSwitches:
    """What of a batch is decided by its own counts. docs/planning.md says what to choose where.

    Raises:
        ConfigError: a switch needs another one, or excludes it.
    """

    split: Annotated[bool, Setting("choose replicas by the batch's own counts")] = False
    exchange: Annotated[
        CountExchange,
        Setting(
            "how ranks exchange the counts of a batch: over their process group, or through GPU "
            "memory that all of them map"
        ),
    ] = "group"

    def __post_init__(self) -> None:
        check_fields(self)
        if self.exchange == "peer_memory" and not self.split:
            raise ConfigError(
                'batch.exchange is "peer_memory" and batch.split is false, expected true: only a '
                "split exchanges the counts of a batch"
            )

    def __str__(self) -> str:
        words = {
            "split": self.split,
            "counts through peer memory": self.exchange == "peer_memory",
        }
        return ", ".join(one for one, is_on in words.items() if is_on) or "off"
