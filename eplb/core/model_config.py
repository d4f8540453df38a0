"""What a model's config.json says of its routed experts, whatever family it is of.

Families name the same figures differently. Each figure has a tuple of keys, of which the first that
is there counts; which layers have routed experts is said by rules, one a key, and a layer has them
where every rule whose key is there says so. A family with keys of its own
(``runtime.checkpoints.families``) gives them; ``ANY_FAMILY`` has those of all.

    config.json -> section with the experts -> figures, those that were stated first -> ModelShape

Nothing is guessed: a figure that no key has is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import numpy as np

from eplb.core.model import PRECISIONS, ModelShape, numbers_in
from eplb.errors import CheckpointError, ConfigError

# Far above any published model, so that a damaged number cannot fill memory.
MAX_LAYERS = 4096
MAX_EXPERTS = 65536
MAX_SIZE = 2**20  # width of a hidden state
MOST_NESTED = 4  # parts within parts


class Rule(Enum):
    """How the value of a key in config.json says which layers have routed experts."""

    FROM = "layers from this number on"
    UP_TO = "layers up to this number; -1: all"
    EVERY = "layers divisible by this number; or a list of 0 and 1, one for each layer"
    EVERY_NTH = "every n-th layer: n - 1, 2n - 1, ..."
    PERIOD = "every so many layers, from that of expert_layer_offset on"
    NOT_IN = "all but the listed layers"
    ONLY_IN = "the listed layers; a list, or numbers apart by commas"
    TYPES = 'a type for each layer; "dense" has none'
    BLOCKS = 'a kind for each layer, of which "moe", or the letter E, has experts'


@dataclass(frozen=True)
class ConfigKeys:
    """Keys of config.json; the first of each tuple that is there counts.

    A layer has routed experts where every rule whose key is there says so.
    """

    num_experts: tuple[str, ...]
    intermediate: tuple[str, ...]  # width of one routed expert
    top_k: tuple[str, ...] = ("num_experts_per_tok",)
    hidden: tuple[str, ...] = ("hidden_size",)
    num_layers: tuple[str, ...] = ("num_hidden_layers",)
    moe_layers: tuple[tuple[Rule, str], ...] = ()
    num_groups: tuple[str, ...] = ()
    num_shared: tuple[str, ...] = ()
    num_zero: tuple[str, ...] = ()  # experts without computation: they take no slot and no bytes


@dataclass(frozen=True)
class ModelFigures:
    """The figures of a model's routed experts, as config.json has them."""

    num_layers: int  # dense ones included, MTP layers not
    moe_layers: tuple[int, ...]  # the model's own numbers, without MTP layers
    num_experts: int  # routed experts with weights
    top_k: int
    hidden: int
    intermediate: int  # width of one routed expert
    num_groups: int
    num_shared: int
    num_zero: int  # experts without computation, with the ids from num_experts on

    def shape(self, layers: tuple[int, ...] = (), expert_bytes: int = 0) -> ModelShape:
        """The experts with weights, as the planner reads a model.

        Args:
            layers: numbers of MoE layers; (): those of the figures.
            expert_bytes: of one expert; 0: in BF16.

        Raises:
            ConfigError: figures that no model can have.
        """
        return ModelShape(
            layers or self.moe_layers,
            self.num_experts,
            min(self.top_k, self.num_experts),
            self.hidden,
            self.intermediate,
            self.num_shared,
            self.num_groups,
            expert_bytes,
        )


def number_in(
    section: Mapping[str, Any],
    names: tuple[str, ...],
    most: int,
    where: str,
    default: int | None = None,
    least: int = 1,
) -> int:
    """Value of the first key that is there. A list has a value for each layer, all equal.

    Raises:
        CheckpointError: no key is there and there is no default, or it has another value.
    """
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


def figures_of(
    section: Mapping[str, Any], keys: ConfigKeys, where: str, least_shared: int = 0
) -> ModelFigures:
    """Read the figures by a family's keys.

    Args:
        section: the part of config.json that has them.
        keys: the family's.
        where: the file, for messages.
        least_shared: shared experts where no key tells.

    Raises:
        CheckpointError: a figure is missing or impossible.
    """
    num_layers = number_in(section, keys.num_layers, MAX_LAYERS, where)
    num_experts = number_in(section, keys.num_experts, MAX_EXPERTS, where)
    return ModelFigures(
        num_layers,
        moe_layers_of(section, keys.moe_layers, num_layers, where),
        num_experts,
        number_in(section, keys.top_k, MAX_EXPERTS, where),
        number_in(section, keys.hidden, MAX_SIZE, where),
        number_in(section, keys.intermediate, MAX_SIZE, where),
        number_in(section, keys.num_groups, num_experts, where, default=1),
        number_in(section, keys.num_shared, MAX_EXPERTS, where, default=least_shared, least=0),
        number_in(section, keys.num_zero, MAX_EXPERTS, where, default=0, least=0),
    )


