"""The verdict on a deployment: serving, degraded, stopped or blind, with its reasons.

One list of findings has all rules. The verdict of the page, of ``eplb status`` and of the metrics
is the worst finding; readiness is the worst of those that keep requests away; the alerts rest on
the metric of the verdict. Pure: what it judges is read before.

    stopped   tokens were served, and none are now
    blind     whether tokens are served cannot be known
    degraded  tokens are served, and something is wrong
    serving   nothing is wrong; a pause by an operator is no fault
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from api.monitor.snapshot import RankView, Snapshot
from api.processes.supervision import ProcessState

CLOCK_TOLERANCE_S = 1.0
STALLED_AFTER_S = 30.0  # without a step or a token
NAMED_RANKS = 8  # more are given as stretches
INTERVALS = 3.0  # of samples; a deployment that samples seldom is not stopped between two


class Grade(StrEnum):
    """The verdicts, the worst first."""

    STOPPED = "stopped"
    BLIND = "blind"
    DEGRADED = "degraded"
    SERVING = "serving"


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong."""

    grade: Grade
    text: str
    is_ready: bool = False  # requests may come nevertheless


@dataclass(frozen=True)
class Verdict:
    """How a deployment stands, in one word and one sentence."""

    grade: Grade
    reason: str  # of the worst finding, or what serves
    problems: tuple[str, ...]  # every finding, the worst first

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
    if found:
        return Verdict(found[0].grade, found[0].text, tuple(one.text for one in found))
    notes = [] if seen.movement else ["movement is off"]
    notes += ["observe is on"] if seen.observe else []
    ranks = f"{len(seen.ranks)} ranks serve, at step {seen.step}"
    return Verdict(Grade.SERVING, "; ".join([ranks, *notes]), ())


def unready(
    seen: Snapshot, stalled_after_s: float = STALLED_AFTER_S, around: Around | None = None
) -> str | None:
    """Return why requests should not come, the worst first; None when they should."""
    every = findings(seen, around or Around(), stalled_after_s)
    found = [one for one in every if not one.is_ready]
    return min(found, key=_severity).text if found else None


def _severity(finding: Finding) -> int:
    return list(Grade).index(finding.grade)


def findings(seen: Snapshot, around: Around, stalled_after_s: float) -> Iterator[Finding]:
    """Give all that is wrong."""
    if around.unread_why:
        yield Finding(
            Grade.BLIND,
            f"the store has not been read for {around.unread_s:.0f} s: {around.unread_why}",
        )
    if seen.run is None:
        yield Finding(Grade.BLIND, "no run has begun, expected one")
    else:
        yield from _ranks(seen)
        yield from _tokens(seen, stalled_after_s)
        yield from _progress(seen, stalled_after_s)
    if around.why_no_leader:
        yield _leaderless(around, stalled_after_s)
    yield from _counters(seen)
    yield from _processes(seen, stalled_after_s)
    frozen = next((view for view in seen.ranks if view.frozen), None)
    if frozen is not None:
        text = f"rank {frozen.rank} has migrations disabled: {frozen.frozen}"
        yield Finding(Grade.DEGRADED, text)


def _leaderless(around: Around, stalled_after_s: float) -> Finding:
    """A deployment that never had a controller serves without one."""
    age_s = around.turn_age_s
    if age_s is None or age_s <= stalled_after_s:
        return Finding(Grade.DEGRADED, around.why_no_leader, is_ready=True)
    text = f"{around.why_no_leader}; the last turn of one is {age_s:.0f} s old"
    return Finding(Grade.DEGRADED, text)


