"""What has happened in a run so far: figures that only grow, summed over events and ranks.

Whoever begins to follow a run later counts the same, because all of it is read from the store. So a
counter does not fall when the process that shows it is started again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from telemetry.store import Event, RankState

OUTCOME_OF_EVENT = {"commit": "committed", "abort": "aborted", "reject": "rejected"}
SCRUB_RESULTS = ("clean", "damaged", "repaired", "lost")


class RunTally:
    """Counts the plans of the current run, from the store's events in order."""

    def __init__(self) -> None:
        self.ended_plans = Counter(dict.fromkeys(OUTCOME_OF_EVENT.values(), 0))  # by outcome
        self.decided: Counter[tuple[str, ...]] = Counter()  # by (policy, decision)

    def note(self, event: Event) -> None:
        """Count one more event."""
        detail = event.detail
        if event.kind == "plan":
            self.decided[str(detail.get("policy", "")), str(detail.get("decision", ""))] += 1
        elif event.kind in OUTCOME_OF_EVENT and int(detail.get("plan_id", 0)) > 0:
            self.ended_plans[OUTCOME_OF_EVENT[event.kind]] += 1


def scrubbed_slots(states: Iterable[RankState]) -> dict[str, int]:
    """Sum the live slots that the ranks' scrubbers looked at, by what came of it."""
    total = Counter(dict.fromkeys(SCRUB_RESULTS, 0))
    for state in states:
        total.update(state.detail.get("scrubbed", {}))
    return dict(total)


def oldest_progress(states: Iterable[RankState], now: float) -> tuple[float | None, str]:
    """Give the age of what has got on least, as far as anybody knows, and say what it is."""
    ages = [
        (
            max(0.0, now - state.time) + float(state.detail.get("progress_age_s", 0.0)),
            f"rank {state.rank}, {state.detail.get('progress_of') or 'the step'}",
        )
        for state in states
    ]
    return max(ages, key=lambda age: age[0], default=(None, ""))
