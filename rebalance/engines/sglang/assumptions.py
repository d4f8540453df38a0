"""What the plug-in uses of SGLang and assumes about it: names, signatures, attributes, digests.

``ASSUMED`` is what a serving process needs, ``COMMAND`` what ``eplb check`` needs besides.
"""

from __future__ import annotations

from rebalance.engines.common.guards import Assumptions

SRT = "sglang.srt"
EPLB, FIELDS = f"{SRT}.eplb", f"{SRT}.arg_groups.fields"
LOCATION, MANAGER = f"{EPLB}.expert_location", f"{EPLB}.eplb_manager"
DISTRIBUTION, DISPATCH = f"{EPLB}.expert_distribution", f"{EPLB}.expert_location_dispatch"
CONTEXT, ELASTIC = f"{SRT}.runtime_context", f"{SRT}.elastic_ep.elastic_ep"
RUNNER = f"{SRT}.model_executor.model_runner_components"
RELEASES = "0.5.21", "0.5.23"

ASSUMED = Assumptions(
    "sglang",
    RELEASES,
    signatures={
        f"{MANAGER}.EPLBManager.on_forward_pass_end": "self",
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
        f"{RUNNER}.moe_ep_setup.init_lplb_solvers": "model_config",
        f"{RUNNER}.weight_updater.WeightUpdater.update_weights_from_disk": (
            "self model_path load_format ..."
        ),
        f"{DISTRIBUTION}._StatAccumulator.append": (
            "self forward_pass_id gatherer_key single_pass_data outputs"
        ),
        f"{DISTRIBUTION}._ExpertDistributionRecorderReal._on_forward_pass_start": (
            "self forward_batch"
        ),
        f"{DISTRIBUTION}._ExpertDistributionRecorderReal._reset": "self",
        f"{DISTRIBUTION}.get_global_expert_distribution_recorder": "",
        f"{LOCATION}.get_global_expert_location_metadata": "",
        f"{LOCATION}.ExpertLocationMetadata.update": "self other update_layer_ids",
        f"{LOCATION}.ExpertLocationMetadata.init_by_eplb": (
            "model_config logical_count use_flat_topology"
        ),
        f"{LOCATION}.ModelConfigForExpertLocation.from_model_config": "model_config",
        f"{DISPATCH}.ExpertLocationDispatchInfo.init_new": "layer_id [is_draft]",
        f"{DISPATCH}.topk_ids_logical_to_physical": "topk_ids info log2phy_prob",
        f"{EPLB}.eplb_algorithms.elasticity_aware.rebalance_experts": (
            "weight num_replicas num_groups num_nodes num_gpus enable_hierarchical active_ranks"
        ),
        f"{ELASTIC}.ElasticEPState.reset": "self",
        f"{ELASTIC}.ElasticEPStateManager.instance": "",
        f"{LOCATION}.ExpertLocationMetadata": (
            "physical_to_logical_map physical_to_logical_map_cpu logical_to_all_physical_map "
            "logical_to_all_physical_map_cpu logical_to_all_physical_map_num_valid ep_size "
            "logical_to_rank_dispatch_physical_map"
        ),
        f"{SRT}.plugins.hook_registry.HookRegistry.register": "target hook hook_type source",
        f"{CONTEXT}.get_exec": "",
        f"{CONTEXT}.get_model": "",
        f"{CONTEXT}.get_parallel": "",
    },
    attributes={
        f"{MANAGER}.EPLBManager": (
            "_model_config _get_model _get_expert_location_updater _get_expert_backup_client "
            "_get_weight_updater _rebalance_num_iterations _rebalance_disabled_reason"
        ),
        f"{LOCATION}.ExpertLocationMetadata": "num_logical_experts num_physical_experts",
        f"{LOCATION}.ModelConfigForExpertLocation": "num_groups",
        f"{DISTRIBUTION}._ExpertDistributionRecorderReal": "recording",
        f"{ELASTIC}.ElasticEPState": "has_scaled",
        f"{SRT}.plugins.hook_registry.HookRegistry": "_patched",
        f"{SRT}.plugins.hook_registry.HookType": "AFTER AROUND",
        f"{SRT}.model_executor.forward_batch_info.ForwardBatch": "forward_mode",
        f"{SRT}.model_executor.forward_batch_info.ForwardMode": (
            "EXTEND SPLIT_PREFILL PREBUILT DECODE TARGET_VERIFY MIXED IDLE"
        ),
        f"{FIELDS}.exec_.ExecMoe": (
            "is_ep_joiner ep_dispatch_algorithm moe_a2a_backend moe_runner_backend "
            "expert_distribution_recorder_mode elastic_ep_backend"
        ),
        f"{FIELDS}.parallel.Parallel": ("tp_rank tp_size pp_size ep_size nnodes dp_size dp_rank"),
        f"{FIELDS}.model.Model": "model_path quantization",
    },
    # All of these decide which replica serves a token, or how a map becomes live.
    digests={
        f"{LOCATION}.ExpertLocationMetadata.update": "cceddcb94d426795",
        f"{DISPATCH}._topk_ids_logical_to_physical_dynamic": "a08d1c7bbf016979",
        f"{DISPATCH}._topk_ids_logical_to_physical_static": "2c4322c8c3ae81b4",
    },
    lines={
        f"{MANAGER}.update_expert_location_with_recovery": (
            "model.routed_experts_weights_of_layer,",
        ),
        f"{DISTRIBUTION}._StatAccumulator.append": ('"global_physical_count"',),
        # The groups of settings that ``get_exec`` gives are the classes of ``fields``.
        f"{CONTEXT}.get_exec": ('config_bag("exec")',),
        f"{MANAGER}.EPLBManager.__init__": ("get_exec().moe.",),
    },
)
COMMAND = Assumptions(
    "sglang",
    RELEASES,
    signatures={f"{SRT}.server_args.ServerArgs.add_cli_args": "parser"},
    attributes={
        f"{FIELDS}.exec_.ExecMoe": (
            "enable_eplb ep_num_redundant_experts ep_dispatch_algorithm moe_a2a_backend "
            "expert_distribution_recorder_mode elastic_ep_backend eplb_rebalance_num_iterations"
        ),
        f"{FIELDS}.parallel.Parallel": "tp_size pp_size ep_size nnodes dp_size",
        f"{FIELDS}.model.Model": "model_path",
    },
)
