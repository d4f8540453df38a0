"""``eplb plan``, ``eplb convert`` and ``eplb validate``: placements by files, beside any engine."""

from __future__ import annotations

from dataclasses import asdict, replace
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from api.cli.options import (
    AsJson,
    FileOptions,
    HiddenLayers,
    LayerOptions,
    Output,
    Redundant,
    RoutingOptions,
    Seed,
    print_report,
    with_options,
)
from api.engine_plan import PlannedGroup, lines_of, plan_for_engine
from api.terminal.progress import telling, telling_of_compiler
from eplb.core.dispatch import DispatchRule
from eplb.errors import ConfigError, counted
from telemetry.formats.checks import TARGETS, TargetDeployment, findings
from telemetry.formats.table import read, read_load, read_placement, write_load, write_placement
from telemetry.formats.types import LoadFile, WriteOptions
from telemetry.written_files import file_digest

WRONG = 1  # exit status: the engine would refuse the placement

Engine = Enum("Engine", {name: name for name in TARGETS})  # type: ignore[misc]
Rule = Enum("Rule", {rule.value: rule.value for rule in DispatchRule})  # type: ignore[misc]

Windows = Annotated[int, typer.Option(min=1, max=4096, help="Most windows that steps become.")]
Current = Annotated[str | None, typer.Option(help="The placement that serves now, any format.")]


@with_options
def plan(
    dump: Annotated[str, typer.Argument(help="A dump, trace or store; see docs/engines.md.")],
    ranks: Annotated[int, typer.Option(min=1, max=65_536, help="Expert-parallel ranks.")],
    target: Annotated[Engine, typer.Option(help="The engine that loads the placement.")],
    output: Output,
    layers: LayerOptions,
    stated: FileOptions,
    routing: RoutingOptions,
    nodes: Annotated[int, typer.Option(min=1, max=65_536, help="Nodes of the ranks.")] = 1,
    redundant: Annotated[
        int, typer.Option(min=0, max=65_536, help="Redundant experts of a layer.")
    ] = 0,
    dispatch: Annotated[
        Rule | None, typer.Option(help="How the engine chooses a replica; by default its own rule.")
    ] = None,
    policy: Annotated[str, typer.Option(help="Placement policy.")] = "auto",
    current: Current = None,
    hidden_layers: HiddenLayers = None,
    expert_bytes: Annotated[
        int | None, typer.Option(min=1, max=2**40, help="Bytes of one expert as served.")
    ] = None,
    windows: Windows = 64,
    seed: Seed = 0,
    start: Annotated[
        bool,
        typer.Option(
            "--start", help="Plan for a start of SGLang with an all-to-all and this file."
        ),
    ] = False,
    json_output: AsJson = False,
) -> None:
    """Plan a placement for a dump of load, judge it under the engine's rule, and write its file."""
    shape = layers.shape()
    options = stated.reading(
        layers.model, shape, max_windows=windows, num_hidden=hidden_layers, **vars(routing)
    )
    load = read_load(dump, options, stated.input_format)
    options = replace(
        options,
        num_experts=load.history.num_experts,
        window_tokens=None,
        num_layers=None,
        top_k=None,
    )
    serving = read_placement(current, options) if current else load.current
    history, is_shown = load.history, not json_output
    what = f"planning {history.num_layers} layers x {history.num_experts} experts on {ranks} ranks"
    with telling(what, is_shown=is_shown), telling_of_compiler(is_shown=is_shown):
        report = plan_for_engine(
            load,
            serving,
            PlannedGroup(ranks, nodes, redundant),
            target.value,
            output,
            rule=None if dispatch is None else DispatchRule(dispatch.value),
            policy=policy,
            model=shape,
            expert_bytes=expert_bytes,
            seed=seed,
            num_hidden=hidden_layers,
            source=Path(dump).name,
            at_start=start,
        )
    print_report(report, lines_of(report), json_output)


