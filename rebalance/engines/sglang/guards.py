"""What the plug-in assumes about the engine, checked before anything of the engine is changed.

A signature shows that a call still fits. Where figures depend on what a function does, its source
is compared, without comments and layout: the planner books the engine's rule as it was read.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import pkgutil
import textwrap
from collections.abc import Callable
from dataclasses import fields
from importlib.metadata import version
from typing import Any

from eplb.errors import ConfigError

EPLB = "sglang.srt.eplb"
LOCATION = f"{EPLB}.expert_location"
MANAGER = f"{EPLB}.eplb_manager"
READ_VERSION = "0.5.23"

# Parameters that are used, in the engine's order; those it may have beside them have defaults.
SIGNATURES = {
    f"{MANAGER}.EPLBManager.on_forward_pass_end": ("self",),
    f"{MANAGER}.EPLBManager.reset_generator": ("self",),
    f"{MANAGER}.EPLBManager._compute_update_layer_ids_chunks": ("self",),
    f"{MANAGER}.update_expert_location_with_recovery": (
        "expert_location_updater",
        "model",
        "new_expert_location_metadata",
        "update_layer_ids",
        "tp_rank",
        "use_flat_topology",
        "expert_backup_client",
        "update_weights_from_disk_callable",
        "ep_dispatch_algorithm",
        "init_lplb_solvers_callable",
    ),
    f"{EPLB}.expert_location_updater.ExpertLocationUpdater.update": (
        "self",
        "routed_experts_weights_of_layer",
        "new_expert_location_metadata",
        "update_layer_ids",
        "nnodes",
        "rank",
        "use_flat_topology",
    ),
    f"{EPLB}.expert_distribution._StatAccumulator.append": (
        "self",
        "forward_pass_id",
        "gatherer_key",
        "single_pass_data",
        "outputs",
    ),
    f"{EPLB}.expert_distribution._ExpertDistributionRecorderReal._on_forward_pass_start": (
        "self",
        "forward_batch",
    ),
    f"{LOCATION}.ExpertLocationMetadata.update": ("self", "other", "update_layer_ids"),
    f"{EPLB}.eplb_algorithms.rebalance_experts": (
        "tokens_per_expert",
        "num_physical_experts",
        "num_local_physical_experts",
        "num_groups",
        "num_nodes",
        "algorithm",
    ),
}
# BLAKE2 of the syntax trees as read in READ_VERSION.
SOURCES = {
    f"{LOCATION}.ExpertLocationMetadata.update": "86a12db8e341b635",
    f"{EPLB}.expert_location_dispatch._topk_ids_logical_to_physical_dynamic": "b04b09f02c0ac52e",
    f"{EPLB}.expert_location_dispatch._topk_ids_logical_to_physical_static": "c2e55340ac8e6b7a",
}
MANAGER_FIELDS = (
    "_model_config",
    "_get_model",
    "_get_expert_location_updater",
    "_get_expert_backup_client",
    "_get_weight_updater",
    "_rebalance_num_iterations",
    "_rebalance_disabled_reason",
)
METADATA_FIELDS = (
    "physical_to_logical_map",
    "physical_to_logical_map_cpu",
    "logical_to_all_physical_map",
    "logical_to_all_physical_map_cpu",
    "logical_to_all_physical_map_num_valid",
    "ep_size",
    "logical_to_rank_dispatch_physical_map",
)


def check_engine() -> None:
    """Refuse an engine that is not as it was read, and another release of it.

    Raises:
        ConfigError: a name is missing, or differs from what the plug-in was written for.
    """
    release = version("sglang")
    if release != READ_VERSION:
        raise ConfigError(
            f"sglang {release} is installed, expected {READ_VERSION}: the plug-in was not tested "
            "with another release"
        )
    for path, expected in SIGNATURES.items():
        _check_signature(path, _found(path), expected)
    for path, digest in SOURCES.items():
        found = source_digest(_found(path))
        if found != digest:
            raise ConfigError(
                f"{path} has source {found}, expected {digest} as in sglang {READ_VERSION}: "
                "a plan would book another rule than the engine follows"
            )
    metadata = _found(f"{LOCATION}.ExpertLocationMetadata")
    names = tuple(field.name for field in fields(metadata))
    if names != METADATA_FIELDS:
        raise ConfigError(
            f"{LOCATION}.ExpertLocationMetadata has fields {names}, expected {METADATA_FIELDS}"
        )
    source = inspect.getsource(_found(f"{MANAGER}.EPLBManager.__init__"))
    missing = [name for name in MANAGER_FIELDS if f"self.{name} =" not in source]
    if missing:
        raise ConfigError(f"{MANAGER}.EPLBManager has no {missing[0]}, expected it set in __init__")
    source = inspect.getsource(_found(f"{EPLB}.expert_distribution._StatAccumulator.append"))
    if '"global_physical_count"' not in source:
        raise ConfigError(
            f"{EPLB}.expert_distribution._StatAccumulator.append reads no global_physical_count, "
            "expected counts of all slots under that key"
        )


def source_digest(function: Callable[..., Any]) -> str:
    """Digest of what a function does: its syntax tree, without comments and layout."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    return hashlib.blake2b(ast.dump(tree).encode(), digest_size=8).hexdigest()


def _found(path: str) -> Any:
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError) as exc:
        raise ConfigError(
            f"the engine has no {path} ({exc}), expected it as in {READ_VERSION}"
        ) from exc


def _check_signature(path: str, function: Any, expected: tuple[str, ...]) -> None:
    parameters = inspect.signature(function).parameters
    named = tuple(parameters)
    further = [one for one in named[len(expected) :] if parameters[one].default is inspect._empty]
    if named[: len(expected)] != expected or further:
        raise ConfigError(
            f"{path} takes ({', '.join(named)}), expected ({', '.join(expected)}) "
            f"as in sglang {READ_VERSION}"
        )
