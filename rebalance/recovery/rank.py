"""A rank agent's part in a recovery: its last words, and what the survivors' record asks of it.

``rebalance/recovery/survivors.py`` says what all survivors do, and in which order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from eplb.migration.recovery import LastWords, Recovery
from rebalance.protocol import phases
from rebalance.protocol.ballot import NO_PLAN
from rebalance.protocol.journal import Diary
from rebalance.protocol.phases import Phase, RankPhase
from rebalance.recovery.survivors import missed_verdicts
from rebalance.swap.scrub_turns import ScrubTurns
from rebalance.swap.swapper import Swapper
from rebalance.swap.verdicts import Voting
from rebalance.threads.waiting import PhaseBox
from rebalance.threads.watchdog import Heartbeat


@dataclass(frozen=True)
class Member:
    """A rank of one group, as its report of a death names it."""

    run: str
    rank: int
    membership: int
    dead: Callable[[], frozenset[int]]  # ranks that are known to be gone
    clock: Callable[[], float]  # seconds since the epoch
    last_step: Callable[[], int]


class Survival:
    """One rank's side of a recovery, on the thread that ran its steps.

    Args:
        member: which rank this is.
        swapper: says what serves.
        voting: obeys the verdicts that this rank has missed.
        scrub_turns: stopped for the recovery.
        box: the rank's phase.
        diary: notes what is done.
        beat: of the step's thread.
    """

    def __init__(
        self,
        member: Member,
        swapper: Swapper,
        voting: Voting,
        scrub_turns: ScrubTurns,
        *,
        box: PhaseBox,
        diary: Diary,
        beat: Heartbeat,
    ) -> None:
        self._member, self._swapper, self._voting = member, swapper, voting
        self._scrub_turns, self._box, self._diary, self._beat = scrub_turns, box, diary, beat
        self.is_recovering = False  # no step may follow

    def last_words(self, deadline_s: float) -> LastWords:
        """Adopt, swap and mend nothing any more, and say how far this rank has come.

        Args:
            deadline_s: for the scrubber's look under way to end; the words come by then all the
                same, because others take a rank for dead that says none.
        """
        self.is_recovering = True
        self._beat.busy("recovering after a death")
        self._box.update(phases.freeze, "a rank died")
        # What was found rotten is not mended, and slots that are rolled forward are not looked at.
        has_ended = self._scrub_turns.end_look(deadline_s)
        with self._box.changed:
            state = self._box.state
            words = self._words(state)
        # The mover's thread looks, and stages only after it: nothing can be rolled forward here.
        assert has_ended or not words.prepared, "who looks at a slot has staged nothing"
        self._diary.note("death seen", state, dead=list(words.dead))
        self._diary.note("last words", state, swapped=words.swapped, prepared=words.prepared)
        return words

    def _words(self, state: RankPhase) -> LastWords:
        member, closed = self._member, self._swapper.closed
        plan = state.plan if state.phase is not Phase.ABORTED else None
        return LastWords(
            run=member.run,
            rank=member.rank,
            membership=member.membership,
            generation=state.generation,
            weights_version=state.weights_version,
            plan_id=plan.plan_id if plan else NO_PLAN,
            plan_hash=plan.plan_hash if plan else 0,
            swapped=state.swapped if plan else 0,
            prepared=state.prepared if plan else 0,
            closed_plan_id=closed[0],
            closed_applied=closed[1],
            dead=tuple(sorted(member.dead())),
            time=member.clock(),
        )

    def take_over(self, record: Recovery) -> None:
        """Swap what the record says and is not swapped here yet, and end the migration."""
        state = self._box.state
        self._diary.note("recovery", state, membership=record.membership, reason=record.reason)
        verdicts = missed_verdicts(state, record)
        if verdicts:
            self._box.update(lambda found: replace(found, abort_reason=record.reason))
        for cast, verdict in verdicts:
            self._voting.obey(cast, verdict, self._member.last_step())
