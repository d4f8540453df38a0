"""The counts of a batch: tokens of each expert, and how ranks exchange them.

Either by a collective of a process group, or through memory that every rank of an NVLink domain can
write (``PeerCounts``). There a rank's counting kernel adds its counts to words of all peers, and
the next kernel waits until its own words are complete: no launch and no collective of its own. Two
sets of words take turns. A rank posts its batch n + 2 only after it has read batch n + 1, for which
every peer had posted, and a peer posts n + 1 only after it has read n: so no word is added to
before it was read.

Such a wait has a deadline. A rank that misses it splits by its own counts from then on: its tokens
still go to replicas of their experts, and ``PeerCounts.late`` counts it.

Shapes:  E experts, N sources (ranks that route), M experts that are split, W ways, R ranks,
         B blocks of (token, k) pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from eplb.errors import ConfigError
from runtime.memory import SymmetricArena

DEADLINE_S = 10.0
POLL_S = 5e-7  # least time of one look; not measured, so a wait may be several times longer
MOST_SOURCES = 255  # sources that 8 bits of a word count: ``runtime.batch.kernels.counts``

Exchange = Callable[[torch.Tensor, torch.Tensor], None]  # own counts [E] -> gathered [N, E]


@dataclass(frozen=True)
class BatchTensors:
    """What the steps of one batch leave for each other. Contiguous int32 except ``rank_load``."""

    counts: torch.Tensor  # [E] tokens of this rank; zeros between batches on a device
    blocks: torch.Tensor  # [at least B, E] and of each block of its pairs; on a device
    starts: torch.Tensor  # [E] tokens of the sources before this one
    totals: torch.Tensor  # [E] tokens of all sources
    sent: torch.Tensor  # [N] (token, k) pairs of each source, of an exchange over peer memory
    up_to: torch.Tensor  # [M, W] position up to which a way takes tokens; none is past the last
    rank_load: torch.Tensor  # [R] float32, tokens of each rank


def all_gather_counts(group: dist.ProcessGroup) -> Exchange:
    """The exchange over a process group: an all-gather, which a CUDA graph can hold with NCCL."""

    # Its name in torch from 2.13 on, where the other is deprecated.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

    def exchange(counts: torch.Tensor, gathered: torch.Tensor) -> None:
        gather(gathered.view(-1), counts, group=group)

    return exchange


class PeerCounts:
    """The words of this rank, and the addresses of those of all ranks.

    Args:
        words: [2, E + N] int64, zeros, of this rank.
        peers: [N] addresses of all ranks' words, in this process.
        deadline_s: shortest time of a wait for all counts of a batch.

    Attributes:
        turn: [2] int32, the number of exchanges so far, and zero.
        late: [1] int32, exchanges that missed their deadline.
        most_polls: looks at the words before a wait ends.

    Raises:
        ConfigError: more ranks than a word can count.
    """

    def __init__(
        self, words: torch.Tensor, peers: Sequence[int], *, deadline_s: float = DEADLINE_S
    ) -> None:
        if len(peers) > MOST_SOURCES:
            raise ConfigError(
                f"found {len(peers)} ranks that exchange counts, expected at most {MOST_SOURCES}"
            )
        self._arena: SymmetricArena | None = None  # the mapping lives as long as the addresses
        self.words = words
        self.peers = torch.tensor(peers, dtype=torch.int64, device=words.device)
        self.turn = torch.zeros(2, dtype=torch.int32, device=words.device)
        self.late = torch.zeros(1, dtype=torch.int32, device=words.device)
        self.most_polls = max(1, round(deadline_s / POLL_S))

    @staticmethod
    def join(num_experts: int, group: dist.ProcessGroup, device: torch.device) -> PeerCounts:
        """Make those of a group, by symmetric memory; every rank of the group calls it.

        Raises:
            ConfigError: the GPUs cannot map each other's memory.
        """
        shape = (2, num_experts + group.size())
        arena = SymmetricArena(8 * shape[0] * shape[1], group, device)
        peers = [arena.peer(rank).data_ptr() for rank in range(group.size())]
        made = PeerCounts(arena.bytes.view(torch.int64).view(shape), peers)
        made._arena = arena
        torch.cuda.synchronize(device)
        dist.barrier(group)  # a peer's words are zero before the first batch is added
        return made
