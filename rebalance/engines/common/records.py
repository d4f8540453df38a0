"""The records of an engine's experts: kept from the load on, and given back when lost.

Each expert is offered by the first rank that holds it, before anything has moved. The host cache is
that of ``eplb host-cache``, else one in the first rank of each host.

An engine moves experts between its own ranks. What its ranks have lost, or send wrong or late, is
staged as in a rank of ours: the sources have the same order, and each record is checked before it
is used. The engine copies it to the slot itself.

Shapes:  L MoE layers, E experts, S slots, R ranks, C slots of this rank.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from eplb.core.placement import EMPTY
from eplb.core.topology import Topology
from eplb.errors import MigrationError
from eplb.migration.build import Move, Source
from rebalance.engines.common.plugin_settings import PluginSettings
from rebalance.stage.lanes import Pull
from rebalance.stage.mover import no_ranks
from rebalance.stage.source_choice import SourceChoice
from rebalance.stage.stage_settings import StageSettings
from rebalance.stage.stager import Stager
from rebalance.threads.waiting import WAIT_S
from rebalance.types import Digest, Record, always
from rebalance.weights.cache.address import HostCacheAddress, connect
from rebalance.weights.cache.engine_records import EngineRecords, EngineRecordsClient
from rebalance.weights.disk.record_file import RecordOrigin
from rebalance.weights.expert_records import (
    Tensors,
    bytes_of,
    digest_of,
    digests_of,
    offer,
    origin_of,
    rows_of,
    together,
)
from rebalance.weights.sources import WeightSources
from runtime.group import gathered
from runtime.memory import SharedArena

CONNECT_S = 5.0
NUM_READERS = 2  # threads in a rank that read the disk; most of the time they wait
NOBODY = -1  # in place of an expert, or of a rank

log = logging.getLogger(__name__)


def slot_digests(weights: Tensors) -> torch.Tensor:
    """[C, 2] digests of the slots of a layer on this rank."""
    records = [rows_of(weights, row) for row in range(len(weights[0]))]
    return torch.tensor(digests_of(records), dtype=torch.int64)


def of_all_ranks(mine: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[R, ...] the tensors of all ranks, which have one shape; collective."""
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    return torch.stack(everyone)


def agreed(held: NDArray[np.int64], slots: torch.Tensor, layer: int) -> dict[int, Digest]:
    """The digest of each expert: that of its first slot.

    Args:
        held: [S] experts by slot.
        slots: [S, 2] digests of the slots of a layer.
        layer: for the log.
    """
    found: dict[int, Digest] = {}
    table = slots.tolist()
    for slot, (expert, (plain, weighted)) in enumerate(zip(held.tolist(), table, strict=True)):
        if found.setdefault(expert, (plain, weighted)) != (plain, weighted):
            log.error(
                "layer %d expert %d: the replica in slot %d differs from another",
                layer,
                expert,
                slot,
            )
    return found


