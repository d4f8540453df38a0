"""Where the tensors of each routed expert lie: ranges of bytes, and matrices within them.

A *part* is one stored tensor of an expert: projection and suffix, as ``gate_proj.weight`` or
``down_proj_blocks``. What a suffix means is not known here, only that it belongs to the expert.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from eplb.errors import CheckpointError
from runtime.checkpoints.description import GATE, GATE_UP, UP, ExpertLayout
from runtime.checkpoints.expert_names import EVERY_EXPERT, Key, find_names, listed
from runtime.checkpoints.header import StoredTensor
from runtime.checkpoints.model_config import ModelConfig
from runtime.checkpoints.shards import Shards

# Suffixes of plain matrices and biases, which can be read out of fused and transposed tensors.
_PLAIN: dict[str, tuple[str, ...]] = {".weight": ("", ".weight"), ".bias": ("_bias", ".bias")}


@dataclass(frozen=True)
class PartRange:
    """One part of one expert: a range of bytes of a weight file."""

    tensor: StoredTensor
    dtype: torch.dtype
    shape: tuple[int, ...]  # of this expert
    start: int  # byte in the file
    num_bytes: int


@dataclass(frozen=True)
class Source:
    """Bytes to read for a part, and the part within them: rows, of the transpose perhaps."""

    where: PartRange
    shape: tuple[int, ...]  # of the part
    is_transposed: bool = False
    rows: tuple[int | None, ...] = (None, None, None)  # first, end, step

    @property
    def is_plain_run(self) -> bool:
        """Whether the part is exactly these bytes."""
        return not self.is_transposed and self.rows == (None, None, None)


class ExpertTensors:
    """The routed experts of a checkpoint.

    Raises:
        CheckpointError: the index has no experts, or some in other layers than config.json says, or
            a tensor of theirs that no description names.
    """

    def __init__(self, shards: Shards, config: ModelConfig) -> None:
        self._shards, self._config = shards, config
        self._names = find_names(shards, config)
        self.mtp_layers = tuple(sorted(self._names.mtp_prefix))
        self._parts: dict[int, tuple[str, ...]] = {}

    @cached_property
    def routed(self) -> frozenset[str]:
        """Names of all tensors that belong to routed experts."""
        names = {name for names in self._names.of_layer.values() for name in names.values()}
        return frozenset(names | self._names.without_computation)

    def _layout(self, layer: int) -> ExpertLayout:
        return self._names.mtp_layout.get(layer, self._names.layout)

    def prefix(self, layer: int) -> str:
        """Prefix of a layer's tensors."""
        template = self._names.mtp_prefix.get(layer, self._names.prefix)
        return template.format(layer=layer, mtp=layer - self._config.num_layers)

    def parts(self, layer: int) -> tuple[str, ...]:
        """Parts of which each expert of a layer consists, in the order of a record.

        Raises:
            CheckpointError: the layer has no routed experts.
        """
        names = self._of(layer)
        if layer not in self._parts:
            found = {part for _, part in names}
            layout = self._layout(layer)
            order = [p + s for p in layout.names for s in layout.suffixes]
            self._parts[layer] = tuple(part for part in order if part in found)
        return self._parts[layer]

    def _of(self, layer: int) -> dict[Key, str]:
        known = (*self._config.moe_layers, *self.mtp_layers)
        if layer not in known:
            raise CheckpointError(
                f"{self._shards.path}: layer {layer} has no routed experts, "
                f"expected one of {listed(known)}"
            )
        return self._names.of_layer[layer]

    def range(self, layer: int, expert: int, part: str) -> PartRange:
        """Find one part of one expert, without reading it.

        Raises:
            CheckpointError: there is no such layer, expert or tensor.
        """
        num_experts, names = self._config.num_experts, self._of(layer)
        if not 0 <= expert < num_experts:
            raise CheckpointError(
                f"{self._shards.path}: layer {layer} has no expert {expert}, "
                f"expected 0..{num_experts - 1}"
            )
        is_stacked = self._layout(layer).is_stacked
        name = names.get((EVERY_EXPERT if is_stacked else expert, part))
        tensor = self._shards.stored(name or self._name_of(layer, expert, part))
        size = tensor.end - tensor.start
        if not is_stacked:
            return PartRange(tensor, tensor.dtype, tensor.shape, tensor.start, size)
        is_common = tensor.shape == () or (tensor.shape == (1,) and num_experts > 1)
        if is_common:  # one scale for all experts: each has it
            return PartRange(tensor, tensor.dtype, tensor.shape, tensor.start, size)
        if tensor.shape[0] != num_experts:
            raise CheckpointError(
                f"{self._shards.path / tensor.file}: tensor {tensor.name} has shape "
                f"{tensor.shape}, expected {num_experts} experts as the first dimension"
            )
        size //= num_experts
        start = tensor.start + expert * size
        return PartRange(tensor, tensor.dtype, tensor.shape[1:], start, size)

    def _name_of(self, layer: int, expert: int, part: str) -> str:
        """Name that a part would have."""
        layout = self._layout(layer)
        for projection, name in layout.names.items():
            if part.startswith(projection) and part[len(projection) :] in layout.suffixes:
                suffix = part[len(projection) :]
                return f"{self.prefix(layer)}.{name.format(expert=expert)}{suffix}"
        return f"{self.prefix(layer)} expert {expert} {part}"

    def locate(self, layer: int, expert: int, part: str) -> Source:
        """Find a part as it is stored; else a plain matrix [out, in] or bias inside of one.

        A matrix ``gate_proj.weight`` may lie in ``gate_proj``, ``gate_up_proj`` or the like.

        Raises:
            CheckpointError: there is no such layer, expert or tensor.
        """
        holder = self.holder(layer, part)
        where, layout = self.range(layer, expert, holder), self._layout(layer)
        shape, is_transposed = where.shape, layout.is_transposed and len(where.shape) == 2
        if holder == part:
            return Source(where, where.shape)
        shape = shape[::-1] if is_transposed else shape
        if not holder.startswith(GATE_UP):
            return Source(where, shape, is_transposed)
        second, half = int(part.startswith(UP)), (shape[0] // 2, *shape[1:])
        if layout.is_interleaved:
            return Source(where, half, is_transposed, (second, None, 2))
        if is_transposed:
            return Source(where, half, True, (second * half[0], (second + 1) * half[0], None))
        size = where.num_bytes // 2  # the half is a range of bytes itself
        return Source(
            replace(where, shape=half, start=where.start + second * size, num_bytes=size), half
        )

    def holder(self, layer: int, part: str) -> str:
        """Return the stored part that has ``part``, or ``part`` itself."""
        stored = self.parts(layer)
        projection, dot, kind = part.partition(".")
        if part in stored:
            return part
        holders = [projection, GATE_UP] if projection in (GATE, UP) else [projection]
        suffixes = _PLAIN.get(dot + kind, ())
        within = [holder + suffix for holder in holders for suffix in suffixes]
        return next((holder for holder in within if holder in stored), part)

    def read(self, source: Source) -> torch.Tensor:
        """Read a part."""
        raw = torch.empty(source.where.num_bytes, dtype=torch.uint8)
        self._shards.read(source.where.tensor, source.where.start, raw)
        tensor = raw.view(source.where.dtype).view(source.where.shape)
        if source.is_plain_run:
            return tensor
        return (tensor.T if source.is_transposed else tensor)[slice(*source.rows)]
