"""Wrong slots stop moves on all ranks, are repaired, and moves go on; in vLLM's real balancer."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.support.engines.ranks import (
    EACH,
    INTERVAL,
    NUM_EXPERTS,
    NUM_LAYERS,
    NUM_RANKS,
    NUM_SLOTS,
    config_in,
    look_in_every_pass,
    on_ranks,
    weights_of,
)
from tests.support.engines.vllm_ranks import eplb_communicator, make_rank

pytestmark = pytest.mark.slow
LAYER, RANK = 2, 1
LATE_S = 31.0
START = np.tile(np.arange(NUM_SLOTS) % NUM_EXPERTS, (NUM_LAYERS, 1))


def everywhere(holds: bool) -> bool:
    """Whether something holds on every rank."""
    word = torch.tensor([int(holds)])
    dist.all_reduce(word, op=dist.ReduceOp.MIN)
    return bool(word.item())


def step_until(made: Any, holds: Callable[[], bool], most: int = 40 * INTERVAL) -> int:
    """Passes until something holds on every rank; the slots are wrong meanwhile."""
    for number in range(most):
        if everywhere(holds()):
            return number
        made.steps(is_checked=False)
    raise AssertionError(f"not after {most} passes")


class Lines(logging.Handler):
    """The lines that this rank logs as errors."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []
        logging.getLogger("rebalance").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def behind(rank: int, config: Path, is_async: bool) -> dict[str, Any]:
    """vLLM moves weights alone: scales stay behind."""
    look_in_every_pass()
    made = make_rank(rank, config, forgets=True, is_async=is_async)
    made.until_maps(1, is_checked=False)
    step_until(made, lambda: bool(made.plugin.left_behind))
    step_until(made, lambda: (made.held == START).all())
    last = made.generation
    made.steps(6 * INTERVAL, is_checked=False)
    made.visit_all()
    moves = made.generation - last
    return made.result() | {"moves": moves, "stopped": made.plugin.stopped, "is right": right(made)}


def right(made: Any) -> bool:
    """Whether weights and scales are those of the map."""
    own = made.held[:, made.rank * EACH :][:, :EACH]
    return all(
        torch.equal(tensor[place], expected)
        for layer, module in enumerate(made.model.moe_layers)
        for place, expert in enumerate(own[layer].tolist())
        for tensor, expected in zip(
            (module.weight.data, module.scale), weights_of(layer, expert), strict=True
        )
    )


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_scales_that_stay_behind_bring_back_the_start_s_map(is_async: bool, tmp_path: Path) -> None:
    found = on_ranks(behind, config_in(tmp_path), is_async)

    assert all(one["is right"] for one in found)
    assert {one["stopped"] for one in found} == {"the engine does not move scale with its expert"}
    assert [(one["moves"], one["faults"]) for one in found] == [(0, [])] * NUM_RANKS


def lost(rank: int, config: Path, is_async: bool) -> dict[str, Any]:
    """The only slots of some experts are lost; later somebody gives them back."""
    look_in_every_pass()
    made = make_rank(rank, config, is_async=is_async)
    made.until_maps(2)
    lines, own = Lines(), made.held[LAYER, RANK * EACH :][:EACH].tolist()
    if rank == RANK:
        made.lose(LAYER)
    step_until(made, lambda: bool(made.plugin.stopped))
    made.steps(INTERVAL, is_checked=False)  # a map that was on its way
    last = made.generation
    made.steps(4 * INTERVAL, is_checked=False)
    stood = made.generation == last and bool(made.plugin.stopped)
    if rank == RANK:
        for place, expert in enumerate(own):
            for tensor, record in zip(made.layers[LAYER], weights_of(LAYER, expert), strict=True):
                tensor[place] = record
    step_until(made, lambda: not made.plugin.stopped)
    made.until_maps(2)
    return made.result() | {"stood": stood, "lines": lines.texts}


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_fault_of_one_rank_stops_moves_on_all_until_it_is_over(
    is_async: bool, tmp_path: Path
) -> None:
    found = on_ranks(lost, config_in(tmp_path, engine__records="off"), is_async)

    assert [one["stood"] for one in found] == [True] * NUM_RANKS
    assert [one["faults"] for one in found] == [[]] * NUM_RANKS
    for one in found:
        assert sum("no expert moves any more" in line for line in one["lines"]) == 1
        assert not any("in slots []" in line for line in one["lines"])


