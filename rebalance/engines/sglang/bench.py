"""SGLang's own quantisation methods that a CPU holds, moved by its own updater, for conformance.

A method makes the tensors of a layer and processes them after they are loaded, as in the engine;
its updater moves what ``DeepseekV2MoE.get_moe_weights`` names. The layer is a plain module, because
the engine's own makes the runner of its kernels too.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from sglang.srt.eplb import expert_location
from sglang.srt.eplb.expert_location import ExpertLocationMetadata, ModelConfigForExpertLocation
from sglang.srt.eplb.expert_location_updater import ExpertLocationUpdater
from sglang.srt.layers.moe.utils import filter_moe_weight_param_global_expert
from sglang.srt.layers.quantization.fp8 import Fp8Config, Fp8MoEMethod
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
from sglang.srt.layers.quantization.w8a8_int8 import W8A8Int8Config, W8A8Int8MoEMethod
from sglang.srt.runtime_context import get_context, get_parallel

from rebalance.engines.common.bench import EACH, EXPERTS, LAYERS, RANKS
from rebalance.engines.common.conform import Subject
from rebalance.engines.common.fsck.tensors import EngineView
from rebalance.engines.sglang.conform import subject_of

HIDDEN, INTERMEDIATE, SLOTS = 256, 128, RANKS * EACH

CASES: dict[str, Callable[[], Any]] = {
    "bf16": UnquantizedFusedMoEMethod,
    "fp8 block": lambda: Fp8MoEMethod(Fp8Config(True, "dynamic", weight_block_size=[128, 128])),
    "int8": lambda: W8A8Int8MoEMethod(W8A8Int8Config()),
}


class Layer(torch.nn.Module):
    """What a quantisation method needs of a layer."""

    def __init__(self, number: int, method: Any, held: list[int], seed: int) -> None:
        super().__init__()
        self.moe_runner_config = SimpleNamespace(is_gated=True, is_act_and_mul=True)
        self.quant_method, self.num_local_experts = method, EACH
        self.num_experts, self.layer_id = SLOTS, number
        self.moe_tp_size, self.moe_tp_rank, self.moe_ep_size = 1, 0, RANKS
        self.intermediate_size_per_partition, self.hidden_size = INTERMEDIATE, HIDDEN
        method.create_weights(
            layer=self, num_experts=EACH, hidden_size=HIDDEN,
            intermediate_size_per_partition=INTERMEDIATE, params_dtype=torch.bfloat16,
            weight_loader=None,
        )  # fmt: skip
        for name, one in self.named_parameters():
            for place, expert in enumerate(held):
                salt = zlib.crc32(repr((seed, number, name, expert)).encode())
                one.data[place] = _drawn(name, one.data[place], salt)
        method.process_weights_after_loading(self)

    def moved(self) -> list[torch.Tensor]:
        """As ``DeepseekV2MoE.get_moe_weights``."""
        return [
            one.data
            for name, one in self.named_parameters()
            if name != "correction_bias" and filter_moe_weight_param_global_expert(name, one, EACH)
        ]


def _drawn(name: str, like: torch.Tensor, salt: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(salt)
    if "scale" in name:
        return 0.01 + 0.02 * torch.rand(like.shape, generator=generator)
    if like.dtype == torch.int8:
        return torch.randint(-127, 128, like.shape, generator=generator, dtype=torch.int8)
    return torch.randn(like.shape, generator=generator).to(like.dtype)


def subject(rank: int, name: str, seed: int) -> Subject:
    """The layers of a case on one rank, in SGLang's map; collective."""
    _start(rank)
    live = ExpertLocationMetadata.init_by_mapping(
        None, torch.arange(SLOTS).repeat(LAYERS, 1) % EXPERTS
    )
    expert_location.set_global_expert_location_metadata(live)
    own = live.physical_to_logical_map[:, rank * EACH :][:, :EACH].tolist()
    layers = [Layer(row, CASES[name](), own[row], seed) for row in range(LAYERS)]
    weights = {row: layer.moved() for row, layer in enumerate(layers)}
    updater, group = ExpertLocationUpdater(), dist.new_group(backend="gloo")

    view = EngineView(
        weights,
        lambda row: (layers[row], weights[row]),
        lambda row: live.physical_to_logical_map_cpu[row].numpy(),
        rank,
        RANKS,
    )
    rows = list(weights)
    return subject_of(
        view, group, rows, lambda target: updater.update(weights, target, rows, 1, rank)
    )


def _start(rank: int) -> None:
    """The settings of a start, and what its updater asks of a device."""
    get_context().override_server_args(
        device="cpu", ep_size=RANKS, tp_size=RANKS, enable_eplb=True, nnodes=1,
        ep_num_redundant_experts=SLOTS - EXPERTS, moe_a2a_backend="deepep",
        ep_dispatch_algorithm="dynamic", init_expert_location="trivial", deepep_mode="normal",
    ).install()  # fmt: skip
    get_parallel().override_permanently(tp_rank=rank, moe_ep_rank=rank)
    torch.cpu.empty_cache = lambda: None  # type: ignore[attr-defined]
    shape = ModelConfigForExpertLocation(LAYERS, EXPERTS, None)
    ModelConfigForExpertLocation.from_model_config = staticmethod(lambda config: shape)
