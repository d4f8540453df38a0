"""When a plan is due, by the latest windows, and how long it waits after failed migrations.

``eplb/decision/triggers.py`` has the rules. The state of the windows is this process's own. A new
leader plans at once; the cool-down is by the time of the commit in the store, so that it holds
across leaders.
"""

from __future__ import annotations

from collections.abc import Sequence

from eplb.clock import Clock
from eplb.core.load import LoadHistory, Phase
from eplb.decision.triggers import Observed, TriggerRules, TriggerState, due
from eplb.measure import imbalance
from rebalance.controller.load import ServingGroup
from rebalance.controller.plans.planning import Past
from rebalance.types import SWITCHED_OFF
from telemetry.load.folder import Window
from telemetry.state.events import OUTCOME_OF_EVENT, Event, plan_end
from telemetry.state.placements import CommittedPlacement
from telemetry.state.store import StateStore

LONGEST_S = 600.0  # unless the first wait is longer
MOST_READ = 32  # ends of migrations that a new leader looks back on


class Due:
    """Decides on each new window whether a plan is due.

    Args:
        clock: seconds since the epoch.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.state = TriggerState()
        self._seen = -1  # index of the newest window whose tokens were counted
        self._looked_upto = -1  # last step at which a change of load was found
        self._changed = False

    def ranks_changed(self) -> None:
        """Note another run: its windows count from the start."""
        is_first = self.state.generation < 0
        self.state = TriggerState(is_member_change=not is_first)
        self._seen, self._looked_upto, self._changed = -1, -1, False

    def trigger(
        self,
        rules: TriggerRules,
        windows: Sequence[Window],
        past: Past,
        committed: CommittedPlacement,
        group: ServingGroup,
        *,
        is_draining: bool = False,
    ) -> str | None:
        """Return what makes a plan due now; None: nothing does."""
        tokens = driving_tokens(group, self._seen) if rules.interval_tokens else 0
        self._seen = windows[-1].index
        trigger, self.state = due(
            rules,
            self.state,
            Observed(
                now=self._clock(),
                tokens=tokens,
                imbalance=self._imbalance(rules, past.latest, committed, group),
                generation=committed.placement.generation,
                committed_at=committed.time,
                is_rebalanced=committed.plan_id > 0,
                is_changed=self._is_changed(past),
                is_draining=is_draining,
            ),
        )
        if trigger is not None:
            self._changed = False
        return trigger

    @staticmethod
    def _imbalance(
        rules: TriggerRules, latest: LoadHistory, committed: CommittedPlacement, group: ServingGroup
    ) -> float:
        if not rules.start_imbalance:
            return 0.0
        return float(imbalance(latest.tokens, committed.placement, group.topology).mean())

    def _is_changed(self, past: Past) -> bool:
        """Whether the load changed suddenly since the last plan.

        Further windows move the estimate of when it changed by one or two. So it is another change
        only if it came after all that was known when the one before was found.
        """
        if past.changed_at > self._looked_upto:
            self._changed, self._looked_upto = True, past.upto
        return self._changed


def back_off(num_failed: int, first_s: float) -> float:
    """Return the seconds from the latest of so many failures to the next plan."""
    if num_failed == 0:
        return 0.0
    return min(first_s * 2.0 ** (min(num_failed, MOST_READ) - 1), max(first_s, LONGEST_S))


class Failures:
    """Counts failed migrations since the last commit: after each, the next plan waits longer.

    What made one fail usually makes the next fail too: a rank that cannot stage, a disk that is
    full. The count is read from the events of the store, so a new leader continues it.

    Args:
        store: whose events tell how migrations ended.
        clock: of seconds since the epoch, as of the store.
    """

    def __init__(self, store: StateStore, clock: Clock) -> None:
        self._store, self._clock = store, clock
        self._seen: int | None = None  # id of the newest event that was read
        self._num_failed, self._failed_at, self._reason = 0, 0.0, ""

    def held_back(self, first_s: float) -> str:
        """Return why no plan is published now; "" if one may be.

        Args:
            first_s: the wait after one failure; it doubles with each further one.
        """
        self._read()
        now = self._clock()
        self._failed_at = min(self._failed_at, now)  # a clock that was set back: wait from now on
        left_s = self._failed_at + back_off(self._num_failed, first_s) - now
        if self._num_failed == 0 or left_s <= 0:
            return ""
        times = "time" if self._num_failed == 1 else "times in a row"
        return (
            f"migrations failed {self._num_failed} {times}, the latest: {self._reason}; "
            f"{left_s:.0f} s of back-off left"
        )

    def _read(self) -> None:
        """Count the ends of migrations that came since the last call."""
        if self._seen is None:
            self._seen = 0
            for event in reversed(self._since_commit()):
                self._count(event)
        while page := self._store.events(after=self._seen):
            for event in page:
                self._count(event)

    def _since_commit(self) -> list[Event]:
        """Return the latest ends of migrations, newest first, back to a commit."""
        found = []
        for event in self._store.events_backwards(OUTCOME_OF_EVENT):
            found.append(event)
            if OUTCOME_OF_EVENT[event.kind] == "committed" or len(found) == MOST_READ:
                break
        return found

    def _count(self, event: Event) -> None:
        self._seen = event.id
        end = plan_end(event)
        if end is None or end.reason == SWITCHED_OFF:
            return  # no plan's, or an operator's order
        if OUTCOME_OF_EVENT[event.kind] == "committed":
            self._num_failed = 0
        else:
            self._num_failed += 1
            self._failed_at, self._reason = event.time, end.reason


def driving_tokens(group: ServingGroup, after: int) -> int:
    """Tokens, as requests have them, of the complete windows past the index ``after``.

    Prefill drives rebalancing: its batches are large, and what it routes tells what decoding will.
    So decode steps count only where the ranks report nothing else. A phase that the engine does not
    tell apart ("mixed") counts whole.
    """
    phases: tuple[Phase, ...] = ("prefill", "mixed")
    held = [window for phase in phases for window in group.folder.windows(phase)]
    held = held or group.folder.windows("decode")
    new = (window for window in held if window.is_complete and window.index > after)
    routed = sum(int(window.tokens.sum()) for window in new)
    return routed // (group.model.num_layers * group.model.top_k)
