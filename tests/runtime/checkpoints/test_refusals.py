"""What does not fit is refused: the message has file, tensor, what was found, what was expected."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from api.config.deployment import ModelSettings
from api.deploy.model import check_checkpoint, model_shape
from eplb.errors import CheckpointError
from rebalance.assembly.host_cache import build_host_cache
from rebalance.weights.cache.address import HostCacheAddress
from rebalance.weights.cache.cache_settings import HostCacheSettings
from runtime import Checkpoint, ExpertSchema
from tests.support.folders import change_config, rewrite_header, shard_of, write_shards

Tensors = dict[str, torch.Tensor]
EXPERT = "model.layers.2.mlp.experts.1.up_proj.weight"


# -- the family


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2' and architectures None"),
        ({"model_type": None}, "model_type is None"),
        ({"model_type": ["deepseek_v3"]}, "model_type is ['deepseek_v3']"),
        ({"model_type": "x", "architectures": ["YForCausalLM"]}, "architectures ['YForCausalLM']"),
    ],
)
def test_unknown_family_is_refused_with_the_known_ones(
    folder: Path, values: dict[str, object], found: str
) -> None:
    change_config(folder, **values)

    with pytest.raises(CheckpointError, match="unknown model family: model_type is") as caught:
        Checkpoint(folder)

    assert found in str(caught.value)
    assert f"{folder}/config.json: " in str(caught.value)
    assert "deepseek_v2, deepseek_v3, deepseek_v32, deepseek_v4" in str(caught.value)


def test_architecture_counts_where_the_model_type_is_unknown(folder: Path) -> None:
    change_config(folder, model_type="my_tune", architectures=["DeepseekV3ForCausalLM"])

    assert Checkpoint(folder).config.family.name == "DeepSeek-V3, R1"


@pytest.mark.parametrize("text", ["", "[]", "7", "[" * 100, "\udc80"])
def test_config_that_is_none_is_refused(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text, errors="surrogateescape")

    with pytest.raises(CheckpointError, match=r"config\.json cannot be read as a model's config"):
        Checkpoint(folder)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("n_routed_experts", None, "one of the keys n_routed_experts, num_local_experts"),
        ("n_routed_experts", 0, "a whole number 1..65536"),
        ("n_routed_experts", True, "a whole number 1..65536"),
        ("n_routed_experts", "4", "a whole number 1..65536"),
        ("n_routed_experts", 10**12, "a whole number 1..65536"),
        ("num_hidden_layers", 10**12, "a whole number 1..4096"),
        ("num_experts_per_tok", [2, 3, 2], "the same for all layers"),
        ("first_k_dense_replace", "1", "layers from this number on"),
        ("first_k_dense_replace", -1, "layers from this number on"),
        ("moe_layer_freq", 0, "layers divisible by this number"),
        ("mlp_layer_types", "dense,moe,moe", "a type for each layer"),
        ("moe_layer_freq", [1, 0], "layers divisible by this number"),
        ("mlp_layer_types", ["dense"], "a type for each layer"),
    ],
)
def test_impossible_figure_of_a_config_is_refused(
    folder: Path, key: str, value: object, expected: str
) -> None:
    change_config(folder, **{key: value})

    with pytest.raises(CheckpointError, match=rf"config\.json: .*expected {re.escape(expected)}"):
        Checkpoint(folder)


@pytest.mark.parametrize(
    ("values", "layers"),
    [
        ({"first_k_dense_replace": 0}, "0..2"),
        ({"first_k_dense_replace": 2}, "2"),
        ({"moe_layer_freq": 2}, "2"),
        ({"moe_layer_freq": [0, 1, 0]}, "1"),
        ({"mlp_layer_types": ["sparse", "sparse", "sparse"], "first_k_dense_replace": 3}, "none"),
    ],
)
def test_config_with_other_moe_layers_than_the_files_is_refused(
    folder: Path, values: dict[str, object], layers: str
) -> None:
    change_config(folder, **values)

    with pytest.raises(CheckpointError, match=f"routed experts in layers {layers}, expected 1, 2"):
        Checkpoint(folder)


def test_files_without_experts_are_refused_with_the_names_looked_for(
    folder: Path, tensors: Tensors
) -> None:
    write_shards(folder, {name: t for name, t in tensors.items() if ".experts." not in name})

    with pytest.raises(
        CheckpointError,
        match=r"no routed experts of DeepSeek-V3, R1 .* "
        r"model\.layers\.\{layer\}\.mlp\.experts\.\{expert\}\.down_proj",
    ):
        Checkpoint(folder)


# -- tensors


def test_tensor_missing_in_its_shard_is_named_with_the_file(folder: Path) -> None:
    shard = shard_of(folder, EXPERT)
    rewrite_header(shard, lambda header: header.pop(EXPERT))
    checkpoint = Checkpoint(folder)
    expected = rf"tensor {EXPERT} is missing in {shard.name}, where the index has it"

    with pytest.raises(CheckpointError, match=expected):
        checkpoint.check(checkpoint.model_shape(), checkpoint.schema())
    with pytest.raises(CheckpointError, match=expected):
        checkpoint.part(2, 1, "up_proj.weight")


@pytest.mark.parametrize(
    ("other", "found"),
    [
        (torch.zeros(32, 65, dtype=torch.bfloat16), r"\(32, 65\) of torch.bfloat16"),
        (torch.zeros(32, 64), r"\(32, 64\) of torch.float32"),
        (torch.zeros(32 * 64, dtype=torch.bfloat16), r"\(2048,\) of torch.bfloat16"),
    ],
)
def test_tensor_of_another_shape_or_type_is_named_with_both(
    folder: Path, tensors: Tensors, other: torch.Tensor, found: str
) -> None:
    write_shards(folder, tensors | {EXPERT: other})
    checkpoint = Checkpoint(folder)
    schema = checkpoint.schema()
    record = torch.zeros(schema.record_bytes, dtype=torch.uint8)
    expected = (
        rf"{shard_of(folder, EXPERT).name}: tensor {EXPERT} has shape {found} for up_proj.weight, "
        r"expected \(32, 64\) of torch.bfloat16"
    )

    with pytest.raises(CheckpointError, match=expected):
        checkpoint.check(checkpoint.model_shape(), schema)
    with pytest.raises(CheckpointError, match=expected):
        checkpoint.repack(2, 1, schema, record)


@pytest.mark.parametrize("number", ["01", "\u0663", "9" * 5000, "1\n"])
def test_other_spelling_of_a_number_is_no_expert(
    folder: Path, tensors: Tensors, number: str
) -> None:
    name = EXPERT.replace("experts.1", f"experts.{number}")
    write_shards(folder, tensors | {name: torch.zeros(1)})

    checkpoint = Checkpoint(folder)

    assert torch.equal(checkpoint.part(2, 1, "up_proj.weight"), tensors[EXPERT])
    assert name in checkpoint.dense_weights()


def test_unknown_tensor_of_an_expert_is_refused(folder: Path, tensors: Tensors) -> None:
    name = EXPERT.replace(".weight", ".weight_mystery")
    write_shards(folder, tensors | {name: torch.zeros(1)})

    with pytest.raises(CheckpointError, match=rf"{name} .* unknown suffix '\.weight_mystery'"):
        Checkpoint(folder)


def test_expert_beyond_the_config_s_number_is_refused(folder: Path, tensors: Tensors) -> None:
    name = EXPERT.replace("experts.1", "experts.4")
    write_shards(folder, tensors | {name: tensors[EXPERT]})

    with pytest.raises(CheckpointError, match=rf"{name} is of expert 4, expected 0\.\.3 as config"):
        Checkpoint(folder)


def test_router_of_another_size_is_refused(folder: Path, tensors: Tensors) -> None:
    name = "model.layers.2.mlp.gate.weight"
    write_shards(folder, tensors | {name: torch.ones(5, 64)})
    checkpoint = Checkpoint(folder)

    with pytest.raises(CheckpointError, match=rf"{name} has shape \(5, 64\), expected \(4, 64\)"):
        checkpoint.check(checkpoint.model_shape(), checkpoint.schema())


def test_model_with_a_dense_layer_as_moe_layer_is_refused(folder: Path) -> None:
    checkpoint = Checkpoint(folder)
    model = replace(checkpoint.model_shape(), layer_ids=(0, 1))

    with pytest.raises(CheckpointError, match=r"layer 0 has no routed experts, expected one of 1"):
        checkpoint.check(model, checkpoint.schema())


def test_layers_of_multi_token_prediction_follow_the_others(folder: Path) -> None:
    checkpoint = Checkpoint(folder)

    assert (checkpoint.moe_layers, checkpoint.mtp_layers) == ((1, 2), (3,))
    assert checkpoint.model_shape().layer_ids == (1, 2)
    assert checkpoint.model_shape(include_mtp=True).layer_ids == (1, 2, 3)


def test_mtp_layers_that_the_commands_leave_out_are_named(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, settings = Checkpoint(folder).model_shape(), ModelSettings(checkpoint=folder)
    schema, links = Checkpoint(folder).schema(), HostCacheSettings(num_readers=1)
    words = "neither served nor balanced: the engine loads their experts itself"

    found = check_checkpoint(settings, model)
    build_host_cache(links, HostCacheAddress("mtp", bytes(16)), model, schema, folder).close()

    assert found.endswith(f"2 MoE layers x 4 experts in bfloat16; MTP layers 3 are {words}")
    assert f"layers 3 of multi-token prediction (MTP) are {words}" in caplog.text
    assert model_shape(settings).layer_ids == (1, 2)


QWEN35 = {
    "model_type": "qwen3_5_moe_text",
    "num_experts": 4,
    "mlp_only_layers": [0],
    "shared_expert_intermediate_size": 32,
}


def test_mtp_layers_that_are_stacked_beside_separate_ones_are_found(
    folder: Path, tensors: Tensors
) -> None:
    """Quantised Qwen3.5 checkpoints may leave the experts of multi-token prediction fused."""
    last = {n: t for n, t in tensors.items() if n.startswith("model.layers.3.")}
    stem, mtp = "model.layers.3.mlp.experts", "mtp.layers.0.mlp"
    gate_up = [
        torch.cat([last[f"{stem}.{e}.{part}_proj.weight"] for part in ("gate", "up")])
        for e in range(4)
    ]
    down = [last[f"{stem}.{e}.down_proj.weight"] for e in range(4)]
    fused = {
        f"{mtp}.experts.gate_up_proj": torch.stack(gate_up),
        f"{mtp}.experts.down_proj": torch.stack(down),
        f"{mtp}.gate.weight": torch.ones(4, 64),
    }
    write_shards(folder, {n: t for n, t in tensors.items() if n not in last} | fused)
    change_config(folder, **QWEN35)
    checkpoint = Checkpoint(folder)
    schema = ExpertSchema.swiglu(64, 32, torch.bfloat16)

    assert (checkpoint.moe_layers, checkpoint.mtp_layers) == ((1, 2), (3,))
    checkpoint.check(checkpoint.model_shape(include_mtp=True), schema)
    assert torch.equal(checkpoint.part(3, 2, "up_proj.weight"), last[f"{stem}.2.up_proj.weight"])
    assert not any(".experts." in name for name in checkpoint.dense_weights())


def test_mtp_layers_with_a_prefix_of_their_own_are_found(folder: Path, tensors: Tensors) -> None:
    """Qwen3-Next has ``mtp.layers.0`` beside ``model.layers.0``."""
    renamed = {n.replace("model.layers.3.", "mtp.layers.0."): t for n, t in tensors.items()}
    write_shards(folder, renamed)
    change_config(
        folder,
        model_type="qwen3_next",
        num_experts=4,
        mlp_only_layers=[0],
        decoder_sparse_step=1,
        shared_expert_intermediate_size=32,
    )
    checkpoint = Checkpoint(folder)

    assert (checkpoint.moe_layers, checkpoint.mtp_layers) == ((1, 2), (3,))
    assert torch.equal(
        checkpoint.part(3, 2, "down_proj.weight"),
        renamed["mtp.layers.0.mlp.experts.2.down_proj.weight"],
    )
    assert checkpoint.router(3)["weight"].shape == (4, 64)
