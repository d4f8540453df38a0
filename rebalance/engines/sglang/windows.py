"""Tokens of each slot, counted where the engine's recorder counts, and windows of them.

Counting is one addition on the device for each pass; the recorder has removed padding (its ids are
-1). Sums are int64: the recorder's own are int32. A round hands a window to background threads.

Shapes:  L rows of the engine's map, E experts, S slots, C slots of one rank.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from eplb.core.load import LoadSample, Phase

IntArray = NDArray[np.int64]

# By name, because the numbers differ between releases of the engine.
PHASES: dict[str, Phase] = {
    "EXTEND": "prefill",
    "SPLIT_PREFILL": "prefill",
    "PREBUILT": "prefill",
    "DECODE": "decode",
    "TARGET_VERIFY": "decode",
    "MIXED": "mixed",
}


@dataclass
class LoadTap:
    """Counts of one rank; ``counts`` is made with the first pass, on the engine's device."""

    counts: torch.Tensor | None = None  # [L, S] int64
    modes: Counter[str] = field(default_factory=Counter)  # forward modes of the passes
    mode: str = ""  # of the last pass

    def add(self, global_physical_count: torch.Tensor) -> None:
        """Add the counts [L, S] of one pass."""
        if self.counts is None:
            # A tensor made in inference mode could not be reduced outside it.
            with torch.inference_mode(False):
                self.counts = torch.zeros_like(global_physical_count, dtype=torch.int64)
        self.counts += global_physical_count

    def see(self, forward_batch: Any) -> None:
        """Note the forward mode of the pass that begins."""
        self.mode = forward_batch.forward_mode.name
        self.modes[self.mode] += 1

    def take(self, shape: tuple[int, int], device: torch.device) -> torch.Tensor:
        """Return the counts and begin anew; zeros before the first pass was recorded."""
        taken = self.counts
        self.counts = None
        if taken is None:
            return torch.zeros(shape, dtype=torch.int64, device=device)
        return taken

    def phase(self) -> Phase:
        """Return the phase of the passes since the last call; idle ones have none."""
        seen = {PHASES.get(mode, "mixed") for mode in self.modes if mode != "IDLE"}
        self.modes.clear()
        return seen.pop() if len(seen) == 1 else "mixed"


@dataclass(frozen=True, eq=False)
class Shape:
    """What stays the same while the engine runs."""

    deployment: str
    run: str
    rank: int
    num_ranks: int
    num_nodes: int
    num_experts: int
    num_slots: int
    num_groups: int
    expert_bytes: int
    algorithm: str
    movable: NDArray[np.bool_]  # [L] rows with routed experts


@dataclass(frozen=True, eq=False)
class Window:
    """Counts of some passes of all ranks, under one map."""

    counts: torch.Tensor  # [L, S] on the host, complete once ``copied``
    copied: Any  # a CUDA event; None where the counts were on the host
    held: IntArray  # [L, S] the map of these passes
    weights: IntArray  # [L, S] of its slots; 0 before the first plan
    first: int  # pass
    last: int
    phase: Phase
    generation: int
    time: float

    def by_expert(self, num_experts: int) -> IntArray:
        """[L, E] tokens of each expert."""
        tokens = np.zeros((len(self.held), num_experts), dtype=np.int64)
        np.add.at(tokens, (np.arange(len(self.held))[:, None], self.held), self.on_host())
        return tokens

    def on_host(self) -> IntArray:
        """[L, S] counts, once they are copied."""
        if self.copied is not None:
            self.copied.synchronize()
        counts: IntArray = self.counts.numpy()
        return counts

    def sample(self, shape: Shape, sequence: int) -> LoadSample:
        """What the slots of this rank received, in rows with routed experts."""
        each = self.held.shape[1] // shape.num_ranks
        own = slice(shape.rank * each, (shape.rank + 1) * each)
        return LoadSample(
            deployment=shape.deployment,
            run=shape.run,
            rank=shape.rank,
            sequence=sequence,
            time=self.time,
            first_step=self.first,
            last_step=self.last,
            phase=self.phase,
            generation=self.generation,
            slot_to_expert=self.held[shape.movable, own].astype(np.int32),
            tokens=self.on_host()[shape.movable, own],
        )


def on_host(counts: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Counts on the host, and the event that they are complete with; no wait for the device."""
    if counts.device.type != "cuda":
        return counts.cpu(), None
    host = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True)
    host.copy_(counts, non_blocking=True)
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return host, event
