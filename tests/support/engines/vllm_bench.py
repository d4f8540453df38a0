"""vLLM's own layers of each quantisation that a CPU holds, in its own balancer, for conformance.

Layers are made, loaded and processed by vLLM's own classes, for the back end that a case names.
What only a GPU has is replaced: the check whether a kernel runs here, one conversion to FP8, and
the groups of the parallel state. No kernel of vLLM runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import vllm.model_executor.layers.fused_moe.modular_kernel as kernels
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.eplb.eplb_state import EplbLayerState
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import (
    FusedMoEConfig,
    FusedMoEParallelConfig,
    RoutingMethodType,
)
from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager
from vllm.model_executor.layers.fused_moe.experts import ocp_mx_emulation_moe
from vllm.model_executor.layers.fused_moe.oracle import unquantized
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w4a8_mxfp4 import (  # noqa: E501
    CompressedTensorsW4A8Mxfp4MoEMethod,
)
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config
from vllm.model_executor.layers.quantization.mxfp4 import Mxfp4Config
from vllm.model_executor.layers.quantization.online.int8 import Int8OnlineMoEMethod
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)

from rebalance.engines.common.conform import EACH, EXPERTS, LAYERS, RANKS, Subject, drawn
from rebalance.engines.vllm.conform import subject_of
from tests.support.engines import vllm_cpu

HIDDEN, INTERMEDIATE = 256, 128  # scales of NVFP4 are swizzled in tiles of 128 rows
SLOTS = RANKS * EACH
SHARDS = {"w13": ("gate_proj", "up_proj"), "w2": ("down_proj",)}


class _Of:
    """The configuration of a method that vLLM chooses by further files of a checkpoint."""

    online_quantization_config = None

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method

    def get_name(self) -> str:
        return str(self._method.__name__)

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        return self._method(moe=layer.moe_config)


# The configuration of a quantisation, and vLLM's name of the back end whose layout is made.
CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "bf16": (lambda: None, "triton"),
    "fp8 tensor": (lambda: Fp8Config(True, "static"), "triton"),
    "fp8 block": (lambda: Fp8Config(True, "dynamic", weight_block_size=[128, 128]), "triton"),
    "nvfp4 swizzled": (lambda: ModelOptNvFp4Config(is_checkpoint_nvfp4_serialized=True), "cutlass"),
    "nvfp4 linear": (lambda: ModelOptNvFp4Config(is_checkpoint_nvfp4_serialized=True), "emulation"),
    "mxfp4": (Mxfp4Config, "emulation"),
    "int8": (lambda: _Of(Int8OnlineMoEMethod), "triton"),  # quantised by rows while it is loaded
    "w4a8 mxfp4": (lambda: _Of(CompressedTensorsW4A8Mxfp4MoEMethod), "emulation"),
}
NOT_RUN = {
    "w4a8 fp8, w4a8 int8": "vLLM refuses EPLB with their methods",
    "Marlin, FlashInfer, Humming": "they repack weights with operations of a GPU",
    "sleep and wake-up": "vLLM's allocator needs a GPU",
}


def subjects(rank: int, name: str, seed: int) -> Iterator[Subject]:
    """The layers of a case on one rank, in vLLM's balancer, and those of a drafter; collective."""
    draft, target, group, reload = made(rank, name, seed)
    for model_state in (draft, target):
        held = model_state.physical_to_logical_map.numpy().astype(np.int64)
        rows = list(range(len(held)))
        found = subject_of(model_state, held, group, rows, may_fail=True)
        if model_state is draft:
            methods = {row: f"{method} of a drafter" for row, method in found.methods.items()}
            yield replace(found, methods=methods)
        else:
            yield replace(found, reload=reload)


def made(rank: int, name: str, seed: int) -> tuple[Any, Any, Any, Callable[[], None]]:
    """What vLLM's balancer has of a case's drafter, then of its target; the ranks, and a reload.

    Collective.
    """
    group, balancing = (vllm_cpu.coordinator(rank, RANKS) for _ in range(2))
    vllm_cpu.install(group, balancing)
    _replace_devices(group)
    quantisation, back_end = CASES[name]
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig(device="cpu"))):
        *layers, drafter = (
            _layer(number, quantisation(), back_end, rank) for number in range(LAYERS + 1)
        )
        for layer in (*layers, drafter):
            record_metadata_for_reloading(layer)
            list(layer.load_weights(_checkpoint(layer, seed)))
            layer.quant_method.process_weights_after_loading(layer)
    state = vllm_cpu.state_of()
    for runner, own in (("draft", [drafter]), ("generate", layers)):  # vLLM adds a drafter first
        model = vllm_cpu.model_of(own, EXPERTS, SLOTS, RANKS)
        state.add_model(model, vllm_cpu.configuration(runner), model_name=runner)
    draft, target = state.model_states.values()
    for model_state in (draft, target):
        model_state.communicator.set_stream(vllm_cpu.Stream())

    def reload() -> None:
        with set_current_vllm_config(VllmConfig(device_config=DeviceConfig(device="cpu"))):
            for layer in layers:
                initialize_layerwise_reload(layer)
                list(layer.load_weights(_checkpoint(layer, seed)))
                finalize_layerwise_reload(layer, SimpleNamespace(dtype=torch.bfloat16))

    return draft, target, group, reload


