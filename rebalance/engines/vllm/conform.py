"""Conformance of vLLM's layers: what its kernels read, and forced moves by its own mover.

A forced move takes the way of vLLM's asynchronous balancer, layer by layer: ``transfer_layer``,
``move_from_buffer``, and the commit of the layer's map.

Shapes:  L MoE layers, S slots of all ranks, C slots of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import Any

import torch

from eplb.errors import MigrationError
from rebalance.engines.common.conform import Subject
from rebalance.engines.common.fsck.check import EngineView, Named, direct
from rebalance.engines.common.guards import require
from rebalance.engines.common.tap import IntArray
from rebalance.engines.vllm.assumptions import CONFORM
from runtime.group import gathered_large


def subject_of(
    model_state: Any,
    held: IntArray,
    group: Any,
    layers: list[int],
    *,
    may_fail: bool = False,
    keeps_map: Callable[[Any, int], bool] = lambda model_state, layer: False,
) -> Subject:
    """Some layers of a model in vLLM's balancer.

    Args:
        model_state: vLLM's, after ``add_model``.
        held: [L, S] the map; kept current by moves.
        group: vLLM's coordinator of the ranks that balance.
        layers: by their order in the model.
        may_fail: whether a transfer of vLLM's own communicator for gloo may be made to fail.
        keeps_map: whether a layer keeps its map, as the plug-in says after its transfer.
    """
    require(CONFORM)
    from vllm.distributed.eplb import eplb_state, rebalance_execute

    model, rank = model_state.model, group.rank_in_group
    modules = {layer: experts_of(model.moe_layers[layer]) for layer in layers}
    communicator = model_state.communicator
    # The plug-in's hook would tell the store of a new map.
    wrapped = eplb_state._commit_eplb_maps_for_layer
    own_commit = getattr(wrapped, "__wrapped__", wrapped)

    def move(target: IntArray, until: int | None = None) -> None:
        for layer, row in zip(layers, target, strict=True):
            old, new = torch.from_numpy(held[layer]), torch.from_numpy(row)
            weights, buffers = model.expert_weights[layer], list(model_state.expert_buffer)
            if layer == until:
                fail_once(communicator)
            moved = rebalance_execute.transfer_layer(
                old, new, weights, buffers, group.device_group, communicator, layer_idx=layer
            )
            if keeps_map(model_state, layer):
                continue
            rebalance_execute.move_from_buffer(weights, buffers, moved, row, rank)
            commit_layer(layer, row)

    def commit_layer(layer: int, row: IntArray) -> None:
        own_commit(model_state, torch.from_numpy(row), layer)
        held[layer] = row

    def commit(target: IntArray) -> None:
        for layer, row in zip(layers, target, strict=True):
            commit_layer(layer, row)

    def interrupted(target: IntArray) -> None:
        try:
            move(target, until=layers[len(layers) // 2])
        except MigrationError:
            return  # as vLLM's worker: the maps of the layers before it serve

    return Subject(
        EngineView(
            layers,
            lambda row: (model.moe_layers[row], list(model.expert_weights[row])),
            lambda row: held[row],
            rank,
            group.world_size,
            lambda row: read_of(modules[row]),
        ),
        lambda own: gathered_large(own, group.cpu_group),
        {layer: method_of(module) for layer, module in modules.items()},
        move,
        commit,
        interrupted=interrupted if may_fail else None,
    )


def fail_once(communicator: Any) -> None:
    """Have the next transfer fail on this rank, after vLLM has prepared it."""

    def execute() -> None:
        del communicator.execute
        communicator._ops.clear()  # as vLLM's own ``execute`` does whatever fails
        raise MigrationError("a transfer failed, as planned")

    communicator.execute = execute


def experts_of(layer: Any) -> Any:
    """The module with the weights of a layer; a runner holds it."""
    return getattr(layer, "routed_experts", layer)


def method_of(experts: Any) -> str:
    """The quantisation of a layer and its back end, by vLLM's names."""
    method = getattr(experts, "quant_method", None)
    ends = [
        str(one.value)
        for name, one in getattr(method, "__dict__", {}).items()
        if name.endswith("_backend") and isinstance(one, Enum)
    ]
    return " ".join([type(method).__name__.removesuffix("Method"), *ends])


def read_of(experts: Any) -> Iterator[Named]:
    """Tensors of the objects that vLLM's kernels read beside the layer's parameters."""
    method = getattr(experts, "quant_method", None)
    config = getattr(method, "moe_quant_config", None)
    for part in ("a1", "a2", "w1", "w2"):
        description = getattr(config, f"_{part}", None)
        if description is not None:
            for name, tensor in direct(description):
                yield f"kernel {part} {name}", tensor
    kernel = getattr(method, "moe_kernel", None)
    if kernel is not None:
        for name, tensor in direct(kernel.fused_experts):
            yield f"kernel {name}", tensor


def model_of(layers: Sequence[Any], num_experts: int, num_slots: int, num_ranks: int) -> Any:
    """What the balancer uses of a model.

    Args:
        layers: have ``get_expert_weights`` and ``set_eplb_state``.
        num_experts: E.
        num_slots: S, of all ranks.
        num_ranks: with equally many slots.
    """
    from vllm.model_executor.models.interfaces import MixtureOfExperts

    model: Any = type("Model", (MixtureOfExperts,), {})()
    model.moe_layers, model.num_moe_layers = list(layers), len(layers)
    model.num_expert_groups, model.num_shared_experts = 1, 0
    model.num_logical_experts = model.num_routed_experts = num_experts
    model.num_physical_experts, model.num_local_physical_experts = num_slots, num_slots // num_ranks
    model.num_redundant_experts = num_slots - num_experts
    return model
