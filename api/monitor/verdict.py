"""The verdict on a deployment: serving, degraded, stopped or blind, with its reasons.

One list of findings has all rules. The verdict of the page, of ``eplb status`` and of the metrics
is the worst finding; readiness is the worst of those that keep requests away; the alerts rest on
the metric of the verdict; anomalies are the findings over time.

    stopped   tokens were served, and none are now
    blind     whether tokens are served cannot be known
    degraded  tokens are served, and something is wrong
    serving   nothing is wrong but what costs speed alone; a pause by an operator is no fault
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import takewhile
from math import inf

from api.monitor.state import GONE, Death, Grade, Leadership, RankView, Reading, State, Symptom
from api.processes.supervision import ProcessState
from eplb.core.model import named_ranks, spans
from eplb.errors import counted
from eplb.fitting import Cordon
from eplb.migration.recovery import start_of
from eplb.versions import LAUNCHER
from rebalance.types import SWITCHED_OFF
from telemetry.state.events import OUTCOME_OF_EVENT, WAITING, OfHost, PlanEnd
from telemetry.state.holder import is_dead, shown
from telemetry.state.runs import LEAST_SILENCE_S, STEP_THREAD
from telemetry.state.store import StateStore

CLOCK_TOLERANCE_S = 1.0
# Time without a token, a step, or progress of a busy thread.
STALLED_AFTER_S = 30.0
WAITING_SHOWN_S = 90.0  # three times as long as from one report of a launcher to the next
# As in the alerts EplbUnbalanced and EplbRebalancesFail.
UNBALANCED, UNBALANCED_S = 1 / 0.7, 600.0  # imbalance, and for how long
FAILED, FAILED_S = 3, 1800.0  # failed migrations that are no finding, and within what time
LEAST_FREE_BYTES = 64_000_000  # bound of the alert EplbDiskFull too
INTERVALS = 3.0  # intervals of samples; a deployment that samples seldom is not stopped between two


def leadership(store: StateStore, now: float) -> Leadership:
    """Find the process that leads; a lease that ran out, or of a process that exited, is none.

    Raises:
        StoreError: the store cannot be read.
    """
    lease = store.latest_lease()
    held = lease is not None and bool(lease.ttl_s)  # 0: it was given up
    age_s = None if lease is None else max(0.0, now - (lease.expires - lease.ttl_s))
    if lease is not None and held and lease.expires >= now and not is_dead(lease.holder):
        left_s, led_s = lease.expires - now, max(0.0, now - lease.since)
        return Leadership(shown(lease.holder), left_s, "", age_s, led_s)
    why = "no controller leads, expected one (eplb serve, eplb controller or an engine's plug-in)"
    if lease is not None and held and lease.expires < now:
        since_s = now - lease.expires
        why = f"no controller leads: the lease of {shown(lease.holder)} ran out {since_s:.0f} s ago"
    elif lease is not None and held:
        why = f"no controller leads: {shown(lease.holder)} has exited"
    elif lease is not None:
        why += f"; the last one gave its lease up {age_s:.0f} s ago, as at a stop on purpose"
    return Leadership("", 0.0, why, age_s)


def judged(seen: Reading) -> Reading:
    """Give a reading with its findings, and its state with the verdict."""
    found = tuple(sorted(_findings(seen), key=_severity))
    problems = tuple(one.text for one in found if one.grade is not Grade.SERVING)
    grade = found[0].grade if problems else Grade.SERVING
    reason = "; ".join([*problems[:1], *_notes(seen.state, is_serving=not problems)])
    state = replace(seen.state, verdict=grade, reason=reason, problems=problems)
    return replace(seen, state=state, findings=found)


def tokens_due_s(sample_every_s: float) -> float:
    """Return the age of the newest token at which a deployment is stopped."""
    return max(STALLED_AFTER_S, INTERVALS * sample_every_s)


def unready(seen: Reading) -> str | None:
    """Return why requests should not come, the worst first; None when they should."""
    keep_away = (one.text for one in seen.findings if not one.is_ready)
    return next(keep_away, None)


def _severity(finding: Symptom) -> tuple[bool, int]:
    """While the store is not read, nothing else is known of now."""
    return finding.kind != "store-unread", list(Grade).index(finding.grade)


def _notes(state: State, *, is_serving: bool) -> Iterator[str]:
    """What an operator wants to know beside the worst that is wrong."""
    if is_serving:
        yield f"{counted(len(state.members), 'rank', 'serve')}, at step {state.step}"
    until = ""
    if state.until is not None:
        until = time.strftime(" until %Y-%m-%d %H:%M:%SZ", time.gmtime(state.until))
    if state.controller.compiling:
        yield state.controller.compiling
    if not state.movement:
        yield f"movement is off{until}{_who(state)}"
    if state.observe:
        yield "observe is on"
    if state.stage not in ("", "all"):
        yield f"stage {state.stage}"
    if state.open_proposals:
        yield f"{counted(state.open_proposals, 'proposal', 'wait')} for a decision"
    ranks = state.membership
    if ranks is not None and (change := ranks.operation) is not None and not change.ended:
        end = "" if ranks.left_s is None else f", fails in {ranks.left_s:.0f} s"
        yield f"operation {change.id} on the ranks{end}, {ranks.phase}: {ranks.waits}"
    for cordon, name in ((Cordon.CORDON, "cordoned"), (Cordon.DRAIN, "drained")):
        if views := [view for view in state.ranks if view.cordon is cordon]:
            yield f"{name} by order: {named_ranks(_numbers(views))}"
    yield from (one.text for one in _clocks(state))


def _who(state: State) -> str:
    """Who switched movement off and why, where an operator did."""
    if state.switched is None:
        return ""
    at = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(state.switched.time))
    by = f" by {state.switched.by}" if state.switched.by else ""
    return f" since {at}{by}: {state.switched.reason}"


def _findings(seen: Reading) -> Iterator[Symptom]:
    state = seen.state
    if state.unread:
        yield Symptom("store-unread", Grade.BLIND, state.unread)
    if not seen.is_read:
        yield from _processes(state)
        return
    if state.groups:
        groups = ", ".join(state.groups)
        yield Symptom(
            "no-run", Grade.BLIND, f"its EP groups are deployments of their own: {groups}"
        )
        return
    if state.run is None:
        yield Symptom("no-run", Grade.BLIND, "no run has begun, expected one")
    else:
        # Ranks that were stopped on purpose are silent, and that is all right.
        is_over = (end := _end(state)) is not None and end.is_planned
        yield from () if is_over else _ranks(seen)
        yield from _tokens(seen)
        yield from () if is_over else _progress(state)
    # A lease could not be renewed while the store did not answer or was full.
    if state.controller.why_none and seen.answered_s > LEAST_SILENCE_S:
        yield _leaderless(state.controller)
    if state.uncounted_ranks:
        yield Symptom(
            "rank-uncounted",
            Grade.DEGRADED,
            f"{named_ranks(state.uncounted_ranks)}: the counters stay at zero while those of other "
            "ranks grow, expected tokens for the experts held there: the dispatcher does not count",
            is_ready=True,
            ranks=state.uncounted_ranks,
        )
    if state.engine_plans:
        text = f"the engine's own balancer plans, expected its plug-in: {state.engine_plans}"
        yield Symptom("engine-plans", Grade.DEGRADED, text, is_ready=True)
    yield from _processes(state)
    yield from _launchers(state)
    yield from _waits(seen)
    if frozen := [view for view in state.ranks if view.frozen]:
        text = f"rank {frozen[0].rank} has migrations disabled: {frozen[0].frozen}"
        yield Symptom("rank-frozen", Grade.DEGRADED, text, ranks=_numbers(frozen))
    yield from _disk(state)
    yield from _unbalanced(seen)
    yield from _failures(seen)


def _end(state: State) -> Death | None:
    """The latest end of ranks; a planned one is of one host: it counts once no member serves."""
    end = state.death
    if end is None or not end.is_planned:
        return end
    is_over = all(view.has_ended or not view.is_alive for view in state.members)
    return end if is_over and end.time > (state.started or 0.0) else None


def _disk(state: State) -> Iterator[Symptom]:
    if state.store_full:
        text = (
            f"the store takes no changes, so nothing that ranks report since is known here: "
            f"{state.store_full}"
        )
        yield Symptom("store-full", Grade.DEGRADED, text, is_ready=True)
    if state.free_bytes is not None and state.free_bytes < LEAST_FREE_BYTES:
        text = (
            f"the disk of the state folder is full: found {state.free_bytes / 1e6:.1f} MB free, "
            f"expected {LEAST_FREE_BYTES / 1e6:g} MB; of all changes only a pause is possible"
        )
        yield Symptom("disk-full", Grade.DEGRADED, text, is_ready=True)
    if state.audit_waiting:
        text = (
            f"{state.audit_waiting} lines of the audit wait in the store, expected none: its file "
            "cannot be written (eplb_audit_waiting)"
        )
        yield Symptom("audit-waits", Grade.DEGRADED, text, is_ready=True)


def _leaderless(found: Leadership) -> Symptom:
    """A deployment that never had a controller serves without one."""
    age_s = found.turn_age_s
    if age_s is None or age_s <= STALLED_AFTER_S:
        return Symptom("no-leader", Grade.DEGRADED, found.why_none, is_ready=True)
    text = f"{found.why_none}; the last turn of one is {age_s:.0f} s old"
    return Symptom("no-leader", Grade.DEGRADED, text)


def _clocks(state: State) -> Iterator[Symptom]:
    """Clocks of ranks that are off: ages, load and plans go by the store's."""
    if off := [view for view in state.ranks if abs(view.ahead_s) > CLOCK_TOLERANCE_S]:
        most_s = max((view.ahead_s for view in off), key=abs)
        side = "ahead of" if most_s > 0 else "behind"
        text = (
            f"the clock of {named_ranks(_numbers(off))} is {abs(most_s):.0f} s {side} the store's, "
            f"expected {CLOCK_TOLERANCE_S:g} s at most: synchronise it (NTP)"
        )
        yield Symptom("clocks-differ", Grade.SERVING, text, is_ready=True, ranks=_numbers(off))


