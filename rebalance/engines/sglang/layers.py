"""SGLang's own MoE layers of each quantisation, moved by its own updater, for conformance.

The engine's layer makes its tensors, its kernels and its dispatcher; the engine's loader fills it
by the map, and its updater moves what ``DeepseekV2MoE.get_moe_weights`` names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from sglang.srt.eplb import expert_location
from sglang.srt.eplb.expert_location import ExpertLocationMetadata, ModelConfigForExpertLocation
from sglang.srt.eplb.expert_location_updater import ExpertLocationUpdater
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.layers.moe.utils import filter_moe_weight_param_global_expert
from sglang.srt.layers.quantization.fp8 import Fp8Config
from sglang.srt.layers.quantization.w4afp8 import W4AFp8Config
from sglang.srt.layers.quantization.w8a8_int8 import W8A8Int8Config
from sglang.srt.model_loader.loader import DefaultModelLoader
from sglang.srt.runtime_context import get_context, get_parallel

from rebalance.engines.common.conform import (
    EACH,
    EXPERTS,
    LAYERS,
    RANKS,
    TOKENS,
    Subject,
    drawn,
)
from rebalance.engines.common.fsck.check import EngineView
from rebalance.engines.sglang.conform import subject_of

HIDDEN, INTERMEDIATE, SLOTS = 512, 256, RANKS * EACH
BACKEND = "cpu:gloo,cuda:nccl"  # the updater sends tensors as they lie on the device

CASES: dict[str, Callable[[], Any]] = {
    "bf16": lambda: None,
    "fp8 tensor": lambda: Fp8Config(True, "static"),
    "fp8 block": lambda: Fp8Config(True, "dynamic", weight_block_size=[128, 128]),
    "int8": W8A8Int8Config,
    "w4a8": lambda: W4AFp8Config(True, True),
}
NOT_RUN = {
    "failed transfer": "the updater has no way back, and its scheduler ends with the error",
    "sleep and wake-up": "its allocator frees weights that are loaded anew",
    "drafter": "SGLang does not balance a draft model's experts",
}


class Model(torch.nn.Module):
    """The layers of a rank, loaded by the engine's loader."""

    def __init__(self, layers: Iterable[torch.nn.Module], seed: int, device: torch.device) -> None:
        super().__init__()
        self.layers, self._seed, self._device = torch.nn.ModuleList(layers), seed, device
        self._loaded = [
            [(name, one[0].shape, one.dtype) for name, one in layer.named_parameters()]
            for layer in self.layers
        ]  # before the method has processed them
        self.load()

    def load(self) -> None:
        """Load the checkpoint, also once more."""
        DefaultModelLoader.load_weights_and_postprocess(self, self._checkpoint(), self._device)

    def load_weights(self, weights: Iterable[tuple[Any, torch.Tensor]]) -> None:
        """Load tensors by layer, parameter, shard and expert."""
        for (row, name, shard, expert), tensor in weights:
            layer: Any = self.layers[row]
            layer.weight_loader(getattr(layer, name), tensor, name, shard, expert)

    def _checkpoint(self) -> Iterator[tuple[Any, torch.Tensor]]:
        for row, loaded in enumerate(self._loaded):
            for name, shape, dtype in loaded:
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
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    with torch.no_grad():
        live = start(rank, device, moe_a2a_backend="none")
        model = Model((layer_of(row, CASES[name](), device) for row in range(LAYERS)), seed, device)
        yield replace(subject(rank, live, model), outputs=partial(outputs_of, model, rank))


def start(rank: int, device: torch.device, **arguments: object) -> Any:
    """The settings of a start, and the first map."""
    get_context().override_server_args(
        device=device.type, ep_size=RANKS, tp_size=RANKS, enable_eplb=True, nnodes=1,
        ep_num_redundant_experts=SLOTS - EXPERTS, ep_dispatch_algorithm="dynamic",
        init_expert_location="trivial", **arguments,
    ).install()  # fmt: skip
    get_parallel().override_permanently(tp_rank=rank, moe_ep_rank=rank, moe_tp_rank=0)
    shape = ModelConfigForExpertLocation(LAYERS, EXPERTS, None)
    ModelConfigForExpertLocation.from_model_config = staticmethod(lambda config: shape)
    live = ExpertLocationMetadata.init_by_mapping(
        None, torch.arange(SLOTS).repeat(LAYERS, 1) % EXPERTS
    )
    expert_location.set_global_expert_location_metadata(live)
    return live


def layer_of(row: int, quantisation: Any, device: torch.device) -> Any:
    """A layer as the engine makes it."""
    with device:
        return FusedMoE(
            num_experts=SLOTS, hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, layer_id=row,
            top_k=1, params_dtype=torch.bfloat16, quant_config=quantisation,
            prefix=f"model.layers.{row}.mlp.experts",
        )  # fmt: skip


def subject(rank: int, live: Any, model: Model) -> Subject:
    """All layers of a model, without outputs; collective."""
    layers: list[Any] = list(model.layers)
    weights = {row: moved(layer) for row, layer in enumerate(layers)}
    updater, group = ExpertLocationUpdater(), dist.new_group(backend="gloo")
    view = EngineView(
        weights,
        lambda row: (layers[row], weights[row]),
        lambda row: live.physical_to_logical_map_cpu[row].numpy(),
        rank,
        RANKS,
    )
    rows = list(weights)

    def move(target: Any) -> None:
        updater.update(weights, target, rows, 1, rank)

    return replace(subject_of(view, group, rows, move), reload=model.load)


def moved(layer: Any) -> list[torch.Tensor]:
    """As ``DeepseekV2MoE.get_moe_weights``."""
    return [
        one.data
        for name, one in layer.named_parameters()
        if name != "correction_bias" and filter_moe_weight_param_global_expert(name, one, EACH)
    ]


def outputs_of(model: Model, rank: int, row: int) -> torch.Tensor:
    """[C, N, K] what the engine's kernel gives for fixed tokens, all of them routed to one slot."""
    layer = model.layers[row]
    device = next(layer.parameters()).device
    tokens = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(0))
    tokens = tokens.to(device, torch.bfloat16)
    logits, weights = (torch.ones(TOKENS, size, device=device) for size in (SLOTS, 1))
    outputs = []
    for slot in range(rank * EACH, (rank + 1) * EACH):
        slots = torch.full((TOKENS, 1), slot, dtype=torch.int32, device=device)
        # A copy of each: a kernel may write into what it is given.
        outputs.append(layer(tokens.clone(), StandardTopKOutput(weights, slots, logits)).clone())
    return torch.stack(outputs)
