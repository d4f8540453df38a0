"""What the plug-in uses of vLLM and assumes about it: names, signatures, attributes, lines.

``ASSUMED`` is what a serving process needs; ``RELOAD`` what it needs besides to serve right at once
after its weights were loaded again; ``REPLAY``, ``COMMAND`` and ``CONFORM`` what a replay,
``eplb check`` and ``eplb conform`` need.
"""

from __future__ import annotations

from rebalance.engines.common.guards import Assumptions

EPLB = "vllm.distributed.eplb"
STATE, EXECUTE = f"{EPLB}.eplb_state", f"{EPLB}.rebalance_execute"
FUSED_MOE = "vllm.model_executor.layers.fused_moe"
RUNNERS = "vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner"
# Where the parser of ``vllm serve`` is, in newer and older releases.
PARSERS = "vllm.entrypoints.common.cli_args", "vllm.entrypoints.launchers.cli_args"
RELEASES = "0.31", "0.33"

ASSUMED = Assumptions(
    "vllm",
    RELEASES,
    signatures={
        f"{EPLB}.policy.abstract.AbstractEplbPolicy.rebalance_experts": (
            "weight num_replicas num_groups num_nodes num_ranks old_global_expert_indices"
        ),
        f"{STATE}.EplbState.add_model": "self model model_config [model_name]",
        f"{STATE}.EplbState.step": "self is_dummy is_profile log_stats",
        f"{STATE}.EplbState._should_record_current_step": "self log_stats",
        f"{STATE}._commit_eplb_maps": "model_state new_physical_to_logical_map",
        f"{STATE}._commit_eplb_maps_for_layer": "model_state new_physical_to_logical_map layer",
        f"{STATE}.get_eplb_group": "",
        f"{STATE}.get_node_count": "",
        f"{EXECUTE}.move_to_buffer": (
            "num_local_experts old_indices new_indices expert_weights expert_weights_buffers "
            "stream ep_rank communicator layer_idx ..."
        ),
        f"{EPLB}.eplb_utils.device_stream": "stream",
        "vllm.utils.gpu_sync_debug.gpu_sync_allowed": "first_only",
        "vllm.distributed.parallel_state.get_pp_group": "",
        "vllm.config.model.ModelConfig.compute_hash": "self",
        **{
            f"{runner}.GPUModelRunner.execute_model": "self scheduler_output ..."
            for runner in RUNNERS
        },
    },
    attributes={
        f"{EPLB}.policy": "EPLB_POLICIES",
        STATE: "EPLB_POLICIES",
        f"{STATE}.EplbState": "parallel_config model_states should_record_tensor",
        f"{STATE}.EplbModelState": (
            "physical_to_logical_map logical_to_physical_map logical_replica_count "
            "expert_load_pass model communicator"
        ),
        f"{EXECUTE}.TransferMetadata": (
            "is_unchanged is_received_locally recv_primary_mask recv_count"
        ),
        "vllm.model_executor.models.interfaces.MixtureOfExperts": (
            "expert_weights moe_layers num_moe_layers num_expert_groups num_logical_experts"
        ),
        "vllm.distributed.parallel_state.GroupCoordinator": (
            "ranks rank_in_group world_size cpu_group device_group"
        ),
        "vllm.config.parallel.ParallelConfig": (
            "enable_elastic_ep eplb_config pipeline_parallel_size"
        ),
        "vllm.config.parallel.EPLBConfig": "communicator",
        "vllm.config.model.ModelConfig": "model runner_type",
        "vllm.v1.core.sched.output.SchedulerOutput": "num_scheduled_tokens",
        f"{RUNNERS[0]}.GPUModelRunner": "num_spec_tokens",
        f"{RUNNERS[1]}.GPUModelRunner": "num_speculative_steps",
        # The slots of a layer, and what kernels read beside them.
        f"{FUSED_MOE}.runner.moe_runner.MoERunner": "layer_name routed_experts",
        f"{FUSED_MOE}.routed_experts.RoutedExperts": "top_k quant_method",
        f"{FUSED_MOE}.fused_moe_method_base.FusedMoEMethodBase": "moe_quant_config moe_kernel",
        f"{FUSED_MOE}.config.FusedMoEQuantConfig": "_a1 _a2 _w1 _w2",
        f"{FUSED_MOE}.modular_kernel.FusedMoEKernel": "fused_experts",
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
        f"{EXECUTE}.rearrange_expert_weights_inplace": (
            "transfer_metadata = move_to_buffer(",
            "old_indices=old_global_expert_indices_cpu[layer_idx]",
            "new_indices=new_global_expert_indices_cpu[layer_idx]",
            "expert_weights_buffers=weights_buffer",
            "stream=None",
            "communicator=communicator",
            "layer_idx=layer_idx",
            "transfer_metadata=transfer_metadata",
        ),
        f"{EXECUTE}.transfer_layer": (
            "return move_to_buffer(",
            "old_indices=old_layer_indices_np",
            "new_indices=new_layer_indices_np",
            "expert_weights_buffers=expert_weights_buffer",
            "stream=stream",
            "communicator=communicator",
            "layer_idx=layer_idx",
        ),
        f"{EXECUTE}.move_from_buffer": (
            "dest_mask_np = np.logical_and(~is_unchanged, copy_mask)",
            "copy_mask = np.logical_or(is_received_locally, recv_primary_mask)",
            "if recv_count == 0:",
        ),
        f"{EPLB}.async_worker.transfer_run_periodically": (
            "model_state.communicator.set_stream(stream)",
            "torch.distributed.all_reduce(flag, group=eplb_cpu_group)",
        ),
        f"{EXECUTE}.move_to_buffer": (
            "b[dst].copy_(w[src_local], non_blocking=True)",
            "communicator.execute()",
        ),
        # The rule by which the kernel chooses a replica: ``replica_lists`` depends on each line.
        f"{FUSED_MOE}.router.base_router": (
            "KNUTH_MULTIPLIER = 2654435769",
            "token_idx = (offs // num_active_experts).to(tl.int64)",
            "hashed = (token_idx * KNUTH_MULTIPLIER) & 0xFFFFFFFF",
            "replica_idx = hashed % replica_count",
            "map_index = safe_expert_id * map_slots + replica_idx",
        ),
        # By which a draft model is known.
        "vllm.config.speculative": ('runner="draft",',),
    },
)

