"""Records of a model whose first layers are dense: its own layer numbers decide what is read."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from eplb.core.model import ModelShape
from eplb.errors import CheckpointError
from rebalance.weights.disk.record_loader import RecordLoader
from runtime import Checkpoint, ExpertSchema

LAYERS = (1, 2)  # layer 0 is dense
SCHEMA = ExpertSchema.swiglu(16, 8)


def model_of(layers: tuple[int, ...]) -> ModelShape:
    return ModelShape(layers, num_experts=4, top_k=2, hidden=16, intermediate=8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of DeepSeek-V3's layout, one dense layer; expert e of layer l is 10 l + e."""
    tensors = {"model.layers.0.mlp.gate_proj.weight": torch.zeros(8, 16)}
    for layer in LAYERS:
        name = f"model.layers.{layer}.mlp"
        tensors[f"{name}.gate.weight"] = torch.zeros(4, 16)
        for expert in range(4):
            value = 10.0 * layer + expert
            for part, shape in (("gate", (8, 16)), ("up", (8, 16)), ("down", (16, 8))):
                tensors[f"{name}.experts.{expert}.{part}_proj.weight"] = torch.full(shape, value)
    save_file(tensors, tmp_path / "model.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "model.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "hidden_size": 16,
        "moe_intermediate_size": 8,
        "num_nextn_predict_layers": 0,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_records_are_read_from_the_layers_that_the_model_names(folder: Path) -> None:
    record = torch.zeros(SCHEMA.record_bytes, dtype=torch.uint8)

    with closing(RecordLoader(Checkpoint(folder), model_of(LAYERS), SCHEMA)) as loader:
        for number, layer in enumerate(LAYERS):
            for expert in range(4):
                loader.load((number, expert), record)

                views = SCHEMA.views(record)
                assert views["gate_up"].unique().tolist() == [10.0 * layer + expert]
                assert views["down"].unique().tolist() == [10.0 * layer + expert]


def test_dense_layer_named_as_an_moe_layer_is_refused(folder: Path) -> None:
    record = torch.zeros(SCHEMA.record_bytes, dtype=torch.uint8)

    with (
        closing(RecordLoader(Checkpoint(folder), model_of((0, 1)), SCHEMA)) as loader,
        pytest.raises(CheckpointError, match="layer 0 has no routed experts, expected one of 1, 2"),
    ):
        loader.load((0, 0), record)
