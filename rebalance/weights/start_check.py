"""Start-up check of the transport: every rank pulls known records from all of its sources.

Mapped memory may still be the wrong memory. A source that fails on one rank is used by none: all
ranks use the same sources, so that their speed does not differ, and report the reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from eplb.core.placement import EMPTY, Placement
from eplb.core.topology import Topology
from eplb.errors import ConfigError, MigrationError
from eplb.migration.build import Source
from rebalance.types import Record
from rebalance.weights.interface import HOST, Place
from rebalance.weights.sources import NoPeers, Peers, PullTransport, RankMemory
from runtime.group.agreement import first_refusal
from runtime.memory.shared import digest
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


def choose_transport(
    memory: RankMemory,
    open_peers: Callable[[], Peers],
    known: KnownRecords,
    group: dist.ProcessGroup,
) -> tuple[PullTransport, str]:
    """Make the transport that passes on every rank; collective, with the same result on every rank.

    Args:
        memory: this rank's.
        open_peers: attaches the peers of this rank's host.
        known: what the live slots of all ranks hold now.
        group: every rank, at start-up.

    Returns:
        The transport, and one sentence with the reason of the choice.

    Raises:
        MigrationError: some rank reads wrong bytes from its own slots or the host cache of its
            host.
    """
    wrong = first_refusal(_wrong_with(PullTransport(memory, NoPeers()), known, memory), group)
    if wrong:
        raise MigrationError(
            f"start-up check failed for a rank's own slots or its host cache: {wrong}"
        )
    made: PullTransport | None = None
    try:
        made = PullTransport(memory, open_peers())
        wrong = _wrong_with(made, known, memory)
    except (ConfigError, MigrationError) as exc:
        wrong = str(exc)
    wrong = first_refusal(wrong, group)
    if made is None or wrong:
        ways = (
            "the host"
            if memory.others is None
            else "the host and from other ranks over the network"
        )
        why = f"weights are read from {ways}, not from peers: {wrong}"
        return PullTransport(memory, NoPeers()), why
    return (
        made,
        f"peers' slots and the host cache passed the start-up check on {group.size()} ranks",
    )


def _places(
    transport: PullTransport, known: KnownRecords, rank: int
) -> Iterator[tuple[Record, Place]]:
    """Every kind of place, once or twice."""
    for record, slot in known.held_by(rank):
        yield record, Place(Source.SAME_RANK, rank, slot)
        yield record, HOST
    for peer in sorted(transport.readable - {rank}):
        for record, slot in known.held_by(peer):
            yield record, Place(Source.PEER, peer, slot)


def _wrong_with(transport: PullTransport, known: KnownRecords, memory: RankMemory) -> str:
    """Return the first failure, or "". Nothing serves yet, so this may wait."""
    size, device = memory.bank.schema.record_bytes, memory.bank.device
    into = torch.empty(size, dtype=torch.uint8, device=device)
    for record, place in _places(transport, known, memory.rank):
        where = f"layer {record[0]} expert {record[1]} from {place}"
        try:
            if place == HOST:
                transport.preload([record], PROOF_DEADLINE_S)
            into.zero_()
            Completion(is_cuda=into.is_cuda).wait()  # zeros on this stream, the pull on another
            half = size // 2  # an offset other than 0 is to be right too
            landed = [transport.pull(record, place, at, into[at:][:half]) for at in (0, half)]
            deadline = time.monotonic() + PROOF_DEADLINE_S
            if not all(completion.wait_until(deadline) for completion in landed):
                return f"{where} did not arrive within {PROOF_DEADLINE_S:.0f} s"
        except MigrationError as exc:
            return f"{where}: {exc}"
        if digest(into) != tuple(known.digests[record].tolist()):
            return f"{where}: digest mismatch"
    return ""
