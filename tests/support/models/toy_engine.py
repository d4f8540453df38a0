"""An engine without attention: random tokens through MoE layers, compared with the checkpoint.

Tests of commands copy it into the folder of a deployment, as ``engine.py``. It compares every 32nd
step, and its hot experts change every 500 steps.
"""

from __future__ import annotations

import signal
import sys

import torch
from torch.nn.functional import silu

from eplb.errors import BrokenGroup, EplbError
from rebalance.assembly.environment import build_rank_from_env
from runtime import Checkpoint, MoELayer
from runtime.model.compute import LoopExperts

TOKENS, CHECK_EVERY, DRIFT_EVERY = 64, 32, 500  # of a rank in a step; steps


def batch(model, number, rank):
    """Tokens [T, H], their experts [T, K] and weights [T, K]; two experts are hot, in turn."""
    random = torch.Generator().manual_seed(1_000_003 * number + rank)
    tokens = torch.randn(TOKENS, model.hidden, generator=random)
    chosen = torch.randint(model.num_experts, (TOKENS, model.top_k), generator=random)
    hot = 2 * (number // DRIFT_EVERY)
    chosen[:, 0] = (torch.randint(2, (TOKENS,), generator=random) + hot) % model.num_experts
    return tokens, chosen, torch.full((TOKENS, model.top_k), 1 / model.top_k)


def reference(weights, layer, tokens, chosen, shares):
    """The same layer from the checkpoint, one token after the other."""
    results = torch.zeros_like(tokens)
    for row, token in enumerate(tokens):
        for expert, share in zip(chosen[row].tolist(), shares[row].tolist(), strict=True):
            name = f"model.layers.{layer}.mlp.experts.{expert}"
            gate, up, down = (
                weights[f"{name}.{one}_proj.weight"] for one in ("gate", "up", "down")
            )
            results[row] += share * (down @ (silu(gate @ token) * (up @ token)))
    return results


def serve(rank):
    """The engine's loop; ends when any rank requests it."""
    model, here = rank.deployment.model, rank.number
    weights = Checkpoint(rank.deployment.checkpoint).reference_weights()
    dispatcher, experts = rank.all_to_all(), LoopExperts(rank.bank)
    layers = [
        MoELayer(layer, model.top_k, experts, rank.table, dispatcher)
        for layer in range(model.num_layers)
    ]
    number, checked, wrong, shown = 0, 0, 0, -1
    while rank.step(number, "decode"):  # before every forward pass
        if here == 0 and rank.placement.generation != shown:
            shown = rank.placement.generation
            print(f"engine: generation {shown} serves, {wrong} of {checked} wrong", flush=True)
        tokens, chosen, shares = batch(model, number, here)
        for layer, moe in enumerate(layers):
            answer = moe.forward(tokens, chosen, shares, salt=here + 7919 * number)
            if number % CHECK_EVERY == 0:
                expected = reference(weights, layer, tokens, chosen, shares)
                wrong += not torch.allclose(answer, expected, atol=1e-4)
                checked += 1
            tokens = answer
        number += 1
    print(f"engine: rank {here} ended, {wrong} of {checked} wrong", flush=True)


torch.set_num_threads(1)
try:
    rank = build_rank_from_env()
except EplbError as exc:  # one sentence; eplb launch tries again unless the status is 2
    print(f"engine: {exc}", file=sys.stderr)
    sys.exit(exc.rank_exit_status)
for one in (signal.SIGTERM, signal.SIGINT):
    signal.signal(one, lambda *_: rank.request_halt())  # all ranks end at one step
rank.start()
try:
    serve(rank)
except BrokenGroup as exc:  # a rank died: agree with the others, and end; eplb launch starts all
    rank.survive()
    sys.exit(f"engine: {exc}")
try:
    rank.close()
except EplbError as exc:  # all ranks have ended well; the last load samples are lost
    print(f"engine: {exc}", file=sys.stderr)
