"""``eplb plan``, ``eplb convert`` and ``eplb validate``: placements by files, beside any engine."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from api.cli.deploy import refused
from api.engine_plan import PlanRequest, plan_for_engine, render
from eplb.core.model import ModelShape, preset
from eplb.dispatch_rules.rules import DispatchRule
from eplb.errors import ConfigError, EplbError
from telemetry.formats.bounded import file_digest
from telemetry.formats.checks import TARGETS, Deployment, findings
from telemetry.formats.table import (
    WriteOptions,
    read,
    read_load,
    read_placement,
    write_load,
    write_placement,
)
from telemetry.formats.types import LoadFile, ReadOptions, parse_layer_ids

WRONG = 1  # exit status: the engine would refuse the placement

Engine = Enum("Engine", {name: name for name in TARGETS})  # type: ignore[misc]
Rule = Enum("Rule", {rule.value: rule.value for rule in DispatchRule})  # type: ignore[misc]

Ranks = Annotated[int | None, typer.Option(min=1, max=65_536, help="Expert-parallel ranks.")]
Nodes = Annotated[int | None, typer.Option(min=1, max=65_536, help="Nodes of the ranks.")]
Redundant = Annotated[
    int | None, typer.Option(min=0, max=65_536, help="Redundant experts of a layer.")
]
Model = Annotated[
    str | None, typer.Option(help="A known model: its MoE layers, expert groups and bytes.")
]
LayerIds = Annotated[str | None, typer.Option(help="Numbers of the MoE layers, as 3-60.")]
FirstMoe = Annotated[
    int | None, typer.Option(min=0, max=65_536, help="The first MoE layer; all after it are too.")
]
Format = Annotated[str | None, typer.Option(help="Format of the input, if its name is no help.")]
Experts = Annotated[int | None, typer.Option(min=1, max=1_048_576, help="Experts of a layer.")]
HiddenLayers = Annotated[
    int | None, typer.Option(min=1, max=65_536, help="Layers of the model, dense ones included.")
]
Windows = Annotated[int, typer.Option(min=1, max=4096, help="Most windows that steps become.")]
WindowTokens = Annotated[
    int | None, typer.Option(min=1, max=1_000_000_000, help="Tokens in a window of routing.")
]
NumLayers = Annotated[int | None, typer.Option(min=1, max=65_536, help="Layers of raw routing.")]
TopK = Annotated[int | None, typer.Option(min=1, max=64, help="Top-k of raw routing.")]
DeploymentName = Annotated[str, typer.Option(help="Deployment, where the input is a store.")]
Current = Annotated[str | None, typer.Option(help="The placement that serves now, any format.")]
Output = Annotated[Path, typer.Option("--output", "-o", help="The file to write.")]


def plan(
    dump: Annotated[str, typer.Argument(help="A dump, trace or store; see docs/engines.md.")],
    ranks: Annotated[int, typer.Option(min=1, max=65_536, help="Expert-parallel ranks.")],
    target: Annotated[Engine, typer.Option(help="The engine that loads the placement.")],
    output: Output,
    nodes: Annotated[int, typer.Option(min=1, max=65_536, help="Nodes of the ranks.")] = 1,
    redundant: Annotated[
        int, typer.Option(min=0, max=65_536, help="Redundant experts of a layer.")
    ] = 0,
    dispatch: Annotated[
        Rule | None, typer.Option(help="How the engine chooses a replica; by default its own rule.")
    ] = None,
    policy: Annotated[str, typer.Option(help="Placement policy.")] = "auto",
    current: Current = None,
    model: Model = None,
    layer_ids: LayerIds = None,
    first_moe_layer: FirstMoe = None,
    hidden_layers: HiddenLayers = None,
    experts: Experts = None,
    expert_bytes: Annotated[
        int | None, typer.Option(min=1, max=2**40, help="Bytes of one expert as served.")
    ] = None,
    windows: Windows = 64,
    window_tokens: WindowTokens = None,
    num_layers: NumLayers = None,
    top_k: TopK = None,
    deployment: DeploymentName = "demo",
    input_format: Annotated[str | None, typer.Option("--format", help="Format of DUMP.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Random seed.")] = 0,
) -> None:
    """Plan a placement for a dump of load, judge it under the engine's rule, and write its file."""
    try:
        shape = preset(model) if model else None
        options = read_options(
            shape,
            layer_ids,
            first_moe_layer,
            max_windows=windows,
            num_experts=experts,
            window_tokens=window_tokens,
            num_layers=num_layers,
            top_k=top_k,
            deployment=deployment,
        )
        load = read_load(dump, options, input_format)
        serving = read_placement(current, options) if current else load.current
        request = PlanRequest(
            load,
            serving,
            (ranks, nodes, redundant),
            target.value,
            None if dispatch is None else DispatchRule(dispatch.value),
            policy,
            shape,
            expert_bytes or 0,
            seed,
            output,
            hidden_layers,
            Path(dump).name,
            options,
        )
        typer.echo(render(plan_for_engine(request)))
    except EplbError as exc:
        raise refused(exc) from exc


