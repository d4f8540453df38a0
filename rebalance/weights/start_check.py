"""Start-up check of a rank's sources: every rank pulls known records from all of them.

Mapped memory may still be the wrong memory. A source that fails on one rank is used by none: all
ranks use the same sources, so that their speed does not differ, and report the reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from eplb.core.placement import EMPTY, Placement
from eplb.core.topology import Topology
from eplb.errors import ConfigError, MigrationError
from eplb.migration.build import Source
from rebalance.types import Record
from rebalance.weights.cache.client import HostCacheClient
from rebalance.weights.sources import HOST, MappedSlots, Place, WeightSources
from runtime.experts import ExpertBank, PeerBank
from runtime.group import first_refusal
from runtime.memory import digest
from runtime.streams import Completion

PROOF_DEADLINE_S = 60.0


@dataclass(frozen=True)
class KnownRecords:
    """Placement and digests of all ranks before they serve."""

    placement: Placement
    topology: Topology
    digests: torch.Tensor  # [L, E, 2]

    def held_by(self, rank: int) -> list[tuple[Record, int]]:
        """(record, slot of that rank) of the first and the last slot that it holds an expert in."""
        held = self.placement.slot_to_expert[:, self.topology.slots_on(rank)]
        found = [
            ((layer, expert), slot)
            for layer, slots in enumerate(held.tolist())
            for slot, expert in enumerate(slots)
            if expert != EMPTY
        ]
        return found[:1] + found[-1:]

    def places(self, rank: int, readable: frozenset[int]) -> Iterator[tuple[Record, Place]]:
        """Every kind of place of a rank, once or twice."""
        for record, slot in self.held_by(rank):
            yield record, Place(Source.SAME_RANK, rank, slot)
            yield record, HOST
        for peer in sorted(readable - {rank}):
            for record, slot in self.held_by(peer):
                yield record, Place(Source.PEER, peer, slot)


def checked_sources(
    rank: int,
    bank: ExpertBank,
    host: HostCacheClient,
    *,
    open_peers: Callable[[], Mapping[int, PeerBank]],
    known: KnownRecords,
    group: dist.ProcessGroup,
) -> tuple[WeightSources, str]:
    """Make the sources that pass on every rank; collective, of the same kinds on every rank.

    Args:
        rank: this one.
        bank: its own slots.
        host: the memory of its host.
        open_peers: maps the slots of the peers on this rank's host.
        known: what the live slots of all ranks hold now.
        group: every rank, at start-up.

    Returns:
        The sources, and one sentence with the reason of the choice.

    Raises:
        MigrationError: some rank reads wrong bytes from its own slots or the host cache of its
            host.
    """
    without_peers = WeightSources(MappedSlots(rank, bank), host)
    wrong = first_refusal(_wrong_with(without_peers, rank, bank, known), group)
    if wrong:
        raise MigrationError(
            f"start-up check failed for a rank's own slots or its host cache: {wrong}"
        )
    made: WeightSources | None = None
    try:
        made = WeightSources(MappedSlots(rank, bank, open_peers()), host)
        wrong = _wrong_with(made, rank, bank, known)
    except (ConfigError, MigrationError) as exc:
        wrong = str(exc)
    wrong = first_refusal(wrong, group)
    if made is None or wrong:
        return without_peers, f"weights are read from the host, not from peers: {wrong}"
    passed = f"peers' slots and the host cache passed the start-up check on {group.size()} ranks"
    return made, passed


def _wrong_with(sources: WeightSources, rank: int, bank: ExpertBank, known: KnownRecords) -> str:
    """Return the first failure, or "". Nothing serves yet, so this may wait."""
    size = bank.schema.record_bytes
    into = torch.empty(size, dtype=torch.uint8, device=bank.device)
    for record, place in known.places(rank, sources.readable):
        where = f"layer {record[0]} expert {record[1]} from {place}"
        try:
            if place == HOST:
                sources.host.lease([record], deadline_s=PROOF_DEADLINE_S)
            into.zero_()
            Completion(is_cuda=into.is_cuda).wait()  # zeros on this stream, the pull on another
            half = size // 2  # an offset other than 0 is to be right too
            landed = [sources.pull(record, place, at, into[at:][:half]) for at in (0, half)]
            deadline = time.monotonic() + PROOF_DEADLINE_S
            if not all(completion.wait_until(deadline) for completion in landed):
                return f"{where} did not arrive within {PROOF_DEADLINE_S:.0f} s"
            if place == HOST:
                sources.host.release([record])
        except MigrationError as exc:
            return f"{where}: {exc}"
        if digest(into) != tuple(known.digests[record].tolist()):
            return f"{where}: digest mismatch"
    return ""
