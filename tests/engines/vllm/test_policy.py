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
    policy, state = policy_of(process), SimpleNamespace(num_logical_experts=EXPERTS)
    served = ServedMap(SimpleNamespace(model=state), first_map().numpy(), first_map().numpy() * 0)
    process._served.append(served)
    with caplog.at_level("INFO"):
        wanted = policy.rebalance_experts(load_of(SEED), SLOTS, 1, 1, RANKS, first_map())
        served.held[:] = wanted  # as its commits leave it
        again = policy.rebalance_experts(load_of(SEED), SLOTS, 1, 1, RANKS, wanted)

    by_slot = load_of(SEED).numpy()[np.arange(LAYERS)[:, None], wanted] * served.latest.shares()
    by_rank = by_slot.reshape(LAYERS, RANKS, -1).sum(axis=2)
    served_imbalance = by_rank.max(axis=1).sum() / by_rank.mean(axis=1).sum()
    assert torch.equal(again, wanted)
    second = [line for line in caplog.messages if "decision=" in line][1]
    assert "decision=KEEP" in second
    assert f"imbalance {served_imbalance:.3f} -> " in second


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
    for held in maps:
        state = SimpleNamespace(model=SimpleNamespace(num_logical_experts=EXPERTS))
        process._served.append(ServedMap(state, held.numpy().copy(), np.zeros(held.shape, int)))
    moves = []
    for turn in range(4):
        for number, served in enumerate(process._served):
            load = load_of(10 * turn + number)
            wanted = policy.rebalance_experts(load, SLOTS, 1, 1, RANKS, maps[number])
            moves.append(int((wanted != maps[number]).sum()))
            maps[number] = wanted
            served.held[:] = wanted  # as its commits leave it

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
