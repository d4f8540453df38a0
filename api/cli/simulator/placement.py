"""The chosen placement of a simulation as an engine's file, and the engine's dispatch rule."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from api.engine_plan import RULES
from eplb.core.model import ModelShape
from eplb.core.placement import Placement
from eplb.dispatch_rules.rules import DispatchRule
from eplb.errors import ConfigError
from telemetry.formats.bounded import file_digest
from telemetry.formats.table import WriteOptions, write_placement
from telemetry.formats.types import Layers, PlacementFile

Engine = Enum("Engine", {name: name for name in RULES})  # type: ignore[misc]

EngineOption = Annotated[
    Engine | None,
    typer.Option(help="Replicas are chosen by this engine's rule; the format of --placement."),
]
PlacementOption = Annotated[
    Path | None, typer.Option(help="Write the chosen placement as a file of --engine.")
]
HiddenLayers = Annotated[
    int | None, typer.Option(max=65_536, help="Layers of the model, dense ones included.")
]


def check_placement(path: Path | None, engine: Engine | None) -> None:
    """Refuse a file without a format before anything is replayed.

    Raises:
        ConfigError: no engine.
    """
    if path is not None and engine is None:
        raise ConfigError(f"--placement needs --engine, expected one of: {', '.join(RULES)}")


def rule_of(engine: Engine | None) -> DispatchRule:
    """The engine's rule; without one, tokens are split by weights."""
    return DispatchRule.WEIGHTED if engine is None else RULES[engine.value]


def write_chosen(
    path: Path,
    engine: Engine,
    placement: Placement,
    num_ranks: int,
    model: ModelShape | None,
    num_hidden: int | None,
    provenance: dict[str, str],
) -> list[str]:
    """Write the file; what is repaired or lost, and its digest, as sentences.

    Raises:
        ConfigError: the engine's format needs what is not known, or the file cannot be written.
        PlacementError: the format cannot express it.
    """
    ids = tuple(range(placement.num_layers)) if model is None else model.layer_ids
    layers = Layers(ids, "ordinal" if model is None else "model", num_hidden)
    file = PlacementFile(placement, layers, num_ranks, provenance=provenance)
    options = WriteOptions(num_ranks, num_hidden, provenance=provenance)
    notes = write_placement(file, engine.value, path, options)
    return [*(f"note: {note}" for note in notes), f"placement: {path}{file_digest(path)}"]
