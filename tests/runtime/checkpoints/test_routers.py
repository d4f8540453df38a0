"""Routers, built from what a checkpoint holds, agree with the library's on random tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from runtime import Checkpoint
from tests.support.models import library_models
from tests.support.models.library_models import CASES, HIDDEN, NUM_EXPERTS
from tests.support.models.routers import Router, Scoring

NUM_TOKENS = 1000
ROUNDING = 1e-6

ROUTERS: dict[str, dict[str, Any]] = {
    "DeepSeek-V3, R1": {
        "scoring": Scoring.SIGMOID,
        "num_groups": 2,
        "top_groups": 1,
        "is_normalised": True,
        "scale": 2.5,
    },
    "Qwen3-MoE": {"scoring": Scoring.SOFTMAX},
    "Mixtral": {"scoring": Scoring.SOFTMAX, "is_normalised": True},
    "gpt-oss": {"scoring": Scoring.TOP_SOFTMAX},
}


def router_module(model: torch.nn.Module, layer: int) -> Any:
    """The library's router of a layer."""
    (found,) = (
        module
        for name, module in model.named_modules()
        if name.endswith((f"layers.{layer}.mlp.gate", f"layers.{layer}.mlp.router"))
    )
    return found


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("normalised", [False, True])
def test_router_chooses_the_library_s_experts_and_weights(
    name: str, normalised: bool, tmp_path: Path
) -> None:
    (case,) = (case for case in CASES if case.name == name)
    model = library_models.build(case).float()
    checkpoint = Checkpoint(library_models.save(case, model, tmp_path / "model"))
    settings, generator = dict(ROUTERS[name]), torch.Generator().manual_seed(5)
    tokens = torch.randn((NUM_TOKENS, HIDDEN), generator=generator)

    for layer in checkpoint.moe_layers:
        theirs = router_module(model, layer)
        if hasattr(theirs, "norm_topk_prob"):
            theirs.norm_topk_prob = settings["is_normalised"] = normalised
        router = Router(top_k=theirs.top_k, **checkpoint.router(layer), **settings)
        experts, weights = router.route(tokens)
        with torch.no_grad():
            _, expected_weights, expected = theirs(tokens)

        order, expected_order = experts.argsort(dim=1), expected.argsort(dim=1)
        assert torch.equal(experts.gather(1, order), expected.gather(1, expected_order))
        difference = weights.gather(1, order) - expected_weights.gather(1, expected_order)
        assert difference.abs().max() <= ROUNDING
        assert len(experts.unique()) == NUM_EXPERTS  # no expert is left out of the comparison


def test_group_that_is_not_chosen_gives_no_expert() -> None:
    logits = torch.tensor([[9.0, -9.0, -9.0, 1.0, 1.0, 1.0]])  # groups of three: 0..2 and 3..5
    router = Router(
        weight=torch.eye(6), top_k=2, scoring=Scoring.SIGMOID, num_groups=2, top_groups=1
    )

    experts, weights = router.route(logits)

    assert set(experts.flatten().tolist()) <= {3, 4, 5}  # 2 x 0.73 is more than 1.0 + 0.0
    assert torch.allclose(weights, torch.full((1, 2), 0.7310586))


def test_correction_bias_changes_the_choice_and_not_the_weight() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    bias = torch.tensor([0.0, 0.0, 1.0])
    router = Router(
        weight=torch.eye(3), top_k=1, scoring=Scoring.SIGMOID, correction_bias=bias, scale=2.0
    )

    experts, weights = router.route(logits)

    assert experts.tolist() == [[2]]
    assert weights.tolist() == [[1.0]]  # twice the sigmoid of 0


def test_zero_computation_experts_have_ids_after_the_routed_ones(tmp_path: Path) -> None:
    (case,) = (case for case in CASES if case.name == "LongCat-Flash")
    model = library_models.build(case)
    checkpoint = Checkpoint(library_models.save(case, model, tmp_path / "model"))

    assert checkpoint.router(0)["weight"].shape == (NUM_EXPERTS + 4, HIDDEN)
    assert checkpoint.config.num_zero == 4
    assert checkpoint.model_shape().num_experts == NUM_EXPERTS  # they take no slot and no bytes
