"""Every call into the engine; nothing else of the plug-in imports it.

``guards`` checks what is used here. Imports are late: the plug-in's entry point is loaded in every
process of the engine, and most have no use for these modules.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from eplb.core.dispatch import DispatchRule
from eplb.errors import ConfigError
from rebalance.engines.common.fsck.check import EngineView
from rebalance.engines.common.planning import System
from rebalance.engines.common.start import EngineGroup, group_of
from rebalance.engines.common.tap import IntArray
from rebalance.engines.sglang.limits import why_unserved
from rebalance.engines.sglang.planning import Shape

Move = Callable[[list[int]], None]


def metadata() -> Any:
    """Return the map that serves."""
    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata

    return get_global_expert_location_metadata()


def refusal() -> str:
    """Return why the plug-in cannot work with this start of the engine; "" if it can."""
    from sglang.srt.runtime_context import get_exec, get_parallel

    moe, parallel = get_exec().moe, get_parallel()
    if moe.is_ep_joiner:
        return "this process joins ranks that serve, expected one of their start"
    return why_unserved(moe, parallel, dist.get_world_size())


def is_elastic() -> bool:
    """Return whether the engine plans for changing ranks itself, and serves on after a death."""
    from sglang.srt.runtime_context import get_exec

    return get_exec().moe.elastic_ep_backend is not None


def has_scaled() -> bool:
    """Return whether ranks were added since the start."""
    from sglang.srt.elastic_ep.elastic_ep import ElasticEPStateManager

    state = ElasticEPStateManager.instance()
    return state is not None and bool(state.has_scaled)


def rule_of_replicas() -> DispatchRule:
    """How the engine chooses among replicas without weights of this plug-in."""
    from sglang.srt.runtime_context import get_exec

    is_static = get_exec().moe.ep_dispatch_algorithm == "static"
    return DispatchRule.SGLANG_STATIC if is_static else DispatchRule.EVEN


def group() -> EngineGroup:
    """The EP group of this process: replicas of the model are groups."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    replica = parallel.dp_rank if parallel.dp_size > 1 else 0
    return group_of(os.environ, dp=(replica, parallel.dp_size))


def counts_every_token_on_each_rank() -> bool:
    """Return whether ranks run the experts over the same tokens, so that each counts them all."""
    from sglang.srt.runtime_context import get_exec

    return bool(get_exec().moe.moe_a2a_backend == "none")


def model_name() -> str:
    """Return what the engine calls the model, with what decides the layout of its weights."""
    from sglang.srt.runtime_context import get_exec, get_model, get_parallel

    model, moe = get_model(), get_exec().moe
    layout = model.quantization, moe.moe_runner_backend, get_parallel().tp_size
    return f"sglang {version('sglang')} {model.model_path} {layout}"


def expert_weights(model: Any) -> dict[int, list[torch.Tensor]]:
    """The tensors of the routed experts of each row; a dict, where the model's is of another type.

    Qwen3-MoE's and others' are a ``LazyValue``, which forwards attributes and items alone: Python
    iterates over it by the indices 0, 1, ..., and ``len`` and ``in`` fail.

    Raises:
        ConfigError: the model does not show its experts' weights.
    """
    weights = getattr(model, "routed_experts_weights_of_layer", None)
    rows = {} if weights is None else dict(weights.items())
    if not rows:
        raise ConfigError(
            f"{type(model).__name__} has no routed_experts_weights_of_layer, expected the weights "
            "of its routed experts: without them the engine cannot move experts of this model"
        )
    return rows


def shape_of(manager: Any, rank: int) -> Shape:
    """Describe the model and its ranks.

    Raises:
        ConfigError: the model does not show its experts' weights.
    """
    from sglang.srt.eplb.expert_location import ModelConfigForExpertLocation
    from sglang.srt.runtime_context import get_exec, get_parallel

    live, weights = metadata(), expert_weights(manager._get_model())
    config = ModelConfigForExpertLocation.from_model_config(manager._model_config)
    nodes = int(get_parallel().nnodes)
    groups = int(config.num_groups or 1)
    expert_bytes = sum(tensor[0].nbytes for tensor in next(iter(weights.values())))
    return Shape(
        system=System(int(live.ep_size), nodes, groups, expert_bytes),
        rank=rank,
        num_experts=int(live.num_logical_experts),
        num_slots=int(live.num_physical_experts),
        algorithm=str(get_exec().moe.ep_dispatch_algorithm),
        rows=sorted(weights),
    )


