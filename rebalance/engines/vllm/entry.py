"""Entry point ``vllm.general_plugins``, which vLLM calls in each of its processes.

``ASSUMED`` is what the plug-in assumes about vLLM 0.33.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from eplb.settings.loader import CONFIG_VARIABLE
from rebalance.engines.common import guards
from rebalance.engines.common.start import load_plugin, set_part, show_log

if TYPE_CHECKING:
    from rebalance.engines.common.plugin_settings import PluginSettings
    from rebalance.engines.vllm.process import PluginProcess

log = logging.getLogger(__name__)

_loaded: list[PluginProcess] = []  # the plug-in of this process, once it is loaded

EPLB = "vllm.distributed.eplb"
STATE = f"{EPLB}.eplb_state"

ASSUMED = guards.Assumptions(
    "vllm",
    "0.33.",
    signatures={
        f"{EPLB}.policy.abstract.AbstractEplbPolicy.rebalance_experts": (
            "weight num_replicas num_groups num_nodes num_ranks old_global_expert_indices"
        ),
        f"{STATE}.EplbState.add_model": "self model model_config model_name",
        f"{STATE}.EplbState.step": "self is_dummy is_profile log_stats",
        f"{STATE}.EplbState._should_record_current_step": "self log_stats",
        f"{STATE}._commit_eplb_maps": "model_state new_physical_to_logical_map",
        f"{STATE}._commit_eplb_maps_for_layer": "model_state new_physical_to_logical_map layer",
        f"{EPLB}.rebalance_execute.move_to_buffer": (
            "num_local_experts old_indices new_indices expert_weights expert_weights_buffers "
            "stream ep_rank communicator layer_idx enable_migration_batching migration_batches"
        ),
        f"{EPLB}.eplb_utils.device_stream": "stream",
    },
    lines={
        f"{STATE}.EplbState.add_model": (
            "self.policy = EPLB_POLICIES[policy_type]",
            "MAX_EXPERT_REDUNDANCY = 1023",
        ),
        f"{STATE}.EplbState.step": (
            "eplb_model_state.expert_load_pass.zero_()",
            "should_record = self._should_record_current_step(log_stats=log_stats)",
            "self._update_layer_should_record(log_stats=log_stats)",
        ),
        f"{STATE}.EplbState.rearrange": (
            "self.policy.rebalance_experts(",
            "_commit_eplb_maps(",
            "self._allreduce_list(global_expert_load_windows)",
        ),
        f"{STATE}._move_to_workspace": (
            "move_from_buffer(",
            "expert_weights=model_state.model.expert_weights[result.layer_idx]",
            "_commit_eplb_maps_for_layer(",
        ),
        f"{EPLB}.rebalance_execute.rearrange_expert_weights_inplace": (
            "transfer_metadata = move_to_buffer(",
            "old_indices=old_global_expert_indices_cpu[layer_idx]",
            "new_indices=new_global_expert_indices_cpu[layer_idx]",
            "expert_weights_buffers=weights_buffer",
            "stream=None",
            "communicator=communicator",
            "layer_idx=layer_idx",
            "transfer_metadata=transfer_metadata",
        ),
        f"{EPLB}.rebalance_execute.transfer_layer": (
            "return move_to_buffer(",
            "old_indices=old_layer_indices_np",
            "new_indices=new_layer_indices_np",
            "expert_weights_buffers=expert_weights_buffer",
            "stream=stream",
            "communicator=communicator",
            "layer_idx=layer_idx",
        ),
        f"{EPLB}.rebalance_execute.move_from_buffer": (
            "dest_mask_np = np.logical_and(~is_unchanged, copy_mask)",
            "copy_mask = np.logical_or(is_received_locally, recv_primary_mask)",
            "if recv_count == 0:",
        ),
        f"{EPLB}.async_worker.transfer_run_periodically": (
            "model_state.communicator.set_stream(stream)",
            "torch.distributed.all_reduce(flag, group=eplb_cpu_group)",
        ),
        f"{EPLB}.rebalance_execute.move_to_buffer": (
            "b[dst].copy_(w[src_local], non_blocking=True)",
            "communicator.execute()",
        ),
    },
    fields={
        f"{STATE}.EplbModelState": (
            "physical_to_logical_map logical_to_physical_map logical_replica_count "
            "expert_load_pass model communicator"
        ),
        f"{EPLB}.rebalance_execute.TransferMetadata": (
            "is_unchanged is_received_locally recv_primary_mask recv_count"
        ),
    },
    # These files need GPU libraries.
    files={
        # The rule by which the kernel chooses a replica: ``replica_lists`` depends on each line.
        Path("model_executor/layers/fused_moe/router/base_router.py"): (
            "KNUTH_MULTIPLIER = 2654435769",
            "token_idx = (offs // num_active_experts).to(tl.int64)",
            "hashed = (token_idx * KNUTH_MULTIPLIER) & 0xFFFFFFFF",
            "replica_idx = hashed % replica_count",
            "map_index = safe_expert_id * map_slots + replica_idx",
        ),
        # By which a draft model is known.
        Path("config/speculative.py"): ('runner="draft",',),
    },
)


def refusals() -> Iterator[str]:
    """Yield one sentence for each assumption about this process's vLLM that does not hold."""
    yield from guards.refusals(ASSUMED)
    policies = guards.found(f"{EPLB}.policy.EPLB_POLICIES")
    if policies is None or set(policies) != {"default"}:
        yield f"vLLM's policies are {sorted(policies or ())}, expected 'default' alone"
    if policies is not guards.found(f"{STATE}.EPLB_POLICIES"):
        yield "eplb_state of vLLM has another table of policies than policy, expected the same"


def register() -> None:
    """Load the plug-in if ``EPLB_CONFIG`` names a deployment, and a trace to replay. Never raises.

    Without its trace vLLM refuses the strategy ``eplb_trace``, which it does not know then.
    """
    if os.environ.get(CONFIG_VARIABLE):
        show_log()
    load(os.environ)
    if os.environ.get("VLLM_MOE_ROUTING_SIMULATION_STRATEGY") == "eplb_trace":
        try:
            from rebalance.engines.vllm.replay import register_replay

            register_replay(os.environ)
        except Exception as exc:
            log.error("no trace is replayed: %s", exc)


def load(environ: Mapping[str, str]) -> bool:
    """Load the plug-in once for each process, as ``load_plugin``; whether it is loaded."""
    return bool(_loaded) or load_plugin("vllm", environ, _install)


def _install(settings: PluginSettings) -> Iterator[str]:
    from rebalance.engines.vllm.hooks import install
    from rebalance.engines.vllm.process import PluginProcess

    yield from refusals()
    process = PluginProcess(settings)
    install(process)
    _loaded.append(process)
    set_part("vllm", "plugin", is_on=True)
