"""What config.json says of a model's experts, read by its family's description."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from eplb.core.bounded_json import decode_json
from eplb.core.model_config import ModelFigures, figures_of
from eplb.errors import CheckpointError
from runtime.checkpoints.families import Family, family_of

CONFIG_FILE = "config.json"


@dataclass(frozen=True)
class ModelConfig:
    """The family of a model, and its figures, which decide which bytes an expert has."""

    family: Family
    figures: ModelFigures


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
    figures = figures_of(section, family.keys, where, least_shared=int(bool(family.shared)))
    return ModelConfig(family, figures)