def moe_layers_of(
    section: Mapping[str, Any], rules: tuple[tuple[Rule, str], ...], num_layers: int, where: str
) -> tuple[int, ...]:
    """Layers that have routed experts, by the model's own numbers.

    Raises:
        CheckpointError: a value that its rule cannot read.
    """
    claims = [_has_experts(section, rule, key, num_layers, where) for rule, key in rules]
    return tuple(n for n in range(num_layers) if all(claim[n] for claim in claims))


def _has_experts(
    section: Mapping[str, Any], rule: Rule, key: str, num_layers: int, where: str
) -> list[bool]:
    """Which layers have routed experts by one rule; all of them where its key is missing."""
    value = section.get(key)
    layers = range(num_layers)
    if value is None:
        return [True] * num_layers
    try:
        if rule is Rule.BLOCKS:
            if not isinstance(value, str | list) or len(value) < num_layers:
                raise ValueError
            return [value[n] in ("moe", "E") for n in layers]
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
        may_be_0 = rule in (Rule.FROM, Rule.UP_TO)
        if type(value) is not int or value < (-1 if rule is Rule.UP_TO else not may_be_0):
            raise ValueError
    except (TypeError, ValueError) as exc:
        raise CheckpointError(f"{where}: {key} is {value!r}, expected {rule.value}") from exc
    if rule is Rule.FROM:
        return [n >= value for n in layers]
    if rule is Rule.UP_TO:
        return [value < 0 or n <= value for n in layers]
    offset = 1 if rule is Rule.EVERY_NTH else 0
    if rule is Rule.PERIOD:
        first = ("expert_layer_offset",)
        offset = -number_in(section, first, MAX_LAYERS, where, default=0, least=0)
    return [(n + offset) % value == 0 for n in layers]


ANY_FAMILY = ConfigKeys(
    num_experts=(
        "n_routed_experts",
        "num_experts",
        "num_local_experts",
        "moe_num_experts",
        "num_routed_experts",
    ),
    top_k=(
        "num_experts_per_tok",
        "num_experts_per_token",
        "moe_topk",
        "moe_top_k",
        "moe_k",
        "experts_per_token",
        "top_k_experts",
    ),
    # Where experts work on a narrower state than the rest of the model, it has a key of its own.
    hidden=("moe_latent_size", "moe_hidden_size", "hidden_size", "d_model", "n_embd"),
    intermediate=(
        "moe_intermediate_size",
        "expert_ffn_hidden_size",
        "moe_ffn_hidden_size",
        "ffn_hidden_size",
        "intermediate_size",
    ),
    num_layers=("num_layers", "num_hidden_layers", "n_layers", "n_layer"),
    moe_layers=(
        (Rule.TYPES, "mlp_layer_types"),
        (Rule.BLOCKS, "layers_block_type"),
        (Rule.BLOCKS, "hybrid_override_pattern"),
        (Rule.FROM, "first_k_dense_replace"),
        (Rule.FROM, "moe_layer_num_skipped"),
        (Rule.FROM, "num_dense_layers"),
        (Rule.FROM, "moe_layer_start_index"),
        (Rule.UP_TO, "moe_layer_end_index"),
        (Rule.EVERY_NTH, "moe_layer_interval"),
        (Rule.EVERY, "moe_layer_freq"),
        (Rule.PERIOD, "expert_layer_period"),
        (Rule.NOT_IN, "mlp_only_layers"),
        (Rule.EVERY_NTH, "decoder_sparse_step"),
        (Rule.ONLY_IN, "moe_layers"),
        (Rule.ONLY_IN, "moe_layers_enum"),
        (Rule.EVERY_NTH, "interleave_moe_layer_step"),
    ),
    num_groups=("n_group", "num_expert_group", "num_expert_groups"),
    num_shared=(
        "n_shared_experts",
        "num_shared_experts",
        "num_shared_expert",
        "moe_num_shared_experts",
    ),
    num_zero=("zero_expert_num",),
)
# Width of all shared experts together, in families that do not count them.
SHARED_WIDTH = (
    "shared_expert_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "shared_intermediate_size",
    "share_expert_dim",
)
# Parts of config.json that describe a model's text, and with it its experts; the first counts.
SECTIONS = ("text_config", "language_config", "llm_config", "thinker_config")
ONE_SHARED = ("llama4_text",)  # in every MoE layer, and no key tells
MERGED = "ffn_config"  # a part with some of the figures; the others are beside it
# Figures that may be stated, by the name that a user gives them.
STATED = {
    "experts": "num_experts",
    "top_k": "top_k",
    "hidden": "hidden",
    "intermediate": "intermediate",
    "shared": "num_shared",
    "groups": "num_groups",
}
PER_LAYER = "per_layer_config"  # what single layers have in place of the model's figures
OPTIONAL = ("shared", "groups")
UNGATED = ("relu2",)  # activations of experts of two matrices: there is no gate


