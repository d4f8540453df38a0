"""Transport for ranks in processes: peers of a host read each other, all read the host cache.

Ranks that cannot be read may be asked, where they listen (``rebalance/weights/rank_client.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from eplb.core.topology import Topology
from eplb.errors import MigrationError
from rebalance.threads.cancellation import IsWanted, always
from rebalance.types import Digest, Record
from rebalance.weights.interface import HOST, Place
from rebalance.weights.rank_client import OtherRanks
from rebalance.weights.rank_messages import Part
from runtime.experts import ExpertBank, PeerBank
from runtime.streams import Completion, OnStream, new_stream


class Peers(Protocol):
    """Live slots of other ranks that can be read without their help."""

    @property
    def ranks(self) -> frozenset[int]:
        """The ranks that can be read."""

    def read(self, place: Place, layer: int, offset: int, into: torch.Tensor) -> None:
        """Order the copy of a slot's bytes from ``offset`` on, on this thread's stream.

        Raises:
            MigrationError: it cannot be ordered.
        """


def ranks_beside(rank: int, topology: Topology) -> list[int]:
    """The other ranks of a rank's host."""
    hosts = topology.host_of_rank
    return [p for p in range(topology.num_ranks) if p != rank and hosts[p] == hosts[rank]]


class NoPeers:
    """No peers: all bytes come from the rank's own slots and the host cache."""

    ranks: frozenset[int] = frozenset()

    def read(self, place: Place, layer: int, offset: int, into: torch.Tensor) -> None:
        """Refuse."""
        raise MigrationError(f"layer {layer}: {place} cannot be read, expected the host cache")


class MappedPeers:
    """Peers' banks that this process has mapped: in shared memory, or in one symmetric allocation.

    Args:
        rank: the reading rank.
        topology: names the ranks on its host.
        bank: the reading rank's own.
        arena_of: gives a peer's memory, as ``PeerBank`` takes it.

    Raises:
        MigrationError: a peer's memory cannot be attached.
    """

    def __init__(
        self,
        rank: int,
        topology: Topology,
        bank: ExpertBank,
        arena_of: Callable[[int], str | torch.Tensor],
    ) -> None:
        self._banks = {
            peer: PeerBank(arena_of(peer), bank, int(topology.slots_of_rank[peer]))
            for peer in ranks_beside(rank, topology)
        }
        self.ranks = frozenset(self._banks)

    def read(self, place: Place, layer: int, offset: int, into: torch.Tensor) -> None:
        """Order the copy of a part of a peer's slot; on a CPU it is complete on return."""
        try:
            self._banks[place.rank].read(layer, place.slot, into, offset)
        except RuntimeError as exc:
            raise MigrationError(
                f"layer {layer} slot {place.slot} of rank {place.rank} cannot be read: {exc}"
            ) from exc


class HostMemory(Protocol):
    """What a transport needs of the host cache; ``HostCacheClient`` documents each method."""

    @property
    def num_entries(self) -> int:
        """Records that there is room for."""

    @property
    def bytes_from_other_hosts(self) -> int:
        """So far, for this rank."""

    def load(
        self,
        records: Sequence[Record],
        *,
        deadline_s: float,
        weights_version: int = 0,
        is_wanted: IsWanted = always,
    ) -> tuple[Sequence[Digest], int]:
        """Lease records; return their digests, and the bytes that the disk gave for it."""

    def prepare_for_gpu(self, records: Sequence[Record]) -> None:
        """Register leased records with CUDA."""

    def read_part(self, record: Record, offset: int, into: torch.Tensor) -> None:
        """Order the copy of a leased record's bytes."""

    def reload(self, record: Record, *, deadline_s: float, is_wanted: IsWanted = always) -> Digest:
        """Look at a leased record's bytes, and repair them."""

    def release(self, records: Collection[Record]) -> None:
        """End leases."""

    def hint(self, records: Sequence[Record], *, weights_version: int = 0) -> None:
        """Name what may be asked for next."""

    def invalidate(self, weights_version: int, *, deadline_s: float) -> None:
        """Void the records of older weights."""


@dataclass(frozen=True)
class RankMemory:
    """Sources of a rank beside its peers' slots."""

    rank: int
    bank: ExpertBank
    host_cache: HostMemory
    ranks_on_host: int = 1  # that share the host cache
    others: OtherRanks | None = None  # that can be asked over the network


