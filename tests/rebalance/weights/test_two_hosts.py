"""Experts that move between two hosts: each brings them from its own cache and its own disk."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from eplb.core.model import ModelShape
from eplb.core.placement import Placement
from eplb.core.topology import Topology
from eplb.migration.build import Pace
from eplb.migration.candidates import Candidates
from rebalance.assembly.experts import fill_bank
from rebalance.weights.cache.address import HostCacheAddress
from rebalance.weights.cache.client import HostCacheClient
from rebalance.weights.cache.server import HostCacheServer
from rebalance.weights.sources import MappedSlots, WeightSources
from runtime.checkpoints.checkpoint import Checkpoint
from runtime.experts import ExpertBank, ExpertSchema
from tests.support.agent_group import AgentGroup
from tests.support.limits import NEVER_S

numbers = itertools.count(1)

TWO_HOSTS = Topology.uniform(num_nodes=2, ranks_per_node=1, slots_per_rank=4)
START = Placement(np.tile([0, 1, 2, 3, 4, 5, 6, 7], (2, 1)), num_experts=8)
SWAPPED = Placement(np.tile([7, 1, 2, 3, 4, 5, 6, 0], (2, 1)), num_experts=8)


@dataclass
class Host:
    """A host cache, and a rank's way to it."""

    cache: HostCacheServer
    reader: HostCacheClient


StartHost = Callable[[], Host]


@pytest.fixture
def start_host(
    small_checkpoint: Checkpoint, small_model: ModelShape, small_schema: ExpertSchema
) -> Iterator[StartHost]:
    with ExitStack() as stack:

        def start() -> Host:
            address = HostCacheAddress(f"hosts-{os.getpid()}-{next(numbers)}", os.urandom(16))
            cache = HostCacheServer.of_checkpoint(
                address, small_checkpoint, small_model, small_schema
            )
            stack.callback(cache.close)
            size = small_schema.record_bytes
            reader = HostCacheClient(address, small_model.num_experts, size, deadline_s=NEVER_S)
            stack.callback(reader.close)
            return Host(cache, reader)

        yield start


@contextmanager
def ranks_of(hosts: list[Host], schema: ExpertSchema) -> Iterator[AgentGroup]:
    """One rank on each of two hosts, each with the host cache of its own host."""
    group, digests = AgentGroup(START, TWO_HOSTS), torch.zeros((2, 8, 2), dtype=torch.int64)
    for rank, host in enumerate(hosts):
        group.banks.append(ExpertBank(schema, 2, 4, num_staging=4))
        held = START.slot_to_expert[:, TWO_HOSTS.slots_on(rank)].tolist()
        for record, found in fill_bank(
            group.banks[rank], held, host.reader, deadline_s=NEVER_S
        ).items():
            digests[record] = torch.tensor(found)
    for rank, host in enumerate(hosts):
        group.add(WeightSources(MappedSlots(rank, group.banks[rank]), host.reader), digests)
    group.begin()
    yield group
    group.close()


def bytes_by_source(group: AgentGroup) -> list[dict[str, int]]:
    group.step_until(lambda: all(agent.placement.hash == SWAPPED.hash for agent in group.agents))
    return [agent.describe().detail["bytes_by_source"] for agent in group.agents]


def test_experts_move_between_hosts_by_the_disk_of_each(
    start_host: StartHost, small_checkpoint: Checkpoint, small_schema: ExpertSchema
) -> None:
    with ranks_of([start_host(), start_host()], small_schema) as ranks:
        ranks.publish(SWAPPED, Pace(staging_experts=4))
        brought = bytes_by_source(ranks)

    record = torch.zeros(small_schema.record_bytes, dtype=torch.uint8)
    for layer in (0, 1):
        for rank, slot, expert in ((0, 0, 7), (1, 3, 0)):
            small_checkpoint.repack(layer, expert, small_schema, record)
            assert torch.equal(ranks.banks[rank].live(layer, slot), record)
    assert brought == [{"disk": 2 * 4096, "host": 2 * 4096}] * 2


def test_host_reads_ahead_what_a_coming_plan_may_bring_it(
    start_host: StartHost, small_schema: ExpertSchema
) -> None:
    hosts = [start_host(), start_host()]

    def num_resident() -> list[int]:
        return [host.cache.stats()["resident"] for host in hosts]

    with ranks_of(hosts, small_schema) as ranks:
        assert num_resident() == [8, 8]
        ranks.store.suggest(Candidates((((0, 7), (1, 7)), ((0, 0), (1, 0)))))
        ranks.step_until(lambda: num_resident() == [10, 10])
        ranks.publish(SWAPPED)

        assert bytes_by_source(ranks) == [{"disk": 0, "host": 2 * 4096}] * 2
