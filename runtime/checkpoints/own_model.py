"""The model that the demo and the tests serve: names of its tensors, random weights, its shapes.

Names are those of DeepSeek-V3's checkpoints: gate, up and down apart, one tensor per expert.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from eplb.core.model import ModelShape
from eplb.errors import CheckpointError
from runtime.checkpoints.families import OWN_MODEL
from runtime.checkpoints.identity import INDEX_FILE
from runtime.experts import SCALE_BLOCK, ExpertSchema

SCALE_SUFFIX = "_scale_inv"  # after a weight's name: the scales of its 128 x 128 blocks
Weights = Mapping[str, torch.Tensor]  # tensors by checkpoint name


def layer_name(layer: int) -> str:
    """Prefix of a layer's tensors."""
    return f"model.layers.{layer}"


def expert_name(layer: int, expert: int) -> str:
    """Prefix of a routed expert's tensors."""
    return f"{layer_name(layer)}.mlp.experts.{expert}"


def own_config(model: ModelShape) -> dict[str, object]:
    """Return the config.json of such a model."""
    return {
        "model_type": OWN_MODEL.model_types[0],
        "num_hidden_layers": max(model.layer_ids) + 1,
        "moe_layers": list(model.layer_ids),
        "n_routed_experts": model.num_experts,
        "n_shared_experts": model.num_shared_experts,
        "num_experts_per_tok": model.top_k,
        "hidden_size": model.hidden,
        "moe_intermediate_size": model.intermediate,
    }


def dense_shapes(model: ModelShape, vocabulary: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of all tensors but the routed experts."""
    hidden = model.hidden
    yield "model.embed_tokens.weight", (vocabulary, hidden)
    for layer in model.layer_ids:
        name = layer_name(layer)
        yield f"{name}.self_attn.qkv_proj.weight", (3 * hidden, hidden)
        yield f"{name}.self_attn.o_proj.weight", (hidden, hidden)
        yield f"{name}.mlp.gate.weight", (model.num_experts, hidden)
        if model.num_shared_experts:
            width = model.num_shared_experts * model.intermediate
            for part, shape in (
                ("gate_proj", (width, hidden)),
                ("up_proj", (width, hidden)),
                ("down_proj", (hidden, width)),
            ):
                yield f"{name}.mlp.shared_experts.{part}.weight", shape


def write_random_checkpoint(
    path: Path, model: ModelShape, schema: ExpertSchema, *, vocabulary: int, seed: int
) -> None:
    """Write seeded random weights of a model, one shard per layer. All of it appears, or nothing.

    Raises:
        CheckpointError: the disk is full or read-only.
    """
    # Imported here and below: who serves the model writes none.
    from safetensors import SafetensorError

    unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    try:
        unfinished.mkdir(parents=True)
        _write_shards(unfinished, model, schema, vocabulary, seed)
        unfinished.rename(path)
    except (OSError, SafetensorError) as exc:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise CheckpointError(f"weights cannot be written to {path}: {exc}") from exc


def _scale(name: str, shape: tuple[int, ...]) -> float:
    if name == "model.embed_tokens.weight":
        return 1.0  # looked up, not multiplied
    # Context must weigh as much as the token itself for routes to depend on the kind of text, as
    # they do in trained models: 3 gives a largest expert of 2.7 to 6.7 times the mean and a cosine
    # of 0.6 between code and data (DeepSeek-V2-Lite's tasks: 3.5 to 5.6, and 0.65).
    gain = 3.0 if name.endswith("o_proj.weight") else 1.0
    return gain / math.sqrt(shape[-1])  # fan-in scaling keeps activations near 1


def _write_shards(
    path: Path, model: ModelShape, schema: ExpertSchema, vocabulary: int, seed: int
) -> None:
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    dense = dict(dense_shapes(model, vocabulary))
    is_plain = schema.tensors[0].dtype == torch.float32
    weight_map: dict[str, str] = {}
    for number, layer in enumerate((-1, *model.layer_ids)):  # -1: the embedding
        prefix = "model.embed" if layer < 0 else f"{layer_name(layer)}."
        shard = {}
        for name, shape in dense.items():
            if name.startswith(prefix):
                tensor = torch.randn(shape, generator=generator) * _scale(name, shape)
                shard[name] = tensor if is_plain else tensor.to(torch.bfloat16)
        for expert in range(model.num_experts if layer >= 0 else 0):
            shard |= _random_expert(expert_name(layer, expert), schema, generator)
        file = f"model-{number + 1:05d}-of-{model.num_layers + 1:05d}.safetensors"
        save_file(shard, path / file)
        weight_map |= dict.fromkeys(shard, file)
    (path / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}, indent=1))
    (path / "config.json").write_text(json.dumps(own_config(model), indent=1))


def _random_expert(
    name: str, schema: ExpertSchema, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    parts = {}
    for spec in schema.tensors:
        for part in spec.parts:
            if part.endswith(SCALE_SUFFIX):
                continue  # made with its weight
            shape = schema.part_shape(spec)
            tensor = torch.randn(shape, generator=generator) * _scale(part, shape)
            if spec.dtype == torch.float8_e4m3fn:
                quantised, scale = quantise_blocks(tensor)
                parts[f"{name}.{part}"] = quantised
                parts[f"{name}.{part}{SCALE_SUFFIX}"] = scale
            else:
                parts[f"{name}.{part}"] = tensor.to(spec.dtype)
    return parts


def quantise_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 values and a float32 scale for each 128 x 128 block: weight is about value * scale."""
    blocks = _blocks(weight)
    scale = blocks.abs().amax(dim=(1, 3)) / torch.finfo(torch.float8_e4m3fn).max
    values = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    return values.view(weight.shape), scale


def scale_blocks(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Undo ``quantise_blocks``, in float32."""
    return (_blocks(values.float()) * scale[:, None, :, None]).view(values.shape)


def _blocks(weight: torch.Tensor) -> torch.Tensor:
    rows, columns = (size // SCALE_BLOCK for size in weight.shape)
    return weight.view(rows, SCALE_BLOCK, columns, SCALE_BLOCK)