class Kept:
    """The records of a model that the host cache keeps, and the host cache if it is in this rank.

    Thread-safe: a rank moves experts on one thread, and repairs slots from another.

    Args:
        client: of the host cache, which fills itself from other hosts and from disk.
        server: what serves it, if that is in this rank.
        digests: [L, E, 2] of every expert at the load.
    """

    def __init__(
        self, client: EngineRecordsClient, server: EngineRecords | None, digests: torch.Tensor
    ) -> None:
        self._client, self.server, self._lock = client, server, threading.Lock()
        self._is_closed, self.digests = False, digests
        sources = WeightSources(None, client)
        alone = Topology.uniform(num_nodes=1, ranks_per_node=1, slots_per_rank=1)
        choice = SourceChoice(0, alone, sources.readable, no_ranks)
        self._stager = Stager(sources, choice, digests, StageSettings(), time.monotonic)
        self.figures = self._stager.figures
        # No rank's slots are a source here: each layer's map is empty.
        self._no_slots = np.full((len(digests), 1), EMPTY, dtype=np.int32)
        self._into = SharedArena("eplb-record", client.record_bytes).bytes

    def digest_of(self, layer: int, expert: int) -> Digest:
        """The digest of an expert's record at the load."""
        plain, weighted = self.digests[layer, expert].tolist()
        return plain, weighted

    def is_right(self, layer: int, expert: int, tensors: Tensors) -> bool:
        """Whether the tensors of a slot have the bytes of an expert at the load."""
        return digest_of(bytes_of(tensors)) == self.digest_of(layer, expert)

    def wrong(self, layer: int, held: Iterable[int], weights: Tensors) -> list[int]:
        """Which slots of a layer on this rank lack the bytes of their expert at the load.

        Where most of them do, the weights were replaced, and records would bring back the old ones.

        Args:
            layer: the row of the records.
            held: [C] experts of the slots.
            weights: [C, ...] each.
        """
        return [
            place
            for place, expert in enumerate(held)
            if not self.is_right(layer, int(expert), rows_of(weights, place))
        ]

    def bring(self, layer: int, expert: int) -> torch.Tensor:
        """The bytes of a record, from this host, another one or a disk.

        Raises:
            MigrationError: none of them has right bytes.
        """
        move = Move(layer, expert, dst_slot=0, source=Source.HOST)
        with self._lock:
            if self._is_closed:  # the client would connect again
                raise MigrationError("the records of this rank are closed")
            try:
                self._stager.preload([(move, self._no_slots)], always)
                for wait in self._stager.stage([Pull(move, self._into, self._no_slots)], always):
                    threading.Event().wait(max(0.0, min(WAIT_S, wait.until - time.monotonic())))
            finally:
                for _ in self._stager.drain():
                    pass
                try:
                    self._client.release([(layer, expert)])
                except MigrationError as exc:  # its leases ended with the host cache
                    log.info("layer %d expert %d: %s", layer, expert, exc)
            # By numpy: a thread of ours in an engine's process starts no thread pool of torch.
            return torch.from_numpy(self._into.numpy().copy())

    def close(self) -> None:
        """End the connection to the host cache, and the host cache if it is in this rank."""
        with self._lock:  # a repair that brings a record ends first
            self._is_closed = True
            self._client.close()
        if self.server is not None:
            self.server.close()


def capture(
    find: Callable[[], tuple[list[Tensors], NDArray[np.int64]]],
    group: dist.ProcessGroup,
    settings: PluginSettings,
    model: str,
) -> Kept | None:
    """Offer each expert once; a collective of all ranks, before anything has moved.

    Args:
        find: returns [L] of the tensors [C, ...] of each layer, and [L, S] the map of the load,
            without empty slots. It may raise.
        group: of the ranks that balance, for tensors on the host.
        settings: say whether records are kept, and where.
        model: what the engine calls the model, with all that decides the layout of its weights.

    Returns:
        The records; None on all ranks where one of them cannot keep its own.

    Raises:
        RuntimeError: a rank died or was late.
    """
    if settings.engine.records == "off":
        return None
    place, embeds = settings.place_of_records(), settings.engine.records == "on"
    with ExitStack() as undo:
        try:
            if not embeds:
                together(lambda: _probe(place), group)
            weights, held = together(find, group)
            slots = digests_of_slots(weights, group)
            digests = digests_of_experts(held, slots)
            num_own = len(weights[0][0])
            mine = dist.get_rank(group) * num_own
            own = slots[:, mine : mine + num_own]
            origin = together(lambda: origin_of(weights, digests, model), group)
            client, server = _attached(place, settings, origin, group, undo)
            first = _first_held(held, dist.get_rank(group), num_own)
            together(lambda: offer(client, weights, own, first, origin.record_bytes), group)
        except MigrationError as exc:
            level = logging.ERROR if embeds else logging.INFO
            log.log(level, "no records of experts are kept: %s", exc)
            return None
        undo.pop_all()
    return Kept(client, server, digests)