def _unheard(seen: Reading) -> Iterator[Symptom]:
    """Ranks that did not report since the store answers again: they serve, or died meanwhile."""
    members = seen.state.members
    unheard = [view for view in members if view.is_alive and _is_old(view)]
    if unheard:
        text = (
            f"no report of {named_ranks(_numbers(unheard))} since the store answers again, "
            f"{seen.answered_s:.0f} s ago: whether they serve is not known"
        )
        grade = Grade.BLIND if len(unheard) == len(members) else Grade.DEGRADED
        since = _oldest(seen.state, unheard)
        yield Symptom("store-unread", grade, text, ranks=_numbers(unheard), since=since)


def _is_old(view: RankView) -> bool:
    return view.age_s is not None and view.age_s > view.silent_after_s


def _ranks(seen: Reading) -> Iterator[Symptom]:
    state = seen.state
    yield from _clocks(state)
    if gone := tuple(view.rank for view in state.ranks if view.phase == GONE):
        num_ranks = len(state.members)
        yield Symptom(
            "rank-gone",
            Grade.DEGRADED,
            f"{num_ranks} of {num_ranks + len(gone)} ranks serve on, without {named_ranks(gone)}, "
            "until they join again or all ranks are started",
            ranks=gone,
            is_ready=True,
            since=state.started,
        )
    if not state.store_full:
        yield from _unheard(seen)
    if not state.silent_ranks:
        return
    silent = [view for view in state.ranks if view.rank in state.silent_ranks]
    if len(silent) == len(state.members) and all(view.has_ended for view in silent):
        text = f"all {len(silent)} ranks ended as they were asked, expected ranks that serve"
        since = _oldest(state, silent)
        yield Symptom("rank-silent", Grade.STOPPED, text, ranks=_numbers(silent), since=since)
        return
    limit_s = max(view.silent_after_s for view in silent)
    yield Symptom(
        "rank-silent",
        Grade.BLIND if len(silent) == len(state.members) else Grade.DEGRADED,
        f"silent ranks: {spans(_numbers(silent))}, expected a report from all {len(state.members)} "
        f"within {limit_s:g} s",
        ranks=_numbers(silent),
        since=_oldest(state, silent),
    )


