"""Votes over torch.distributed: what ranks that are processes agree by."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from eplb.errors import RankError
from rebalance.protocol.liveness import LOOPBACK, Address, LivenessConnections, address_towards
from rebalance.types import Outcome, PendingVote
from runtime.group import gathered


class GlooVotes:
    """Votes over a private gloo group of torch.distributed, plus liveness connections.

    Args:
        group: every rank, for votes alone.
        host: address of this machine by which the other ranks reach it. None: the one from which
            the rendezvous of the group is reached; one in a file is taken to be of one machine.
        deadline_s: for all ranks to be connected with each other.
        silence_s: after which a rank that serves is dead; 0: only its closed connection counts.
        members: the group's ranks by their number in the deployment, in its order; None: all.

    Raises:
        RankError: a rank cannot be reached.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        host: str | None = None,
        deadline_s: float = 60.0,
        silence_s: float = 0.0,
        members: Sequence[int] | None = None,
    ) -> None:
        self._group: dist.ProcessGroup | None = group
        own = host or _host_towards_rendezvous(group)
        self._liveness = LivenessConnections(
            group.rank(),
            partial(self._exchange, group),
            host=own,
            deadline_s=deadline_s,
            silence_s=silence_s,
            members=members,
        )

    def _exchange(self, group: dist.ProcessGroup, mine: Address) -> list[Address]:
        host, port, key = mine
        try:
            found = gathered((host, port, key.hex()), group)
        except RuntimeError as exc:
            raise RankError(
                f"a rank died or timed out during the exchange of addresses: {exc}"
            ) from exc
        return [_address_of(rank, message) for rank, message in enumerate(found)]

    def cast(self, ballot: Sequence[int]) -> PendingVote:
        """Start an asynchronous all-reduce with MIN."""
        assert self._group is not None, "a rank that has left casts no vote"
        return _GlooVote(torch.tensor(ballot, dtype=torch.int64), self._group)

    def begin_beats(self) -> None:
        """Send heartbeats, and watch those of others, now that this rank is warm. Idempotent."""
        self._liveness.begin_beats()

    def dead(self) -> frozenset[int]:
        """Ranks whose liveness connection broke, or that are silent."""
        return self._liveness.dead()

    def close(self, *, is_failure: bool = False) -> None:
        """Announce the leave to all ranks, unless it is a failure, and close the connections."""
        self._liveness.close(is_failure=is_failure)
        self._group = None  # it is deleted where it is let go, and not here


def _address_of(rank: int, message: Any) -> Address:
    try:
        host, port, key = message
        return str(host), int(port), bytes.fromhex(key)
    except (TypeError, ValueError) as exc:
        raise RankError(f"rank {rank} sent {message!r}, expected its host, port and key") from exc


def _host_towards_rendezvous(group: dist.ProcessGroup) -> str:
    store = group.get_group_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return address_towards(store.host, store.port) if isinstance(store, TCPStore) else LOOPBACK


class _GlooVote:
    def __init__(self, vector: torch.Tensor, group: dist.ProcessGroup) -> None:
        self._vector = vector
        self._failed = False
        try:
            self._work = group.allreduce([vector], dist.ReduceOp.MIN)
        except RuntimeError:  # the group is broken already
            self._failed = True

    def poll(self, timeout_s: float) -> tuple[Outcome, list[int]]:
        if self._failed or self._is_late(timeout_s):
            return (Outcome.BROKEN if self._failed else Outcome.LATE), []
        try:
            self._work.wait()  # it has ended, successfully or not: this raises in the second case
        except RuntimeError:
            self._failed = True
            return Outcome.BROKEN, []
        return Outcome.VALUE, self._vector.tolist()

    def _is_late(self, timeout_s: float) -> bool:
        try:
            if timeout_s > 0:  # zero means "no timeout" to torch
                self._work.wait(timedelta(seconds=timeout_s))
        except RuntimeError:
            # A timeout or a failure, alike by type; and a vote that ends right after the
            # time-out has not failed. Only whether it has ended counts.
            pass
        return not self._work.is_completed()
