"""Which parts act on each batch, beside the placement: alike on all ranks, off by default."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from eplb.errors import ConfigError

SharedExpert = Literal["home", "light_ranks"]
CountExchange = Literal["group", "peer_memory"]
LATE_COUNTS, DIFFERENT_PULLS = "late_counts", "different_pulls"  # faults that devices count


@dataclass(frozen=True)
class BatchSwitches:
    """What of a batch is decided by its own counts. docs/planning.md says what to choose where.

    Raises:
        ConfigError: a switch needs another one, or excludes it.
    """

    split: bool = False  # replicas by the batch's own counts
    shared_expert: SharedExpert = "home"
    pulls: int = 0  # spare slots of each rank for just-in-time replicas; 0: none are pulled
    pull_rows: int = 0  # rows whose product takes as long as the pull of a record
    exchange: CountExchange = "group"  # how ranks exchange the counts of a batch

    def __post_init__(self) -> None:
        if min(self.pulls, self.pull_rows) < 0:
            raise ConfigError(
                f"batch.pulls is {self.pulls} and batch.pull_rows {self.pull_rows}, "
                "expected 0 or more"
            )
        if self.spreads and self.pulls:
            raise ConfigError(
                f'batch.shared_expert is "light_ranks" and batch.pulls is {self.pulls}, expected '
                "one of both: they number a rank's extra slots alike"
            )
        needs = {
            'batch.shared_expert is "light_ranks"': self.spreads,
            f"batch.pulls is {self.pulls}": bool(self.pulls),
            'batch.exchange is "peer_memory"': self.exchange == "peer_memory",
        }
        alone = [one for one, is_set in needs.items() if is_set and not self.split]
        if alone:
            raise ConfigError(
                f"{alone[0]} and batch.split is false, expected true: only a split exchanges the "
                "counts of a batch"
            )
        if self.pull_rows and not self.pulls:
            raise ConfigError(
                f"batch.pull_rows is {self.pull_rows} and batch.pulls is 0, expected spare slots"
            )

    @property
    def spreads(self) -> bool:
        """Whether tokens of the shared expert go to light ranks."""
        return self.shared_expert == "light_ranks"

    @property
    def extra_slots(self) -> int:
        """Slots of each rank after the placement's."""
        return 1 if self.spreads else self.pulls

    def __str__(self) -> str:
        words = {
            "split": self.split,
            "counts through peer memory": self.exchange == "peer_memory",
            "shared expert on light ranks": self.spreads,
            f"pulls into {self.pulls} spare slots": bool(self.pulls),
        }
        return ", ".join(one for one, is_on in words.items() if is_on) or "off"
