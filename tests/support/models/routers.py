"""Routers of published models: from hidden states to experts and their weights.

Shapes:  T tokens, H hidden, E experts, K top-k, G groups of experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

# Added to a sum of weights that may be 0: all scores of the chosen experts vanished.
EPSILON = 1e-20
GROUP_TOP = 2  # a group is as good as the sum of its two best experts


class Scoring(Enum):
    """How logits become weights."""

    SOFTMAX = "softmax over all experts, then the best K"  # Qwen3, Mixtral, OLMoE
    SIGMOID = "a sigmoid for each expert, then the best K"  # DeepSeek-V3, Kimi, GLM-4.5
    TOP_SOFTMAX = "the best K logits, then softmax over them"  # gpt-oss


@dataclass(frozen=True)
class Router:
    """One layer's router, in float32 throughout.

    A ``correction_bias`` decides which experts are chosen and not how they are weighted. With
    groups, experts of the best ``top_groups`` groups alone are chosen.
    """

    weight: torch.Tensor  # [E, H]
    top_k: int
    scoring: Scoring
    bias: torch.Tensor | None = None  # [E], of the logits
    correction_bias: torch.Tensor | None = None  # [E]
    num_groups: int = 1
    top_groups: int = 1
    is_normalised: bool = False  # weights of a token sum to 1 before they are scaled
    scale: float = 1.0

    def route(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return experts [T, K] and weights [T, K] in float32 for tokens [T, H]."""
        logits = tokens.float() @ self.weight.float().T
        if self.bias is not None:
            logits = logits + self.bias.float()
        if self.scoring is Scoring.TOP_SOFTMAX:
            top, experts = torch.topk(logits, self.top_k, dim=-1)
            return experts, torch.softmax(top, dim=-1) * self.scale
        is_sigmoid = self.scoring is Scoring.SIGMOID
        scores = logits.sigmoid() if is_sigmoid else logits.softmax(dim=-1)
        experts = torch.topk(self._for_choice(scores), self.top_k, dim=-1).indices
        weights = scores.gather(1, experts)
        if self.is_normalised:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + EPSILON)
        return experts, weights * self.scale

    def _for_choice(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores [T, E] by which experts are chosen; minus infinity in groups that are not."""
        if self.correction_bias is not None:
            scores = scores + self.correction_bias.float()
        if self.num_groups == 1:
            return scores
        grouped = scores.view(len(scores), self.num_groups, -1)  # [T, G, E / G]
        of_group = grouped.topk(min(GROUP_TOP, grouped.shape[-1]), dim=-1).values.sum(dim=-1)
        best = of_group.topk(self.top_groups, dim=-1).indices
        is_left_out = torch.ones_like(of_group, dtype=torch.bool).scatter(1, best, False)
        return grouped.masked_fill(is_left_out[:, :, None], -torch.inf).flatten(1)
