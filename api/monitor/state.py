"""How a deployment stands: the one type that every view reads, and its parts.

``api/monitor/monitor.py`` makes a ``State``. It is the answer of ``GET /api/v1/state`` and of
``eplb status --json``; ``eplb status``, ``eplb top``, the page and the metrics show it. What is
large or grows with time has an answer of its own, and is a part of a ``Reading`` only.

Shapes:  L MoE layers, E experts, R ranks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf
from typing import Annotated, Literal

from api.monitor.membership import Membership
from api.processes.supervision import SupervisionView
from eplb.core.topology import Topology
from eplb.decision.pace import PaceChange
from eplb.declared import Meaning
from eplb.fitting import Cordon
from eplb.migration.build import Migration
from telemetry.load.folder import Window
from telemetry.state.events import Event, PlanDecision, PlanOutcome
from telemetry.state.live import LiveChange
from telemetry.state.runs import LEAST_SILENCE_S

EPOCH = "s since the epoch"
BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)  # upper bounds of the histograms


class Grade(StrEnum):
    """The verdicts, the worst first."""

    STOPPED = "stopped"
    BLIND = "blind"
    DEGRADED = "degraded"
    SERVING = "serving"


FindingKind = Literal[
    "store-unread",
    "no-run",
    "clocks-differ",
    "rank-silent",
    "rank-gone",
    "no-tokens",
    "no-progress",
    "no-leader",
    "rank-uncounted",
    "engine-plans",
    "process-down",
    "start-waits",
    "rank-frozen",
    "disk-full",
    "store-full",
    "audit-waits",
    "unbalanced",
    "migrations-fail",
]


@dataclass(frozen=True)
class Symptom:
    """One thing that is wrong."""

    kind: FindingKind
    grade: Grade
    text: str
    is_ready: bool = False  # requests may come nevertheless
    ranks: tuple[int, ...] = ()  # ranks that it is about
    subject: str = ""  # the process that it is about; "": ranks, or the deployment
    since: float | None = None  # seconds since the epoch; None: not known


@dataclass(frozen=True)
class WindowScore:
    """How even one window was, and how even it would have been without balancing."""

    index: int
    first_step: int
    last_step: int
    measured: Annotated[
        float | None,
        Meaning("imbalance: mean over layers of busiest rank over mean; null: no tokens"),
    ]
    contiguous: Annotated[
        float | None, Meaning("imbalance of the same tokens if experts lay on the ranks in order")
    ]
    generation: Annotated[int, Meaning("newest generation that served in the window")]
    is_complete: Annotated[bool, Meaning("every rank reported on the window")]
    is_migrating: Annotated[
        bool, Meaning("experts moved in the window, or part of an uncommitted plan served")
    ]
    time: Annotated[float | None, Meaning("time of its newest sample", unit=EPOCH)] = None


@dataclass(frozen=True)
class RebalanceMark:
    """A commit, and the first step that it served."""

    generation: int
    plan_id: int
    step: Annotated[int | None, Meaning("null: no sample of this generation has arrived")]
    time: Annotated[float, Meaning("time of the commit", unit=EPOCH)]
    reason: str


@dataclass(frozen=True)
class DecisionRecord:
    """What the controller decided on one plan and why, and the migration that followed."""

    id: Annotated[int, Meaning("id of the event that has the decision")]
    time: Annotated[float, Meaning("time of the decision", unit=EPOCH)]
    decision: Annotated[str, Meaning("MOVE, RESPLIT or KEEP", example="MOVE")]
    reason: str
    policy: str
    imbalance_before: Annotated[float | None, Meaning("imbalance of the load that was planned on")]
    imbalance_after: Annotated[float | None, Meaning("predicted imbalance")]
    moves: int
    bytes: int
    generation: Annotated[int, Meaning("generation that was planned on")]
    trigger: Annotated[str, Meaning("what made the plan due, `request` or `rollback`")] = ""
    actor: Annotated[str, Meaning("the controller, or the task of an operator")] = ""
    stage: Annotated[str, Meaning("stage of the rollout")] = ""
    num_uncovered: Annotated[
        int, Meaning("experts of all layers in fewer failure domains than `min_domains`")
    ] = 0
    pace_reason: Annotated[
        str, Meaning("reason of the pace of its migration; empty: nothing was published")
    ] = ""
    plan_id: Annotated[
        int | None, Meaning("plan id of its migration; null: nothing was published")
    ] = None
    target_generation: Annotated[int | None, Meaning("generation that the migration leads to")] = (
        None
    )
    offered: Annotated[float | None, Meaning("when it was published", unit=EPOCH)] = None
    ended: Annotated[float | None, Meaning("when it ended; null: open, or none", unit=EPOCH)] = None
    outcome: Annotated[
        PlanOutcome | None, Meaning("outcome of the migration; null: it is open, or there is none")
    ] = None
    end_reason: str | None = None
    gain_promised: Annotated[
        float | None, Meaning("promised reduction of imbalance, once the commit was judged")
    ] = None
    gain_realised: Annotated[float | None, Meaning("measured reduction of imbalance")] = None

    @classmethod
    def of(cls, event: Event, plan: PlanDecision | None = None) -> DecisionRecord:
        """Give the record of a decision; None: of a migration whose decision is not known."""
        if plan is None:
            return cls(event.id, event.time, "", "", "", None, None, 0, 0, 0)
        return cls(
            id=event.id,
            time=event.time,
            decision=plan.decision,
            reason=plan.reason,
            policy=plan.policy,
            imbalance_before=plan.imbalance_before,
            imbalance_after=plan.imbalance_after,
            moves=plan.moves,
            bytes=plan.bytes,
            generation=plan.generation,
            trigger=plan.trigger or "",
            actor=plan.actor or "",
            stage=plan.stage or "",
            num_uncovered=plan.num_uncovered,
            pace_reason=plan.pace_reason or "",
        )


@dataclass(frozen=True)
class PaceView:
    """The pace of the next migration, why, and the judgement that it follows from."""

    part: Annotated[float, Meaning("part of the deployment's own pace")] = 1.0
    reason: str = ""
    budget: Annotated[float, Meaning("`step_time_budget`; 0: the pace is fixed")] = 0.0
    latest: Annotated[
        PaceChange | None, Meaning("latest judgement, also under another budget; null: none")
    ] = None
    changed: Annotated[float | None, Meaning("time of that judgement", unit=EPOCH)] = None

    @property
    def text(self) -> str:
        """The pace and its reason, in words."""
        part = "" if self.part == 1 else f"{self.part:g} of "
        return f"{part}the deployment's own; {self.reason}"


@dataclass(frozen=True)
class MigrationProgress:
    """The open migration: how far the slowest rank is."""

    plan_id: int
    base_generation: int
    target_generation: int
    num_transactions: int
    applied: Annotated[int, Meaning("transactions that serve on every rank")]
    num_moves: int
    staged_part: Annotated[float, Meaning("part of the bytes that is staged, 0 to 1")]
    layers: Annotated[tuple[int, ...], Meaning("the model's layer numbers")]
    # Staging is one half, because what is staged does not serve.
    fraction: Annotated[float, Meaning("part that is done, 0 to 1")]


@dataclass(frozen=True)
class Death:
    """The latest end of ranks on record."""

    time: Annotated[float, Meaning("time of the event", unit=EPOCH)]
    text: str
    is_planned: Annotated[bool, Meaning("they were stopped on purpose")] = False


GONE = "gone"  # phase of a rank that died and that the others serve on without
RETIRED = "retired"  # the same of a rank that neither serves nor should
JOINING = "joining"  # the same of a rank that the open operation has asked for
ABSENT = (GONE, RETIRED, JOINING)  # they report nothing


@dataclass(frozen=True)
class RankView:
    """The latest report of one rank, and its age."""

    rank: int
    step: int
    generation: int
    phase: str
    is_alive: Annotated[bool, Meaning("it reported within `silent_after_s`")]
    age_s: Annotated[float | None, Meaning("age of its report; null: it never reported")]
    step_ms: Annotated[float | None, Meaning("median time of its latest steps")]
    frozen: Annotated[str, Meaning("why its migrations are disabled; empty: they are not")]
    ahead_s: Annotated[
        float,
        Meaning("time by which its host's clock is ahead of the store's; below 0: behind"),
    ] = 0.0
    silent_after_s: Annotated[
        float, Meaning("age of a report at which the rank counts as silent")
    ] = LEAST_SILENCE_S
    cordon: Annotated[Cordon | None, Meaning("order of an operator; see /api/v1/ranks")] = None
    wait_ms: Annotated[
        float | None,
        Meaning("of `step_ms`, the host's wait for exchanges: the slowest rank waits least"),
    ] = None
    has_ended: Annotated[bool, Meaning("it left its serving loop as it was asked")] = False


@dataclass(frozen=True)
class Leadership:
    """The controller that leads, or why there is none."""

    leader: Annotated[str, Meaning("process of the leader; empty: none leads")]
    lease_left_s: Annotated[float, Meaning("time until the lease expires without a renewal")]
    why_none: Annotated[str, Meaning("why none leads; empty: one leads")]
    # The leader renews its lease in its turns, at a third of the time to live, and nowhere else.
    turn_age_s: Annotated[
        float | None,
        Meaning("age of the lease's latest renewal by a controller; null: there was none"),
    ] = None
    led_s: Annotated[
        float, Meaning("time for which the leader has held the lease; 0: none leads")
    ] = 0.0
    compiling: Annotated[
        str, Meaning("that the leader compiles its kernels, and since when; empty: it does not")
    ] = ""


@dataclass(frozen=True, kw_only=True)
class State:
    """Everything at a glance."""

    verdict: Annotated[Grade, Meaning("stopped, blind, degraded or serving", example="serving")]
    reason: Annotated[str, Meaning("reason of the verdict, in one sentence")]
    problems: Annotated[
        tuple[str, ...], Meaning("all that is wrong, the worst first; empty: nothing is wrong")
    ]
    unread: Annotated[str, Meaning("why the answer is old; empty: the store answers")]
    store_full: Annotated[
        str, Meaning("why the store takes no changes, reports of ranks among them; empty: it does")
    ]
    deployment: str
    groups: Annotated[
        tuple[str, ...], Meaning("deployments of its EP groups; empty: it is one group")
    ]
    time: Annotated[float, Meaning("when the store was read", unit=EPOCH)]
    run: Annotated[str | None, Meaning("start of the ranks; null: they never started")]
    started: Annotated[float | None, Meaning("when the run began", unit=EPOCH)]
    step: Annotated[int, Meaning("step of the rank that is furthest ahead")]
    generation: Annotated[int | None, Meaning("generation of the committed placement")]
    controller: Leadership
    versions: Annotated[
        Mapping[str, str], Meaning("version of each component that serves, by component")
    ]
    num_layers: int
    layer_ids: Annotated[tuple[int, ...], Meaning("[L] numbers of the MoE layers in the model")]
    num_experts: int
    num_slots: int
    ranks: tuple[RankView, ...]
    node_of_rank: tuple[int, ...]
    membership: Annotated[
        Membership | None, Meaning("which ranks serve and should; null: no run has begun")
    ]
    silent_ranks: Annotated[tuple[int, ...], Meaning("ranks that never reported, or not lately")]
    uncounted_ranks: Annotated[
        tuple[int, ...], Meaning("ranks whose counters stay at zero while those of others grow")
    ]
    engine_plans: Annotated[
        str,
        Meaning("why an engine's own balancer plans in place of its plug-in; empty: it does not"),
    ]
    death: Annotated[Death | None, Meaning("latest end of ranks on record")]
    supervision: Annotated[
        SupervisionView,
        Meaning("state of supervised processes, where one process supervises others"),
    ]
    progress_age_s: Annotated[
        float | None,
        Meaning("time since the last progress of the step or thread that made the least"),
    ]
    progress_of: Annotated[str, Meaning("rank, thread and current work of that step or thread")]
    progress_thread: Annotated[
        str, Meaning("that thread: step, watcher, mover or commit writer; empty: not reported")
    ]
    step_age_s: Annotated[
        float | None, Meaning("time since the steps were last seen to advance; null: never seen")
    ]
    last_score: Annotated[WindowScore | None, Meaning("latest window that all ranks reported on")]
    token_age_s: Annotated[
        float | None, Meaning("time since the newest token of any run; null: there was none")
    ]
    token_time: Annotated[
        float | None,
        Meaning("time of the newest sample with a token, by the store's clock", unit=EPOCH),
    ]
    sample_age_s: Annotated[
        float | None, Meaning("age of the newest sample of the rank that is furthest behind")
    ]
    sample_every_s: Annotated[
        float, Meaning("time between two samples of a rank, about; 0: not known")
    ]
    phase: Annotated[str, Meaning("phase of the rank that is furthest behind")]
    migration: Annotated[MigrationProgress | None, Meaning("the open migration; null: none")]
    pace: PaceView
    expert_curve: Annotated[str, Meaning("source of the time of experts by tokens, for plans")]
    bytes_by_source: Annotated[
        Mapping[str, int], Meaning("bytes of moved experts by their source", unit="bytes")
    ]
    experts_moved: int
    swap_pauses_ms: Annotated[tuple[float, ...], Meaning("the latest swap pauses of every rank")]
    decisions: Annotated[tuple[DecisionRecord, ...], Meaning("the latest decisions, oldest first")]
    last_rebalance: Annotated[
        DecisionRecord | None, Meaning("decision of the latest migration; null: none is known")
    ]
    samples_stored: int
    samples_lost: int
    movement: Annotated[bool, Meaning("false: no weight moves")]
    observe: Annotated[bool, Meaning("true: plans are reported and not carried out")]
    until: Annotated[
        float | None, Meaning("when a pause ends by itself; null: it does not", unit=EPOCH)
    ]
    stage: Annotated[str, Meaning("stage of the rollout; empty: not known")]
    open_proposals: Annotated[int, Meaning("proposals that wait for a decision")]
    switched: Annotated[
        LiveChange | None, Meaning("who switched movement, when and why; null: nobody did")
    ]
    free_bytes: Annotated[
        int | None, Meaning("room on the disk of the state folder; null: not known", unit="bytes")
    ]
    audit_waiting: Annotated[
        int, Meaning("lines of the audit that its file could not take; the store has them")
    ]

    @property
    def members(self) -> tuple[RankView, ...]:
        """Ranks that serve, so that they should report."""
        return tuple(view for view in self.ranks if view.phase not in ABSENT)


@dataclass(frozen=True)
class Heat:
    """Load of the latest window: each rank and expert over the mean of its layer."""

    run: str | None
    window: Annotated[int | None, Meaning("index of the window; null: there is none")]
    ranks: Annotated[
        tuple[tuple[float, ...] | None, ...],
        Meaning("[L, R] rank load over mean; null for a layer without tokens"),
    ] = ()
    experts: Annotated[
        tuple[tuple[float, ...] | None, ...],
        Meaning("[L, E] expert load over mean; null for a layer without tokens"),
    ] = ()


@dataclass(frozen=True)
class Durations:
    """A histogram: how many took at most each of BUCKETS_S, and longer; and their sum."""

    counts: tuple[int, ...] = (0,) * (len(BUCKETS_S) + 1)  # not cumulative; the last is longer
    total_s: float = 0.0

    def plus(self, seconds: float) -> Durations:
        """Give the histogram with one more."""
        at = bisect_left(BUCKETS_S, seconds)
        counts = (*self.counts[:at], self.counts[at] + 1, *self.counts[at + 1 :])
        return Durations(counts, self.total_s + seconds)


@dataclass(frozen=True)
class Counts:
    """Counters over all runs."""

    tally: Mapping[tuple[str, ...], int]
    plan_s: Durations = Durations()
    rebalance_s: Durations = Durations()  # from offered to committed
    unserved_s: float = 0.0  # without tokens, in outages that ended
    serve_on_s: Mapping[str, float] = field(default_factory=dict)  # seconds of survivors, by stage

    def total(self, *name: str) -> int:
        """Give the count of a name and the values of its labels; 0: none was counted."""
        return self.tally.get(name, 0)

    def by_label(self, name: str) -> dict[tuple[str, ...], int]:
        """Give the counts of one name by the values of its labels."""
        return {key[1:]: count for key, count in self.tally.items() if key[0] == name}


@dataclass(frozen=True, eq=False)
class Reading:
    """What one look at the store has found: the state, and what has an answer of its own."""

    state: State
    series: tuple[WindowScore, ...]  # windows of this run, oldest first
    marks: tuple[RebalanceMark, ...]  # commits of this run
    rebalances: tuple[DecisionRecord, ...]  # decisions of the migrations of all runs, newest first
    events: tuple[Event, ...]  # the latest, oldest first
    latest: Window | None  # the newest one that was scored
    scale: Topology | None  # ranks of that window; those that held no expert are drained
    counts: Counts  # only metrics show them
    open_migration: Migration | None = None
    is_read: bool = True  # false: the store was never read, and nothing that it has is known
    answered_s: float = inf  # since the store answered again: nobody can report to one that fails
    findings: tuple[Symptom, ...] = ()  # all that is wrong, the worst first
