"""When a plan is due: the latest windows, as ``eplb/decision/triggers.py`` sees them.

The state is this process's own. A new leader plans at once; the cool-down is by the time of the
commit in the store, so that it holds across leaders.
"""

from __future__ import annotations

from collections.abc import Sequence

from eplb.clock import Clock
from eplb.core.load import LoadHistory, Phase
from eplb.decision.triggers import Observed, TriggerRules, TriggerState, due
from eplb.measure.balance import imbalance
from rebalance.controller.load import Group
from rebalance.controller.plans.planning import Past
from telemetry.load.folder import Window
from telemetry.state.placements import CommittedPlacement


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

    @property
    def memory(self) -> tuple[TriggerState, int, int, bool]:
        """All that is remembered; a caller that could not plan puts it back."""
        return self.state, self._seen, self._looked_upto, self._changed

    @memory.setter
    def memory(self, memory: tuple[TriggerState, int, int, bool]) -> None:
        self.state, self._seen, self._looked_upto, self._changed = memory

    def trigger(
        self,
        rules: TriggerRules,
        windows: Sequence[Window],
        past: Past,
        committed: CommittedPlacement,
        group: Group,
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
        rules: TriggerRules, latest: LoadHistory, committed: CommittedPlacement, group: Group
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


def driving_tokens(group: Group, after: int) -> int:
    """Tokens, as requests have them, of the complete windows past the index ``after``.

    Prefill drives rebalancing: its batches are large, and what it routes tells what decoding will.
    So decode steps count only where the ranks report nothing else, or plans are made on them. A
    phase that the engine does not tell apart ("mixed") counts whole.
    """
    phases: tuple[Phase, ...] = (group.phase,) if group.phase else ("prefill", "mixed")
    held = [window for phase in phases for window in group.folder.windows(phase)]
    held = held or group.folder.windows("decode")
    new = (window for window in held if window.is_complete and window.index > after)
    routed = sum(int(window.tokens.sum()) for window in new)
    return routed // (group.model.num_layers * group.model.top_k)