def _ranks(seen: Snapshot) -> Iterator[Finding]:
    if ahead := [view for view in seen.ranks if view.ahead_s > CLOCK_TOLERANCE_S]:
        most_s = max(view.ahead_s for view in ahead)
        yield Finding(
            Grade.DEGRADED,
            f"rank {_named(ahead)}: reports are dated {most_s:.0f} s ahead of this host's clock, "
            f"expected at most {CLOCK_TOLERANCE_S:g} s: synchronise the clocks (NTP); samples that "
            "are 60 s ahead are refused",
            is_ready=True,
        )
    if not seen.silent_ranks:
        return
    silent = [view for view in seen.ranks if not view.is_alive]
    limit_s = max(view.silent_after_s for view in silent)
    yield Finding(
        Grade.BLIND if len(silent) == len(seen.ranks) else Grade.DEGRADED,
        f"silent ranks: {_named(silent)}, expected a report from all {len(seen.ranks)} "
        f"within {limit_s:g} s; a clock that is behind looks the same (eplb check)",
    )


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
        yield Finding(Grade.STOPPED, f"no token since {age_s:.0f} s ago: {text}")
        return
    limit_s = max(stalled_after_s, INTERVALS * seen.sample_every_s)
    steps_s = seen.supervision.token_age_s
    if steps_s is not None and steps_s > stalled_after_s:
        text = f"no step of all ranks for {steps_s:.0f} s, expected within {stalled_after_s:g} s"
        yield Finding(Grade.STOPPED, text)
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
        yield Finding(Grade.DEGRADED if age_s <= limit_s else Grade.BLIND, text, is_ready=True)
        return
    age_s = seen.time - seen.token_time
    if age_s <= limit_s:
        return
    late = f"no token for {age_s:.0f} s, expected within {limit_s:g} s"
    if seen.step_age_s is not None and seen.step_age_s <= stalled_after_s:
        text = f"{late}, while steps advance: no request came, or counters are missing"
        yield Finding(Grade.BLIND, text, is_ready=True)
    else:
        yield Finding(Grade.STOPPED, f"{late}; no step was seen either", is_ready=True)


def _progress(seen: Snapshot, stalled_after_s: float) -> Iterator[Finding]:
    age_s = seen.progress_age_s
    if age_s is None or age_s <= stalled_after_s:
        return
    text = f"no progress for {age_s:.1f} s, expected at most {stalled_after_s:g} s"
    # A rank that hangs in its step holds all others up; another thread holds migrations up.
    is_step = seen.progress_of.partition(", ")[2].startswith(("step", "the step"))
    is_stop = is_step and not seen.silent_ranks
    yield Finding(Grade.STOPPED if is_stop else Grade.DEGRADED, f"{text}: {seen.progress_of}")


def _counters(seen: Snapshot) -> Iterator[Finding]:
    if seen.uncounted_ranks:
        yield Finding(
            Grade.DEGRADED,
            f"rank {', '.join(map(str, seen.uncounted_ranks))}: the counters stay at zero while "
            "those of other ranks grow, expected tokens for the experts that it holds: its "
            "dispatcher does not count",
            is_ready=True,
        )


def _processes(seen: Snapshot, stalled_after_s: float) -> Iterator[Finding]:
    for one in seen.supervision.processes:
        if one.state is ProcessState.DEGRADED:
            text = f"{one.name} is down, its restart budget is used up: {one.reason}"
            yield Finding(Grade.DEGRADED, text)
        elif one.state is ProcessState.BACK_OFF:
            text = f"{one.name} is down and will be restarted: {one.reason}"
            yield Finding(Grade.DEGRADED, text, is_ready=True)
        elif one.is_late and one.report_age_s is not None:
            text = f"no report from {one.name} for {one.report_age_s:.1f} s"
            yield Finding(Grade.DEGRADED, f"{text}: it hangs or is not running")
    lease_age_s = seen.supervision.lease_age_s
    if lease_age_s is not None and lease_age_s > stalled_after_s:
        yield Finding(
            Grade.DEGRADED,
            f"no controller has renewed its lease for {lease_age_s:.1f} s, "
            f"expected within {stalled_after_s:g} s",
        )
