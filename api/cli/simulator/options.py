"""What the commands of the simulator share."""

from __future__ import annotations

import csv
import io
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from itertools import count
from pathlib import Path
from time import monotonic
from typing import Annotated, Any

import typer

from api.cli.options import FileOptions, HiddenLayers
from api.engine_plan import RULES
from api.terminal.progress import progress
from eplb.clock import duration_text
from eplb.core.dispatch import DispatchRule
from eplb.core.model import PRECISIONS, ModelShape
from eplb.core.placement import Placement
from eplb.errors import ConfigError
from simulations.own_policies import OF_A_FILE, absolute, register_named
from simulations.pages.document import ReportPage, graph_objects
from simulations.peers.engines import ENGINES
from simulations.step_time import HARDWARE
from simulations.windows import Tokens, WindowSeries
from simulations.workloads import PREFIX
from telemetry.formats.model_config import model_by_name
from telemetry.formats.table import write_placement
from telemetry.formats.types import Layers, PlacementFile, ReadOptions, WriteOptions
from telemetry.written_files import check_writable, file_digest, write_atomically

MAX_WINDOWS = 4096
MOST_COUNTS = 10**10  # token counts of a load: hours of one replay
ESTIMATED_AFTER_S = 5.0  # a replay that takes longer says what all will take

Engine = Enum("Engine", {name: name for name in RULES})  # type: ignore[misc]

Trace = Annotated[
    str,
    typer.Argument(
        help="A trace, dump or store, see docs/engines.md, or generated:NAME, see "
        "docs/simulator.md."
    ),
]
Policies = Annotated[
    str,
    typer.Option(
        "--policy", help="Policies to compare, own ones as FILE.py:FUNCTION; raw:NAME has no gate."
    ),
]
Ranks = Annotated[str, typer.Option(help="Ranks of groups to compare, as 16,32.")]
RanksPerNode = Annotated[int, typer.Option(min=0, max=65_536, help="Ranks that share a node.")]
RedundantPerRank = Annotated[str, typer.Option(help="Redundant slots of each rank to compare.")]
Intervals = Annotated[
    str, typer.Option("--every", help="Windows from one plan to the next, to compare.")
]
Past = Annotated[int, typer.Option(min=1, max=100_000, help="Windows that a plan uses.")]
PayBack = Annotated[
    float,
    typer.Option(min=0.0, max=1e9, help="Seconds of serving within which a move must pay back."),
]
Overlap = Annotated[bool, typer.Option("--overlap", help="Two batches overlap communication.")]
ExpertTimes = Annotated[
    Path | None,
    typer.Option(help="Measured times of experts, in place of those of the engine's kernel."),
]
CARDS = ", ".join(sorted(HARDWARE))


@dataclass(frozen=True)
class StepOptions:
    """The model, and how long its steps take."""

    model: Annotated[
        str | None,
        typer.Option(
            help="A known model, or a config.json: sizes and bytes of its experts, and expert "
            "groups, which stay on nodes with --prefill."
        ),
    ] = None
    hardware: Annotated[
        str | None, typer.Option(help=f"A card, for times of steps: {CARDS}; needs a model.")
    ] = None
    precision: Annotated[
        str | None,
        typer.Option(
            help=f"Of the experts: {', '.join(PRECISIONS)}. If not given, that of the model's "
            "checkpoint. It gives their memory, moves and times."
        ),
    ] = None
    prefill: Annotated[
        bool,
        typer.Option(
            "--prefill", help="Steps of prefill: tokens cross the network once for each node."
        ),
    ] = False
    other_us: Annotated[
        float | None,
        typer.Option(min=0.0, max=1e9, help="Microseconds of a layer outside of its experts."),
    ] = None

    def shape(self) -> ModelShape | None:
        """Return the model; None: none is named.

        Raises:
            ConfigError: the model or the precision is not known, or its file lacks a figure.
        """
        return None if self.model is None else self.at_precision(model_by_name(self.model))

    def at_precision(self, model: ModelShape) -> ModelShape:
        """Return a model with experts of the precision that is asked for."""
        return model if self.precision is None else model.with_precision(self.precision)


