"""Ranks over HTTP and as commands, with a real controller that obeys cordons."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
from typer.testing import CliRunner

from api.access.audit import Audit
from api.app import create_app
from api.cli.main import app
from api.http.problems import ProblemType
from api.operations import ranks, watching
from api.operations.commands import Answer
from eplb.core.model import ModelShape
from eplb.core.placement import Placement
from eplb.core.topology import Topology
from eplb.migration.serialisation import model_to_dict, topology_to_dict
from telemetry.state.live import Control
from telemetry.state.runs import RunInfo
from tests.support.controlled_deployment import Deployment
from tests.support.http import client_of, problem_of
from tests.support.stores import MemoryStore

PATH = "/api/v1/ranks"
WHY = {"reason": "change 4711"}


def test_ranks_that_joined_between_two_answers_are_left_out_of_the_command() -> None:
    views = [{"rank": 0, "step": 7}, {"rank": 1, "step": 7}]
    held = [{"rank": 1, "experts": 3}, {"rank": 2, "experts": 4}]
    bodies = {watching.state: {"run": "a", "ranks": views}, ranks.ranks: {"ranks": held}}

    found = ranks.ask_for_ranks(lambda route, **_: Answer(200, bodies[route]))

    assert found.body == [{"rank": 1, "step": 7, "experts": 3}]


def states(answer: httpx.Response) -> list[str]:
    assert answer.status_code == 200, answer.text
    return [one["state"] for one in answer.json()["ranks"]]


def test_loss_of_ranks_names_experts_without_another_replica_or_a_slot(
    client: httpx.Client,
) -> None:
    def lost(ranks: str) -> httpx.Response:
        return client.get("/api/v1/membership/feasibility", params={"lose": ranks})

    one, both = lost("1").json(), lost("0,1").json()
    held = client.get(PATH).json()["ranks"][1]["sole_experts"]

    assert (one["lost"], one["is_feasible"]) == ([1], one["spare_slots"] >= 0)
    assert one["uncovered"] == len(one["uncovered_experts"]) == held > 0
    assert not both["is_feasible"]
    assert both["spare_slots"] < 0
    assert both["uncovered"] == -both["spare_slots"]  # one layer
    assert (both["refills"], both["imbalance"]) == (0, None)
    found = problem_of(lost("0,7"))
    assert found == (ProblemType.NO_SUCH_RANK, "there is no rank 7, expected 0..1")


def test_loss_that_leaves_enough_slots_says_what_survivors_load_first() -> None:
    store, topology = MemoryStore("d"), Topology.uniform(3, 1, 3)
    shape = ModelShape((7,), 4, 2, hidden=8, intermediate=4, expert_bytes=6_000_000)
    store.begin_run(RunInfo("r", 1.0, model_to_dict(shape), topology_to_dict(topology), 4))
    store.commit(Placement([[0, 1, 2, 0, 1, 2, 0, 1, 3]], 4), expected=None, reason="first")
    with client_of(create_app(store)) as client:
        path = "/api/v1/membership/feasibility"
        first, last = (client.get(path, params={"lose": rank}).json() for rank in "02")

    assert (first["is_feasible"], first["uncovered"], first["refills"]) == (True, 0, 0)
    assert (last["refills"], last["refill_bytes"], last["refill_s"]) == (1, 6_000_000, 0.001)
    assert last["uncovered_experts"] == [{"layer": 7, "expert": 3}]
    assert last["imbalance"] is None  # no window yet


def test_cordon_is_audited_and_plans_of_requests_keep_to_it(
    planned: Deployment, planning_client: httpx.Client, tmp_path: Path
) -> None:
    cordoned = planning_client.post(f"{PATH}/1/cordon", json=WHY)
    planned.store.set_control(Control(), reason="go on")
    moved = planning_client.post("/api/v1/rebalances", json={"reason": "now", "dry_run": False})

    assert states(cordoned) == ["open", "cordoned"]
    seen = planning_client.get("/api/v1/state").json()["ranks"]
    assert [one["cordon"] for one in seen] == [None, "cordon"]
    assert (cordoned.json()["reason"], cordoned.json()["waits"]) == (WHY["reason"], "")
    assert moved.status_code == 200, moved.text
    published = planned.store.published()
    before = planned.store.committed()
    assert before is not None
    if published is not None:
        assert published.target.slot_to_expert[0, 3:].tolist() == (
            before.placement.slot_to_expert[0, 3:].tolist()
        )
    first, outcome = list(Audit(tmp_path).entries())[:2]
    assert (first.action, first.reason) == (f"POST {PATH}/1/cordon", WHY["reason"])
    assert outcome.outcome == "200"
    assert states(planning_client.post(f"{PATH}/1/uncordon", json=WHY)) == ["open", "open"]


def test_drain_that_memory_does_not_allow_is_refused_before_anything_changes(
    deployment: Deployment, client: httpx.Client
) -> None:
    refused = client.post(f"{PATH}/1/drain", json=WHY)

    kind, detail = problem_of(refused)
    assert kind is ProblemType.IMPOSSIBLE_CORDON
    assert re.search(r"rank 1 \(drain\).* 3 slots .* 4 experts", detail)
    assert deployment.store.live().text("cordons") == ""


def test_rank_that_is_not_there_and_a_stale_revision_are_refused(client: httpx.Client) -> None:
    stale = {"if-match": client.get(PATH).headers["etag"]}
    cordoned = client.post(f"{PATH}/0/cordon", json=WHY, headers=stale)
    again = client.post(f"{PATH}/0/uncordon", json=WHY, headers=stale)
    missing = client.post(f"{PATH}/2/cordon", json=WHY)

    assert states(cordoned) == ["cordoned", "open"]
    assert problem_of(again)[0] is ProblemType.SETTINGS_CHANGED
    assert problem_of(missing)[0] is ProblemType.NO_SUCH_RANK
    assert client.post(f"{PATH}/0/uncordon", json=WHY, headers={"if-match": "7"}).status_code == 412


def test_ranks_without_a_run_are_refused() -> None:
    with client_of(create_app(MemoryStore("d"))) as client:
        for found in (client.get(PATH), client.post(f"{PATH}/0/drain", json=WHY)):
            assert problem_of(found)[0] is ProblemType.NO_RUN


def test_operator_lists_cordons_and_uncordons_ranks_on_a_store(stored: list[str]) -> None:
    def run(*words: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, [*words, *stored])
        return done.exit_code, done.output

    status, text = run("cordon", "1", "--reason", "its GPU throttles")
    rows = [line.split() for line in text.splitlines()[1:]]
    assert status == 0, text
    assert rows == [["0", "0", "0", "2", "2", "open"], ["1", "0", "0", "2", "2", "cordoned"]]
    found = json.loads(run("ranks", "--json")[1])
    assert [(one["state"], one["step"]) for one in found] == [("open", 1), ("cordoned", 1)]
    assert "cordoned" in run("ranks")[1]
    status, text = run("drain", "0")
    assert (status, "for 2 experts that must be there" in text) == (1, True)
    assert run("drain", "5")[0] == 1
    assert run("drain", "x")[0] == 2
    assert json.loads(run("uncordon", "1", "--json")[1])["ranks"][1]["state"] == "open"
