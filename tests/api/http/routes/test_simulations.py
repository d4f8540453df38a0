"""Simulations over HTTP: the command runs in a process of its own, on recorded load too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from api.http.app import create_app
from api.http.problems import ProblemType
from eplb import ModelShape, Placement, Topology
from tests.support.http import IN_PROCESS, client_of, problem_of
from tests.support.stores import MemoryStore
from tests.support.two_ranks import begin_run, serve

MODEL = ModelShape((0,), num_experts=4, top_k=1, hidden=2, intermediate=2)
TOPOLOGY = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=3)
FIRST = Placement(np.array([[0, 1, -1, 2, 3, -1]]), num_experts=4, generation=1)
WINDOWS = 6


@pytest.fixture
def client() -> Iterator[httpx.Client]:
    """A service whose store has six windows, all of them with one hot expert."""
    store = MemoryStore("d")
    begin_run(store, model=MODEL, topology=TOPOLOGY)
    store.commit(FIRST, expected=None, reason="start")
    for step in range(WINDOWS):
        load = [600, 100, 0], [100, 100, 0]
        serve(store, step, load, placement=FIRST, topology=TOPOLOGY, at=float(step))
    with client_of(create_app(store, plan_wait_s=0.0), "/api/v1") as opened:
        yield opened


def ended(client: httpx.Client, begun: httpx.Response) -> dict[str, Any]:
    """The simulation once it does not run any more."""
    assert begun.status_code == 202, begun.text
    while (found := client.get(IN_PROCESS + begun.headers["location"]).json())["state"] == (
        "running"
    ):
        pass
    answer: dict[str, Any] = found
    return answer


@pytest.mark.system
def test_simulation_of_recorded_load_gives_what_the_command_writes(client: httpx.Client) -> None:
    body = {"policies": ["none", "auto"], "ranks": 2, "every": 1, "failures": True}

    found = ended(client, client.post("/simulations", json=body))

    assert found["state"] == "done", found["error"]
    result = found["result"]
    assert (result["windows"], result["experts"], result["ranks"]) == (WINDOWS, 4, 2)
    assert result["policies"]["none"]["imbalance_mean"] == pytest.approx(700 / 450)
    assert result["policies"]["auto"]["imbalance_mean"] < 700 / 450
    assert "rank" in result["failures"]["found"][0]["name"]


@pytest.mark.system
def test_failed_simulation_reports_the_reason_of_the_command(client: httpx.Client) -> None:
    # A recording of 4 experts is none of this model.
    found = ended(client, client.post("/simulations", json={"model": "deepseek-v2-lite"}))

    assert found["state"] == "failed"
    assert "1 layers x 4 experts" in found["error"]


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"load": "/etc/passwd"}, "'/etc/passwd'"),
        ({"policies": ["best"]}, "'best'"),
        ({"windows": 1_000_000}, "256"),
        ({"hardware": "tpu"}, "'tpu'"),
    ],
)
def test_simulation_out_of_bounds_is_refused(
    client: httpx.Client, body: dict[str, Any], named: str
) -> None:
    kind, detail = problem_of(client.post("/simulations", json=body))

    assert (kind, named in detail) == (ProblemType.INVALID_REQUEST, True)


def test_unknown_simulation_is_not_found(client: httpx.Client) -> None:
    assert problem_of(client.get("/simulations/7"))[0] is ProblemType.NO_SUCH_SIMULATION


def test_one_simulation_runs_at_a_time_and_ends_with_its_service() -> None:
    app = create_app(MemoryStore("d"), plan_wait_s=0.0)
    body = {"load": "mixed", "windows": 256, "every": 1}
    with client_of(app, "/api/v1") as client:
        first, second = (client.post("/simulations", json=body) for _ in range(2))

    assert first.status_code == 202
    assert problem_of(second)[0] is ProblemType.TOO_BUSY
    assert second.headers["retry-after"] == "10"
    simulations = app.state.deployments.own.simulations
    while (found := simulations.one(1)).state == "running":
        pass
    assert found.state == "failed"
