"""Offers vLLM's experts to the host cache, once, after the load and before anything has moved.

Each expert is offered by the first rank that holds it. The host cache is that of ``eplb
host-cache``, else one in the first rank of each host. The library keeps the records and gives them
back (``rebalance/weights/cache/engine_records.py``, ``rebalance/stage/kept_records.py``).

Shapes:  L MoE layers, E experts, P physical experts, C of them on this rank.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from eplb.errors import EplbError, MigrationError
from rebalance.engines.vllm.moves.record import (
    Tensors,
    agreed,
    bytes_of,
    digest_of,
    num_bytes_of,
    rows_of,
)
from rebalance.stage.kept_records import KeptRecords
from rebalance.types import Digest, Record
from rebalance.weights.cache.address import HostCacheAddress, connect
from rebalance.weights.cache.cache_settings import HostCacheSettings
from rebalance.weights.cache.engine_records import EngineRecordsClient, address_of
from rebalance.weights.cache.server import HostCacheServer
from rebalance.weights.disk.record_origin import RecordOrigin
from runtime.group import first_refusal, gathered
from runtime.memory.shared import SharedArena, whole_pages

CONNECT_S = 5.0
OFFER_S = 120.0  # for one batch, a slow disk included
BATCH_BYTES = 2**26
NUM_READERS = 2  # threads in a rank that read the disk; most of the time they wait

T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Library:
    """Where records are kept.

    Args:
        place: of ``eplb host-cache`` on this host; None: the deployment has no secret here.
        embeds: whether ranks keep the records where no ``eplb host-cache`` runs.
        settings: of the host cache in a rank.
        model: what the engine calls the model, with all that decides the layout of its weights.
    """

    place: HostCacheAddress | None
    embeds: bool
    settings: HostCacheSettings
    model: str


@dataclass(frozen=True)
class Kept:
    """The records, and the host cache if it is in this rank."""

    records: KeptRecords
    server: HostCacheServer | None


@dataclass(frozen=True)
class _Loaded:
    """What a rank has loaded."""

    weights: list[Tensors]  # [L] of tensors [C, ...]
    held: NDArray[np.int64]  # [L, P]
    digests: torch.Tensor  # [L, C, 2]

    def records_of(self, rank: int) -> dict[Record, int]:
        """The experts of which a rank is the first holder, and its slot of each, 0 .. C - 1."""
        num_own, found = self.digests.shape[1], {}
        for layer, row in enumerate(self.held.tolist()):
            for slot in range(rank * num_own, (rank + 1) * num_own):
                if row.index(row[slot]) == slot:
                    found[layer, row[slot]] = slot - rank * num_own
        return found


def capture(
    find: Callable[[], tuple[list[Tensors], NDArray[np.int64]]], group: Any, library: Library
) -> Kept | None:
    """Offer each expert once; a collective of all ranks, before anything has moved.

    Args:
        find: returns [L] of the tensors [C, ...] of each layer, and [L, P] the map of the load,
            without empty slots. It may raise.
        group: vLLM's coordinator of the ranks that balance.
        library: where records are kept.

    Returns:
        The records; None on all ranks where one of them cannot keep its own.

    Raises:
        RuntimeError: a rank died or was late.
    """
    with ExitStack() as undo:
        try:
            if not library.embeds:
                _together(lambda: _probe(library), group)
            loaded = _together(lambda: _digested(*find()), group)
            digests = _digests_of_all(loaded, group)
            origin = _together(lambda: _origin_of(loaded, digests, library.model), group)
            client, server = _attached(library, origin, group, undo)
            size, rank = origin.record_bytes, group.rank_in_group
            _together(lambda: _offer(client, loaded, rank, size), group)
        except MigrationError as exc:
            level = logging.ERROR if library.embeds else logging.INFO
            log.log(level, "no records of experts are kept: %s", exc)
            return None
        undo.pop_all()
    return Kept(KeptRecords(client, digests, size), server)


def _together(act: Callable[[], T], group: Any) -> T:
    """Act on every rank, and go on where all have succeeded.

    Raises:
        MigrationError: on all ranks alike, with the reason of the first that failed.
    """
    refusal = ""
    try:
        done = act()
    except Exception as exc:  # told to the other ranks, which wait in the next collective
        log.debug("records", exc_info=True)
        refusal = f"{exc}" if isinstance(exc, EplbError) else f"{type(exc).__name__}: {exc}"
    if why_not := first_refusal(refusal, group.cpu_group):
        raise MigrationError(why_not)
    return done


def _probe(library: Library) -> None:
    """Refuse where no ``eplb host-cache`` answers, before weights are read for it."""
    if library.place is None:
        raise MigrationError("the deployment has no secret on this host, expected eplb host-cache")
    wire, _ = connect(library.place, CONNECT_S)
    wire.close()


def _digested(weights: list[Tensors], held: NDArray[np.int64]) -> _Loaded:
    num_own = weights[0][0].shape[0]
    found = [
        [digest_of(bytes_of(rows_of(layer, row))) for row in range(num_own)] for layer in weights
    ]
    return _Loaded(weights, held, torch.tensor(found, dtype=torch.int64))


def _digests_of_all(loaded: _Loaded, group: Any) -> torch.Tensor:
    """[L, E, 2] of all experts; collective."""
    everyone = [torch.empty_like(loaded.digests) for _ in range(group.world_size)]
    dist.all_gather(everyone, loaded.digests, group=group.cpu_group)
    by_slot = torch.cat(everyone, dim=1).numpy()
    table = torch.zeros((len(by_slot), int(loaded.held.max()) + 1, 2), dtype=torch.int64)
    for layer, held in enumerate(loaded.held):
        for expert, found in agreed(held, by_slot[layer], layer).items():
            table[layer, expert] = torch.tensor(found)
    return table


def _origin_of(loaded: _Loaded, digests: torch.Tensor, model: str) -> RecordOrigin:
    """Name the records by their bytes: what is kept of other weights is never taken for these."""
    sizes = {num_bytes_of(rows_of(layer, 0)) for layer in loaded.weights}
    if len(sizes) != 1:
        raise MigrationError(f"layers have records of {sorted(sizes)} bytes, expected one size")
    kinds = repr([(tuple(one.shape[1:]), str(one.dtype)) for one in loaded.weights[0]])
    contents = hashlib.blake2b(model.encode(), digest_size=16)
    contents.update(digests.numpy().tobytes())
    return RecordOrigin(
        hashlib.blake2b(kinds.encode(), digest_size=16).hexdigest(),
        contents.hexdigest(),
        num_layers=digests.shape[0],
        num_experts=digests.shape[1],
        record_bytes=whole_pages(sizes.pop()),
    )


def _attached(
    library: Library, origin: RecordOrigin, group: Any, undo: ExitStack
) -> tuple[EngineRecordsClient, HostCacheServer | None]:
    """Attach to the host cache of this host, which its first rank has where no process does."""
    of_process, why_not = None, "the deployment has no secret on this host"
    if library.place is not None:
        try:
            client = EngineRecordsClient(library.place, origin, deadline_s=CONNECT_S)
            of_process = undo.enter_context(closing(client))
        except MigrationError as exc:
            why_not = str(exc)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    # Sockets of a host cache are seen within one network namespace.
    machine = [boot, Path("/proc/self/ns/net").stat().st_ino]
    ranks = gathered([machine, secrets.token_hex(16)], group.cpu_group)
    first = next(rank for rank, (other, _) in enumerate(ranks) if other == machine)
    place = HostCacheAddress(f"rank-{ranks[first][1]}", bytes.fromhex(ranks[first][1]))

    def make_server() -> HostCacheServer | None:
        if of_process is not None or first != group.rank_in_group:
            return None
        if not library.embeds:
            raise MigrationError(why_not)
        log.info("records of experts are kept in this process: %s", why_not)
        settings = replace(library.settings, num_readers=NUM_READERS)
        server = HostCacheServer.of_offers(address_of(place, origin), origin, settings)
        return undo.enter_context(closing(server))

    def attach() -> EngineRecordsClient:
        if of_process is not None:
            return of_process
        client = EngineRecordsClient(place, origin, deadline_s=CONNECT_S, is_embedded=True)
        return undo.enter_context(closing(client))

    server = _together(make_server, group)
    return _together(attach, group), server


def _offer(client: EngineRecordsClient, loaded: _Loaded, rank: int, record_bytes: int) -> None:
    """Offer what this rank is the first holder of, as far as the host cache lacks it."""
    own = loaded.records_of(rank)
    lacking = client.lacks(list(own), deadline_s=OFFER_S)
    at_once = max(1, min(len(lacking), BATCH_BYTES // record_bytes))
    num_kept: dict[str, int] = {"memory": 0, "disk": 0, "": 0}
    with closing(SharedArena("eplb-offer", at_once * record_bytes)) as arena:
        entries = arena.bytes.view(-1, record_bytes)
        for start in range(0, len(lacking), len(entries)):
            offered: list[tuple[Record, Digest]] = []
            for entry, (layer, expert) in zip(entries, lacking[start:], strict=False):
                row = own[layer, expert]
                record = bytes_of(rows_of(loaded.weights[layer], row))
                entry[: len(record)] = record
                plain, weighted = loaded.digests[layer, row].tolist()
                offered.append(((layer, expert), (plain, weighted)))
            for place in client.offer(offered, arena, deadline_s=OFFER_S):
                num_kept[place] += 1
    client.hint([record for record in own if record not in set(lacking)])
    log.info(
        "records of %d experts: %d were kept already, %d are in memory now, %d on disk alone, "
        "%d nowhere",
        len(own),
        len(own) - len(lacking),
        num_kept["memory"],
        num_kept["disk"],
        num_kept[""],
    )