def damaged(rank: int, config: Path, is_async: bool) -> dict[str, Any]:
    """One slot, whose expert another rank has too, gets a wrong byte."""
    look_in_every_pass()
    made = make_rank(rank, config, is_async=is_async)
    made.until_maps(2)
    held = made.held[LAYER]
    slot = next(
        slot
        for slot, expert in enumerate(held)
        if len(set(np.flatnonzero(held == expert) // EACH)) > 1
    )
    if rank == slot // EACH:
        made.layers[LAYER][0][slot % EACH, 3] += 1
    made.steps(4 * INTERVAL, is_checked=False)
    step_until(made, lambda: made.is_right() and not made.plugin.stopped)
    made.until_maps(2)
    made.visit_all()
    return made.result()


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_wrong_slot_is_repaired_from_a_right_replica(is_async: bool, tmp_path: Path) -> None:
    found = on_ranks(damaged, config_in(tmp_path, engine__records="off"), is_async)

    assert [(one["faults"], one["placement"]) for one in found] == [([], 1.0)] * NUM_RANKS


def reloaded(rank: int, config: Path, is_async: bool, checks: bool) -> dict[str, Any]:
    """The same weights are loaded once more by the map of the start, as vLLM does."""
    if checks:
        look_in_every_pass()
    made = make_rank(rank, config, is_async=is_async)
    made.until_maps(3)
    lines, moved = Lines(), (made.held != START).any(axis=1)
    for layer, tensors in made.layers.items():
        for place, expert in enumerate(START[layer, rank * EACH :][:EACH].tolist()):
            for tensor, record in zip(tensors, weights_of(layer, expert), strict=True):
                tensor[place] = record
    passes = step_until(made, lambda: made.is_right() and not made.plugin.stopped)
    made.until_maps(3)
    result = made.result()
    return result | {"passes": passes, "moved": int(moved.sum()), "lines": lines.texts}


@pytest.mark.parametrize("checks", [True, False], ids=["with check", "without check"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_layers_heal_after_a_reload_by_the_map_of_the_start(
    is_async: bool, checks: bool, tmp_path: Path
) -> None:
    config = config_in(tmp_path, engine__records="off", engine__check=checks)
    found = on_ranks(reloaded, config, is_async, checks)

    for one in found:
        assert one["moved"] > 0
        assert one["faults"] == []
        kept = [line for line in one["lines"] if "keeps its map" in line]
        assert len(kept) <= NUM_LAYERS
        assert not any("in slots []" in line for line in kept)


def late(rank: int, config: Path) -> dict[str, Any]:
    """One rank is late by more than half a minute in one transfer."""
    made = make_rank(rank, config)
    made.until_maps(1)
    lines, own = Lines(), eplb_communicator.batch_isend_irecv

    def wait_once(operations: Any) -> Any:
        eplb_communicator.batch_isend_irecv = own
        threading.Event().wait(LATE_S)
        return own(operations)

    if rank == RANK:
        eplb_communicator.batch_isend_irecv = wait_once
    made.until_maps(1)
    before = made.mover.num_checked
    made.until_maps(3)
    after = made.mover.num_checked
    return made.result() | {"later": after - before, "lines": lines.texts}


def test_moves_after_a_late_peer_are_checked_as_before(tmp_path: Path) -> None:
    found = on_ranks(late, config_in(tmp_path, engine__records="off"))

    assert sum(one["later"] for one in found) > 0
    assert [(one["mover"], one["lines"]) for one in found] == [(1.0, [])] * NUM_RANKS
