"""The functions of vLLM that the plug-in wraps, and how they are put back.

A wrapper calls vLLM's own function with the arguments that it got. Whatever of the plug-in fails in
it, vLLM gets the result of its own function, or its exception.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import numpy as np

from rebalance.engines.common import guards
from rebalance.engines.vllm.assumptions import RELOAD
from rebalance.engines.vllm.policy import policy_class
from rebalance.engines.vllm.process import PluginProcess

log = logging.getLogger(__name__)


def install(process: PluginProcess) -> Callable[[], None]:
    """Wrap vLLM's functions, and return what puts them back; all of them, or none."""
    undo: list[Callable[[], None]] = []

    def put_back() -> None:
        while undo:
            undo.pop()()

    try:
        _wrap_all(process, undo)
    except BaseException:
        put_back()
        raise
    return put_back


def _wrap_all(process: PluginProcess, undo: list[Callable[[], None]]) -> None:
    from vllm.distributed.eplb import eplb_state, policy, rebalance_execute

    def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
        own = getattr(owner, name)

        @functools.wraps(own)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            call = OwnCall(own)
            try:
                return around(process, call, *args, **kwargs)
            except Exception as exc:
                if call.error is exc:
                    raise
                log.exception("the EPLB plug-in has failed in %s, vLLM goes on", name)
            return call.result if call.is_made else own(*args, **kwargs)

        setattr(owner, name, wrapper)
        undo.append(lambda: setattr(owner, name, own))

    own_policy = policy.EPLB_POLICIES["default"]
    policy.EPLB_POLICIES["default"] = policy_class(process, own_policy)
    undo.append(lambda: policy.EPLB_POLICIES.__setitem__("default", own_policy))
    wrap(rebalance_execute, "move_to_buffer", _move_to_buffer)
    wrap(eplb_state, "_commit_eplb_maps_for_layer", _commit_eplb_maps_for_layer)
    wrap(eplb_state, "_commit_eplb_maps", _commit_eplb_maps)
    wrap(eplb_state.EplbState, "add_model", _add_model)
    wrap(eplb_state.EplbState, "step", _step)
    if why := guards.untried(RELOAD) or next(guards.refusals(RELOAD), ""):
        log.warning("slots are repaired at the rebalance after a reload: %s", why)
        return
    from vllm.model_executor.model_loader.reload import layerwise

    wrap(layerwise, "finalize_layerwise_processing", _finalize_layerwise_processing)


class OwnCall:
    """vLLM's own function in one call of a wrapper, and what came of it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.is_made = False
        self.result: Any = None
        self.error: BaseException | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, and keep its result or what it raises."""
        self.is_made = True
        try:
            self.result = self.function(*args, **kwargs)
        except BaseException as exc:
            self.error = exc
            raise
        return self.result


def _add_model(
    process: PluginProcess,
    own: OwnCall,
    state: Any,
    model: Any,
    model_config: Any,
    *name: Any,
    **named: Any,
) -> None:
    from vllm.distributed.eplb import eplb_state

    process.before_add_model(state, model, eplb_state.get_eplb_group())
    own(state, model, model_config, *name, **named)  # before 0.32 it takes no name
    process.after_add_model(state, model_config, eplb_state.get_node_count())


def _step(
    process: PluginProcess,
    own: OwnCall,
    state: Any,
    is_dummy: bool = False,
    is_profile: bool = False,
    log_stats: bool = False,
) -> None:
    process.before_step(state, is_dummy, is_profile, log_stats)
    own(state, is_dummy, is_profile, log_stats=log_stats)
    process.after_step(state, is_dummy, is_profile)


def _finalize_layerwise_processing(
    process: PluginProcess, own: OwnCall, model: Any, model_config: Any
) -> None:
    loaded = process.find_loaded(model)
    own(model, model_config)
    process.serve_loaded(loaded)


def _move_to_buffer(process: PluginProcess, own: OwnCall, **kwargs: Any) -> Any:
    """Have vLLM's transfer fill its buffers, and check them before they are copied to slots."""
    from vllm.distributed.eplb.eplb_utils import device_stream
    from vllm.utils.gpu_sync_debug import gpu_sync_allowed

    layer, check = kwargs["layer_idx"], process.check_of(kwargs["communicator"])
    if check is None:
        return own(**kwargs)
    old, new = (np.asarray(kwargs[name], np.int64) for name in ("old_indices", "new_indices"))
    if layer in check.relabelled:  # its slots have the experts of the new map already
        check.relabelled.discard(layer)
        return own(**kwargs | {"new_indices": kwargs["old_indices"]})
    moved = own(**kwargs)
    # Behind vLLM's own copies, and before the commit that lets the records serve.
    with device_stream(kwargs["stream"]), gpu_sync_allowed():
        return check.check(layer, old, new, kwargs["expert_weights_buffers"], moved)


def _commit_eplb_maps_for_layer(
    process: PluginProcess,
    own: OwnCall,
    model_state: Any,
    new_physical_to_logical_map: Any,
    layer: int,
) -> None:
    if process.keeps_map(model_state, layer):
        new_physical_to_logical_map = process.kept_row(model_state, layer)
    row = _on_host(new_physical_to_logical_map)
    if not process.is_served(model_state, row, layer):
        own(model_state, new_physical_to_logical_map, layer)
        _with_lists(process, model_state, row, layer)
        process.layer_changed(model_state)
    if layer == model_state.model.num_moe_layers - 1:
        process.map_ended(model_state)


def _commit_eplb_maps(
    process: PluginProcess, own: OwnCall, model_state: Any, new_physical_to_logical_map: Any
) -> None:
    kept = [n for n in range(len(new_physical_to_logical_map)) if process.keeps_map(model_state, n)]
    if kept:
        new_physical_to_logical_map = new_physical_to_logical_map.clone()
        for layer in kept:
            new_physical_to_logical_map[layer] = process.kept_row(model_state, layer)
    rows = _on_host(new_physical_to_logical_map)
    if all(process.is_served(model_state, row, n) for n, row in enumerate(rows)):
        return
    own(model_state, new_physical_to_logical_map)
    for layer, row in enumerate(rows):
        _with_lists(process, model_state, row, layer)
    process.layer_changed(model_state)
    process.map_ended(model_state)


def _with_lists(process: PluginProcess, model_state: Any, row: Any, layer: int) -> None:
    """Add the lists of shares to a map that vLLM has committed; it serves without them too."""
    try:
        from vllm.utils.gpu_sync_debug import gpu_sync_allowed

        with gpu_sync_allowed():
            process.committed(model_state, row, layer)
    except Exception:
        log.exception("layer %d serves with even shares", layer)


def _on_host(held: Any) -> Any:
    return np.asarray(held.cpu().numpy(), dtype=np.int64)
