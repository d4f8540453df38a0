"""The policy and the checks against the real vLLM, in one process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="run `make test-engines`: it has vllm 0.33.0 in .venv-vllm")

from vllm.distributed.eplb import eplb_state
from vllm.distributed.eplb.policy.default import DefaultEplbPolicy

from eplb.core.model import ModelShape
from eplb.migration.serialisation import model_to_dict
from rebalance.engines.common.messages import SampleOrigin
from rebalance.engines.common.planning import System
from rebalance.engines.common.plugin_settings import PluginSettings
from rebalance.engines.common.store_process import StoreProcess
from rebalance.engines.vllm import policy as vllm_policy
from rebalance.engines.vllm.decisions import ServedMap
from rebalance.engines.vllm.policy import policy_class
from rebalance.engines.vllm.process import PluginProcess
from telemetry.state.runs import RunInfo
from tests.support.engines.gauge import value_of
from tests.support.limits import NEVER_S
from tests.support.redis_servers import free_port

SEED, LAYERS, EXPERTS, SLOTS, RANKS = 20261122, 4, 32, 40, 8


@pytest.fixture
def policy() -> Any:
    return policy_of(made_process())


def made_process() -> PluginProcess:
    """The plug-in of one process, as after the ranks have joined."""
    process = PluginProcess(PluginSettings())
    process.group = SimpleNamespace(rank_in_group=0, world_size=1, ranks=[0], cpu_group=None)
    process.system = System(RANKS, 1, 1, 0)
    for part in ("policy", "shares"):
        process._switch(part, is_on=True)
    return process


def policy_of(process: PluginProcess) -> Any:
    return policy_class(process, DefaultEplbPolicy)


def load_of(seed: int) -> torch.Tensor:
    drawn = np.random.default_rng(seed)
    return torch.from_numpy(drawn.lognormal(10, 1.0, (LAYERS, EXPERTS)).astype(np.int64))


def first_map() -> torch.Tensor:
    held = eplb_state.EplbState.build_initial_global_physical_to_logical_map(
        EXPERTS, SLOTS - EXPERTS
    )
    return torch.tensor([list(held)] * LAYERS)


def commit(served: ServedMap, kept: int | None = None) -> torch.Tensor:
    """Have the latest decision serve, as its commits leave it; a kept layer stays as it was."""
    decided = served.latest
    layers = [layer for layer in range(LAYERS) if layer != kept]
    served.held[layers], served.repeats[layers] = decided.held[layers], decided.repeats[layers]
    served.is_planned = decided.is_planned
    return torch.from_numpy(served.held.copy())


def served_by(process: PluginProcess) -> ServedMap:
    """A model with the map of the start, which the plug-in has taken over."""
    held = first_map().numpy()
    state = SimpleNamespace(model=SimpleNamespace(num_logical_experts=EXPERTS))
    process._served.append(ServedMap(state, held, np.zeros_like(held)))
    return process._served[-1]


def served_imbalance(served: ServedMap, load: torch.Tensor) -> float:
    """By the slots and lists that serve."""
    count = [[row.tolist().count(e) for e in row] for row in served.held]
    listed = served.repeats > 0
    share = np.where(listed, served.repeats / 256, 1 / np.array(count))
    by_slot = load.numpy()[np.arange(LAYERS)[:, None], served.held] * share
    by_rank = by_slot.reshape(LAYERS, RANKS, -1).sum(axis=2)
    return float(by_rank.max(axis=1).sum() / by_rank.mean(axis=1).sum())


def duplicates(held: torch.Tensor) -> int:
    by_rank = held.reshape(LAYERS * RANKS, -1).tolist()
    return sum(len(one) - len(set(one)) for one in by_rank)


def test_map_has_the_type_of_vllm_and_no_duplicate_on_a_rank(policy: Any) -> None:
    held = policy.rebalance_experts(load_of(SEED), SLOTS, 1, 1, RANKS, first_map())

    assert (held.dtype, held.device.type, held.shape) == (torch.int64, "cpu", (LAYERS, SLOTS))
    assert duplicates(held) == 0
    assert all(set(row) == set(range(EXPERTS)) for row in held.tolist())


def test_first_plan_moves_any_number_also_after_the_switches_kept_the_map(policy: Any) -> None:
    load, first = load_of(SEED), first_map()
    moved_at_once = policy.rebalance_experts(load, SLOTS, 1, 1, RANKS, first)
    process = made_process()
    described = model_to_dict(ModelShape(tuple(range(LAYERS)), EXPERTS, 1, 1, 1)), {}
    no_store = f"redis://127.0.0.1:{free_port()}"
    identity = SampleOrigin("d", no_store, 0, RunInfo("run", 0.0, *described, 64))
    process.recorder = StoreProcess("vllm", identity)

    kept = policy_of(process).rebalance_experts(load, SLOTS, 1, 1, RANKS, first)
    process.recorder.close(NEVER_S)
    process.recorder = None
    moved = policy_of(process).rebalance_experts(load, SLOTS, 1, 1, RANKS, kept)

    assert torch.equal(kept, first)
    assert torch.equal(moved, moved_at_once)
    assert (moved != first).sum() > PluginSettings().engine.max_moved * moved.numel()


def test_plan_for_the_load_that_made_the_map_keeps_it_and_says_its_imbalance(
    caplog: pytest.LogCaptureFixture,
) -> None:
    process = made_process()
    policy, served, load = policy_of(process), served_by(process), load_of(SEED)
    with caplog.at_level("INFO"):
        policy.rebalance_experts(load, SLOTS, 1, 1, RANKS, first_map())
        serving = commit(served)
        again = policy.rebalance_experts(load, SLOTS, 1, 1, RANKS, serving)

    assert torch.equal(again, serving)
    second = [line for line in caplog.messages if "decision=" in line][1]
    assert "decision=KEEP" in second
    assert f"imbalance {served_imbalance(served, load):.3f} -> " in second


def test_layer_that_keeps_its_map_leaves_shares_and_limit_of_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    process = made_process()
    policy, served = policy_of(process), served_by(process)
    policy.rebalance_experts(load_of(SEED), SLOTS, 1, 1, RANKS, first_map())
    commit(served)
    policy.rebalance_experts(load_of(SEED + 1), SLOTS, 1, 1, RANKS, commit(served))
    serving = commit(served, kept=1)
    repeats, load = served.repeats.copy(), load_of(SEED + 2)
    with caplog.at_level("INFO"):
        wanted = policy.rebalance_experts(load, SLOTS, 1, 1, RANKS, serving)

    assert repeats[[0, 2, 3]].any(axis=1).all(), "each of these layers has uneven shares"
    assert f"imbalance {served_imbalance(served, load):.3f} -> " in caplog.messages[-1]
    assert 0 < (wanted != serving).sum() <= PluginSettings().engine.max_moved * LAYERS * SLOTS


def fails(*_: object, **__: object) -> Any:
    raise ModuleNotFoundError("No module named 'scipy'")


def test_failing_planner_leaves_maps_to_vllm_until_a_plan_is_made(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    process = made_process()
    policy, arguments = policy_of(process), (load_of(SEED), SLOTS, 1, 1, RANKS, first_map())
    monkeypatch.setattr(vllm_policy, "planned", fails)
    with caplog.at_level("INFO"):
        kept, kept_again, left, left_again = (
            policy.rebalance_experts(*arguments) for _ in range(4)
        )
    off = value_of("vllm", "policy")
    monkeypatch.undo()
    planned = policy.rebalance_experts(*arguments)

    own = DefaultEplbPolicy.rebalance_experts(*arguments)
    assert torch.equal(kept, first_map())
    assert torch.equal(kept_again, first_map())
    assert torch.equal(left, own)
    assert torch.equal(left_again, own)
    assert not torch.equal(planned, own)
    assert (off, value_of("vllm", "policy")) == (0.0, 1.0)
    failures = [one for one in caplog.records if "scipy" in one.getMessage()]
    assert [one.exc_info for one in failures] == [None] * 4, "one line each"
    said = [one for one in caplog.messages if "vLLM's own balancer plans from now on" in one]
    assert said == ["vLLM's own balancer plans from now on: 3 plans in a row failed"]


def test_models_of_one_shape_have_each_the_limit_of_a_later_plan() -> None:
    process = made_process()
    policy, maps = policy_of(process), [first_map(), first_map()]
    for _ in maps:
        served_by(process)
    moves = []
    for turn in range(4):
        for number, served in enumerate(process._served):
            load = load_of(10 * turn + number)
            wanted = policy.rebalance_experts(load, SLOTS, 1, 1, RANKS, maps[number])
            moves.append(int((wanted != maps[number]).sum()))
            maps[number] = commit(served)

    most = PluginSettings().engine.max_moved * LAYERS * SLOTS
    assert min(moves[:2]) > most, "the first plan of each moves any number"
    assert max(moves[2:]) <= most
    assert sum(moves[2:]) > 0


def test_load_of_zero_keeps_the_map(policy: Any) -> None:
    load = torch.zeros((LAYERS, EXPERTS), dtype=torch.int64)

    assert torch.equal(policy.rebalance_experts(load, SLOTS, 1, 1, RANKS, first_map()), first_map())


def test_call_without_a_map_gets_the_answer_of_vllm(policy: Any) -> None:
    arguments = (load_of(SEED), SLOTS, 1, 1, RANKS, None)

    found = policy.rebalance_experts(*arguments)

    assert torch.equal(found, DefaultEplbPolicy.rebalance_experts(*arguments))


def test_switched_off_policy_gives_the_map_of_vllm() -> None:
    off = policy_class(PluginProcess(PluginSettings()), DefaultEplbPolicy)
    arguments = (load_of(SEED), SLOTS, 1, 1, RANKS, first_map())

    assert torch.equal(
        off.rebalance_experts(*arguments), DefaultEplbPolicy.rebalance_experts(*arguments)
    )


LOADS = """
import vllm.plugins
vllm.plugins.load_general_plugins()
vllm.plugins.plugins_loaded = False
vllm.plugins.load_general_plugins()
from tests.support.engines.gauge import value_of
from vllm.distributed.eplb.policy import EPLB_POLICIES
print(EPLB_POLICIES["default"].__name__, value_of("vllm", "plugin"))
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_named", [False, True])
def test_vllm_loads_the_plugin_by_its_entry_point(is_named: bool, tmp_path: Path) -> None:
    file = tmp_path / "eplb.toml"
    file.write_text("[deployment]\nname = 'prod'\n", encoding="utf-8")
    environ = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    environ |= {"EPLB_CONFIG": str(file)} if is_named else {}

    ended = subprocess.run(
        [sys.executable, "-c", LOADS], env=environ, capture_output=True, text=True,
    )  # fmt: skip

    last = ended.stdout.strip().splitlines()[-1]
    expected = "EplbPlannerPolicy 1.0" if is_named else "DefaultEplbPolicy 0.0"
    assert last == expected, ended.stderr
