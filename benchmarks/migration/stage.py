"""Staging, measured: experts into staging memory, against the plain copy of as many bytes.

Ours and the plain copies take turns in one run, once on one rank alone and once on all at once;
ours includes the digest of every record. Bytes come from a peer, from locked host memory of the
benchmark itself, or from a host cache that was filled from a checkpoint.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from benchmarks.migration.big_rank import (
    DEADLINE_S,
    BigRank,
    Shapes,
    build,
    fill,
    seconds,
)
from benchmarks.migration.preload import write_experts
from benchmarks.result_table import Row
from eplb.core.placement import EMPTY
from eplb.migration.build import Move, Source
from rebalance.protocol.phases import RankPhase
from rebalance.stage.lanes import Pull
from rebalance.stage.source_choice import SourceChoice
from rebalance.stage.stage_settings import StageSettings
from rebalance.stage.stager import Stager
from rebalance.threads.waiting import SharedPhase, drive
from rebalance.types import IsWanted, Record, always
from rebalance.weights.cache.address import HostCacheAddress
from rebalance.weights.cache.cache_settings import HostCacheSettings
from rebalance.weights.cache.client import HostCacheClient
from rebalance.weights.cache.server import HostCacheServer
from rebalance.weights.sources import MappedSlots, Place
from runtime.checkpoints.checkpoint import Checkpoint
from runtime.memory import digest
from runtime.streams import Completion, OnStream, new_stream
from tests.support.launch import launch
from tests.support.local_group import LocalHost

NUM_STAGED = 16
REPEATS = 8
LAUNCH_DEADLINE_S = 150.0


class PinnedHostCache(LocalHost):
    """Records in locked host memory, as a host cache that holds them all already."""

    def __init__(self, big: BigRank, records: list[Record]) -> None:
        size = big.bank.schema.record_bytes
        is_cuda = big.device.type == "cuda"
        whole = torch.empty(len(records) * size, dtype=torch.uint8, pin_memory=is_cuda)
        self._of = dict(zip(records, whole.view(len(records), size), strict=True))
        super().__init__(self._of)
        self._stream = OnStream(new_stream(big.device) if is_cuda else None)
        scratch = big.bank.staging(0)
        for layer, expert in records:
            fill(scratch, layer, expert, big.bank.schema)
            self._of[(layer, expert)].copy_(scratch)

    def begin(self, back: torch.cuda.Stream | None) -> None:
        """Return to the mover's own stream after each copy."""
        self._stream.back = back

    def lease(
        self, records: Sequence[Record], *, deadline_s: float, is_wanted: IsWanted = always
    ) -> Mapping[str, int]:
        """Nothing comes from disk."""
        return {}

    def pull(self, record: Record, place: Place, offset: int, into: torch.Tensor) -> Completion:
        """Order the copy of a part, on a stream of its own."""
        with self._stream:
            self.read_part(record, offset, into)
            return Completion(is_cuda=into.is_cuda, stream=self._stream.stream)

    def read_part(self, record: Record, offset: int, into: torch.Tensor) -> None:
        """Order the copy of a part."""
        into.copy_(self._of[record][offset : offset + len(into)], non_blocking=True)


def measure_stage(
    rank: int,
    num_ranks: int,
    shapes: Shapes,
    source: Source,
    address: HostCacheAddress | None = None,
) -> list[Row]:
    """Ours, digests and all, against one plain copy of each record, in turns.

    Args:
        address: of the host cache; None: in its place, locked memory of this process.
    """
    big = build(rank, num_ranks, shapes)
    work = stage_work(big, source, address)
    origin = {Source.PEER: "a peer", Source.HOST: "the host"}[source]
    origin += "'s host cache" if address is not None else ""
    target = ">= 85 %" if source is Source.PEER else ">= 90 %"
    gigabytes = NUM_STAGED * shapes.schema.record_bytes / 1e9
    rows = []
    for who in ("one rank", "all at once"):
        plain_s, ours_s = in_turns(big, work, is_running=who == "all at once" or rank == 0)
        what = f"stage {shapes.schema.record_bytes / 1e6:.0f} MB experts from {origin}, {who}"
        rates = f"{gigabytes / plain_s:.1f} -> {gigabytes / ours_s:.1f} GB/s"
        rows.append((what, f"{rates}, {plain_s / ours_s:.0%} of the plain copy", target))
    rows.append(("every staged record has its digest", str(work.is_right()), "True"))
    big.votes.close()
    return rows


