"""A config.json of any family gives the model; what it lacks is asked for by its name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from eplb.core.model import ModelShape, preset
from eplb.core.model_config import shape_of_config
from eplb.errors import ConfigError

FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
MXFP4 = {"quantization_config": {"quant_method": "mxfp4"}}

# The figures of the published config.json files; those of the known models were taken from them
# by hand, independently of any reader.
PUBLISHED: dict[str, dict[str, Any]] = {
    "deepseek-v3": {
        "num_hidden_layers": 61,
        "first_k_dense_replace": 3,
        "moe_layer_freq": 1,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_group": 8,
        "topk_group": 4,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_nextn_predict_layers": 1,
        **FP8,
    },
    "deepseek-v2-lite": {
        "num_hidden_layers": 27,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "n_shared_experts": 2,
        "n_group": 1,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
    },
    "kimi-k2": {
        "num_hidden_layers": 61,
        "first_k_dense_replace": 1,
        "n_routed_experts": 384,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_group": 1,
        "hidden_size": 7168,
        "moe_intermediate_size": 2048,
        **FP8,
    },
    "qwen3-235b": {
        "num_hidden_layers": 94,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
    },
    "qwen3-next": {
        "num_hidden_layers": 48,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    "ling-1t": {
        "num_hidden_layers": 80,
        "first_k_dense_replace": 4,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_shared_experts": 1,
        "n_group": 8,
        "hidden_size": 8192,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
    },
    "longcat-flash": {
        "num_layers": 28,
        "n_routed_experts": 512,
        "zero_expert_num": 256,
        "moe_topk": 12,
        "hidden_size": 6144,
        "ffn_hidden_size": 12288,
        "expert_ffn_hidden_size": 2048,
    },
    "step-3": {
        "model_type": "step3_vl",
        "vision_config": {"hidden_size": 1792, "num_hidden_layers": 63},
        "text_config": {
            "num_hidden_layers": 61,
            "moe_layers_enum": ",".join(map(str, range(4, 60))),
            "moe_num_experts": 48,
            "moe_top_k": 3,
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "moe_intermediate_size": 5120,
            "share_expert_dim": 5120,
        },
    },
    "minimax-m2": {
        "num_hidden_layers": 62,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "hidden_size": 3072,
        "intermediate_size": 1536,
        **FP8,
    },
    "glm-4.5": {
        "num_hidden_layers": 92,
        "first_k_dense_replace": 3,
        "n_routed_experts": 160,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_group": 1,
        "hidden_size": 5120,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
    },
    "gpt-oss-120b": {
        "num_hidden_layers": 36,
        "num_local_experts": 128,
        "experts_per_token": 4,
        "num_experts_per_tok": 4,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        **MXFP4,
    },
    "mixtral-8x7b": {
        "num_hidden_layers": 32,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "hidden_size": 4096,
        "intermediate_size": 14336,
    },
}
MIXTRAL = PUBLISHED["mixtral-8x7b"]


def figures(shape: ModelShape) -> tuple[Any, ...]:
    """All that a model shape has."""
    return (
        shape.layer_ids,
        shape.num_experts,
        shape.top_k,
        shape.hidden,
        shape.intermediate,
        shape.num_shared_experts,
        shape.num_expert_groups,
        shape.expert_bytes,
        shape.expert_cost.tolist(),
    )


def read(config: object, **stated: str) -> ModelShape:
    return shape_of_config(config, "config.json", stated)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_config_gives_the_known_model(name: str) -> None:
    assert figures(read(PUBLISHED[name])) == figures(preset(name))


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({"expert_layer_period": 2, "expert_layer_offset": 1}, (1, 3, 5, 7)),  # Jamba
        ({"mlp_layer_types": ["dense"] * 2 + ["sparse"] * 6}, (2, 3, 4, 5, 6, 7)),
        ({"hybrid_override_pattern": "MEM*EMEM"}, (1, 4, 6)),  # Nemotron-H
        ({"layers_block_type": ["mamba", "moe"] * 4}, (1, 3, 5, 7)),
        ({"moe_layer_start_index": 2, "moe_layer_end_index": 5}, (2, 3, 4, 5)),  # ERNIE
        ({"moe_layer_start_index": 2, "moe_layer_end_index": -1}, (2, 3, 4, 5, 6, 7)),
        ({"moe_layer_start_index": 0, "moe_layer_interval": 2}, (1, 3, 5, 7)),
        ({"num_dense_layers": 6}, (6, 7)),
        ({"mlp_only_layers": [0, 7], "decoder_sparse_step": 2}, (1, 3, 5)),
        ({"moe_layer_freq": [0, 1, 1, 1, 1, 1, 1, 0]}, (1, 2, 3, 4, 5, 6)),
        ({"interleave_moe_layer_step": 4}, (3, 7)),  # Llama 4
        ({"moe_layer_num_skipped": 1}, (1, 2, 3, 4, 5, 6, 7)),  # Hunyuan
    ],
)
def test_layers_with_experts_follow_from_each_familys_rule(
    config: dict[str, Any], layers: tuple[int, ...]
) -> None:
    assert read({**MIXTRAL, "num_hidden_layers": 8, **config}).layer_ids == layers


@pytest.mark.parametrize(
    ("quantization", "precision"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
        ({"quant_method": "fp8"}, "fp8-tensor"),
        ({"quant_method": "gptq", "bits": 4}, "int4"),
        ({"quant_method": "awq", "bits": 4}, "int4"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int"}}},
            },
            "int4",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}}
                },
            },
            "nvfp4",
        ),
    ],
)
def test_bytes_of_an_expert_follow_from_the_quantisation(
    quantization: dict[str, Any], precision: str
) -> None:
    assert read({**MIXTRAL, "quantization_config": quantization}).precision == precision


def test_unknown_quantisation_is_asked_for_and_taken_as_stated() -> None:
    config = {**MIXTRAL, "quantization_config": {"quant_method": "aqlm"}}

    with pytest.raises(
        ConfigError, match=r"method 'aqlm'.*config\.json,precision=NAME with one of"
    ):
        read(config)
    assert read(config, precision="int4").precision == "int4"


@pytest.mark.parametrize(
    ("without", "asks"),
    [
        ("num_experts_per_tok", r"found no top_k .*moe_topk.*config\.json,top_k=NUMBER"),
        ("hidden_size", r"found no hidden .*config\.json,hidden=NUMBER"),
        ("intermediate_size", r"found no intermediate .*config\.json,intermediate=NUMBER"),
        ("num_hidden_layers", r"found no number of layers .*config\.json,layers=FIRST-LAST"),
        ("num_local_experts", r"describes no routed experts: .*config\.json,experts=NUMBER"),
    ],
)
def test_missing_figure_is_asked_for_by_name(without: str, asks: str) -> None:
    config = {key: value for key, value in MIXTRAL.items() if key != without}

    with pytest.raises(ConfigError, match=asks):
        read(config)


def test_stated_figures_take_the_place_of_missing_and_of_other_ones() -> None:
    shape = read(
        {"hidden_size": 64},
        experts="8",
        top_k="2",
        intermediate="32",
        layers="1,3-5",
        groups="2",
        shared="1",
    )

    assert figures(shape)[:7] == ((1, 3, 4, 5), 8, 2, 64, 32, 1, 2)
    assert read(MIXTRAL, layers="4-6").layer_ids == (4, 5, 6)
    assert read(MIXTRAL, hidden="128").hidden == 128


def test_lists_that_differ_by_layer_or_modality_are_asked_for() -> None:
    config = {**MIXTRAL, "moe_intermediate_size": [1536, 512]}  # ERNIE-VL: text and vision

    with pytest.raises(ConfigError, match=r"\[1536, 512\], expected the same .*stated after"):
        read(config)
    assert read(config, intermediate="1536").intermediate == 1536


def test_experts_that_differ_by_layer_are_asked_for() -> None:
    layers = {"3": {"num_local_experts": 4}, "4": {"sliding_window": 128}}

    with pytest.raises(ConfigError, match="num_local_experts differs by layer, in layer 3 it is 4"):
        read({**MIXTRAL, "per_layer_config": layers})
    assert read({**MIXTRAL, "per_layer_config": {"3": {"head_dim": 64}}}).num_experts == 8


def test_experts_without_a_gate_have_two_matrices() -> None:
    shape = read({**MIXTRAL, "mlp_hidden_act": "relu2"})

    assert shape.expert_bytes == 2 * 2 * shape.hidden * shape.intermediate
    assert shape.precision == "bf16"


def test_experts_on_a_narrower_state_have_its_width() -> None:
    assert read({**MIXTRAL, "moe_latent_size": 1024}).hidden == 1024


def test_wide_shared_expert_counts_as_several() -> None:
    shape = read({**MIXTRAL, "shared_expert_intermediate_size": 4 * 14336})

    assert shape.num_shared_experts == 4


def test_experts_of_the_text_are_taken_and_not_those_of_images() -> None:
    images = {**MIXTRAL, "num_local_experts": 64}
    shape = read({"vision_config": images, "thinker_config": {"text_config": MIXTRAL}})

    assert shape.num_experts == 8


@pytest.mark.parametrize(
    ("config", "stated", "message"),
    [
        ([], {}, "found list, expected a JSON object"),
        ({**MIXTRAL, "is_moe": False}, {}, "found is_moe is false"),
        (MIXTRAL, {"topk": "2"}, "'topk' is stated, expected one of: experts, top_k"),
        (MIXTRAL, {"top_k": "two"}, "found 'two', expected a whole number"),
        (MIXTRAL, {"layers": "5-3"}, "layers=5-3: found '5-3', expected"),
        ({**MIXTRAL, "num_hidden_layers": 2, "num_dense_layers": 2}, {}, "found no layer with"),
        ({**MIXTRAL, "num_local_experts": 10**9}, {}, "num_local_experts is 1000000000, expected"),
    ],
)
def test_wrong_config_or_figure_is_refused(
    config: object, stated: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read(config, **stated)


def test_zero_experts_cost_nothing_and_count_as_engines_count_them() -> None:
    shape = read(PUBLISHED["longcat-flash"])

    assert shape.num_experts == 768
    assert np.flatnonzero(shape.expert_cost == 0).tolist() == list(range(512, 768))
