"""Transfers of KV cache that hold staging back by ``pause_staging``, as an engine's do."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from eplb.core.placement import EMPTY, Placement
from eplb.core.topology import Topology
from rebalance.agent import RankAgent
from rebalance.stage.stage_settings import StageSettings
from rebalance.transport.local import LocalTransport
from runtime.experts import ExpertBank, ExpertSchema
from tests.support.agent_group import AgentGroup, digests_of, record_of
from tests.support.limits import NEVER_S

SCHEMA = ExpertSchema.swiglu(hidden=8, intermediate=4)
TOPOLOGY = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=2)
START = Placement(np.array([[0, EMPTY, 1, EMPTY]] * 2), num_experts=2)
FULL = Placement(np.array([[0, 1, 1, 0]] * 2), num_experts=2)
RECORDS = {
    (layer, expert): record_of(SCHEMA, layer, expert, 2) for layer in range(2) for expert in (0, 1)
}
KV_BYTES = 8 << 20  # more than the buffers of a socket: it ends when its receiver has read it
FORGOTTEN_S = NEVER_S / 2  # passes when a test skips it


class KvTransfer:
    """The KV cache of one request on its way to another server; staging stands still meanwhile."""

    def __init__(self, agent: RankAgent, request: str) -> None:
        self._agent, self._request = agent, request
        self._sender, self._receiver = socket.socketpair()
        self._has_begun = threading.Event()
        self._thread = threading.Thread(target=self._send)
        self._thread.start()
        self._has_begun.wait()

    def _send(self) -> None:
        self._agent.pause_staging(of=self._request)
        self._has_begun.set()
        try:
            self._sender.sendall(bytes(KV_BYTES))
        finally:
            self._agent.resume_staging(of=self._request)

    def receive(self) -> None:
        """Read all of it, which ends the transfer."""
        left = KV_BYTES
        while left:
            left -= len(self._receiver.recv(left))
        self.close()

    def close(self) -> None:
        self._receiver.close()
        self._thread.join()
        self._sender.close()


@pytest.fixture
def group() -> Iterator[AgentGroup]:
    made, digests = AgentGroup(START, TOPOLOGY), digests_of(RECORDS)
    made.banks += [ExpertBank(SCHEMA, 2, 2, num_staging=4) for _ in range(2)]
    for rank in range(2):
        made.fill(rank, RECORDS)
        transport = LocalTransport(TOPOLOGY, rank, made.banks, RECORDS)
        made.add(transport, digests, stage=StageSettings(pause_deadline_s=FORGOTTEN_S))
    made.begin()
    yield made
    made.close()


def staged_bytes(agent: RankAgent) -> int:
    return sum(link["num_bytes"] for link in agent.describe().detail["stage"]["links"].values())


def stage_up_to_the_pause(group: AgentGroup) -> None:
    """Publish a migration; rank 1 stages what it may, rank 0 orders no chunk."""
    group.publish(FULL)
    group.step_until(lambda: group.agents[1].describe().prepared > 0)
    group.step_until(lambda: group.agents[0].describe().detail["stage"]["ring_in_use"] > 0)


def stands_still(group: AgentGroup, steps: int = 20) -> bool:
    for _ in range(steps):
        group.step()
    return staged_bytes(group.agents[0]) == 0 and group.generation() == 0


def test_staging_stands_still_during_a_transfer_and_resumes_after_it(group: AgentGroup) -> None:
    transfer = KvTransfer(group.agents[0], "request 1")
    stage_up_to_the_pause(group)

    assert stands_still(group)
    transfer.receive()
    group.step_until(lambda: group.generation() == 1)

    assert staged_bytes(group.agents[0]) == 2 * SCHEMA.record_bytes
    assert group.placement.hash == FULL.hash


def test_staging_waits_for_the_last_of_two_transfers(group: AgentGroup) -> None:
    first, second = (KvTransfer(group.agents[0], f"request {number}") for number in (1, 2))
    stage_up_to_the_pause(group)

    first.receive()
    assert stands_still(group)
    second.receive()

    group.step_until(lambda: group.generation() == 1)


def test_forgotten_pause_ends_at_its_deadline_and_is_logged(
    group: AgentGroup, caplog: pytest.LogCaptureFixture
) -> None:
    group.agents[0].pause_staging(of="a request that was cancelled")
    stage_up_to_the_pause(group)
    assert stands_still(group)

    with caplog.at_level(logging.WARNING, "rebalance.network.throttle"):
        group.time.skip(FORGOTTEN_S)
        group.step_until(lambda: group.generation() == 1)

    assert "without resume_staging" in caplog.text
