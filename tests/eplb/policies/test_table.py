"""The policy table: a policy of a user's own is an entry like any other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from eplb import POLICIES, Placement, PolicyEntry, Problem, Topology, plan, register_policy
from eplb.errors import ConfigError

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
