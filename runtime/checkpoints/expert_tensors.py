"""Where the tensors of each routed expert lie: ranges of bytes, and matrices within them.

A *part* is one stored tensor of an expert: projection and suffix, as ``gate_proj.weight`` or
``down_proj_blocks``. What a suffix means is not known here, only that it belongs to the expert.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

import torch

from eplb.core.model import spans
from eplb.errors import CheckpointError
from runtime.checkpoints.families import GATE, GATE_UP, UP, ExpertLayout
from runtime.checkpoints.model_config import CONFIG_FILE, ModelConfig
from runtime.checkpoints.weight_files import StoredTensor, WeightFiles

# One spelling for each number, so that no two names are one tensor.
NUMBER = "(0|[1-9][0-9]{0,5})"
EVERY_EXPERT = -1  # in place of an expert's number, where one tensor has all of them
# Suffixes of plain matrices and biases, which can be read out of fused and transposed tensors.
_PLAIN: dict[str, tuple[str, ...]] = {".weight": ("", ".weight"), ".bias": ("_bias", ".bias")}


@dataclass(frozen=True)
class PartSource:
    """Bytes to read for a part, and the part within them: rows, of the transpose perhaps."""

    stored: StoredTensor
    shape: tuple[int, ...]  # the part's
    is_transposed: bool = False
    rows: tuple[int | None, ...] = (None, None, None)  # first, end, step

    @property
    def is_plain_run(self) -> bool:
        """Whether the part is exactly these bytes."""
        return not self.is_transposed and self.rows == (None, None, None)


@dataclass(frozen=True)
class _Layer:
    """The routed experts of one layer: how they are stored, and under which names."""

    layout: ExpertLayout
    prefix: str  # the prefix of all tensors of the layer
    names: dict[tuple[int, str], str]  # tensor by expert, or EVERY_EXPERT, and part

    @cached_property
    def parts(self) -> tuple[str, ...]:
        """Parts of which each expert consists, in the order of a record."""
        found = {part for _, part in self.names}
        order = (p + suffix for p in self.layout.names for suffix in self.layout.suffixes)
        return tuple(part for part in order if part in found)


class ExpertTensors:
    """The routed experts of a checkpoint, found by the family's description.

    Raises:
        CheckpointError: the index has no experts, or some in other layers than config.json says, or
            a tensor of theirs that no description names.
    """

    def __init__(self, files: WeightFiles, config: ModelConfig) -> None:
        self._files, self._family, self._figures = files, config.family, config.figures
        num_layers, moe_layers = config.figures.num_layers, config.figures.moe_layers
        # Experts without computation: some libraries save them, though nothing reads them.
        self._without_computation: set[str] = set()
        self._layers, prefix, layout = self._find_layers()
        self.mtp_layers: tuple[int, ...] = ()
        for template in config.family.mtp_layers:
            found = self._layers
            # Some checkpoints leave these layers in the layout that they had when quantised.
            for other in (layout, *config.family.layouts) if template != prefix else ():
                if found := self._collect(template, other, num_layers):
                    break
            last = {layer: one for layer, one in found.items() if layer >= num_layers}
            self._layers |= last
            self.mtp_layers = tuple(sorted({*self.mtp_layers, *last}))
        in_files = tuple(sorted(layer for layer in self._layers if layer < num_layers))
        if in_files != moe_layers:
            raise CheckpointError(
                f"{files.path / CONFIG_FILE}: routed experts in layers "
                f"{spans(moe_layers) or 'none'}, expected {spans(in_files) or 'none'} as in "
                "the weight files"
            )

    def _find_layers(self) -> tuple[dict[int, _Layer], str, ExpertLayout]:
        """Layers by the first prefix and layout of the family that the index has, and those."""
        family = self._family
        for prefix, layout in product(family.layers, family.layouts):
            if found := self._collect(prefix, layout, 0):
                return found, prefix, layout
        looked_for = ", ".join(
            f"{p}.{lay.down}" for p, lay in product(family.layers, family.layouts)
        )
        raise CheckpointError(
            f"{self._files.path}: no routed experts of {family.name} in the weight files, "
            f"expected tensors named {looked_for}"
        )

    def _collect(self, prefix: str, layout: ExpertLayout, first_layer: int) -> dict[int, _Layer]:
        """All layers whose names have a prefix; they are counted from ``first_layer``."""
        start = re.sub(r"\\{(layer|mtp)\\}", NUMBER, re.escape(prefix))
        patterns = {
            projection: re.compile(
                start
                + re.escape(f".{name}").replace(re.escape("{expert}"), NUMBER)
                + r"((?:[._].*)?)"  # so that "gate_proj" is not found in "gate_projector"
            )
            for projection, name in layout.names.items()
        }
        layers: dict[int, _Layer] = {}
        for name, (projection, pattern) in product(self._files, patterns.items()):
            if (match := pattern.fullmatch(name)) is None:
                continue
            number, *given, suffix = match.groups()
            expert = int(given[0]) if given else EVERY_EXPERT
            self._check_name(name, suffix, expert, layout)
            if expert >= self._figures.num_experts:
                self._without_computation.add(name)
                continue
            layer = first_layer + int(number)
            own_prefix = prefix.format(layer=layer, mtp=layer - self._figures.num_layers)
            found = layers.setdefault(layer, _Layer(layout, own_prefix, {}))
            found.names[expert, projection + suffix] = name
        return layers

    def _check_name(self, name: str, suffix: str, expert: int, layout: ExpertLayout) -> None:
        if suffix not in layout.suffixes:
            raise CheckpointError(
                f"{self._files.path}: tensor {name} belongs to a routed expert and has the unknown "
                f"suffix {suffix!r}, expected one of: {', '.join(layout.suffixes)}"
            )
        routes = self._figures.num_experts + self._figures.num_zero
        if expert >= routes:
            raise CheckpointError(
                f"{self._files.path}: tensor {name} is of expert {expert}, "
                f"expected 0..{routes - 1} as {CONFIG_FILE} says"
            )

    @cached_property
    def routed(self) -> frozenset[str]:
        """Names of all tensors that belong to routed experts."""
        names = {name for layer in self._layers.values() for name in layer.names.values()}
        return frozenset(names | self._without_computation)

    def prefix(self, layer: int) -> str:
        """Prefix of a layer's tensors."""
        return self._layer(layer).prefix

    def parts(self, layer: int) -> tuple[str, ...]:
        """Parts of which each expert of a layer consists, in the order of a record.

        Raises:
            CheckpointError: the layer has no routed experts.
        """
        return self._layer(layer).parts

    def _layer(self, layer: int) -> _Layer:
        known = (*self._figures.moe_layers, *self.mtp_layers)
        if layer not in known:
            raise CheckpointError(
                f"{self._files.path}: layer {layer} has no routed experts, "
                f"expected one of {spans(known) or 'none'}"
            )
        return self._layers[layer]

    def range(self, layer: int, expert: int, part: str) -> StoredTensor:
        """Find one part of one expert, without reading it.

        Raises:
            CheckpointError: there is no such layer, expert or tensor.
        """
        num_experts, found = self._figures.num_experts, self._layer(layer)
        if not 0 <= expert < num_experts:
            raise CheckpointError(
                f"{self._files.path}: layer {layer} has no expert {expert}, "
                f"expected 0..{num_experts - 1}"
            )
        is_stacked = found.layout.is_stacked
        name = found.names.get((EVERY_EXPERT if is_stacked else expert, part))
        tensor = self._files.stored(name or _missing_name(found, expert, part))
        # One scale for all experts: each has it.
        is_common = tensor.shape == () or (tensor.shape == (1,) and num_experts > 1)
        if not is_stacked or is_common:
            return tensor
        if tensor.shape[0] != num_experts:
            raise CheckpointError(
                f"{self._files.path / tensor.file}: tensor {tensor.name} has shape "
                f"{tensor.shape}, expected {num_experts} experts as the first dimension"
            )
        size = tensor.num_bytes // num_experts
        start = tensor.start + expert * size
        return replace(tensor, shape=tensor.shape[1:], start=start, end=start + size)

    def locate(self, layer: int, expert: int, part: str) -> PartSource:
        """Find a part as it is stored; else a plain matrix [out, in] or bias inside of one.

        A matrix ``gate_proj.weight`` may lie in ``gate_proj``, ``gate_up_proj`` or the like.

        Raises:
            CheckpointError: there is no such layer, expert or tensor.
        """
        holder, layout = self.holder(layer, part), self._layer(layer).layout
        stored = self.range(layer, expert, holder)
        if holder == part:
            return PartSource(stored, stored.shape)
        is_transposed = layout.is_transposed and len(stored.shape) == 2
        shape = stored.shape[::-1] if is_transposed else stored.shape
        if not holder.startswith(GATE_UP):
            return PartSource(stored, shape, is_transposed)
        second, half = int(part.startswith(UP)), (shape[0] // 2, *shape[1:])
        if layout.is_interleaved:
            return PartSource(stored, half, is_transposed, (second, None, 2))
        if is_transposed:
            return PartSource(stored, half, True, (second * half[0], (second + 1) * half[0], None))
        size = stored.num_bytes // 2  # the half is a range of bytes itself
        start = stored.start + second * size
        return PartSource(replace(stored, shape=half, start=start, end=start + size), half)

    def holder(self, layer: int, part: str) -> str:
        """Return the stored part that has ``part``, or ``part`` itself."""
        stored = self.parts(layer)
        projection, dot, kind = part.partition(".")
        if part in stored:
            return part
        holders = [projection, GATE_UP] if projection in (GATE, UP) else [projection]
        within = [one + suffix for one in holders for suffix in _PLAIN.get(dot + kind, ())]
        return next((holder for holder in within if holder in stored), part)

    def read(self, source: PartSource) -> torch.Tensor:
        """Read a part."""
        tensor = self._files.read(source.stored)
        if source.is_plain_run:
            return tensor
        return (tensor.T if source.is_transposed else tensor)[slice(*source.rows)]


def _missing_name(layer: _Layer, expert: int, part: str) -> str:
    """Name that a part would have."""
    for projection, name in layer.layout.names.items():
        suffix = part.removeprefix(projection)
        if part.startswith(projection) and suffix in layer.layout.suffixes:
            return f"{layer.prefix}.{name.format(expert=expert)}{suffix}"
    return f"{layer.prefix} expert {expert} {part}"