@dataclass(frozen=True)
class StageWork:
    """The same records into the same staging entries, by our stager and by plain copies."""

    ours: Callable[[], None]
    plain: Callable[[], None]
    is_right: Callable[[], bool]  # whether every entry has its expert's digest


def stage_work(big: BigRank, source: Source, address: HostCacheAddress | None) -> StageWork:
    """Make ready what is to be timed: sixteen records of the next rank's, into this one."""
    moves = incoming(big, source)
    records = [(move.layer, move.expert) for move in moves]
    entries = [big.bank.staging(number) for number in range(NUM_STAGED)]
    held = big.placement.slot_to_expert
    host_cache: HostCacheClient | PinnedHostCache | None = None
    if address is not None:
        host_cache = leased(big, address, records)
    elif source is Source.HOST:
        host_cache = PinnedHostCache(big, records)
    sources, slots = big.sources(host_cache), MappedSlots(big.rank, big.bank, big.peers)
    sources.begin(big.device)
    choice = SourceChoice(big.rank, big.topology, sources.readable, frozenset)
    stager = Stager(sources, choice, big.digests, StageSettings(), time.monotonic)
    shared = SharedPhase(RankPhase(generation=0))

    def ours() -> None:
        pulls = [Pull(m, e, held) for m, e in zip(moves, entries, strict=True)]
        drive(stager.stage(pulls, lambda: True), shared, time.monotonic)

    def plain() -> None:
        for move, entry in zip(moves, entries, strict=True):
            if host_cache is not None:
                host_cache.read_part((move.layer, move.expert), 0, entry)
            else:
                slots.read(move.layer, choice.holders(move, held)[0], 0, entry)

    def is_right() -> bool:
        return all(
            digest(entry) == tuple(big.digests[record].tolist())
            for entry, record in zip(entries, records, strict=True)
        )

    return StageWork(ours, plain, is_right)


def in_turns(big: BigRank, work: StageWork, *, is_running: bool) -> tuple[float, float]:
    """Median seconds of the plain copies and of ours; a first pair of runs is not counted.

    Every rank waits for every other before each run; one that does not run only waits.
    """
    found: list[tuple[float, float]] = []
    for _ in range(REPEATS + 1):
        times = []
        for run in (work.plain, work.ours):
            dist.barrier()
            times.append(seconds(run, big.device) if is_running else 1.0)
        found.append((times[0], times[1]))
    return median(plain for plain, _ in found[1:]), median(ours for _, ours in found[1:])


def incoming(big: BigRank, source: Source) -> list[Move]:
    """Sixteen records that the next rank holds, into this one."""
    other = (big.rank + 1) % big.topology.num_ranks
    slots = big.topology.slots_on(other)
    held = big.placement.slot_to_expert[0]
    moves = []
    for number, slot in enumerate(range(slots.start, slots.start + NUM_STAGED)):
        src_slot = slot if source is Source.PEER else EMPTY
        moves.append(Move(0, int(held[slot]), number, source, src_slot))
    return moves


def leased(big: BigRank, address: HostCacheAddress, records: list[Record]) -> HostCacheClient:
    """The host cache with ``records`` in it; their digests are what the bank goes by."""
    num_experts, size = big.shapes.model.num_experts, big.bank.schema.record_bytes
    reader = HostCacheClient(address, num_experts, size, deadline_s=DEADLINE_S, device=big.device)
    found, _ = reader.load(records, deadline_s=DEADLINE_S)
    for (layer, expert), known in zip(records, found, strict=True):
        big.digests[layer, expert] = torch.tensor(known)
    if big.device.type == "cuda":
        reader.prepare_for_gpu(records)
    return reader


def stage_from_host_cache(ranks: int, shapes: Shapes, folder: Path) -> list[Row]:
    """The same from a host cache that is filled from a checkpoint, as a server's is."""
    weights = folder / "weights"
    write_experts(weights, shapes.model, shapes.schema)
    address = HostCacheAddress(f"bench-{os.getpid()}", os.urandom(16))
    settings = HostCacheSettings()
    with closing(
        HostCacheServer.of_checkpoint(
            address, Checkpoint(weights), shapes.model, shapes.schema, settings
        )
    ):
        rows: list[Row] = launch(
            measure_stage, ranks, shapes, Source.HOST, address, deadline_s=LAUNCH_DEADLINE_S
        )[0]
    shutil.rmtree(weights)
    return rows
