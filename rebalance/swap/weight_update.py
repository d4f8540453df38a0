"""Replaces all weights of a rank while it serves: nothing moves until the new ones are agreed on.

The order of the calls, and what goes wrong without the fence, is in
``rebalance/swap/weights_fence.py``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from eplb.core.placement import EMPTY
from eplb.errors import RankError
from rebalance.protocol import phases
from rebalance.protocol.ballot import NO_PLAN, Verdict
from rebalance.protocol.phases import Phase
from rebalance.rank.core import RankCore
from rebalance.rank.verdicts import Voting
from rebalance.stage.digest_table import agreed_digests, cast_digests
from rebalance.swap.scrub_turns import ScrubTurns
from rebalance.swap.swapper import Swapper


class WeightUpdate:
    """One rank's side of an update, on the step's thread."""

    def __init__(
        self, core: RankCore, swapper: Swapper, voting: Voting, scrub_turns: ScrubTurns
    ) -> None:
        self._core, self._swapper, self._voting = core, swapper, voting
        self._scrub_turns = scrub_turns
        self._deadline_s = core.settings.vote_deadline_s

    def begin(self, version: int) -> None:
        """Stop moving experts, on every rank; see RankAgent.begin_update."""
        for _ in self.begin_steps(version):
            pass

    def begin_steps(self, version: int) -> Iterator[str]:
        """``begin`` in steps: names what the next one may have to wait for."""
        core, step = self._core, self._core.steps.last
        with core.shared.changed:
            core.fence.begin(version)
            plan = core.shared.state.plan
        core.watchdog.step.busy(f"updating the weights to version {version}")
        self._scrub_turns.stop(self._deadline_s)
        if plan is not None:
            reason = f"the weights are updated to version {version}"
            core.shared.update(phases.want_abort, plan.plan_id, reason)
        yield "vote"
        self._voting.read(step + 1, must_finish=True)  # that step is made, and was counted
        is_moving = True
        while is_moving:  # each verdict drops what was voted on, so two are enough
            self._voting.cast(step)
            yield "vote"
            is_moving = self._verdict(step).newest_plan_id != NO_PLAN
        yield "rest"
        self._wait_until_idle()

    def held(self) -> Iterator[tuple[int, int, int]]:
        """Return (layer, slot of this rank, expert) of every live slot."""
        slots_on_rank = self._core.settings.topology.slots_on(self._core.rank)
        slots = self._swapper.placement.slot_to_expert[:, slots_on_rank]
        for layer, slot in np.argwhere(slots != EMPTY).tolist():
            yield layer, slot, int(slots[layer, slot])

    def end(self) -> None:
        """Serve what the engine has loaded; see RankAgent.end_update."""
        for _ in self.end_steps():
            pass

    def end_steps(self) -> Iterator[str]:
        """``end`` in steps: names what the next one may have to wait for."""
        core, placement = self._core, self._swapper.placement
        shape = placement.num_layers, placement.num_experts
        found = {(layer, e): core.parts.bank.digest(layer, slot) for layer, slot, e in self.held()}
        vote = cast_digests(found, *shape, core.links.votes)
        yield "digests"
        core.parts.digests.copy_(agreed_digests(vote, *shape, deadline_s=self._deadline_s))
        version = core.fence.next_version
        assert version is not None, "an update ends that has begun"
        core.links.transport.serve_weights(version, self._deadline_s)
        with core.shared.changed:
            core.fence.end()
            core.shared.state = phases.serve_weights(core.shared.state, core.fence.version)
            core.shared.changed.notify_all()
        core.watchdog.step.busy(f"after the update to weights version {version}")

    def _verdict(self, step: int) -> Verdict:
        rank = self._core.rank
        verdict = self._voting.read(step + 1, must_finish=True)
        assert verdict is not None, "a vote that must finish has a verdict"
        if verdict.weights_version is None:
            raise RankError(
                f"rank {rank}: not every rank updates its weights to version "
                f"{self._core.fence.next_version} after step {step}, expected all to"
            )
        return verdict

    def _wait_until_idle(self) -> None:
        """Wait until nothing is being copied: the mover drains what it had begun."""
        shared, deadline = self._core.shared, time.monotonic() + self._deadline_s
        with shared.changed:
            while shared.state.phase is not Phase.IDLE:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise RankError(
                        f"rank {self._core.rank}: the mover still drains the dropped migration "
                        f"after {self._deadline_s:.0f} s"
                    )
                shared.changed.wait(left_s)
        self._core.voter.wait_for_device(self._swapper.last_swap, self._core.steps.last)
