"""What is true after a death: survivors say how far they came, and one record follows from it.

A verdict is the same for all who read it, but a death can keep some survivors from reading it. No
two survivors are more than one verdict apart, because a rank casts its next vote only after it has
read the last. Whoever is behind still holds the staged bytes of what the others swapped: a swap
needs every rank's bytes. So the way to one placement is forward, and nothing is ever undone.

The store may know more than any survivor: whoever read the last verdict of a migration alone has
perhaps had its end written down before it died. What is committed is what survivors go to.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from eplb.errors import RankError

NO_PLAN = 0


@dataclass(frozen=True)
class SurvivorReport:
    """What a survivor knows of itself. It swaps nothing any more by then."""

    run: str
    rank: int
    membership: int  # of the group that broke
    generation: int  # of what serves here; the base of the migration it is at
    weights_version: int
    plan_id: int  # the migration that it is at, NO_PLAN: at none
    plan_hash: int
    swapped: int  # transactions of that migration in its live slots
    prepared: int  # those whose bytes it holds, staged or live
    closed_plan_id: int  # the migration that made ``generation`` here, NO_PLAN: not known
    closed_applied: int  # transactions of that one
    dead: tuple[int, ...]  # ranks that it knows to be gone
    time: float


@dataclass(frozen=True)
class Recovery:
    """What every survivor and the store agree on after a death; one for each membership."""

    membership: int  # of the survivors' group; grows with each death and each start
    run: str
    survivors: tuple[int, ...]
    generation: int  # of the placement that every survivor holds from now on
    plan_id: int  # the migration that was ended, NO_PLAN: none was under way
    applied: int  # its transactions that serve on every survivor
    reason: str
    time: float


@dataclass(frozen=True)
class WrittenEnd:
    """The end of a migration that the store has as committed."""

    plan_id: int
    applied: int  # transactions of it
    generation: int  # of what is committed


def decide(
    words: Sequence[SurvivorReport],
    dead: Collection[int],
    silent: Collection[int] = (),
    written: WrittenEnd | None = None,
) -> Recovery:
    """Draw the one conclusion that every survivor draws from the same words.

    Args:
        words: of every survivor; those of ranks that died since are left out of account.
        dead: ranks that are gone.
        silent: ranks that said nothing in time; they count as dead.
        written: how the migration that survivors are at has ended, if the store says that it has.

    Raises:
        RankError: no placement fits all that was said; only a restart from the store can help.
    """
    alive = sorted(
        (said for said in words if said.rank not in {*dead, *silent}), key=lambda said: said.rank
    )
    if not alive:
        raise RankError(f"no survivor is left to agree: {_reason(dead, silent)}")
    first = alive[0]
    for said in alive:
        for name in ("run", "membership", "weights_version"):
            if getattr(said, name) != getattr(first, name):
                raise RankError(
                    f"ranks {first.rank} and {said.rank} survive with {name} "
                    f"{getattr(first, name)} and {getattr(said, name)}, expected the same"
                )
    plan_id, applied, generation = _ended(alive, written)
    return Recovery(
        membership=first.membership + 1,
        run=first.run,
        survivors=tuple(said.rank for said in alive),
        generation=generation,
        plan_id=plan_id,
        applied=applied,
        reason=_reason(dead, silent),
        time=max(said.time for said in alive),
    )


def _ended(alive: Sequence[SurvivorReport], written: WrittenEnd | None) -> tuple[int, int, int]:
    """(plan id, transactions applied, generation) that all of them can reach."""
    newest = max(alive, key=lambda said: said.generation)
    if written is not None and written.generation > newest.generation:
        return _reachable(alive, written.plan_id, written.applied, written.generation)
    if min(said.generation for said in alive) < newest.generation:
        # Some have read the verdict that ended a migration, others have not.
        return _reachable(alive, newest.closed_plan_id, newest.closed_applied, newest.generation)
    furthest = max(alive, key=lambda said: said.swapped)
    if furthest.swapped:
        generation = newest.generation + 1
        return _reachable(alive, furthest.plan_id, furthest.swapped, generation)
    return max(said.plan_id for said in alive), 0, newest.generation


def _reachable(
    alive: Sequence[SurvivorReport], plan_id: int, applied: int, generation: int
) -> tuple[int, int, int]:
    hashes = {said.plan_hash for said in alive if said.plan_id == plan_id}
    for said in alive:
        closed = (said.generation, said.closed_plan_id, said.closed_applied)
        is_there = closed == (generation, plan_id, applied) and not said.swapped
        can_follow = (
            said.plan_id == plan_id
            and said.generation == generation - 1
            and said.swapped <= applied <= said.prepared
            and len(hashes) == 1
        )
        if not is_there and not can_follow:
            raise RankError(
                f"rank {said.rank} serves generation {said.generation} with {said.swapped} "
                f"transactions of plan {said.plan_id} swapped and {said.prepared} prepared, "
                f"expected it to reach {applied} of plan {plan_id} as others have"
            )
    return plan_id, applied, generation


def _reason(dead: Collection[int], silent: Collection[int]) -> str:
    found = [f"{_names(dead)} died"] if dead else []
    found += [f"{_names(silent)} said nothing in time"] if silent else []
    return ", ".join(found) or "the group broke, though every rank lives"


def _names(ranks: Collection[int]) -> str:
    several = "ranks" if len(ranks) > 1 else "rank"
    return f"{several} {', '.join(map(str, sorted(ranks)))}"
