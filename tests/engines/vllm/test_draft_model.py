"""A draft model with experts, which vLLM adds before its target: both are balanced."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="run `make test-engines`: it has vllm 0.33.0 in .venv-vllm")

from rebalance.engines.common.fsck import check
from telemetry import open_store
from tests.support.engines.vllm_ranks import (
    NUM_EXPERTS,
    NUM_LAYERS,
    NUM_RANKS,
    NUM_SLOTS,
    ROWS,
    TOP_K,
    make_rank,
    on_ranks,
    popularity_of,
    settings_for,
)

INTERVAL, STEPS = 8, 64
pytestmark = pytest.mark.slow


def with_draft(rank: int, meet: Path, store: str, is_async: bool) -> dict[str, Any]:
    """Steps with both models; after each, the weights of both match their maps."""
    check.PART = 1e6  # a slot in every step
    settings = settings_for(store, records="on")
    made = make_rank(rank, meet, settings, is_async=is_async, interval=INTERVAL, has_draft=True)
    first = made.process.generation
    draft = next(iter(made.state.model_states.values()))
    start = draft.physical_to_logical_map.clone()
    with_lists = {"target": 0, "draft": 0}
    for step in range(STEPS):
        made.forward(step, popularity_of(step // INTERVAL))
        made.state.step()
        made.check_weights()
        for name, found in zip(("draft", "target"), made.state.model_states.values(), strict=True):
            with_lists[name] += bool((found.logical_replica_count > NUM_SLOTS).any())
    made.process.checks.sweep()
    assert made.process.recorder.close(20), "the recorder ended"
    return {
        "maps": made.process.generation - first,
        "map": made.model_state.physical_to_logical_map.tolist(),
        "draft moved": int((draft.physical_to_logical_map != start).sum()),
        "steps with lists": with_lists,
        "faults": [str(fault) for fault in made.process.checks.faults],
        "looked": made.process.checks.num_checked,
        "repeated": [one.communicator.num_repeated for one in made.state.model_states.values()],
    }


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_both_models_are_balanced_and_the_target_is_reported(
    is_async: bool, tmp_path: Path
) -> None:
    url = f"sqlite:{tmp_path / 'store.sqlite'}"
    found = on_ranks(with_draft, url, is_async)

    assert all(one["map"] == found[0]["map"] for one in found)
    assert all(one["draft moved"] > 0 for one in found)
    assert all(min(one["steps with lists"].values()) > 0 for one in found)
    assert [one["repeated"] for one in found] == [[0, 0]] * NUM_RANKS
    assert [one["faults"] for one in found] == [[]] * NUM_RANKS
    assert all(one["looked"] > 0 for one in found)
    with closing(open_store(url, "contract")) as store:
        run, committed = store.current_run(), store.committed()
        assert run is not None
        assert committed is not None
        samples = [sample for _, sample in store.samples(run.run)]
    # The target's layers by the model's numbers, its tokens, and its map: none of the draft's.
    assert run.model["layer_ids"] == [3, 4, 5]
    assert committed.placement.slot_to_expert.shape == (NUM_LAYERS, NUM_SLOTS)
    assert committed.placement.num_experts == NUM_EXPERTS
    tokens = sum(int(one.tokens.sum()) for one in samples)
    assert tokens == NUM_RANKS * STEPS * ROWS * TOP_K * NUM_LAYERS
    if not is_async:
        assert committed.placement.slot_to_expert.tolist() == found[0]["map"]
