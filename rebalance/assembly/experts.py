"""A rank's experts at the start: memory, first records, digests that all agree on, sources.

The order matters: every bank is filled, and its bytes agreed on, before any rank may read a peer's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Event

import numpy as np
import torch
from numpy.typing import NDArray

from eplb.core.model import ModelShape
from eplb.core.placement import EMPTY, Placement
from eplb.errors import ConfigError, MigrationError, RankError
from rebalance.assembly.config import RankConfig
from rebalance.rank.group import Group
from rebalance.stage.digest_table import agree_on_digests
from rebalance.types import Digest, Record
from rebalance.weights.cache.address import HostCacheAddress
from rebalance.weights.cache.client import HostCacheClient
from rebalance.weights.cache.engine_records import EngineRecordsClient
from rebalance.weights.expert_records import Tensors, offer, origin_of, together
from rebalance.weights.sources import WeightSources, map_peers, ranks_beside
from rebalance.weights.start_check import KnownRecords, checked_sources
from runtime.experts import ExpertBank, ExpertSchema, PeerBank, PlainArena, bank_bytes
from runtime.group import gathered

FILL_RECORDS = 64  # leased at a time by the first fill
DEATH_S = 1.0  # after a failure of torch, to learn which rank died

log = logging.getLogger(__name__)


def take_experts(
    config: RankConfig,
    group: Group,
    host_cache: HostCacheAddress,
    model: ModelShape,
    experts: ExpertSchema | ExpertBank,
    placement: Placement,
) -> tuple[ExpertBank, torch.Tensor, WeightSources]:
    """Have this rank's slots hold what the placement says, and agree on it; collective.

    A rank that joins is alone in its group. It learns the digests from the others when it is
    admitted (``rebalance/assembly/next_group.py``).

    Returns:
        The rank's slots, digests [L, E, 2] of every expert, and the sources of further records.

    Raises:
        ConfigError: bank, placement and topology do not fit together.
        MigrationError: a record cannot be read, or ranks hold different bytes of one expert.
        RankError: a rank died or missed the deadline, or the device has no memory.
    """
    network, rank, control = config.network, group.rank, group.control
    assert control is not None, "ranks agree on their experts"
    with torch_failures(group, "its memory for experts"):
        bank, unmapped = _memory(config, group, model, experts)
    size, is_filled = bank.schema.record_bytes, isinstance(experts, ExpertBank)
    hosts = group.topology.host_of_rank
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
            size,
            deadline_s=network.join_deadline_s,
            start_deadline_s=network.join_deadline_s,  # host caches and ranks start in any order
            device=group.device,
            ranks_on_host=int((hosts == hosts[rank]).sum()),
        )
    held = placement.slot_to_expert[:, group.topology.slots_on(rank)]
    with torch_failures(group, "its first experts"):
        if is_filled:
            own = _compute_digests(bank, held)
        else:
            assert cache is not None, "a rank without own experts was refused above"
            own = fill_bank(bank, held.tolist(), cache, deadline_s=network.fill_deadline_s)
        shape, deadline_s = (model.num_layers, model.num_experts), network.fill_deadline_s
        if group.is_waiting:
            digests = torch.zeros(*shape, 2, dtype=torch.int64)
        else:
            digests = agree_on_digests(own, *shape, group.votes, deadline_s=deadline_s)
        if cache is None:
            cache = _offer_own_experts(
                group, host_cache, bank, placement, digests, network.join_deadline_s
            )
        told = gathered(bank.handle, control)
        handles = dict(zip(group.members, map(str, told), strict=True))
        sources, why = checked_sources(
            rank,
            bank,
            cache,
            open_peers=lambda: _open_peers(group, bank, unmapped, handles),
            known=KnownRecords(placement, group.topology, digests),
            group=control,
        )
    log.info("rank %d: sources: %s", rank, why)
    return bank, digests, sources


def _offer_own_experts(
    group: Group,
    host_cache: HostCacheAddress,
    bank: ExpertBank,
    placement: Placement,
    digests: torch.Tensor,
    deadline_s: float,
) -> HostCacheClient:
    """Offer the experts that this rank is the first of its host to hold; collective.

    Raises:
        MigrationError: a rank could not offer its own, for example without a host cache.
    """
    rank, topology, size = group.rank, group.topology, bank.schema.record_bytes
    assert group.control is not None, "ranks offer together"
    beside = {rank, *ranks_beside(rank, topology)}
    own, first = dict[Record, int](), topology.slots_on(rank).start
    by_slot = torch.zeros((bank.num_layers, bank.num_slots, 2), dtype=torch.int64)
    for layer, row in enumerate(placement.slot_to_expert.tolist()):
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
) -> dict[Record, Digest]:
    """Load the first experts of a rank: slots ``held`` [L][C], negative for an empty one.

    Returns:
        The digest of every expert that this rank now holds, taken from the slots themselves.

    Raises:
        MigrationError: a record cannot be read, or a slot does not hold what was read.
    """
    places: dict[Record, list[int]] = {}  # a rank may hold an expert in two slots
    for layer, slots in enumerate(held):
        for slot, expert in enumerate(slots):
            if expert >= 0:
                places.setdefault((layer, expert), []).append(slot)
    deadline = time.monotonic() + deadline_s
    # Not all at once: a small host cache has no room for them, and reading goes on while one is
    # copied.
    size = max(1, min(FILL_RECORDS, host_cache.num_entries // 4))
    records, digests = list(places), dict[Record, Digest]()
    for first in range(0, len(records), size):
        batch, following = records[first : first + size], records[first + size : first + 2 * size]
        found, _ = host_cache.load(batch, deadline_s=max(0.0, deadline - time.monotonic()))
        host_cache.hint(following)
        for record, expected in zip(batch, found, strict=True):
            for slot in places[record]:
                expected = _fill_slot(bank, record, slot, expected, host_cache, deadline)
            digests[record] = expected
        host_cache.release(batch)
    return digests


def _fill_slot(
    bank: ExpertBank,
    record: Record,
    slot: int,
    expected: Digest,
    host_cache: HostCacheClient,
    deadline: float,
) -> Digest:
    """Copy a leased record into a slot and prove it there; return its digest."""
    layer, expert = record
    host_cache.read(record, bank.live(layer, slot))
    if bank.digest(layer, slot) != expected:
        # The host's memory may have been damaged since: its disk is a second try.
        left_s = max(0.0, deadline - time.monotonic())
        expected = host_cache.reload(record, deadline_s=left_s)
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


def _memory(
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
