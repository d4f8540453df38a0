"""The ranks that serve together, as one of them sees them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from eplb.core.topology import Topology
from eplb.errors import RankError
from rebalance.types import VoteGroup
from runtime.group import CPU, first_sentence, gathered, set_deadline

RUN_OF_WAITING = "joining"  # of a rank that is alone until others admit it


@dataclass(frozen=True)
class Group:
    """One group of ranks, from its forming to the next change of its members.

    Args:
        rank: the rank that sees it, by its number in the deployment.
        run: its name in the store: each membership is a run of its own.
        topology: all ranks of the deployment; the members are alive in it.
        votes: the members' votes, and who of them is dead.
        tokens: for the exchange of tokens; None: the engine's own business.
        control: of gloo, for what the members agree on before they serve; None: none is needed.
        membership: the epoch in which it started or was recorded.
        device: whose tensors are exchanged as tokens.
    """

    rank: int
    run: str
    topology: Topology
    votes: VoteGroup
    tokens: dist.ProcessGroup | None = None
    control: dist.ProcessGroup | None = None
    membership: int = 0
    device: torch.device = CPU

    @property
    def members(self) -> list[int]:
        """Its ranks by their number in the deployment, in the order of the process groups."""
        return [int(rank) for rank in np.flatnonzero(self.topology.alive)]

    @property
    def is_waiting(self) -> bool:
        """Whether the rank is alone in it, and waits to be admitted by others."""
        return self.run == RUN_OF_WAITING

    def set_deadlines(self, tokens_s: float, control_s: float) -> None:
        """Limit what its exchanges may take; those of NCCL have no such limit."""
        assert self.control is not None, "a group with deadlines has process groups"
        if self.device.type == "cpu" and self.tokens is not None:
            set_deadline(self.tokens, tokens_s)
        set_deadline(self.control, control_s)

    def gather(
        self, message: Any, check: Callable[[], None] | None = None
    ) -> list[tuple[int, Any]]:
        """Give every member's message with its number; collective.

        Args:
            message: this rank's.
            check: called while others are waited for; what it raises ends the wait. None: it ends
                once a member is dead.

        Raises:
            RankError: a member died.
        """
        assert self.control is not None, "members that agree have a group for it"
        try:
            messages = gathered(message, self.control, check or self.raise_if_dead)
        except RuntimeError as exc:
            why = first_sentence(exc)
            raise RankError(f"rank {self.rank}: a rank died before all served on: {why}") from exc
        return list(zip(self.members, messages, strict=True))

    def raise_if_dead(self) -> None:
        """Wait no longer for a group whose member is dead.

        Raises:
            RankError: a member is.
        """
        if dead := self.votes.dead():
            raise RankError(f"rank {self.rank}: rank {min(dead)} died before all served on")
