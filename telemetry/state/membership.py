"""Planned changes of the ranks that serve.

    asked ---> open ---> done        the run that began has the wanted ranks, and no others
                   +---> failed      it cannot end so any more; the record says why
                   +---> cancelled

One operation is open at a time, and a second one is refused. It does not replace the first: two
orchestrators that disagree would replace each other's operation without end. An operation that
failed or was cancelled leaves the ranks wanted that were wanted before it, and ranks that have
left by then come back.

The epoch is the number of the group that was recorded (``Recovery.membership``) or started last, 0
before the first.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from eplb.declared import Meaning
from eplb.errors import EplbError, StaleGeneration, StaleRevision
from eplb.migration.membership import unwanted
from telemetry.state.backend import HEAD, Change, Table
from telemetry.state.codec import as_stored, to_json
from telemetry.state.part import Part, Records, Single, epoch_in

Ended = Literal["", "done", "failed", "cancelled"]

MEMBERS = "members"  # kind of event: which ranks should serve, and how that operation ended
KEPT_CHANGES_S = 30 * 86_400.0  # for which a repeated id is known


class MembershipRefused(EplbError):
    """Another operation is open, or one with this id asked for something else."""


@dataclass(frozen=True)
class MembershipChange:
    """An operation on the ranks that serve."""

    id: str
    asked: Annotated[Any, Meaning("what the same id may ask for again")]
    wanted: Annotated[tuple[int, ...], Meaning("ranks that serve once it is done")]
    before: Annotated[tuple[int, ...], Meaning("ranks that were wanted until then")]
    reason: str
    by: Annotated[str, Meaning("who asked for it; empty: the program")]
    time: Annotated[float, Meaning("when it was asked for, seconds since the epoch")]
    membership: Annotated[int, Meaning("epoch when it was asked for")]
    ended: Annotated[Ended, Meaning("how it ended; empty: it is open")] = ""
    why: Annotated[str, Meaning("reason of its end; empty: it is open")] = ""
    ended_at: Annotated[float, Meaning("when it ended, seconds since the epoch")] = 0.0
    until: Annotated[
        float | None,
        Meaning("when it fails if it is still open, seconds since the epoch; null: never"),
    ] = None

    def left_s(self, now: float) -> float | None:
        """Seconds until it fails; None: it has ended, or has no deadline."""
        return None if self.ended or self.until is None else max(0.0, self.until - now)

    def is_about(self, changing: Collection[int]) -> bool:
        """Whether it is open, and one of the ranks that join or leave does so because of it."""
        asked = {*self.wanted} ^ {*self.before} or {*self.wanted}  # or a dead rank is to return
        return not self.ended and not asked.isdisjoint(changing)

    @property
    def should_serve(self) -> tuple[int, ...]:
        """Ranks that should serve, by number."""
        return self.wanted if self.ended in ("", "done") else self.before


_WHAT = "the record of membership operation"
CHANGES = Records(  # by id, in the order of their times
    MembershipChange, Table("membership_changes", is_ordered=True), _WHAT
)
LATEST_CHANGE = Single(MembershipChange, "membership_change", _WHAT)


class MembershipPart(Part):
    """Which ranks should serve."""

    def membership_change(self) -> MembershipChange | None:
        """Return the latest operation; None: all ranks of the topology should serve."""
        return LATEST_CHANGE.get(self.backend)

    def wanted_ranks(self) -> tuple[int, ...] | None:
        """Return the ranks that should serve; None: all ranks of the topology."""
        latest = self.membership_change()
        return None if latest is None else latest.should_serve

    def change_of_id(self, change_id: str) -> MembershipChange | None:
        """Return an operation of the last 30 days, or None."""
        return CHANGES.get(self.backend, change_id)

    def epoch(self) -> int:
        """Return the number of the latest group; 0 before the first."""
        return epoch_in(self.backend)

    def change_membership(
        self,
        change_id: str,
        wanted: Collection[int],
        *,
        asked: Any,
        alive: Sequence[bool],
        reason: str,
        by: str,
        expected: int | None = None,
        within_s: float | None = None,
    ) -> MembershipChange:
        """Ask for other ranks; the same id with the same request gives the same operation.

        Args:
            change_id: made by who asks.
            wanted: ranks that should serve.
            asked: JSON-ready: what was asked for, which a repetition has to equal.
            alive: [R] which ranks of the topology serve now; where these are wanted, the operation
                is done at once.
            reason: stored with it.
            by: who asks.
            expected: the epoch that the caller has read; None: whatever it is.
            within_s: time after which it fails if it is still open; None: it never does.

        Raises:
            MembershipRefused: another operation is open, or the id asked for something else.
            StaleRevision: the ranks have changed since ``expected``.
        """
        wanted, now = tuple(sorted(set(wanted))), _serving(alive)
        asked = as_stored({"asked": asked})["asked"]

        def decision(change: Change) -> MembershipChange:
            if (known := CHANGES.get(change, change_id)) is not None:
                if known.asked != asked:
                    raise MembershipRefused(
                        f"operation {change_id!r} asked for {to_json(known.asked)}, found "
                        f"{to_json(asked)}, expected the same again or another id"
                    )
                return known
            epoch, latest = epoch_in(change), LATEST_CHANGE.get(change)
            if expected is not None and expected != epoch:
                raise StaleRevision(
                    f"membership is to be changed at epoch {expected}, found epoch {epoch}: read "
                    "it again"
                )
            if latest is not None and not latest.ended:
                raise MembershipRefused(
                    f"operation {latest.id!r} is open, which wants ranks {list(latest.wanted)}, "
                    "expected none: wait for its end, or cancel it"
                )
            # Not those that serve now: where a rank has died, it was not asked to leave.
            before = tuple(range(len(alive))) if latest is None else latest.should_serve
            until = None if within_s is None else change.time + within_s
            made = MembershipChange(
                change_id, asked, wanted, before, reason, by, change.time, epoch, until=until
            )
            if wanted == now:
                made = replace(made, ended="done", why="these ranks serve", ended_at=change.time)
            put_change(change, made)
            return made

        made = self.backend.decide(f"membership operation {change_id!r}", decision)
        self.backend.prune(CHANGES.table, self.backend.now() - KEPT_CHANGES_S)
        return made

    def end_membership_change(self, change_id: str, ended: Ended, *, why: str) -> bool:
        """End the open operation; False where it has ended already, or another is the latest."""
        assert ended, "an end is named"

        def decision(change: Change) -> bool:
            latest = LATEST_CHANGE.get(change)
            if latest is None or latest.id != change_id or latest.ended:
                return False
            _end(change, latest, ended, why)
            return True

        return self.backend.decide(f"end of membership operation {change_id!r}", decision)


def note_run(change: Change, alive: Sequence[bool], before: int) -> None:
    """Take account of a run that begins, in the same change.

    It ends the open operation that wanted just its ranks. A run over another number of ranks was
    stated by a start, and leaves no older wish.

    Args:
        change: the change in which it begins.
        alive: [R] which ranks serve in it.
        before: ranks of the topology of the run before.
    """
    latest = LATEST_CHANGE.get(change)
    if latest is None:
        return
    if before != len(alive):
        if not latest.ended:
            _end(change, latest, "cancelled", f"{len(alive)} ranks start in place of {before}")
        change.delete(HEAD, LATEST_CHANGE.key)
    elif not latest.ended and latest.wanted == _serving(alive):
        _end(change, latest, "done", "the wanted ranks serve")


def check_wanted(change: Change, alive: Sequence[bool], following: Collection[int]) -> None:
    """Refuse a planned group that is not wanted any more: its operation has ended meanwhile.

    Args:
        change: the change in which it would begin.
        alive: [R] which ranks serve until then.
        following: ranks of that group.

    Raises:
        StaleGeneration: a rank would join, or leave, although it should not.
    """
    if (latest := LATEST_CHANGE.get(change)) is None:
        return
    wanted, members = latest.should_serve, _serving(alive)
    if ranks := unwanted(wanted, members, following):
        raise StaleGeneration(
            f"a group of ranks {sorted(following)} cannot follow that of ranks {list(members)}: "
            f"ranks {sorted(wanted)} should serve, found {list(ranks)} to join or to leave"
        )


def _end(change: Change, latest: MembershipChange, ended: Ended, why: str) -> None:
    put_change(change, replace(latest, ended=ended, why=why, ended_at=change.time))


def put_change(change: Change, made: MembershipChange) -> None:
    """Write an operation with its event, which is about the ranks that join or leave."""
    CHANGES.put(change, made.id, made, order=made.time)
    LATEST_CHANGE.put(change, made)
    ranks = sorted({*made.wanted} ^ {*made.before})
    told = {"id": made.id, "state": made.ended or "open", "wanted": made.wanted, "ranks": ranks}
    change.append(MEMBERS, to_json(told | {"reason": made.why or made.reason, "actor": made.by}))


def _serving(alive: Sequence[bool]) -> tuple[int, ...]:
    return tuple(rank for rank, is_in in enumerate(alive) if is_in)
