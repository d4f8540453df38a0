"""Reference model in one process, written for clarity: it defines correct answers.

No slots, no replicas, no exchange: every expert is looked up by its own name and run on the tokens
that chose it. The distributed runtime must agree under every placement and in mid-migration.

Shapes:  B sequences, N positions, T = B * N tokens, H hidden, E experts, K top-k.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from eplb.core.model import ModelShape
from runtime.checkpoints.own_model import Weights, expert_name, layer_name
from runtime.model.compute import swiglu
from runtime.model.moe import Forward, attended, normalise

TIE = 1e-4  # router logits nearer than this are a tie: rounding may choose either expert


@dataclass(frozen=True)
class Check:
    """Difference between an answer of the runtime and the reference."""

    max_error: float  # largest relative error of a hidden state
    wrong_routes: int  # choices of experts that no tie explains


class ReferenceModel:
    """All weights of the model in one process."""

    def __init__(self, model: ModelShape, weights: Weights, *, tie: float = TIE) -> None:
        self._model, self._weights, self._tie = model, weights, tie

    @torch.inference_mode()
    def check(self, token_ids: torch.Tensor, answer: Forward, *, forced: bool = False) -> Check:
        """Compare an answer for token ids [B, N] with what this model computes.

        The reference follows the answer's choice of experts, so that rounding in one layer does
        not cascade through the next layer's top-k; but it refuses a choice that its own router
        would not make, except among logits that are equal to within ``tie``.
        """
        hidden = self._weights["model.embed_tokens.weight"][token_ids]
        wrong_routes = 0
        for layer in range(self._model.num_layers):
            name = layer_name(self._model.layer_ids[layer])
            hidden, tokens, logits = attended(self._weights, name, hidden)
            experts = answer.experts[layer]
            if not forced:
                wrong_routes += self._wrong_routes(logits, experts)
            # Negative ids are a recorded trace's padding: any weight will do, nothing is added.
            weights = torch.softmax(logits.gather(1, experts.clamp(min=0)), dim=-1)
            hidden = hidden + self._experts(layer, tokens, experts, weights).view_as(hidden)
        expected = normalise(hidden).flatten(0, 1)
        distance = (answer.hidden.float() - expected).norm(dim=-1) / expected.norm(dim=-1)
        # NaN must not pass for small: max() over a NaN is NaN, and NaN <= limit is false.
        return Check(float(distance.max()), wrong_routes)

    def _wrong_routes(self, logits: torch.Tensor, experts: torch.Tensor) -> int:
        chosen = logits.gather(1, experts)
        threshold = torch.topk(logits, self._model.top_k, dim=-1).values[:, -1:]
        too_low = (chosen < threshold - self._tie).sum()
        in_order = experts.sort(dim=1).values
        repeated = (in_order[:, 1:] == in_order[:, :-1]).sum()
        return int(too_low + repeated)

    def _experts(
        self, layer: int, tokens: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        output, layer = torch.zeros_like(tokens), self._model.layer_ids[layer]
        for expert in torch.unique(experts[experts >= 0]).tolist():
            token, k = torch.nonzero(experts == expert, as_tuple=True)
            result = self._expert(expert_name(layer, expert), tokens[token])
            output.index_add_(0, token, result * weights[token, k, None])
        if f"{layer_name(layer)}.mlp.shared_experts.gate_proj.weight" in self._weights:
            output += self._expert(f"{layer_name(layer)}.mlp.shared_experts", tokens)
        return output

    def _expert(self, name: str, tokens: torch.Tensor) -> torch.Tensor:
        gate = self._weights[f"{name}.gate_proj.weight"]
        up = self._weights[f"{name}.up_proj.weight"]
        return swiglu(tokens, torch.cat([gate, up]), self._weights[f"{name}.down_proj.weight"])
