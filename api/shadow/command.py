"""``eplb shadow``: this planner beside an unmodified engine, with observation only."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from api.cli.engine_files import Engine, Rule
from api.cli.options import (
    JsonFile,
    LayerOptions,
    Redundant,
    RoutingOptions,
    Seed,
    numbers,
    with_options,
)
from api.engine_plan import RULES
from api.interrupts import StopSignals
from api.shadow.loop import Watch, run
from api.shadow.recorder import EngineRecorder
from eplb.core.cost import CostModel
from eplb.core.dispatch import DispatchRule
from eplb.core.model import ModelShape
from eplb.core.topology import Topology
from eplb.errors import ConfigError
from eplb.policies.table import policy_named
from simulations.schemes import PlanTerms
from simulations.shadow.comparison import Comparison, Group
from simulations.shadow.report import Prices, table, text_below
from simulations.shadow.sources import SourceOptions, WindowSource, open_source
from telemetry.formats.table import read_placement

Plans = Enum("Plans", {"maps": "maps", "deepseek": "deepseek", "none": "none"})


@with_options
def shadow(
    places: Annotated[
        list[str], typer.Argument(help="Folder, files or store that the engine writes.")
    ],
    engine: Annotated[Engine, typer.Option(help="The engine; names its dispatch rule.")],
    layers: LayerOptions,
    routing: RoutingOptions,
    ranks: Annotated[
        int | None, typer.Option(min=1, max=65_536, help="Ranks; a store tells them.")
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, max=65_536, help="Nodes of the ranks. Default 1.")
    ] = None,
    redundant: Redundant = None,
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
    seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """Price this planner's decisions against the engine's own, on the same windows of its load.

    Nothing is written to the engine or its store. Each window is judged before it is planned on.
    """
    policy_named(policy)
    reading = layers.reading(
        max_windows=windows_per_file,
        num_redundant=redundant if layers.experts is None else None,
        **vars(routing),
    )
    source = open_source(places, SourceOptions(reading, layers.input_format, window_steps, ranks))
    recorder = _recorder(record_url, record_key_file)
    is_watching = watch or watch_seconds is not None
    if recorder is not None and not is_watching:
        raise ConfigError("--record-url asks for dumps while watching, expected --watch or --for")
    topology, told = _system_of(source, ranks, nodes)
    shape = layers.shape() or told
    if shape is not None and expert_bytes:
        shape = replace(shape, expert_bytes=expert_bytes)
    terms = PlanTerms(
        topology,
        shape,
        cost=CostModel(pay_back_s=pay_back),
        seed=seed,
        past_windows=past,
        dispatch=DispatchRule(dispatch.value) if dispatch else RULES[engine.value],
    )
    group = Group(
        terms,
        redundant,
        policy,
        engine_plans.value if engine_plans else "auto",
        engine_every,
        every,
        numbers("--also-redundant", also_redundant, least=0) if also_redundant else (),
        expert_bytes,
        read_placement(current, reading).placement if current else None,
    )
    signals = StopSignals() if is_watching else None
    found = run(
        source,
        Comparison(group, source.skips),
        Prices(window_seconds, kv_token_bytes),
        watch=None
        if signals is None
        else Watch(poll, watch_seconds, recorder, record_every, lambda: bool(signals.received)),
        json_file=json_file,
        said=typer.echo,
    )
    if "engine" in found:
        Console().print(table(found))
    for line in text_below(found):
        typer.echo(line)
    if "engine" not in found:
        raise typer.Exit(2)


def _recorder(url: str | None, key_file: Path | None) -> EngineRecorder | None:
    if url is None:
        return None
    try:
        key = key_file.read_text(encoding="utf-8").strip() if key_file else ""
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{key_file} cannot be read: {exc}") from exc
    return EngineRecorder(url, key)


def _system_of(
    source: WindowSource, ranks: int | None, nodes: int | None
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
