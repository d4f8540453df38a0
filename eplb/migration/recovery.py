"""The recovery decision after the death of a rank, computed from the survivors' reports.

A verdict is the same for all ranks that read it, but a death can prevent some survivors from
reading it. No two survivors are more than one verdict apart, because a rank votes again only after
it has read the last verdict. A rank that is behind still holds the staged bytes of what the others
swapped, because a swap needs the bytes of every rank. So all survivors move forward to one
placement, and no swap is undone.

The store may be ahead of every survivor: a rank that alone read the last verdict of a migration may
have committed its end before it died. Survivors then move to the committed placement.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from eplb.core.model import named_ranks
from eplb.errors import RankError

NO_PLAN = 0
_SURVIVORS = "-member"  # in the name of a run


@dataclass(frozen=True)
class SurvivorReport:
    """The state of a surviving rank, which swaps nothing after it reports."""

    run: str
    rank: int
    membership: int  # the broken group's
    generation: int  # the placement that it serves, the base of its open migration
    weights_version: int
    plan_id: int  # its open migration, NO_PLAN: none
    plan_hash: int
    swapped: int  # transactions of that migration in its live slots
    prepared: int  # transactions whose bytes it holds, staged or live
    closed_plan_id: int  # the migration that led to ``generation``, NO_PLAN: not known
    closed_applied: int  # transactions of that one
    dead: tuple[int, ...]  # ranks that it knows to be dead
    time: float


@dataclass(frozen=True)
class Recovery:
    """The state of a group that follows another one, after a death or as planned.

    The store has one for each membership.
    """

    membership: int  # the survivors' group's; grows with each death and each start
    run: str
    survivors: tuple[int, ...]
    generation: int  # the placement that every survivor serves afterwards
    plan_id: int  # the migration that was ended, NO_PLAN: none was open
    applied: int  # its transactions that serve on every survivor
    reason: str
    time: float


@dataclass(frozen=True)
class WrittenEnd:
    """The end of a migration that is committed in the store."""

    plan_id: int
    applied: int  # transactions of it
    generation: int  # the committed placement's


def run_of(run: str, membership: int) -> str:
    """Name of the run of survivors: that of their start, and the number of their group."""
    return f"{start_of(run)}{_SURVIVORS}{membership}"


def start_of(run: str) -> str:
    """Name of the start that a run belongs to."""
    return run.partition(_SURVIVORS)[0]


def decide(
    reports: Sequence[SurvivorReport],
    dead: Collection[int],
    unresponsive: Collection[int] = (),
    written: WrittenEnd | None = None,
) -> Recovery:
    """Compute the recovery; every survivor computes the same one from the same reports.

    Args:
        reports: of every survivor; those of ranks that died since are ignored.
        dead: ranks that died.
        unresponsive: ranks without a report in time; they count as dead.
        written: the committed end of the survivors' open migration, if there is one in the store.

    Raises:
        RankError: no placement fits all reports; only a restart from the store can help.
    """
    alive = sorted(
        (report for report in reports if report.rank not in {*dead, *unresponsive}),
        key=lambda report: report.rank,
    )
    if not alive:
        raise RankError(f"no survivor is left to agree: {_reason(dead, unresponsive)}")
    first = alive[0]
    for report in alive:
        for name in ("run", "membership", "weights_version"):
            if getattr(report, name) != getattr(first, name):
                raise RankError(
                    f"survivors {first.rank} and {report.rank} report {name} "
                    f"{getattr(first, name)} and {getattr(report, name)}, expected the same"
                )
    plan_id, applied, generation = _ended(alive, written)
    return Recovery(
        membership=first.membership + 1,
        run=first.run,
        survivors=tuple(report.rank for report in alive),
        generation=generation,
        plan_id=plan_id,
        applied=applied,
        reason=_reason(dead, unresponsive),
        time=max(report.time for report in alive),
    )


def is_minority(members: Collection[int], lost: Collection[int]) -> bool:
    """Whether ranks that have lost these members are the smaller part, or the half without rank 0.

    What they take for a death of most ranks may be the loss of their own links.
    """
    most, half = 2 * len(lost) > len(members), 2 * len(lost) == len(members)
    return most or (half and min(members) in lost)


def cut_off(reports: Sequence[SurvivorReport], by: int) -> frozenset[int]:
    """Ranks with a report that cannot be in one group with a rank, or with those that it takes.

    Two ranks of which one takes the other for dead, and both of which report, are on two sides of a
    network that is cut. A record with both would name a group that nobody can form.

    Args:
        reports: of all ranks so far, with that of ``by``.
        by: the rank that decides; others are taken in the order of their numbers.
    """
    taken: list[SurvivorReport] = []
    for report in sorted(reports, key=lambda report: (report.rank != by, report.rank)):
        if not any(one.rank in report.dead or report.rank in one.dead for one in taken):
            taken.append(report)
    return frozenset(report.rank for report in reports) - {one.rank for one in taken}


def is_settled(reports: Sequence[SurvivorReport], by: int) -> bool:
    """Whether all on the side of a rank take all on the other one for dead, and the same ranks.

    While a network is being cut, each rank misses the others at another moment. A rank whose links
    are cut may have missed nobody yet when the others already take it for dead.
    """
    beyond = cut_off(reports, by)
    views = {frozenset(report.dead) for report in reports if report.rank not in beyond}
    return not beyond or (len(views) == 1 and beyond <= views.pop())


def _ended(alive: Sequence[SurvivorReport], written: WrittenEnd | None) -> tuple[int, int, int]:
    """(plan id, transactions applied, generation) that all survivors can reach."""
    newest = max(alive, key=lambda report: report.generation)
    if written is not None and written.generation > newest.generation:
        return _reachable(alive, written.plan_id, written.applied, written.generation)
    if min(report.generation for report in alive) < newest.generation:
        # Only some survivors have read the verdict that ended the migration.
        return _reachable(alive, newest.closed_plan_id, newest.closed_applied, newest.generation)
    furthest = max(alive, key=lambda report: report.swapped)
    if furthest.swapped:
        generation = newest.generation + 1
        return _reachable(alive, furthest.plan_id, furthest.swapped, generation)
    return max(report.plan_id for report in alive), 0, newest.generation


def _reachable(
    alive: Sequence[SurvivorReport], plan_id: int, applied: int, generation: int
) -> tuple[int, int, int]:
    hashes = {report.plan_hash for report in alive if report.plan_id == plan_id}
    for report in alive:
        closed = (report.generation, report.closed_plan_id, report.closed_applied)
        is_there = closed == (generation, plan_id, applied) and not report.swapped
        can_follow = (
            report.plan_id == plan_id
            and report.generation == generation - 1
            and report.swapped <= applied <= report.prepared
            and len(hashes) == 1
        )
        if not is_there and not can_follow:
            raise RankError(
                f"rank {report.rank} serves generation {report.generation} with {report.swapped} "
                f"transactions of plan {report.plan_id} swapped and {report.prepared} prepared, "
                f"expected it to reach {applied} of plan {plan_id} as others have"
            )
    return plan_id, applied, generation


def _reason(dead: Collection[int], unresponsive: Collection[int]) -> str:
    found = [f"{named_ranks(sorted(dead))} died or cannot be reached"] if dead else []
    if unresponsive:
        found.append(f"{named_ranks(sorted(unresponsive))} sent no report in time")
    return ", ".join(found) or "the group broke, but every rank is alive"
