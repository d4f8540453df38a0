"""What a soak writes down, in memory that does not grow with its length."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

MIB = 1 << 20


class Reservoir:
    """A sample of all values that came: every one is in it with the same chance.

    Until ``capacity`` values have come it holds all of them. After that a new one takes the place
    of a random one with the chance capacity / values so far: Vitter's Algorithm R ("Random Sampling
    with a Reservoir", 1985).
    """

    def __init__(self, capacity: int, *, seed: int) -> None:
        self.values: list[float] = []
        self.num_seen = 0
        self._capacity, self._random = capacity, Random(seed)

    def add(self, value: float) -> None:
        """Take one value in, or leave it."""
        self.num_seen += 1
        if len(self.values) < self._capacity:
            self.values.append(value)
            return
        place = self._random.randrange(self.num_seen)
        if place < self._capacity:
            self.values[place] = value


@dataclass
class Level:
    """The first, the highest and the last of many readings: a slow leak shows, a peak too."""

    first: int = 0
    highest: int = 0
    last: int = 0
    num_readings: int = 0

    def note(self, reading: int) -> None:
        """Take one more."""
        if not self.num_readings:
            self.first = self.highest = reading
        self.highest, self.last = max(self.highest, reading), reading
        self.num_readings += 1

    @property
    def rise(self) -> int:
        """How far it was above the first, at its highest."""
        return self.highest - self.first


@dataclass(frozen=True)
class Progress:
    """How far one rank has come."""

    steps: int
    migrations: int
    num_looks: int  # at live slots; 0: they are looked at only at the end
    num_wrong: int
    memory: int  # bytes


def progress_line(elapsed_s: float, rank: Progress) -> str:
    """Tell people who wait how far a rank is."""
    found = "no live slot looked at"
    if rank.num_looks:
        found = f"{rank.num_wrong} wrong in {rank.num_looks} looks at its live slots"
    return (
        f"after {elapsed_s:.0f} s: {rank.steps} steps, {rank.migrations} migrations, {found}, "
        f"memory {rank.memory / MIB:.0f} MiB"
    )
