"""A rank agent's part in a recovery: its survivor report, and the survivors' record applied.

``rebalance/recovery/survivors.py`` has the order of the steps on all survivors.
"""

from __future__ import annotations

from dataclasses import replace

from eplb.migration.recovery import Recovery, SurvivorReport
from rebalance.protocol import phases
from rebalance.protocol.ballot import NO_PLAN
from rebalance.protocol.phases import Phase, RankPhase
from rebalance.rank.core import RankCore
from rebalance.rank.verdicts import Voting
from rebalance.recovery.survivors import missed_verdicts
from rebalance.swap.scrub_turns import ScrubTurns
from rebalance.swap.swapper import Swapper


class RankRecovery:
    """One rank's side of a recovery, on the thread that ran its steps."""

    def __init__(
        self, core: RankCore, swapper: Swapper, voting: Voting, scrub_turns: ScrubTurns
    ) -> None:
        self._core, self._swapper, self._voting = core, swapper, voting
        self._scrub_turns = scrub_turns
        self.is_recovering = False  # no step may follow

    def survivor_report(self, deadline_s: float) -> SurvivorReport:
        """Stop adopting, swapping and repairing; return how far this rank has come.

        Args:
            deadline_s: for the running check of the scrubber to end. The report is written by then
                in any case, because a rank without a report counts as dead.
        """
        core = self._core
        self.is_recovering = True
        core.watchdog.step.busy("recovering after a death")
        core.shared.update(phases.freeze, "a rank died")
        # What was found corrupted is not repaired, and slots that are rolled forward are not looked
        # at.
        has_ended = self._scrub_turns.end_look(deadline_s)
        with core.shared.changed:
            state = core.shared.state
            report = self._report(state)
        # The mover's thread looks, and stages only after it: nothing can be rolled forward here.
        assert has_ended or not report.prepared, "who looks at a slot has staged nothing"
        core.recorder.note("death detected", state, dead=list(report.dead))
        core.recorder.note(
            "survivor report", state, swapped=report.swapped, prepared=report.prepared
        )
        return report

    def _report(self, state: RankPhase) -> SurvivorReport:
        core, closed = self._core, self._swapper.closed
        plan = state.plan if state.phase is not Phase.ABORTED else None
        return SurvivorReport(
            run=core.settings.run,
            rank=core.rank,
            membership=core.settings.membership,
            generation=state.generation,
            weights_version=state.weights_version,
            plan_id=plan.plan_id if plan else NO_PLAN,
            plan_hash=plan.plan_hash if plan else 0,
            swapped=state.swapped if plan else 0,
            prepared=state.prepared if plan else 0,
            closed_plan_id=closed[0],
            closed_applied=closed[1],
            dead=tuple(sorted(core.links.votes.dead())),
            time=core.links.clock(),
        )

    def apply_recovery(self, record: Recovery) -> None:
        """Apply what the record includes beyond this rank's swaps, and end the migration."""
        core, state = self._core, self._core.shared.state
        core.recorder.note("recovery", state, membership=record.membership, reason=record.reason)
        verdicts = missed_verdicts(state, record)
        if verdicts:
            core.shared.update(lambda found: replace(found, abort_reason=record.reason))
        for cast, verdict in verdicts:
            self._voting.apply_verdict(cast, verdict, core.steps.last)