@dataclass(frozen=True)
class PlotOptions:
    """Where a command writes its plots and the rows of its table."""

    html: Annotated[Path | None, typer.Option("--html", help="Write a page of plots.")] = None
    csv: Annotated[
        Path | None, typer.Option("--csv", help="Write the table, all of its figures, as CSV.")
    ] = None

    def check(self) -> None:
        """Refuse a page that could not be written, before a long run.

        Raises:
            ConfigError: a library is not installed, or the file is in no folder.
        """
        if self.html is not None:
            graph_objects()
            check_writable(self.html, "--html")
        if self.csv is not None:
            check_writable(self.csv, "--csv")

    def write(self, page: Callable[[], ReportPage]) -> None:
        """Write the page if it is asked for.

        Raises:
            ConfigError: a library is not installed, or the file cannot be written.
        """
        if self.html is not None:
            page().write(self.html)

    def write_rows(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write rows as CSV if it is asked for; figures of several values are left out.

        Raises:
            ConfigError: the file cannot be written.
        """
        if self.csv is None:
            return
        names = dict.fromkeys(
            name
            for row in rows
            for name, value in row.items()
            if not isinstance(value, list | tuple | Mapping)
        )
        text = io.StringIO()
        table = csv.DictWriter(text, list(names), extrasaction="ignore", lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
        write_atomically(self.csv, text.getvalue().encode())


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

    @property
    def name(self) -> str | None:
        """The engine's name."""
        return None if self.engine is None else self.engine.value

    def compared(self, policies: str | None, *default: str) -> tuple[str, ...]:
        """Return the named policies; without names the engine's own balancer and the default."""
        if policies is not None:
            return names_in(policies)
        own = (self.name,) if self.name in ENGINES else ()
        return (*own, *default)  # --fail-if is for the last one

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


@contextmanager
def replayed(
    load: WindowSeries,
    num_replays: int = 1,
    *,
    is_shown: bool,
    estimated_after_s: float = ESTIMATED_AFTER_S,
) -> Iterator[WindowSeries]:
    """Give the load, whose windows a bar counts as they are replayed.

    Without a terminal the error stream gets a line once the first window is replayed, so that
    what is refused stays one sentence, one with the time of all where that is long, and one at the
    end of each replay.

    Raises:
        ConfigError: a load that would take days.
    """
    counts = (load.num_windows or 0) * load.num_layers * load.num_experts
    if counts > MOST_COUNTS:
        raise ConfigError(
            f"the load has {load.num_windows:,} windows of {load.num_layers} layers x "
            f"{load.num_experts} experts, expected at most {MOST_COUNTS:,} token counts in all: "
            "take fewer windows, or more tokens in each"
        )
    total = None if load.num_windows is None else num_replays * load.num_windows
    begin, is_logged = monotonic(), not sys.stderr.isatty()
    is_estimated = False
    with progress("windows", total, is_shown=is_shown) as advance:
        numbers, replays = count(1), count(1)

        def read() -> Iterator[Tokens]:
            nonlocal is_estimated
            for tokens in load.read():
                yield tokens
                number = next(numbers)
                advance(number)
                if is_logged and number == 1:
                    size = f"{load.num_windows or 'all'} windows, {load.num_layers} layers"
                    typer.echo(f"replays of {size} x {load.num_experts} experts", err=True)
                seconds = monotonic() - begin
                if is_logged and total and not is_estimated and seconds >= estimated_after_s:
                    is_estimated = True
                    all_s = duration_text(seconds * total / number)
                    done = f"{number:,} of {total:,} windows after {seconds:.0f} s"
                    typer.echo(f"{done}: about {all_s} in all", err=True)
            if is_logged:
                typer.echo(
                    f"replay {next(replays)} done after {monotonic() - begin:.0f} s", err=True
                )

        yield replace(load, read=read)


def reading_of(trace: str, stated: FileOptions, timed: StepOptions, **others: Any) -> ReadOptions:
    """Return how the load is read; a model states the layers and experts of a file."""
    model = None if trace.startswith(PREFIX) else timed.model
    shape = timed.shape() if model is not None else None
    options: ReadOptions = stated.reading(model, shape, max_windows=MAX_WINDOWS, **others)
    return options


def names_in(policies: str) -> tuple[str, ...]:
    """Names of policies that commas separate; those of files are in the table afterwards.

    Raises:
        ConfigError: a file that cannot be used.
    """
    return tuple(register_named(name.strip()) for name in policies.split(","))


def files_of(policies: str) -> dict[str, str]:
    """Names in the table of policies that files have, and how each was named, from any folder."""
    given = (name.strip() for name in policies.split(","))
    return {register_named(one): absolute(one) for one in given if OF_A_FILE.fullmatch(one)}


def command_line() -> str:
    """The command as it was typed, for reports."""
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