def shape_of_config(config: object, where: str, stated: Mapping[str, str]) -> ModelShape:
    """The shape of a model by its config.json, of any family.

    Args:
        config: the decoded file.
        where: its name, for messages.
        stated: figures in place of those of the file: the names of ``STATED``, and ``layers``, the
            numbers of the MoE layers, and ``precision``.

    Raises:
        ConfigError: no model with routed experts, or a figure that is not there and not stated.
        CheckpointError: a figure that is impossible.
    """
    if not isinstance(config, Mapping):
        raise ConfigError(f"{where}: found {type(config).__name__}, expected a JSON object")
    for name in stated:
        if name not in (*STATED, "layers", "precision"):
            known = ", ".join((*STATED, "layers", "precision"))
            raise ConfigError(f"{where}: {name!r} is stated, expected one of: {known}")
    section = _with_experts(config)
    section = {**section, **_as_stated(stated, where)}
    is_dense = section.get("is_moe") is False
    if is_dense or not _has_any(section, ANY_FAMILY.num_experts):
        keys = ", ".join(ANY_FAMILY.num_experts)
        why = "is_moe is false" if is_dense else f"none of the keys {keys}"
        raise ConfigError(
            f"{where} describes no routed experts: found {why}, expected a mixture of experts"
            + ("" if is_dense else f", or {where},experts=NUMBER")
        )
    _check_alike(section, stated, where)
    for name, figure in STATED.items():
        of_figure: tuple[str, ...] = getattr(ANY_FAMILY, figure)
        if name not in OPTIONAL and not _has_any(section, of_figure):
            raise _not_found(where, figure, of_figure, f"{name}=NUMBER")
    if not _has_any(section, ANY_FAMILY.num_layers):
        blocks = (key for rule, key in ANY_FAMILY.moe_layers if rule is Rule.BLOCKS)
        kinds = [section[key] for key in blocks if section.get(key)]
        if not kinds and "layers" not in stated:
            raise _not_found(where, "number of layers", ANY_FAMILY.num_layers, "layers=FIRST-LAST")
        section["num_layers"] = len(kinds[0]) if kinds else MAX_LAYERS
    try:
        figures = figures_of(section, ANY_FAMILY, where)
    except CheckpointError as exc:
        raise ConfigError(f"{exc}, or a figure stated after the name: {where},NAME=NUMBER") from exc
    layers = figures.moe_layers
    if (text := stated.get("layers")) is not None:
        layers = numbers_in(text, f"{where},layers={text}")
    if not layers:
        raise ConfigError(
            f"{where}: found no layer with routed experts among {figures.num_layers}, expected "
            f"some, or {where},layers=FIRST-LAST"
        )
    num_experts, num_zero = figures.num_experts, figures.num_zero
    shape = replace(
        figures.shape(layers),
        num_experts=num_experts + num_zero,  # as engines count tokens
        top_k=figures.top_k,
        num_shared_experts=figures.num_shared or _shared_by_width(section, figures, where),
        expert_cost=np.repeat([1.0, 0.0], [num_experts, num_zero]),
        num_matrices=2 if section.get("mlp_hidden_act") in UNGATED else 3,
    )
    precision = stated.get("precision") or precision_of(config, section, where)
    return shape.with_precision(precision)


def _check_alike(section: Mapping[str, Any], stated: Mapping[str, str], where: str) -> None:
    """Refuse layers that differ in a figure of their experts, which has one value here."""
    layers = section.get(PER_LAYER)
    if not isinstance(layers, Mapping):
        return
    for name, figure in STATED.items():
        keys: tuple[str, ...] = getattr(ANY_FAMILY, figure)
        for layer, own in layers.items():
            other = next((k for k in keys if isinstance(own, Mapping) and k in own), None)
            if other is not None and name not in stated and own[other] != section.get(other):
                raise ConfigError(
                    f"{where}: {other} differs by layer, in layer {layer} it is {own[other]!r}, "
                    f"expected the same for all, or {where},{name}=NUMBER"
                )


