"""``eplb simulate``: compare placement policies on recorded or generated load."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console

from api.terminal.printable import print_error
from eplb.core.load import LoadHistory
from eplb.core.model import ModelShape, preset
from eplb.core.problem import Budget
from eplb.core.topology import Topology
from eplb.decision.gate import CostModel
from eplb.errors import ConfigError, EplbError
from simulations.page import write_page
from simulations.peers import register_peers
from simulations.replay import Scenario, replay_all
from simulations.report import summary, table, write_json
from simulations.workloads import PREFIX, generate, workload_named
from telemetry.formats.routing import Layout, load_trace
from telemetry.formats.table import read_load
from telemetry.formats.types import ReadOptions

BAD_INPUT = 2  # exit code
MAX_WINDOWS = 4096


def simulate(
    trace: Annotated[
        str,
        typer.Argument(
            help="A trace or dump, see docs/engines.md, or generated:NAME (gamma, lognormal, zipf)."
        ),
    ],
    ranks: Annotated[int, typer.Option(max=65_536, help="Ranks of the expert-parallel group.")] = 8,
    nodes: Annotated[
        int, typer.Option(max=65_536, help="Nodes that the ranks are spread over.")
    ] = 1,
    slots: Annotated[
        int | None,
        typer.Option(
            max=1_048_576, help="Slots of a layer, all ranks together; 1.25 x experts if not given."
        ),
    ] = None,
    policy: Annotated[str, typer.Option(help="Policies to compare.")] = "contiguous,greedy,auto",
    window: Annotated[
        int | None,
        typer.Option(max=1_000_000_000, help="Tokens in a window of a trace; 4096 if not given."),
    ] = None,
    past: Annotated[int, typer.Option(max=100_000, help="Windows that a plan uses.")] = 16,
    every: Annotated[
        int, typer.Option(max=1_000_000, help="Windows from one plan to the next.")
    ] = 1,
    model: Annotated[
        str | None, typer.Option(help="A known model, for expert groups and bytes.")
    ] = None,
    experts: Annotated[
        int | None,
        typer.Option(max=1_048_576, help="Experts of a trace; the largest id + 1 if not given."),
    ] = None,
    layout: Annotated[
        Layout | None, typer.Option(help="Axes of expert_ids, if the file has no names for them.")
    ] = None,
    max_moves: Annotated[
        int | None, typer.Option(max=1_000_000_000, help="Most experts that a plan moves.")
    ] = None,
    target: Annotated[
        float, typer.Option(max=1e6, help="Imbalance at which a layer is not changed.")
    ] = 1.02,
    pay_back: Annotated[
        float,
        typer.Option(max=1e9, help="Seconds of serving within which a move must pay back."),
    ] = CostModel.pay_back_s,
    seed: Annotated[int, typer.Option(max=2**32 - 1, help="Random seed.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write a summary.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page of plots.")] = None,
) -> None:
    """Plan on past windows, judge on the next one, and count what moved."""
    try:
        register_peers()
        shape = preset(model) if model is not None else None
        history = _history(trace, window, experts, layout, seed)
        scenario = Scenario(
            history,
            _topology(ranks, nodes, slots, history.num_experts),
            _fitted(shape, history),
            Budget(max_moves=max_moves, target_imbalance=target),
            CostModel(pay_back_s=pay_back),
            seed,
            past,
            every,
        )
        replays = replay_all(scenario, [name.strip() for name in policy.split(",")])
        result = summary(Path(trace).name, scenario, replays)
        Console().print(table(result))
        if json_file is not None:
            write_json(json_file, result)
        if html is not None:
            write_page(html, result, scenario, replays)
    except EplbError as exc:
        print_error(exc)
        raise typer.Exit(BAD_INPUT) from exc


def _history(
    trace: str, window: int | None, experts: int | None, layout: Layout | None, seed: int
) -> LoadHistory:
    if not trace.startswith(PREFIX):
        if Path(trace).suffix == ".npz":
            return load_trace(Path(trace), window_tokens=window, num_experts=experts, layout=layout)
        options = ReadOptions(num_experts=experts, window_tokens=window, max_windows=MAX_WINDOWS)
        return read_load(trace, options).history
    if (window, experts, layout) != (None, None, None):
        raise ConfigError(
            f"--window, --experts and --layout are for trace files, expected {PREFIX}NAME:key=value"
        )
    return generate(workload_named(trace), seed)


def _topology(ranks: int, nodes: int, slots: int | None, num_experts: int) -> Topology:
    """Spread slots over ranks and ranks over nodes as evenly as they go."""
    if not 1 <= nodes <= ranks:
        raise ConfigError(f"{ranks} ranks on {nodes} nodes, expected 1 <= nodes <= ranks")
    if slots is None:
        slots = -(-num_experts * 5 // (4 * ranks)) * ranks
    slots_of_rank = np.full(ranks, slots // ranks, dtype=np.int32)
    slots_of_rank[: slots % ranks] += 1
    node_of_rank = np.arange(ranks, dtype=np.int32) * nodes // ranks
    return Topology(node_of_rank, slots_of_rank)


def _fitted(shape: ModelShape | None, history: LoadHistory) -> ModelShape | None:
    if shape is None:
        return None
    found = (history.num_layers, history.num_experts)
    if found != (shape.num_layers, shape.num_experts):
        raise ConfigError(
            f"the trace has {found[0]} layers x {found[1]} experts, "
            f"the model {shape.num_layers} x {shape.num_experts}"
        )
    return shape


if __name__ == "__main__":
    typer.run(simulate)
