"""The records of an engine's experts: offered once after the load, and given back when lost.

A record is the tensors of one expert as the engine's kernels read them, one after the other: what
its processing after the load has left (fused, requantised, swizzled), and never the bytes of a
checkpoint. Each expert is offered by the first rank that holds it, before anything has moved. The
host cache is that of ``eplb host-cache``, else one in the first rank of each host
(``rebalance/weights/cache/engine_records.py``, ``rebalance/stage/kept_records.py``).

Shapes:  L MoE layers, E experts, S slots, R ranks, C slots of this rank.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from eplb.errors import MigrationError
from rebalance.engines.common.plugin_settings import PluginSettings
from rebalance.engines.common.start import reason_of
from rebalance.stage.kept_records import KeptRecords
from rebalance.types import Digest, Record
from rebalance.weights.cache.address import HostCacheAddress, connect
from rebalance.weights.cache.engine_records import EngineRecordsClient, address_of
from rebalance.weights.cache.server import HostCacheServer
from rebalance.weights.disk.record_file import RecordOrigin
from runtime.group import first_refusal, gathered
from runtime.memory import SharedArena, digest, whole_pages

CONNECT_S = 5.0
OFFER_S = 120.0  # for one batch, a slow disk included
BATCH_BYTES = 2**26
NUM_READERS = 2  # threads in a rank that read the disk; most of the time they wait
NOBODY = -1  # in place of an expert, or of a rank
WORD_BYTES = 8  # a record is a whole number of them for its digest

T = TypeVar("T")
Tensors = Sequence[torch.Tensor]  # the tensors of one expert, one from each of the layer's weights

log = logging.getLogger(__name__)


def rows_of(weights: Tensors, row: int) -> Tensors:
    """The tensors of one slot of a layer."""
    return [weight[row] for weight in weights]


def num_bytes_of(tensors: Tensors) -> int:
    """Bytes of the record of these tensors."""
    return sum(tensor.nbytes for tensor in tensors)


def bytes_of(tensors: Tensors) -> torch.Tensor:
    """[n] the record, on the device of its tensors."""
    return torch.cat([t.detach().contiguous().view(-1).view(torch.uint8) for t in tensors])


def write(record: torch.Tensor, tensors: Tensors) -> None:
    """Copy a record, or one with padding behind it, into the tensors of a slot."""
    at = 0
    for tensor in tensors:
        # A copy is aligned to any type; a part of a record is not.
        part = record[at : at + tensor.nbytes].clone()
        tensor.copy_(part.view(tensor.dtype).view(tensor.shape))
        at += tensor.nbytes


def digest_of(record: torch.Tensor) -> Digest:
    """The digest of a record of any length; zeros behind it do not change it."""
    padding = -len(record) % WORD_BYTES
    if padding:
        record = torch.cat([record, record.new_zeros(padding)])
    plain, weighted = digest(record)
    return plain, weighted


def slot_digests(weights: Tensors) -> torch.Tensor:
    """[C, 2] digests of the slots of a layer on this rank."""
    found = [digest_of(bytes_of(rows_of(weights, row))) for row in range(len(weights[0]))]
    return torch.tensor(found, dtype=torch.int64)


def of_all_ranks(mine: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[R, ...] the tensors of all ranks, which have one shape; collective."""
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    return torch.stack(everyone)


def agreed(held: NDArray[np.int64], by_rank: torch.Tensor, layer: int) -> dict[int, Digest]:
    """The digest of each expert: that of its first slot.

    Args:
        held: [S] experts by slot.
        by_rank: [R, C, 2] digests of the slots of a layer.
        layer: for the log.
    """
    found: dict[int, Digest] = {}
    table = by_rank.reshape(-1, 2).tolist()
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
    """

    def __init__(
        self, client: EngineRecordsClient, server: HostCacheServer | None, digests: torch.Tensor
    ) -> None:
        self._client, self.server, self._lock = client, server, Lock()
        self._is_closed = False
        self.records = KeptRecords(client, digests, client.record_bytes)

    def digest_of(self, layer: int, expert: int) -> Digest:
        """The digest of an expert's record at the load."""
        plain, weighted = self.records.digests[layer, expert].tolist()
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
        with self._lock:
            if self._is_closed:  # the client would connect again
                raise MigrationError("the records of this rank are closed")
            return self.records.bring((layer, expert)).clone()

    def restore(self, layer: int, expert: int, tensors: Tensors) -> bool:
        """Write the record of an expert into a slot that lacks it; whether there is one."""
        try:
            write(self.bring(layer, expert), tensors)
        except MigrationError as exc:
            log.error("layer %d expert %d: %s", layer, expert, exc)
            return False
        log.warning("layer %d expert %d: from kept records", layer, expert)
        return True

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
            own = together(lambda: torch.stack([*map(slot_digests, weights)]), group)
            digests = _digests_of_experts(held, of_all_ranks(own, group))
            origin = together(lambda: origin_of(weights, digests, model), group)
            client, server = _attached(place, settings, origin, group, undo)
            first = _first_held(held, dist.get_rank(group), own.shape[1])
            together(lambda: offer(client, weights, own, first, origin.record_bytes), group)
        except MigrationError as exc:
            level = logging.ERROR if embeds else logging.INFO
            log.log(level, "no records of experts are kept: %s", exc)
            return None
        undo.pop_all()
    return Kept(client, server, digests)