def _numbers(views: list[RankView]) -> tuple[int, ...]:
    return tuple(view.rank for view in views)


def _oldest(state: State, silent: list[RankView]) -> float | None:
    """Time of the oldest of their reports; None: one of them never reported."""
    ages = [view.age_s for view in silent if view.age_s is not None]
    return state.time - max(ages) if len(ages) == len(silent) else None


def _tokens(seen: Reading) -> Iterator[Symptom]:
    """Tokens, by the samples of the ranks; every age counts from the last one of any run."""
    state, every_s = seen.state, seen.state.sample_every_s
    limit_s = tokens_due_s(every_s)
    last, begun = state.token_time or 0.0, state.started or 0.0
    death = end if (end := _end(state)) is not None and end.time > last else None
    is_new = begun > max(last, death.time if death else 0.0)  # started again, and no token since
    # Steps just after the last token are those that its sample did not count yet.
    step_age_s = inf if state.step_age_s is None else state.step_age_s
    has_steps = step_age_s <= min(STALLED_AFTER_S, state.time - last - INTERVALS * every_s)
    # Ranks that join or leave as planned begin a run of their own, and serve on.
    is_start = state.run is not None and state.run == start_of(state.run)
    if death is not None or (is_new and last and is_start):
        why = death.text if death else f"the ranks were started {state.time - begun:.0f} s ago"
        since = last or (death.time if death else begun)
        is_idle = is_new and has_steps and state.time - begun > limit_s
        yield Symptom(
            "no-tokens",
            Grade.BLIND if is_idle else Grade.STOPPED,
            f"no token for {state.time - since:.0f} s: {why}"
            + ("; steps advance since: no request came, or counters are missing" * is_idle),
            is_ready=is_new,
            since=since,
        )
        return
    if len(state.silent_ranks) == len(state.members):
        return  # what they do not report cannot be judged, and that is a finding already
    if state.token_time is None:
        age_s = state.time - (state.started or state.time)
        what = "no token was counted" if state.sample_age_s is not None else "no load was reported"
        text = (
            f"{what} since the run began {age_s:.0f} s ago, expected within {limit_s:g} s: "
            "no request came, or the dispatcher does not count"
        )
        grade = Grade.DEGRADED if age_s <= limit_s else Grade.BLIND
        yield Symptom("no-tokens", grade, text, is_ready=True, since=state.started)
        return
    age_s = state.time - state.token_time
    if min(age_s, seen.answered_s) <= limit_s:
        return
    late = f"no token for {age_s:.0f} s, expected within {limit_s:g} s"
    if has_steps:
        text = f"{late}, while steps advance: no request came, or counters are missing"
        grade = Grade.BLIND
    else:
        grade, text = Grade.STOPPED, f"{late}; no step was seen either"
    yield Symptom("no-tokens", grade, text, is_ready=True, since=state.token_time)


