"""Entry point ``sglang.srt.plugins``, which the engine calls in each of its processes.

``ASSUMED`` is what the plug-in assumes about SGLang 0.5.23.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from eplb.settings.loader import CONFIG_VARIABLE
from rebalance.engines.common.guards import Assumptions, refusals
from rebalance.engines.common.start import load_plugin, show_log

if TYPE_CHECKING:
    from rebalance.engines.common.plugin_settings import PluginSettings

EPLB = "sglang.srt.eplb"
LOCATION, MANAGER = f"{EPLB}.expert_location", f"{EPLB}.eplb_manager"
DISTRIBUTION, DISPATCH = f"{EPLB}.expert_distribution", f"{EPLB}.expert_location_dispatch"

ASSUMED = Assumptions(
    "sglang",
    "0.5.23",
    signatures={
        f"{MANAGER}.EPLBManager.on_forward_pass_end": "self",
        f"{MANAGER}.EPLBManager.reset_generator": "self",
        f"{MANAGER}.EPLBManager._compute_update_layer_ids_chunks": "self",
        f"{MANAGER}.update_expert_location_with_recovery": (
            "expert_location_updater model new_expert_location_metadata update_layer_ids "
            "tp_rank use_flat_topology expert_backup_client update_weights_from_disk_callable "
            "ep_dispatch_algorithm init_lplb_solvers_callable"
        ),
        f"{EPLB}.expert_location_updater.ExpertLocationUpdater.update": (
            "self routed_experts_weights_of_layer new_expert_location_metadata "
            "update_layer_ids nnodes rank use_flat_topology"
        ),
        f"{DISTRIBUTION}._StatAccumulator.append": (
            "self forward_pass_id gatherer_key single_pass_data outputs"
        ),
        f"{DISTRIBUTION}._ExpertDistributionRecorderReal._on_forward_pass_start": (
            "self forward_batch"
        ),
        f"{LOCATION}.ExpertLocationMetadata.update": "self other update_layer_ids",
        f"{LOCATION}.ExpertLocationMetadata.init_by_eplb": (
            "model_config logical_count use_flat_topology"
        ),
        f"{EPLB}.eplb_algorithms.elasticity_aware.rebalance_experts": (
            "weight num_replicas num_groups num_nodes num_gpus enable_hierarchical active_ranks"
        ),
        "sglang.srt.elastic_ep.elastic_ep.ElasticEPState.reset": "self",
        f"{EPLB}.eplb_algorithms.rebalance_experts": (
            "tokens_per_expert num_physical_experts num_local_physical_experts num_groups "
            "num_nodes algorithm"
        ),
        f"{LOCATION}.ExpertLocationMetadata": (
            "physical_to_logical_map physical_to_logical_map_cpu logical_to_all_physical_map "
            "logical_to_all_physical_map_cpu logical_to_all_physical_map_num_valid ep_size "
            "logical_to_rank_dispatch_physical_map"
        ),
    },
    # All of these decide which replica serves a token, or how a map becomes live.
    digests={
        f"{LOCATION}.ExpertLocationMetadata.update": "86a12db8e341b635",
        f"{DISPATCH}._topk_ids_logical_to_physical_dynamic": "b04b09f02c0ac52e",
        f"{DISPATCH}._topk_ids_logical_to_physical_static": "c2e55340ac8e6b7a",
    },
    lines={
        f"{MANAGER}.EPLBManager.__init__": (
            "self._model_config =",
            "self._get_model =",
            "self._get_expert_location_updater =",
            "self._get_expert_backup_client =",
            "self._get_weight_updater =",
            "self._rebalance_num_iterations =",
            "self._rebalance_disabled_reason =",
        ),
        f"{DISTRIBUTION}._StatAccumulator.append": ('"global_physical_count"',),
    },
)


def register() -> None:
    """Register the hooks if ``EPLB_CONFIG`` names a deployment. Never raises."""
    if os.environ.get(CONFIG_VARIABLE):
        show_log()
    load_plugin("sglang", os.environ, _install)


def _install(settings: PluginSettings) -> Iterator[str]:
    from rebalance.engines.sglang.hooks import Hooks

    yield from refusals(ASSUMED)
    Hooks(settings).register()
