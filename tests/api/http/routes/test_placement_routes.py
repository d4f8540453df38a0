"""Placements over HTTP: pages of the history, differences, files of engines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from api.app import create_app
from api.http.problems import ProblemType
from eplb import ModelShape, Placement
from telemetry.formats.table import read_placement
from telemetry.formats.types import ReadOptions
from tests.support.http import client_of, problem_of
from tests.support.stores import MemoryStore
from tests.support.two_ranks import begin_run

MODEL = ModelShape((3, 5, 6), num_experts=3, top_k=1, hidden=2, intermediate=2)  # 24 bytes each
FIRST = Placement(np.array([[0, 1, 0, 2]] * 3), num_experts=3, generation=1)
# Layer 0: rank 0 gets expert 2 in place of 1, rank 1 gets 1 in place of 2. Layer 1: shares alone.
SECOND = Placement(
    np.array([[0, 2, 0, 1], [0, 1, 0, 2], [0, 1, 2, 0]]),
    num_experts=3,
    generation=2,
    slot_share=np.array([[0.5, 1, 0.5, 1], [0.25, 1, 0.75, 1], [0.5, 1, 1, 0.5]]),
)
PATH = "/api/v1/placements"


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    store = MemoryStore("d")
    begin_run(store, model=MODEL)
    store.commit(FIRST, expected=None, reason="start")
    store.commit(SECOND, expected=1, plan_id=4, reason="hot expert")
    fewer = Placement(np.array([[0, 1, 2]] * 3), num_experts=3, generation=3)
    store.commit(fewer, expected=2, reason="other ranks")
    with client_of(create_app(store)) as opened:
        yield opened


def test_placement_that_the_client_has_is_not_sent_again_until_another_serves(
    client: httpx.Client,
) -> None:
    for path in ("/api/v1/placement", "/api/v1/placement?generation=1"):
        found = client.get(path)
        again = client.get(path, headers={"if-none-match": found.headers["etag"]})
        other = client.get(path, headers={"if-none-match": '"77"'})

        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["etag"] == found.headers["etag"]
        assert other.json() == found.json()
    unknown = client.get("/api/v1/placement?generation=77", headers={"if-none-match": '"77"'})
    assert unknown.status_code == 404


def test_placement_is_the_new_one_at_once_after_a_commit() -> None:
    store = MemoryStore("d")
    store.commit(FIRST, expected=None, reason="start")
    with client_of(create_app(store, is_watching=True)) as client:
        assert client.get("/api/v1/placement").json()["generation"] == 1
        store.commit(SECOND, expected=1, reason="hot expert")
        found = client.get("/api/v1/placement")

    assert (found.json()["generation"], found.headers["etag"]) == (2, '"2"')


def test_history_is_read_page_by_page_down_to_the_first(client: httpx.Client) -> None:
    page = client.get(PATH, params={"limit": 2}).json()
    rest = client.get(PATH, params={"limit": 2, "before": page["next"]}).json()

    found = page["placements"] + rest["placements"]
    assert [one["generation"] for one in found] == [3, 2, 1]
    assert (page["next"], rest["next"]) == (2, None)
    assert client.get(PATH, params={"before": 1}).json() == {"placements": [], "next": None}


def test_difference_names_experts_bytes_and_shares_by_rank(client: httpx.Client) -> None:
    found = client.get(f"{PATH}/diff", params={"base": 1, "target": 2}).json()

    assert (found["base"]["generation"], found["target"]["reason"]) == (1, "hot expert")
    assert (found["changed_layers"], found["moves"], found["bytes"]) == (3, 2, 48)
    assert found["layers"][0] == {
        "layer": 3,
        "bytes": 48,
        "ranks": [
            {"rank": 0, "added": [2], "removed": [1]},
            {"rank": 1, "added": [1], "removed": [2]},
        ],
        "shares": [],
    }
    assert found["layers"][1]["ranks"] == []
    assert found["layers"][1]["shares"] == [
        {"rank": 0, "expert": 0, "before": 0.5, "after": 0.25},
        {"rank": 1, "expert": 0, "before": 0.5, "after": 0.75},
    ]
    assert (found["layers"][2]["bytes"], found["layers"][2]["ranks"]) == (0, [])
    assert found["next"] is None


def test_difference_is_given_by_pages_of_layers(client: httpx.Client) -> None:
    asked = {"base": 2, "target": 1, "limit": 2}

    page = client.get(f"{PATH}/diff", params=asked).json()
    rest = client.get(f"{PATH}/diff", params=asked | {"after": page["next"]}).json()

    assert [one["layer"] for one in page["layers"] + rest["layers"]] == [3, 5, 6]
    assert (page["next"], rest["next"], rest["moves"]) == (5, None, 2)
    dense = client.get(f"{PATH}/diff", params=asked | {"after": 4}).json()
    assert [one["layer"] for one in dense["layers"]] == [5, 6]


def test_placement_of_other_ranks_has_no_difference(client: httpx.Client) -> None:
    refused = client.get(f"{PATH}/diff", params={"base": 1, "target": 3})

    kind, detail = problem_of(refused)
    assert kind is ProblemType.OTHER_SHAPE
    assert "(3, 3, 3), expected (3, 3, 4)" in detail
    assert client.get(f"{PATH}/diff", params={"base": 1, "target": 9}).status_code == 404


@pytest.mark.parametrize("engine", ["sglang", "vllm", "trtllm", "ascend", "eplb"])
def test_exported_file_is_read_back_as_the_placement(
    client: httpx.Client, engine: str, tmp_path: Path
) -> None:
    answer = client.get(f"{PATH}/1/export", params={"format": engine})

    assert answer.status_code == 200, answer.text
    name = answer.headers["content-disposition"].partition('filename="')[2].rstrip('"')
    (tmp_path / name).write_bytes(answer.content)
    shape = ReadOptions(num_experts=3, layer_ids=(3, 5, 6))
    found = read_placement(str(tmp_path / name), shape, engine)
    assert found.placement.slot_to_expert.tolist() == FIRST.slot_to_expert.tolist()


def test_shares_that_an_engine_cannot_take_are_noted(client: httpx.Client) -> None:
    of_engine = client.get(f"{PATH}/2/export", params={"format": "vllm"})
    own = client.get(f"{PATH}/2/export")

    assert "shares" in of_engine.headers["eplb-notes"]
    assert json.loads(own.content)["slot_share"] == SECOND.slot_share.tolist()


@pytest.mark.parametrize(
    ("path", "params", "status"),
    [
        ("/9/export", {}, 404),
        ("/3/export", {}, 409),
        ("/1/export", {"format": "pdf"}, 422),
        ("/1/export", {"formats": "eplb"}, 422),
        ("/diff", {"base": 1}, 422),
        ("/diff", {"base": 1, "target": 2, "limit": 65}, 422),
        ("", {"after": 1}, 422),
    ],
)
def test_request_that_does_not_fit_is_refused_with_a_problem(
    client: httpx.Client, path: str, params: dict[str, int | str], status: int
) -> None:
    refused = client.get(f"{PATH}{path}", params=params)

    assert problem_of(refused)[0].status == status
