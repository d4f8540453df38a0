"""Two profiles of one model in one store: each controller has its own load, plans and settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from eplb.core.placement import Placement
from eplb.core.topology import Topology
from eplb.errors import EplbError
from telemetry.state.live import Control
from telemetry.state.store import StateStore
from tests.support.controlled_deployment import (
    SETTINGS,
    SKEWED,
    Clock,
    Deployment,
    decisions,
    events,
)
from tests.support.stores import MemoryStore

# Prefill: 4 experts on 2 ranks of 3 slots. Decode: the same experts on 4 ranks of 2 slots.
PREFILL = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=3)
DECODE = Topology.uniform(num_nodes=1, ranks_per_node=4, slots_per_rank=2)
STARTS = {
    "prefill": (PREFILL, Placement(np.array([[0, 1, -1, 2, 3, -1]]), num_experts=4)),
    "decode": (DECODE, Placement(np.array([[0, -1, 1, -1, 2, -1, 3, -1]]), num_experts=4)),
}
# Each hot expert of decode is cold in prefill.
HOT_IN_DECODE = [5_000, 5_000, 10_000, 80_000]

OpenStore = Callable[[str], StateStore]


class Profile:
    """A deployment with its ranks, and a controller of its own."""

    def __init__(self, name: str, store: StateStore, clock: Clock) -> None:
        topology, start = STARTS[name]
        self.store = store
        store.commit(start, expected=None, reason="start")
        self.deployment = Deployment(store, f"run-{name}", topology=topology, clock=clock)
        self.controller = self.deployment.controller(holder=f"{name}-1")


@pytest.fixture
def profiles() -> tuple[Profile, Profile]:
    return profiles_in(lambda deployment: MemoryStore(deployment, clock=Clock()))


def profiles_in(open_stores: OpenStore) -> tuple[Profile, Profile]:
    clock = Clock()
    return (
        Profile("prefill", open_stores("r1-prefill"), clock),
        Profile("decode", open_stores("r1-decode"), clock),
    )


def test_each_profile_plans_on_its_own_load_and_commits_its_own_placement(
    open_stores: OpenStore,
) -> None:
    profiles = prefill, decode = profiles_in(open_stores)
    prefill.deployment.serve(SKEWED)
    decode.deployment.serve(HOT_IN_DECODE)
    prefill.controller.turn()
    decode.controller.turn()

    targets = [one.deployment.swap().target for one in profiles]

    assert [target.num_slots for target in targets] == [6, 8]
    hottest = [int(target.replica_count[0].argmax()) for target in targets]
    assert hottest == [0, 3]
    committed = [one.store.committed() for one in profiles]
    assert [one.placement.hash for one in committed if one] == [one.hash for one in targets]
    assert [one.placement.generation for one in committed if one] == [1, 1]


def test_profiles_have_load_and_leases_of_their_own(profiles: tuple[Profile, Profile]) -> None:
    prefill, decode = profiles
    prefill.deployment.serve(SKEWED, windows=3)

    for one in profiles:
        one.controller.turn()

    assert (decisions(prefill.store), decisions(decode.store)) == (["MOVE"], [])
    leases = [one.store.lease() for one in profiles]
    assert [one.holder for one in leases if one] == ["prefill-1", "decode-1"]
    prefill.controller.close()
    assert prefill.store.lease() is None
    assert decode.store.lease() is not None


def test_task_is_seen_by_the_controller_of_its_profile_alone(
    profiles: tuple[Profile, Profile],
) -> None:
    prefill, decode = profiles
    for one in profiles:
        one.store.set_control(Control(movement=False), reason="requests alone")
        one.deployment.serve(SKEWED)
    task = prefill.store.submit("explain", {"layer": 0, "expert": 0})

    decode.controller.turn()
    waiting = prefill.deployment.task(task.id)
    prefill.controller.turn()
    done = prefill.deployment.task(task.id)

    assert (waiting.state, done.state) == ("queued", "done")
    assert decode.store.task(task.id) is None
    assert decode.store.tasks("done") == []


def test_live_settings_and_stage_change_one_profile_alone(
    profiles: tuple[Profile, Profile],
) -> None:
    prefill, decode = profiles
    prefill.store.change_live({"stage": "observe", "policy": "greedy"}, reason="a test")
    prefill.deployment.serve(SKEWED)
    decode.deployment.serve(HOT_IN_DECODE)

    for one in profiles:
        one.controller.turn()

    (kept,), (moved,) = (events(one.store, "plan") for one in profiles)
    assert (kept.detail["stage"], kept.detail["policy"]) == ("observe", "greedy")
    assert (moved.detail["stage"], moved.detail["policy"]) == ("all", "auto")
    assert prefill.store.published() is None
    assert decode.store.published() is not None
    assert decode.store.live().revision == 0


def test_profile_that_cannot_plan_leaves_the_other_at_work(
    profiles: tuple[Profile, Profile],
) -> None:
    prefill, decode = profiles
    # Fewer spare slots than its settings ask for: each plan of prefill fails.
    broken = replace(SETTINGS.pace, mode="flip", spare_slots=2)
    prefill.controller = prefill.deployment.controller(pace=broken)
    prefill.deployment.serve(SKEWED)
    decode.deployment.serve(HOT_IN_DECODE)

    prefill.controller.turn()
    decode.controller.turn()

    assert [event.detail["where"] for event in events(prefill.store, "error")] == ["plan"]
    assert events(decode.store, "error") == []
    assert decode.deployment.swap().target.generation == 1


def test_placement_of_one_profile_cannot_be_rolled_back_to_in_the_other(
    profiles: tuple[Profile, Profile],
) -> None:
    prefill, decode = profiles
    prefill.deployment.serve(SKEWED)
    prefill.controller.turn()
    prefill.deployment.swap()
    decode.deployment.serve(HOT_IN_DECODE)
    task = decode.store.submit("rollback", {"generation": 1, "reason": "a mistake"})

    decode.controller.turn()

    assert "generation 1" in decode.deployment.task(task.id).result.error
    with pytest.raises(EplbError):
        decode.store.commit(STARTS["prefill"][1], expected=None, reason="of the other")
