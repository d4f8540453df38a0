"""A checkpoint in DeepSeek-V3's layout that tests quantise and damage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.support.folders import write_shards

NUM_EXPERTS, HIDDEN, INTERMEDIATE = 4, 64, 32


def matrices(generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Random gate, up and down of one expert."""
    shapes = {
        "gate": (INTERMEDIATE, HIDDEN),
        "up": (INTERMEDIATE, HIDDEN),
        "down": (HIDDEN, INTERMEDIATE),
    }
    return {
        f"{part}_proj": torch.randn(shape, generator=generator).to(torch.bfloat16)
        for part, shape in shapes.items()
    }


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    """All tensors: layer 0 is dense, 1 and 2 are MoE, 3 is of multi-token prediction."""
    generator = torch.Generator().manual_seed(11)
    found = {"model.embed_tokens.weight": torch.ones(8, HIDDEN)}
    for layer in (1, 2, 3):
        name = f"model.layers.{layer}.mlp"
        found[f"{name}.gate.weight"] = torch.ones(NUM_EXPERTS, HIDDEN)
        for expert in range(NUM_EXPERTS):
            for part, matrix in matrices(generator).items():
                found[f"{name}.experts.{expert}.{part}.weight"] = matrix
    return found


@pytest.fixture
def config() -> dict[str, object]:
    return {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "n_routed_experts": NUM_EXPERTS,
        "n_shared_experts": 0,
        "num_experts_per_tok": 2,
        "hidden_size": HIDDEN,
        "moe_intermediate_size": INTERMEDIATE,
        "num_nextn_predict_layers": 1,
    }


@pytest.fixture
def folder(tmp_path: Path, tensors: dict[str, torch.Tensor], config: dict[str, object]) -> Path:
    write_shards(tmp_path, tensors)
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path