def together(act: Callable[[], T], group: dist.ProcessGroup) -> T:
    """Act on every rank, and go on where all have succeeded.

    Raises:
        MigrationError: on all ranks alike, with the reason of the first that failed.
    """
    refusal = ""
    try:
        done = act()
    except Exception as exc:  # told to the other ranks, which wait in the next collective
        log.debug("records", exc_info=True)
        refusal = reason_of(exc)
    if why_not := first_refusal(refusal, group):
        raise MigrationError(why_not)
    return done


def _probe(place: HostCacheAddress | None) -> None:
    """Refuse where no ``eplb host-cache`` answers, before weights are read for it."""
    if place is None:
        raise MigrationError("the deployment has no secret on this host, expected eplb host-cache")
    wire, _ = connect(place, CONNECT_S)
    wire.close()


def _digests_of_experts(held: NDArray[np.int64], by_rank: torch.Tensor) -> torch.Tensor:
    """[L, E, 2] of all experts, from [R, L, C, 2] of all slots."""
    table = torch.zeros((len(held), int(held.max()) + 1, 2), dtype=torch.int64)
    for layer, row in enumerate(held):
        for expert, found in agreed(row, by_rank[:, layer], layer).items():
            table[layer, expert] = torch.tensor(found)
    return table


def _first_held(held: NDArray[np.int64], rank: int, num_own: int) -> dict[Record, int]:
    """The experts of which a rank is the first holder, and its slot of each, 0 .. C - 1."""
    found = {}
    for layer, row in enumerate(held.tolist()):
        for slot in range(rank * num_own, (rank + 1) * num_own):
            if row.index(row[slot]) == slot:
                found[layer, row[slot]] = slot - rank * num_own
    return found


def origin_of(weights: list[Tensors], digests: torch.Tensor, model: str) -> RecordOrigin:
    """Name the records by their bytes: what is kept of other weights is never taken for these."""
    sizes = {num_bytes_of(rows_of(layer, 0)) for layer in weights}
    if len(sizes) != 1:
        raise MigrationError(f"layers have records of {sorted(sizes)} bytes, expected one size")
    kinds = repr([(tuple(one.shape[1:]), str(one.dtype)) for one in weights[0]])
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
    process: HostCacheAddress | None,
    settings: PluginSettings,
    origin: RecordOrigin,
    group: dist.ProcessGroup,
    undo: ExitStack,
) -> tuple[EngineRecordsClient, HostCacheServer | None]:
    """Attach to the host cache of this host, which its first rank has where no process does."""
    of_process, why_not = None, "the deployment has no secret on this host"
    if process is not None:
        try:
            client = EngineRecordsClient(process, origin, deadline_s=CONNECT_S)
            of_process = undo.enter_context(closing(client))
        except MigrationError as exc:
            why_not = str(exc)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    # Sockets of a host cache are seen within one network namespace.
    machine = [boot, Path("/proc/self/ns/net").stat().st_ino]
    ranks = gathered([machine, secrets.token_hex(16)], group)
    first = next(rank for rank, (other, _) in enumerate(ranks) if other == machine)
    place = HostCacheAddress(f"rank-{ranks[first][1]}", bytes.fromhex(ranks[first][1]))

    def make_server() -> HostCacheServer | None:
        if of_process is not None or first != dist.get_rank(group):
            return None
        if settings.engine.records != "on":
            raise MigrationError(why_not)
        log.info("records of experts are kept in this process: %s", why_not)
        own = replace(settings.host_cache, num_readers=NUM_READERS)
        server = HostCacheServer.of_offers(address_of(place, origin), origin, own)
        return undo.enter_context(closing(server))

    def attach() -> EngineRecordsClient:
        if of_process is not None:
            return of_process
        client = EngineRecordsClient(place, origin, deadline_s=CONNECT_S, is_embedded=True)
        return undo.enter_context(closing(client))

    server = together(make_server, group)
    return together(attach, group), server


def offer(
    client: EngineRecordsClient,
    weights: list[Tensors],
    digests: torch.Tensor,
    own: dict[Record, int],
    record_bytes: int,
) -> None:
    """Offer records as far as the host cache lacks them.

    Args:
        client: of the host cache.
        weights: [L] of the tensors [C, ...] of each layer.
        digests: [L, C, 2] of the slots.
        own: the records, and the slot of each.
        record_bytes: in whole pages.
    """
    lacking = client.lacks(list(own), deadline_s=OFFER_S)
    at_once = max(1, min(len(lacking), BATCH_BYTES // record_bytes))
    num_kept: dict[str, int] = {"memory": 0, "disk": 0, "": 0}
    with closing(SharedArena("eplb-offer", at_once * record_bytes)) as arena:
        entries = arena.bytes.view(-1, record_bytes)
        for start in range(0, len(lacking), len(entries)):
            offered: list[tuple[Record, Digest]] = []
            for entry, (layer, expert) in zip(entries, lacking[start:], strict=False):
                row = own[layer, expert]
                record = bytes_of(rows_of(weights[layer], row))
                entry[: len(record)] = record
                plain, weighted = digests[layer, row].tolist()
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
