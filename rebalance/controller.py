"""The one that decides: window -> plan -> publish -> watch the commit.

It runs in a process of its own and remembers nothing that the store does not: killed at any moment
and started again, it folds the samples anew and goes on. It never speaks to a rank, and it commits
nothing: what serves is written by the ranks, after the swap.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from eplb.errors import EplbError, HistoryError, StaleGeneration, StoreError
from eplb.gate import CostModel, Decision
from eplb.load import LoadHistory
from eplb.migration import Migration, Pace, build_migration
from eplb.model import ModelShape
from eplb.placement import Placement
from eplb.plan import Plan, plan
from eplb.policies import policy_named
from eplb.problem import Budget
from eplb.records import model_from_dict, topology_from_dict
from eplb.spares import compact, expand
from eplb.topology import Topology
from rebalance.open_plan import OpenPlan
from telemetry.drift import LOOK_BACK, planning_history
from telemetry.store import LoadStore, RunInfo, Task
from telemetry.windows import Window, WindowFolder, history

PRUNE_EVERY_S = 300.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ControllerSettings:
    """How the controller decides."""

    policy: str = "auto"
    plan_windows: int = 4  # complete windows that a plan looks at, fewer after a change of load
    cost: CostModel = field(default_factory=CostModel)
    budget: Budget = field(default_factory=Budget)
    pace: Pace = field(default_factory=Pace)
    seed: int = 0
    migration_deadline_s: float = 60.0  # an open migration older than this is withdrawn
    keep_samples_s: float = 3600.0  # older ones are pruned; plans look back minutes at most
    keep_every_windows: int = 8  # an unchanged KEEP is written down once in so many windows

    @property
    def spare_slots(self) -> int:
        """EMPTY slots that every rank keeps in each layer; no policy plans on them."""
        return self.pace.spare_slots


@dataclass(frozen=True)
class Group:
    """The ranks that serve now, and their load as far as it was folded."""

    run: RunInfo
    model: ModelShape
    topology: Topology
    folder: WindowFolder

    def complete_windows(self) -> list[Window]:
        """Return the windows that every rank reported, oldest first."""
        return [window for window in self.folder.windows() if window.is_complete]


class Controller:
    """Plans for one deployment. Call ``turn`` whenever the store changed, or ``run`` for ever.

    Raises:
        ConfigError: the settings name a policy that is not there.
    """

    def __init__(
        self,
        store: LoadStore,
        settings: ControllerSettings,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        policy_named(settings.policy)
        self._store, self._settings, self._clock = store, settings, clock
        self._group: Group | None = None
        self._cursor = 0
        self._planned_window = -1  # newest window that was planned on
        self._noted_window = -1  # newest window whose KEEP was written down
        self._noted_decision = ""
        self._how: dict[str, Any] = {}  # how the latest plan was made: its time, its windows
        self._open = OpenPlan(store, settings.migration_deadline_s, clock)
        self._noted_errors: set[str] = set()
        self._pruned_at = clock()
        self._end_abandoned_tasks()

    def run(self, is_stopping: Callable[[], bool], *, poll_s: float = 0.2) -> None:
        """Work until ``is_stopping``."""
        version = -1
        while not is_stopping():
            version = self._store.wait(version, poll_s)
            self.turn()

    def turn(self) -> None:
        """Do what is due now: fold samples, watch a migration, work off tasks, plan, prune."""
        group = self._follow_run()
        if group is None:
            return
        self._fold(group)
        open_migration = self._store.published()
        if open_migration is not None:
            states = self._store.rank_states(group.run.run)
            self._open.watch(open_migration, states, self._served_weights())
        self._work_off_tasks(group)
        # Asked again: a task may have published meanwhile, and a second MOVE would be noted.
        if open_migration is None and self._store.published() is None:
            self._plan_if_due(group)
        self._prune_if_due()

    # -- load in

    def _follow_run(self) -> Group | None:
        info = self._store.current_run()
        if info is None or (self._group is not None and self._group.run.run == info.run):
            return self._group
        topology = topology_from_dict(dict(info.topology))
        model = model_from_dict(dict(info.model))
        folder = WindowFolder(info.window_steps, topology.num_ranks, model.num_experts)
        self._group = Group(info, model, topology, folder)
        self._cursor, self._planned_window, self._noted_window = 0, -1, -1
        self._noted_errors.clear()
        return self._group

    def _fold(self, group: Group) -> None:
        while arrived := self._store.samples(group.run.run, after=self._cursor):
            for self._cursor, sample in arrived:
                try:
                    group.folder.add(sample)
                except HistoryError as exc:
                    # Its window stays incomplete. Were it to end this process, so it would the
                    # next one, which folds the same samples.
                    self._note_error("load", exc)

    def _prune_if_due(self) -> None:
        now = self._clock()
        if now - self._pruned_at >= PRUNE_EVERY_S:
            self._pruned_at = now
            self._store.prune(now - self._settings.keep_samples_s)

    def _note_error(self, where: str, exc: EplbError) -> None:
        """Log it, and make the first of its kind in a run an event."""
        log.warning("%s: %s", where, exc)
        if where not in self._noted_errors:
            self._noted_errors.add(where)
            self._store.add_event("error", {"where": where, "message": str(exc)})

    def _served_weights(self) -> int | None:
        """Version of the weights that every rank reports; None while they differ."""
        assert self._group is not None, "asked about ranks that serve"
        states = self._store.rank_states(self._group.run.run)
        versions = {int(state.detail.get("weights_version", 0)) for state in states} or {0}
        return versions.pop() if len(versions) == 1 else None

    # -- plans

    def _plan_if_due(self, group: Group) -> None:
        try:
            self._plan_on_new_window(group)
        except StoreError:
            raise
        except EplbError as exc:  # no plan for this load; the next window is another
            self._note_error("plan", exc)

    def _plan_on_new_window(self, group: Group) -> None:
        windows = group.complete_windows()
        if not windows or windows[-1].index <= self._planned_window:
            return
        self._planned_window = windows[-1].index
        committed = self._store.committed()
        past = planned_on(windows, self._settings.plan_windows)
        if committed is None or past is None:
            return
        proposal = self._plan(group, past, committed.placement, self._settings.policy)
        control = self._store.control()
        if proposal.decision is Decision.KEEP:
            self._note_keep(proposal, windows[-1].index)
        elif control.observe or not control.movement:
            why = "observe only" if control.observe else "movement is switched off"
            self._note(proposal, windows[-1].index, held_back=why)
        else:
            self._note(proposal, windows[-1].index)
            self._publish(group, proposal, committed.placement)

    def _plan(self, group: Group, past: LoadHistory, current: Placement, policy: str) -> Plan:
        topology, spare_slots = group.topology, self._settings.spare_slots
        if spare_slots:
            current, topology = compact(current, topology, spare_slots)
        begun = time.perf_counter()
        proposal = plan(
            past,
            topology,
            model=group.model,
            current=current,
            budget=self._settings.budget,
            policy=policy,
            cost=self._settings.cost,
            seed=self._settings.seed,
        )
        took_s = round(time.perf_counter() - begun, 4)
        self._how = {"plan_seconds": took_s, "windows": past.num_windows}
        return proposal

    def _publish(self, group: Group, proposal: Plan, current: Placement) -> Migration | None:
        """Offer the way from ``current``, which the plan was made for, to the plan's target."""
        target, spare_slots = proposal.target, self._settings.spare_slots
        if spare_slots:
            target = expand(target, current, group.topology, spare_slots)
        served = self._served_weights()
        if served is None:
            log.info(
                "generation=%d not published: ranks serve different weights", target.generation
            )
            return None
        migration = build_migration(
            current,
            target,
            group.topology,
            plan_id=self._store.next_plan_id(),
            pace=self._settings.pace,
            weights_version=served,
        )
        try:
            self._store.publish(migration)
        except StaleGeneration as exc:
            log.info("plan_id=%d not published: %s", migration.plan_id, exc)
            return None
        return migration

    def _note_keep(self, proposal: Plan, window: int) -> None:
        """Write a KEEP down when it is news: a first one, or after a while."""
        is_due = window - self._noted_window >= self._settings.keep_every_windows
        if is_due or self._noted_decision != proposal.decision.value:
            self._note(proposal, window)

    def _note(
        self, proposal: Plan, window: int, *, held_back: str = "", trigger: str = "load"
    ) -> None:
        self._noted_window, self._noted_decision = window, proposal.decision.value
        reason = f"{proposal.reason} (not moved: {held_back})" if held_back else proposal.reason
        detail = summary(proposal) | {"reason": reason, "window": window, "trigger": trigger}
        detail |= self._how
        self._store.add_event("plan", detail)
        log.info(
            "generation=%d decision=%s reason=%r",
            proposal.base_generation,
            proposal.decision.value,
            reason,
        )

    # -- tasks

    def _end_abandoned_tasks(self) -> None:
        """Fail what an earlier controller was at when it died: it may be what killed it."""
        for task in self._store.running():
            reason = "the controller ended while it worked on this, expected it to be asked again"
            self._store.finish(task.id, "failed", {"error": reason})

    def _work_off_tasks(self, group: Group) -> None:
        while (task := self._store.claim()) is not None:
            try:
                result = self._work_off(group, task)
            except EplbError as exc:
                self._store.finish(task.id, "failed", {"error": str(exc)})
            else:
                self._store.finish(task.id, "done", result)

    def _work_off(self, group: Group, task: Task) -> Mapping[str, Any]:
        if task.kind not in ("rebalance", "explain"):
            raise EplbError(
                f"task {task.id} is of kind {task.kind!r}, expected 'rebalance' or 'explain'"
            )
        committed = self._store.committed()
        past = planned_on(group.complete_windows(), self._settings.plan_windows)
        if committed is None or past is None:
            raise EplbError("no complete window of load yet, expected at least one to plan on")
        policy = str(task.request.get("policy") or self._settings.policy)
        proposal = self._plan(group, past, committed.placement, policy)
        if task.kind == "explain":
            layer, expert = (int(task.request[name]) for name in ("layer", "expert"))
            return proposal.explain(layer, expert).to_dict()
        result = proposal.to_dict() | {"dry_run": bool(task.request.get("dry_run", True))}
        if result["dry_run"] or proposal.decision is Decision.KEEP:
            return result | {"published": False}
        self._refuse_if_held_back()
        self._note(proposal, self._planned_window, trigger="request")
        migration = self._publish(group, proposal, committed.placement)
        return result | {
            "published": migration is not None,
            "plan_id": migration.plan_id if migration else None,
        }

    def _refuse_if_held_back(self) -> None:
        control = self._store.control()
        if not control.movement:
            raise EplbError("movement is switched off, expected it on for a rebalance")
        if control.observe:
            raise EplbError("this deployment is observed only, expected observe off")
        if self._store.published() is not None:
            raise EplbError("a migration is open already, expected none")


def planned_on(windows: Sequence[Window], last: int) -> LoadHistory | None:
    """The latest complete windows, none from before a sudden change of load; None without any."""
    seen = history(windows, last=max(last, LOOK_BACK))
    return planning_history(seen, last=last) if seen is not None else None


def summary(proposal: Plan) -> dict[str, Any]:
    """Give a plan as the detail of an event."""
    return {
        "decision": proposal.decision.value,
        "reason": proposal.reason,
        "policy": proposal.policy,
        "imbalance_before": round(proposal.before, 4),
        "imbalance_after": round(proposal.after, 4),
        "moves": proposal.num_moves,
        "bytes": proposal.num_moves * proposal.expert_bytes,
        "generation": proposal.base_generation,
    }
