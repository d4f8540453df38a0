"""The engine of ``first_token``: loads its experts, runs one pass, and proves the answer.

eplb launch -- python -m benchmarks.deployment.first_token_engine FOLDER
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from eplb.errors import EplbError
from rebalance.assembly import experts as first_experts
from rebalance.assembly.environment import build_rank_from_env
from runtime import Checkpoint, MoELayer
from runtime.model.compute import LoopExperts, swiglu

VOCABULARY, TOLERANCE = 1024, 0.02


def timed(times: dict[str, float], name: str, call: Any) -> Any:
    """Wrap a call so that its begin and end are kept."""

    def run(*args: Any, **options: Any) -> Any:
        times[f"{name}_begin"], times[f"{name}_cpu"] = time.monotonic(), -time.thread_time()
        found = call(*args, **options)
        times[f"{name}_end"] = time.monotonic()
        times[f"{name}_cpu"] += time.thread_time()
        return found

    return run


def main() -> None:
    """Serve one token."""
    folder, times = Path(sys.argv[1]), {"program": time.monotonic()}
    torch.set_num_threads(1)
    first_experts.fill_bank = timed(times, "fill", first_experts.fill_bank)
    try:
        rank = build_rank_from_env()
    except EplbError as exc:
        print(f"engine: {exc}", file=sys.stderr)
        sys.exit(exc.rank_exit_status)
    times["built"] = time.monotonic()
    model, here = rank.deployment.model, rank.number
    dispatcher, experts = rank.all_to_all(), LoopExperts(rank.bank)
    random = torch.Generator().manual_seed(here)
    token = torch.randn(1, model.hidden, generator=random).bfloat16()
    head = torch.randn(VOCABULARY, model.hidden, generator=random).bfloat16()
    layers = range(model.num_layers)
    orders = [torch.randperm(model.num_experts, generator=random)[None] for _ in layers]
    chosen = [order[:, : model.top_k] for order in orders]
    shares = torch.full((1, model.top_k), 1 / model.top_k)

    rank.start()
    assert rank.step(0, "decode"), "nobody asked for an end"
    hidden, inputs, outputs = token, [], []
    for layer in layers:
        inputs.append(hidden)
        moe = MoELayer(layer, model.top_k, experts, rank.table, dispatcher)
        outputs.append(moe.forward(hidden, chosen[layer], shares, salt=here))
        hidden = hidden + outputs[-1]
    answer = int((hidden @ head.T).argmax())
    times["first_token"] = time.monotonic()

    checkpoint = Checkpoint(rank.deployment.checkpoint)
    error, expected = 0.0, token
    for layer in layers:
        found = reference(checkpoint, model.layer_ids[layer], inputs[layer], chosen[layer][0])
        error = max(error, float((outputs[layer] - found).abs().max() / found.abs().max()))
        expected = expected + found
    is_right = error < TOLERANCE and answer == int((expected @ head.T).argmax())
    size = rank.bank.schema.record_bytes
    body = {"times": times, "is_right": is_right, "error": error, "record_bytes": size}
    (folder / f"rank-{here}.json").write_text(json.dumps(body))
    rank.request_halt()
    number = 1
    while rank.step(number, "decode"):
        number += 1
    rank.close()


def reference(
    checkpoint: Checkpoint, layer: int, token: torch.Tensor, chosen: torch.Tensor
) -> torch.Tensor:
    """The output of one layer from the checkpoint's own tensors."""
    results = []
    for expert in chosen.tolist():
        name = f"model.layers.{layer}.mlp.experts.{expert}"
        parts = (checkpoint.tensor(f"{name}.{one}_proj.weight") for one in ("gate", "up", "down"))
        gate, up, down = parts
        results.append(swiglu(token, torch.cat([gate, up]), down).float())
    return torch.stack(results).mean(dim=0).bfloat16()


if __name__ == "__main__":
    main()