LAYERWISE = "vllm.model_executor.model_loader.reload"
RELOAD = Assumptions(
    "vllm",
    RELEASES,
    signatures={
        f"{LAYERWISE}.layerwise.finalize_layerwise_processing": "model model_config",
        f"{LAYERWISE}.layerwise.get_layerwise_info": "layer",
        f"{LAYERWISE}.types.LayerReloadingInfo.can_load": "self",
    },
    attributes={
        f"{LAYERWISE}.types.LayerReloadingInfo": "load_numel",
        f"{STATE}.EplbModelState": "rebalanced",
    },
    lines={
        f"{LAYERWISE}.layerwise.finalize_layerwise_reload": ("finalize_layerwise_processing(",),
        f"{FUSED_MOE}.routed_experts.RoutedExperts.build_expert_params_mapping": (
            "EplbState.build_initial_global_physical_to_logical_map(",
        ),
    },
)

NVFP4 = "vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils"
SIMULATOR = f"{FUSED_MOE}.router.routing_simulator_router"
# What is used where nothing serves by it: a release without it serves with the plug-in.
REPLAY = Assumptions(
    "vllm",
    ("0.33", "0.33"),
    signatures={
        f"{SIMULATOR}.RoutingStrategy.route_tokens": (
            "self hidden_states router_logits top_k indices_type"
        ),
        f"{SIMULATOR}.RoutingSimulator.get_strategy": "strategy_name",
        f"{SIMULATOR}.RoutingSimulator.register_strategy": "name strategy",
    },
    # Routers ask for their strategy once, when they are built.
    lines={f"{SIMULATOR}.RoutingSimulatorRouter.__init__": ("RoutingSimulator.get_strategy(",)},
)
COMMAND = Assumptions(
    "vllm",
    RELEASES,
    signatures={
        "|".join(f"{parser}.make_arg_parser" for parser in PARSERS): "parser",
        "vllm.utils.argparse_utils.FlexibleArgumentParser.parse_args": "self args namespace",
    },
    attributes={
        "vllm.platforms": "current_platform",
        "vllm.platforms.interface.Platform": "device_type",
        "vllm.config.model.ModelConfig": "model",
        "vllm.config.parallel.EPLBConfig": (
            "communicator num_redundant_experts step_interval window_size"
        ),
        "vllm.config.parallel.ParallelConfig": (
            "enable_eplb enable_elastic_ep enable_expert_parallel eplb_config "
            "tensor_parallel_size prefill_context_parallel_size data_parallel_size "
            "pipeline_parallel_size distributed_executor_backend data_parallel_backend"
        ),
    },
    lines={"vllm.entrypoints.cli.serve": ("args.model = args.model_tag",)},
)
CONFORM = Assumptions(
    "vllm",
    RELEASES,
    signatures={
        f"{EXECUTE}.transfer_layer": (
            "old_layer_indices new_layer_indices expert_weights expert_weights_buffer ep_group "
            "communicator is_profile stream rank_mapping layer_idx ..."
        ),
        f"{EXECUTE}.move_from_buffer": (
            "expert_weights expert_weights_buffers transfer_metadata new_indices ep_rank"
        ),
        f"{NVFP4}.convert_swizzled_to_linear": "a_sf_swizzled m k block_size",
    },
    attributes={
        "vllm.model_executor.models.interfaces.MixtureOfExperts": (
            "num_physical_experts num_local_physical_experts num_redundant_experts "
            "num_routed_experts num_shared_experts"
        ),
        f"{STATE}.EplbModelState": "expert_buffer",
        f"{EPLB}.eplb_communicator.TorchDistGlooStagedEplbCommunicator": "_ops",
        f"{FUSED_MOE}.config.FusedMoEQuantConfig": "is_scale_swizzled",
        f"{FUSED_MOE}.config.FusedMoEQuantDesc": "dtype scale alpha_or_gscale bias",
    },
)
