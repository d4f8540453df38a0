"""A plan in plain words: the figures in them are those of the plan."""

import json

import numpy as np
import pytest

from eplb import Budget, CostModel, Decision, ModelShape, Placement, Topology, plan
from eplb.decision.explanation import RankLoad
from eplb.decision.outcome import explain, explain_layer
from eplb.errors import ConfigError

# Ranks hold experts {0, 1} and {2, -}; a rank carries 500,000 on average.
TWO_RANKS = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=2)
SERVING = Placement(np.array([[0, 1, 2, -1]]), num_experts=3, generation=4)
LOAD = np.array([[600, 200, 200]]) * 1000
# The one way to even ranks is to put expert 0 into the empty slot.


def test_hot_expert_needs_more_replicas_than_one() -> None:
    found = plan(LOAD, TWO_RANKS, current=SERVING)

    told = explain(found, 0, 0)

    assert (told.part_of_load, told.place, told.load) == (0.6, 1, 1.2)
    assert (told.ranks_before, told.ranks_after) == ((0,), (0, 1))
    assert told.rank_loads == (RankLoad(0, 1.6, 1.0), RankLoad(1, 0.4, 1.0))
    assert [(move.expert, move.dst_slot, move.src_slot) for move in told.moves] == [(0, 3, 0)]
    assert str(told).splitlines() == [
        "Layer 0, expert 0: 60.0% of the layer's tokens, number 1 of 3 by load; "
        "1.20 times the mean load of a rank.",
        "Replicas: 1 -> 2. A single one would load its rank to 1.20 or more: balance needs 2. "
        "With one fewer the layer would be at 1.60.",
        "Ranks before: 0; after: 0, 1.",
        "Added: rank 1 was number 1 of 2 from the least busy (0.40).",
        "Load of its ranks: rank 0: 1.60 -> 1.00, rank 1: 0.40 -> 1.00.",
        "Moves that touch it: expert 0 to rank 1 (slot 3) from rank 0 (slot 0).",
        "Layer 0: imbalance 1.60 -> 1.00; the lower bound of any placement in these slots is 1.00.",
    ]


def test_explanation_of_a_cold_expert_reports_no_change() -> None:
    told = str(explain(plan(LOAD, TWO_RANKS, current=SERVING), 0, 2))

    assert "Replicas: 1, as before. One is enough: its load is at most the mean of a rank." in told
    assert "Ranks before: 1; after: 1." in told
    assert "Moves that touch it: none." in told
    idle = explain(plan(0 * LOAD, TWO_RANKS, current=SERVING), 0, 1)
    assert (idle.part_of_load, idle.place) == (0.0, 1)


def test_explanation_of_a_layer_names_busy_ranks_and_changes() -> None:
    told = explain_layer(plan(LOAD, TWO_RANKS, current=SERVING), 0)

    assert (told.before, told.after, told.bound) == (1.6, 1.0, 1.0)
    assert (told.more, told.fewer, len(told.moves)) == (((0, 1, 2),), (), 1)
    assert str(told).splitlines()[1:] == [
        "Busiest before is rank 0 at 1.60, with expert 0, expert 1; "
        "busiest after is rank 0 at 1.00.",
        "More replicas: expert 0 (1 -> 2).",
        "Fewer replicas: none.",
        "Weights that move: 1.",
    ]


def test_plan_that_keeps_gives_its_reason() -> None:
    kept = plan(LOAD, TWO_RANKS, current=plan(LOAD, TWO_RANKS, current=SERVING).target)
    assert kept.decision is Decision.KEEP

    told = explain(kept, 0, 0)

    assert told.moves == ()
    assert f"The plan keeps the serving placement: {kept.reason}." in str(told)


def test_explanation_reports_a_replica_lost_on_a_dead_rank() -> None:
    dead = Topology(np.zeros(2), np.array([2, 3]), alive=np.array([False, True]))
    serving = Placement(np.array([[0, 1, 2, -1, -1]]), num_experts=3)

    told = explain(plan(LOAD, dead, current=serving), 0, 0)

    assert (told.ranks_before, told.ranks_after) == ((0,), (1,))
    assert [at.rank for at in told.rank_loads] == [1]
    assert "Removed: rank 0 is dead." in str(told)


def test_explanation_of_one_replica_on_a_fast_rank_names_its_load() -> None:
    fast = Topology(np.zeros(2), np.array([2, 2]), rank_speed=np.array([3.0, 1.0]))
    load = np.array([[900, 300]])

    told = explain(plan(load, fast), 0, 0)

    # A rank of speed 1 would carry 300 at best; expert 0 is three times that, and so is rank 0.
    assert told.load == 3.0
    assert "One is enough" in str(told)


@pytest.mark.parametrize(("layer", "expert"), [(1, 0), (-1, 0), (0, 3), (0, -1)])
def test_explanation_of_an_unknown_expert_is_refused(layer: int, expert: int) -> None:
    found = plan(LOAD, TWO_RANKS, current=SERVING)

    with pytest.raises(ConfigError, match=r"layer -?\d+.*, expected "):
        explain(found, layer, expert)


def test_explanation_takes_the_model_s_number_of_a_layer() -> None:
    shape = ModelShape((3, 5), num_experts=3, top_k=1, hidden=2, intermediate=2)
    load = np.concatenate([LOAD, LOAD[..., ::-1]], axis=-2)
    serving = Placement(np.repeat(SERVING.slot_to_expert, 2, axis=0), num_experts=3)
    found = plan(load, TWO_RANKS, current=serving, model=shape)

    told = found.explain(5, 2)

    assert (told.layer, told.load) == (5, found.explain(3, 0).load)
    assert explain_layer(found, 5).layer == 5
    with pytest.raises(ConfigError, match=r"layer 1 is no MoE layer, expected one of 3, 5"):
        found.explain(1, 0)


def test_explanation_gives_imbalance_with_one_more_replica() -> None:
    even = Placement(np.array([[0, 1, 0, 2]]), num_experts=3, generation=4)
    load = np.array([[600, 300, 100]]) * 1000

    kept = plan(load, TWO_RANKS, current=even, cost=CostModel(pay_back_s=0.0, min_share_gain=1.0))
    told = kept.explain(0, 2)

    # In place of expert 0 on the first rank: 350 and 650 of 500.
    assert (told.with_one_less, told.with_one_more) == (None, pytest.approx(1.3))
    assert "With one more, and nothing else moved, at 1.30." in str(told)


def test_explanation_lists_new_shares() -> None:
    load = np.array([[600, 300, 100]]) * 1000
    even = Placement(np.array([[0, 1, 0, 2]]), num_experts=3, generation=4)

    told = plan(load, TWO_RANKS, current=even, budget=Budget(max_moves=0)).explain(0, 0)

    assert told.decision == "RESPLIT"
    assert told.shares_after == pytest.approx((1 / 3, 2 / 3), abs=0.01)
    assert "Shares of its tokens: 3" in str(told)


def test_explanation_is_json_ready_and_names_bytes_and_links() -> None:
    model = ModelShape((0,), num_experts=3, top_k=1, hidden=4, intermediate=2, expert_bytes=10**6)
    found = plan(LOAD, TWO_RANKS, model=model, current=SERVING)

    told = json.loads(json.dumps(found.explain(0, 0).to_dict()))

    assert told["moves"][0]["source"] == "peer"
    assert told["bytes_by_link"] == {"same_rank": 0, "node": 10**6, "network": 0, "host": 0}
    assert "(slot 0); 1.0 MB within a node." in "\n".join(told["sentences"])
    assert json.dumps(explain_layer(found, 0).to_dict())
