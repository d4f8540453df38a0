"""Types of problems: the table, what the document names, and what a real service answers."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from api.access.audit import AUDIT_FILE
from api.http.app import create_app
from api.http.problems import BLANK, OF_REFUSAL, ProblemType
from api.http.server import HttpService
from eplb import Placement
from telemetry import open_store
from telemetry.store import Control, LoadStore
from telemetry.stores.memory import MemoryStore
from tests.support.repository import ROOT

FIRST = Placement(np.array([[0, 1]]), num_experts=2, generation=1)
JSON = {"content-type": "application/json"}
WHY: dict[str, Any] = {"reason": "a test"}
TOKEN = "token-of-the-test"
V1 = "/api/v1"
MAKERS = ("problem", "Refused", "_refused")  # of refusals


@pytest.fixture(scope="module")
def store() -> Iterator[LoadStore]:
    store = MemoryStore("d")
    store.commit(FIRST, expected=None, reason="start")
    store.set_control(Control(movement=False), reason="held")
    with closing(store):
        yield store


@pytest.fixture(scope="module")
def client(store: LoadStore) -> Iterator[httpx.Client]:
    service = HttpService(create_app(store, plan_wait_s=0.0))
    service.start()
    with httpx.Client(base_url=service.url, timeout=60.0) as opened:
        yield opened
    service.stop()


def kind_of(answer: httpx.Response) -> ProblemType:
    """The type that an answer names; its status and title are those of the table."""
    assert answer.headers["content-type"] == "application/problem+json", answer.text
    found = answer.json()
    (kind,) = (one for one in ProblemType if one.uri == found["type"])
    assert (found["status"], found["title"]) == (kind.status, kind.title)
    assert answer.status_code == kind.status
    assert found["detail"]
    return kind


@pytest.mark.parametrize(
    ("kind", "method", "path", "others"),
    [
        (ProblemType.FOREIGN_HOST, "GET", f"{V1}/state", {"headers": {"host": "evil.example"}}),
        (
            ProblemType.FOREIGN_ORIGIN,
            "POST",
            f"{V1}/pause",
            {"json": WHY, "headers": {"origin": "http://evil.example"}},
        ),
        (ProblemType.NOT_FOUND, "GET", f"{V1}/nowhere", {}),
        (ProblemType.NOT_FOUND, "GET", f"{V1}/audit", {}),
        (ProblemType.NO_SUCH_PLACEMENT, "GET", f"{V1}/placement?generation=9", {}),
        (ProblemType.NO_SUCH_PROPOSAL, "GET", f"{V1}/proposals/9", {}),
        (ProblemType.NO_SUCH_TASK, "GET", f"{V1}/tasks/9", {}),
        (ProblemType.METHOD_NOT_ALLOWED, "DELETE", f"{V1}/state", {}),
        (
            ProblemType.NOT_ACCEPTABLE,
            "GET",
            f"{V1}/load/matrix?since=0",
            {"headers": {"accept": "image/png"}},
        ),
        (ProblemType.MOVEMENT_OFF, "POST", f"{V1}/rebalances", {"json": WHY | {"dry_run": False}}),
        (ProblemType.NO_RUN, "GET", f"{V1}/placements/1/export", {}),
        (
            ProblemType.GENERATION_MOVED_ON,
            "POST",
            f"{V1}/rebalances",
            {"json": WHY, "headers": {"if-match": '"7"'}},
        ),
        (
            ProblemType.SETTINGS_CHANGED,
            "PATCH",
            f"{V1}/settings",
            {"json": WHY | {"plan_windows": 8}, "headers": {"if-match": '"999"'}},
        ),
        (
            ProblemType.BODY_TOO_LARGE,
            "POST",
            f"{V1}/pause",
            {"content": b" " * 70_000, "headers": JSON},
        ),
        (
            ProblemType.NOT_JSON,
            "POST",
            f"{V1}/pause",
            {"content": b"x", "headers": {"content-type": "text/plain"}},
        ),
        (ProblemType.INVALID_REQUEST, "POST", f"{V1}/pause", {"json": {}}),
        (ProblemType.INVALID_REQUEST, "GET", f"{V1}/state?x=1", {}),
        (ProblemType.NOT_READY, "GET", "/readyz", {}),
    ],
)
def test_refusal_has_the_type_of_its_cause(
    client: httpx.Client, kind: ProblemType, method: str, path: str, others: dict[str, Any]
) -> None:
    assert kind_of(client.request(method, path, **others)) is kind


def test_task_that_ended_and_key_of_another_body_have_their_types(
    client: httpx.Client, store: LoadStore
) -> None:
    task = store.submit("rebalance", WHY)
    keyed = JSON | {"idempotency-key": "once"}

    first = client.post(f"{V1}/tasks/{task.id}/cancel", json=WHY)
    again = client.post(f"{V1}/tasks/{task.id}/cancel", json=WHY)
    client.post(f"{V1}/pause", json=WHY, headers=keyed)
    other = client.post(f"{V1}/pause", json={"reason": "another"}, headers=keyed)

    assert first.status_code == 200
    assert kind_of(again) is ProblemType.TASK_BEGUN
    assert kind_of(other) is ProblemType.KEY_REUSED


def test_wrong_keys_and_unwritable_files_have_their_types(store: LoadStore, tmp_path: Path) -> None:
    service = HttpService(create_app(store, token=TOKEN, state_dir=tmp_path), is_authenticated=True)
    service.start()
    try:
        with httpx.Client(base_url=service.url, timeout=60.0) as client:
            right = {"authorization": f"Bearer {TOKEN}"}
            wrong = {"authorization": "Bearer wrong"}
            assert kind_of(client.get(f"{V1}/state")) is ProblemType.NOT_AUTHENTICATED
            found = {kind_of(client.get(f"{V1}/state", headers=wrong)) for _ in range(11)}
            assert found == {ProblemType.NOT_AUTHENTICATED, ProblemType.TOO_MANY_FAILED_LOGINS}
            (tmp_path / AUDIT_FILE).mkdir()  # no file can be opened in its place
            refused = client.post(f"{V1}/pause", json=WHY, headers=right)
            assert kind_of(refused) is ProblemType.AUDIT_UNAVAILABLE
    finally:
        service.stop()


def test_store_that_was_closed_is_an_unavailable_store(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store.sqlite", "d")
    service = HttpService(create_app(store))
    service.start()
    store.close()
    try:
        answer = httpx.get(f"{service.url}/healthz", timeout=60.0)
    finally:
        service.stop()

    assert kind_of(answer) is ProblemType.STORE_UNAVAILABLE


def test_type_of_a_problem_leads_to_its_description(client: httpx.Client) -> None:
    refused = client.get(f"{V1}/tasks/9").json()

    described = client.get(refused["type"]).json()
    every = client.get(f"{V1}/problems").json()

    assert described["meaning"] == ProblemType.NO_SUCH_TASK.meaning
    assert (described["type"], described["title"]) == (refused["type"], refused["title"])
    assert [one["type"] for one in every] == [kind.uri for kind in ProblemType]
    assert kind_of(client.get(f"{V1}/problems/nonsense")) is ProblemType.NOT_FOUND


def test_document_names_every_type_and_none_is_blank() -> None:
    document = create_app(MemoryStore("d")).openapi()

    assert document["components"]["schemas"]["Problem"]["properties"]["type"]["enum"] == [
        kind.uri for kind in ProblemType
    ]
    assert BLANK not in {kind.uri for kind in ProblemType}
    assert len({kind.uri for kind in ProblemType}) == len(ProblemType)
    titles = {
        title
        for operations in document["paths"].values()
        for operation in operations.values()
        for status, response in operation["responses"].items()
        if int(status) >= 400
        for title in response["description"].split("; ")
    }
    # A route has one method or two, and a route that is not there has no document.
    assert titles == {one.title for one in ProblemType} - {ProblemType.METHOD_NOT_ALLOWED.title}


def test_every_type_of_the_table_is_answered_somewhere() -> None:
    answers = {
        part
        for source in (ROOT / "api").rglob("*.py")
        for node in ast.walk(ast.parse(source.read_text()))
        if (isinstance(node, ast.Call) and ast.unparse(node.func) in MAKERS)
        or isinstance(node, ast.Return | ast.Dict | ast.IfExp)
        for part in ast.walk(node)
    }
    named = {
        node.attr
        for node in answers
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "ProblemType"
    }

    of_tasks = {kind.name for kind in OF_REFUSAL.values()}  # each is answered in test_http.py
    assert named | of_tasks == {kind.name for kind in ProblemType}
