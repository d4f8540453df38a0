"""A layer has its number in the model in answers, commands, settings, metrics and pictures."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from api.app import create_app
from api.cli.main import app
from eplb.core.model import ModelShape
from tests.support.controlled_deployment import Deployment, planned_by_request
from tests.support.http import HttpService, serving
from tests.support.limits import NEVER_S
from tests.support.stores import MemoryStore

# Layers 0, 1 and 3 to 4 are dense: no position is the number of another MoE layer's.
MODEL = ModelShape((2, 5), 4, 2, hidden=16, intermediate=8)
PIN = ("--layer", "5", "--expert", "0")


@pytest.fixture
def served() -> Iterator[Deployment]:
    with planned_by_request(MemoryStore("test"), MODEL) as found:
        yield found


@pytest.fixture
def service(served: Deployment, tmp_path: Path) -> Iterator[HttpService]:
    made = create_app(served.store, plan_wait_s=NEVER_S, state_dir=tmp_path, metrics_level="layer")
    with serving(made) as found:
        yield found


def run(service: HttpService, *words: str) -> tuple[int, Any]:
    done = CliRunner().invoke(app, [*words, "--service", service.url, "--json"])
    return done.exit_code, json.loads(done.output) if done.exit_code == 0 else done.output


def test_a_layer_has_one_number_in_answers_commands_and_picture(service: HttpService) -> None:
    assert run(service, "pins", "set", *PIN, "--ranks", "0,1")[0] == 0
    (pin,) = run(service, "pins", "list")[1]["pins"]
    explained = run(service, "explain", *PIN)[1]["result"]
    proposal = run(service, "propose")[1]
    top = CliRunner().invoke(app, ["top", "--once", "--service", service.url]).output

    assert pin == {"expert": 0, "ranks": [0, 1], "layer": 5}
    assert explained["layer"] == 5
    assert explained["sentences"][0].startswith("Layer 5, expert 0")
    assert {move["layer"] for move in explained["moves"]} <= {5}
    assert {one["layer"] for one in proposal["explanation"]} == {2, 5}
    assert {move[0] for move in proposal["move_list"]} == {2, 5}
    rows = [line.split()[0] for line in top.splitlines() if line.split()]
    assert {"2", "5"} <= set(rows)
    assert not {"0", "1"} & set(rows)


def test_redundancy_and_pins_name_the_layers_that_plans_change(
    served: Deployment, service: HttpService
) -> None:
    served.store.change_live({"redundancy": "5:0", "pins": "2/1:0+1"}, reason="a test")

    found = run(service, "propose")[1]

    slots = found["slot_to_expert"]
    assert sum(expert >= 0 for expert in slots[1]) == 4
    assert slots[0].count(1) == 2


@pytest.mark.parametrize("words", [["explain"], ["pins", "set", "--ranks", "1"]])
@pytest.mark.parametrize("number", ["0", "1"])
def test_number_of_no_moe_layer_is_refused_with_those_that_exist(
    service: HttpService, words: list[str], number: str
) -> None:
    status, text = run(service, *words, "--layer", number, "--expert", "0")

    assert status == 1
    assert f"layer {number}" in text
    assert "2, 5" in text


def test_metrics_label_a_layer_by_its_number(service: HttpService) -> None:
    text = httpx.get(f"{service.url}/metrics").text

    found = [line for line in text.splitlines() if line.startswith("eplb_layer_balancedness{")]
    assert [('layer="2"' in line, 'layer="5"' in line) for line in found] == [
        (True, False),
        (False, True),
    ]
