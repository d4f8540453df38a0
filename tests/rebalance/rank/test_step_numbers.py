"""Rank.step: who numbers forward passes, and what phase the samples of them have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch

from eplb.core.placement import Placement
from eplb.core.topology import Topology
from eplb.errors import ConfigError, RankError
from rebalance.assembly.config import RankConfig
from rebalance.assembly.rank import make_slots
from rebalance.rank.group import Group
from rebalance.rank.rank import Rank
from rebalance.weights.sources import WeightSources
from runtime.counters import SlotCounter
from runtime.experts import ExpertBank, ExpertSchema
from tests.support.agent_group import AgentGroup, Sink, records_of
from tests.support.local_group import LocalHost, local_slots

SCHEMA = ExpertSchema.swiglu(hidden=8, intermediate=4)
TOPOLOGY = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=2)
START = Placement(np.array([[0, 1, 0, 2]]), num_experts=3)
RECORDS = records_of(SCHEMA, 1, 3)
SAMPLE_STEPS = 4  # as AgentGroup has it


@pytest.fixture
def group() -> Iterator[AgentGroup]:
    made = AgentGroup(START, TOPOLOGY)
    made.add_all(SCHEMA, RECORDS, num_staging=2)
    made.begin()
    yield made
    made.close()


def step_all(group: AgentGroup, *args: Any) -> None:
    assert [agent.step(*args) for agent in group.agents] == [True, True]


def pass_all(group: AgentGroup) -> None:
    """A forward pass of every rank, which its counter of passes sees."""
    for clock in group.clocks:
        clock.steps += 1


def test_engines_step_numbers_are_those_of_the_samples(group: AgentGroup) -> None:
    for number in range(2 * SAMPLE_STEPS + 1):
        step_all(group, number)
        pass_all(group)

    found = [(one.first_step, one.last_step) for one in group.sinks[1].samples]
    assert found == [(0, 3), (4, 7)]
    assert [agent.describe().step for agent in group.agents] == [8, 8]


def test_step_given_twice_does_nothing_the_second_time(group: AgentGroup) -> None:
    step_all(group, 0)
    step_all(group, 0)
    pass_all(group)
    step_all(group, 1)

    assert [agent.describe().step for agent in group.agents] == [1, 1]


@pytest.mark.parametrize("number", [1, 2, 3])
def test_step_number_that_skips_one_or_is_not_the_number_of_passes_is_refused(
    group: AgentGroup, number: int
) -> None:
    step_all(group, 0)
    pass_all(group)
    pass_all(group)  # without a call of step before it

    with pytest.raises(RankError, match=f"rank 0: step {number}"):
        group.agents[0].step(number)


def test_samples_carry_the_phase_of_their_passes_or_mixed(group: AgentGroup) -> None:
    phases = ["prefill", "decode", "decode", "decode", *["decode"] * 4, *[None] * 4, "decode"]
    for number, phase in enumerate(phases):
        step_all(group, number, phase)
        pass_all(group)

    found = [sample.phase for sample in group.sinks[0].samples]
    assert found == ["mixed", "decode", "mixed"]  # the last is of load_phase, "mixed"


def test_unknown_phase_is_refused_before_the_step_begins(group: AgentGroup) -> None:
    with pytest.raises(ConfigError, match=r"'train'.*prefill, decode, mixed"):
        group.agents[0].step(0, "train")  # type: ignore[arg-type]

    step_all(group, 0)


def test_rank_without_a_counter_needs_a_step_number() -> None:
    group, bank = AgentGroup(START, TOPOLOGY), ExpertBank(SCHEMA, 1, 2, num_staging=2)
    sources = WeightSources(local_slots(TOPOLOGY, 0, [bank, bank]), LocalHost(RECORDS))
    digests = torch.zeros((1, 3, 2), dtype=torch.int64)
    agent = Rank(
        RankConfig("test", SAMPLE_STEPS, 1),
        make_slots(0, TOPOLOGY, bank, digests, START),
        SlotCounter(1, 2),
        group.store,
        Sink(group.store),
    )
    agent.enter(Group(0, "run", TOPOLOGY, group.votes.member(0)), START, sources)

    with (
        closing(group),  # it patches a module
        pytest.raises(RankError, match=r"rank 0: step\(\) without a number"),
    ):
        agent.step()
