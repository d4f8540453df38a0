"""A model is named by a known name, a file, or a folder, with figures after a file's name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eplb.core.model import preset
from eplb.errors import ConfigError, HistoryError
from telemetry.formats.model_config import model_by_name, model_digest

SMALL = {
    "num_hidden_layers": 4,
    "first_k_dense_replace": 1,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL))
    return path


def test_known_name_gives_the_known_model() -> None:
    assert model_by_name("deepseek-v3") is preset("deepseek-v3")
    assert model_digest("deepseek-v3") == ""


def test_file_and_its_folder_give_the_same_model(config: Path) -> None:
    for name in (str(config), str(config.parent)):
        assert model_by_name(name).layer_ids == (1, 2, 3)


def test_figures_after_the_name_take_the_place_of_the_files(config: Path) -> None:
    shape = model_by_name(f"{config},top_k=4,layers=0,2-3,shared=1")

    assert (shape.top_k, shape.layer_ids, shape.num_shared_experts) == (4, (0, 2, 3), 1)


def test_digest_is_that_of_the_files_bytes(config: Path) -> None:
    before = model_digest(f"{config},top_k=4")
    config.write_text(json.dumps(SMALL | {"num_experts": 16}))

    assert before != model_digest(str(config)) != ""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nope", "unknown model 'nope', .* or the path of a model's config.json"),
        ("mixtral-8x7b,top_k=4", "mixtral-8x7b does not exist"),
        ("nowhere/config.json", "nowhere/config.json does not exist"),
        ("CONFIG,top_k", "found 'top_k', expected NAME=VALUE"),
        ("CONFIG,top_k=2,top_k=4", "found 'top_k=4', expected NAME=VALUE, each name once"),
    ],
)
def test_name_of_nothing_is_refused(config: Path, name: str, message: str) -> None:
    with pytest.raises((ConfigError, HistoryError), match=message):
        model_by_name(name.replace("CONFIG", str(config)))


def test_file_that_is_no_json_is_refused_with_its_name(config: Path) -> None:
    config.write_text("{")

    with pytest.raises(HistoryError, match=r"config\.json cannot be read: .*a model"):
        model_by_name(str(config))
