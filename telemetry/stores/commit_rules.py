"""Rules of all stores: which commits, publications and leases are accepted, and why not."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import isfinite
from typing import Any

from eplb.core.load import LoadSample
from eplb.core.placement import Placement
from eplb.errors import ConfigError, FencedOut, HistoryError, StaleGeneration, StoreError
from eplb.migration.build import Migration
from eplb.migration.candidates import Candidates
from eplb.migration.recovery import Recovery, SurvivorReport
from eplb.versions import Announcement, announcement_from_dict, announcement_to_dict
from telemetry.live import LiveState
from telemetry.records.typed_json import from_json, to_json
from telemetry.store import Details, Lease, LeaseOf, RunInfo, TaskState

OLD_TTL_S = 10.0  # of a lease that an older program wrote, which kept no time to live
PLAN_ID_GAP = (
    1000  # left out after a loss: other ranks may know of a few more than the one that writes
)
_MAX_SECONDS = 2**32 - 1  # a token fits into 63 bits


def details_to_text(details: Details) -> str:
    """Return details as JSON text, the form in which every store keeps them.

    Raises:
        StoreError: a value that JSON cannot hold.
    """
    return to_json(dict(details))


def details_from_text(text: str) -> dict[str, Any]:
    """Return details from what ``details_to_text`` gave."""
    details: dict[str, Any] = json.loads(text)
    return details


def check_samples(deployment: str, samples: Sequence[LoadSample]) -> None:
    """Refuse samples of another deployment, and those that no time could be found or pruned by."""
    for sample in samples:
        if not isfinite(sample.time):
            raise HistoryError(
                f"sample {sample.sequence} of rank {sample.rank} was taken at {sample.time}, "
                "expected a time"
            )
        if sample.deployment != deployment:
            raise ConfigError(
                f"sample {sample.sequence} of rank {sample.rank} is of deployment "
                f"{sample.deployment!r}, expected {deployment!r}"
            )


def check_run_is_new(info: RunInfo, known: RunInfo) -> None:
    """Refuse another start under a known name: its samples would pass for repeats and be lost."""
    if info != known:
        raise StoreError(
            f"run {info.run!r} is recorded as started at {known.time}, found another start of "
            f"that name at {info.time}, expected a new name"
        )


def is_to_be_committed(
    placement: Placement, *, expected: int | None, committed: int | None, known_hash: str | None
) -> bool:
    """Whether a commit must write; False when this very placement was committed before.

    Args:
        placement: what a rank serves now.
        expected: the generation that the rank moved on from.
        committed: the generation in the store.
        known_hash: hash of the stored placement of ``placement``'s own generation, if any.

    Raises:
        StaleGeneration: something else is committed, or generations do not grow.
    """
    if known_hash == placement.hash:
        return False
    if committed != expected:
        raise StaleGeneration(
            f"generation {placement.generation} follows generation {expected}, "
            f"found generation {committed} committed"
        )
    if committed is not None and placement.generation <= committed:
        raise StaleGeneration(
            f"found generation {placement.generation} to commit, expected more than {committed}"
        )
    return True


def check_base(migration: Migration, committed: tuple[int, str] | None) -> None:
    """Refuse a migration that does not start from the committed (generation, hash)."""
    found = (migration.base.generation, migration.base.hash)
    if committed is None:
        raise StaleGeneration(
            f"plan {migration.plan_id} starts from generation {found[0]}, "
            "found no committed placement"
        )
    if found != committed:
        raise StaleGeneration(
            f"plan {migration.plan_id} starts from generation {found[0]} (hash {found[1]}), "
            f"found generation {committed[0]} (hash {committed[1]}) committed"
        )


def check_plan_id(plan_id: int, *, open_plan_id: int | None, is_known: bool) -> None:
    """Refuse a plan while another is open, and a plan id that was published before."""
    if plan_id < 1:
        raise StoreError(f"plan id {plan_id} cannot be published, expected 1 or more")
    if open_plan_id is not None:
        raise StaleGeneration(f"plan {plan_id} cannot be published: plan {open_plan_id} is open")
    if is_known:
        raise StaleGeneration(
            f"plan id {plan_id} was published before, expected one from next_plan_id"
        )


def check_not_dropped(plan_id: int, generation: int, recovery: Recovery | None) -> None:
    """Refuse the commit of a migration that survivors of a death agreed to drop.

    It is the last write of a rank that died: it had swapped, and they had not.
    """
    if recovery is None or plan_id == 0 or plan_id != recovery.plan_id:
        return
    if generation > recovery.generation:
        raise StaleGeneration(
            f"generation {generation} of plan {plan_id} cannot be committed: survivors of a death "
            f"dropped that plan and hold generation {recovery.generation} "
            f"(membership {recovery.membership})"
        )


def check_finish(task_id: int, found: TaskState | None, state: TaskState) -> None:
    """Refuse to end a task that is not there or has ended, or to end it in a passing state."""
    if found is None:
        raise StoreError(f"task {task_id} cannot be finished: there is no such task")
    if found in ("done", "failed"):
        raise StoreError(f"task {task_id} cannot be finished: it is {found} already")
    if state not in ("done", "failed"):
        raise StoreError(f"task {task_id} cannot end as {state!r}, expected 'done' or 'failed'")


def first_token(now: float) -> int:
    """Return the first fencing token of a store that has no earlier one.

    A new store, and one that lost its contents: seconds since the epoch above 31 random bits, so no
    token of before comes again. While the clock is right the seconds differ. If the clock is lost
    too, and shows a second in which a token was drawn before, the random bits differ: two draws
    meet with a chance of 1 in 2^31, and tokens that takeovers counted up from one, by as many more.
    """
    return min(max(int(now), 0), _MAX_SECONDS) << 31 | max(1, secrets.randbits(31))


def next_lease(
    holder: str,
    ttl_s: float,
    of: LeaseOf,
    *,
    now: float,
    latest: Lease | None,
    is_over: Callable[[Lease], bool],
) -> Lease | None:
    """Return the lease that ``holder`` gets; None while another holds it.

    Args:
        latest: the last lease that was granted, even if expired or released.
        is_over: returns whether the latest lease is over (``telemetry/stores/lease_watch.py``).
    """
    if not holder or not ttl_s > 0:
        raise ConfigError(
            f"holder {holder!r} asked for the lease for {ttl_s} s, expected a name and more than 0"
        )
    until = now + ttl_s
    if latest is None:
        return Lease(holder, first_token(now), until, ttl_s, now, 0, of)
    renewals = latest.renewals + 1
    if latest.holder == holder:
        return replace(latest, expires=until, ttl_s=ttl_s, renewals=renewals)
    if not is_over(latest):
        return None
    return Lease(holder, latest.token + 1, until, ttl_s, now, renewals, of)


def given_up(
    lease: Lease, *, now: float, latest: Lease | None, is_over: Callable[[Lease], bool]
) -> Lease | None:
    """Return what to write for a lease that is given up; None: it is its holder's no more."""
    if latest is None or (latest.holder, latest.token) != (lease.holder, lease.token):
        return None
    if is_over(latest):
        return None
    return replace(latest, expires=now, ttl_s=0.0, renewals=latest.renewals + 1)


