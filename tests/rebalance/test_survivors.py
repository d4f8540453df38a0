"""What survivors load before they serve on, and what the agent leaves that they replace."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eplb.core.placement import EMPTY, Placement
from eplb.core.topology import Topology
from eplb.errors import MigrationError, RankError
from rebalance.assembly.experts import CACHE_DEADLINE_S, fill_bank
from rebalance.types import Record
from rebalance.weights.cache.client import HostCacheEnded
from runtime.experts import ExpertSchema
from tests.support.agent_group import AgentGroup, held_in, records_of
from tests.support.limits import NEVER_S
from tests.support.local_group import LocalHost

SCHEMA = ExpertSchema.swiglu(hidden=8, intermediate=4)
RECORDS = records_of(SCHEMA, 1, 4)
START = Placement([[0, 1, 2, 3]], 4)  # type: ignore[arg-type]


class RestartingHost(LocalHost):
    """A host cache that does not answer the first requests, as if it were started again."""

    def __init__(self, records: Mapping[Record, torch.Tensor], num_failures: int) -> None:
        super().__init__(records)
        self.num_failures = num_failures

    def lease(self, records: Sequence[Record], **given: Any) -> int:
        if self.num_failures:
            self.num_failures -= 1
            raise HostCacheEnded("the host cache disconnected")
        return super().lease(records, **given)


class RefusingHost(LocalHost):
    """A host cache that answers, and does not have a record."""

    num_asked = 0

    def lease(self, records: Sequence[Record], **given: Any) -> int:
        self.num_asked += 1
        raise MigrationError("layer 0 expert 3 is not on disk")


@pytest.fixture
def group() -> AgentGroup:
    made = AgentGroup(START, Topology.uniform(1, 2, 2))
    made.add_all(SCHEMA, RECORDS, num_staging=1)
    return made


def refill(
    group: AgentGroup,
    host: LocalHost,
    held: list[int],
    check: Callable[[], None] = lambda: None,
) -> None:
    """Load experts into slots of rank 0, from another cache of its host."""
    digests = group.rank_digests[0]
    fill_bank(group.banks[0], [held], host, deadline_s=NEVER_S, digests=digests, check=check)  # type: ignore[arg-type]


def test_closed_agent_is_freed_with_what_it_maps_without_a_collection(group: AgentGroup) -> None:
    group.begin()
    group.close()

    agent = group.agents.pop()
    found = [weakref.ref(agent), weakref.ref(agent.mover), weakref.ref(agent.swapper)]
    del agent

    assert [one() for one in found] == [None, None, None]


def test_refill_waits_for_a_host_cache_that_is_started_again(group: AgentGroup) -> None:
    refill(group, RestartingHost(RECORDS, 2), [EMPTY, 3])

    assert held_in(group.banks[0], 4) == [[0, 3]]


def test_refill_ends_where_another_survivor_dies_while_the_host_cache_is_gone(
    group: AgentGroup,
) -> None:
    def check() -> None:
        raise RankError("rank 1 died")

    with pytest.raises(RankError, match="rank 1 died"):
        refill(group, RestartingHost(RECORDS, 9), [EMPTY, 3], check)


def test_refill_names_how_long_it_has_waited_for_a_host_cache_that_stays_away(
    group: AgentGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rebalance.assembly.experts.CACHE_DEADLINE_S", 0.0)

    with pytest.raises(MigrationError, match="the host cache disconnected, for 0 s"):
        refill(group, RestartingHost(RECORDS, 9), [EMPTY, 3])


def test_refill_ends_at_the_first_refusal_of_a_host_cache_that_answers(group: AgentGroup) -> None:
    host = RefusingHost(RECORDS)

    with pytest.raises(MigrationError, match="layer 0 expert 3 is not on disk"):
        refill(group, host, [EMPTY, 3])

    assert host.num_asked == 1


class HostOfTheTimes(RestartingHost):
    """A host cache whose process ends before each request; the next one is there at once."""

    def __init__(self, records: Mapping[Record, torch.Tensor]) -> None:
        super().__init__(records, 1)
        self.now, self.room = 0.0, 1

    def lease(self, records: Sequence[Record], **given: Any) -> int:
        self.now += 0.7 * CACHE_DEADLINE_S
        read = super().lease(records, **given)
        self.num_failures = 1
        return read


def test_refill_waits_for_each_host_cache_as_long(
    group: AgentGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = HostOfTheTimes(RECORDS)
    clock = SimpleNamespace(monotonic=lambda: host.now, sleep=lambda _: None)
    monkeypatch.setattr("rebalance.assembly.experts.time", clock)

    refill(group, host, [2, 3])

    assert held_in(group.banks[0], 4) == [[2, 3]]
