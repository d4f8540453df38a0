"""The verdict on a deployment: serving, degraded, stopped or blind, with its reasons.

One list of findings has all rules. The verdict of the page, of ``eplb status`` and of the metrics
is the worst finding; readiness is the worst of those that keep requests away; the alerts rest on
the metric of the verdict; anomalies are the findings over time. Pure: what it judges is read
before.

    stopped   tokens were served, and none are now
    blind     whether tokens are served cannot be known
    degraded  tokens are served, and something is wrong
    serving   nothing is wrong but what costs speed alone; a pause by an operator is no fault
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import takewhile
from typing import Literal

from api.monitor.snapshot import RankView, Snapshot
from api.processes.supervision import ProcessState
from eplb.fitting import Cordon
from rebalance.controller.open_migration import SWITCHED_OFF
from telemetry.state.events import OUTCOME_OF_EVENT, plan_end

CLOCK_TOLERANCE_S = 1.0
STALLED_AFTER_S = 30.0  # without a step or a token
NAMED_RANKS = 8  # more are given as stretches
# As in the alerts EplbUnbalanced and EplbRebalancesFail.
UNBALANCED, UNBALANCED_S = 1 / 0.7, 600.0  # imbalance, and for how long
FAILED, FAILED_S = 3, 1800.0  # more migrations than that, within so long
INTERVALS = 3.0  # of samples; a deployment that samples seldom is not stopped between two


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
    "no-tokens",
    "no-progress",
    "no-leader",
    "rank-uncounted",
    "process-down",
    "rank-frozen",
    "unbalanced",
    "migrations-fail",
]


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong."""

    kind: FindingKind
    grade: Grade
    text: str
    is_ready: bool = False  # requests may come nevertheless
    ranks: tuple[int, ...] = ()  # that it is about
    subject: str = ""  # the process that it is about; "": ranks, or the deployment
    since: float | None = None  # seconds since the epoch; None: not known


@dataclass(frozen=True)
class Verdict:
    """How a deployment stands, in one word and one sentence."""

    grade: Grade
    reason: str  # of the worst finding, or what serves
    problems: tuple[str, ...]  # every finding that degrades it, the worst first
    findings: tuple[Finding, ...] = ()  # every one, the worst first

    @property
    def line(self) -> str:
        """The verdict as the first line of a view."""
        return f"{self.grade}: {self.reason}"


@dataclass(frozen=True)
class Around:
    """What the snapshot does not know: who leads, and whether the store answers."""

    why_no_leader: str = ""  # "": one leads
    unread_s: float = 0.0  # since the store was last read
    unread_why: str = ""  # "": the store answers
    turn_age_s: float | None = None  # since the last turn of a controller; None: there was none


def verdict(
    seen: Snapshot, around: Around | None = None, stalled_after_s: float = STALLED_AFTER_S
) -> Verdict:
    """Judge a deployment.

    Args:
        seen: what the store holds.
        around: what the snapshot does not know.
        stalled_after_s: for how long there may be no token, step or progress of a busy thread.
    """
    found = sorted(findings(seen, around or Around(), stalled_after_s), key=_severity)
    if found and found[0].grade is not Grade.SERVING:
        problems = tuple(one.text for one in found if one.grade is not Grade.SERVING)
        return Verdict(found[0].grade, found[0].text, problems, tuple(found))
    notes = [] if seen.movement else [f"movement is off{_until(seen.until)}"]
    notes += ["observe is on"] if seen.observe else []
    for cordon, name in ((Cordon.CORDON, "cordoned"), (Cordon.DRAIN, "drained")):
        if views := [view for view in seen.ranks if view.cordon is cordon]:
            notes.append(f"{name} by order: {_named(views)}")
    ranks = f"{len(seen.ranks)} ranks serve, at step {seen.step}"
    return Verdict(Grade.SERVING, "; ".join([ranks, *notes]), (), tuple(found))


