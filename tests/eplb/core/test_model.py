"""Model shapes: presets, defaults, and what no model can be."""

import numpy as np
import pytest

from eplb import ModelShape, preset
from eplb.core.model import PRESETS
from eplb.errors import ConfigError


def test_every_preset_is_a_possible_model() -> None:
    for name, model in PRESETS.items():
        assert preset(name) is model
        assert model.expert_bytes > 0
        assert model.num_layers == len(set(model.layer_ids))


def test_deepseek_v3_has_58_layers_after_three_dense_ones() -> None:
    model = preset("deepseek-v3")

    assert (model.layer_ids[0], model.layer_ids[-1], model.num_layers) == (3, 60, 58)
    assert (model.num_experts, model.top_k, model.num_expert_groups) == (256, 8, 8)


def test_zero_computation_experts_cost_nothing() -> None:
    cost = preset("longcat-flash").expert_cost

    assert cost.sum() == 512
    assert (cost[-256:] == 0).all()


def test_bytes_default_to_three_matrices_of_bfloat16() -> None:
    assert ModelShape((0,), 4, top_k=1, hidden=10, intermediate=5).expert_bytes == 300


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_experts": 0}, "top-1 of 0 experts"),
        ({"top_k": 5}, "top-5 of 4 experts"),
        ({"layer_ids": (1, 1)}, "expected distinct layer numbers"),
        ({"layer_ids": ()}, "expected distinct layer numbers"),
        ({"num_expert_groups": 3}, "4 experts in 3 expert groups"),
        ({"expert_cost": np.ones(3)}, r"expert_cost has shape \(3,\), expected \(4,\)"),
    ],
)
def test_model_with_impossible_counts_is_refused(fields: dict[str, object], message: str) -> None:
    usual = {"layer_ids": (0,), "num_experts": 4, "top_k": 1, "hidden": 2, "intermediate": 2}

    with pytest.raises(ConfigError, match=message):
        ModelShape(**(usual | fields))


def test_unknown_preset_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="unknown model 'gpt-9', expected one of: deepseek-r1"):
        preset("gpt-9")
