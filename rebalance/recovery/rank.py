"""A rank agent's part in a recovery: its survivor report, and the survivors' record applied.

``rebalance/recovery/survivors.py`` has the order of the steps on all survivors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from eplb.migration.recovery import Recovery, SurvivorReport
from rebalance.protocol import phases
from rebalance.protocol.ballot import NO_PLAN
from rebalance.protocol.journal import JournalRecorder
from rebalance.protocol.phases import Phase, RankPhase
from rebalance.rank.parts import AgentSettings, Links
from rebalance.recovery.survivors import missed_verdicts
from rebalance.swap.scrub_schedule import ScrubSchedule
from rebalance.swap.swapper import Swapper
from rebalance.swap.verdicts import Voting
from rebalance.threads.waiting import SharedPhase
from rebalance.threads.watchdog import Heartbeat


class RankRecovery:
    """One rank's side of a recovery, on the thread that ran its steps.

    Args:
        settings: name the group of ranks.
        rank: this one.
        links: by which it learns of deaths.
        swapper: says what serves.
        voting: obeys the verdicts that this rank has missed.
        scrub_schedule: stopped for the recovery.
        shared: the rank's phase.
        recorder: notes what is done.
        beat: of the step's thread.
        last_step: says which step was begun last.
    """

    def __init__(
        self,
        settings: AgentSettings,
        rank: int,
        links: Links,
        swapper: Swapper,
        voting: Voting,
        scrub_schedule: ScrubSchedule,
        *,
        shared: SharedPhase,
        recorder: JournalRecorder,
        beat: Heartbeat,
        last_step: Callable[[], int],
    ) -> None:
        self._settings, self._rank, self._links = settings, rank, links
        self._swapper, self._voting, self._last_step = swapper, voting, last_step
        self._scrub_schedule, self._shared, self._recorder, self._beat = (
            scrub_schedule,
            shared,
            recorder,
            beat,
        )
        self.is_recovering = False  # no step may follow

    def survivor_report(self, deadline_s: float) -> SurvivorReport:
        """Stop adopting, swapping and repairing; return how far this rank has come.

        Args:
            deadline_s: for the running check of the scrubber to end. The report is written by then
                in any case, because a rank without a report counts as dead.
        """
        self.is_recovering = True
        self._beat.busy("recovering after a death")
        self._shared.update(phases.freeze, "a rank died")
        # What was found corrupted is not repaired, and slots that are rolled forward are not looked
        # at.
        has_ended = self._scrub_schedule.end_look(deadline_s)
        with self._shared.changed:
            state = self._shared.state
            report = self._report(state)
        # The mover's thread looks, and stages only after it: nothing can be rolled forward here.
        assert has_ended or not report.prepared, "who looks at a slot has staged nothing"
        self._recorder.note("death detected", state, dead=list(report.dead))
        self._recorder.note(
            "survivor report", state, swapped=report.swapped, prepared=report.prepared
        )
        return report

    def _report(self, state: RankPhase) -> SurvivorReport:
        settings, closed = self._settings, self._swapper.closed
        plan = state.plan if state.phase is not Phase.ABORTED else None
        return SurvivorReport(
            run=settings.run,
            rank=self._rank,
            membership=settings.membership,
            generation=state.generation,
            weights_version=state.weights_version,
            plan_id=plan.plan_id if plan else NO_PLAN,
            plan_hash=plan.plan_hash if plan else 0,
            swapped=state.swapped if plan else 0,
            prepared=state.prepared if plan else 0,
            closed_plan_id=closed[0],
            closed_applied=closed[1],
            dead=tuple(sorted(self._links.votes.dead())),
            time=self._links.clock(),
        )

    def apply_recovery(self, record: Recovery) -> None:
        """Apply what the record includes beyond this rank's swaps, and end the migration."""
        state = self._shared.state
        self._recorder.note("recovery", state, membership=record.membership, reason=record.reason)
        verdicts = missed_verdicts(state, record)
        if verdicts:
            self._shared.update(lambda found: replace(found, abort_reason=record.reason))
        for cast, verdict in verdicts:
            self._voting.apply_verdict(cast, verdict, self._last_step())
