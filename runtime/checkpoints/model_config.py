"""What config.json says of a model's experts, read by its family's description."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eplb.core.bounded_json import decode_json
from eplb.errors import CheckpointError
from runtime.checkpoints.families import Family, Rule, family_of

CONFIG_FILE = "config.json"
# Far above any published model, so that a damaged number cannot fill memory.
MAX_LAYERS = 4096
MAX_EXPERTS = 65536
MAX_SIZE = 2**20  # width of a hidden state


@dataclass(frozen=True)
class ModelConfig:
    """The figures of a model that decide which bytes an expert has."""

    family: Family
    num_layers: int  # dense ones included, MTP layers not
    moe_layers: tuple[int, ...]  # the model's own numbers, without MTP layers
    num_experts: int  # routed experts with weights
    top_k: int
    hidden: int
    intermediate: int  # width of one routed expert
    num_groups: int
    num_shared: int
    num_zero: int  # experts without computation, with the ids from num_experts on


def read_config(folder: Path) -> ModelConfig:
    """Read a checkpoint's config.json.

    Raises:
        CheckpointError: there is none, its family is unknown, or a figure is missing or impossible.
    """
    where = str(folder / CONFIG_FILE)
    try:
        found = decode_json((folder / CONFIG_FILE).read_bytes())
    except (OSError, ValueError) as exc:
        raise CheckpointError(f"{where} cannot be read as a model's configuration: {exc}") from exc
    if not isinstance(found, dict):
        raise CheckpointError(f"{where} cannot be read as a model's configuration: no JSON object")
    family = family_of(found, where)
    section = next((found[s] for s in family.sections if isinstance(found.get(s), dict)), found)
    keys = family.keys

    def number(
        names: tuple[str, ...], most: int, default: int | None = None, least: int = 1
    ) -> int:
        """Value of the first key that is there. A list has a value for each layer, all equal."""
        name = next((name for name in names if section.get(name) is not None), None)
        if name is None:
            if default is None:
                raise CheckpointError(f"{where}: expected one of the keys {', '.join(names)}")
            return default
        value = section[name]
        values = value if isinstance(value, list) and value else [value]
        if any(type(v) is not int or not least <= v <= most for v in values):
            expected = f"a whole number {least}..{most}"
        elif len(set(values)) > 1:
            expected = "the same for all layers"
        else:
            return int(values[0])
        raise CheckpointError(f"{where}: {name} is {value!r}, expected {expected}")

    num_layers = number(keys.num_layers, MAX_LAYERS)
    num_experts = number(keys.num_experts, MAX_EXPERTS)
    has_experts = [
        _has_experts(section, rule, key, num_layers, where) for rule, key in keys.moe_layers
    ]
    return ModelConfig(
        family,
        num_layers,
        tuple(n for n in range(num_layers) if all(claims[n] for claims in has_experts)),
        num_experts,
        number(keys.top_k, MAX_EXPERTS),
        number(keys.hidden, MAX_SIZE),
        number(keys.intermediate, MAX_SIZE),
        number(keys.num_groups, num_experts, default=1),
        number(keys.num_shared, MAX_EXPERTS, default=int(bool(family.shared)), least=0),
        number(keys.num_zero, MAX_EXPERTS, default=0, least=0),
    )


def _has_experts(
    section: Mapping[str, Any], rule: Rule, key: str, num_layers: int, where: str
) -> list[bool]:
    """Which layers have routed experts by one rule; all of them where its key is missing."""
    value = section.get(key)
    layers = range(num_layers)
    if value is None:
        return [True] * num_layers
    try:
        if rule is Rule.TYPES or (rule is Rule.EVERY and isinstance(value, list)):
            if not isinstance(value, list) or len(value) < num_layers:
                raise ValueError
            return [value[n] not in (0, "dense") for n in layers]
        if rule in (Rule.NOT_IN, Rule.ONLY_IN):
            numbers = [int(n) for n in value.split(",")] if isinstance(value, str) else value
            if any(type(number) is not int for number in numbers):
                raise ValueError
            listed = set(numbers)
            return [(n in listed) is (rule is Rule.ONLY_IN) for n in layers]
        if type(value) is not int or value < (rule is not Rule.FROM):
            raise ValueError
    except (TypeError, ValueError) as exc:
        raise CheckpointError(f"{where}: {key} is {value!r}, expected {rule.value}") from exc
    if rule is Rule.FROM:
        return [n >= value for n in layers]
    return [(n + (rule is Rule.EVERY_NTH)) % value == 0 for n in layers]
