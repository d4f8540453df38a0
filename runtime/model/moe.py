"""One mixture-of-experts layer as a rank runs it, and the model stack that the demo serves.

    route -> choose replicas -> dispatch -> experts -> combine

On a GPU a decode step is one captured CUDA graph, replayed while experts are swapped under it. A
graph holds addresses. Live slots, routing table, counters and the input buffers never move, and
swaps and shares are copies into them between replays, so nothing is ever captured again.

Shapes:  B sequences, N positions, T = B * N tokens, L MoE layers, H hidden, E experts, K top-k,
         C slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from eplb.core.model import ModelShape
from eplb.errors import ConfigError
from runtime.checkpoints.own_model import Weights, layer_name
from runtime.dispatch.all_to_all import Dispatcher, begin_combine
from runtime.model.compute import Experts, swiglu
from runtime.routing import RoutingTable
from runtime.streams import new_stream

NUM_HEADS = 4


def normalise(hidden: torch.Tensor) -> torch.Tensor:
    """RMS norm without a weight, worked out in float32."""
    wide = hidden.float()
    return (wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + 1e-6)).to(hidden.dtype)


def route(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (expert ids [T, K], weights [T, K] that sum to 1) of router logits [T, E]."""
    top, experts = torch.topk(logits, top_k, dim=-1)
    return experts, torch.softmax(top, dim=-1)


def mix_causally(hidden: torch.Tensor, qkv: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Causal self-attention over sequences [B, N, H]."""
    batch, length, width = hidden.shape
    heads = (hidden @ qkv.T).view(batch, length, 3, NUM_HEADS, width // NUM_HEADS)
    query, key, value = heads.permute(2, 0, 3, 1, 4)
    mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    return mixed.transpose(1, 2).reshape(batch, length, width) @ out.T


def attended(
    weights: Weights, name: str, hidden: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states after the attention of a layer, tokens [T, H], and router logits [T, E]."""
    qkv, out = (weights[f"{name}.self_attn.{one}_proj.weight"] for one in ("qkv", "o"))
    hidden = hidden + mix_causally(normalise(hidden), qkv, out)
    tokens = normalise(hidden).flatten(0, 1)
    return hidden, tokens, tokens.float() @ weights[f"{name}.mlp.gate.weight"].float().T


@dataclass(frozen=True)
class MoELayer:
    """The routed experts of one layer, over all ranks, and an optional shared expert.

    The shared expert is computed where its tokens are, while results travel back.
    """

    layer: int
    top_k: int
    experts: Experts
    table: RoutingTable
    dispatcher: Dispatcher
    shared: tuple[torch.Tensor, torch.Tensor] | None = None  # gate_up, down; runs on every rank

    def forward(
        self,
        tokens: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor,
        *,
        salt: int | torch.Tensor,
    ) -> torch.Tensor:
        """Outputs [T, H] for tokens [T, H] routed to experts ``chosen`` [T, K] with weights [T, K].

        Negative expert ids are padding: they go nowhere, count nowhere and add nothing.
        Replicas are chosen exactly evenly from an integer ``salt``, or drawn from seeds [L] on the
        device, which a CUDA graph reads anew at each replay.
        """
        slots = self._slots(chosen, salt)
        received = self.dispatcher.dispatch(self.layer, tokens, slots, weights)
        results = self.experts.run(self.layer, received)
        if self.shared is None:
            return self.dispatcher.combine(self.layer, results, received)
        sums = begin_combine(self.dispatcher, self.layer, results, received)
        shared = swiglu(tokens, *self.shared)
        return sums.finish() + shared

    def _slots(self, chosen: torch.Tensor, salt: int | torch.Tensor) -> torch.Tensor:
        if isinstance(salt, torch.Tensor):
            return self.table.draw(self.layer, chosen, salt[self.layer : self.layer + 1])
        return self.table.choose(self.layer, chosen, salt=salt)


@dataclass(frozen=True)
class Forward:
    """Result of one forward pass, with the choices that a reference repeats."""

    hidden: torch.Tensor  # [T, H] after the last layer
    experts: torch.Tensor  # [L, T, K] where each token went


class MoEStack:
    """Embedding, then layers of causal mixing and experts, each added to the residual stream."""

    def __init__(self, model: ModelShape, weights: Weights, layers: list[MoELayer]) -> None:
        self._model, self._weights, self._layers = model, weights, layers

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        *,
        salt: int | torch.Tensor,
        forced: torch.Tensor | None = None,
    ) -> Forward:
        """Run token ids [B, N]; ``forced`` [L, T, K] replaces the router's choice of experts."""
        hidden = self._weights["model.embed_tokens.weight"][token_ids]
        chosen = []
        for moe in self._layers:
            hidden, tokens, experts, weights = self._routed(moe.layer, hidden, forced)
            output = moe.forward(tokens, experts, weights, salt=salt)
            hidden = hidden + output.view_as(hidden)
            chosen.append(experts)
        return Forward(normalise(hidden).flatten(0, 1), torch.stack(chosen))

    def _routed(
        self, layer: int, hidden: torch.Tensor, forced: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Hidden states after attention, tokens [T, H], their experts and weights [T, K]."""
        name = layer_name(self._model.layer_ids[layer])
        hidden, tokens, logits = attended(self._weights, name, hidden)
        experts, weights = route(logits, self._model.top_k)
        if forced is not None:
            experts = forced[layer]
            weights = torch.softmax(logits.gather(1, experts.clamp(min=0)), dim=-1)
        return hidden, tokens, experts, weights


WARM_UP_STEPS = 3  # kernels are compiled and buffers made before the capture, not in it


class CapturedStack:
    """A model stack whose forward pass is one graph launch."""

    def __init__(
        self,
        stack: MoEStack,
        *,
        shape: tuple[int, int],
        num_layers: int,
        device: torch.device,
    ) -> None:
        # The graph holds addresses, not references: without this one, weights that only the stack
        # knew would be freed, and replays would read whatever came to lie there.
        self._stack = stack
        self._ids = torch.zeros(shape, dtype=torch.int64, device=device)
        self._seeds = torch.zeros(num_layers, dtype=torch.int64, device=device)
        self._layer_seeds = torch.arange(num_layers) * 0x9E3779B1  # one draw a layer, none alike
        stream = new_stream(device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_STEPS):
                self._run()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._answer = self._run()
        self.num_captures = 1

    def forward(
        self, token_ids: torch.Tensor, *, salt: int, forced: torch.Tensor | None = None
    ) -> Forward:
        """Replay one step on token ids [B, N]. The answer is overwritten by the next step.

        Raises:
            ConfigError: ``forced`` is given; a captured step routes by its own router.
        """
        if forced is not None:
            raise ConfigError("a captured step takes no recorded routes, expected an eager one")
        self._ids.copy_(token_ids, non_blocking=True)
        # Pinned: a copy from pageable memory may wait for the stream, where a kernel may be waiting
        # for a dead peer. The allocator keeps it until the copy is done.
        self._seeds.copy_((self._layer_seeds + salt).pin_memory(), non_blocking=True)
        self._graph.replay()
        return self._answer

    def _run(self) -> Forward:
        return self._stack.forward(self._ids, salt=self._seeds)