def _progress(state: State) -> Iterator[Symptom]:
    age_s = state.progress_age_s
    if age_s is None or age_s <= STALLED_AFTER_S:
        return
    text = f"no progress for {age_s:.1f} s, expected at most {STALLED_AFTER_S:g} s"
    # A rank that hangs in its step holds all others up; another thread holds migrations up.
    is_stop = state.progress_thread == STEP_THREAD and not state.silent_ranks
    grade = Grade.STOPPED if is_stop else Grade.DEGRADED
    what = f"{text}: {state.progress_of}"
    yield Symptom("no-progress", grade, what, since=state.time - age_s)


def _processes(state: State) -> Iterator[Symptom]:
    for one in state.supervision.processes:
        if one.state is ProcessState.DEGRADED:
            text = f"{one.name} is down, beyond its restart budget: {one.reason}"
            yield Symptom("process-down", Grade.DEGRADED, text, subject=one.name)
        elif one.state is ProcessState.BACK_OFF:
            text = f"{one.name} is down and will be restarted: {one.reason}"
            yield Symptom("process-down", Grade.DEGRADED, text, is_ready=True, subject=one.name)
        elif one.has_exited:
            text = f"{one.name} has exited, expected it to run"
            is_ready = one.kind != LAUNCHER
            yield Symptom("process-down", Grade.DEGRADED, text, is_ready, subject=one.name)
        elif one.is_late and one.report_age_s is not None:
            text = f"no report from {one.name} for {one.report_age_s:.1f} s"
            what = f"{text}: it hangs or is not running"
            # An end is known by the heartbeat, and ranks serve without the process.
            is_ready = one.state is ProcessState.DOWN
            since = state.time - one.report_age_s
            yield Symptom(
                "process-down", Grade.DEGRADED, what, is_ready, subject=one.name, since=since
            )


