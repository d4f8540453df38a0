"""Expert memory of a rank: live slots that serve, and a staging ring.

An expert is one record: all its tensors in the layout that the kernels read, page-aligned, so that
moving an expert is moving one run of bytes and nothing that belongs to it can be left behind.

Shapes:  L MoE layers, C slots of this rank, K staging entries, H hidden, M intermediate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from runtime.memory import SharedArena, attach, digest, whole_pages
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

    def spans(self) -> Iterator[tuple[TensorSpec, int]]:
        """Yield each tensor and the byte of a record that it begins at, aligned to its type."""
        offset = 0
        for spec in self.tensors:
            offset = -(-offset // spec.dtype.itemsize) * spec.dtype.itemsize
            yield spec, offset
            offset += spec.num_bytes

    @property
    def record_bytes(self) -> int:
        """Bytes from one record to the next: whole pages."""
        return whole_pages(max(offset + spec.num_bytes for spec, offset in self.spans()))

    def views(self, records: torch.Tensor) -> dict[str, torch.Tensor]:
        """Tensors [..., *shape] of uint8 ``records`` [..., record_bytes], sharing their storage."""
        views = {}
        for spec, offset in self.spans():
            span = records[..., offset : offset + spec.num_bytes]
            views[spec.name] = span.view(spec.dtype).view((*records.shape[:-1], *spec.shape))
        return views

    def part_shape(self, spec: TensorSpec) -> tuple[int, ...]:
        """Shape of each checkpoint tensor that ``spec`` is made of."""
        if len(spec.parts) == 1:
            return spec.shape
        return (spec.shape[0] // len(spec.parts), *spec.shape[1:])


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
    """A rank's live slots and its staging ring, in one ``arena`` that peers on the host can read.

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
        self.arena: Arena = arena or SharedArena("eplb-experts", num_bytes)
        # An arena that peers address symmetrically may be larger than this rank's own need.
        records = self.arena.bytes[:num_bytes].view(num_live + num_staging, size)
        self._live = records[:num_live].view(num_layers, num_slots, size)
        self._staging = records[num_live:]
        self._weights = [schema.views(self._live[layer]) for layer in range(num_layers)]

    @property
    def handle(self) -> str:
        """Path by which peers on this host attach (PeerBank); "" for an arena without one."""
        return self.arena.handle

    @property
    def device(self) -> torch.device:
        """The device of the records."""
        return self._live.device

    def live(self, layer: int, slot: int) -> torch.Tensor:
        """Record [record_bytes] of one of this rank's slots, 0..C-1."""
        return self._live[layer, slot]

    def records(self, layer: int) -> torch.Tensor:
        """Records [C, record_bytes] of a layer's slots."""
        return self._live[layer]

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
    """Another rank's live slots, read without that rank's help.

    Args:
        arena: that rank's memory: the handle of an arena of this host, which is attached, or the
            bytes themselves where a GPU has mapped them.
        mine: the reading rank's bank.
        num_slots: slots of the other rank in each layer.

    Raises:
        MigrationError: the memory cannot be attached.
    """

    def __init__(self, arena: str | torch.Tensor, mine: ExpertBank, num_slots: int) -> None:
        shape = (mine.num_layers, num_slots, mine.schema.record_bytes)
        self._live: NDArray[np.uint8] | torch.Tensor
        if isinstance(arena, str):
            staging_bytes = mine.num_staging * mine.schema.record_bytes
            attached = attach(arena, prod(shape) + staging_bytes)
            self._live = attached[: prod(shape)].reshape(shape)
        else:
            self._live = arena[: prod(shape)].view(shape)

    def read(self, layer: int, slot: int, into: torch.Tensor, offset: int = 0) -> None:
        """Copy the record of one of the peer's slots into ``into``, from byte ``offset`` on.

        A copy from a GPU's memory is ordered on this thread's stream and made by the copy engine.

        Raises:
            RuntimeError: torch cannot order the copy.
        """
        part = self._live[layer, slot, offset : offset + len(into)]
        if isinstance(part, torch.Tensor):
            into.copy_(part, non_blocking=True)
        else:
            np.copyto(into.numpy(), part)


class PlainArena:
    """Memory of one device that no other process can read: ranks exchange records by the host."""

    handle = ""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.bytes = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
