"""Names of all routed experts' tensors in an index, found by the family's description."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from eplb.errors import CheckpointError
from runtime.checkpoints.description import ExpertLayout
from runtime.checkpoints.model_config import CONFIG_FILE, ModelConfig
from runtime.checkpoints.shards import Shards

# One spelling for each number, so that no two names are one tensor.
NUMBER = "(0|[1-9][0-9]{0,5})"
Key = tuple[int, str]  # expert, or EVERY_EXPERT; part: projection and suffix
EVERY_EXPERT = -1


@dataclass(frozen=True)
class ExpertNames:
    """Names by layer and by expert and part; the layout that they have."""

    layout: ExpertLayout
    prefix: str  # template of a layer's prefix
    of_layer: dict[int, dict[Key, str]] = field(default_factory=dict)
    # Of layers of multi-token prediction: some checkpoints leave them as they were when quantised.
    mtp_prefix: dict[int, str] = field(default_factory=dict)
    mtp_layout: dict[int, ExpertLayout] = field(default_factory=dict)
    # Of experts without computation, which some libraries save though nothing reads them.
    without_computation: set[str] = field(default_factory=set)


def find_names(shards: Shards, config: ModelConfig) -> ExpertNames:
    """Find them by the first prefix and layout of the family that the index has.

    Raises:
        CheckpointError: the index has no experts, or some in other layers than config.json says, or
            a tensor of theirs that no description names.
    """
    family = config.family
    for prefix in family.layers:
        for layout in family.layouts:
            names = ExpertNames(layout, prefix)
            _collect(names, prefix, 0, shards, config)
            if names.of_layer:
                _add_mtp(names, shards, config)
                _check_layers(names, shards, config)
                return names
    looked_for = ", ".join(
        f"{prefix}.{layout.down}" for prefix in family.layers for layout in family.layouts
    )
    raise CheckpointError(
        f"{shards.path}: no routed experts of {family.name} in the weight files, "
        f"expected tensors named {looked_for}"
    )


def _collect(
    names: ExpertNames, prefix: str, first_layer: int, shards: Shards, config: ModelConfig
) -> None:
    """Add all names with a prefix; their layers are counted from ``first_layer``."""
    start = re.sub(r"\\{(layer|mtp)\\}", NUMBER, re.escape(prefix))
    patterns = {
        projection: re.compile(
            start
            + re.escape(f".{name}").replace(re.escape("{expert}"), NUMBER)
            + r"((?:[._].*)?)"  # so that "gate_proj" is not found in "gate_projector"
        )
        for projection, name in names.layout.names.items()
    }
    for name in shards:
        for projection, pattern in patterns.items():
            if (match := pattern.fullmatch(name)) is None:
                continue
            layer, *expert, suffix = match.groups()
            number = int(expert[0]) if expert else EVERY_EXPERT
            _check_name(name, suffix, number, names.layout, shards, config)
            if number >= config.num_experts:
                names.without_computation.add(name)
            else:
                found = names.of_layer.setdefault(first_layer + int(layer), {})
                found[number, projection + suffix] = name


def _check_name(
    name: str, suffix: str, expert: int, layout: ExpertLayout, shards: Shards, config: ModelConfig
) -> None:
    if suffix not in layout.suffixes:
        raise CheckpointError(
            f"{shards.path}: tensor {name} belongs to a routed expert and has the unknown suffix "
            f"{suffix!r}, expected one of: {', '.join(layout.suffixes)}"
        )
    routes = config.num_experts + config.num_zero
    if expert >= routes:
        raise CheckpointError(
            f"{shards.path}: tensor {name} is of expert {expert}, "
            f"expected 0..{routes - 1} as {CONFIG_FILE} says"
        )


def _add_mtp(names: ExpertNames, shards: Shards, config: ModelConfig) -> None:
    """Layers of multi-token prediction are numbered after all others."""
    for template in config.family.mtp_layers:
        found = names
        for layout in (names.layout, *config.family.layouts) if template != names.prefix else ():
            found = ExpertNames(layout, template)
            _collect(found, template, config.num_layers, shards, config)
            if found.of_layer:
                break
        for layer in [layer for layer in found.of_layer if layer >= config.num_layers]:
            names.of_layer[layer] = found.of_layer[layer]
            names.mtp_prefix[layer], names.mtp_layout[layer] = template, found.layout


def _check_layers(names: ExpertNames, shards: Shards, config: ModelConfig) -> None:
    found = tuple(sorted(layer for layer in names.of_layer if layer < config.num_layers))
    if found != config.moe_layers:
        raise CheckpointError(
            f"{shards.path / CONFIG_FILE}: routed experts in layers {listed(config.moe_layers)}, "
            f"expected {listed(found)} as in the weight files"
        )


def listed(layers: tuple[int, ...]) -> str:
    """Layer numbers as text, runs of more than two shortened."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and runs[-1][-1] == layer - 1:
            runs[-1] = [runs[-1][0], layer]
        else:
            runs.append([layer])
    ends = [(", " if run[-1] - run[0] == 1 else "..").join(map(str, run)) for run in runs]
    return ", ".join(ends) or "none"
