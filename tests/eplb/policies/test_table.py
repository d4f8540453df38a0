"""The policy table: a policy of a user's own is an entry like any other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb import POLICIES, Placement, PolicyEntry, Problem, Topology, plan, register_policy
from eplb.core.load import as_history
from eplb.core.placement import check_fits
from eplb.errors import ConfigError
from eplb.policies.table import round_robin, topk_everywhere

TWO_RANKS = Topology.uniform(1, 2, 2)
LOAD = np.array([[[4, 1, 1]]])
MODULE = """
from eplb import Placement
import numpy as np

def reversed_experts(problem):
    _, layers, experts = problem.history.tokens.shape
    held = np.arange(problem.topology.num_slots)[::-1] % experts
    return Placement(np.tile(held, (layers, 1)).astype(np.int32), experts)
"""


def hot_twice(problem: Problem) -> Placement:
    return Placement(np.array([[0, 1, 0, 2]], dtype=np.int32), problem.num_experts)


def all_on_one(problem: Problem) -> Placement:
    """Expert 0 twice on rank 0, which no placement may do."""
    return Placement(np.array([[0, -1, 1, 2]], dtype=np.int32), problem.num_experts)


def test_registered_policy_plans_by_its_name() -> None:
    register_policy("hot_twice", hot_twice)

    found = plan(LOAD, TWO_RANKS, policy="hot_twice")

    assert found.target.slot_to_expert.tolist() == [[0, 1, 0, 2]]
    assert "hot_twice" in POLICIES


@pytest.mark.parametrize(("resplits", "imbalance"), [(False, 4 / 3), (True, 1.0)])
def test_policy_entry_decides_whether_shares_are_optimised(
    resplits: bool, imbalance: float
) -> None:
    register_policy("hot_twice", PolicyEntry(hot_twice, resplits=resplits))

    found = plan(np.array([[[4000, 2000, 0]]]), TWO_RANKS, policy="hot_twice")

    assert found.after == pytest.approx(imbalance, abs=0.03)  # shares leave room for chance


def test_second_policy_of_one_name_is_rejected() -> None:
    register_policy("mine", hot_twice)
    register_policy("mine", hot_twice)

    with pytest.raises(ConfigError, match="policy 'mine' is registered already"):
        register_policy("mine", all_on_one)


def test_installed_package_adds_a_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "policy_of_mine.py").write_text(MODULE)
    metadata = tmp_path / "policy_of_mine-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: policy-of-mine\nVersion: 1.0\n"
    )
    (metadata / "entry_points.txt").write_text(
        "[eplb.policies]\nreversed = policy_of_mine:reversed_experts\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    assert "reversed" in POLICIES
    with pytest.raises(ConfigError, match=r"expected one of: auto, .*, reversed, round_robin"):
        plan(LOAD, TWO_RANKS, policy="best")
    found = plan(LOAD, TWO_RANKS, policy="reversed")

    assert sorted(found.target.slot_to_expert[0].tolist()) == [0, 0, 1, 2]
    assert found.policy == "reversed"
    assert len(POLICIES) == len(set(POLICIES)) == 9


TWO_OF_THREE = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=3)


ONE_RANK = Topology.uniform(num_nodes=1, ranks_per_node=1, slots_per_rank=4)
THREE_RANKS = Topology.uniform(num_nodes=1, ranks_per_node=3, slots_per_rank=3)
SMALL_AND_DEAD = Topology(np.zeros(3), np.array([1, 4, 3]), alive=np.array([True, False, True]))


@pytest.mark.parametrize(
    ("topology", "current", "expected"),
    [
        # 0, 2 and 1, 3 in the first round; 0 and 1 again, each to the other rank.
        (TWO_OF_THREE, None, [0, 2, 1, 1, 3, 0]),
        (TWO_OF_THREE, [2, 0, -1, 3, 1, -1], [2, 0, 1, 3, 1, 0]),
        (SMALL_AND_DEAD, None, [0, -1, -1, -1, -1, 1, 2, 0]),
        (ONE_RANK, None, [0, 1, 2, -1]),
    ],
    ids=["in turn", "what stays on a rank stays in its slot", "small and dead", "one rank"],
)
def test_round_robin_assigns_experts_in_turn_repeatedly(
    topology: Topology, current: list[int] | None, expected: list[int]
) -> None:
    num_experts = max(expected) + 1
    serving = None if current is None else Placement(np.array([current]), num_experts)
    problem = Problem(as_history(np.ones((1, num_experts))), topology, current=serving)

    assert round_robin(problem).slot_to_expert.tolist() == [expected]


@pytest.mark.parametrize(
    ("topology", "load", "replicas"),
    [
        # Six slots for four experts: two of them fit everywhere.
        (TWO_OF_THREE, [10, 90, 20, 30], [1, 2, 1, 2]),
        (THREE_RANKS, [90, 50, 10, 10, 10, 10], [3, 2, 1, 1, 1, 1]),  # no whole second round
        (ONE_RANK, [1, 2, 3], [1, 1, 1]),
    ],
)
def test_hottest_experts_are_on_every_rank(
    topology: Topology, load: list[int], replicas: list[int]
) -> None:
    assert topk_everywhere(Problem(as_history([load]), topology)).replica_count.tolist() == [
        replicas
    ]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_both_are_legal_on_any_ranks(data: st.DataObject) -> None:
    num_ranks = data.draw(st.integers(1, 6))
    slots = data.draw(st.lists(st.integers(0, 5), min_size=num_ranks, max_size=num_ranks))
    alive = data.draw(st.lists(st.booleans(), min_size=num_ranks, max_size=num_ranks))
    num_live = sum(count for count, lives in zip(slots, alive, strict=True) if lives)
    if not num_live:
        return
    topology = Topology(np.zeros(num_ranks), np.array(slots), alive=np.array(alive))
    num_experts = data.draw(st.integers(1, num_live))
    load = np.random.default_rng(num_live).integers(0, 100, size=(2, 3, num_experts))
    problem = Problem(as_history(load), topology)
    for policy in (round_robin, topk_everywhere):
        placement = policy(problem)

        check_fits(placement, topology)
        assert policy(problem).hash == placement.hash
