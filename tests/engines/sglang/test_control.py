"""What the plug-in obeys: tasks, switches, the engine's own pause; and the engine's solvers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("sglang") is None:
    pytest.skip(
        "run `make test-engines`: it has sglang 0.5.23 in .venv-sglang", allow_module_level=True
    )

import torch
import torch.distributed as dist

from telemetry import open_store
from tests.support.engines.sglang_ranks import (
    INTERVAL,
    WINDOW,
    config_text,
    make_rank,
    on_ranks,
    popularity_of,
)

pytestmark = pytest.mark.slow


def on_all(word: bool) -> bool:
    """The word of rank 0."""
    tensor = torch.tensor([int(word)])
    dist.broadcast(tensor, src=0)
    return bool(tensor.item())


def steps(made: Any, count: int) -> None:
    for _ in range(count):
        made.forward(popularity_of(made.passes // INTERVAL))
        made.check_weights()


def until(what: str, made: Any, holds: Any) -> None:
    """Step until rank 0 sees something."""
    while not on_all(made.rank == 0 and holds()):
        steps(made, WINDOW)


def controlled(rank: int, config: Path, url: str) -> dict[str, list[int]]:
    """Generations before and after each of: pause, a dry task, a task, the engine's own pause."""
    # An interval longer than the test: only tasks ask for plans.
    made = make_rank(rank, config=config, eplb_rebalance_num_iterations=10**6)
    rounds, found, words = made.rounds, {}, {}
    store = open_store(url, "test") if rank == 0 else None

    def task(
        name: str, is_dry: bool, *, ends: bool = True, expected: str = "done", **asked: Any
    ) -> None:
        before = rounds.generation
        request = {"dry_run": is_dry, **asked}
        one = None if store is None else store.submit("rebalance", request)

        def is_done() -> bool:
            assert store is not None, "rank 0 asks"
            now = store.task(one.id)
            if ends:
                return now is not None and now.state in ("done", "failed")
            return rounds._store is not None and rounds._store.ready is not None

        until(f"{name}: the task ends", made, is_done)
        found[name] = [before, rounds.generation]
        if store is not None and ends:
            result = store.task(one.id)
            assert result is not None
            assert result.state == expected, result
            words[name] = result.result.error if expected == "failed" else result.result.detail

    def switch(*, movement: bool) -> None:
        if store is not None:
            store.set_control(replace(store.control(), movement=movement), reason="test")
        until(
            "the switch is seen",
            made,
            lambda: rounds._store is not None and (not rounds._store.why_kept) == movement,
        )

    def cordon(text: str) -> None:
        if store is not None:
            change = {"cordons": text}
            store.change_live(change, expected=store.live().revision, reason="test")
        until(
            "the cordon is seen",
            made,
            lambda: ("cordons" in rounds._store.why_kept) == bool(text),
        )

    until("the process at the store", made, lambda: rounds._store is not None)
    switch(movement=False)
    task("paused", is_dry=False)
    switch(movement=True)
    cordon("1:cordon")
    task("cordoned", is_dry=False)
    cordon("")
    task("with a throttle", is_dry=False, expected="failed", throttle={"link_part": 0.5})
    task("with a policy", is_dry=False, expected="failed", policy="greedy")
    if store is not None:
        assert "movement is switched off" in words["paused"]["kept"]
        assert "'1:cordon', expected none" in words["cordoned"]["kept"]
        assert "{'link_part': 0.5}, expected none" in words["with a throttle"]
        assert "'greedy', expected 'auto'" in words["with a policy"]
    task("dry", is_dry=True)
    task("moved", is_dry=False)
    made.manager.disable_rebalance("scaling")
    task("disabled by the engine", is_dry=False, ends=False)
    made.manager.enable_rebalance()
    before = rounds.generation
    until("the plan that waited", made, lambda: rounds.generation > before)
    found["enabled by the engine"] = [before, rounds.generation]
    if store is not None:
        store.close()
    rounds.close()
    return found


@pytest.fixture
def store(tmp_path: Path) -> Iterator[str]:
    url = f"sqlite:{tmp_path / 'store.sqlite'}"
    with closing(open_store(url, "test")):
        yield url


def test_tasks_and_switches_decide_when_a_map_moves(tmp_path: Path, store: str) -> None:
    config = tmp_path / "eplb.toml"
    config.write_text(config_text(store))

    found = on_ranks(controlled, config, store)

    assert all(one == found[0] for one in found), "alike on all ranks"
    moved = {name: after - before for name, (before, after) in found[0].items()}
    assert moved == {
        "paused": 0,
        "cordoned": 0,
        "with a throttle": 0,
        "with a policy": 0,
        "dry": 0,
        "moved": 1,
        "disabled by the engine": 0,
        "enabled by the engine": 1,
    }


def solved(rank: int, config: Path) -> tuple[int, int]:
    """Maps under ``lp``, whose kernels need a GPU, and how often solvers were made anew."""
    from sglang.srt.model_executor.model_runner_components import moe_ep_setup

    made, inits = make_rank(rank, config=config, chunk=1, ep_dispatch_algorithm="lp"), []
    moe_ep_setup.init_lplb_solvers = lambda **given: inits.append(
        made.map.physical_to_logical_map.clone()
    )
    rounds, first = made.rounds, made.rounds.generation
    made.choose = lambda layer, popularity: routed(made)
    while rounds.generation == first:
        made.forward(popularity_of(0))
        made.check_weights()
    rounds.close()
    return len(inits), int(torch.equal(inits[-1], made.map.physical_to_logical_map))


def routed(made: Any) -> torch.Tensor:
    """Slots without the rule's kernel: skewed, so that a plan pays."""
    weight = torch.arange(1.0, made.map.num_physical_experts + 1) ** 2
    return torch.multinomial(weight.expand(128, -1), 2, generator=made.generator)


def test_solvers_are_made_anew_after_the_last_chunk_of_a_map(tmp_path: Path, store: str) -> None:
    config = tmp_path / "eplb.toml"
    config.write_text(config_text(store))

    for times, is_of_the_last_map in on_ranks(solved, config):
        assert times > 1, "once in each chunk, as the engine does"
        assert is_of_the_last_map
