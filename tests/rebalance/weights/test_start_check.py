"""The start-up check of a rank's sources: one way for all ranks, and a sentence that says why."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from eplb.core.model import ModelShape
from eplb.core.placement import EMPTY, Placement
from eplb.core.topology import Topology
from eplb.errors import MigrationError
from rebalance.assembly.experts import fill_bank
from rebalance.protocol.gloo_votes import GlooVotes
from rebalance.stage.digest_table import agree_on_digests, table_of
from rebalance.weights.cache.address import HostCacheAddress
from rebalance.weights.cache.client import HostCacheClient
from rebalance.weights.cache.server import HostCacheServer
from rebalance.weights.sources import HOST, Place, map_peers
from rebalance.weights.start_check import KnownRecords, checked_sources
from runtime.checkpoints.checkpoint import Checkpoint
from runtime.experts import ExpertBank, ExpertSchema
from runtime.group import gathered
from tests.support.limits import NEVER_S

RunRanks = Callable[[int, Callable[[int], Any]], list[Any]]
# Ranks 0 and 1 share a host, rank 2 has one of its own.
TOPOLOGY = Topology(np.array([0, 0, 1]), np.array([3, 4, 3]))
HELD = [[0, 1, 2, EMPTY, 3, 4, 5, 6, 7, 0], [7, 6, 5, 4, 3, 2, EMPTY, 1, 0, 7]]
Spoil = Callable[[int, ExpertBank, list[str]], object]


@pytest.fixture
def host_cache(
    small_checkpoint: Checkpoint, small_model: ModelShape, small_schema: ExpertSchema
) -> Iterator[HostCacheAddress]:
    address = HostCacheAddress(f"test-{os.getpid()}-choice", os.urandom(16))
    made = HostCacheServer.of_checkpoint(address, small_checkpoint, small_model, small_schema)
    yield address
    made.close()


def nothing(rank: int, bank: ExpertBank, handles: list[str]) -> None:
    """All is well."""


def choose(
    rank: int, host_cache: HostCacheAddress, schema: ExpertSchema, spoil: Spoil
) -> tuple[str, Any]:
    """Check the sources as a rank does at its start; (why, which ranks it reads) or the refusal."""
    placement = Placement(np.array(HELD), num_experts=8)
    bank = ExpertBank(schema, 2, int(TOPOLOGY.slots_of_rank[rank]), num_staging=1)
    reader = HostCacheClient(host_cache, 8, schema.record_bytes, deadline_s=NEVER_S)
    held = placement.slot_to_expert[:, TOPOLOGY.slots_on(rank)].tolist()
    group = dist.group.WORLD
    assert group is not None
    mine = fill_bank(bank, held, reader, deadline_s=NEVER_S)
    votes = GlooVotes(group)
    digests = agree_on_digests(table_of(mine, 2, 8), votes, deadline_s=NEVER_S)
    handles = gathered(bank.handle, group)
    spoil(rank, bank, handles)
    dist.barrier()
    try:
        made, why = checked_sources(
            rank,
            bank,
            reader,
            open_peers=lambda: map_peers(rank, TOPOLOGY, bank, handles.__getitem__),
            known=KnownRecords(placement, TOPOLOGY, digests),
            group=group,
        )
    except MigrationError as exc:
        return str(exc), None
    into = torch.zeros(schema.record_bytes, dtype=torch.uint8)
    made.host.lease([(0, 5)], deadline_s=NEVER_S)
    assert made.pull((0, 5), HOST, 0, into).is_complete()
    dist.barrier()  # nobody leaves while another may still attach
    return why, sorted(made.readable)


def test_ranks_that_read_right_bytes_everywhere_use_their_peers(
    run_ranks: RunRanks, host_cache: HostCacheAddress, small_schema: ExpertSchema
) -> None:
    said = run_ranks(3, lambda rank: choose(rank, host_cache, small_schema, nothing))

    assert [readable for _, readable in said] == [[0, 1], [0, 1], [2]]
    assert len({why for why, _ in said}) == 1


def test_one_rank_that_cannot_attach_a_peer_sends_all_through_the_host(
    run_ranks: RunRanks, host_cache: HostCacheAddress, small_schema: ExpertSchema
) -> None:
    def forbid(rank: int, bank: ExpertBank, handles: list[str]) -> None:
        if rank == 1:
            handles[0] = "/proc/1/fd/none"

    said = run_ranks(3, lambda rank: choose(rank, host_cache, small_schema, forbid))

    assert [readable for _, readable in said] == [[0], [1], [2]]
    assert len({why for why, _ in said}) == 1
    assert "rank 1: arena /proc/1/fd/none" in said[0][0]


def test_peer_memory_with_other_bytes_is_detected(
    run_ranks: RunRanks, host_cache: HostCacheAddress, small_schema: ExpertSchema
) -> None:
    def spoil(rank: int, bank: ExpertBank, handles: list[str]) -> None:
        if rank == 1:
            twin = ExpertBank(small_schema, 2, 3, num_staging=1)  # the right size, and empty
            handles[0] = twin.handle
            bank.twin = twin  # type: ignore[attr-defined]  # it lives as long as the rank does

    said = run_ranks(3, lambda rank: choose(rank, host_cache, small_schema, spoil))

    assert [readable for _, readable in said] == [[0], [1], [2]]
    assert "layer 0 expert 0 from slot 0 of rank 0: digest mismatch" in said[2][0]


def test_rank_whose_own_reads_fail_the_check_stops_all_reads(
    run_ranks: RunRanks, host_cache: HostCacheAddress, small_schema: ExpertSchema
) -> None:
    def corrupt(rank: int, bank: ExpertBank, handles: list[str]) -> None:
        if rank == 2:
            bank.live(1, 2)[3] ^= 255  # its own last slot: nothing that it reads can be trusted

    said = run_ranks(3, lambda rank: choose(rank, host_cache, small_schema, corrupt))

    assert all("rank 2: layer 1 expert 7 from" in why for why, _ in said)


def test_place_on_another_host_names_itself() -> None:
    assert str(HOST) == "the host"
    assert str(Place(HOST.source, 3, 1)) == "slot 1 of rank 3"
