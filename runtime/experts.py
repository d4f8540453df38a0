"""Expert memory of a rank: live slots that serve, and a staging ring.

An expert is one record: all its tensors in the layout that the kernels read, page-aligned, so that
moving an expert is moving one run of bytes and nothing that belongs to it can be left behind.

Shapes:  L MoE layers, C slots of this rank, K staging entries, H hidden, M intermediate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Protocol

import numpy as np
import torch

from eplb.errors import CheckpointError
from runtime.memory.shared import PAGE_BYTES, SharedArena, attach, digest
from runtime.streams import Completion

SCALE_BLOCK = 128  # rows and columns of a weight that share one FP8 scale


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of an expert, and the checkpoint tensors that it is made of, stacked on dim 0."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[str, ...]  # e.g. gate_proj.weight and up_proj.weight

    @property
    def num_bytes(self) -> int:
        """Size of the tensor."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class ExpertSchema:
    """Every tensor that belongs to an expert. What is not named here would not move with it."""

    tensors: tuple[TensorSpec, ...]

    @staticmethod
    def swiglu(hidden: int, intermediate: int, dtype: torch.dtype = torch.float32) -> ExpertSchema:
        """Gate and up fused as the kernel wants them, then down."""
        gate_up = TensorSpec(
            "gate_up", (2 * intermediate, hidden), dtype, ("gate_proj.weight", "up_proj.weight")
        )
        down = TensorSpec("down", (hidden, intermediate), dtype, ("down_proj.weight",))
        return ExpertSchema((gate_up, down))

    @staticmethod
    def swiglu_fp8(hidden: int, intermediate: int) -> ExpertSchema:
        """FP8 weights with a float32 scale for each 128 x 128 block, as DeepSeek-V3 stores them.

        The scales are as much the expert as the weights: moved apart from them they are wrong
        numbers without an error (vLLM pull 34646).
        """
        wide, high = hidden // SCALE_BLOCK, intermediate // SCALE_BLOCK
        gate_up, down = ExpertSchema.swiglu(hidden, intermediate, torch.float8_e4m3fn).tensors
        gate_up_scale = TensorSpec(
            "gate_up_scale",
            (2 * high, wide),
            torch.float32,
            ("gate_proj.weight_scale_inv", "up_proj.weight_scale_inv"),
        )
        down_scale = TensorSpec(
            "down_scale", (wide, high), torch.float32, ("down_proj.weight_scale_inv",)
        )
        return ExpertSchema((gate_up, gate_up_scale, down, down_scale))

    @property
    def record_bytes(self) -> int:
        """Bytes from one record to the next: whole pages."""
        used = sum(spec.num_bytes for spec in self.tensors)
        return -(-used // PAGE_BYTES) * PAGE_BYTES

    def views(self, records: torch.Tensor) -> dict[str, torch.Tensor]:
        """Tensors [..., *shape] of uint8 ``records`` [..., record_bytes], sharing their storage."""
        views, offset = {}, 0
        for spec in self.tensors:
            span = records[..., offset : offset + spec.num_bytes]
            views[spec.name] = span.view(spec.dtype).view(*records.shape[:-1], *spec.shape)
            offset += spec.num_bytes
        return views

    def part_shape(self, spec: TensorSpec) -> tuple[int, ...]:
        """Shape of each checkpoint tensor that ``spec`` is made of."""
        return (spec.shape[0] // len(spec.parts), *spec.shape[1:])

    def repack(self, parts: Mapping[str, torch.Tensor], record: torch.Tensor, where: str) -> None:
        """Write one expert's checkpoint tensors into a record, in kernel layout.

        Raises:
            CheckpointError: a tensor has another shape or type than the model needs.
        """
        views = self.views(record)
        for spec in self.tensors:
            expected = (self.part_shape(spec), spec.dtype)
            for number, name in enumerate(spec.parts):
                part = parts[name]
                if (tuple(part.shape), part.dtype) != expected:
                    raise CheckpointError(
                        f"{where}.{name} has shape {tuple(part.shape)} of {part.dtype}, "
                        f"expected {expected[0]} of {expected[1]}"
                    )
                rows = slice(number * len(part), (number + 1) * len(part))
                # As bytes: copies between FP8 tensors go through float32, twenty times slower.
                views[spec.name][rows].view(torch.uint8).copy_(part.view(torch.uint8))


class Arena(Protocol):
    """One run of bytes that holds a bank."""

    bytes: torch.Tensor  # uint8

    @property
    def handle(self) -> str:
        """How other processes of the host attach, or "" if not by a path."""


def bank_bytes(schema: ExpertSchema, num_layers: int, num_slots: int, num_staging: int) -> int:
    """Size of the arena that a bank of this shape needs."""
    return (num_layers * num_slots + num_staging) * schema.record_bytes


class ExpertBank:
    """A rank's live slots and its staging ring, in one arena that peers on the host can read.

    All memory is reserved here, once: serving never allocates for a migration.
    """

    def __init__(
        self,
        schema: ExpertSchema,
        num_layers: int,
        num_slots: int,
        *,
        num_staging: int,
        arena: Arena | None = None,
    ) -> None:
        self.schema = schema
        self.num_layers, self.num_slots, self.num_staging = num_layers, num_slots, num_staging
        size = schema.record_bytes
        num_live = num_layers * num_slots
        num_bytes = bank_bytes(schema, num_layers, num_slots, num_staging)
        self._arena = arena or SharedArena("eplb-experts", num_bytes)
        # An arena that peers address symmetrically may be larger than this rank's own need.
        records = self._arena.bytes[:num_bytes].view(num_live + num_staging, size)
        self._live = records[:num_live].view(num_layers, num_slots, size)
        self._staging = records[num_live:]
        self._weights = [schema.views(self._live[layer]) for layer in range(num_layers)]

    @property
    def handle(self) -> str:
        """Path by which peers on this host attach (PeerBank); "" for an arena without one."""
        return self._arena.handle

    @property
    def device(self) -> torch.device:
        """The device of the records."""
        return self._live.device

    def live(self, layer: int, slot: int) -> torch.Tensor:
        """Record [record_bytes] of one of this rank's slots, 0..C-1."""
        return self._live[layer, slot]

    def staging(self, entry: int) -> torch.Tensor:
        """Record [record_bytes] of a staging entry, 0..K-1."""
        return self._staging[entry]

    def weights(self, layer: int) -> dict[str, torch.Tensor]:
        """Tensors [C, *shape] that the layer's kernels read: the live slots themselves."""
        return self._weights[layer]

    def swap(self, layer: int, slot: int, entry: int) -> None:
        """Order the copy of a staged record into a live slot. Only between steps."""
        self._live[layer, slot].copy_(self._staging[entry])

    def mark(self) -> Completion:
        """Return the completion of all copies that were ordered so far."""
        return Completion(is_cuda=self._live.is_cuda)

    def digest(self, layer: int, slot: int) -> tuple[int, int]:
        """Digest of the bytes that a live slot holds now."""
        return digest(self._live[layer, slot])


class PeerBank:
    """Another rank's live slots, read without that rank's help."""

    def __init__(self, handle: str, mine: ExpertBank, num_slots: int) -> None:
        size = mine.schema.record_bytes
        num_live = mine.num_layers * num_slots
        arena = attach(handle, (num_live + mine.num_staging) * size)
        self._live = arena[: num_live * size].reshape(mine.num_layers, num_slots, size)

    def read(self, layer: int, slot: int, into: torch.Tensor, offset: int = 0) -> None:
        """Copy the record of one of the peer's slots into ``into``, from byte ``offset`` on."""
        np.copyto(into.numpy(), self._live[layer, slot, offset : offset + len(into)])


class PlainArena:
    """Memory of one device that no other process can read: its ranks feed each other by host."""

    handle = ""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.bytes = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
