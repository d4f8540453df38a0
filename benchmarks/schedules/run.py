"""Runs one seed, and tells its story where something went wrong."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.schedules.simulated import Violation
from benchmarks.schedules.world import Hang, Schedule


@dataclass
class Found:
    """What came of a schedule."""

    counts: Counter[str] = field(default_factory=Counter)
    violation: str = ""
    cause: Exception | None = None
    trace: list[tuple[str, int]] = field(default_factory=list)
    kind: str = ""  # the flag of its kind of schedules, with a space

    def story(self, seed: int) -> str:
        """Turn by turn."""
        lines = [
            f"{number:>5} {what}" + (f" of rank {rank}" if rank >= 0 else "")
            for number, (what, rank) in enumerate(self.trace)
        ]
        again = f"python -m benchmarks.schedules {self.kind}--first {seed} --count 1 --trace"
        return "\n".join([*lines, f"seed {seed}: {self.violation or 'holds'}", f"again: {again}"])


def run_one(seed: int, *, make: Callable[[int], Schedule] = Schedule) -> Found:
    """Run one seed's schedule."""
    schedule = make(seed)
    found = Found(schedule.counts, trace=schedule.trace, kind=schedule.kind)
    found.counts["schedules"] += 1
    try:
        schedule.run()
    except Hang as exc:
        found.violation, found.cause = f"hang: {exc}", exc
        found.counts["hangs"] += 1
    except Exception as exc:  # of the claims, one that a rank states itself, or none of anybody's
        where = "" if isinstance(exc, Violation) else traceback.format_exc()
        found.violation, found.cause = f"{exc}\n{where}".strip(), exc
        found.counts["violations"] += 1
    return found
