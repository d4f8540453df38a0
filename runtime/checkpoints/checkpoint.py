"""Weights on disk: sharded safetensors of any described family, read expert by expert.

Layers are the model's own numbers throughout, as in ``ModelShape.layer_ids``.
"""

from __future__ import annotations

from pathlib import Path

import torch

from eplb.core.model import ModelShape
from eplb.errors import CheckpointError
from runtime.checkpoints.expert_tensors import ExpertTensors, PartSource
from runtime.checkpoints.families import DOWN, GATE, GATE_UP, OWN_MODEL, UP
from runtime.checkpoints.identity import INDEX_FILE, Identity
from runtime.checkpoints.model_config import read_config
from runtime.checkpoints.own_model import SCALE_SUFFIX, dense_shapes, scale_blocks
from runtime.checkpoints.weight_files import StoredTensor, WeightFiles
from runtime.experts import ExpertSchema, TensorSpec

__all__ = ["INDEX_FILE", "Checkpoint"]


class Checkpoint:
    """An opened checkpoint. Every shard's header is read at once, so damage shows at the start.

    Args:
        path: folder with config.json, the weight files and their index.
        expected: identity at an earlier start; a checkpoint that changed since is refused.

    Raises:
        CheckpointError: no index, a shard is missing, truncated or damaged, the family is unknown,
            config.json does not fit the weight files, or they changed.
    """

    def __init__(self, path: Path, *, expected: Identity | None = None) -> None:
        self.path = path
        self._files = WeightFiles(path)
        self.config = read_config(path)
        self._experts = ExpertTensors(self._files, self.config)
        if expected is not None and (change := expected.difference(self.identity(), path)):
            raise CheckpointError(f"{path}: the checkpoint changed since the last start: {change}")

    def identity(self) -> Identity:
        """State of the files now: the next start can be refused another one.

        Raises:
            CheckpointError: a file is missing.
        """
        return self._files.identity()

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Layers with routed experts, without those of multi-token prediction."""
        return self.config.figures.moe_layers

    @property
    def mtp_layers(self) -> tuple[int, ...]:
        """Layers of multi-token prediction that have routed experts; numbered after all others."""
        return self._experts.mtp_layers

    def model_shape(self, *, include_mtp: bool = False) -> ModelShape:
        """Describe the model for the planner. ``expert_bytes`` are those of the files.

        Raises:
            ConfigError: figures of config.json that no model can have.
        """
        layers = self.moe_layers
        return self.config.figures.shape(
            layers + self.mtp_layers if include_mtp else layers,
            sum(spec.num_bytes for spec in self.schema(layers[0]).tensors),
        )

    def schema(self, layer: int | None = None) -> ExpertSchema:
        """Schema of records that hold an expert's tensors as they are stored.

        Args:
            layer: whose experts; None: the first with routed experts.

        Raises:
            CheckpointError: the layer has no routed experts.
        """
        layer = self.moe_layers[0] if layer is None else layer
        return ExpertSchema(
            tuple(
                TensorSpec(part, where.shape, where.dtype, (part,))
                for part in self._experts.parts(layer)
                for where in (self._experts.range(layer, 0, part),)
            )
        )

    def range(self, layer: int, expert: int, part: str) -> StoredTensor:
        """File and bytes of one stored tensor of an expert.

        Raises:
            CheckpointError: there is no such layer, expert or tensor.
        """
        return self._experts.range(layer, expert, part)

    def part(self, layer: int, expert: int, part: str) -> torch.Tensor:
        """Read one tensor of an expert: as stored, or a plain matrix [out, in] that lies in it.

        Raises:
            CheckpointError: there is no such layer, expert or tensor.
        """
        return self._experts.read(self._experts.locate(layer, expert, part))

    def router(self, layer: int) -> dict[str, torch.Tensor]:
        """Read the router's tensors of a layer by role: weight, bias, correction_bias, ..."""
        names = self._router_names(layer)
        return {role: self.tensor(name) for role, name in names.items()}

    def _router_names(self, layer: int) -> dict[str, str]:
        prefix = self._experts.prefix(layer)
        named = {role: f"{prefix}.{name}" for role, name in self.config.family.router}
        return {role: name for role, name in named.items() if name in self or role == "weight"}

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def tensor(self, name: str) -> torch.Tensor:
        """Read one tensor.

        Raises:
            CheckpointError: the index or its shard has no such tensor.
        """
        return self._files.read(self._files.stored(name))

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it.

        Raises:
            CheckpointError: the index or its shard has no such tensor.
        """
        return self._files.stored(name).shape

    def repack(self, layer: int, expert: int, schema: ExpertSchema, record: torch.Tensor) -> None:
        """Fill a record [record_bytes] with one routed expert, in the layout of the schema.

        Raises:
            CheckpointError: a tensor is missing, or has another shape or type than the schema.
        """
        target = record if record.device.type == "cpu" else torch.empty_like(record, device="cpu")
        end = 0
        for spec, start in schema.spans():
            target[end:start].zero_()  # a digest covers padding too
            end = start + spec.num_bytes
            for part, into in zip(
                spec.parts, target[start:end].chunk(len(spec.parts)), strict=True
            ):
                source = self._fitting(layer, expert, part, schema.part_shape(spec), spec.dtype)
                if source.is_plain_run:
                    self._files.read_into(source.stored, into)
                else:
                    tensor = self._experts.read(source).contiguous()
                    into.copy_(tensor.view(torch.uint8).flatten())
        target[end:].zero_()
        if target is not record:
            record.copy_(target)

    def _fitting(
        self, layer: int, expert: int, part: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> PartSource:
        """Find a part of the shape and type that a record needs."""
        source = self._experts.locate(layer, expert, part)
        stored = source.stored
        if (source.shape, stored.dtype) != (shape, dtype):
            raise CheckpointError(
                f"{self.path / stored.file}: tensor {stored.name} has shape {source.shape} of "
                f"{stored.dtype} for {part}, expected {shape} of {dtype}"
            )
        return source

    def dense_weights(self) -> dict[str, torch.Tensor]:
        """Read everything but the routed experts: what every rank holds."""
        routed = self._experts.routed
        return {name: self.tensor(name) for name in self._files if name not in routed}

    def reference_weights(self) -> dict[str, torch.Tensor]:
        """Read everything in float32, FP8 weights times their block scales: what they stand for."""
        weights = {}
        for name in self._files:
            if not name.endswith(SCALE_SUFFIX):
                tensor = self.tensor(name)
                has_scale = name + SCALE_SUFFIX in self
                scale = self.tensor(name + SCALE_SUFFIX) if has_scale else None
                weights[name] = tensor.float() if scale is None else scale_blocks(tensor, scale)
        return weights

    def check(self, model: ModelShape, schema: ExpertSchema) -> None:
        """Refuse a checkpoint that is not of this model, before anything is started on it.

        Raises:
            CheckpointError: a tensor is missing or has another shape or type than the model needs,
                or an expert has a tensor that the schema would leave behind.
        """
        if self.config.family is OWN_MODEL:
            vocabulary = self.shape("model.embed_tokens.weight")[0]
            for name, shape in dense_shapes(model, vocabulary):
                self._check_shape(name, shape)
        for layer in model.layer_ids:
            self._check_experts(layer, model, schema)

    def _check_experts(self, layer: int, model: ModelShape, schema: ExpertSchema) -> None:
        parts = self._experts.parts(layer)
        routes = model.num_experts + self.config.figures.num_zero
        self._check_shape(self._router_names(layer)["weight"], (routes, model.hidden))
        self._check_sizes(layer, model)
        taken = set()
        for expert in range(model.num_experts):
            for spec in schema.tensors:
                for part in spec.parts:
                    shape = schema.part_shape(spec)
                    source = self._fitting(layer, expert, part, shape, spec.dtype)
                    taken.add(source.stored.name)
        for part in parts:
            left = self._experts.range(layer, 0, part)
            if left.name not in taken:
                held = ", ".join(part for spec in schema.tensors for part in spec.parts)
                raise CheckpointError(
                    f"{self.path / left.file}: tensor {left.name} belongs to an expert, expected "
                    f"it among the parts of a record: {held}"
                )

    def _check_sizes(self, layer: int, model: ModelShape) -> None:
        """Matrices that are not packed have the sizes of the model, whatever the schema."""
        up, down = (model.intermediate, model.hidden), (model.hidden, model.intermediate)
        for projection, shape in ((GATE, up), (UP, up), (DOWN, down)):
            part = f"{projection}.weight"
            if self._experts.holder(layer, part) in self._experts.parts(layer):
                dtype = self._experts.locate(layer, 0, part).stored.dtype
                if dtype.is_floating_point:
                    self._fitting(layer, 0, part, shape, dtype)

    def _check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        stored = self._files.stored(name)
        if stored.shape != shape:
            raise CheckpointError(
                f"{self.path / stored.file}: tensor {name} has shape {stored.shape}, "
                f"expected {shape} for this model"
            )


def transformers_schema(checkpoint: Checkpoint) -> ExpertSchema:
    """Schema of records as the experts modules of the ``transformers`` library read them.

    A checkpoint that has the library's parameters (gpt-oss, with biases) is taken as it is stored.
    Of one with a tensor for each matrix, gate and up are stacked, as the library does at loading.

    Raises:
        CheckpointError: a matrix is missing: the weights are quantised in a way of their own.
    """
    stored = checkpoint.schema()
    if GATE_UP in {spec.name for spec in stored.tensors}:
        return stored
    layer, specs = checkpoint.moe_layers[0], list[TensorSpec]()
    for name, parts in ((GATE_UP, (f"{GATE}.weight", f"{UP}.weight")), (DOWN, (f"{DOWN}.weight",))):
        first = checkpoint.part(layer, 0, parts[0])
        shape = (len(parts) * first.shape[0], *first.shape[1:])
        specs.append(TensorSpec(name, shape, first.dtype, parts))
    return ExpertSchema(tuple(specs))
