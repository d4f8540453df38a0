"""Pins over HTTP and as commands, with a real controller that obeys them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from api.access.audit import Audit
from api.app import create_app
from api.cli.main import app
from api.http.problems import ProblemType
from telemetry.state.live import Control
from tests.support.controlled_deployment import TOPOLOGY, Deployment
from tests.support.http import client_of, problem_of
from tests.support.stores import MemoryStore

PATH = "/api/v1/pins"
WHY = {"reason": "its users are near rank 1"}
ANY_REVISION = {"if-match": "*"}


def pin(expert: int, *ranks: int, layer: int | None = 0) -> dict[str, Any]:
    return {"layer": layer, "expert": expert, "ranks": list(ranks)}


def test_plan_meets_the_pins_that_were_put_and_audited(
    planned: Deployment, planning_client: httpx.Client, tmp_path: Path
) -> None:
    tag = planning_client.get(PATH).headers["etag"]
    put = planning_client.put(PATH, json=WHY | {"pins": [pin(0, 0, 1)]}, headers={"if-match": tag})
    planned.store.set_control(Control(), reason="go on")
    moved = planning_client.post("/api/v1/rebalances", json={"reason": "now", "dry_run": False})

    assert put.status_code == 200, put.text
    assert put.json()["pins"] == [pin(0, 0, 1)]
    assert (put.json()["reason"], put.json()["unmet"]) == (WHY["reason"], [])
    assert moved.status_code == 200, moved.text
    target = planned.swap().target
    assert set(TOPOLOGY.rank_of_slot[target.slot_to_expert[0] == 0].tolist()) == {0, 1}
    first, outcome = list(Audit(tmp_path).entries())[:2]
    assert (first.action, first.reason) == (f"PUT {PATH}", WHY["reason"])
    assert outcome.outcome == "200"


def test_pin_that_the_ranks_cannot_meet_is_refused_with_a_sentence(client: httpx.Client) -> None:
    pins = [pin(0, 0, 7), pin(9, 1)]
    refused = client.put(PATH, json=WHY | {"pins": pins}, headers=ANY_REVISION)

    kind, detail = problem_of(refused)
    assert kind is ProblemType.IMPOSSIBLE_PIN
    assert detail == "layer 0 expert 0 on rank 7: expected ranks 0..1, and 1 more"
    assert client.get(PATH).json()["pins"] == []


def test_of_two_changes_at_one_revision_the_second_is_refused(client: httpx.Client) -> None:
    tag = {"if-match": client.get(PATH).headers["etag"]}
    body = WHY | {"pins": [pin(2, 0, layer=None)]}

    first = client.put(PATH, json=body, headers=tag)
    second = client.put(PATH, json=body, headers=tag)
    removed = client.request("DELETE", PATH, json=WHY, headers=tag)
    at_last = client.request("DELETE", PATH, json=WHY, headers={"if-match": first.headers["etag"]})

    assert first.json()["pins"] == [pin(2, 0, layer=None)]
    for refused in (second, removed):
        assert problem_of(refused)[0] is ProblemType.SETTINGS_CHANGED
    assert at_last.json()["pins"] == client.get(PATH).json()["pins"] == []


@pytest.mark.parametrize("method", ["PUT", "DELETE"])
def test_pins_are_not_replaced_without_the_revision_that_was_read(
    client: httpx.Client, method: str
) -> None:
    body = WHY | ({"pins": []} if method == "PUT" else {})

    refused = client.request(method, PATH, json=body)

    assert problem_of(refused)[0] is ProblemType.PRECONDITION_REQUIRED


@pytest.mark.parametrize(
    ("body", "headers", "expected"),
    [
        ({"pins": []}, {"if-match": "7"}, "header.if-match: found '7'"),
        ({"pins": [pin(0, 1), pin(0, 0)]}, ANY_REVISION, "layer 0 expert 0 "),
        ({"pins": [pin(0, 1, 1)]}, ANY_REVISION, "layer 0 expert 0 "),
        ({"pins": [pin(0)]}, ANY_REVISION, "body.pins.0.ranks: "),
        ({"pins": [pin(-1, 0)]}, ANY_REVISION, "body.pins.0.expert: "),
        (
            {"pins": [pin(e, *range(100_000, 100_064)) for e in range(100)]},
            ANY_REVISION,
            "at most 20000",
        ),
    ],
)
def test_request_that_is_no_list_of_pins_is_refused(
    client: httpx.Client, body: dict[str, Any], headers: dict[str, str], expected: str
) -> None:
    refused = client.put(PATH, json=WHY | body, headers=headers)

    kind, detail = problem_of(refused)
    assert (kind, expected in detail) == (ProblemType.INVALID_REQUEST, True)


def test_pins_without_a_run_are_refused_and_read_as_none() -> None:
    with client_of(create_app(MemoryStore("d"))) as client:
        refused = client.put(PATH, json=WHY | {"pins": [pin(0, 0)]}, headers=ANY_REVISION)
        assert problem_of(refused)[0] is ProblemType.NO_RUN
        assert client.get(PATH).json()["pins"] == []


def test_operator_sets_lists_and_removes_pins_on_a_store(stored: list[str]) -> None:
    def run(*words: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, ["pins", *words, *stored])
        return done.exit_code, done.output

    assert run("list") == (0, "no pins\n")
    assert run("set", "--layer", "0", "--expert", "0", "--ranks", "1")[0] == 0
    status, text = run("set", "--expert", "2", "--ranks", "0, 1")
    rows = [line.split() for line in text.splitlines()[1:]]
    assert rows == [["all", "2", "0,", "1"], ["0", "0", "1"]]
    assert run("set", "--layer", "0", "--expert", "0", "--ranks", "0")[0] == 0
    found = json.loads(run("list", "--json")[1])
    assert found["pins"] == [pin(2, 0, 1, layer=None), pin(0, 0)]
    status, text = run("set", "--expert", "1", "--ranks", "9")
    assert (status, "layer 0 expert 1 on rank 9: expected ranks 0..1" in text) == (1, True)
    assert run("set", "--expert", "1", "--ranks", "a")[0] == 2
    assert run("remove", "--layer", "0", "--expert", "3")[0] == 1
    assert run("remove")[0] == run("remove", "--all", "--expert", "3")[0] == 2
    assert run("remove", "--layer", "0", "--expert", "0")[0] == 0
    assert run("remove", "--all") == (0, "no pins\n")
