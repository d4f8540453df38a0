"""Simulations over a real port: the command runs in a process of its own, on recorded load too."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from api.http.app import create_app
from api.http.server import HttpService
from eplb import LoadSample, ModelShape, Placement, Topology
from eplb.clock import Deadline
from eplb.migration.serialisation import model_to_dict, topology_to_dict
from telemetry.store import RunInfo
from telemetry.stores.memory import MemoryStore

DEADLINE_S = 120.0
MODEL = ModelShape((0,), num_experts=4, top_k=1, hidden=2, intermediate=2)
TOPOLOGY = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=3)
FIRST = Placement(np.array([[0, 1, -1, 2, 3, -1]]), num_experts=4, generation=1)
WINDOWS = 6


@pytest.fixture
def client() -> Iterator[httpx.Client]:
    """A service whose store has six windows, all of them with one hot expert."""
    store = MemoryStore("d")
    model, topology = model_to_dict(MODEL), topology_to_dict(TOPOLOGY)
    store.begin_run(RunInfo("a", 0.0, model, topology, window_steps=1))
    store.commit(FIRST, expected=None, reason="start")
    for rank, tokens in enumerate(([600, 100, 0], [100, 100, 0])):
        held = FIRST.slot_to_expert[:, TOPOLOGY.slots_on(rank)]
        for step in range(WINDOWS):
            load = np.array([tokens])
            sample = LoadSample(
                "d", "a", rank, step, float(step), step, step, "mixed", 1, held, load
            )
            store.append([sample])
    service = HttpService(create_app(store, plan_wait_s=0.0))
    service.start()
    with httpx.Client(base_url=f"{service.url}/api/v1", timeout=DEADLINE_S) as opened:
        yield opened
    service.stop()
    store.close()


def ended(client: httpx.Client, begun: httpx.Response) -> dict[str, Any]:
    """The simulation once it does not run any more."""
    assert begun.status_code == 202, begun.text
    place = httpx.URL(begun.headers["location"]).path.removeprefix("/api/v1")
    deadline = Deadline.after(DEADLINE_S, time.monotonic)
    while (found := client.get(place).json())["state"] == "running":
        assert not deadline.has_passed, found
    answer: dict[str, Any] = found
    return answer


def test_simulation_of_recorded_load_gives_what_the_command_writes(client: httpx.Client) -> None:
    body = {"policies": ["none", "auto"], "ranks": 2, "every": 1, "failures": True}

    found = ended(client, client.post("/simulations", json=body))

    assert found["state"] == "done", found["error"]
    result = found["result"]
    assert (result["windows"], result["experts"], result["ranks"]) == (WINDOWS, 4, 2)
    assert result["policies"]["none"]["imbalance_mean"] == pytest.approx(700 / 450)
    assert result["policies"]["auto"]["imbalance_mean"] < 700 / 450
    assert "rank" in result["failures"]["found"][0]["name"]


def test_second_simulation_is_refused_while_one_runs(client: httpx.Client) -> None:
    body = {"load": "v2-lite", "windows": 32, "policies": ["none", "deepseek"]}

    first = client.post("/simulations", json=body)
    second = client.post("/simulations", json=body)

    assert first.status_code == 202
    assert (second.status_code, second.headers["retry-after"]) == (503, "10")
    assert "expected none" in second.json()["detail"]
    assert ended(client, first)["state"] == "done"


def test_failed_simulation_reports_the_reason_of_the_command(client: httpx.Client) -> None:
    # A recording of 4 experts is none of this model.
    found = ended(client, client.post("/simulations", json={"model": "deepseek-v2-lite"}))

    assert found["state"] == "failed"
    assert "the trace has 1 layers x 4 experts" in found["error"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"load": "/etc/passwd"}, "unknown load '/etc/passwd', expected one of"),
        ({"policies": ["best"]}, "unknown policy 'best', expected one of"),
        ({"windows": 1_000_000}, "less than or equal to 256"),
        ({"hardware": "tpu"}, "unknown hardware 'tpu'"),
    ],
)
def test_simulation_out_of_bounds_is_refused(
    client: httpx.Client, body: dict[str, Any], message: str
) -> None:
    answer = client.post("/simulations", json=body)

    assert answer.status_code == 422
    assert message in answer.json()["detail"]


def test_unknown_simulation_is_not_found(client: httpx.Client) -> None:
    answer = client.get("/simulations/7")

    assert answer.status_code == 404
    assert answer.json()["type"].endswith("/no-such-simulation")


def test_simulation_ends_with_its_service(tmp_path: Path) -> None:
    app = create_app(MemoryStore("d"), plan_wait_s=0.0)
    service = HttpService(app)
    service.start()
    with httpx.Client(base_url=f"{service.url}/api/v1", timeout=DEADLINE_S) as client:
        body = {"load": "mixed", "windows": 256, "every": 1}
        assert client.post("/simulations", json=body).status_code == 202

        service.stop()

    simulations = app.state.deployments.own.simulations
    deadline = Deadline.after(DEADLINE_S, time.monotonic)
    while (found := simulations.one(1)).state == "running":
        assert not deadline.has_passed
    assert found.state == "failed"
