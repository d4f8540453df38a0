"""``eplb placements`` against a store and against a service: the same answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from api.app import create_app
from api.cli.main import app
from api.http.server import HttpService
from eplb import ModelShape, Placement, Topology
from eplb.migration.serialisation import model_to_dict, topology_to_dict
from telemetry import open_store
from telemetry.formats.table import read_placement
from telemetry.formats.types import ReadOptions
from telemetry.state.runs import RunInfo

MODEL = ModelShape((3, 5), num_experts=3, top_k=1, hidden=2, intermediate=2)  # 24 bytes each
TOPOLOGY = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=2)
FIRST = Placement(np.array([[0, 1, 0, 2]] * 2), num_experts=3, generation=1)
# Layer 0: rank 0 gets expert 2 in place of 1, rank 1 gets 1 in place of 2. Layer 1: shares alone.
SECOND = Placement(
    np.array([[0, 2, 0, 1], [0, 1, 0, 2]]),
    num_experts=3,
    generation=2,
    slot_share=np.array([[0.5, 1, 0.5, 1], [0.25, 1, 0.75, 1]]),
)


@pytest.fixture(scope="module", params=["store", "service"])
def place(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[list[str]]:
    path = tmp_path_factory.mktemp("placements") / "store.sqlite"
    with closing(open_store(path, "test")) as store:
        shapes = model_to_dict(MODEL), topology_to_dict(TOPOLOGY)
        store.begin_run(RunInfo("a", 0.0, *shapes, window_steps=1))
        store.commit(FIRST, expected=None, reason="start")
        store.commit(SECOND, expected=1, plan_id=4, reason="hot expert")
        if request.param == "store":
            yield ["--store", str(path), "--deployment", "test"]
            return
        service = HttpService(create_app(store))
        service.start()
        yield ["--service", service.url]
        service.stop()


def run(place: list[str], *words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["placements", *words, *place])
    return done.exit_code, done.output


def test_history_is_listed_newest_first_page_by_page(place: list[str]) -> None:
    status, text = run(place, "list")
    lines = text.splitlines()
    page = json.loads(run(place, "list", "--last", "1", "--json")[1])
    rest = json.loads(run(place, "list", "--before", "2", "--json")[1])

    assert status == 0, text
    assert lines[0].split() == ["gen", "time", "plan", "replicas", "hash", "reason"]
    assert [line.split()[0] for line in lines[1:]] == ["2", "1"]
    assert lines[1].endswith("hot expert")
    found = page["placements"] + rest["placements"]
    assert [one["generation"] for one in found] == [2, 1]
    assert (page["next"], rest["next"]) == (2, None)


def test_difference_shows_experts_and_shares_by_rank(place: list[str]) -> None:
    status, text = run(place, "diff", "1", "2")
    page = run(place, "diff", "1", "2", "--layers", "1")[1]
    rest = json.loads(run(place, "diff", "1", "2", "--after", "3", "--json")[1])

    assert status == 0, text
    rows = [line.split() for line in text.splitlines()]
    assert text.startswith("generation 1 to 2: 2 moves, 0.000 GB, in 2 layers")
    assert [row[:4] for row in rows[2:4]] == [["3", "0", "2", "1"], ["3", "1", "1", "2"]]
    assert text.splitlines()[4].endswith("0: 0.500 to 0.250")
    assert page.endswith("more layers differ: --after 3\n")
    assert [one["layer"] for one in rest["layers"]] == [5]


def test_exported_file_is_read_back_and_losses_are_printed(
    place: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "placement.jsonl"

    status, text = run(place, "export", "2", "--format", "vllm", "--output", str(file))
    own = run(place, "export", "2", "-o", str(tmp_path / "own.json"), "--json")[1]

    assert status == 0, text
    assert "note: shares of replicas are lost" in text
    assert f"written: {file} (sha256 " in text
    shape = ReadOptions(num_experts=3, layer_ids=(3, 5))
    found = read_placement(str(file), shape, "vllm").placement
    assert found.slot_to_expert.tolist() == SECOND.slot_to_expert.tolist()
    assert json.loads(own)["bytes"] == (tmp_path / "own.json").stat().st_size


@pytest.mark.parametrize(
    ("words", "status", "sentence"),
    [
        (["diff", "1", "9"], 1, "the store has no placement of generation 9"),
        (["export", "9", "-o", "FILE"], 1, "the store has no placement of generation 9"),
        (["export", "1", "--format", "pdf", "-o", "FILE"], 2, "query.format: input should be"),
        (["export", "1", "-o", "/nowhere/file"], 2, "/nowhere/file cannot be written"),
    ],
)
def test_refusal_is_one_line_with_its_exit_status(
    place: list[str], words: list[str], status: int, sentence: str, tmp_path: Path
) -> None:
    file = tmp_path / "file.json"

    found, text = run(place, *[str(file) if word == "FILE" else word for word in words])

    assert (found, text.count("\n")) == (status, 1)
    assert sentence in text
    assert not file.exists()
