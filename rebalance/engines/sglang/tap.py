"""Tokens of each slot, counted where the engine's recorder counts.

Counting is one addition on the device for each pass; the recorder has removed padding (its ids are
-1). Sums are int64: the recorder's own are int32.

Shapes:  L rows of the engine's map, S slots.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from eplb.core.load import Phase

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
class PassTap:
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
