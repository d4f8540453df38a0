"""The process of one rank: its place on its host, and how its rank goes from group to group."""

from __future__ import annotations

import logging
import socket
from collections.abc import Collection, Mapping, Sequence

import torch.distributed as dist

from eplb.errors import ConfigError, EplbError, StoreError
from rebalance.assembly.description import DeploymentDescription
from rebalance.assembly.meeting import Attendance
from rebalance.assembly.next_group import (
    NextGroup,
    NotChanged,
    await_exclusion,
    be_admitted,
    change_group,
)
from rebalance.assembly.places import report_halt, report_ready, report_run, report_wait
from rebalance.assembly.survivors import Stages, serve_on
from rebalance.protocol import phases
from rebalance.rank.rank import Rank
from rebalance.recovery import let_go, recover
from runtime.counters import PassCounter
from runtime.group import end_exchanges
from telemetry.state.runs import GROUP_STAYS

log = logging.getLogger(__name__)


def attendance(deployment: DeploymentDescription, rank: int, members: Sequence[int]) -> Attendance:
    """What a rank shows to the members that it meets."""
    own = deployment.hosts[int(deployment.topology.host_of_rank[rank])]
    summary = dict(deployment.summary())
    if len(members) < deployment.topology.num_ranks:
        summary["members"] = ", ".join(map(str, members))
    return Attendance(rank, members, own, deployment.join_key, summary)


class RankProcess:
    """Lets the one rank of this process serve on after a death, join and leave.

    Args:
        rank: in its first group.
        deployment: what every rank is given.
        claim: open while this process has the rank's place.
        environ: names the launcher, if there is one.

    Raises:
        ConfigError: the rank is to join others, and cannot.
    """

    def __init__(
        self,
        rank: Rank,
        deployment: DeploymentDescription,
        claim: socket.socket,
        environ: Mapping[str, str],
    ) -> None:
        self.rank, self.deployment, self.has_left = rank, deployment, False
        self._claim, self._environ = claim, environ
        self._next: NextGroup | None = None
        # To delete a broken group of NCCL would wait for its exchanges up to their deadline.
        self._broken: list[dist.ProcessGroup] = []
        if rank.group.is_waiting:
            if refusal := self._refusal_of_changes():
                raise ConfigError(f"rank {rank.number} cannot join the others: {refusal}")
            # Its first step ends at once, and ``survive`` waits for the others to admit it.
            rank.shared.update(phases.freeze, "it waits to be admitted")
            rank.voting.switch_at = 0

    def attend(self, members: Sequence[int]) -> Attendance:
        """What it shows to the members of a group that its rank is to enter."""
        return attendance(self.deployment, self.rank.number, members)

    def survive(self) -> bool:
        """Have the rank enter another group; see ``Rank.survive``."""
        rank, stages, environ = self.rank, Stages(), self._environ
        members, joins, before = rank.members, rank.group.is_waiting, list[object]([rank.group])
        why = refusal = self._refusal()
        try:
            if self.enter_next(stages, refusal):
                tokens = rank.group.tokens
                assert tokens is not None, "the next group was formed with one"
                for dispatcher in rank.dispatchers:
                    dispatcher.use(rank.topology, tokens)
                rank.start()
                let_go(before)  # all ranks of the new group have left the one before
                report_run(rank.number, rank.group.run, environ)
                report_ready(rank.number, environ)
                log.warning("rank %d serves in run %s: %s", rank.number, rank.group.run, stages)
                return True
        except EplbError as exc:
            log.warning("rank %d: no recovery: %s", rank.number, exc)
            if joins:
                report_wait(rank.number, f"another start: {exc}", environ)
            why = refusal or str(exc)
        rank.leave()  # an orderly leave: the others must not take it for a death
        if rank.config.serve_on and not (joins or self.has_left):
            self._note_restart(members - rank.members | rank.dead() & members, why)
        rank.journal.close()
        return False

    def enter_next(self, stages: Stages, refusal: str) -> bool:
        """Enter the group that follows the rank's; False: the rank ends.

        Args:
            stages: gets the seconds of each stage.
            refusal: why the rank does not serve on after a death; "": it does.

        Raises:
            EplbError: there is no such group.
        """
        rank, group = self.rank, self.rank.group
        if group.is_waiting:
            is_admitted = be_admitted(rank, self.attend, stages)
            self.has_left = not is_admitted
            return is_admitted
        if refusal:
            log.info("rank %d does not serve on: %s", rank.number, refusal)
            recover(rank, rank.store)
            return False
        formed = None if self._next is None else self._next.take()
        if rank.changes_group:
            try:
                if formed is not None:
                    change_group(rank, formed, stages)
                    return True
                # Its votes were for a group without this rank, which may serve already.
                if await_exclusion(rank):
                    report_halt(rank.number, self._environ)
                    self.has_left = True
                    return False
            except NotChanged as exc:
                log.warning("rank %d: the group is not changed as planned: %s", rank.number, exc)
        if formed is not None:
            formed.close()
            void: list[object] = [formed]
            formed = None
            let_go(void)
        if group.device.type == "cuda" and group.tokens is not None:
            self._broken.append(group.tokens)
            end_exchanges(group.tokens, group.device)
        serve_on(rank, stages)
        return True

    def _refusal(self) -> str:
        """Return why the rank cannot serve on after a death; "": it can."""
        rank = self.rank
        refusal = "" if rank.config.serve_on else "agent.serve_on is off"
        if rank.group.device.type == "cuda" and not rank.dispatchers:
            refusal = refusal or (
                "tokens are not exchanged by the dispatcher of all_to_all(), expected it on GPUs: "
                "DeepEP's kernels wait for a dead rank"
            )
        if not isinstance(rank.passes, PassCounter):
            refusal = refusal or "the engine numbers its passes itself, expected a PassCounter"
        return refusal

    def _refusal_of_changes(self) -> str:
        """Return why no rank can join or leave its group; "": it can change."""
        if self.rank.group.device.type == "cpu":
            return self._refusal()
        return "its group is of NCCL, expected ranks on CPUs, whose groups are of gloo"

    def begin_group(self) -> None:
        """Have the rank, which is about to serve in a group, take part in its planned changes."""
        rank, refusal = self.rank, self._refusal_of_changes()
        rank.notes[GROUP_STAYS] = refusal
        self._next = None
        if not (refusal or rank.group.is_waiting):
            self._next = NextGroup(rank, self.attend)
            rank.on_look = self._next.look

    def _note_restart(self, lost: Collection[int], why: str) -> None:
        rank = self.rank
        try:
            rank.store.note_restart(rank.group.run, sorted(lost), why)
        except StoreError as exc:
            log.warning("rank %d: the reason of the restart is not stored: %s", rank.number, exc)

    def close(self) -> None:
        """Leave the rank's place to another process."""
        self._claim.close()
