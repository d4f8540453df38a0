"""How survivors of a death serve on in their processes, over the same memory.

Who they are: what all agree on and the store has (``rebalance/recovery.py``), without those that
die meanwhile. The steps that follow are those of every change (``rebalance/assembly/change.py``).

Tokens for an expert without a live replica wait: no survivor serves before the refill, so none is
dropped, and none is computed with wrong weights.

A survivor that dies before the group is formed, or does not come to form it, is left out: the
others agree again. What fails later ends all survivors; all ranks then start again from the store,
which has either placement. So a death between the group and the first pass costs a start of all
ranks. A host cache that is started again meanwhile is waited for.
"""

from __future__ import annotations

import logging

from eplb.errors import RankError
from eplb.migration.recovery import Recovery
from rebalance.assembly.change import Change, Stages
from rebalance.assembly.group import StoreRendezvous, let_go, rejoin
from rebalance.rank.group import Group
from rebalance.rank.rank import Rank
from rebalance.recovery import recover
from telemetry.state.events import MEMBERSHIP

GROUP_DEADLINE_S = 10.0  # for survivors to form their groups

log = logging.getLogger(__name__)


def serve_on(rank: Rank, stages: Stages) -> None:
    """Enter a group with the other survivors of a broken one; each of them calls it.

    Args:
        rank: whose group broke; its threads in the new one are not started yet.
        stages: gets the seconds of each stage.

    Raises:
        RankError: a survivor is lost or excluded, or cannot serve on.
        PlacementError: the survivors have too few slots.
        MigrationError: an expert cannot be loaded.
        StoreError: the store cannot be used.
    """
    record, group = join_survivors(rank, stages)
    change = Change(rank, group, record, stages=stages)
    try:
        group.set_deadlines(rank.config)
        change.plan()
        change.fill()
        num_refills = len(change.survival.refills) if change.survival else 0
        words = f"{record.reason}; {len(record.survivors)} ranks serve on, membership "
        change.commit(f"{words}{record.membership}, {num_refills} experts loaded")
        loaded = num_refills * rank.bank.schema.record_bytes
        change.serve(MEMBERSHIP, {"refills": num_refills, "refill_bytes": loaded})
    except BaseException:
        change.close()  # the others must not wait for this rank
        raise


def join_survivors(
    rank: Rank, stages: Stages, *, deadline_s: float = GROUP_DEADLINE_S
) -> tuple[Recovery, Group]:
    """Agree with the other survivors and form their group; without those that die meanwhile.

    Args:
        rank: of the broken group, which it has not left yet.
        stages: gets the seconds.
        deadline_s: for each group to be formed.

    Raises:
        RankError: there was no agreement, or twice no group of the same survivors.
    """
    tried = frozenset[int]()
    while True:  # ends: a turn leaves a rank out, or is the second of the same ranks
        record = recover(rank, rank.store)
        stages.end("agree")

        def find_lost(record: Recovery = record) -> frozenset[int]:
            return rank.dead() & frozenset(record.survivors)

        def check() -> None:
            if dead := find_lost():
                raise RankError(f"rank {rank.number}: survivor {min(dead)} died")

        rendezvous = StoreRendezvous(rank.store, record.membership, check, deadline_s)
        group = None
        try:
            group = rejoin(
                f"recovery-{record.membership}",
                rank.group,
                record.survivors,
                rendezvous,
                run=record.run,
                config=rank.config,
            )
            # All are warm: one that stops before its first pass is known by its silence too.
            group.votes.begin_beats()
            group.gather("formed")  # from here on nobody comes back to agree again
        except RankError as exc:
            if group is not None:
                group.votes.close(is_failure=True)
            # Who did not come does not report either. If all come again, a second try shows what is
            # wrong: that a link is cut is seen late where no beats are sent.
            if not find_lost() and tried == frozenset(record.survivors):
                raise
            tried = frozenset(record.survivors)
            log.warning(
                "membership=%d rank=%d without a group: %s", record.membership, rank.number, exc
            )
        else:
            stages.end("group")
            return record, group
        void: list[object] = [group]
        group = None
        let_go(void)
