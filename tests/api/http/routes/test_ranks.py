"""Ranks over HTTP and as commands, with a real controller that obeys cordons."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from api.access.audit import Audit
from api.cli.main import app
from api.http.app import create_app
from api.http.problems import ProblemType
from api.http.server import HttpService
from telemetry.store import Control
from telemetry.stores.memory import MemoryStore
from tests.support.controlled_deployment import Deployment

PATH = "/api/v1/ranks"
WHY = {"reason": "change 4711"}


def states(answer: httpx.Response) -> list[str]:
    assert answer.status_code == 200, answer.text
    return [one["state"] for one in answer.json()["ranks"]]


def test_ranks_are_listed_with_what_their_loss_costs(client: httpx.Client) -> None:
    found = client.get(PATH).json()

    assert [one["rank"] for one in found["ranks"]] == [0, 1]
    assert [one["experts"] for one in found["ranks"]] == [2, 2]
    assert [one["sole_experts"] for one in found["ranks"]] == [2, 2]
    assert (found["unmet"], found["waits"], found["time"]) == ([], "", None)


def test_loss_of_a_rank_names_experts_without_another_replica(client: httpx.Client) -> None:
    found = client.get("/api/v1/membership/feasibility", params={"lose": "1"}).json()
    held = client.get(PATH).json()["ranks"][1]["sole_experts"]

    assert (found["lost"], found["is_feasible"]) == ([1], found["spare_slots"] >= 0)
    assert found["uncovered"] == len(found["uncovered_experts"]) == held > 0


def test_loss_of_all_ranks_leaves_no_slot_for_any_expert(client: httpx.Client) -> None:
    found = client.get("/api/v1/membership/feasibility", params={"lose": "0,1"}).json()

    assert not found["is_feasible"]
    assert found["spare_slots"] < 0
    assert found["uncovered"] == -found["spare_slots"]  # one layer


def test_loss_of_a_rank_that_is_not_there_is_refused(client: httpx.Client) -> None:
    refused = client.get("/api/v1/membership/feasibility", params={"lose": "0,7"})

    assert (refused.status_code, refused.json()["detail"]) == (
        404,
        "there is no rank 7, expected 0..1",
    )


def test_cordon_is_audited_and_plans_of_requests_keep_to_it(
    deployment: Deployment, client: httpx.Client, tmp_path: Path
) -> None:
    cordoned = client.post(f"{PATH}/1/cordon", json=WHY)
    deployment.store.set_control(Control(), reason="go on")
    moved = client.post("/api/v1/rebalances", json={"reason": "now", "dry_run": False})

    assert states(cordoned) == ["open", "cordoned"]
    seen = client.get("/api/v1/state").json()["ranks"]
    assert [one["cordon"] for one in seen] == [None, "cordon"]
    assert (cordoned.json()["reason"], cordoned.json()["waits"]) == (WHY["reason"], "")
    assert moved.status_code == 200, moved.text
    published = deployment.store.published()
    before = deployment.store.committed()
    assert before is not None
    if published is not None:
        assert published.target.slot_to_expert[0, 3:].tolist() == (
            before.placement.slot_to_expert[0, 3:].tolist()
        )
    first, outcome = list(Audit(tmp_path).entries())[:2]
    assert (first.action, first.reason) == (f"POST {PATH}/1/cordon", WHY["reason"])
    assert outcome.outcome == "200"
    assert states(client.post(f"{PATH}/1/uncordon", json=WHY)) == ["open", "open"]


def test_drain_that_memory_does_not_allow_is_refused_before_anything_changes(
    deployment: Deployment, client: httpx.Client
) -> None:
    refused = client.post(f"{PATH}/1/drain", json=WHY)

    assert refused.status_code == 409
    assert refused.json()["type"] == ProblemType.IMPOSSIBLE_CORDON.uri
    assert refused.json()["detail"] == (
        "rank 1 (drain): the 1 ranks that may take experts have 3 slots in a layer for the 4 "
        "experts that must be on one of them, expected at least one for each"
    )
    assert deployment.store.live().effective.cordons in (None, "")


def test_rank_that_is_not_there_and_a_stale_revision_are_refused(client: httpx.Client) -> None:
    stale = {"if-match": client.get(PATH).headers["etag"]}
    cordoned = client.post(f"{PATH}/0/cordon", json=WHY, headers=stale)
    again = client.post(f"{PATH}/0/uncordon", json=WHY, headers=stale)
    missing = client.post(f"{PATH}/2/cordon", json=WHY)

    assert states(cordoned) == ["cordoned", "open"]
    assert again.json()["type"] == ProblemType.SETTINGS_CHANGED.uri
    assert (missing.status_code, missing.json()["type"]) == (404, ProblemType.NO_SUCH_RANK.uri)
    assert client.post(f"{PATH}/0/uncordon", json=WHY, headers={"if-match": "7"}).status_code == 412


def test_ranks_without_a_run_are_refused() -> None:
    service = HttpService(create_app(MemoryStore("d")))
    service.start()
    try:
        for method, path in (("GET", PATH), ("POST", f"{PATH}/0/drain")):
            body = WHY if method == "POST" else None
            found = httpx.request(method, f"{service.url}{path}", json=body, timeout=60.0)
            assert found.json()["type"] == ProblemType.NO_RUN.uri
    finally:
        service.stop()


@pytest.mark.usefixtures("deployment")
@pytest.mark.slow
def test_operator_lists_cordons_and_uncordons_ranks_on_a_store(tmp_path: Path) -> None:
    place = ["--store", str(tmp_path / "store.sqlite"), "--deployment", "test"]

    def run(*words: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, [*words, *place])
        return done.exit_code, done.output

    status, text = run("cordon", "1", "--reason", "its GPU throttles")
    rows = [line.split() for line in text.splitlines()[1:]]
    assert status == 0, text
    assert rows == [["0", "0", "0", "2", "2", "open"], ["1", "0", "0", "2", "2", "cordoned"]]
    found = json.loads(run("ranks", "--json")[1])
    assert [(one["state"], one["step"]) for one in found] == [("open", 1), ("cordoned", 1)]
    assert "cordoned" in run("ranks")[1]
    status, text = run("drain", "0")
    assert (status, "slots in a layer for the 2 experts" in text) == (1, True)
    assert run("drain", "5")[0] == 1
    assert run("drain", "x")[0] == 2
    assert json.loads(run("uncordon", "1", "--json")[1])["ranks"][1]["state"] == "open"
