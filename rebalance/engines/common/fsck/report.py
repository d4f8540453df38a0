"""Faults of the placement check, and what ranks have written about them; without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from telemetry.state.store import StateStore

Kind = Literal["slot", "replicas", "factor", "tensors", "choice"]
BEGUN, ROUND, FAULT = "placement_check", "placement_round", "placement_fault"


@dataclass(frozen=True)
class Fault:
    """One fault of a slot, a tensor or a choice of replicas; its text names where and what."""

    kind: Kind
    row: int  # layer, by the engine's numbers
    slot: int  # number among the slots of all ranks; -1: none in particular
    expert: int  # -1: none in particular
    name: str  # the tensor's name
    what: str  # found, and expected

    def __str__(self) -> str:
        where = f"layer {self.row}"
        if self.slot >= 0:
            where += f" slot {self.slot}"
        if self.expert >= 0:
            where += f" expert {self.expert}"
        return f"{where}: {self.name} {self.what}"


@dataclass(frozen=True)
class Report:
    """The current run's check."""

    run: str
    ranks: dict[int, str]  # why each does not check; "" if it does
    rounds: dict[int, int]  # of all its slots, by rank
    faults: tuple[str, ...]  # oldest first

    @property
    def lines(self) -> list[str]:
        """The report for an operator."""
        checking = [rank for rank, reason in self.ranks.items() if not reason]
        rounds = min((self.rounds.get(rank, 0) for rank in checking), default=0)
        first = f"run {self.run}: {len(checking)} ranks check their slots, {rounds} rounds complete"
        refused = [f"rank {rank} does not check: {why}" for rank, why in self.ranks.items() if why]
        return [first, *refused, *self.faults, f"{len(self.faults)} faults"]


def report_of(store: StateStore) -> Report:
    """Read the events of the current run."""
    info = store.current_run()
    assert info is not None, "a deployment that never ran is refused before"
    ranks: dict[int, str] = {}
    rounds: dict[int, int] = {}
    faults = []
    for event in store.events_backwards((BEGUN, ROUND, FAULT)):
        detail = event.detail
        if detail.get("run") != info.run:
            break
        rank = int(str(detail["rank"]))
        if event.kind == BEGUN:
            ranks.setdefault(rank, str(detail["reason"]))
        elif event.kind == ROUND:
            rounds.setdefault(rank, int(str(detail["rounds"])))
        else:
            faults.append(f"rank {rank}: {detail['text']}")
    return Report(info.run, dict(sorted(ranks.items())), rounds, tuple(reversed(faults)))
