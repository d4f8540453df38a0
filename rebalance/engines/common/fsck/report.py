"""Faults of the placement check, and what ranks have written about them; without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from eplb.errors import StoreError, counted
from telemetry.state.store import StateStore

Kind = Literal["slot", "replicas", "factor", "tensors", "choice", "map", "list"]
BEGUN, ROUND, FAULT = "placement_check", "placement_round", "placement_fault"
REPAIRED, PARTS, MOVES = "placement_repair", "engine_parts", "engine_moves"


@dataclass(frozen=True)
class Fault:
    """One fault of a slot, a tensor or a choice of replicas; its text names where and what."""

    kind: Kind
    row: int  # layer, by the engine's numbers
    name: str  # the tensor's name
    what: str  # found, and expected
    slot: int = -1  # number among the slots of all ranks; -1: none in particular
    expert: int = -1  # -1: none in particular

    def __str__(self) -> str:
        where = f"layer {self.row}"
        if self.slot >= 0:
            where += f" slot {self.slot}"
        if self.expert >= 0:
            where += f" expert {self.expert}"
        return f"{where}: {self.name} {self.what}"


@dataclass(frozen=True)
class Report:
    """The current run's check, and the parts of the plug-in in each rank."""

    run: str
    ranks: dict[int, str]  # why each does not check; "" if it does
    rounds: dict[int, int]  # of all its slots, by rank
    faults: tuple[str, ...]  # oldest first, without those of slots that were repaired since
    num_repaired: int = 0  # slots
    parts: dict[int, str] = field(default_factory=dict)  # by rank: what is off, and what was lost

    @property
    def lines(self) -> list[str]:
        """The report for an operator."""
        checking = [rank for rank, reason in self.ranks.items() if not reason]
        rounds = min((self.rounds.get(rank, 0) for rank in checking), default=0)
        of_ranks = f"{len(checking)} of {counted(len(self.ranks), 'rank')} check"
        first = f"run {self.run}: {of_ranks}, {counted(rounds, 'complete round')}"
        refused = [f"rank {rank} does not check: {why}" for rank, why in self.ranks.items() if why]
        parts = [f"rank {rank}: {text}" for rank, text in self.parts.items() if text]
        last = counted(len(self.faults), "fault")
        if not rounds:
            last += " so far: not every slot has been checked" if checking else ": no rank checks"
        if self.num_repaired:
            last += f", {counted(self.num_repaired, 'slot')} repaired"
        return [first, *parts, *refused, *self.faults, last]


def report_of(store: StateStore) -> Report:
    """Read the events of the current run."""
    info = store.current_run()
    if info is None:
        raise StoreError(f"deployment {store.deployment!r} has no run, expected one of an engine")
    ranks: dict[int, str] = {}
    rounds: dict[int, int] = {}
    parts: dict[int, str] = {}
    faults, repaired = [], []
    kinds = ("run", BEGUN, ROUND, FAULT, REPAIRED, PARTS)
    for event in store.events_backwards(kinds):
        detail = event.detail
        if event.kind == "run" and detail["run"] != info.run:
            break  # not at this run's own: a rank that ended early wrote before it began
        if event.kind == "run" or detail.get("run") != info.run:
            continue  # also a process of an earlier start that ended later
        rank = int(str(detail["rank"]))
        if event.kind == BEGUN:
            ranks.setdefault(rank, str(detail["reason"]))
        elif event.kind == ROUND:
            rounds.setdefault(rank, int(str(detail["rounds"])))
        elif event.kind == PARTS:
            parts.setdefault(rank, _parts_text(detail))
        elif event.kind == REPAIRED:
            repaired.append((rank, detail["row"], detail["slot"], detail.get("name", "")))
        elif not {
            (rank, detail.get("row"), detail.get("slot"), name)
            for name in ("", detail.get("name", ""))
        } & set(repaired):
            faults.append(f"rank {rank}: {detail['text']}")
    by_rank = dict(sorted(ranks.items()))
    return Report(
        info.run,
        by_rank,
        rounds,
        tuple(reversed(faults)),
        len({place[:3] for place in repaired}),
        dict(sorted(parts.items())),
    )


def _parts_text(detail: Mapping[str, Any]) -> str:
    """What is not as it should be in a rank; "" for nothing."""
    words = [f"off: {', '.join(detail['off'])}"] if detail["off"] else []
    words += [
        f"{detail[name]} {text}"
        for name, text in (
            ("samples_dropped", "samples dropped"),
            ("store_failures", "failures of the store"),
        )
        if detail[name]
    ]
    return "; ".join(words)
