"""What the plug-in assumes about vLLM, checked against its signatures and source at load time.

A check that fails refuses to load the plug-in with one sentence; vLLM serves as without it.
"""

from __future__ import annotations

import importlib.metadata
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eplb.errors import ConfigError

VERSIONS = "0.33."  # of which the sources were read and the contract tests run

# Parameters by name, in order. Names of ``vllm.distributed.eplb``: module, then attribute.
SIGNATURES = {
    ("policy.abstract", "AbstractEplbPolicy.rebalance_experts"): (
        "weight num_replicas num_groups num_nodes num_ranks old_global_expert_indices"
    ),
    ("eplb_state", "EplbState.add_model"): "self model model_config model_name",
    ("eplb_state", "EplbState.step"): "self is_dummy is_profile log_stats",
    ("eplb_state", "EplbState._should_record_current_step"): "self log_stats",
    ("eplb_state", "_commit_eplb_maps"): "model_state new_physical_to_logical_map",
    ("eplb_state", "_commit_eplb_maps_for_layer"): (
        "model_state new_physical_to_logical_map layer"
    ),
    ("eplb_state", "create_eplb_communicator"): (
        "group_coordinator backend expert_weights expert_buffer"
    ),
    ("eplb_communicator", "EplbCommunicator.add_send"): "self tensors dst_rank expert_id",
    ("eplb_communicator", "EplbCommunicator.add_recv"): "self tensors src_rank expert_id",
    ("eplb_communicator", "EplbCommunicator.execute"): "self",
    ("eplb_communicator", "EplbCommunicator.set_transfer_context"): "self old_indices layer_idx",
    ("eplb_communicator", "EplbCommunicator.set_stream"): "self stream",
    ("eplb_utils", "device_stream"): "stream",
}
# Lines of a function's source that the plug-in depends on.
MARKERS = {
    ("eplb_state", "EplbState.add_model"): (
        "self.policy = EPLB_POLICIES[policy_type]",
        "communicator = create_eplb_communicator(",
        "MAX_EXPERT_REDUNDANCY = 1023",
    ),
    ("eplb_state", "EplbState.step"): (
        "eplb_model_state.expert_load_pass.zero_()",
        "should_record = self._should_record_current_step(log_stats=log_stats)",
        "self._update_layer_should_record(log_stats=log_stats)",
    ),
    ("eplb_state", "EplbState.rearrange"): (
        "self.policy.rebalance_experts(",
        "_commit_eplb_maps(",
        "self._allreduce_list(global_expert_load_windows)",
    ),
    ("eplb_state", "_move_to_workspace"): ("_commit_eplb_maps_for_layer(",),
    ("async_worker", "transfer_run_periodically"): (
        "model_state.communicator.set_stream(stream)",
        "torch.distributed.all_reduce(flag, group=eplb_cpu_group)",
    ),
    ("rebalance_execute", "move_to_buffer"): (
        "communicator.set_transfer_context(old_indices, layer_idx)",
        "communicator.execute()",
    ),
}
FIELDS = (
    "physical_to_logical_map logical_to_physical_map logical_replica_count expert_load_pass model "
    "communicator"
)
# Lines of files that are read and not imported: they need GPU libraries.
FILES = {
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
}


def check_engine() -> None:
    """Check the vLLM of this process.

    Raises:
        ConfigError: an assumption does not hold.
    """
    for refusal in refusals():
        raise ConfigError(f"the EPLB plug-in is not loaded: {refusal}")


def refusals() -> Iterator[str]:
    """Yield one sentence for each assumption that does not hold."""
    version = importlib.metadata.version("vllm")
    if not version.startswith(VERSIONS):
        yield f"vllm is {version}, expected {VERSIONS}x, which the plug-in was tested with"
    for (module, name), expected in SIGNATURES.items():
        yield from _wrong_signature(module, name, expected)
    for (module, name), lines in MARKERS.items():
        source = _source(module, name)
        yield from (
            f"{module}.{name} of vLLM lacks the line {line!r}"
            for line in lines
            if line not in source
        )
    yield from _wrong_state()
    yield from _wrong_files()


def _wrong_signature(module: str, name: str, expected: str) -> Iterator[str]:
    function = _found(module, name)
    if function is None:
        yield f"{module}.{name} does not exist in this vLLM"
        return
    found = " ".join(n for n in inspect.signature(function).parameters if n != "cls")
    if found != expected:
        yield f"{module}.{name} of vLLM takes ({found}), expected ({expected})"


def _wrong_state() -> Iterator[str]:
    policies = _found("policy", "EPLB_POLICIES")
    if policies is None or set(policies) != {"default"}:
        yield f"vLLM's policies are {sorted(policies or ())}, expected 'default' alone"
    if policies is not _found("eplb_state", "EPLB_POLICIES"):
        yield "eplb_state of vLLM has another table of policies than policy, expected the same"
    fields = getattr(_found("eplb_state", "EplbModelState"), "__dataclass_fields__", {})
    yield from (
        f"EplbModelState of vLLM has no field {name}"
        for name in FIELDS.split()
        if name not in fields
    )


def _wrong_files() -> Iterator[str]:
    import vllm

    for name, lines in FILES.items():
        file = Path(vllm.__file__).parent / name
        source = file.read_text(encoding="utf-8") if file.is_file() else ""
        yield from (
            f"{name.name} of vLLM lacks the line {line!r}, expected by the plug-in"
            for line in lines
            if line not in source
        )


def _found(module: str, name: str) -> Any:
    """An attribute of a module of ``vllm.distributed.eplb``; None where there is none."""
    try:
        found: Any = importlib.import_module(f"vllm.distributed.eplb.{module}")
    except ImportError:
        return None
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _source(module: str, name: str) -> str:
    function = _found(module, name)
    return "" if function is None else inspect.getsource(function)
