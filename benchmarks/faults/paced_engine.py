"""The demo's engine with requests at a steady rate, which writes when each token was served.

    eplb launch --module benchmarks.faults.paced_engine -- ENGINE.json

The truth about an outage must not come from what the product reports. So each rank appends the
monotonic time of each of its steps to a file of its own: TOKENS_VARIABLE names the folder. What
served in the step is beside it: group, step, generation and hash of the placement.
"""

from __future__ import annotations

import os
import struct
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

from api.demo import engine
from rebalance.assembly import rank
from rebalance.rank.rank import Rank

TOKENS_VARIABLE, STEP_VARIABLE = "PAIRS_TOKENS", "PAIRS_STEP_S"
STEP_EVERY_S = 0.05  # requests of a small deployment: two cores are not busy with it alone
KEPT_STEPS = 256  # times of steps that a rank keeps: its memory is to be flat


class PacedFigures(engine.Figures):
    """Writes down each step, and waits until the next request is due."""

    serving = ""  # run, membership, step, generation and hash of the map of the current step

    def stepped(self, took_s: float) -> None:
        """Record the end of a step."""
        super().stepped(took_s)
        del self.step_ms[:-KEPT_STEPS]
        folder, number = Path(os.environ[TOKENS_VARIABLE]), os.environ["RANK"]
        every_s = float(os.environ.get(STEP_VARIABLE, STEP_EVERY_S))
        now = time.monotonic()
        with (folder / f"rank-{number}").open("ab") as file:
            file.write(struct.pack("d", now))
        with (folder / f"maps-{number}").open("a") as file:
            file.write(f"{now} {number} {PacedFigures.serving}\n")
        Event().wait(every_s - now % every_s)


class NotingRank(Rank):
    """Notes what serves in each step."""

    def step(self, *args: Any, **kwargs: Any) -> bool:
        """Do what is due between two passes."""
        serves = super().step(*args, **kwargs)
        one = self.placement
        run, step = self.group.run, self.last_step
        PacedFigures.serving = f"{run} {self.membership} {step} {one.generation} {one.hash}"
        return serves


def tokens_of(folder: Path) -> list[float]:
    """Read the times of the steps of all ranks, in order."""
    data = b"".join(path.read_bytes() for path in folder.glob("rank-*"))
    return sorted(at for (at,) in struct.iter_unpack("d", data))


@dataclass(frozen=True)
class ServedStep:
    """A step that a rank has finished, and the placement that served in it."""

    time: float
    rank: int
    run: str
    membership: int
    step: int
    generation: int
    hash: str


def served_in(folder: Path) -> list[ServedStep]:
    """Read what served in each step of all ranks, in the order of time."""
    found = []
    for path in folder.glob("maps-*"):
        for line in path.read_text().split("\n")[:-1]:  # the last line of a killed rank may be torn
            at, number, run, membership, step, generation, placement = line.split()
            numbers = int(membership), int(step), int(generation)
            found.append(ServedStep(float(at), int(number), run, *numbers, placement))
    return sorted(found, key=lambda one: one.time)


def different_maps(steps: Iterable[ServedStep]) -> list[str]:
    """Find the places where ranks served different maps, which no outage excuses.

    All ranks that finish a step of a group serve it with one placement; and once a step of a later
    group is finished, none of an earlier one is.
    """
    found, of_step = list[str](), defaultdict[tuple[str, int, int], set[str]](set)
    newest, begun_at = ("", 0), 0.0
    groups = list[tuple[str, int]]()
    for one in steps:
        of_step[one.run, one.membership, one.step].add(f"{one.generation} {one.hash}")
        group = one.run, one.membership
        if group not in groups:
            groups.append(group)
            newest, begun_at = group, one.time
        elif group != newest:
            late_s = one.time - begun_at
            found.append(f"rank {one.rank} ends step {one.step} of {group} {late_s:.3f} s after")
    several = {key: maps for key, maps in of_step.items() if len(maps) > 1}
    return found + [f"step {key} was served with {maps}" for key, maps in several.items()]


def main() -> None:
    """Serve as the demo's engine does."""
    engine.Figures = PacedFigures  # type: ignore[misc]
    rank.Rank = NotingRank  # type: ignore[misc]
    engine.main()
