"""Anomalies over HTTP and as a command."""

from __future__ import annotations

import json

import httpx
from typer.testing import CliRunner

from api.cli.main import app
from tests.support.controlled_deployment import Deployment

PATH = "/api/v1/anomalies"


def test_open_and_ended_anomalies_are_paged(deployment: Deployment, client: httpx.Client) -> None:
    for number in range(3):
        why = {"where": "plan", "message": f"no load {number}"}
        deployment.store.add_event("error", why)

    now = client.get(PATH, params={"state": "open"}).json()["anomalies"]
    assert "rank-silent" in {one["kind"] for one in now}
    assert all(one["until"] is None for one in now)
    first = client.get(PATH, params={"state": "ended", "limit": 2}).json()
    rest = client.get(PATH, params={"state": "ended", "before": first["next"]}).json()
    texts = [one["text"] for one in first["anomalies"] + rest["anomalies"]]
    assert (texts, rest["next"]) == (["no load 2", "no load 1", "no load 0"], None)
    assert {one["kind"] for one in first["anomalies"]} == {"plan-failed"}
    told = client.get(f"/api/v1/events?after={first['anomalies'][0]['events'][0] - 1}&limit=1")
    assert told.json()["events"][0]["detail"]["message"] == "no load 2"
    assert client.get(PATH, params={"state": "over"}).status_code == 422


def test_operator_lists_anomalies_of_a_store(stored: list[str]) -> None:
    def run(*words: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, ["anomalies", *words, *stored])
        return done.exit_code, done.output

    status, text = run()
    assert (status, "rank-silent" in text) == (0, True), text
    found = json.loads(run("--state", "open", "--json")[1])
    assert found["anomalies"][0]["until"] is None
    assert run("--state", "ended")[1].strip() == "no anomalies"
    assert run("--state", "over")[0] == 2