def lease_to_text(lease: Lease) -> str:
    """Return a lease as JSON text."""
    return details_to_text(vars(lease))


def lease_from_text(text: str) -> Lease:
    """Return a lease from what ``lease_to_text`` gave, or an older program with three fields."""
    return Lease(**{"ttl_s": OLD_TTL_S, "since": 0.0, "renewals": 0} | details_from_text(text))


def check_fence(fence: int | None, latest: Lease | None) -> None:
    """Refuse a writer whose token is not the newest.

    A greater one is refused too: a store that lost its newest tokens, to a restore for example,
    gives them out a second time.
    """
    newest = latest.token if latest else None
    if fence is None or fence == newest:
        return
    found = f"{newest}, of {latest.holder!r}," if latest else "none"
    raise FencedOut(
        f"a controller writes with fencing token {fence}, found {found} as the newest given out: "
        "expected it to stop acting"
    )


def is_to_be_restored(run: RunInfo, *, is_committed: bool, current_run: str | None) -> bool:
    """Whether a store lost its contents, and no other run has begun in it since."""
    return not is_committed and current_run in (None, run.run)


def restore_detail(
    run: RunInfo, placement: Placement, live: LiveState, *, last_plan_id: int, reason: str
) -> Details:
    """Detail of the event "restore"."""
    return {
        "run": run.run,
        "generation": placement.generation,
        "last_plan_id": last_plan_id,
        "movement": live.control.movement,
        "reason": reason,
    }


