"""Parts of the plug-in in the real vLLM balancer that other engines do not have."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rebalance.engines.vllm import policy
from rebalance.engines.vllm.conform import subject_of
from telemetry import open_store
from telemetry.load.reader import RunReader
from tests.support.engines.gauge import value_of
from tests.support.engines.ranks import (
    EACH,
    INTERVAL,
    NAME,
    NUM_EXPERTS,
    NUM_LAYERS,
    NUM_RANKS,
    NUM_SLOTS,
    WINDOW,
    check_slots,
    config_in,
    config_with_records,
    look_in_every_pass,
    on_all,
    on_ranks,
    settings_in,
)
from tests.support.engines.vllm_ranks import ROWS, TOP_K, make_rank

PASSES = 64
pytestmark = pytest.mark.slow


def counted_steps(rank: int, config: Path) -> dict[str, Any]:
    """Passes of two phases, and a dummy step at the end."""
    made = make_rank(rank, config)
    for step in range(PASSES):
        made.plugin.phase = "prefill" if step % 16 < 8 else "decode"
        made.steps()
    made.state.step(is_dummy=True)
    return made.result()


def test_store_has_every_token_by_phase(tmp_path: Path) -> None:
    config = config_in(tmp_path, telemetry__window_steps=8)
    on_ranks(counted_steps, config)

    with closing(open_store(settings_in(config).deployment.store, NAME)) as store:
        run = store.current_run()
        assert run is not None
        samples = [sample for _, sample in store.samples(run.run)]
        reader = RunReader(store, run)
        assert sum(len(accepted) for accepted in reader.read()) == len(samples)
        windows = reader.folder.windows()
    by_phase = [
        sum(int(one.tokens.sum()) for one in samples if one.phase == phase)
        for phase in ("prefill", "decode")
    ]
    assert by_phase == [NUM_RANKS * PASSES * ROWS * TOP_K * NUM_LAYERS // 2] * 2
    assert run.model["layer_ids"] == [3, 4, 5], "the model's numbers"
    assert sum(window.is_complete for window in windows) == 8


def lost(rank: int, config: Path, is_async: bool) -> dict[str, Any]:
    """A rank loses all its experts of a layer, and there are no records."""
    made = make_rank(rank, config, is_async=is_async)
    made.until_maps(2)
    if rank == 1:
        made.lose(2)
    made.steps(6 * INTERVAL, is_checked=False)
    made.visit_all()
    for layer in range(NUM_LAYERS):
        if (rank, layer) != (1, 2):
            check_slots(layer, made.layers[layer], made.held[layer, rank * EACH :][:EACH], 0)
    return made.result() | {"kept": made.mover.num_kept, "stopped": made.plugin.stopped}


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_wrong_bytes_without_records_spread_to_no_other_rank(
    is_async: bool, tmp_path: Path
) -> None:
    found = on_ranks(lost, config_in(tmp_path, engine__records="off"), is_async)

    assert len({one["kept"] for one in found}) == 1
    assert len({one["stopped"] for one in found}) == 1
    assert found[0]["stopped"]
    assert [one["unchecked"] for one in found] == [0] * NUM_RANKS
    assert [one["from host"] for one in found] == [0] * NUM_RANKS
    # Each wrong slot is reported with its tensors, and no other slot of any rank.
    assert [bool(one["faults"]) for one in found] == [False, True, False, False]
    assert all(one["map"] == found[0]["map"] for one in found)


def swapped(rank: int, config: Path, slot: int) -> dict[str, Any]:
    """Rank 1 has wrong bytes in a slot, which changes places with the next one of the rank."""
    made = make_rank(rank, config)
    held = made.plugin._served[0].held
    subject = subject_of(
        made.model_state, held, made.plugin.group, [2], keeps_map=made.plugin.keeps_map
    )
    if rank == 1:
        made.layers[2][0][slot - EACH] += 1
    target = held[[2]].copy()
    target[0, [slot, slot + 1]] = target[0, [slot + 1, slot]]
    subject.move(target)
    return {"moved": bool((held[2] == target[0]).all()), "right": made.is_right()}


@pytest.mark.parametrize(("slot", "has_other_holder"), [(6, True), (9, False)])
def test_wrong_bytes_are_not_copied_to_another_slot_of_their_rank(
    slot: int, has_other_holder: bool, tmp_path: Path
) -> None:
    config = config_in(tmp_path, engine__records="off", engine__plan=False, engine__tap=False)
    found = on_ranks(swapped, config, slot)

    # The right bytes come from the other holder, else the layer keeps its map.
    assert [one["moved"] for one in found] == [has_other_holder] * NUM_RANKS
    assert [one["right"] for one in found] == [True, has_other_holder, True, True]


def failing_plan(rank: int, config: Path) -> dict[str, Any]:
    """Every plan after the first three maps raises on rank 0."""
    made = make_rank(rank, config)
    made.until_it_may_move()
    made.steps(3 * INTERVAL)
    before = made.held.tolist(), made.lists

    def fails(*args: object, **kwargs: object) -> Any:
        raise RuntimeError("planted")

    policy.planned = fails
    made.steps(3 * INTERVAL)
    is_kept = before == (made.held.tolist(), made.lists)
    return {"is kept": is_kept, "gauge": value_of("vllm", "policy")}


def test_plan_that_raises_keeps_map_and_shares(tmp_path: Path) -> None:
    found = on_ranks(failing_plan, config_in(tmp_path, engine__failed_plans=100))

    assert all(one["is kept"] for one in found)
    assert found[0]["gauge"] == 0.0


def with_draft(rank: int, config: Path, is_async: bool) -> dict[str, Any]:
    """Steps with a draft model, which vLLM adds before its target; both weights are checked."""
    look_in_every_pass()
    made = make_rank(rank, config, is_async=is_async, has_draft=True)
    made.until_it_may_move()
    draft, target = made.state.model_states.values()
    start = draft.physical_to_logical_map.clone()
    with_lists = [0, 0]

    def has_moved() -> bool:
        return bool(all(with_lists) and (draft.physical_to_logical_map != start).any())

    while not on_all(has_moved()):
        made.steps()
        for place, found in enumerate((draft, target)):
            with_lists[place] += bool((found.logical_replica_count > NUM_SLOTS).any())
    made.steps(-made.passes % WINDOW)  # whole samples
    moved = int((draft.physical_to_logical_map != start).sum())
    unchecked = made.plugin.check_of(draft.communicator).num_unchecked
    made.visit_all()
    return made.result() | {"draft": (moved, min(with_lists), unchecked)}


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_draft_model_is_balanced_too_and_the_target_is_reported(
    is_async: bool, tmp_path: Path
) -> None:
    config = config_with_records(tmp_path)
    found = on_ranks(with_draft, config, is_async)

    assert all(one["map"] == found[0]["map"] for one in found)
    assert all(moved > 0 and lists > 0 for moved, lists, _ in (one["draft"] for one in found))
    assert [one["draft"][2] + one["unchecked"] for one in found] == [0] * NUM_RANKS
    assert [one["faults"] for one in found] == [[]] * NUM_RANKS
    assert all(one["looked"] > 0 for one in found)
    with closing(open_store(settings_in(config).deployment.store, NAME)) as store:
        run, committed = store.current_run(), store.committed()
        assert run is not None
        assert committed is not None
        samples = [sample for _, sample in store.samples(run.run)]
    # The target's layers by the model's numbers, its tokens, and its map: none of the draft's.
    assert run.model["layer_ids"] == [3, 4, 5]
    assert committed.placement.slot_to_expert.shape == (NUM_LAYERS, NUM_SLOTS)
    assert committed.placement.num_experts == NUM_EXPERTS
    tokens = sum(int(one.tokens.sum()) for one in samples)
    assert tokens == NUM_RANKS * found[0]["passes"] * ROWS * TOP_K * NUM_LAYERS
    if not is_async:
        assert committed.placement.slot_to_expert.tolist() == found[0]["map"]
