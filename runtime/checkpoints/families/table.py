"""All families, and which of them a config.json belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eplb.errors import CheckpointError, ConfigError
from runtime.checkpoints.description import Family
from runtime.checkpoints.families import deepseek, others
from runtime.checkpoints.families.own import OWN_MODEL

FAMILIES: tuple[Family, ...] = (
    deepseek.DEEPSEEK_V2,
    deepseek.DEEPSEEK_V3,
    deepseek.DEEPSEEK_V32,
    deepseek.DEEPSEEK_V4,
    deepseek.DEEPSEEK_OCR,
    deepseek.DEEPSEEK_OCR2,
    deepseek.KIMI_K2,
    deepseek.KIMI_K25,
    deepseek.KIMI_LINEAR,
    deepseek.GLM_45,
    deepseek.LING,
    deepseek.LING_HYBRID,
    others.QWEN3_MOE,
    others.QWEN3_NEXT,
    others.QWEN35_MOE,
    others.MIXTRAL,
    others.MINIMAX_M1,
    others.MINIMAX_M2,
    others.MINIMAX_M3,
    others.OLMOE,
    others.GPT_OSS,
    others.LLAMA4,
    others.LONGCAT_FLASH,
    others.HUNYUAN,
    others.STEP_3,
    others.STEP_35,
    OWN_MODEL,
)


_registered: list[Family] = []


def register_family(family: Family) -> None:
    """Add the description of a family that is not in the table.

    Raises:
        ConfigError: another family has one of its model types.
    """
    for known in (*FAMILIES, *_registered):
        if common := set(known.model_types) & set(family.model_types):
            raise ConfigError(
                f"family {family.name!r} has model_type {sorted(common)[0]!r}, "
                f"expected one that {known.name!r} does not have"
            )
    _registered.append(family)


def family_of(config: Mapping[str, Any], where: str) -> Family:
    """Find the family by ``model_type``, else by ``architectures``.

    Raises:
        CheckpointError: neither is known.
    """
    model_type, architectures = config.get("model_type"), config.get("architectures")
    families = (*FAMILIES, *_registered)
    for family in families:
        if model_type in family.model_types:
            return family
    listed = architectures if isinstance(architectures, list) else []
    for family in families:
        if any(name in family.architectures for name in listed):
            return family
    known = ", ".join(sorted(name for family in families for name in family.model_types))
    raise CheckpointError(
        f"{where}: unknown model family: model_type is {model_type!r} and architectures "
        f"{architectures!r}, expected a model_type of: {known}"
    )
