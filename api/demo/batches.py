"""The load of a rank of the demo: text whose mix drifts, or recorded routes.

Shapes:  B sequences, N positions, T = B * N tokens, L MoE layers, K top-k.
"""

from __future__ import annotations

import numpy as np
import torch

from api.demo.text import Domain, draw_sequences, mix_at
from api.demo.workers.plan import WorkerPlan


class Batches:
    """A rank's tokens of each step, and their experts when a trace is replayed."""

    def __init__(self, plan: WorkerPlan, rank: int, device: torch.device) -> None:
        self._plan, self._rank, self._device = plan, rank, device
        self._domains: list[Domain] = []
        self._trace: torch.Tensor | None = None
        if plan.text is not None:
            with np.load(plan.text) as archive:
                self._domains = [Domain(name, archive[name]) for name in archive.files]
        else:
            assert plan.trace is not None, "the demo runs on text or on a trace"
            with np.load(plan.trace) as archive:
                self._trace = torch.from_numpy(archive["expert_ids"])

    def at(self, step: int, elapsed_s: float) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(token ids [B, N], experts [L, T, K] by the trace, or None) of a step."""
        plan, rank = self._plan, self._rank
        if self._trace is None:
            mix = mix_at(elapsed_s, plan.drift_period_s, len(self._domains))
            drawn = draw_sequences(self._domains, mix, plan.batch_shape, (plan.seed, step, rank))
            return self._to_device(torch.from_numpy(drawn)), None
        total = self._trace.shape[1]
        first = (step * plan.topology.num_ranks + rank) * plan.tokens_per_rank
        positions = torch.arange(first, first + plan.tokens_per_rank) % total
        ids = (positions % 1024).view(1, -1)  # the text is not recorded; routes are
        forced = self._trace[:, positions].to(torch.int64)
        return self._to_device(ids), self._to_device(forced)

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy without waiting for the stream, where a kernel may be waiting for a dead peer."""
        if self._device.type != "cuda":
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)
