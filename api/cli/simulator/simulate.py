"""``eplb simulate``: compare placement policies on recorded or generated load."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from api.cli.options import FileOptions, ReportOptions, RoutingOptions, Seed, Steps, with_options
from api.cli.simulator.options import (
    EngineOptions,
    ExpertTimes,
    Overlap,
    Past,
    PayBack,
    PlotOptions,
    StepOptions,
    Trace,
    command_line,
    reading_of,
    replayed,
)
from api.terminal.printable import print_plain
from api.terminal.progress import telling_of_compiler
from eplb.core.cost import CostModel
from eplb.core.problem import Budget
from simulations.failures import failures_of
from simulations.inputs import check_steps, model_of, step_model_of, topology_of, windows_of
from simulations.migration_cost import MigrationCost
from simulations.pages.of_commands import comparison_page
from simulations.peers import register_peers
from simulations.replay import Scenario, chosen_of, replay_all
from simulations.report import comparison_table, conclusions, limit_of, summary
from telemetry.formats.types import Layout

LIMIT_BROKEN = 1  # exit code


@with_options
def simulate(
    trace: Trace,
    chosen_by: EngineOptions,
    plots: PlotOptions,
    timed: StepOptions,
    stated: FileOptions,
    routing: RoutingOptions,
    report: ReportOptions,
    ranks: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65_536,
            help="Ranks of the expert-parallel group. If not given, those of the load, or 8.",
        ),
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65_536,
            help="Nodes that the ranks are spread over. If neither is given, as in the load, or 1.",
        ),
    ] = None,
    slots: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1_048_576,
            help="Slots of a layer, all ranks together; 1.25 x experts if not given.",
        ),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            help="Policies to compare; raw:NAME has no gate. If not given: --engine's own, "
            "contiguous, greedy, auto."
        ),
    ] = None,
    past: Past = 16,
    every: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="Windows from one plan to the next.")
    ] = 1,
    layout: Annotated[
        Layout | None, typer.Option(help="Axes of expert_ids, if the file has no names for them.")
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1_000_000,
            help="Recorded requests that run at once, a token of each in a step; needs their "
            "lengths.",
        ),
    ] = None,
    max_moves: Annotated[
        int | None, typer.Option(min=0, max=1_000_000_000, help="Most experts that a plan moves.")
    ] = None,
    target_imbalance: Annotated[
        float, typer.Option(min=1.0, max=1e6, help="Imbalance at which a layer is not changed.")
    ] = 1.02,
    pay_back: PayBack = CostModel.pay_back_s,
    steps: Steps = None,
    expert_times: ExpertTimes = None,
    overlap: Overlap = False,
    port_ranks: Annotated[
        int, typer.Option(min=1, max=1024, help="Neighbours of a node that share a network port.")
    ] = 1,
    failures: Annotated[
        bool, typer.Option("--failures", help="What the loss of a rank, node or link would cost.")
    ] = False,
    seed: Seed = 0,
    fail_if: Annotated[
        list[str] | None,
        typer.Option(help="End with exit code 1 where this holds, for example 'imbalance>1.1'."),
    ] = None,
) -> None:
    """Plan on past windows, judge on the next one, and count what moved and what it took."""
    report.check()
    plots.check()
    register_peers()
    rule = chosen_by.rule()
    limits = [limit_of(text) for text in fail_if or ()]
    shape = timed.shape()
    options = reading_of(
        trace,
        stated,
        timed,
        num_hidden=chosen_by.hidden_layers,
        layout=layout,
        **vars(routing),
    )
    load = windows_of(trace, options, seed, shape, batch, stated.input_format)
    if steps is not None:
        load = replace(load, steps=steps)
    at = load.deployment
    if nodes is None:
        nodes = at.num_nodes if ranks is None and at.num_nodes else 1
    ranks = ranks or at.num_ranks or 8
    topology = topology_of(ranks, nodes, slots, load.num_experts)
    fitted = model_of(shape or at.model, load, trace)
    step_model = price = None
    if timed.hardware is not None or expert_times is not None:
        check_steps(load, trace, steps)
        step_model = step_model_of(
            fitted,
            topology,
            timed.hardware or "h200",
            expert_times,
            engine=chosen_by.name,
            is_prefill=timed.prefill,
            other_us=timed.other_us or 0.0,
            is_overlapped=overlap,
            port_ranks=port_ranks,
        )
        load = replace(load, phase="prefill" if timed.prefill else "decode")
        price = MigrationCost(step_model.model, step_model.hardware)
    is_shown = not report.json_output
    with telling_of_compiler(is_shown=is_shown), replayed(load, is_shown=is_shown) as windows:
        scenario = Scenario(
            topology,
            fitted,
            Budget(max_moves=max_moves, target_imbalance=target_imbalance),
            CostModel(pay_back_s=pay_back),
            seed,
            past,
            plan_every=every,
            load=windows,
            dispatch=rule,
            step_model=step_model,
            migration=price,
        )
        names = chosen_by.compared(policy, "contiguous", "greedy", "auto")
        replays = replay_all(scenario, names)
    result = summary(Path(trace).name, scenario, replays)
    sentences = conclusions(result)
    best = chosen_of(replays)
    if failures:
        costs = failures_of(scenario, best.last_placement)
        result["failures"] = {"of": best.policy, "found": [asdict(one) for one in costs]}
        sentences += [f"{best.policy}, {one.sentence()}" for one in costs]
    plots.write(lambda: comparison_page(result, scenario, replays, sentences, command_line()))
    of_policies: dict[str, dict[str, object]] = result["policies"]
    plots.write_rows([{"policy": name} | one for name, one in of_policies.items()])
    about = {"source": Path(trace).name, "policy": best.policy}
    sentences += chosen_by.write(best.last_placement, ranks, fitted, about)
    sentences += [f"note: {note}" for note in load.notes]
    result["sentences"] = sentences
    report.give(result, lambda: print_plain(comparison_table(result).for_terminal(), *sentences))
    broken = [found for limit in limits if (found := limit.broken_by(result)) is not None]
    for sentence in broken:
        typer.echo(sentence, err=True)
    if broken:
        raise typer.Exit(LIMIT_BROKEN)
