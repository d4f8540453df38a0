"""``pause_staging``, as an engine calls it while it sends KV cache to another server."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import numpy as np
import pytest

from eplb.core.placement import EMPTY, Placement
from eplb.core.topology import Topology
from rebalance.rank.rank import Rank
from rebalance.stage.stage_settings import StageSettings
from runtime.experts import ExpertSchema
from tests.support.agent_group import AgentGroup, records_of
from tests.support.limits import NEVER_S

SCHEMA = ExpertSchema.swiglu(hidden=8, intermediate=4)
TOPOLOGY = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=2)
START = Placement(np.array([[0, EMPTY, 1, EMPTY]] * 2), num_experts=2)
FULL = Placement(np.array([[0, 1, 1, 0]] * 2), num_experts=2)
FORGOTTEN_S = NEVER_S / 2  # passes when a test skips it


@pytest.fixture
def group() -> Iterator[AgentGroup]:
    made, stage = AgentGroup(START, TOPOLOGY), StageSettings(pause_deadline_s=FORGOTTEN_S)
    made.add_all(SCHEMA, records_of(SCHEMA, 2, 2), num_staging=4, stage=stage)
    made.begin()
    yield made
    made.close()


def staged_bytes(agent: Rank) -> int:
    return int(agent.describe().detail["bytes_by_source"].get("peer", 0))


def stage_up_to_the_pause(group: AgentGroup) -> None:
    """Publish a migration; rank 1 stages what it may, rank 0 orders no chunk."""
    group.publish(FULL)
    group.step_until(lambda: group.agents[1].describe().prepared > 0)
    group.step_until(lambda: group.agents[0].mover.ring.num_in_use > 0)


def stands_still(group: AgentGroup, steps: int = 20) -> bool:
    for _ in range(steps):
        group.step()
    return staged_bytes(group.agents[0]) == 0 and group.generation() == 0


def test_staging_stands_still_until_the_last_of_two_transfers_has_ended(group: AgentGroup) -> None:
    agent = group.agents[0]
    for request in ("request 1", "request 2"):
        agent.pause_staging(of=request)
    stage_up_to_the_pause(group)

    assert stands_still(group)
    agent.resume_staging(of="request 1")
    assert stands_still(group)
    agent.resume_staging(of="request 2")
    group.step_until(lambda: group.generation() == 1)

    assert staged_bytes(agent) == 2 * SCHEMA.record_bytes
    assert group.placement.hash == FULL.hash


def test_forgotten_pause_ends_at_its_deadline_and_is_logged(
    group: AgentGroup, caplog: pytest.LogCaptureFixture
) -> None:
    group.agents[0].pause_staging(of="a request that was cancelled")
    stage_up_to_the_pause(group)
    assert stands_still(group)

    with caplog.at_level(logging.WARNING, "rebalance.stage.lanes"):
        group.time.skip(FORGOTTEN_S)
        group.step_until(lambda: group.generation() == 1)

    assert "without resume_staging" in caplog.text