class PullTransport:
    """The rank's own slots, its peers', its host cache, and other ranks where they can be asked.

    On a GPU copies run on two streams of the lowest priority, so that a slow host never holds up a
    fast peer; no kernel of serving ever waits for either.
    """

    def __init__(self, memory: RankMemory, peers: Peers) -> None:
        self._rank, self._bank, self._host_cache = memory.rank, memory.bank, memory.host_cache
        self._peers, self._device = peers, memory.bank.device
        self._ranks_on_host = memory.ranks_on_host
        self._is_cuda, self._weights_version = self._device.type == "cuda", 0
        streams = (new_stream(self._device) if self._is_cuda else None for _ in range(2))
        self._from_peers, self._from_host = map(OnStream, streams)
        self.readable = peers.ranks | {memory.rank}
        self._others = memory.others
        asked = memory.others.ranks if memory.others is not None else frozenset[int]()
        self.reachable = asked - self.readable

    def begin(self) -> None:
        """Bind the mover's thread to this rank's device and to its own stream, for digests.

        A new thread starts on device 0 and on the default stream, which serving may be using.
        """
        if self._is_cuda:
            torch.cuda.set_device(self._device)
            own = new_stream(self._device)
            torch.cuda.set_stream(own)
            self._from_peers.back = self._from_host.back = own

    def preload(
        self, records: Sequence[Record], deadline_s: float, is_wanted: IsWanted = always
    ) -> Mapping[str, int]:
        """Have the host cache load these records; return the loaded bytes by source."""
        from_hosts = self._host_cache.bytes_from_other_hosts
        _, from_disk = self._host_cache.load(
            records,
            deadline_s=deadline_s,
            weights_version=self._weights_version,
            is_wanted=is_wanted,
        )
        if self._is_cuda:
            # Here, not at the first pull: locking 44 MB takes longer than copying it.
            self._host_cache.prepare_for_gpu(records)
        from_hosts = self._host_cache.bytes_from_other_hosts - from_hosts
        return {"disk": from_disk, "other_host": from_hosts}

    @property
    def host_room(self) -> int:
        """An even part of the host cache's entries: as if every rank of the host were at it too."""
        return max(1, self._host_cache.num_entries // self._ranks_on_host)

    def hint(self, records: Sequence[Record]) -> None:
        """Name what is asked for next."""
        self._host_cache.hint(records, weights_version=self._weights_version)

    def reload(self, record: Record, deadline_s: float, is_wanted: IsWanted = always) -> None:
        """Have the host cache verify and reload a record."""
        self._host_cache.reload(record, deadline_s=deadline_s, is_wanted=is_wanted)

    def release(self, records: Sequence[Record]) -> None:
        """End the leases."""
        self._host_cache.release(records)

    def serve_weights(self, version: int, deadline_s: float) -> None:
        """Invalidate the records of older weights in the host cache."""
        self._host_cache.invalidate(version, deadline_s=deadline_s)
        self._weights_version = version

    def pull(self, record: Record, place: Place, offset: int, into: torch.Tensor) -> Completion:
        """Order the copy of a part of a record."""
        if place.is_far:
            return self._ask(record, place, offset, into)
        link = self._from_host if place == HOST else self._from_peers
        with link:
            if place == HOST:
                self._host_cache.read_part(record, offset, into)
            elif place.rank == self._rank:
                live = self._bank.live(record[0], place.slot)
                into.copy_(live[offset : offset + len(into)], non_blocking=True)
            else:
                if place.rank not in self.readable:
                    raise out_of_reach(record, place, "read", self._rank, self.readable)
                self._peers.read(place, record[0], offset, into)
            return Completion(is_cuda=self._is_cuda, stream=link.stream)

    def _ask(self, record: Record, place: Place, offset: int, into: torch.Tensor) -> Completion:
        if self._others is None or place.rank not in self.reachable:
            raise out_of_reach(record, place, "asked", self._rank, self.reachable)
        layer, expert = record
        part = Part(self._weights_version, layer, place.slot, expert, offset, into.numel())
        return self._others.pull(place.rank, part, into)

    def close(self) -> None:
        """Close connections to other ranks, but not the host cache client and the peers."""
        if self._others is not None:
            self._others.close()


def out_of_reach(
    record: Record, place: Place, what: str, rank: int, expected: frozenset[int]
) -> MigrationError:
    """The refusal of a place that a rank has no way to."""
    layer, expert = record
    return MigrationError(
        f"layer {layer} expert {expert}: rank {place.rank} cannot be {what} by rank {rank}, "
        f"expected one of {sorted(expected)}"
    )
