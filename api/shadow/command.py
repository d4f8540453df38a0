"""``eplb shadow``: this planner beside an unmodified engine, with observation only."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from api.cli.deploy import refused
from api.cli.engine_files import (
    DeploymentName,
    Engine,
    Experts,
    FirstMoe,
    Format,
    LayerIds,
    Model,
    NumLayers,
    Rule,
    TopK,
    read_options,
)
from api.engine_plan import RULES
from api.interrupts import StopSignals
from api.shadow.loop import Watch, run
from api.shadow.recorder import EngineRecorder
from eplb.core.model import ModelShape, preset
from eplb.core.topology import Topology
from eplb.decision.gate import CostModel
from eplb.dispatch_rules.rules import DispatchRule
from eplb.errors import ConfigError, EplbError
from eplb.policies.table import policy_named
from simulations.course import Terms
from simulations.shadow.comparison import Comparison, Group
from simulations.shadow.report import Prices, table, text_below
from simulations.shadow.sources import open_source
from simulations.shadow.windows import Source, SourceOptions
from telemetry.formats.table import read_placement

Plans = Enum("Plans", {"maps": "maps", "deepseek": "deepseek", "none": "none"})


def shadow(
    places: Annotated[
        list[str], typer.Argument(help="Folder, files or store that the engine writes.")
    ],
    engine: Annotated[Engine, typer.Option(help="The engine; names its dispatch rule.")],
    ranks: Annotated[
        int | None, typer.Option(min=1, max=65_536, help="Ranks; a store tells them.")
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, max=65_536, help="Nodes of the ranks. Default 1.")
    ] = None,
    redundant: Annotated[
        int | None, typer.Option(min=0, max=65_536, help="The engine's redundant experts.")
    ] = None,
    also_redundant: Annotated[
        str, typer.Option(help="Other numbers of redundant experts to compare, as 0,16.")
    ] = "",
    current: Annotated[str | None, typer.Option(help="The map at the start, any format.")] = None,
    engine_plans: Annotated[
        Plans | None, typer.Option(help="The engine's placements; by default maps, else deepseek.")
    ] = None,
    engine_every: Annotated[
        int, typer.Option(min=1, max=100_000, help="Windows between replayed plans.")
    ] = 1,
    dispatch: Annotated[
        Rule | None, typer.Option(help="How the engine chooses a replica; by default its own rule.")
    ] = None,
    policy: Annotated[str, typer.Option(help="Placement policy.")] = "auto",
    past: Annotated[int, typer.Option(min=1, max=4096, help="Windows that a plan uses.")] = 16,
    every: Annotated[int, typer.Option(min=1, max=100_000, help="Windows between our plans.")] = 1,
    pay_back: Annotated[
        float, typer.Option(min=0, max=1e9, help="Seconds within which moves must pay back.")
    ] = CostModel.pay_back_s,
    model: Model = None,
    layer_ids: LayerIds = None,
    first_moe_layer: FirstMoe = None,
    experts: Experts = None,
    expert_bytes: Annotated[
        int, typer.Option(min=0, max=2**40, help="Bytes of one expert as served.")
    ] = 0,
    windows_per_file: Annotated[
        int, typer.Option(min=1, max=4096, help="Most windows that a file becomes.")
    ] = 8,
    window_steps: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="Lines of a .jsonl in a window.")
    ] = 100,
    window_seconds: Annotated[
        float, typer.Option(min=0, max=1e9, help="Serving time of a window; 0: not known.")
    ] = 0.0,
    kv_token_bytes: Annotated[
        int, typer.Option(min=0, max=2**40, help="KV cache of a token on a rank; 0: not known.")
    ] = 0,
    num_layers: NumLayers = None,
    top_k: TopK = None,
    deployment: DeploymentName = "demo",
    input_format: Format = None,
    watch: Annotated[bool, typer.Option(help="Go on until interrupted.")] = False,
    watch_seconds: Annotated[
        float | None, typer.Option("--for", min=0, max=1e9, help="Watch for so many seconds.")
    ] = None,
    poll: Annotated[float, typer.Option(min=0.05, max=3600, help="Seconds between polls.")] = 10.0,
    record_url: Annotated[
        str | None, typer.Option(help="SGLang server to ask for dumps while watching.")
    ] = None,
    record_every: Annotated[
        float, typer.Option(min=1, max=86_400, help="Seconds between dumps asked for.")
    ] = 60.0,
    record_key_file: Annotated[Path | None, typer.Option(help="File of its API key.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Random seed.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report.")] = None,
) -> None:
    """Price this planner's decisions against the engine's own, on the same windows of its load.

    Nothing is written to the engine or its store. Each window is judged before it is planned on.
    """
    try:
        policy_named(policy)
        shape = preset(model) if model else None
        options = SourceOptions(
            read_options(
                shape,
                layer_ids,
                first_moe_layer,
                max_windows=windows_per_file,
                num_experts=experts,
                num_redundant=redundant if experts is None else None,
                num_layers=num_layers,
                top_k=top_k,
                deployment=deployment,
            ),
            input_format,
            window_steps,
            ranks,
        )
        recorder = _recorder(record_url, record_key_file)
        if recorder is not None and not watch and watch_seconds is None:
            raise ConfigError(
                "--record-url asks for dumps while watching, expected --watch or --for"
            )
        source = open_source(places, options)
        topology, told = _system_of(source, ranks, nodes)
        rule = DispatchRule(dispatch.value) if dispatch else RULES[engine.value]
        group = Group(
            Terms(
                topology,
                _with_bytes(shape or told, expert_bytes),
                cost=CostModel(pay_back_s=pay_back),
                seed=seed,
                past_windows=past,
                dispatch=rule,
            ),
            redundant,
            policy,
            engine_plans.value if engine_plans else "auto",
            engine_every,
            every,
            _numbers(also_redundant),
            expert_bytes,
            read_placement(current, options.read).placement if current else None,
        )
        watching = None
        if watch or watch_seconds is not None:
            signals = StopSignals()
            watching = Watch(
                poll, watch_seconds, recorder, record_every, lambda: bool(signals.received)
            )
        found = run(
            source,
            Comparison(group, source.skips),
            Prices(window_seconds, kv_token_bytes),
            watch=watching,
            json_file=json_file,
            said=typer.echo,
        )
    except EplbError as exc:
        raise refused(exc) from exc
    if "engine" in found:
        Console().print(table(found))
    for line in text_below(found):
        typer.echo(line)
    if "engine" not in found:
        raise typer.Exit(2)


def _with_bytes(shape: ModelShape | None, expert_bytes: int) -> ModelShape | None:
    return replace(shape, expert_bytes=expert_bytes) if shape and expert_bytes else shape


def _recorder(url: str | None, key_file: Path | None) -> EngineRecorder | None:
    if url is None:
        return None
    try:
        key = key_file.read_text(encoding="utf-8").strip() if key_file else ""
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{key_file} cannot be read: {exc}") from exc
    return EngineRecorder(url, key)


def _system_of(
    source: Source, ranks: int | None, nodes: int | None
) -> tuple[Topology, ModelShape | None]:
    """The engine's ranks and model: as the source tells them, else as the user does."""
    told = source.system()
    if told is not None:
        stated = (told.topology.num_ranks, told.topology.num_nodes)
        if (ranks or stated[0], nodes or stated[1]) != stated:
            raise ConfigError(
                f"--ranks {ranks} --nodes {nodes}, the source has {stated[0]} ranks on "
                f"{stated[1]} nodes"
            )
        return told.topology, told.model
    if ranks is None:
        raise ConfigError("the source does not tell the ranks, expected --ranks")
    if ranks % (nodes or 1):
        raise ConfigError(f"{ranks} ranks on {nodes} nodes, expected as many on each")
    return Topology.uniform(nodes or 1, ranks // (nodes or 1), 1), None


def _numbers(text: str) -> tuple[int, ...]:
    parts = [one.strip() for one in text.split(",") if one.strip()]
    if not all(one.isdecimal() and len(one) < 7 for one in parts):
        raise ConfigError(f"--also-redundant is {text!r}, expected numbers as 0,16")
    return tuple(int(one) for one in parts)
