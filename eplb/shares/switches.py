"""Which parts act on each batch, beside the placement: alike on all ranks, off by default."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from eplb.declared import Setting, check_fields
from eplb.errors import ConfigError

SharedExpert = Literal["home", "light_ranks"]
CountExchange = Literal["group", "peer_memory"]
LATE_COUNTS = "late_counts"  # a fault that devices count


@dataclass(frozen=True)
class BatchSwitches:
    """What of a batch is decided by its own counts. docs/planning.md says what to choose where.

    Raises:
        ConfigError: a switch needs another one, or excludes it.
    """

    split: Annotated[bool, Setting("choose replicas by the batch's own counts")] = False
    shared_expert: Annotated[
        SharedExpert,
        Setting("where the shared expert of a token runs: on its own rank, or on a light one"),
    ] = "home"
    exchange: Annotated[
        CountExchange,
        Setting(
            "how ranks exchange the counts of a batch: over their process group, or through GPU "
            "memory that all of them map"
        ),
    ] = "group"

    def __post_init__(self) -> None:
        check_fields(self)
        needs = {
            'batch.shared_expert is "light_ranks"': self.spreads,
            'batch.exchange is "peer_memory"': self.exchange == "peer_memory",
        }
        alone = [one for one, is_set in needs.items() if is_set and not self.split]
        if alone:
            raise ConfigError(
                f"{alone[0]} and batch.split is false, expected true: only a split exchanges the "
                "counts of a batch"
            )

    @property
    def spreads(self) -> bool:
        """Whether tokens of the shared expert go to light ranks."""
        return self.shared_expert == "light_ranks"

    @property
    def extra_slots(self) -> int:
        """Slots of each rank after the placement's."""
        return int(self.spreads)

    def __str__(self) -> str:
        words = {
            "split": self.split,
            "counts through peer memory": self.exchange == "peer_memory",
            "shared expert on light ranks": self.spreads,
        }
        return ", ".join(one for one, is_on in words.items() if is_on) or "off"
