"""The layers of ``rebalance.engines.sglang.layers`` on a CPU, which has none of their kernels.

Layers, loader, map and updater are the engine's own. Nothing has outputs.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

import tests.support.engines.cpu_torchvision  # noqa: F401  # isort: skip
from rebalance.engines.common.conform import LAYERS, Subject
from rebalance.engines.sglang import layers

CPU = torch.device("cpu")
CASES = {name: layers.CASES[name] for name in ("bf16", "fp8 block", "int8", "w4a8")}
NOT_RUN = {
    "fp8 tensor": "its method loads with an operation of a GPU",
    "sleep and wake-up": "its allocator needs a GPU",
}


def subjects(rank: int, name: str, seed: int) -> Iterator[Subject]:
    """The layers of a case on one rank, in SGLang's map; collective."""
    torch.cpu.empty_cache = lambda: None  # type: ignore[attr-defined]
    live = layers.start(rank, CPU, moe_a2a_backend="none")
    model = layers.Model(
        (layers.layer_of(row, CASES[name](), CPU) for row in range(LAYERS)), seed, CPU
    )
    yield layers.subject(rank, live, model)
