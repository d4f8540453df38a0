"""What the commands of the simulator share."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from api.cli.options import HiddenLayers
from api.engine_plan import RULES
from eplb.core.dispatch import DispatchRule
from eplb.core.model import PRECISIONS, ModelShape, preset
from eplb.core.placement import Placement
from eplb.errors import ConfigError
from simulations.pages.document import ReportPage, write_pictures
from simulations.step_time import HARDWARE
from telemetry.formats.bounded import file_digest
from telemetry.formats.table import WriteOptions, write_placement
from telemetry.formats.types import Layers, PlacementFile

MAX_WINDOWS = 4096

Engine = Enum("Engine", {name: name for name in RULES})  # type: ignore[misc]

Trace = Annotated[
    str,
    typer.Argument(
        help="A trace, dump or store, see docs/engines.md, or generated:NAME, see "
        "docs/simulator.md."
    ),
]
OtherUs = Annotated[
    float,
    typer.Option(max=1e9, help="Microseconds of a layer outside of its experts."),
]
ExpertTimes = Annotated[
    Path | None,
    typer.Option(help="Measured times of experts, in place of those of the engine's kernel."),
]
Precision = Annotated[
    str | None,
    typer.Option(
        help=f"Of the experts: {', '.join(PRECISIONS)}. If not given, that of the model's "
        "checkpoint. It gives their memory, moves and times."
    ),
]
CARDS = ", ".join(sorted(HARDWARE))


@dataclass(frozen=True)
class StepOptions:
    """The model, and how long its steps take."""

    model: Annotated[
        str | None, typer.Option(help="A known model, for expert groups and bytes.")
    ] = None
    hardware: Annotated[
        str | None,
        typer.Option(help=f"Times of steps, for this card; needs --model. Known: {CARDS}."),
    ] = None
    precision: Precision = None
    prefill: Annotated[
        bool, typer.Option("--prefill", help="Tokens cross the network once for each node.")
    ] = False
    other_us: OtherUs = 0.0
    overlap: Annotated[
        bool, typer.Option("--overlap", help="Two batches overlap communication.")
    ] = False

    def shape(self) -> ModelShape | None:
        """Return the known model; None: none is named.

        Raises:
            ConfigError: the model or the precision is not known.
        """
        if self.model is None:
            return None
        known = preset(self.model)
        return known if self.precision is None else known.with_precision(self.precision)


@dataclass(frozen=True)
class PlotOptions:
    """Where a command writes its plots."""

    html: Annotated[Path | None, typer.Option("--html", help="Write a page of plots.")] = None
    png: Annotated[
        Path | None, typer.Option("--png", help="Write the plots into this folder, one PNG each.")
    ] = None

    def write(self, page: Callable[[], ReportPage]) -> None:
        """Write the page and its pictures, as far as they are asked for.

        Raises:
            ConfigError: a library is not installed, or a file cannot be written.
        """
        if self.html is None and self.png is None:
            return
        made = page()
        if self.html is not None:
            made.write(self.html)
        if self.png is not None:
            write_pictures(self.png, made)


@dataclass(frozen=True)
class EngineOptions:
    """The engine whose rule chooses replicas, and the file of the chosen placement."""

    engine: Annotated[
        Engine | None,
        typer.Option(
            help="Replicas are chosen by this engine's rule, and its kernel gives times; the "
            "format of --placement."
        ),
    ] = None
    placement: Annotated[
        Path | None, typer.Option(help="Write the chosen placement as a file of --engine.")
    ] = None
    hidden_layers: HiddenLayers = None

    def rule(self) -> DispatchRule:
        """Return the engine's rule; without an engine, tokens are split by weights.

        Raises:
            ConfigError: a file is asked for, and no engine that gives it a format.
        """
        if self.placement is not None and self.engine is None:
            raise ConfigError(f"--placement needs --engine, expected one of: {', '.join(RULES)}")
        return DispatchRule.WEIGHTED if self.engine is None else RULES[self.engine.value]

    def write(
        self,
        placement: Placement,
        num_ranks: int,
        model: ModelShape | None,
        provenance: dict[str, str],
    ) -> list[str]:
        """Write the file if it is asked for; returns what is repaired or lost, and its digest.

        Raises:
            ConfigError: the engine's format needs what is not known, or the file cannot be written.
            PlacementError: the format cannot express it.
        """
        if self.placement is None or self.engine is None:
            return []
        ids = tuple(range(placement.num_layers)) if model is None else model.layer_ids
        layers = Layers(ids, "ordinal" if model is None else "model", self.hidden_layers)
        file = PlacementFile(placement, layers, num_ranks, provenance=provenance)
        options = WriteOptions(num_ranks, self.hidden_layers, provenance=provenance)
        notes = write_placement(file, self.engine.value, self.placement, options)
        written = f"placement: {self.placement}{file_digest(self.placement)}"
        return [*(f"note: {note}" for note in notes), written]


def command_line() -> str:
    """The command as it was typed, for reports."""
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
