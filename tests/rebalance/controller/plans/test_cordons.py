"""Cordons as a live setting: what plans hold, when they are due, and what is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from eplb.core.model import ModelShape
from eplb.core.placement import EMPTY, Placement
from eplb.core.topology import Topology
from eplb.decision.triggers import TriggerRules
from eplb.errors import ConfigError
from eplb.migration.build import Pace
from rebalance.controller.plans.planner_request import (
    PlannerRequest,
)
from telemetry.state.tasks import Refusal
from tests.support.controlled_deployment import (
    Clock,
    Deployment,
    decisions,
    events,
    worked_off,
)
from tests.support.stores import MemoryStore

# One layer of four experts over three ranks of three slots.
TOPOLOGY = Topology.uniform(num_nodes=1, ranks_per_node=3, slots_per_rank=3)
MODEL = ModelShape((0,), 4, 2, hidden=16, intermediate=8)
START = Placement(np.array([[0, 1, EMPTY, 2, EMPTY, EMPTY, 3, EMPTY, EMPTY]]), num_experts=4)
# Even over the ranks of START, and not.
EVEN, SKEWED = [15_000, 15_000, 30_000, 30_000], [60_000, 20_000, 10_000, 10_000]


@pytest.fixture
def deployment() -> Deployment:
    store = MemoryStore("test", clock=Clock())
    store.commit(START, expected=None, reason="start")
    return Deployment(store, topology=TOPOLOGY, model=MODEL)


def held(placement: Placement, rank: int) -> list[int]:
    return placement.slot_to_expert[0, TOPOLOGY.slots_on(rank)].tolist()


def test_drained_rank_is_emptied_whatever_the_triggers_and_stays_empty(
    deployment: Deployment,
) -> None:
    rarely = TriggerRules(interval_s=3600.0, cool_down_s=3600.0)
    controller = deployment.controller(triggers=rarely)
    deployment.decide_on(controller, EVEN)
    assert deployment.store.published() is None
    deployment.store.change_live({"cordons": "2:drain"}, reason="change 4711")
    deployment.decide_on(controller, EVEN)

    emptied = deployment.swap().target
    assert held(emptied, 2) == [EMPTY] * 3
    assert sorted(set(held(emptied, 0) + held(emptied, 1)) - {EMPTY}) == [0, 1, 2, 3]
    planned = deployment.last_plan()
    assert planned["trigger"] == "drain"
    assert "rank 2 is drained" in planned["reason"]

    deployment.serve(SKEWED, windows=4)
    deployment.controller().turn()
    published = deployment.store.published()
    assert published is None or held(published.target, 2) == [EMPTY] * 3
    assert events(deployment.store, "error") == []


def wants(deployment: Deployment, *ranks: int) -> str:
    """Ask for an operation after which just these ranks serve."""
    asked: dict[str, Any] = {"asked": list(ranks), "alive": [True] * 3, "reason": "4711", "by": ""}
    return deployment.store.change_membership(f"op-{len(ranks)}", ranks, **asked).id


def test_rank_that_should_not_serve_any_more_is_drained_until_the_operation_is_cancelled(
    deployment: Deployment,
) -> None:
    controller = deployment.controller(triggers=TriggerRules(interval_s=3600.0))
    operation = wants(deployment, 0, 1)
    deployment.decide_on(controller, EVEN)

    assert held(deployment.swap().target, 2) == [EMPTY] * 3
    assert deployment.last_plan()["trigger"] == "drain"
    assert deployment.last_plan()["asked"]["cordons"] == "2:drain"
    assert deployment.store.live().text("cordons") == ""  # an operator's own stay apart
    deployment.store.end_membership_change(operation, "cancelled", why="not now")
    deployment.decide_on(controller, SKEWED, windows=4)
    assert deployment.last_plan()["asked"]["cordons"] == ""


def test_operation_whose_ranks_cannot_be_drained_fails_with_the_reason(
    deployment: Deployment,
) -> None:
    operation = wants(deployment, 0, 1)
    deployment.store.change_live({"cordons": "1:cordon"}, reason="its GPU throttles")
    deployment.serve(EVEN)

    deployment.controller(pace=Pace(staging_experts=0, mode="flip", spare_slots=1)).turn()

    ended = deployment.store.membership_change()
    assert ended is not None
    assert (ended.id, ended.ended) == (operation, "failed")
    assert re.match(r"rank 2 \(drain\): found 2 slots .* on rank 0 for 3 experts", ended.why)


def test_operation_that_waits_for_a_rank_does_not_fail_before_it_serves(
    deployment: Deployment,
) -> None:
    survived = Placement([[0, 1, 2, EMPTY, EMPTY, EMPTY, 3, 0, EMPTY]], 4, generation=1)
    deployment.store.commit(survived, expected=0, reason="rank 1 died")
    left = replace(TOPOLOGY, alive=np.array([True, False, True]))
    died = Deployment(deployment.store, run="run-2", topology=left, model=MODEL)
    wants(died, 0, 1)
    died.serve(EVEN)

    died.controller().turn()

    waiting = died.store.membership_change()
    assert waiting is not None
    assert waiting.ended == ""
    assert " for 4 experts that must be there" in died.last_plan()["asked"]["unmet_cordons"][0]


@pytest.mark.parametrize(("within_s", "ended"), [(0.0, "failed"), (3600.0, "")])
def test_operation_that_waits_for_a_rank_fails_at_its_deadline_with_what_it_waited_for(
    deployment: Deployment, within_s: float, ended: str
) -> None:
    survived = Placement([[0, 1, 2, EMPTY, EMPTY, EMPTY, 3, 0, EMPTY]], 4, generation=1)
    deployment.store.commit(survived, expected=0, reason="rank 1 died")
    left = replace(TOPOLOGY, alive=np.array([True, False, True]))
    died = Deployment(deployment.store, run="run-2", topology=left, model=MODEL)
    asked: dict[str, Any] = {"asked": 3, "alive": [True, False, True], "reason": "4711", "by": ""}
    died.store.change_membership("op-1", range(3), within_s=within_s, **asked)

    died.controller().turn()

    found = died.store.membership_change()
    assert found is not None
    assert found.ended == ended
    if ended:
        assert found.why == "not done within 0 s, waiting: not ready to be admitted: rank 1"
        assert found.should_serve == (0, 1, 2)  # as before: rank 1 died, nobody asked it to leave


def test_approval_of_a_drain_needs_no_word_on_what_it_costs(deployment: Deployment) -> None:
    store, controller = deployment.store, deployment.controller()
    store.change_live({"stage": "propose", "cordons": "2:drain"}, reason="change 4711")
    deployment.decide_on(controller, EVEN)
    (proposal,) = store.proposals()

    approved = worked_off(deployment, "approve", proposal=proposal.id, by="alice", reason="go")

    assert proposal.trigger == "drain"
    assert proposal.imbalance_after >= proposal.imbalance_before  # so it saves nothing
    assert (approved.state, approved.result.error) == ("done", "")
    assert held(deployment.swap().target, 2) == [EMPTY] * 3


def test_drain_replaces_an_older_proposal_that_drains_nothing(deployment: Deployment) -> None:
    store, controller = deployment.store, deployment.controller(stage="propose")
    deployment.decide_on(controller, SKEWED)
    store.change_live({"cordons": "2:drain"}, reason="change 4711")
    for _ in range(2):
        deployment.decide_on(controller, SKEWED)

    older, drains = store.proposals()
    assert (older.state, older.ended_by) == ("rejected", "controller")
    assert older.end_reason == "a rank was ordered to be drained since, and keeps experts in it"
    assert (drains.state, drains.trigger) == ("open", "drain")
    worked_off(deployment, "approve", proposal=drains.id, by="alice", reason="go")
    assert held(deployment.swap().target, 2) == [EMPTY] * 3


def test_uncordoned_rank_takes_experts_again(deployment: Deployment) -> None:
    controller, drained = deployment.controller(), []
    for cordons in ("2:drain", ""):
        deployment.store.change_live({"cordons": cordons}, reason="change 4711")
        deployment.decide_on(controller, SKEWED)
        drained.append(held(deployment.swap().target, 2) == [EMPTY] * 3)

    assert drained == [True, False]


def test_cordoned_rank_keeps_what_it_holds_and_takes_nothing_new(deployment: Deployment) -> None:
    controller = deployment.controller()
    deployment.store.change_live({"cordons": "1:cordon"}, reason="its GPU throttles")
    deployment.decide_on(controller, SKEWED)

    target = deployment.swap().target
    assert held(target, 1) == [2, EMPTY, EMPTY]
    assert held(target, 2) != held(START, 2)
    assert deployment.last_plan()["asked"]["cordons"] == "1:cordon"


def test_drain_that_slots_do_not_allow_is_recorded_and_ends_no_planning(
    deployment: Deployment,
) -> None:
    controller = deployment.controller()
    deployment.store.change_live({"cordons": "1:drain, 2:drain, 7:cordon"}, reason="too many")
    deployment.decide_on(controller, SKEWED)

    target = deployment.swap().target
    assert held(target, 1) == [EMPTY] * 3
    assert held(target, 2) != [EMPTY] * 3
    unmet = deployment.last_plan()["asked"]["unmet_cordons"]
    assert [one.partition(":")[0] for one in unmet] == ["rank 7 (cordon)", "rank 2 (drain)"]
    assert " for 4 experts that must be there" in unmet[1]


def test_rollback_to_a_placement_on_a_drained_or_cordoned_rank_is_refused(
    deployment: Deployment,
) -> None:
    controller = deployment.controller()
    deployment.store.change_live({"cordons": "2:drain"}, reason="change 4711")
    deployment.decide_on(controller, SKEWED)
    deployment.swap()

    refused = worked_off(deployment, "rollback", generation=0, dry_run=False)
    assert (refused.state, refused.result.refusal) == ("failed", Refusal.CANNOT_SERVE)
    assert "rank 2 is drained" in refused.result.error

    deployment.store.change_live({"cordons": "2:cordon"}, reason="look at it first")
    refused = worked_off(deployment, "rollback", generation=0, dry_run=False)
    assert "expert 3 is new on rank 2, which is cordoned" in refused.result.error
    deployment.store.change_live({"cordons": ""}, reason="done")
    assert worked_off(deployment, "rollback", generation=0, dry_run=False).state == "done"


def test_drain_moves_first_where_only_few_layers_move(deployment: Deployment) -> None:
    model = ModelShape((0, 1), 4, 2, hidden=16, intermediate=8)
    rows = np.stack([START.slot_to_expert[0], [0, 1, EMPTY, 2, 3, EMPTY, EMPTY, EMPTY, EMPTY]])
    store = MemoryStore("layers", clock=Clock())
    store.commit(Placement(rows, num_experts=4), expected=None, reason="start")
    served = Deployment(store, topology=TOPOLOGY, model=model)
    store.change_live({"cordons": "2:drain"}, reason="change 4711")
    served.serve([EVEN, SKEWED])
    served.controller(stage="layers", stage_layers=1).turn()

    target = served.swap().target
    assert decisions(store) == ["MOVE"]
    assert target.slot_to_expert[0, TOPOLOGY.slots_on(2)].tolist() == [EMPTY] * 3
    assert target.slot_to_expert[1].tolist() == rows[1].tolist()


@pytest.mark.parametrize("cordon", ["drain", "cordon"])
def test_cordon_holds_where_every_rank_keeps_a_spare_slot(cordon: str) -> None:
    rows = np.array([[0, 1, EMPTY, EMPTY, 2, EMPTY, EMPTY, EMPTY, EMPTY, 3, EMPTY, EMPTY]])
    store = MemoryStore("spares", clock=Clock())
    store.commit(Placement(rows, num_experts=4), expected=None, reason="start")
    topology = Topology.uniform(num_nodes=1, ranks_per_node=3, slots_per_rank=4)
    served = Deployment(store, topology=topology, model=MODEL)
    store.change_live({"cordons": f"2:{cordon}"}, reason="change 4711")
    served.serve(SKEWED)
    flip = Pace(staging_experts=0, mode="flip", spare_slots=1)
    served.controller(pace=flip).turn()

    target = served.swap().target
    mine = target.slot_to_expert[0, topology.slots_on(2)]
    assert sorted(mine[mine != EMPTY].tolist()) == ([] if cordon == "drain" else [3])
    assert events(store, "error") == []


@pytest.mark.parametrize("text", ["3", "3:", "3:away", "-1:drain", "3:drain, 3:cordon", "a:drain"])
def test_text_that_is_no_list_of_cordons_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="rank:cordon or rank:drain"):
        PlannerRequest(cordons=text)
