"""Types of problems: the table, what the document names, and what the service answers."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import httpx
import numpy as np
import pytest

from api.app import create_app
from api.http.problems import ProblemType
from api.http.refusals import BLANK
from api.http.service import OF_REFUSAL
from eplb import Placement
from telemetry.state.live import Control
from telemetry.state.store import StateStore
from tests.support.http import client_of, problem_of
from tests.support.repository import ROOT
from tests.support.stores import MemoryStore

FIRST = Placement(np.array([[0, 1]]), num_experts=2, generation=1)
WHY: dict[str, Any] = {"reason": "a test"}
V1 = "/api/v1"
MAKERS = ("problem", "Refused", "_refused")  # of refusals


@pytest.fixture(scope="module")
def store() -> Iterator[StateStore]:
    store = MemoryStore("d")
    store.commit(FIRST, expected=None, reason="start")
    store.set_control(Control(movement=False), reason="held")
    with closing(store):
        yield store


@pytest.fixture(scope="module")
def client(store: StateStore) -> Iterator[httpx.Client]:
    with client_of(create_app(store, plan_wait_s=0.0)) as opened:
        yield opened


def kind_of(answer: httpx.Response) -> ProblemType:
    return problem_of(answer)[0]


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        (ProblemType.NOT_FOUND, f"{V1}/audit"),
        (ProblemType.NO_SUCH_PLACEMENT, f"{V1}/placement?generation=9"),
        (ProblemType.NO_SUCH_PROPOSAL, f"{V1}/proposals/9"),
        (ProblemType.NO_SUCH_TASK, f"{V1}/tasks/9"),
        (ProblemType.NO_RUN, f"{V1}/placements/1/export"),
    ],
)
def test_refusal_has_the_type_of_its_cause(
    client: httpx.Client, kind: ProblemType, path: str
) -> None:
    assert kind_of(client.get(path)) is kind


def test_task_that_ended_has_its_type(client: httpx.Client, store: StateStore) -> None:
    task = store.submit("rebalance", WHY)
    first, again = (client.post(f"{V1}/tasks/{task.id}/cancel", json=WHY) for _ in range(2))

    assert first.status_code == 200
    assert kind_of(again) is ProblemType.TASK_BEGUN


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
        if "ProblemType" in (text := source.read_text())
        for node in ast.walk(ast.parse(text))
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
