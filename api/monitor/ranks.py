"""Ranks: their latest reports and how old these are, who makes the least progress, the group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from api.monitor.counts import Tally
from api.monitor.membership import membership_of
from api.monitor.state import (
    ABSENT,
    GONE,
    JOINING,
    RETIRED,
    Death,
    GroupState,
    MovedState,
    ProgressState,
    RankView,
)
from eplb.core.placement import Placement
from eplb.core.topology import Topology
from eplb.migration.membership import leavers
from rebalance.controller.plans.planner_request import cordons_in_force
from telemetry.state.live import LiveState
from telemetry.state.membership import MembershipChange
from telemetry.state.runs import RankState, RunInfo
from telemetry.state.store import StateStore


class RankFold:
    """Follows the ranks of a deployment. Its owner serialises calls."""

    def __init__(self) -> None:
        self.states: list[RankState] = []  # of the current run
        self._step_at: tuple[int, float | None] = (-1, None)  # highest step, when it was seen anew
        self._change: MembershipChange | None = None  # the latest operation on the ranks
        self._epoch = 0
        self._ready: list[int] = []  # ranks that wait to be admitted

    def begin_run(self) -> None:
        """Note another run, of which nothing was read."""
        self.states, self._step_at = [], (-1, None)

    def read(self, store: StateStore) -> None:
        """Read what changes the group.

        Raises:
            StoreError: the store cannot be read.
        """
        self._change, self._epoch = store.membership_change(), store.epoch()
        self._ready = [one.rank for one in store.joiners()]

    def read_reports(self, store: StateStore, run: str, now: float) -> None:
        """Read the reports of the ranks of a run, and note whether their steps advance.

        Raises:
            StoreError: the store cannot be read.
        """
        self.states = store.rank_states(run)
        step = max((state.step for state in self.states), default=-1)
        known, _ = self._step_at
        if step != known:  # the first sight of them proves nothing
            self._step_at = (step, now if known >= 0 else None)

    def sample_every_s(self, info: RunInfo | None) -> float:
        """About how long a rank takes to its next sample: its window, and its way to the store."""
        if info is None:
            return 0.0
        step_ms = max((one.figures.step_ms or 0.0 for one in self.states), default=0.0)
        window_s = info.window_seconds or info.window_steps * step_ms / 1e3
        return window_s + max((state.report_every_s for state in self.states), default=0.0)

    def state(
        self,
        topology: Topology | None,
        placement: Placement | None,
        live: LiveState,
        death: Death | None,
        now: float,
        answered_s: float,
    ) -> GroupState:
        """Put together which ranks serve, and how.

        Args:
            topology: of the run; None: no run has begun.
            placement: the committed one.
            live: settings that are in force.
            death: the latest end of ranks.
            now: seconds since the epoch.
            answered_s: for how long the store has answered again.
        """
        ranks, membership = tuple[RankView, ...](), None
        if topology is not None:
            ranks = tuple(self._views(topology, live, now, answered_s))
            membership = membership_of(
                topology, placement, self._change, self._epoch, live, self._ready, now
            )
        silent = (view for view in ranks if not view.is_alive and view.phase not in ABSENT)
        return GroupState(
            ranks=ranks,
            silent_ranks=tuple(view.rank for view in silent),
            step=max((view.step for view in ranks), default=0),
            membership=membership,
            death=death,
        )

    def progress(self, now: float, answered_s: float) -> ProgressState:
        """Say which step or busy thread made the least progress, and whether steps advance."""
        age_s, of, thread = _oldest_progress(self.states, now, answered_s)
        stepped = self._step_at[1]
        return ProgressState(
            progress_age_s=age_s,
            progress_of=of,
            progress_thread=thread,
            step_age_s=None if stepped is None else max(0.0, now - stepped),
        )

    def moved(self, of_ranks: Tally) -> MovedState:
        """Say what migrations have moved.

        Args:
            of_ranks: the counters of these ranks.
        """
        pauses = (pause for state in self.states for pause in state.figures.swap_pauses_ms or ())
        return MovedState(
            bytes_by_source={k[1]: n for k, n in of_ranks.items() if k[0] == "bytes_by_source"},
            experts_moved=of_ranks[("experts_moved",)],
            swap_pauses_ms=tuple(pauses),
        )

    def _views(
        self, topology: Topology, live: LiveState, now: float, answered_s: float
    ) -> Iterator[RankView]:
        state_of = {state.rank: state for state in self.states}
        wanted = None if self._change is None else self._change.should_serve
        cordons = cordons_in_force(live.text("cordons"), leavers(wanted, topology))
        for rank in range(topology.num_ranks):
            state, cordon = state_of.get(rank), cordons.get(rank)
            if state is None:
                phase = "silent" if topology.alive[rank] else _absent(rank, self._change)
                yield RankView(rank, 0, 0, phase, False, None, None, "", cordon=cordon)
                continue
            age_s = max(0.0, now - state.time)
            yield RankView(
                rank=rank,
                step=state.step,
                generation=state.generation,
                phase=state.phase,
                is_alive=min(age_s, answered_s) <= state.silent_after_s,
                age_s=age_s,
                step_ms=state.figures.step_ms,
                wait_ms=state.figures.wait_ms,
                has_ended=bool(state.figures.has_ended),
                frozen=state.frozen,
                ahead_s=state.clock_offset_s,
                silent_after_s=state.silent_after_s,
                cordon=cordon,
            )


def _absent(rank: int, change: MembershipChange | None) -> str:
    """Return the phase of a rank that does not serve."""
    if change is None or rank in change.should_serve:
        is_new = change is not None and not change.ended and rank not in change.before
        return JOINING if is_new else GONE
    return RETIRED


def _oldest_progress(
    states: Sequence[RankState], now: float, answered_s: float
) -> tuple[float | None, str, str]:
    """Give the longest time without progress of a step or busy thread, where it is, and which."""
    ages = [
        (
            max(0.0, min(now - state.time, answered_s) - state.report_every_s)
            + state.progress_age_s,
            f"rank {state.rank}, {state.progress_of or 'the step'}",
            state.progress_thread,
        )
        for state in states
    ]
    return max(ages, key=lambda age: age[0], default=(None, "", ""))
