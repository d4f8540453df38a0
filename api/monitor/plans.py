"""What serves, what was decided, and the migration to it: from the journal and the store.

events --> decisions, commits, the latest judgement of the pace, kernels that are compiled
store  --> the committed placement, the open migration, proposals
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from api.monitor.decisions import DecisionLog, drop_oldest
from api.monitor.history import History
from api.monitor.state import (
    DecisionRecord,
    MigrationProgress,
    PaceView,
    PlanState,
    RebalanceMark,
)
from eplb.core.model import ModelShape
from eplb.core.placement import Placement
from eplb.decision.expert_times import ExpertTimes, chosen_curve
from eplb.decision.pace import PaceChange, pace_now
from eplb.errors import StoreError
from eplb.migration.build import Migration
from rebalance.controller.plans.planner_request import curve_of
from telemetry.state.events import Compiling, EnginePlans, Event, PlanEnd
from telemetry.state.holder import shown
from telemetry.state.live import LiveState
from telemetry.state.proposals import Proposal
from telemetry.state.runs import STEP_TIMES, RankState, RunBegan
from telemetry.state.store import StateStore

PHASES = ("aborted", "idle", "preload", "stage", "swap")  # of a serving rank, least done first
KEPT_COMMITS = 1000  # newest commits of a run: as many as the store keeps placements
OF_PROPOSALS = ("proposal", "commit", "restore")  # events after which others are open


class PlanFold:
    """Follows plans and migrations. Its owner serialises calls."""

    def __init__(self, history: History | None) -> None:
        self.decisions = DecisionLog(history)
        self.placement: Placement | None = None  # the committed one
        self.published: Migration | None = None  # the open one
        # Commits of the current run with their times, by generation.
        self._commits: dict[int, tuple[PlanEnd, float]] = {}
        self._paced: tuple[PaceChange, float] | None = None  # the latest judgement, and its time
        self._compiling: tuple[Compiling, float] | None = None  # the latest, and its time
        self._engine_plans = ""  # why an engine's own balancer plans, by the latest event
        self._proposals: list[Proposal] = []
        self._has_proposals = False  # new ones since the last read

    def note(self, event: Event) -> DecisionRecord | None:
        """Follow one more event; return the decision whose migration it ends."""
        self._has_proposals |= event.kind in OF_PROPOSALS
        match event.fact:
            case RunBegan():  # marks are placed by steps, and those of another run are others
                self._commits.clear()
                self._engine_plans = ""
            case EnginePlans(reason=why):
                self._engine_plans = why
            case PlanEnd(generation=int(generation)) as end if (
                event.kind == "commit" and end.plan_id > 0
            ):
                self._commits.setdefault(generation, (end, event.time))
                drop_oldest(self._commits, KEPT_COMMITS)
            case Compiling() as compiling:
                self._compiling = compiling, event.time
            case PaceChange() as change:
                self._paced = change, event.time
        return self.decisions.note(event)

    def read(self, store: StateStore) -> None:
        """Read what the store has of now.

        Raises:
            StoreError: it cannot be read.
        """
        committed = store.committed()
        self.placement = None if committed is None else committed.placement
        self.published = store.published()
        if self._has_proposals:
            self._has_proposals, self._proposals = False, store.proposals()

    def open_proposals(self, now: float) -> int:
        """Count the proposals that wait for a decision."""
        return sum(one.state == "open" and one.expires > now for one in self._proposals)

    def compiling(self, leader: str, now: float) -> str:
        """Say that the leader compiles kernels; "": it does not, or may have ended meanwhile."""
        compiling, since = self._compiling or (None, now)
        if compiling is None or compiling.state != "begun" or leader != shown(compiling.holder):
            return ""
        since_s = max(0.0, now - since)
        return f"the controller has been compiling kernels for {since_s:.0f} s: plans take longer"

    def marks(self, first_step_of: Mapping[int, int]) -> tuple[RebalanceMark, ...]:
        """Give the commits of this run.

        Args:
            first_step_of: first step that each generation served.
        """
        return tuple(
            RebalanceMark(at, end.plan_id, first_step_of.get(at), when, end.reason)
            for at, (end, when) in sorted(self._commits.items())
        )

    def state(
        self, states: Sequence[RankState], live: LiveState, model: ModelShape | None
    ) -> PlanState:
        """Put together what is known of plans.

        Args:
            states: the latest report of each rank.
            live: settings that are in force.
            model: of the run; None: there is no run.
        """
        rebalances = self.decisions.rebalances()
        budget = float(live.effective.get("step_time_budget", 0.0))
        return PlanState(
            generation=None if self.placement is None else self.placement.generation,
            phase=slowest_phase(states),
            migration=progress_of(self.published, states, model),
            pace=self._pace(budget, states),
            expert_curve=_expert_curve(live.text("curve"), states),
            decisions=self.decisions.decisions(),
            last_rebalance=rebalances[0] if rebalances else None,
            engine_plans=self._engine_plans,
        )

    def _pace(self, budget: float, states: Sequence[RankState]) -> PaceView:
        """The pace of the next migration, as the controller would give it now."""
        latest, changed = (None, None) if self._paced is None else self._paced
        is_measured = any(STEP_TIMES in one.detail for one in states)
        part, reason = pace_now(budget, latest, is_measured=is_measured)
        return PaceView(part, reason, budget, latest, changed)


def _expert_curve(asked: str, states: Sequence[RankState]) -> str:
    """Where the controller has the curve of the experts' time from, as it would now."""
    measured: list[ExpertTimes] = []
    for state in states:
        with suppress(StoreError):  # of another version: the rank's other figures are shown
            measured += filter(None, [state.expert_times])
    _, source = chosen_curve(curve_of(asked), measured)
    return source


def slowest_phase(states: Iterable[RankState]) -> str:
    """Return the phase of the rank that is furthest behind on the newest plan; idle if none is."""
    at_work = [state for state in states if state.plan_id]
    if not at_work:
        return "idle"
    newest = max(state.plan_id for state in at_work)
    phases = [state.phase for state in at_work if state.plan_id == newest]
    return min(phases, key=lambda phase: PHASES.index(phase) if phase in PHASES else len(PHASES))


def progress_of(
    migration: Migration | None, states: Iterable[RankState], model: ModelShape | None
) -> MigrationProgress | None:
    """Return how far the ranks are with the open migration."""
    if migration is None:
        return None
    at_work = [state for state in states if state.plan_id == migration.plan_id]
    applied, total = min((one.applied for one in at_work), default=0), len(migration.transactions)
    # Experts staged, where ranks count them, else whole transactions on the slowest rank.
    to_stage = sum(one.figures.to_stage or 0 for one in at_work)
    if to_stage and any(one.figures.staged is not None for one in at_work):
        staged = sum(one.figures.staged or 0 for one in at_work) / to_stage
    else:
        prepared = min((one.prepared for one in at_work), default=0)
        staged = prepared / total if total else 1.0
    staged = min(1.0, staged)
    return MigrationProgress(
        plan_id=migration.plan_id,
        base_generation=migration.base.generation,
        target_generation=migration.target.generation,
        num_transactions=total,
        applied=applied,
        num_moves=len(migration.moves),
        staged_part=staged,
        layers=tuple(
            model.layer_ids[layer] if model else layer
            for txn in migration.transactions
            for layer in txn.layers
        ),
        fraction=(staged + applied / total) / 2 if total else 1.0,
    )
