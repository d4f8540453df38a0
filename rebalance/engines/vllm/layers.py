"""vLLM's own MoE layers of each quantisation, in its own balancer, for conformance.

vLLM's factory makes a layer for the back end that it chooses for the device, its loader fills it,
and its quantisation method processes it, as in an engine of tensor-parallel ranks with expert
parallelism. A model of such layers alone is given to vLLM's balancer, and a drafter before it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.config import (
    CompilationConfig,
    DeviceConfig,
    KernelConfig,
    VllmConfig,
    get_current_vllm_config,
    set_current_vllm_config,
)
from vllm.config.parallel import EPLBConfig
from vllm.distributed import parallel_state
from vllm.distributed.eplb.eplb_state import EplbState
from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
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
from vllm.model_executor.models.interfaces import MixtureOfExperts
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.worker.workspace import init_workspace_manager

from rebalance.engines.common.conform import EACH, EXPERTS, LAYERS, RANKS, TOKENS, Subject, drawn
from rebalance.engines.vllm.conform import experts_of, subject_of

HIDDEN, INTERMEDIATE = 512, 256  # whole tiles of all kernels, and blocks of 128
SLOTS = RANKS * EACH
SHARDS = {"w13": ("gate_proj", "up_proj"), "w2": ("down_proj",)}
# Between ranks that may share a device, for which NCCL and vLLM's own reductions have no way.
SHARED_DEVICE = {
    "VLLM_DISABLE_PYNCCL": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
}


class MethodConfig:
    """The configuration of a method that vLLM chooses by further files of a checkpoint."""

    online_quantization_config = None

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method

    def get_name(self) -> str:
        """The method's name."""
        return str(self._method.__name__)

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """The method of a layer."""
        return self._method(moe=layer.moe_config)


def packed_integers() -> Any:
    """The configuration of weights of 4 bits in groups, and activations of 16 bits."""
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
    group = {"targets": ["Linear"], "weights": weights | {"group_size": 128}}
    return CompressedTensorsConfig.from_config(
        {"format": "pack-quantized", "config_groups": {"group_0": group}, "ignore": []}
    )


@dataclass(frozen=True)
class Case:
    """A quantisation, and the back end that is asked for."""

    quantisation: Callable[[], Any]  # its configuration; of None: not quantised
    back_end: str = "auto"  # vLLM's name: vLLM chooses


CASES = {
    "bf16": Case(lambda: None),
    "fp8 tensor": Case(lambda: Fp8Config(True, "static")),
    "fp8 block": Case(lambda: Fp8Config(True, "dynamic", weight_block_size=[128, 128])),
    "int8": Case(lambda: MethodConfig(Int8OnlineMoEMethod)),  # quantised while it is loaded
    "w4a16": Case(packed_integers),
    "w4a16 triton": Case(packed_integers, "triton"),
    "mxfp4": Case(Mxfp4Config),
    "nvfp4": Case(lambda: ModelOptNvFp4Config(is_checkpoint_nvfp4_serialized=True)),
}
NOT_RUN = {
    "w4a8 fp8, w4a8 int8, w8a8 int8 of a checkpoint, gptq, awq": "vLLM refuses EPLB with them",
    "sleep and wake-up": "vLLM's allocator frees weights that are loaded anew",
}


def subjects(rank: int, name: str, seed: int) -> Iterator[Subject]:
    """The layers of a case on one rank and those of a drafter; collective.

    Raises:
        NotImplementedError: vLLM has no kernel for a case here, or refuses to balance it.
    """
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    init_workspace_manager(device)
    with configured(CASES[name], device), torch.no_grad(), groups(rank, device):
        for subject, layers in subjects_of(*made(CASES[name], seed, device)):
            yield replace(subject, outputs=partial(outputs_of, layers))


@contextmanager
def configured(case: Case, device: torch.device) -> Iterator[None]:
    """vLLM's configuration of an engine with ranks that share the experts."""
    os.environ.update(SHARED_DEVICE)
    configuration = VllmConfig(
        device_config=DeviceConfig(device=device.type),
        kernel_config=KernelConfig(moe_backend=case.back_end),
        compilation_config=CompilationConfig(mode=0),  # nothing replaces vLLM's own kernels
    )
    parallel = configuration.parallel_config
    # Set afterwards: at its making vLLM wants a device for each rank.
    parallel.tensor_parallel_size = RANKS
    parallel.enable_expert_parallel = parallel.enable_eplb = True
    parallel.eplb_config = EPLBConfig(
        num_redundant_experts=SLOTS - EXPERTS, use_async=False, communicator="torch_gloo",
        window_size=1, step_interval=1,
    )  # fmt: skip
    with set_current_vllm_config(configuration):
        yield


@contextmanager
def groups(rank: int, device: torch.device) -> Iterator[None]:
    """vLLM's groups of ranks, with gloo; collective."""
    parallel_state.set_custom_all_reduce(False)
    parallel_state.init_distributed_environment(
        RANKS, rank, local_rank=device.index or 0, backend="gloo"
    )
    parallel_state.initialize_model_parallel(RANKS, backend="gloo")
    try:
        yield
        parallel_state.get_world_group().barrier()  # another rank may still receive
    finally:
        parallel_state.destroy_model_parallel()