class BalancedLayer(RoutedExperts):  # type: ignore[misc]
    """vLLM's layer with what the balancer asks of a runner."""

    def set_eplb_state(self, moe_layer_idx: int, **tensors: Any) -> None:
        """Take the views of the maps."""
        self.eplb_state = EplbLayerState()
        self.eplb_state.set_layer_state(moe_layer_idx, **tensors)


def _layer(number: int, quantisation: Any, back_end: str, rank: int) -> BalancedLayer:
    parallel = FusedMoEParallelConfig(
        tp_size=1, pcp_size=1, dp_size=1, ep_size=RANKS, tp_rank=0, pcp_rank=0, dp_rank=0,
        ep_rank=rank, sp_size=1, use_ep=True, all2all_backend="naive", enable_eplb=True,
    )  # fmt: skip
    experts = ExpertMapManager(
        max_num_batched_tokens=64, top_k=2, global_num_experts=SLOTS,
        num_redundant_experts=SLOTS - EXPERTS, num_expert_group=None,
        moe_parallel_config=parallel, placement_strategy="linear", enable_eplb=True,
    )  # fmt: skip
    config = FusedMoEConfig(
        num_experts=SLOTS, experts_per_token=2, hidden_dim=HIDDEN, intermediate_size=INTERMEDIATE,
        num_local_experts=EACH, num_logical_experts=EXPERTS, activation=MoEActivation.SILU,
        device="cpu", routing_method=RoutingMethodType.Default, moe_parallel_config=parallel,
        in_dtype=torch.bfloat16, moe_backend=back_end,
    )  # fmt: skip
    name = f"model.layers.{number}.mlp.experts"
    return BalancedLayer(name, torch.bfloat16, config, quantisation, experts)


def _checkpoint(layer: BalancedLayer, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor of each expert by its name in a checkpoint: another expert has other bytes."""
    number = int(layer.layer_name.split(".")[2])
    for name, shape, dtype in layer.__dict__.setdefault("loaded", _shapes_of(layer)):
        stem, _, rest = name.partition("_")
        for expert in range(EXPERTS):
            for shard, projection in enumerate(SHARDS[stem]):
                # Gate and up of NVFP4 have one global scale.
                part = None if rest.endswith("scale_2") else shard
                tensor = drawn(rest, shape, dtype, seed, number, expert, part)
                yield f"{expert}.{projection}.{rest}", tensor


def _shapes_of(layer: BalancedLayer) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    """Names, shapes of a shard and types of what a layer loads, before it is processed."""
    found = []
    for name, parameter in layer.named_parameters():
        shape = tuple(parameter.shape[1:])
        if name.startswith("w13") and shape:
            shape = () if shape == (2,) else (shape[0] // 2, *shape[1:])
        found.append((name, shape, parameter.dtype))
    return found


def _replace_devices(group: Any) -> None:
    """What the making of a layer asks of a GPU and of vLLM's parallel state."""
    one = SimpleNamespace(world_size=1, rank_in_group=0, rank=0)
    parallel_state._TP = parallel_state._DP = parallel_state._PCP = one

    def all_reduce(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        dist.all_reduce(tensor, op, group=group.cpu_group)
        return tensor

    parallel_state._EP = SimpleNamespace(**vars(group), all_reduce=all_reduce)
    unquantized._get_priority_backends = lambda config: [unquantized.UnquantizedMoeBackend.TRITON]
    for cls in (kernels.FusedMoEExperts, *ocp_experts()):
        cls.is_supported_config = staticmethod(lambda *given: (True, None))
    torch.Tensor.cuda = lambda tensor, *given, **named: tensor  # type: ignore[method-assign]
    if not hasattr(torch.ops._C, "static_scaled_fp8_quant"):
        library: Any = torch.library.Library("_C", "FRAGMENT")  # type: ignore[no-untyped-call]
        library.define(
            "static_scaled_fp8_quant(Tensor(a!) out, Tensor x, Tensor s, int[]? g=None) -> ()"
        )
        library.impl("static_scaled_fp8_quant", _to_fp8, "CPU")
        _libraries.append(library)


_libraries: list[Any] = []  # an operator lives as long as its library


def ocp_experts() -> Iterator[type]:
    """Classes of the emulation of MX formats, which ask for a package of a GPU's vendor."""
    for value in vars(ocp_mx_emulation_moe).values():
        if isinstance(value, type) and issubclass(value, kernels.FusedMoEExperts):
            yield value


def _to_fp8(out: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, group: Any = None) -> None:
    out.copy_((x.float() / scale).clamp(-448, 448).to(out.dtype))