def _launchers(state: State) -> Iterator[Symptom]:
    """Launchers that have exited without an order, and their ranks with them."""
    launchers = [one for one in state.supervision.processes if one.kind == LAUNCHER]
    exited = [one for one in launchers if one.has_exited]
    if exited and len(exited) == len(launchers):
        text = f"{exited[0].name} has exited, and its ranks with it: start eplb launch again"
        yield Symptom("process-down", Grade.STOPPED, text, subject=exited[0].name)


def _waits(seen: Reading) -> Iterator[Symptom]:
    """Launchers whose ranks cannot start yet, by what they reported last; none once tokens come."""
    state = seen.state
    after = max(state.token_time or 0.0, state.time - WAITING_SHOWN_S)
    waiting = ((event.time, event.fact) for event in seen.events if event.kind == WAITING)
    latest = {its.host: (at, its.message) for at, its in waiting if isinstance(its, OfHost)}
    for host, (at, text) in latest.items():
        if at > after:
            name = f"the launcher of host {host}"
            yield Symptom("start-waits", Grade.DEGRADED, text, subject=name)


def _unbalanced(seen: Reading) -> Iterator[Symptom]:
    """Windows without tokens are no evidence; those in which experts move are."""
    scores = [one for one in reversed(seen.series) if one.is_complete and one.measured is not None]
    above = list(takewhile(lambda one: (one.measured or 0.0) > UNBALANCED, scores))
    since = above[-1].time if above else None
    if since is None or seen.state.time - since < UNBALANCED_S:
        return
    yield Symptom(
        "unbalanced",
        Grade.SERVING,
        f"imbalance is {above[0].measured:.2f}, and above {UNBALANCED:.2f} for "
        f"{seen.state.time - since:.0f} s: see the reason of the last decision",
        is_ready=True,
        since=since,
    )


def _failures(seen: Reading) -> Iterator[Symptom]:
    """Migrations that were dropped without an order of an operator."""
    ended = ((event, event.fact) for event in reversed(seen.events))
    failed = [
        (event.time, end.reason)
        for event, end in ended
        if isinstance(end, PlanEnd)
        and end.plan_id > 0
        and OUTCOME_OF_EVENT[event.kind] != "committed"
        and end.reason != SWITCHED_OFF
        and seen.state.time - event.time <= FAILED_S
    ]
    if len(failed) > FAILED:
        text = (
            f"{len(failed)} migrations failed within {FAILED_S / 60:.0f} minutes, expected "
            f"{FAILED} at most; the latest: {failed[0][1]}"
        )
        yield Symptom("migrations-fail", Grade.SERVING, text, is_ready=True, since=failed[-1][0])
