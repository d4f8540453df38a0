"""Tokens of some passes on their way from the device to the host, and no wait for either.

The step hands over a copy that the device has only been asked for. Who needs the figures waits for
them, or looks again later.

Shapes:  L layers, C columns: slots of all ranks, or experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from eplb.core.load import LoadSample, Phase
from rebalance.engines.common.messages import SampleOrigin

IntArray = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Counted:
    """Tokens of some passes under one map."""

    tokens: torch.Tensor  # [L, C] int64 on the host, complete once ``copied``
    copied: Any  # an event of the device; None: the tokens are complete
    held: IntArray | None  # [L, C] expert of each column; None: column e is expert e
    first_step: int
    last_step: int
    phase: Phase
    generation: int
    time: float  # seconds since the epoch

    def on_host(self) -> IntArray:
        """[L, C] tokens, once they are copied."""
        if self.copied is not None:
            self.copied.synchronize()
        tokens: IntArray = self.tokens.numpy()
        return tokens

    def sample(self, origin: SampleOrigin, sequence: int, rows: Any, columns: slice) -> LoadSample:
        """The sample of some rows and columns, with its number."""
        held = self.held
        if held is None:
            held = np.broadcast_to(np.arange(self.tokens.shape[1]), self.tokens.shape)
        return LoadSample(
            origin.deployment,
            origin.info.run,
            origin.rank,
            sequence,
            self.time,
            self.first_step,
            self.last_step,
            self.phase,
            self.generation,
            held[rows, columns].astype(np.int32),
            self.on_host()[rows, columns],
        )


def on_host(tokens: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """A copy on the host, and the event that it is complete with; no wait for the device."""
    if tokens.device.type != "cuda":
        return tokens.clone(), None
    host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
    host.copy_(tokens, non_blocking=True)
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return host, event
