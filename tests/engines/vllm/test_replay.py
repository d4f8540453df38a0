"""A trace as the routing of vLLM's own simulator."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="run `make test-engines`: it has vllm 0.33.0 in .venv-vllm")

import torch
from vllm.model_executor.layers.fused_moe.config import RoutingMethodType
from vllm.model_executor.layers.fused_moe.router import routing_simulator_router as simulator

from eplb.errors import ConfigError
from rebalance.engines.common.guards import PackageSource, refusals
from rebalance.engines.vllm import entry
from rebalance.engines.vllm.assumptions import REPLAY
from rebalance.engines.vllm.replay import register_replay

if any("or newer" in refusal for refusal in refusals(REPLAY)):
    pytest.skip("vLLM replays a trace from 0.33 on", allow_module_level=True)

LAYERS, EXPERTS, TOP_K, ROWS = 3, 16, 2, 512


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Counts [L, E] in a file that replays, and vLLM's simulator as it was after the test."""
    counts = np.random.default_rng(20261122).integers(100, 1000, (LAYERS, EXPERTS))
    np.save(tmp_path / "load.npy", counts)
    monkeypatch.setenv("VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "eplb_trace")
    monkeypatch.setenv("EPLB_REPLAY", str(tmp_path / "load.npy"))
    monkeypatch.delenv("EPLB_CONFIG", raising=False)
    own = vars(simulator.RoutingSimulator)["get_strategy"]
    monkeypatch.setattr(simulator.RoutingSimulator, "get_strategy", own)
    monkeypatch.setattr(
        simulator.RoutingSimulator,
        "_routing_strategies",
        dict(simulator.RoutingSimulator._routing_strategies),
    )
    return counts


def router() -> Any:
    return simulator.RoutingSimulatorRouter(TOP_K, EXPERTS, RoutingMethodType.Default)


def test_each_router_of_vllm_replays_its_layer_of_the_trace(trace: Any) -> None:
    entry.register()

    hidden, logits = torch.zeros((ROWS, 8)), torch.zeros((ROWS, EXPERTS))
    for counts in trace:  # routers are built in the order of their layers
        weights, ids = router()._compute_routing(hidden, logits, torch.int32)
        found = np.bincount(ids.numpy().ravel(), minlength=EXPERTS)
        assert (weights.shape, ids.dtype) == ((ROWS, TOP_K), torch.int32)
        assert np.abs(found - counts / counts.sum() * ROWS * TOP_K).max() < 5
        assert (ids[:, 0] != ids[:, 1]).all()


def test_other_strategies_of_vllm_stay_as_they_are(trace: Any) -> None:
    own = simulator.RoutingSimulator.get_strategy("uniform_random")
    entry.register()

    assert simulator.RoutingSimulator.get_strategy("uniform_random") is own


def test_trace_that_cannot_be_read_leaves_the_strategy_unknown_to_vllm(
    trace: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("EPLB_REPLAY", str(tmp_path / "gone.npy"))
    entry.register()

    assert "no trace is replayed" in caplog.text
    assert "gone.npy does not exist" in caplog.text
    with pytest.raises(ValueError, match="Unknown routing strategy: eplb_trace"):
        router()


def test_simulator_that_another_package_has_replaced_is_refused(
    trace: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulator.RoutingStrategy, "route_tokens", lambda self, rows: None)
    with pytest.raises(ConfigError, match=rf"route_tokens is that of {__file__}, expected vllm's"):
        register_replay(os.environ)


def test_changed_interface_of_the_simulator_is_refused(tmp_path: Path) -> None:
    file = Path(simulator.__file__)
    package = next(one for one in file.parents if one.name == "vllm")
    copy = tmp_path / "vllm" / file.relative_to(package)
    copy.parent.mkdir(parents=True)
    copy.write_text(file.read_text().replace("hidden_states", "rows"))

    found = list(refusals(REPLAY, PackageSource(tmp_path / "vllm")))

    assert any("route_tokens takes (self rows router_logits" in one for one in found)
