"""The layers of ``rebalance.engines.sglang.layers`` on a CPU, which has none of their kernels.

A method makes the tensors of a layer and processes them after the engine's loader has filled them.
Of the engine's layer the making alone is replaced, because it makes the runner of its kernels too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.quantization.fp8 import Fp8Config, Fp8MoEMethod
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
from sglang.srt.layers.quantization.w4afp8 import W4AFp8Config, W4AFp8MoEMethod
from sglang.srt.layers.quantization.w8a8_int8 import W8A8Int8Config, W8A8Int8MoEMethod

from rebalance.engines.common.conform import EACH, LAYERS, RANKS, Subject
from rebalance.engines.sglang.layers import HIDDEN, INTERMEDIATE, SLOTS, Model, start, subject

CPU = torch.device("cpu")
CASES: dict[str, Callable[[], Any]] = {
    "bf16": UnquantizedFusedMoEMethod,
    "fp8 block": lambda: Fp8MoEMethod(Fp8Config(True, "dynamic", weight_block_size=[128, 128])),
    "int8": lambda: W8A8Int8MoEMethod(W8A8Int8Config()),
    "w4a8": lambda: W4AFp8MoEMethod(W4AFp8Config(True, True)),
}
NOT_RUN = {
    "fp8 tensor": "its method loads with an operation of a GPU",
    "nvfp4": "its method refuses other devices",
    "sleep and wake-up": "its allocator needs a GPU",
}


class Layer(FusedMoE):  # type: ignore[misc]
    """The engine's layer, with what its loader and a quantisation method need of it."""

    def __init__(self, number: int, method: Any, rank: int) -> None:
        torch.nn.Module.__init__(self)
        self.moe_runner_config = SimpleNamespace(is_gated=True, is_act_and_mul=True)
        self.quant_method, self.quant_config = method, getattr(method, "quant_config", None)
        self.num_local_experts = self._num_local_routed = EACH
        self.num_experts, self._num_global_routed, self.layer_id = SLOTS, SLOTS, number
        self.moe_tp_size, self.moe_tp_rank, self.moe_ep_size = 1, 0, RANKS
        self.moe_ep_rank = self._expert_storage_rank = rank
        self.num_fused_shared_experts, self._has_fused_shared = 0, False
        self.use_triton_kernels = self.use_flashinfer_trtllm_moe = self.use_presharded_weights = (
            False
        )
        self.scheme, self.uses_expert_location = None, True
        self.intermediate_size_per_partition, self.hidden_size = INTERMEDIATE, HIDDEN
        method.create_weights(
            layer=self, num_experts=EACH, hidden_size=HIDDEN,
            intermediate_size_per_partition=INTERMEDIATE, params_dtype=torch.bfloat16,
            weight_loader=self.weight_loader,
        )  # fmt: skip


def subjects(rank: int, name: str, seed: int) -> Iterator[Subject]:
    """The layers of a case on one rank, in SGLang's map; collective."""
    live = start(rank, CPU, moe_a2a_backend="deepep", deepep_mode="normal")
    torch.cpu.empty_cache = lambda: None  # type: ignore[attr-defined]
    layers = (Layer(row, CASES[name](), rank) for row in range(LAYERS))
    yield subject(rank, live, Model(layers, seed, CPU))
