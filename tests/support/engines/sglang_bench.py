"""SGLang's own quantisation methods that a CPU holds, moved by its own updater, for conformance.

A method makes the tensors of a layer and processes them after the engine's loader has filled them
by its map; its updater moves what ``DeepseekV2MoE.get_moe_weights`` names. Of the engine's layer
the making alone is replaced, because it makes the runner of its kernels too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from sglang.srt.eplb import expert_location
from sglang.srt.eplb.expert_location import ExpertLocationMetadata, ModelConfigForExpertLocation
from sglang.srt.eplb.expert_location_updater import ExpertLocationUpdater
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.moe.utils import filter_moe_weight_param_global_expert
from sglang.srt.layers.quantization.fp8 import Fp8Config, Fp8MoEMethod
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
from sglang.srt.layers.quantization.w4afp8 import W4AFp8Config, W4AFp8MoEMethod
from sglang.srt.layers.quantization.w8a8_int8 import W8A8Int8Config, W8A8Int8MoEMethod
from sglang.srt.model_loader.loader import DefaultModelLoader
from sglang.srt.runtime_context import get_context, get_parallel

from rebalance.engines.common.conform import EACH, EXPERTS, LAYERS, RANKS, Subject, drawn
from rebalance.engines.common.fsck.check import EngineView
from rebalance.engines.sglang.conform import subject_of

HIDDEN, INTERMEDIATE, SLOTS = 256, 128, RANKS * EACH

CASES: dict[str, Callable[[], Any]] = {
    "bf16": UnquantizedFusedMoEMethod,
    "fp8 block": lambda: Fp8MoEMethod(Fp8Config(True, "dynamic", weight_block_size=[128, 128])),
    "int8": lambda: W8A8Int8MoEMethod(W8A8Int8Config()),
    "w4a8": lambda: W4AFp8MoEMethod(W4AFp8Config(True, True)),
}
NOT_RUN = {
    "fp8 tensor": "its method loads with an operation of a GPU",
    "nvfp4": "its method refuses other devices",
    "failed transfer": "the updater has no way back, and its scheduler ends with the error",
    "sleep and wake-up": "its allocator needs a GPU",
    "drafter": "SGLang does not balance a draft model's experts",
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
        self.loaded = [
            (name, one[0].shape, one.dtype) for name, one in self.named_parameters()
        ]  # before the method has processed them

    def moved(self) -> list[torch.Tensor]:
        """As ``DeepseekV2MoE.get_moe_weights``."""
        return [
            one.data
            for name, one in self.named_parameters()
            if name != "correction_bias" and filter_moe_weight_param_global_expert(name, one, EACH)
        ]


class Model(torch.nn.Module):
    """The layers of a rank, loaded by the engine's loader."""

    def __init__(self, name: str, rank: int, seed: int) -> None:
        super().__init__()
        layers = [Layer(row, CASES[name](), rank) for row in range(LAYERS)]
        self.layers, self._seed = torch.nn.ModuleList(layers), seed
        self.load()

    def load(self) -> None:
        """Load the checkpoint, also once more."""
        checkpoint, device = self._checkpoint(), torch.device("cpu")
        DefaultModelLoader.load_weights_and_postprocess(self, checkpoint, device)

    def load_weights(self, weights: Iterable[tuple[Any, torch.Tensor]]) -> None:
        """Load tensors by layer, parameter, shard and expert."""
        for (row, name, shard, expert), tensor in weights:
            layer = self.layers[row]
            layer.weight_loader(getattr(layer, name), tensor, name, shard, expert)

    def _checkpoint(self) -> Iterator[tuple[Any, torch.Tensor]]:
        layers: list[Any] = list(self.layers)
        for row, layer in enumerate(layers):
            for name, shape, dtype in layer.loaded:
                is_input, is_split = "input_scale" in name, name.startswith("w13")
                size = (shape[0] // 2, *shape[1:]) if is_split and shape else shape
                for expert in range(EXPERTS):
                    for shard in ("w1", "w3") if is_split else ("w2",):
                        part = "" if is_input else shard  # gate and up have one scale of inputs
                        salt = self._seed, row, expert, part
                        tensor = drawn(name, () if is_input else size, dtype, *salt)
                        yield (row, name, shard, expert), tensor


def subjects(rank: int, name: str, seed: int) -> Iterator[Subject]:
    """The layers of a case on one rank, in SGLang's map; collective."""
    _start(rank)
    live = ExpertLocationMetadata.init_by_mapping(
        None, torch.arange(SLOTS).repeat(LAYERS, 1) % EXPERTS
    )
    expert_location.set_global_expert_location_metadata(live)
    model = Model(name, rank, seed)
    layers: list[Any] = list(model.layers)
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
    found = subject_of(
        view, group, rows, lambda target: updater.update(weights, target, rows, 1, rank)
    )
    yield replace(found, reload=model.load)


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