def view_of(manager: Any, rank: int) -> EngineView:
    """Where the model has its experts; layers are all hidden layers, as in the engine's map."""
    model = manager._get_model()
    weights = expert_weights(model)
    return EngineView(
        sorted(weights),
        lambda row: (model, weights[row]),
        lambda row: metadata().physical_to_logical_map_cpu[row].numpy(),
        rank,
        int(metadata().ep_size),
    )


def choices(rows: Sequence[int]) -> tuple[IntArray, IntArray]:
    """Experts [N, 1] of some tokens, and the slots [L, N, 1] that this rank chooses by layer."""
    from sglang.srt.eplb.expert_location_dispatch import (
        ExpertLocationDispatchInfo,
        topk_ids_logical_to_physical,
    )

    live = metadata()
    device, num_experts = live.physical_to_logical_map.device, live.num_logical_experts
    experts = torch.arange(2 * num_experts, device=device)[:, None] % num_experts
    # Requests draw from the same generator: its state is given back.
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        chosen = [
            topk_ids_logical_to_physical(experts, ExpertLocationDispatchInfo.init_new(row))
            for row in rows
        ]
    slots: IntArray = torch.stack(chosen).cpu().numpy().astype(np.int64)
    return experts.cpu().numpy(), slots


def metadata_for(held: IntArray, lists: IntArray, chosen: IntArray | None) -> Any:
    """Make the engine's metadata for a map, complete, without the engine's own choices.

    ``init_by_mapping`` with a rank would replace each list by the replica that is nearest to it,
    and under ``static`` each call would draw for all ranks in Python, a second for 58 layers.

    Args:
        held: [L, S] experts by slot.
        lists: [L, E, S] slots of each expert, then -1.
        chosen: [L, E] slot that this rank uses under ``static``; None under other rules.
    """
    from sglang.srt.eplb.expert_location import ExpertLocationMetadata

    live = metadata()
    device = live.physical_to_logical_map.device
    held_cpu = torch.from_numpy(held).to(live.physical_to_logical_map.dtype)
    listed_cpu = torch.from_numpy(lists).to(live.logical_to_all_physical_map.dtype)
    valid = torch.count_nonzero(listed_cpu != -1, dim=-1)
    table = live.logical_to_rank_dispatch_physical_map
    if table is not None:
        assert chosen is not None, "the static rule has a choice for each expert"
        table = torch.from_numpy(chosen).to(device, table.dtype)
    return ExpertLocationMetadata(
        physical_to_logical_map=held_cpu.to(device),
        physical_to_logical_map_cpu=held_cpu,
        logical_to_all_physical_map=listed_cpu.to(device),
        logical_to_all_physical_map_cpu=listed_cpu,
        logical_to_all_physical_map_num_valid=valid.to(device),
        ep_size=live.ep_size,
        logical_to_rank_dispatch_physical_map=table,
    )


def own_target(manager: Any, tokens: torch.Tensor) -> Any:
    """The engine's metadata for the map of its own planner.

    Args:
        manager: the engine's EPLBManager.
        tokens: [L, E] of all ranks, so that each rank plans the same.
    """
    from sglang.srt.eplb.expert_location import ExpertLocationMetadata

    return ExpertLocationMetadata.init_by_eplb(manager._model_config, tokens)


def mover(manager: Any, target: Any) -> Move:
    """Return what moves the weights of some rows and installs their maps: the engine's updater.

    All that is read of the engine is read here, so that a move raises only what the updater raises.
    """
    from sglang.srt.eplb import eplb_manager
    from sglang.srt.model_executor.model_runner_components.moe_ep_setup import init_lplb_solvers
    from sglang.srt.runtime_context import get_exec, get_parallel

    update = partial(
        eplb_manager.update_expert_location_with_recovery,
        expert_location_updater=manager._get_expert_location_updater(),
        model=manager._get_model(),
        new_expert_location_metadata=target,
        tp_rank=get_parallel().tp_rank,
        expert_backup_client=manager._get_expert_backup_client(),
        update_weights_from_disk_callable=manager._get_weight_updater().update_weights_from_disk,
        ep_dispatch_algorithm=get_exec().moe.ep_dispatch_algorithm,
        init_lplb_solvers_callable=partial(init_lplb_solvers, model_config=manager._model_config),
    )
    return lambda rows: update(update_layer_ids=rows)


def forget_records() -> None:
    """Empty the engine's recorder: a dump converts all its passes by the newest map."""
    from sglang.srt.eplb.expert_distribution import get_global_expert_distribution_recorder

    recorder = get_global_expert_distribution_recorder()
    if recorder.recording:
        recorder._reset()
