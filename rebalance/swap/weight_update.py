"""Replaces all weights of a rank while it serves: nothing of old ones is swapped in over new ones.

    rank.begin_update(version=7)          # on every rank, between the same two steps
    for layer, slot, expert in rank.held():  # by the placement that serves, not the first one
        load(layer, expert, into=bank.live(layer, slot))
    rank.end_update()

vLLM issue 55228 shows two failures: weights reloaded by the first placement after experts have
moved, and a staged buffer of old weights written over the new ones. Here the engine reads from
``held`` what each slot holds, a running migration is dropped by vote before the first byte is
written, every migration names its weights version, and ranks vote with the version.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import numpy as np
import torch

from eplb.clock import Deadline
from eplb.core.placement import EMPTY
from eplb.errors import RankError
from rebalance.protocol import phases
from rebalance.protocol.ballot import NO_PLAN, Verdict
from rebalance.protocol.phases import Phase
from rebalance.protocol.voter import Voter
from rebalance.rank.parts import RankInGroup
from rebalance.stage.digest_table import cast_digests, read_digests, table_of
from rebalance.swap.scrubber import ScrubSchedule
from rebalance.swap.swapper import Swapper, Voting
from rebalance.threads.waiting import WAIT_S

log = logging.getLogger(__name__)


class WeightUpdate:
    """One rank's side of an update, on the step's thread.

    Args:
        rank: whose weights are replaced.
        voter: waits for the device.
        swapper: knows the placement that serves.
        voting: has a migration under way dropped.
        scrub_schedule: stopped for the update.
    """

    def __init__(
        self,
        rank: RankInGroup,
        voter: Voter,
        swapper: Swapper,
        voting: Voting,
        scrub_schedule: ScrubSchedule,
    ) -> None:
        self._voter, self._swapper, self._voting = voter, swapper, voting
        self._scrub_schedule, self._slots = scrub_schedule, rank.slots
        self._sources, self._votes, self._clock = rank.sources, rank.group.votes, rank.monotonic
        self._deadline_s = rank.config.vote_deadline_s  # for the other ranks
        self._shared, self._beat = rank.shared, rank.watchdog.step

    def begin(self, version: int, step: int) -> None:
        """Stop moving experts, on every rank, after a step; see Rank.begin_update."""
        for _ in self.begin_steps(version, step):
            pass

    def begin_steps(self, version: int, step: int) -> Iterator[str]:
        """``begin`` in steps: names what the next one may have to wait for."""
        plan = self._shared.update(phases.begin_update, version).plan
        self._beat.busy(f"updating the weights to version {version}")
        self._scrub_schedule.stop(self._deadline_s)
        if plan is not None:
            reason = f"the weights are updated to version {version}"
            self._shared.update(phases.want_abort, plan.plan_id, reason)
        yield "vote"
        self._voting.read(step + 1, must_finish=True)  # that step is made, and was counted
        is_moving = True
        while is_moving:  # each verdict drops what was voted on, so two are enough
            self._voting.cast(step)
            yield "vote"
            is_moving = self._verdict(step).newest_plan_id != NO_PLAN
        yield "rest"
        self._wait_until_idle(step)

    def held(self) -> Iterator[tuple[int, int, int]]:
        """Return (layer, slot of this rank, expert) of every live slot."""
        slots = self._slots.held(self._swapper.placement)
        for layer, slot in np.argwhere(slots != EMPTY).tolist():
            yield layer, slot, int(slots[layer, slot])

    def end(self) -> None:
        """Serve what the engine has loaded; see Rank.end_update."""
        for _ in self.end_steps():
            pass

    def end_steps(self) -> Iterator[str]:
        """``end`` in steps: names what the next one may have to wait for."""
        placement, bank = self._swapper.placement, self._slots.bank
        loaded = {(layer, e): bank.digest(layer, slot) for layer, slot, e in self.held()}
        known = table_of(loaded, placement.num_layers, placement.num_experts)
        vote = cast_digests(known, self._votes)
        yield "digests"
        agreed = read_digests(vote, known, deadline_s=self._deadline_s)
        self._report_unchanged((self._slots.digests == agreed).all(dim=-1))
        self._slots.digests.copy_(agreed)
        version = self._shared.state.next_weights
        assert version is not None, "an update ends that has begun"
        self._sources.invalidate(version, deadline_s=self._deadline_s)
        self._shared.update(phases.serve_weights)
        self._beat.busy(f"after the update to weights version {version}")

    def _report_unchanged(self, is_same: torch.Tensor) -> None:
        """Report experts [L, E] with their old bytes beside others with new ones.

        Replicas are compared by the vote. An expert with one replica can only be compared with
        what it was: all ranks see the same, and an update may leave experts as they are.
        """
        unchanged = is_same.nonzero().tolist()
        if 0 < len(unchanged) < is_same.numel():
            layer, expert = unchanged[0]
            log.warning(
                "rank %d: weights version %s: %d of %d experts have the bytes of the version "
                "before, first layer %d expert %d, expected new ones: unless the update leaves "
                "them, a rank did not load them",
                self._slots.rank,
                self._shared.state.next_weights,
                len(unchanged),
                is_same.numel(),
                layer,
                expert,
            )

    def _verdict(self, step: int) -> Verdict:
        verdict = self._voting.read(step + 1, must_finish=True)
        assert verdict is not None, "a vote that must finish has a verdict"
        if verdict.weights_version is None:
            raise RankError(
                f"rank {self._slots.rank}: not every rank updates its weights to version "
                f"{self._shared.state.next_weights} after step {step}, expected all to"
            )
        return verdict

    def _wait_until_idle(self, step: int) -> None:
        """Wait until nothing is being copied: the mover drains what it had begun."""
        shared, deadline = self._shared, Deadline.after(self._deadline_s, self._clock)
        with shared.changed:
            while shared.state.phase is not Phase.IDLE:
                if deadline.has_passed:
                    raise RankError(
                        f"rank {self._slots.rank}: the mover still drains the dropped migration "
                        f"after {self._deadline_s:.0f} s"
                    )
                shared.changed.wait(min(deadline.left_s, WAIT_S))
        self._voter.wait_for_device(self._swapper.last_swap, step)