def _with_experts(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that has experts; all of it where none has."""
    for section in _sections(config):
        if _has_any(section, ANY_FAMILY.num_experts):
            return section
    return config


def _sections(config: Mapping[str, Any], depth: int = 0) -> Iterator[Mapping[str, Any]]:
    merged = config.get(MERGED)
    yield {**config, **merged} if isinstance(merged, Mapping) else config
    for name in SECTIONS:
        if isinstance(part := config.get(name), Mapping) and depth < MOST_NESTED:
            yield from _sections(part, depth + 1)


def _has_any(section: Mapping[str, Any], keys: tuple[str, ...]) -> bool:
    return any(section.get(key) is not None for key in keys)


def _not_found(where: str, what: str, keys: tuple[str, ...], stated: str) -> ConfigError:
    return ConfigError(
        f"{where}: found no {what} (none of the keys {', '.join(keys)}), expected it after the "
        f"name: {where},{stated}"
    )


def stated_figures(text: str, name: str) -> dict[str, str]:
    """Figures by their names: ``top_k=8,layers=1,3-60`` states two.

    Raises:
        ConfigError: no figure, or one twice, which names the model that they are stated for.
    """
    stated = dict[str, str]()
    for piece in text.split(",") if text else ():
        figure, is_new, value = (part.strip() for part in piece.partition("="))
        if is_new and figure not in stated:
            stated[figure] = value
        elif stated and not is_new:  # a further number of a list
            stated[next(reversed(stated))] += f",{figure}"
        else:
            raise ConfigError(
                f"--model {name}: found {piece!r}, expected NAME=VALUE, each name once"
            )
    return stated


def _as_stated(stated: Mapping[str, str], where: str) -> dict[str, int]:
    """Stated figures under the keys that count first."""
    found = {}
    for name, figure in STATED.items():
        if name in stated:
            key: str = getattr(ANY_FAMILY, figure)[0]
            found[key] = _whole(stated[name], f"{where},{name}={stated[name]}")
    return found


def _whole(text: str, where: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise ConfigError(f"{where}: found {text!r}, expected a whole number")
    return int(text)


def _shared_by_width(section: Mapping[str, Any], figures: ModelFigures, where: str) -> int:
    """Shared experts as wide as routed ones, in families that state the width of all together."""
    if section.get("model_type") in ONE_SHARED:
        return 1
    width = number_in(section, SHARED_WIDTH, MAX_SIZE, where, default=0, least=0)
    return round(width / figures.intermediate) or int(width > 0)


def precision_of(config: Mapping[str, Any], section: Mapping[str, Any], where: str) -> str:
    """The precision of the experts, by ``quantization_config``; without one BF16.

    Raises:
        ConfigError: a method whose bytes are not known.
    """
    if section.get("expert_dtype") == "fp4":  # DeepSeek-V4, with scales of 32
        return "mxfp4"
    found = section.get(QUANTIZATION) or config.get(QUANTIZATION)
    if not found:
        return "bf16"
    method = found.get("quant_method") if isinstance(found, Mapping) else found
    read = _QUANTIZED.get(method) if isinstance(method, str) else None
    precision = read(found) if read is not None else None
    if precision is None:
        raise ConfigError(
            f"{where}: {QUANTIZATION} has the method {method!r}, whose bytes of an expert are not "
            f"known, expected them stated: {where},precision=NAME with one of "
            f"{', '.join(PRECISIONS)}"
        )
    return precision


def _in_bits(found: Mapping[str, Any]) -> str | None:
    bits = found.get("bits", found.get("w_bit", found.get("weight_bits")))
    return {4: "int4", 8: "fp8-tensor"}.get(bits) if isinstance(bits, int) else None


def _compressed(found: Mapping[str, Any]) -> str | None:
    """Of compressed-tensors: the weights of the first group."""
    groups = found.get("config_groups")
    group = next(iter(groups.values()), None) if isinstance(groups, Mapping) else None
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        return None
    bits, kind, size = (weights.get(name) for name in ("num_bits", "type", "group_size"))
    if bits == 8:
        return "fp8" if weights.get("strategy") == "block" else "fp8-tensor"
    if bits != 4:
        return None
    if kind == "int":
        return "int4"
    return "mxfp4" if size == 32 else "nvfp4"


def _modelopt(found: Mapping[str, Any]) -> str | None:
    inner = found.get("quantization", found)
    algorithm = inner.get("quant_algo") if isinstance(inner, Mapping) else None
    names = {"FP8": "fp8-tensor", "FP8_PB_WO": "fp8", "NVFP4": "nvfp4", "W4A16_AWQ": "int4"}
    return names.get(algorithm) if isinstance(algorithm, str) else None


def _fp8(found: Mapping[str, Any]) -> str | None:
    return "fp8" if found.get("weight_block_size") else "fp8-tensor"


QUANTIZATION = "quantization_config"
_QUANTIZED: dict[str, Callable[[Mapping[str, Any]], str | None]] = {
    "fp8": _fp8,
    "fbgemm_fp8": lambda _: "fp8-tensor",
    "mxfp4": lambda _: "mxfp4",
    "gptq": _in_bits,
    "awq": _in_bits,
    "auto-round": _in_bits,
    "compressed-tensors": _compressed,
    "modelopt": _modelopt,
    "modelopt_fp4": lambda _: "nvfp4",
}
