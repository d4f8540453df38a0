"""Weights on disk: sharded safetensors with an index, read by name; and a writer of random ones.

Names are those of DeepSeek-V3's checkpoints: gate, up and down apart, one tensor per expert.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from eplb.core.bounded_json import decode_json
from eplb.core.model import ModelShape
from eplb.errors import CheckpointError
from runtime.experts import SCALE_BLOCK, ExpertSchema

INDEX_FILE = "model.safetensors.index.json"
MAX_INDEX_BYTES = 256 * 2**20  # 91,000 tensors of the largest published model take 9 MB
SCALE_SUFFIX = "_scale_inv"  # after a weight's name: the scales of its 128 x 128 blocks
Weights = Mapping[str, torch.Tensor]  # by checkpoint name


def layer_name(layer: int) -> str:
    """Prefix of a layer's tensors."""
    return f"model.layers.{layer}"


def expert_name(layer: int, expert: int) -> str:
    """Prefix of a routed expert's tensors."""
    return f"{layer_name(layer)}.mlp.experts.{expert}"


class Checkpoint:
    """An opened checkpoint. Every shard's header is read at once, so damage shows at the start.

    Raises:
        CheckpointError: no index, or a shard is missing, truncated or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._shard_of = _read_index(path / INDEX_FILE)
        self._shards: dict[str, Any] = {
            name: _open_shard(path / name) for name in sorted(set(self._shard_of.values()))
        }

    def __contains__(self, name: str) -> bool:
        return name in self._shard_of

    def tensor(self, name: str) -> torch.Tensor:
        """Read one tensor.

        Raises:
            CheckpointError: the index or its shard has no such tensor.
        """
        try:
            tensor: torch.Tensor = self._shards[self._shard_of[name]].get_tensor(name)
        except (KeyError, SafetensorError) as exc:
            raise CheckpointError(f"{self.path}: tensor {name} is missing") from exc
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it.

        Raises:
            CheckpointError: the index or its shard has no such tensor.
        """
        try:
            shard = self._shards[self._shard_of[name]]
            return tuple(shard.get_slice(name).get_shape())
        except (KeyError, SafetensorError) as exc:
            raise CheckpointError(f"{self.path}: tensor {name} is missing") from exc

    def repack(self, layer: int, expert: int, schema: ExpertSchema, record: torch.Tensor) -> None:
        """Write one routed expert into a record [record_bytes], in kernel layout."""
        where = expert_name(layer, expert)
        parts = {
            part: self.tensor(f"{where}.{part}") for spec in schema.tensors for part in spec.parts
        }
        schema.repack(parts, record, where)

    def dense_weights(self) -> dict[str, torch.Tensor]:
        """Read everything but the routed experts: what every rank holds."""
        return {name: self.tensor(name) for name in self._shard_of if ".mlp.experts." not in name}

    def reference_weights(self) -> dict[str, torch.Tensor]:
        """Read everything in float32, FP8 weights times their block scales: what they stand for."""
        weights = {}
        for name in self._shard_of:
            if not name.endswith(SCALE_SUFFIX):
                tensor = self.tensor(name)
                has_scale = name + SCALE_SUFFIX in self
                scale = self.tensor(name + SCALE_SUFFIX) if has_scale else None
                weights[name] = tensor.float() if scale is None else scale_blocks(tensor, scale)
        return weights

    def check(self, model: ModelShape, schema: ExpertSchema) -> None:
        """Refuse a checkpoint that is not of this model, before anything is started on it.

        Raises:
            CheckpointError: a tensor is missing or has another shape than the model needs.
        """
        expected = dict(_dense_shapes(model, self.shape("model.embed_tokens.weight")[0]))
        for layer in range(model.num_layers):
            for expert in range(model.num_experts):
                for spec in schema.tensors:
                    for part in spec.parts:
                        name = f"{expert_name(layer, expert)}.{part}"
                        expected[name] = schema.part_shape(spec)
        for name, shape in expected.items():
            if self.shape(name) != shape:
                raise CheckpointError(
                    f"{self.path}: {name} has shape {self.shape(name)}, "
                    f"expected {shape} for this model"
                )


def _read_index(index: Path) -> dict[str, str]:
    """Shard of each tensor, by name."""
    refusal = f"{index} cannot be read as a checkpoint index"
    try:
        size = index.stat().st_size
        if size > MAX_INDEX_BYTES:
            raise CheckpointError(f"{refusal}: {size} bytes, expected at most {MAX_INDEX_BYTES}")
        found = decode_json(index.read_bytes(), max_bytes=MAX_INDEX_BYTES)
    except (OSError, ValueError) as exc:
        raise CheckpointError(f"{refusal}: {exc}") from exc
    shard_of = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(shard_of, dict) or not all(isinstance(s, str) for s in shard_of.values()):
        raise CheckpointError(f'{refusal}, expected a "weight_map" from tensor names to files')
    outside = next((name for name in shard_of.values() if Path(name).name != name), None)
    if outside is not None:
        raise CheckpointError(f"{refusal}: it names file {outside!r}, expected one beside it")
    return shard_of


def _open_shard(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError as exc:
        raise CheckpointError(f"weight file {path} is missing, the index names it") from exc
    except (OSError, SafetensorError) as exc:
        size = path.stat().st_size
        raise CheckpointError(
            f"weight file {path} of {size} bytes is truncated or damaged: {exc}"
        ) from exc


def _dense_shapes(model: ModelShape, vocabulary: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden = model.hidden
    yield "model.embed_tokens.weight", (vocabulary, hidden)
    for layer in range(model.num_layers):
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
    generator = torch.Generator().manual_seed(seed)
    dense = dict(_dense_shapes(model, vocabulary))
    is_plain = schema.tensors[0].dtype == torch.float32
    weight_map: dict[str, str] = {}
    for layer in range(-1, model.num_layers):  # -1: the embedding
        prefix = "model.embed" if layer < 0 else f"{layer_name(layer)}."
        shard = {}
        for name, shape in dense.items():
            if name.startswith(prefix):
                tensor = torch.randn(shape, generator=generator) * _scale(name, shape)
                shard[name] = tensor if is_plain else tensor.to(torch.bfloat16)
        for expert in range(model.num_experts if layer >= 0 else 0):
            shard |= _random_expert(expert_name(layer, expert), schema, generator)
        file = f"model-{layer + 2:05d}-of-{model.num_layers + 1:05d}.safetensors"
        save_file(shard, path / file)
        weight_map |= dict.fromkeys(shard, file)
    (path / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}, indent=1))


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
