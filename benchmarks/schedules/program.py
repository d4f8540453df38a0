"""What happens to the ranks of a schedule from outside: plans, switches, faults, new weights."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import Enum


class Doing(Enum):
    """One thing that a program does."""

    PUBLISH = "publish"
    WITHDRAW = "withdraw"
    SWITCH_OFF = "switch off"
    SWITCH_ON = "switch on"
    LOSE_STORE = "lose the store"
    FIND_STORE = "find the store"
    BREAK_LINKS = "break links"
    REPAIR_LINKS = "repair links"
    REFUSE = "host refuses"
    ALLOW = "host allows"
    UPDATE = "update"
    KILL = "kill"


PAIRS = (
    (Doing.SWITCH_OFF, Doing.SWITCH_ON),
    (Doing.LOSE_STORE, Doing.FIND_STORE),
    (Doing.BREAK_LINKS, Doing.REPAIR_LINKS),
    (Doing.REFUSE, Doing.ALLOW),
)
AFTER_A_DEATH = frozenset({Doing.FIND_STORE, Doing.REPAIR_LINKS, Doing.ALLOW})
QUIET = 0.15  # of programs have plans alone: then each of them must be committed
EACH = 0.2  # of programs have this fault


@dataclass(frozen=True)
class Program:
    """What is done, in order, at moments that the schedule picks."""

    doings: tuple[Doing, ...]

    @property
    def is_quiet(self) -> bool:
        """Say whether nothing gets in the way of a plan."""
        return set(self.doings) == {Doing.PUBLISH}


def random_program(rng: random.Random) -> Program:
    """Plans, and what gets in their way."""
    doings = [Doing.PUBLISH] * rng.choice([1, 1, 1, 2, 2, 3])
    if rng.random() < QUIET:
        return Program(tuple(doings))
    for off, on in PAIRS:
        if rng.random() < EACH:
            first = rng.randint(0, len(doings) - 1)
            doings.insert(first, off)
            doings.insert(rng.randint(first + 1, min(len(doings), first + 3)), on)
    for doing in (Doing.WITHDRAW, Doing.UPDATE):
        if rng.random() < EACH:
            doings.insert(rng.randint(1, len(doings)), doing)
    if rng.random() < 2 * EACH:
        doings.insert(rng.randint(1, len(doings)), Doing.KILL)
    return Program(tuple(doings))