def digests_of_slots(weights: list[Tensors], group: dist.ProcessGroup) -> torch.Tensor:
    """[L, S, 2] digests of the slots of all ranks; collective.

    Raises:
        MigrationError: a rank could not read its weights; on all ranks alike.
    """
    own = together(lambda: torch.stack([*map(slot_digests, weights)]), group)
    return of_all_ranks(own, group).transpose(0, 1).reshape(len(own), -1, 2)


def digests_of_experts(held: NDArray[np.int64], slots: torch.Tensor) -> torch.Tensor:
    """[L, E, 2] of all experts, each that of its first slot, from [L, S, 2] of all slots."""
    table = torch.zeros((len(held), int(held.max()) + 1, 2), dtype=torch.int64)
    for layer, row in enumerate(held):
        for expert, found in agreed(row, slots[layer], layer).items():
            table[layer, expert] = torch.tensor(found)
    return table


def num_differing(held: NDArray[np.int64], slots: torch.Tensor) -> int:
    """How many slots do not have the bytes of the first slot of their expert.

    Args:
        held: [L, S] experts by slot.
        slots: [L, S, 2] digests.
    """
    num = 0
    for row, digests in zip(held.tolist(), slots.tolist(), strict=True):
        first: dict[int, list[int]] = {}
        num += sum(first.setdefault(*pair) != pair[1] for pair in zip(row, digests, strict=True))
    return num


def _probe(place: HostCacheAddress | None) -> None:
    """Refuse where no ``eplb host-cache`` answers, before weights are read for it."""
    if place is None:
        raise MigrationError("the deployment has no secret on this host, expected eplb host-cache")
    wire, _ = connect(place, CONNECT_S)
    wire.close()


def _first_held(held: NDArray[np.int64], rank: int, num_own: int) -> dict[Record, int]:
    """The experts of which a rank is the first holder, and its slot of each, 0 .. C - 1."""
    found = {}
    for layer, row in enumerate(held.tolist()):
        for slot in range(rank * num_own, (rank + 1) * num_own):
            if row.index(row[slot]) == slot:
                found[layer, row[slot]] = slot - rank * num_own
    return found


def _attached(
    process: HostCacheAddress | None,
    settings: PluginSettings,
    origin: RecordOrigin,
    group: dist.ProcessGroup,
    undo: ExitStack,
) -> tuple[EngineRecordsClient, EngineRecords | None]:
    """Attach to the host cache of this host, which its first rank has where no process does."""
    client_at = partial(EngineRecordsClient, origin=origin, deadline_s=CONNECT_S)
    of_process, why_not = None, "the deployment has no secret on this host"
    if process is not None:
        try:
            of_process = undo.enter_context(closing(client_at(process)))
        except MigrationError as exc:
            why_not = str(exc)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    # Sockets of a host cache are seen within one network namespace.
    machine = [boot, Path("/proc/self/ns/net").stat().st_ino]
    ranks = gathered([machine, secrets.token_hex(16)], group)
    first = next(rank for rank, (other, _) in enumerate(ranks) if other == machine)
    place = HostCacheAddress(f"rank-{ranks[first][1]}", bytes.fromhex(ranks[first][1]))

    def make_server() -> EngineRecords | None:
        if of_process is not None or first != dist.get_rank(group):
            return None
        if settings.engine.records != "on":
            raise MigrationError(why_not)
        log.info("records of experts are kept in this process: %s", why_not)
        own = replace(settings.host_cache, num_readers=NUM_READERS)
        return undo.enter_context(closing(EngineRecords(place, own)))

    def attach() -> EngineRecordsClient:
        if of_process is not None:
            return of_process
        return undo.enter_context(closing(client_at(place)))

    server = together(make_server, group)
    return together(attach, group), server