def made(case: Case, seed: int, device: torch.device) -> tuple[Any, Any, Callable[[], None]]:
    """What vLLM's balancer has of a case's drafter, then of its target; and a reload.

    Collective. The configuration is vLLM's current one, and its groups are there.
    """
    *layers, drafter = (layer_of(number, case, device) for number in range(LAYERS + 1))
    for layer in (*layers, drafter):
        with device:
            record_metadata_for_reloading(layer)
        experts = experts_of(layer)
        list(layer.load_weights(checkpoint(experts, seed)))
        experts.quant_method.process_weights_after_loading(experts)
    state = EplbState(get_current_vllm_config().parallel_config, device)
    for runner, own in (("draft", [drafter]), ("generate", layers)):  # vLLM adds a drafter first
        state.add_model(model_of(own, EXPERTS, SLOTS, RANKS), named(runner), model_name=runner)
    draft, target = state.model_states.values()

    def reload() -> None:
        for layer in layers:
            initialize_layerwise_reload(layer)
            list(layer.load_weights(checkpoint(experts_of(layer), seed)))
            finalize_layerwise_reload(layer, SimpleNamespace(dtype=torch.bfloat16))

    return draft, target, reload


def subjects_of(
    draft: Any, target: Any, reload: Callable[[], None]
) -> Iterator[tuple[Subject, Sequence[Any]]]:
    """The subjects of both models, without outputs, and their layers."""
    group = parallel_state.get_eplb_group()
    for model_state in (draft, target):
        held = model_state.physical_to_logical_map.cpu().numpy().astype(np.int64)
        layers = model_state.model.moe_layers
        subject = subject_of(model_state, held, group, list(range(len(layers))), may_fail=True)
        if model_state is draft:
            methods = {row: f"{method} of a drafter" for row, method in subject.methods.items()}
            yield replace(subject, methods=methods), layers
        else:
            yield replace(subject, reload=reload), layers


def layer_of(number: int, case: Case, device: torch.device) -> Any:
    """A layer by vLLM's factory."""
    with device, set_default_torch_dtype(torch.bfloat16):
        return FusedMoEFactory(
            num_experts=EXPERTS, top_k=1, hidden_size=HIDDEN, intermediate_size=INTERMEDIATE,
            params_dtype=torch.bfloat16, quant_config=case.quantisation(), enable_eplb=True,
            num_redundant_experts=SLOTS - EXPERTS, prefix=f"model.layers.{number}.mlp.experts",
        )  # fmt: skip


def outputs_of(layers: Sequence[Any], row: int) -> torch.Tensor:
    """[C, N, K] what vLLM's kernel gives for fixed tokens, all of them routed to one slot."""
    experts = experts_of(layers[row])
    parallel, method = experts.moe_config.moe_parallel_config, experts.quant_method
    first, device = parallel.ep_rank * experts.local_num_experts, next(experts.parameters()).device
    tokens = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(0))
    tokens = tokens.to(device, torch.bfloat16)
    outputs = []
    for slot in range(first, first + experts.local_num_experts):
        slots = torch.full(
            (TOKENS, 1), slot, dtype=method.topk_indices_dtype or torch.int32, device=device
        )
        weights = torch.ones(TOKENS, 1, device=device)
        # A copy of each: kernels reuse what they are given, and give what they reuse.
        outputs.append(experts.forward_modular(tokens.clone(), weights, slots).clone())
    return torch.stack(outputs)


def checkpoint(experts: Any, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor of each expert by its name in a checkpoint: another expert has other bytes."""
    number = int(experts.layer_name.split(".")[2])
    for name, shape, dtype in experts.__dict__.setdefault("loaded", _shapes_of(experts)):
        stem, _, rest = name.partition("_")
        for expert in range(EXPERTS):
            for shard, projection in enumerate(SHARDS[stem]):
                # Gate and up of NVFP4 have one global scale.
                part = None if rest.endswith("scale_2") else shard
                tensor = drawn(rest, shape, dtype, seed, number, expert, part)
                yield f"{expert}.{projection}.{rest}", tensor


def _shapes_of(experts: Any) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    """Names, shapes of a shard and types of what a layer loads, before it is processed."""
    found = []
    for name, parameter in experts.named_parameters():
        shape = tuple(parameter.shape[1:])
        if name.startswith("w13") and shape:
            shape = () if shape == (2,) else (shape[0] // 2, *shape[1:])
        found.append((name, shape, parameter.dtype))
    return found


def named(runner: str) -> Any:
    """What the balancer and the plug-in use of vLLM's ``ModelConfig``."""
    return SimpleNamespace(model="conform", runner_type=runner, compute_hash=lambda: runner)


def model_of(layers: Sequence[Any], num_experts: int, num_slots: int, num_ranks: int) -> Any:
    """What the balancer uses of a model.

    Args:
        layers: have ``get_expert_weights`` and ``set_eplb_state``.
        num_experts: E.
        num_slots: S, of all ranks.
        num_ranks: with equally many slots.
    """
    model = type("Model", (MixtureOfExperts,), {})()
    model.moe_layers, model.num_moe_layers = list(layers), len(layers)
    model.num_expert_groups, model.num_shared_experts = 1, 0
    model.num_logical_experts = model.num_routed_experts = num_experts
    model.num_physical_experts, model.num_local_physical_experts = num_slots, num_slots // num_ranks
    model.num_redundant_experts = num_slots - num_experts
    return model
