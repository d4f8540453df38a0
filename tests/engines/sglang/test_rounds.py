"""Rounds of SGLang's ranks: what stops the plug-in on all of them, and the engine's own pause."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rebalance.engines.common.messages import PlanQuestion
from rebalance.engines.sglang import engine
from telemetry import open_store
from tests.support.engines.gauge import value_of
from tests.support.engines.ranks import (
    INTERVAL,
    NAME,
    WINDOW,
    config_in,
    on_ranks,
    popularity_of,
    settings_in,
)
from tests.support.engines.sglang_ranks import NUM_RANKS, WITH_TASKS_ALONE, Rank, make_rank

pytestmark = pytest.mark.slow


def fails(*_: object) -> Any:
    raise MemoryError("planted")


def of_metadata(made: Rank) -> None:
    engine.metadata_for = fails


def of_window(made: Rank) -> None:
    made.plugin._hand_over = fails


def of_tap(made: Rank) -> None:
    made.plugin._tap.add = fails


def of_model(made: Rank) -> None:
    del made.model.routed_experts_weights_of_layer


def failing(rank: int, config: Path, plant: Callable[[Rank], None]) -> dict[str, Any]:
    """A part fails on rank 1; passes go on."""
    made = make_rank(rank, config)
    if rank == 1:
        plant(made)
    while not made.stopped:
        made.forward(popularity_of(made.passes // INTERVAL))
        made.passes += 1
    made.forward(popularity_of(0))
    return {
        "map": made.held.tolist(),
        "passes": made.passes,
        "reason": made.stopped,
        "gauge": value_of("sglang", "plugin"),
    }


@pytest.mark.parametrize(
    ("plant", "reason"),
    [
        (of_metadata, "MemoryError: planted"),
        (of_window, "MemoryError: planted"),
        (of_tap, "MemoryError: planted"),
        (of_model, "Model has no routed_experts_weights_of_layer"),
    ],
)
def test_failure_on_one_rank_stops_the_plugin_on_all_at_one_pass(
    plant: Callable[[Rank], None], reason: str, tmp_path: Path
) -> None:
    found = on_ranks(failing, config_in(tmp_path), plant)

    assert all(one["map"] == found[0]["map"] for one in found)
    assert len({one["passes"] for one in found}) == 1
    assert found[1]["reason"].startswith(reason)
    assert [one["reason"] for one in found].count("another rank failed") == NUM_RANKS - 1
    assert all(one["gauge"] == 0.0 for one in found)


def paused(rank: int, config: Path) -> list[int]:
    """Maps while the engine has disabled rebalances and a plan is ready, and after it."""
    made = make_rank(rank, config, **WITH_TASKS_ALONE)
    made.until(lambda: made.recorder is not None)
    made.manager.disable_rebalance("scaling")
    before = made.generation
    if rank == 0:
        made.recorder.ask(PlanQuestion("interval"))
    made.until(lambda: made.recorder.ready is not None)
    made.steps(2 * WINDOW)
    waiting = made.generation
    made.manager.enable_rebalance()
    made.until_maps(1)
    made.close()
    return [waiting - before, made.generation - before]


def test_plan_waits_while_the_engine_has_disabled_rebalances(tmp_path: Path) -> None:
    assert on_ranks(paused, config_in(tmp_path)) == [[0, 1]] * NUM_RANKS


def switched_off(rank: int, config: Path) -> tuple[int, bool]:
    """Maps after a plan that waited while moves were switched off, and whether it waits still."""
    made = make_rank(rank, config, **WITH_TASKS_ALONE)
    made.until(lambda: made.recorder is not None)
    made.manager.disable_rebalance("scaling")
    before = made.generation
    if rank == 0:
        made.recorder.ask(PlanQuestion("interval"))
    made.until(lambda: made.recorder.ready is not None)
    if rank == 0:
        with closing(open_store(settings_in(config).deployment.store, NAME)) as store:
            store.set_control(replace(store.control(), movement=False), reason="test")
    made.until(lambda: made.recorder.why_kept)
    made.manager.enable_rebalance()
    made.steps(2 * WINDOW)
    made.close()
    return made.generation - before, made.recorder.ready is not None


def test_plan_that_waited_until_moves_were_switched_off_never_begins(tmp_path: Path) -> None:
    assert on_ranks(switched_off, config_in(tmp_path)) == [(0, False)] * NUM_RANKS


def solved(rank: int, config: Path) -> tuple[int, int]:
    """Maps under ``lp``, whose kernels need a GPU, and how often solvers were made anew."""
    from sglang.srt.model_executor.model_runner_components import moe_ep_setup

    made, inits = make_rank(rank, config, chunk=1, ep_dispatch_algorithm="lp"), []
    moe_ep_setup.init_lplb_solvers = lambda **given: inits.append(
        made.map.physical_to_logical_map.clone()
    )
    # Slots without the rule's kernel: skewed, so that a plan pays.
    weight = torch.arange(1.0, made.map.num_physical_experts + 1) ** 2
    made.choose = lambda *_: torch.multinomial(  # type: ignore[method-assign]
        weight.expand(128, -1), 2, generator=made.generator
    )
    made.until_maps(1)
    made.close()
    return len(inits), int(torch.equal(inits[-1], made.map.physical_to_logical_map))


def test_solvers_are_made_anew_after_the_last_chunk_of_a_map(tmp_path: Path) -> None:
    for times, is_of_the_last_map in on_ranks(solved, config_in(tmp_path)):
        assert times > 1, "once in each chunk, as the engine does"
        assert is_of_the_last_map