@with_options
def convert(
    source: Annotated[str, typer.Argument(help="A placement or load, of any format.")],
    to: Annotated[
        str, typer.Option(help="sglang, vllm, trtllm, ascend, eplb; counts, vllm-load, eplb-trace.")
    ],
    output: Output,
    layers: LayerOptions,
    stated: FileOptions,
    routing: RoutingOptions,
    ranks: Annotated[
        int | None, typer.Option(min=1, max=65_536, help="Expert-parallel ranks.")
    ] = None,
    redundant: Redundant = None,
    current: Current = None,
    hidden_layers: HiddenLayers = None,
    windows: Windows = 64,
    json_output: AsJson = False,
) -> None:
    """Convert a placement, or load, to another format; what is repaired or lost is printed."""
    options = stated.reading(
        layers.model,
        layers.shape(),
        max_windows=windows,
        num_redundant=redundant,
        num_ranks=ranks,
        num_hidden=hidden_layers,
        **vars(routing),
    )
    found = read(source, options, stated.input_format)
    serving = read_placement(current, options) if current else None
    given = WriteOptions(ranks, hidden_layers, serving, provenance={"source": Path(source).name})
    if isinstance(found, LoadFile) and to in TARGETS:
        if found.current is None:
            raise ConfigError(f"{source} holds load, and {to} is a placement: use eplb plan")
        found = found.current
    if isinstance(found, LoadFile):
        notes = write_load(found, to, output, given)
    else:
        notes = write_placement(found, to, output, given)
    notes = tuple(dict.fromkeys((*found.notes, *notes)))
    written = {"file": str(output), "notes": notes, "digest": file_digest(output).strip()}
    lines = [*(f"note: {note}" for note in notes), f"written: {output}{file_digest(output)}"]
    if isinstance(found, LoadFile):
        history = found.history
        written["load"] = f"{counted(history.num_windows, 'window')}, " + (
            f"{counted(history.num_layers, 'layer')} x {history.num_experts} experts"
        )
        lines.insert(0, f"load: {written['load']}")
    print_report(written, lines, json_output)


@with_options
def validate(
    file: Annotated[str, typer.Argument(help="A placement, of any format.")],
    target: Annotated[Engine, typer.Option(help="The engine that loads it.")],
    layers: LayerOptions,
    stated: FileOptions,
    ranks: Annotated[
        int | None, typer.Option(min=1, max=65_536, help="Expert-parallel ranks.")
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, max=65_536, help="Nodes of the ranks.")
    ] = None,
    redundant: Redundant = None,
    json_output: AsJson = False,
) -> None:
    """Check a placement against an engine. Exit status 0: accepted; 1: refused; 2: not readable.

    A warning is what the engine would change without reporting it, or what could not be checked.
    """
    shape = layers.shape()
    options = stated.reading(
        layers.model,
        shape,
        num_experts=stated.experts,
        num_redundant=redundant if stated.experts is None else None,
    )
    found = read_placement(file, options, stated.input_format)
    deployment = TargetDeployment(
        ranks, nodes, redundant, shape, shape.expert_bytes if shape else 0
    )
    wrong = findings(found, target.value, deployment)
    is_refused, placement = any(one.is_error for one in wrong), found.placement
    is_released = all(one.code != "experimental" for one in wrong)
    reader = target.value if is_released else f"a build of {target.value} with this format"
    report = {
        "layers": found.layers.ids,
        "slots": placement.num_slots,
        "experts": placement.num_experts,
        "notes": found.notes,
        "findings": [asdict(one) for one in wrong],
        "is_accepted": not is_refused,
    }
    lines = [
        f"{counted(placement.num_layers, 'layer')} x {placement.num_slots} slots for "
        f"{placement.num_experts} experts, layers {found.layers.ids[0]}..{found.layers.ids[-1]} "
        f"({found.layers.axis})",
        *(f"note: {note}" for note in found.notes),
        *(f"{'error' if one.is_error else 'warning'} {one.code}: {one.text}" for one in wrong),
        *([] if is_refused else [f"{reader} accepts it"]),
    ]
    print_report(report, lines, json_output)
    if is_refused:
        raise typer.Exit(WRONG)
