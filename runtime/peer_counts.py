"""An exchange of counts through memory that every rank of an NVLink domain can write.

A rank's counting kernel adds its counts to words of all peers, and the next kernel waits until its
own words are complete: no launch and no collective of its own. Two sets of words take turns. A rank
posts its batch n + 2 only after it has read batch n + 1, for which every peer had posted, and a
peer posts n + 1 only after it has read n: so no word is added to before it was read.

A wait has a deadline. A rank that misses it splits by its own counts from then on: its tokens still
go to replicas of their experts, and ``late`` says so.

Shapes:  E experts, N sources (ranks that route).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from eplb.errors import ConfigError

if TYPE_CHECKING:
    from runtime.kernels.batch_split import PeerTensors
    from runtime.memory.symmetric import SymmetricArena

DEADLINE_S = 10.0
POLL_S = (
    5e-7  # of one look at the words, at least; not measured, so a wait may be some times longer
)


class PeerCounts:
    """The words of this rank, and the addresses of those of all ranks."""

    def __init__(
        self, words: torch.Tensor, peers: Sequence[int], *, deadline_s: float = DEADLINE_S
    ) -> None:
        """
        Args:
            words: [2, E + N] int64, zeros, of this rank.
            peers: [N] addresses of all ranks' words, in this process.
            deadline_s: of a wait for all counts of a batch, at least.

        Raises:
            ConfigError: more ranks than a word can count.
        """
        from runtime.kernels.batch_counts import MOST_SOURCES
        from runtime.kernels.batch_split import PeerTensors

        if len(peers) > MOST_SOURCES:
            raise ConfigError(
                f"found {len(peers)} ranks that exchange counts, expected at most {MOST_SOURCES}"
            )
        self.arena: SymmetricArena | None = None  # the mapping lives as long as the addresses
        device = words.device
        self.deadline_s = deadline_s
        self.tensors: PeerTensors = PeerTensors(
            words=words,
            peers=torch.tensor(peers, dtype=torch.int64, device=device),
            turn=torch.zeros(2, dtype=torch.int32, device=device),
            late=torch.zeros(1, dtype=torch.int32, device=device),
            most_polls=max(1, round(deadline_s / POLL_S)),
        )

    @staticmethod
    def join(num_experts: int, group: dist.ProcessGroup, device: torch.device) -> PeerCounts:
        """Make those of a group, by symmetric memory; every rank of the group calls it.

        Raises:
            ConfigError: the GPUs cannot map each other's memory.
        """
        from runtime.memory.symmetric import SymmetricArena

        shape = (2, num_experts + group.size())
        arena = SymmetricArena(8 * shape[0] * shape[1], group, device)
        peers = [arena.peer(rank).data_ptr() for rank in range(group.size())]
        made = PeerCounts(arena.bytes.view(torch.int64).view(shape), peers)
        made.arena = arena
        torch.cuda.synchronize(device)
        dist.barrier(group)  # a peer's words are zero before the first batch is added
        return made

    def late(self) -> str:
        """What went wrong, in words; "" while all was in time. Waits for the device."""
        found = int(self.tensors.late.item())
        if not found:
            return ""
        return (
            f"{found} exchanges of counts were not complete within {self.deadline_s:g} s: a rank "
            "is dead or did not call its layers in order; batches are split by own counts since"
        )

    def check(self, num_sources: int, num_experts: int) -> None:
        """Refuse a split of other sizes.

        Raises:
            ConfigError: the words are not those of so many sources and experts.
        """
        found = tuple(self.tensors.words.shape)
        expected = (2, num_experts + num_sources)
        if found != expected or len(self.tensors.peers) != num_sources:
            raise ConfigError(
                f"found words {found} of {len(self.tensors.peers)} ranks, expected {expected} of "
                f"{num_sources}"
            )