def convert(
    source: Annotated[str, typer.Argument(help="A placement or load, of any format.")],
    to: Annotated[
        str, typer.Option(help="sglang, vllm, trtllm, ascend, eplb; counts, vllm-load, eplb-trace.")
    ],
    output: Output,
    ranks: Ranks = None,
    redundant: Redundant = None,
    current: Current = None,
    model: Model = None,
    layer_ids: LayerIds = None,
    first_moe_layer: FirstMoe = None,
    hidden_layers: HiddenLayers = None,
    experts: Experts = None,
    windows: Windows = 64,
    window_tokens: WindowTokens = None,
    num_layers: NumLayers = None,
    top_k: TopK = None,
    deployment: DeploymentName = "demo",
    input_format: Format = None,
) -> None:
    """Convert a placement, or load, to another format; what is repaired or lost is printed."""
    try:
        shape = preset(model) if model else None
        options = read_options(
            shape,
            layer_ids,
            first_moe_layer,
            max_windows=windows,
            num_experts=experts,
            num_redundant=redundant,
            window_tokens=window_tokens,
            num_layers=num_layers,
            top_k=top_k,
            deployment=deployment,
        )
        found = read(source, options, input_format)
        serving = read_placement(current, options) if current else None
        given = WriteOptions(
            ranks, hidden_layers, serving, provenance={"source": Path(source).name}
        )
        if isinstance(found, LoadFile) and to in TARGETS:
            if found.current is None:
                raise ConfigError(f"{source} holds load, and {to} is a placement: use eplb plan")
            found = found.current
        if isinstance(found, LoadFile):
            notes = write_load(found, to, output, given)
        else:
            notes = write_placement(found, to, output, given)
    except EplbError as exc:
        raise refused(exc) from exc
    for note in dict.fromkeys((*found.notes, *notes)):
        typer.echo(f"note: {note}")
    typer.echo(f"written: {output}{file_digest(output)}")


def validate(
    file: Annotated[str, typer.Argument(help="A placement, of any format.")],
    target: Annotated[Engine, typer.Option(help="The engine that loads it.")],
    ranks: Ranks = None,
    nodes: Nodes = None,
    redundant: Redundant = None,
    model: Model = None,
    layer_ids: LayerIds = None,
    first_moe_layer: FirstMoe = None,
    experts: Experts = None,
    input_format: Format = None,
) -> None:
    """Check a placement against an engine. Exit status 0: accepted; 1: refused; 2: not readable.

    A warning is what the engine would change without reporting it, or what could not be checked.
    """
    try:
        shape = preset(model) if model else None
        options = read_options(
            shape if layer_ids is None and first_moe_layer is None else None,
            layer_ids,
            first_moe_layer,
            num_experts=experts,
            num_redundant=redundant if experts is None else None,
        )
        found = read_placement(file, options, input_format)
        deployment = Deployment(ranks, nodes, redundant, shape, shape.expert_bytes if shape else 0)
        wrong = findings(found, target.value, deployment)
    except EplbError as exc:
        raise refused(exc) from exc
    placement = found.placement
    typer.echo(
        f"{placement.num_layers} layers x {placement.num_slots} slots for {placement.num_experts} "
        f"experts, layers {found.layers.ids[0]}..{found.layers.ids[-1]} ({found.layers.axis})"
    )
    for one in wrong:
        typer.echo(f"{'error' if one.is_error else 'warning'} {one.code}: {one.text}")
    if any(one.is_error for one in wrong):
        raise typer.Exit(WRONG)
    typer.echo(f"{target.value} accepts it")


def read_options(
    shape: ModelShape | None, layer_ids: str | None, first: int | None, **others: object
) -> ReadOptions:
    """What the flags of a command state about a file; a model states its MoE layers."""
    ids = parse_layer_ids(layer_ids) if layer_ids is not None else None
    if ids is None and first is None and shape is not None:
        ids = shape.layer_ids
    return ReadOptions(ids, first, **others)  # type: ignore[arg-type]
