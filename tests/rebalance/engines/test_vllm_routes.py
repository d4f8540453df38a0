from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fastapi import FastAPI
from fastapi.testclient import TestClient

from rebalance.engines.common.plugin_settings import EngineSettings, PluginSettings
from rebalance.engines.vllm import plugin
from rebalance.engines.vllm.policy import policy_class
from rebalance.engines.vllm.process import PluginProcess
from rebalance.engines.vllm.tools.routes import Routes
from rebalance.engines.vllm.tools.worker import WorkerExtension

EXPERTS, SLOTS, RANKS = 16, 20, 4


class Engine:
    """Calls workers by name, as vLLM's client does."""

    def __init__(self, workers: list[Any]) -> None:
        self.workers = workers

    async def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple[Any, ...] = ()
    ) -> list[Any]:
        return [getattr(worker, method)(*args) for worker in self.workers]


class Started(PluginProcess):
    """The plug-in with the parts at work that it plans with."""

    def is_on(self, part: str) -> bool:
        return part in ("policy", "shares")


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> PluginProcess:
    """The plug-in of this process, as on rank 0 of a group of one."""
    made = Started(PluginSettings("prod", "memory:", EngineSettings()))
    made.group = SimpleNamespace(rank_in_group=0, world_size=1, ranks=[0], cpu_group=None)
    made.num_experts = EXPERTS
    monkeypatch.setattr(plugin, "_loaded", [made])
    return made


def client_of(engine: Engine | None) -> TestClient:
    app, routes = FastAPI(), Routes()
    routes.attach_router(app)
    asyncio.run(routes.init_state(engine, app.state, None))
    return TestClient(app)


def test_status_reports_what_each_worker_does(process: PluginProcess) -> None:
    (found,) = client_of(Engine([WorkerExtension()])).get("/v1/eplb/status").json()["workers"]

    assert found["is_loaded"]
    assert found["deployment"] == "prod"
    assert set(found["parts"]) == {"policy", "shares", "mover", "tap"}
    assert not found["is_paused"]


def test_paused_plugin_keeps_the_map_and_resumed_one_plans(process: PluginProcess) -> None:
    client = client_of(Engine([WorkerExtension()]))
    policy: Any = policy_class(process, object)
    load = np.random.default_rng(20261122).lognormal(8, 1.0, (2, EXPERTS)).astype(np.int64)
    first = torch.tensor([[*range(EXPERTS), *range(SLOTS - EXPERTS)]] * 2)
    call = torch.from_numpy(load), SLOTS, 1, 1, RANKS, first

    assert client.post("/v1/eplb/pause").json() == {"workers": [True]}
    assert torch.equal(policy.rebalance_experts(*call), first)
    assert client.post("/v1/eplb/resume").json() == {"workers": [True]}
    assert not torch.equal(policy.rebalance_experts(*call), first)


def test_worker_without_the_plugin_and_server_without_an_engine_are_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plugin, "_loaded", [])
    bare = client_of(Engine([WorkerExtension()]))

    assert bare.get("/v1/eplb/status").json() == {"workers": [{"is_loaded": False}]}
    assert bare.post("/v1/eplb/pause").json() == {"workers": [False]}
    for engine, sentence in ((None, "no engine"), (Engine([object()]), "WorkerExtension")):
        answer = client_of(engine).get("/v1/eplb/status")
        assert answer.status_code == 503
        assert sentence in answer.json()["error"]
