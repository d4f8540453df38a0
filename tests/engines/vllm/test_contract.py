"""The plug-in in four ranks of the real vLLM balancer: maps, weights, shares and samples."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="run `make test-engines`: it has vllm 0.33.0 in .venv-vllm")

from rebalance.engines.common.fsck import check
from telemetry import open_store
from telemetry.load.reader import RunReader
from tests.support.engines.vllm_ranks import (
    NUM_LAYERS,
    NUM_SLOTS,
    ROWS,
    TOP_K,
    make_rank,
    on_ranks,
    popularity_of,
    settings_for,
)

INTERVAL = 8
pytestmark = pytest.mark.slow


def rebalances(rank: int, meet: Path, is_async: bool, times: int, store: str) -> dict[str, Any]:
    """Step until so many maps were decided; the weights match the map after each step."""
    check.PART = 1e6  # a slot in every step
    made = make_rank(rank, meet, settings_for(store), is_async=is_async, interval=INTERVAL)
    first = generation = made.process.generation
    with_lists = step = 0
    while generation - first < times:
        made.forward(step, popularity_of(step // INTERVAL))
        made.state.step()
        made.check_weights()
        if made.process.generation != generation:  # a map serves on all layers since this step
            generation = made.process.generation
            with_lists += bool((made.model_state.logical_replica_count > NUM_SLOTS).any())
        step += 1
        assert step < 4 * INTERVAL * times + 200, f"{generation - first} maps after {step} steps"
    mover, placement = made.model_state.communicator, made.process.checks
    looked = placement.num_checked
    placement.sweep()
    assert made.process.recorder.close(20), "the recorder ended"
    return {
        "map": made.model_state.physical_to_logical_map.tolist(),
        "lists": made.model_state.logical_to_physical_map.sum().item(),
        "steps": step,
        "with_lists": with_lists,
        "checked": mover.num_checked,
        "wrong": mover.num_wrong,
        "repeated": mover.num_repeated,
        "looked": looked,
        "faults": [str(fault) for fault in placement.faults],
    }


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_weights_match_maps_on_every_rank_over_100_rebalances(
    is_async: bool, tmp_path: Path
) -> None:
    found = on_ranks(rebalances, is_async, 100, f"sqlite:{tmp_path / 'store.sqlite'}")

    print(found[0] | {"map": "..."})
    assert all(one["map"] == found[0]["map"] for one in found)
    assert all(one["lists"] == found[0]["lists"] for one in found)
    assert found[0]["with_lists"] > 50, "uneven shares were served"
    assert sum(one["checked"] for one in found) > 100 * NUM_LAYERS
    assert [one["wrong"] + one["repeated"] for one in found] == [0, 0, 0, 0]
    assert all(one["looked"] > 100 for one in found), "slots were looked at between steps"
    assert [one["faults"] for one in found] == [[], [], [], []]


def counted_steps(rank: int, meet: Path, store: str) -> tuple[int, int]:
    """Tokens that this rank counted itself, and the generation that serves, after 64 passes."""
    made = make_rank(rank, meet, settings_for(store), is_async=False, interval=INTERVAL)
    for step in range(64):
        made.process.phase = "prefill" if step % 16 < 8 else "decode"
        made.forward(step, popularity_of(step // INTERVAL))
        made.state.step()
    made.state.step(is_dummy=True)
    assert made.process.recorder.close(20), "the recorder ended"
    return 64 * ROWS * TOP_K * NUM_LAYERS, made.process.generation


def test_store_has_every_token_by_phase_and_the_map_that_serves(tmp_path: Path) -> None:
    url = f"sqlite:{tmp_path / 'store.sqlite'}"
    found = on_ranks(counted_steps, url)

    with closing(open_store(url, "contract")) as store:
        run, committed = store.current_run(), store.committed()
        assert run is not None
        assert committed is not None
        samples = [sample for _, sample in store.samples(run.run)]
        reader = RunReader(store, run)
        assert sum(len(accepted) for accepted in reader.read()) == len(samples)
        windows = reader.folder.windows()
    assert sum(int(one.tokens.sum()) for one in samples) == sum(tokens for tokens, _ in found)
    by_phase = [
        sum(int(one.tokens.sum()) for one in samples if one.phase == phase)
        for phase in ("prefill", "decode")
    ]
    assert by_phase[0] == by_phase[1] == sum(tokens for tokens, _ in found) // 2
    assert run.model["layer_ids"] == [3, 4, 5]
    assert committed.placement.generation == found[0][1]
    assert (committed.placement.slot_share < 1).any()
    assert sum(window.is_complete for window in windows) == 8
