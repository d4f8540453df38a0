"""A rank's experts: its memory, what fills it, and where further records come from.

The order matters: every bank is filled, and its bytes agreed on, before any rank may read a peer's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from threading import Event

import numpy as np
import torch
from numpy.typing import NDArray

from eplb.clock import Deadline
from eplb.core.model import ModelShape
from eplb.core.placement import EMPTY, Placement
from eplb.errors import ConfigError, MigrationError, RankError
from rebalance.assembly.config import RankConfig
from rebalance.rank.group import Group
from rebalance.stage.digest_table import table_of
from rebalance.types import Digest, Record
from rebalance.weights.cache.address import HostCacheAddress
from rebalance.weights.cache.client import HostCacheClient, HostCacheEnded
from rebalance.weights.cache.engine_records import EngineRecordsClient
from rebalance.weights.expert_records import Tensors, offer, origin_of, together
from rebalance.weights.sources import HOST, WeightSources, map_peers, ranks_beside
from rebalance.weights.start_check import KnownRecords, checked_sources
from runtime.experts import ExpertBank, ExpertSchema, PeerBank, PlainArena, bank_bytes
from runtime.group import gathered
from runtime.memory import digest

FILL_RECORDS = 64  # leased at a time
CACHE_DEADLINE_S = 20.0  # for a host cache that is started again meanwhile
CACHE_RETRY_S = 0.1
DEATH_S = 1.0  # after a failure of torch, to learn which rank died

log = logging.getLogger(__name__)


def first_experts(
    config: RankConfig,
    group: Group,
    host_cache: HostCacheAddress,
    model: ModelShape,
    bank: ExpertBank,
    placement: Placement,
    *,
    is_filled: bool,
) -> tuple[torch.Tensor, HostCacheClient | None]:
    """Have this rank's slots hold what the placement says.

    Args:
        config: of the rank.
        group: in which it starts.
        host_cache: of its host.
        model: the MoE layers and their experts.
        bank: its slots.
        placement: that serves at first.
        is_filled: whether an engine has filled them.

    Returns:
        The digests [L, E, 2] that this rank knows now, and the cache of its host; None: that takes
        offers, see ``offer_own_experts``.

    Raises:
        ConfigError: the rank has no experts of its own, and the cache of its host neither.
        MigrationError: a record cannot be read.
    """
    network, rank, hosts = config.network, group.rank, group.topology.host_of_rank
    if host_cache.takes_offers and (group.is_waiting or not is_filled):
        raise ConfigError(
            f"rank {rank}: the host cache keeps what ranks offer when all start, expected "
            "a rank with own experts at such a start, or a checkpoint (model.checkpoint)"
        )
    cache = None
    if not host_cache.takes_offers:
        cache = HostCacheClient(
            host_cache,
            model.num_experts,
            bank.schema.record_bytes,
            deadline_s=network.join_deadline_s,
            start_deadline_s=network.join_deadline_s,  # host caches and ranks start in any order
            device=group.device,
            ranks_on_host=int((hosts == hosts[rank]).sum()),
        )
    held = placement.slot_to_expert[:, group.topology.slots_on(rank)]
    if is_filled:
        known = _compute_digests(bank, held)
    else:
        assert cache is not None, "a rank without own experts was refused above"
        known = fill_bank(bank, held.tolist(), cache, deadline_s=network.fill_deadline_s)
    return table_of(known, model.num_layers, model.num_experts), cache


def first_sources(
    group: Group,
    bank: ExpertBank,
    cache: HostCacheClient,
    unmapped: str,
    known: KnownRecords,
) -> WeightSources:
    """Make the sources of further records that pass on every rank; collective.

    Args:
        group: in which the rank starts.
        bank: its slots.
        cache: of its host.
        unmapped: why peers cannot map the slots; "": they can.
        known: what the slots of all ranks hold now.

    Raises:
        MigrationError: some rank reads wrong bytes from its own slots or the cache of its host.
    """
    assert group.control is not None, "ranks agree on their sources"
    told = gathered(bank.handle, group.control)
    handles = dict(zip(group.members, map(str, told), strict=True))
    sources, why = checked_sources(
        group.rank,
        bank,
        cache,
        open_peers=lambda: _open_peers(group, bank, unmapped, handles),
        known=known,
        group=group.control,
    )
    log.info("rank %d: sources: %s", group.rank, why)
    return sources


def offer_own_experts(
    config: RankConfig,
    group: Group,
    host_cache: HostCacheAddress,
    bank: ExpertBank,
    known: KnownRecords,
) -> HostCacheClient:
    """Offer the experts that this rank is the first of its host to hold; collective.

    Args:
        config: of the rank.
        group: in which it starts.
        host_cache: of its host.
        bank: its slots, which an engine has filled.
        known: what the slots of all ranks hold now.

    Raises:
        MigrationError: a rank could not offer its own, for example without a host cache.
    """
    rank, topology, size = group.rank, group.topology, bank.schema.record_bytes
    assert group.control is not None, "ranks offer together"
    digests, deadline_s = known.digests, config.network.join_deadline_s
    beside = {rank, *ranks_beside(rank, topology)}
    own, first = dict[Record, int](), topology.slots_on(rank).start
    by_slot = torch.zeros((bank.num_layers, bank.num_slots, 2), dtype=torch.int64)
    for layer, row in enumerate(known.placement.slot_to_expert.tolist()):
        seen = {EMPTY}
        for slot, expert in enumerate(row):
            holder = int(topology.rank_of_slot[slot])
            if holder in beside and expert not in seen:
                seen.add(expert)
                if holder == rank:
                    own[layer, expert] = slot - first
                    by_slot[layer, slot - first] = digests[layer, expert]

    weights: list[Tensors] = [[bank.records(layer)] for layer in range(bank.num_layers)]

    def offer_own() -> HostCacheClient:
        client = EngineRecordsClient(
            host_cache,
            origin_of(weights, digests, "an engine's own experts"),
            deadline_s=deadline_s,
            start_deadline_s=deadline_s,
            device=group.device,
            ranks_on_host=len(beside),
        )
        offer(client, weights, by_slot, own, size)
        return client

    return together(offer_own, group.control)


def fill_bank(
    bank: ExpertBank,
    held: Sequence[Sequence[int]],
    host_cache: HostCacheClient,
    *,
    deadline_s: float,
    digests: torch.Tensor | None = None,
    check: Callable[[], object] = lambda: None,
) -> dict[Record, Digest]:
    """Load experts into live slots, which nothing reads now, and prove their bytes there.

    A host cache that has ended is waited for, each time for CACHE_DEADLINE_S.

    Args:
        bank: of this rank.
        held: [L][C] what each slot is to hold; negative: it stays as it is.
        host_cache: has the records.
        deadline_s: for all of them.
        digests: [L, E, 2] that all ranks have agreed on; None: those of the host cache are right.
        check: called before a request is repeated; what it raises ends the wait.

    Returns:
        The digest of every expert that was loaded, taken from the slots themselves.

    Raises:
        MigrationError: a record cannot be read, or a slot does not hold what was read.
    """
    places: dict[Record, list[int]] = {}  # a rank may hold an expert in two slots
    for layer, slots in enumerate(held):
        for slot, expert in enumerate(slots):
            if expert >= 0:
                places.setdefault((layer, int(expert)), []).append(slot)
    deadline = time.monotonic() + deadline_s
    # Not all at once: a small host cache has no room for them, and reading goes on while one is
    # copied.
    size = max(1, min(FILL_RECORDS, host_cache.room // 2))
    records, filled = list(places), dict[Record, Digest]()
    for first in range(0, len(records), size):
        batch, following = records[first : first + size], records[first + size : first + 2 * size]
        kept = _load(host_cache, batch, deadline, check)
        host_cache.hint(following)
        for record, expected in zip(batch, kept, strict=True):
            if digests is not None:
                expected = (int(digests[record][0]), int(digests[record][1]))
            for slot in places[record]:
                expected = _fill_slot(
                    bank,
                    record,
                    slot,
                    expected,
                    host_cache,
                    deadline,
                    is_agreed=digests is not None,
                )
            filled[record] = expected
        with suppress(MigrationError):  # one that has ended has no leases either
            host_cache.release(batch)
    return filled


def _load(
    host_cache: HostCacheClient,
    records: Sequence[Record],
    deadline: float,
    check: Callable[[], object],
) -> list[Digest]:
    """Lease records, also of a host cache that is started again meanwhile."""
    patience: Deadline | None = None
    while True:
        try:
            left_s = max(0.0, deadline - time.monotonic())
            return host_cache.load(records, deadline_s=left_s)[0]
        except HostCacheEnded as exc:
            patience = patience or Deadline.after(CACHE_DEADLINE_S, time.monotonic)
            if patience.has_passed:
                raise MigrationError(f"{exc}, for {CACHE_DEADLINE_S:g} s") from exc
            log.info("the experts wait for their host cache: %s", exc)
        check()
        time.sleep(CACHE_RETRY_S)  # a cache sends no notification when it is there again


def _fill_slot(
    bank: ExpertBank,
    record: Record,
    slot: int,
    expected: Digest,
    host_cache: HostCacheClient,
    deadline: float,
    *,
    is_agreed: bool,
) -> Digest:
    """Copy a leased record into a slot and prove it there; return its digest."""
    layer, expert = record
    host_cache.read(record, bank.live(layer, slot))
    if bank.digest(layer, slot) != expected:
        # The host's memory may have been damaged since: its disk is a second try.
        left_s = max(0.0, deadline - time.monotonic())
        reloaded = host_cache.reload(record, deadline_s=left_s)
        expected = expected if is_agreed else reloaded
        host_cache.read(record, bank.live(layer, slot))
    if bank.digest(layer, slot) != expected:
        raise MigrationError(
            f"layer {layer} slot {slot}: digest mismatch after loading expert {expert}"
        )
    return expected


@contextmanager
def torch_failures(group: Group, what: str) -> Iterator[None]:
    """Translate a failure of torch: of its collectives, where a peer died, or of the device."""
    try:
        yield
    except RuntimeError as exc:
        deadline = time.monotonic() + DEATH_S
        while not group.votes.dead() and time.monotonic() < deadline:
            Event().wait(DEATH_S / 100)  # gloo fails as early as the liveness connection closes
        dead = sorted(group.votes.dead())
        peers = f"rank {', '.join(map(str, dead))} died" if dead else "no rank is known to be dead"
        raise RankError(
            f"rank {group.rank}: {what} could not be prepared in run {group.run} ({peers}), "
            f"expected all {group.topology.num_ranks} ranks to start: {exc}"
        ) from exc


def reserve_memory(
    config: RankConfig, group: Group, model: ModelShape, experts: ExpertSchema | ExpertBank
) -> tuple[ExpertBank, str]:
    """The engine's bank, or memory that every rank of the host maps, or the rank's own alone.

    GPU memory that cannot be mapped is refused on every rank alike; all weights then come through
    the host.

    Returns:
        The bank, and why peers cannot map it; "": they can.
    """
    if isinstance(experts, ExpertBank):
        if experts.num_staging < config.staging_experts:
            raise ConfigError(
                f"rank {group.rank}: the engine's bank has {experts.num_staging} staging entries, "
                f"expected {config.staging_experts} or more (staging_experts), as many as one "
                "transaction brings"
            )
        return experts, ""
    slots, num_staging = group.topology.slots_of_rank, config.staging_experts
    shape = (experts, model.num_layers, int(slots[group.rank]))
    if group.device.type != "cuda":
        return ExpertBank(*shape, num_staging=num_staging), ""
    from runtime.memory import SymmetricArena  # not there on a CPU

    num_bytes = bank_bytes(experts, model.num_layers, int(slots.max()), num_staging)
    assert group.tokens is not None, "ranks on GPUs exchange tokens by their group"
    arena: SymmetricArena | PlainArena
    unmapped = ""
    try:
        arena = SymmetricArena(num_bytes, group.tokens, group.device)
    except ConfigError as exc:
        arena, unmapped = PlainArena(num_bytes, group.device), str(exc)
    return ExpertBank(*shape, num_staging=num_staging, arena=arena), unmapped


def _compute_digests(bank: ExpertBank, held: NDArray[np.int32]) -> dict[Record, Digest]:
    """Digests of what an engine has loaded, by the experts [L, C] that it was to load."""
    return {
        (layer, int(held[layer, slot])): bank.digest(layer, slot)
        for layer, slot in np.argwhere(held != EMPTY).tolist()
    }


def _open_peers(
    group: Group, bank: ExpertBank, unmapped: str, handles: Mapping[int, str]
) -> dict[int, PeerBank]:
    """Map the slots of the other ranks of this host.

    Raises:
        ConfigError: they cannot be mapped.
        MigrationError: a peer's memory cannot be attached.
    """
    if unmapped:
        raise ConfigError(unmapped)
    if bank.device.type != "cuda":
        return map_peers(group.rank, group.topology, bank, handles.__getitem__)
    from runtime.memory import SymmetricArena

    if not isinstance(bank.arena, SymmetricArena):
        raise ConfigError(
            f"rank {group.rank}: other ranks cannot map the memory of its experts, "
            f"expected a SymmetricArena, found {type(bank.arena).__name__}"
        )
    return map_peers(group.rank, group.topology, bank, bank.arena.peer)


def prove_weights(
    host: HostCacheClient, digests: torch.Tensor, record_bytes: int, deadline_s: float
) -> None:
    """Compare the first and the last record of this rank's host with what serves.

    Raises:
        MigrationError: the host has other bytes.
    """
    num_layers, num_experts, _ = digests.shape
    records: list[Record] = sorted({(0, 0), (num_layers - 1, num_experts - 1)})
    into = torch.empty(record_bytes, dtype=torch.uint8)
    host.lease(records, deadline_s=deadline_s)
    try:
        for layer, expert in records:
            host.pull((layer, expert), HOST, 0, into).wait()
            found, expected = digest(into), tuple(digests[layer, expert].tolist())
            if found != expected:
                raise MigrationError(
                    f"layer {layer} expert {expert} has digest {found} on the host of this rank, "
                    f"expected {expected} as in the ranks that serve: it has other weights"
                )
    finally:
        host.release(records)
