"""Where a rank takes the bytes of experts from: one interface, whatever holds them.

    place                    source                        bytes come by
    own slot, peer's slot    MappedSlots                   a copy from memory that is mapped here
    host                     HostCacheClient               the same, once the record is leased
      disk                     the host cache brings them into its memory (cache/server.py)

Pulls are one-sided: the receiver reads, and the serving side takes no part, so a busy or dying
source can never block a receiver (two-sided transfers cause hangs elsewhere: pytorch issue 174288,
sglang issue 7956). ``stage/source_choice.py`` chooses the place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch

from eplb.core.topology import Topology
from eplb.errors import MigrationError
from eplb.migration.build import Source
from rebalance.types import Record
from rebalance.weights.cache.client import HostCacheClient
from runtime.experts import ExpertBank, PeerBank
from runtime.streams import Completion, OnStream, new_stream

NO_RANK = -1


class Link(Enum):
    """A kind of link with its own bandwidth budget.

    Copies within a rank count as a peer's: they run on the same stream and engines.
    """

    PEER = "peer"
    HOST = "host"


@dataclass(frozen=True, order=True)
class Place:
    """Where a record's bytes lie: a slot of a rank, or the host cache of the receiver's host."""

    source: Source  # SAME_RANK, PEER or HOST
    rank: int = NO_RANK
    slot: int = -1  # number among the slots of that rank, from 0 on

    def __str__(self) -> str:
        if self == HOST:
            return "the host"
        return f"slot {self.slot} of rank {self.rank}"

    @property
    def name(self) -> str:
        """Label of this place in metrics."""
        return self.source.name.lower()

    @property
    def link(self) -> Link:
        """The link that its bytes come over."""
        return Link.HOST if self == HOST else Link.PEER


HOST = Place(Source.HOST)


class WeightSource(Protocol):
    """One kind of source. Called from the mover's thread only."""

    @property
    def ranks(self) -> frozenset[int]:
        """Ranks whose live slots it gives; none of a host."""

    def begin(self, back: torch.cuda.Stream | None) -> None:
        """The calling thread is the mover's, which works on the stream ``back``; None on a CPU."""

    def pull(self, record: Record, place: Place, offset: int, into: torch.Tensor) -> Completion:
        """Order the copy of a record's bytes ``offset`` .. ``offset + len(into)`` into ``into``.

        Returns:
            Completion of the copy; on a CPU it is complete on return.

        Raises:
            MigrationError: the place cannot be read.
        """

    def invalidate(self, version: int, *, deadline_s: float) -> None:
        """Give no bytes of weights older than ``version``; called while nothing moves.

        Raises:
            MigrationError: the source disconnected or timed out.
        """


class MappedSlots:
    """A rank's own slots, and those of peers whose memory is mapped here: a ``WeightSource``.

    On a GPU copies run on a stream of their own of the lowest priority, so that a slow host never
    holds up a fast peer, and no kernel of serving waits for them.

    Args:
        rank: the reading rank.
        bank: its own slots.
        peers: those of other ranks on its host; see ``map_peers``.
    """

    def __init__(
        self, rank: int, bank: ExpertBank, peers: Mapping[int, PeerBank] | None = None
    ) -> None:
        self._rank, self._bank, self._peers = rank, bank, dict(peers or {})
        self._is_cuda = bank.device.type == "cuda"
        self._stream = OnStream(new_stream(bank.device) if self._is_cuda else None)
        self.ranks = frozenset([rank, *self._peers])

    def begin(self, back: torch.cuda.Stream | None) -> None:
        """Return to the mover's own stream after each copy."""
        self._stream.back = back

    def pull(self, record: Record, place: Place, offset: int, into: torch.Tensor) -> Completion:
        """Order the copy of a part of a slot. See ``WeightSource.pull``."""
        with self._stream:
            self.read(record[0], place, offset, into)
            return Completion(is_cuda=self._is_cuda, stream=self._stream.stream)

    def read(self, layer: int, place: Place, offset: int, into: torch.Tensor) -> None:
        """Order the copy of a part of a slot, on this thread's stream.

        Raises:
            MigrationError: it cannot be ordered.
        """
        if place.rank == self._rank:
            live = self._bank.live(layer, place.slot)
            into.copy_(live[offset : offset + len(into)], non_blocking=True)
            return
        try:
            self._peers[place.rank].read(layer, place.slot, into, offset)
        except RuntimeError as exc:
            raise MigrationError(
                f"layer {layer} slot {place.slot} of rank {place.rank} cannot be read: {exc}"
            ) from exc

    def invalidate(self, version: int, *, deadline_s: float) -> None:
        """Nothing to do: slots hold what serves."""


def ranks_beside(rank: int, topology: Topology) -> list[int]:
    """The other live ranks of a rank's host."""
    hosts, alive = topology.host_of_rank, topology.alive
    beside = [r for r in range(topology.num_ranks) if hosts[r] == hosts[rank] and alive[r]]
    return [peer for peer in beside if peer != rank]


def map_peers(
    rank: int,
    topology: Topology,
    bank: ExpertBank,
    arena_of: Callable[[int], str | torch.Tensor],
) -> dict[int, PeerBank]:
    """Map the slots of the other ranks of a rank's host: shared memory, or symmetric memory.

    Args:
        rank: the reading rank.
        topology: names the ranks on its host.
        bank: the reading rank's own.
        arena_of: gives a peer's memory, as ``PeerBank`` takes it.

    Raises:
        MigrationError: a peer's memory cannot be attached.
    """
    return {
        peer: PeerBank(arena_of(peer), bank, int(topology.slots_of_rank[peer]))
        for peer in ranks_beside(rank, topology)
    }


class WeightSources:
    """All sources of one rank. Called from the mover's thread only.

    Args:
        slots: slots that are mapped here; None: those of an engine, which moves them itself.
        host: the memory of this host.
    """

    def __init__(self, slots: WeightSource | None, host: HostCacheClient) -> None:
        self.slots, self.host = slots, host
        self.readable = slots.ranks if slots else frozenset[int]()
        self._all = [source for source in (slots, host) if source is not None]

    def begin(self, device: torch.device) -> None:
        """Bind the mover's thread to the rank's device and to a stream of its own, for digests.

        A new thread starts on device 0 and on the default stream, which serving may be using.
        """
        own = None
        if device.type == "cuda":
            torch.cuda.set_device(device)
            own = new_stream(device)
            torch.cuda.set_stream(own)
        for source in self._all:
            source.begin(own)

    def pull(self, record: Record, place: Place, offset: int, into: torch.Tensor) -> Completion:
        """Order the copy of a part of a record from a place. See ``WeightSource.pull``."""
        if place == HOST:
            return self.host.pull(record, place, offset, into)
        if self.slots is None or place.rank not in self.readable:
            layer, expert = record
            raise MigrationError(
                f"layer {layer} expert {expert}: rank {place.rank} cannot be read by this rank, "
                f"expected one of {sorted(self.readable)}"
            )
        return self.slots.pull(record, place, offset, into)

    def invalidate(self, version: int, *, deadline_s: float) -> None:
        """Use no bytes of weights older than ``version``; called while nothing moves.

        Raises:
            MigrationError: the host cache disconnected or timed out.
        """
        for source in self._all:
            source.invalidate(version, deadline_s=deadline_s)