def _until(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return time.strftime(" until %Y-%m-%d %H:%M:%SZ", time.gmtime(seconds))


def unready(
    seen: Snapshot, stalled_after_s: float = STALLED_AFTER_S, around: Around | None = None
) -> str | None:
    """Return why requests should not come, the worst first; None when they should."""
    every = findings(seen, around or Around(), stalled_after_s)
    found = [one for one in every if not one.is_ready and one.grade is not Grade.SERVING]
    return min(found, key=_severity).text if found else None


def _severity(finding: Finding) -> int:
    return list(Grade).index(finding.grade)


def findings(seen: Snapshot, around: Around, stalled_after_s: float) -> Iterator[Finding]:
    """Give all that is wrong."""
    if around.unread_why:
        yield Finding(
            "store-unread",
            Grade.BLIND,
            f"the store has not been read for {around.unread_s:.0f} s: {around.unread_why}",
        )
    if seen.run is None:
        yield Finding("no-run", Grade.BLIND, "no run has begun, expected one")
    else:
        yield from _ranks(seen)
        yield from _tokens(seen, stalled_after_s)
        yield from _progress(seen, stalled_after_s)
    if around.why_no_leader:
        yield _leaderless(around, stalled_after_s)
    yield from _counters(seen)
    yield from _processes(seen, stalled_after_s)
    if frozen := [view for view in seen.ranks if view.frozen]:
        text = f"rank {frozen[0].rank} has migrations disabled: {frozen[0].frozen}"
        yield Finding("rank-frozen", Grade.DEGRADED, text, ranks=_numbers(frozen))
    yield from _unbalanced(seen)
    yield from _failures(seen)


def _leaderless(around: Around, stalled_after_s: float) -> Finding:
    """A deployment that never had a controller serves without one."""
    age_s = around.turn_age_s
    if age_s is None or age_s <= stalled_after_s:
        return Finding("no-leader", Grade.DEGRADED, around.why_no_leader, is_ready=True)
    text = f"{around.why_no_leader}; the last turn of one is {age_s:.0f} s old"
    return Finding("no-leader", Grade.DEGRADED, text)


def _ranks(seen: Snapshot) -> Iterator[Finding]:
    if ahead := [view for view in seen.ranks if view.ahead_s > CLOCK_TOLERANCE_S]:
        most_s = max(view.ahead_s for view in ahead)
        yield Finding(
            "clocks-differ",
            Grade.DEGRADED,
            f"rank {_named(ahead)}: reports are dated {most_s:.0f} s ahead of this host's clock, "
            f"expected at most {CLOCK_TOLERANCE_S:g} s: synchronise the clocks (NTP); samples that "
            "are 60 s ahead are refused",
            is_ready=True,
            ranks=_numbers(ahead),
        )
    if not seen.silent_ranks:
        return
    silent = [view for view in seen.ranks if not view.is_alive]
    limit_s = max(view.silent_after_s for view in silent)
    yield Finding(
        "rank-silent",
        Grade.BLIND if len(silent) == len(seen.ranks) else Grade.DEGRADED,
        f"silent ranks: {_named(silent)}, expected a report from all {len(seen.ranks)} "
        f"within {limit_s:g} s; a clock that is behind looks the same (eplb check)",
        ranks=_numbers(silent),
        since=_oldest(seen, silent),
    )


def _numbers(views: list[RankView]) -> tuple[int, ...]:
    return tuple(view.rank for view in views)


def _oldest(seen: Snapshot, silent: list[RankView]) -> float | None:
    """When the first of them reported last; None: one of them never did."""
    ages = [view.age_s for view in silent if view.age_s is not None]
    return seen.time - max(ages) if len(ages) == len(silent) else None


def _named(views: list[RankView]) -> str:
    ranks = [view.rank for view in views]
    return ", ".join(map(str, ranks) if len(ranks) <= NAMED_RANKS else _stretches(ranks))


def _stretches(ranks: list[int]) -> Iterator[str]:
    """Ranks in ascending order as stretches: 0-7, 12."""
    first = before = ranks[0]
    for rank in [*ranks[1:], None]:
        if rank != before + 1:
            yield str(first) if first == before else f"{first}-{before}"
            first = rank if rank is not None else before
        before = rank if rank is not None else before


def _tokens(seen: Snapshot, stalled_after_s: float) -> Iterator[Finding]:
    """Tokens by the samples of the ranks and, where a process supervises ranks, by their steps."""
    if seen.death is not None and seen.death.time > (seen.token_time or 0.0):
        age_s, text = max(0.0, seen.time - seen.death.time), seen.death.text
        what = f"no token since {age_s:.0f} s ago: {text}"
        yield Finding("no-tokens", Grade.STOPPED, what, since=seen.death.time)
        return
    limit_s = max(stalled_after_s, INTERVALS * seen.sample_every_s)
    steps_s = seen.supervision.token_age_s
    if steps_s is not None and steps_s > stalled_after_s:
        text = f"no step of all ranks for {steps_s:.0f} s, expected within {stalled_after_s:g} s"
        yield Finding("no-tokens", Grade.STOPPED, text, since=seen.time - steps_s)
        return
    if len(seen.silent_ranks) == len(seen.ranks):
        return  # what they do not report cannot be judged, and that is a finding already
    if seen.token_time is None:
        age_s = seen.time - (seen.started or seen.time)
        what = "no token was counted" if seen.sample_age_s is not None else "no load was reported"
        text = (
            f"{what} since the run began {age_s:.0f} s ago, expected within {limit_s:g} s: "
            "no request came, or the dispatcher does not count"
        )
        grade = Grade.DEGRADED if age_s <= limit_s else Grade.BLIND
        yield Finding("no-tokens", grade, text, is_ready=True, since=seen.started)
        return
    age_s = seen.time - seen.token_time
    if age_s <= limit_s:
        return
    late = f"no token for {age_s:.0f} s, expected within {limit_s:g} s"
    if seen.step_age_s is not None and seen.step_age_s <= stalled_after_s:
        text = f"{late}, while steps advance: no request came, or counters are missing"
        grade = Grade.BLIND
    else:
        grade, text = Grade.STOPPED, f"{late}; no step was seen either"
    yield Finding("no-tokens", grade, text, is_ready=True, since=seen.token_time)


def _progress(seen: Snapshot, stalled_after_s: float) -> Iterator[Finding]:
    age_s = seen.progress_age_s
    if age_s is None or age_s <= stalled_after_s:
        return
    text = f"no progress for {age_s:.1f} s, expected at most {stalled_after_s:g} s"
    # A rank that hangs in its step holds all others up; another thread holds migrations up.
    is_step = seen.progress_of.partition(", ")[2].startswith(("step", "the step"))
    is_stop = is_step and not seen.silent_ranks
    grade = Grade.STOPPED if is_stop else Grade.DEGRADED
    what = f"{text}: {seen.progress_of}"
    yield Finding("no-progress", grade, what, since=seen.time - age_s)


def _counters(seen: Snapshot) -> Iterator[Finding]:
    if seen.uncounted_ranks:
        yield Finding(
            "rank-uncounted",
            Grade.DEGRADED,
            f"rank {', '.join(map(str, seen.uncounted_ranks))}: the counters stay at zero while "
            "those of other ranks grow, expected tokens for the experts that it holds: its "
            "dispatcher does not count",
            is_ready=True,
            ranks=seen.uncounted_ranks,
        )


def _processes(seen: Snapshot, stalled_after_s: float) -> Iterator[Finding]:
    for one in seen.supervision.processes:
        if one.state is ProcessState.DEGRADED:
            text = f"{one.name} is down, its restart budget is used up: {one.reason}"
            yield Finding("process-down", Grade.DEGRADED, text, subject=one.name)
        elif one.state is ProcessState.BACK_OFF:
            text = f"{one.name} is down and will be restarted: {one.reason}"
            yield Finding("process-down", Grade.DEGRADED, text, is_ready=True, subject=one.name)
        elif one.is_late and one.report_age_s is not None:
            text = f"no report from {one.name} for {one.report_age_s:.1f} s"
            what = f"{text}: it hangs or is not running"
            yield Finding("process-down", Grade.DEGRADED, what, subject=one.name)
    lease_age_s = seen.supervision.lease_age_s
    if lease_age_s is not None and lease_age_s > stalled_after_s:
        yield Finding(
            "no-leader",
            Grade.DEGRADED,
            f"no controller has renewed its lease for {lease_age_s:.1f} s, "
            f"expected within {stalled_after_s:g} s",
        )


def _unbalanced(seen: Snapshot) -> Iterator[Finding]:
    """Windows without tokens are no evidence; those in which experts move are."""
    scores = [one for one in reversed(seen.series) if one.is_complete and one.measured is not None]
    above = list(takewhile(lambda one: (one.measured or 0.0) > UNBALANCED, scores))
    since = above[-1].time if above else None
    if since is None or seen.time - since < UNBALANCED_S:
        return
    yield Finding(
        "unbalanced",
        Grade.SERVING,
        f"imbalance is {above[0].measured:.2f}, and above {UNBALANCED:.2f} for "
        f"{seen.time - since:.0f} s: see the reason of the last decision",
        is_ready=True,
        since=since,
    )


def _failures(seen: Snapshot) -> Iterator[Finding]:
    """Migrations that were dropped without an order of an operator."""
    ended = ((event, plan_end(event)) for event in reversed(seen.events))
    failed = [
        (event.time, end.reason)
        for event, end in ended
        if end is not None
        and OUTCOME_OF_EVENT[event.kind] != "committed"
        and end.reason != SWITCHED_OFF
        and seen.time - event.time <= FAILED_S
    ]
    if len(failed) > FAILED:
        text = (
            f"{len(failed)} migrations failed within {FAILED_S / 60:.0f} minutes, expected "
            f"{FAILED} at most; the latest: {failed[0][1]}"
        )
        yield Finding("migrations-fail", Grade.SERVING, text, is_ready=True, since=failed[-1][0])