def standing_record(
    record: Recovery, *, expected_membership: int, latest: Recovery | None
) -> Recovery | None:
    """Return the record that was written before for the same group, or None: write ``record``.

    Raises:
        StaleGeneration: another run recovered, or this group's successor has broken too.
    """
    if record.membership <= expected_membership:
        raise StoreError(
            f"the record of membership {record.membership} cannot follow membership "
            f"{expected_membership}, expected a greater one"
        )
    if latest is None or latest.membership <= expected_membership:
        return None
    if (latest.membership, latest.run) == (record.membership, record.run):
        return latest
    raise StaleGeneration(
        f"membership {record.membership} of run {record.run!r} follows membership "
        f"{expected_membership}, found membership {latest.membership} of run {latest.run!r} "
        "recorded"
    )


def is_overtaken(record: Recovery, committed: int | None) -> bool:
    """Whether a newer generation is committed than survivors would agree on."""
    return committed is not None and committed > record.generation


def is_dropped_by(record: Recovery, open_plan_id: int | None) -> bool:
    """Whether a record ends the open migration: nothing of it is to be applied."""
    return open_plan_id is not None and record.plan_id == open_plan_id and record.applied == 0


def announcement_to_text(announced: Announcement) -> str:
    """Return an announcement as JSON text."""
    return details_to_text(announcement_to_dict(announced))


def announcements_from_texts(texts: Iterable[str | bytes]) -> list[Announcement]:
    """Make announcements from what ``announcement_to_text`` gave in any version, oldest first.

    Raises:
        StoreError: one lacks what every version has written.
    """
    try:
        found = [announcement_from_dict(from_json(text, "an announcement")) for text in texts]
    except ValueError as exc:
        raise StoreError(f"an announcement cannot be read: {exc}") from exc
    return sorted(found, key=lambda one: (one.time, one.name))


def report_to_text(report: SurvivorReport) -> str:
    """Return a survivor report as JSON text."""
    return details_to_text(vars(report))


def report_from_text(text: str) -> SurvivorReport:
    """Make a survivor report from what ``report_to_text`` gave."""
    detail = details_from_text(text)
    return SurvivorReport(**detail | {"dead": tuple(detail["dead"])})


def recovery_to_text(record: Recovery) -> str:
    """Return a recovery record as JSON text."""
    return details_to_text(vars(record))


def recovery_from_text(text: str) -> Recovery:
    """Return a recovery record from what ``recovery_to_text`` gave."""
    detail = details_from_text(text)
    return Recovery(**detail | {"survivors": tuple(detail["survivors"])})


def run_detail(info: RunInfo) -> Details:
    """Detail of the event "run"."""
    return {"run": info.run, "window_steps": info.window_steps}


def overtaken_reason(generation: int) -> str:
    """Reason of a migration that is rejected because another generation is committed."""
    return f"generation {generation} was committed in its place"


def candidates_to_text(candidates: Candidates) -> str:
    """As stores keep it."""
    return details_to_text(candidates.to_dict())


def candidates_from_text(text: str) -> Candidates:
    """Return the candidates from what ``candidates_to_text`` gave."""
    return Candidates.from_dict(details_from_text(text))


def control_detail(state: LiveState, reason: str) -> Details:
    """Detail of the event "control"."""
    ends = {"until": until} if (until := state.until.get("movement")) is not None else {}
    return vars(state.control) | {"reason": reason} | ends


def task_detail(task_id: int, kind: str, state: TaskState, reason: object = "") -> Details:
    """Detail of the event "task"; reason: of the request, or why it failed."""
    why = {"reason": str(reason)} if reason else {}
    return {"task": task_id, "kind": kind, "state": state} | why
