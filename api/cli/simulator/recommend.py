"""``eplb recommend``: which group, how much redundancy, and how often to plan, with reasons."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from api.cli.options import DeploymentName, JsonFile, Seed, numbers, with_options
from api.cli.simulator.options import (
    CARDS,
    MAX_WINDOWS,
    EngineOptions,
    ExpertTimes,
    OtherUs,
    PlotOptions,
    Precision,
    Trace,
    command_line,
)
from eplb.core.cost import CostModel
from eplb.core.model import preset
from simulations.inputs import kernel_of, model_named, model_of, windows_of
from simulations.pages.of_commands import recommendation_page
from simulations.recommend import (
    MemoryModel,
    Question,
    Recommendation,
    Speculation,
    part_of,
    recommend,
)
from simulations.report import figures_table, write_json
from simulations.step_time import hardware_named
from simulations.workloads import PREFIX
from telemetry.formats.types import ReadOptions

RANKS, RANKS_PER_NODE, WINDOW_S = 32, 8, 60.0  # where neither the user nor the load tells
STEP_TOKENS = 16_384  # tokens of a rank in a step of prefill


@with_options
def recommend_command(
    trace: Trace,
    chosen_by: EngineOptions,
    plots: PlotOptions,
    model: Annotated[
        str | None,
        typer.Option(
            help="A known model: sizes and bytes of its experts. If not given, that of the store, "
            "or the known model with as many layers and experts as the load."
        ),
    ] = None,
    hardware: Annotated[str, typer.Option(help=f"A card: {CARDS}.")] = "h200",
    precision: Precision = None,
    ranks: Annotated[
        str | None,
        typer.Option(
            help="Ranks of groups to compare, as 16,32. If not given, those of the load, or 32."
        ),
    ] = None,
    ranks_per_node: Annotated[
        int | None,
        typer.Option(
            max=65_536, help="Ranks that share a node. If not given, as in the load, or 8."
        ),
    ] = None,
    redundant: Annotated[
        str,
        typer.Option("--redundant-per-rank", help="Redundant slots of each rank to compare."),
    ] = "0,1,2,4",
    every: Annotated[str, typer.Option(help="Windows between plans to compare.")] = "1,4,16",
    policy: Annotated[
        str, typer.Option(help="Policies to compare, as eplb simulate has them.")
    ] = "auto",
    pay_back: Annotated[
        float,
        typer.Option(max=1e9, help="Seconds of serving within which a move must pay back."),
    ] = CostModel.pay_back_s,
    prefill: Annotated[
        bool, typer.Option("--prefill", help="Steps of prefill, and the time to the first token.")
    ] = False,
    step_tokens: Annotated[
        int,
        typer.Option(min=1, max=10_000_000, help="Tokens of a rank in a step of prefill, at most."),
    ] = STEP_TOKENS,
    context: Annotated[
        int, typer.Option(max=100_000_000, help="Tokens of a sequence in the KV cache.")
    ] = 4096,
    most_sequences: Annotated[
        int, typer.Option(max=1_000_000, help="Most sequences of a rank.")
    ] = 256,
    dense_gb: Annotated[
        float, typer.Option(max=1e6, help="GB of a rank beside routed experts and KV cache.")
    ] = 20.0,
    kv_token_bytes: Annotated[
        float, typer.Option(max=1e9, help="KV cache of a token on a rank.")
    ] = 70_272.0,
    other_us: OtherUs = 100.0,
    attention_share: Annotated[
        float | None,
        typer.Option(
            max=0.99,
            help="Part of a step at even load outside of MoE layers, in place of --other-us.",
        ),
    ] = None,
    expert_times: ExpertTimes = None,
    windows: Annotated[
        int, typer.Option(max=1_000_000, help="Windows to replay, the latest of a recorded load.")
    ] = 96,
    window_seconds: Annotated[
        float | None,
        typer.Option(
            max=1e9, help="Serving time of a window. If not given, as in the load, or 60."
        ),
    ] = None,
    attention_ranks: Annotated[
        str, typer.Option(help="Ranks for attention alone beside the group, to compare; 0: none.")
    ] = "0",
    most_ms: Annotated[
        float | None,
        typer.Option(max=1e9, help="Milliseconds that a token may take; in prefill, a prompt."),
    ] = None,
    drafts: Annotated[
        int, typer.Option(max=64, help="Tokens that each sequence drafts in a step (MTP).")
    ] = 0,
    acceptance: Annotated[
        float, typer.Option(max=1.0, help="Chance that a draft is right, if all before it are.")
    ] = Speculation.acceptance,
    deployment: DeploymentName = "demo",
    seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """Compare groups, redundancy and intervals on a load; print the best, and why."""
    rule = chosen_by.rule()
    speculation = Speculation(drafts, acceptance)
    card = hardware_named(hardware)
    known = preset(model) if model is not None else None
    load = windows_of(
        trace, ReadOptions(max_windows=MAX_WINDOWS, deployment=deployment), seed, known
    )
    shape, which = model_named(model, load)
    if precision is not None:
        shape = shape.with_precision(precision)
    model_of(shape, load, trace)
    at = load.deployment
    groups = numbers("--ranks", ranks or str(at.num_ranks or RANKS))
    if ranks_per_node is None:
        ranks_per_node = (at.num_ranks or 0) // (at.num_nodes or 1) or RANKS_PER_NODE
    seconds = window_seconds or at.window_s or WINDOW_S
    kernel = kernel_of(
        shape,
        hardware,
        engine=chosen_by.engine and chosen_by.engine.value,
        expert_times=expert_times,
        is_prefill=prefill,
    )
    question = Question(
        part_of(load, windows, is_latest=not trace.startswith(PREFIX)),
        MemoryModel(card, shape, 0.9, dense_gb * 1e9, kv_token_bytes),
        kernel,
        groups,
        ranks_per_node,
        numbers("--redundant-per-rank", redundant, least=0),
        numbers("--every", every),
        tuple(name.strip() for name in policy.split(",")),
        context=context,
        most_sequences=step_tokens if prefill else most_sequences,
        is_prefill=prefill,
        other_us=other_us,
        attention_share=attention_share,
        pay_back_s=pay_back,
        window_s=seconds,
        seed=seed,
        attention_ranks=numbers("--attention-ranks", attention_ranks, least=0),
        dispatch=rule,
        most_ms=most_ms,
        speculation=speculation,
    )
    answer, source = recommend(question), kernel.source
    if json_file is not None:
        found = {
            "expert_times": source,
            "candidates": [one.as_json() for one in answer.candidates],
            "unfit": [one.as_json() for one in answer.unfit],
            "batches": [asdict(one) for one in answer.batches],
            "sentences": answer.sentences(),
        }
        write_json(json_file, found)
    plots.write(lambda: recommendation_page(answer, Path(trace).name, source, command_line()))
    best = answer.best
    assert best.placement is not None, "the best candidate was replayed"
    about = {"source": Path(trace).name, "chosen": best.name}
    written = chosen_by.write(best.placement, best.ranks, shape, about)
    console = Console()
    console.print(_table(answer))
    if answer.batches:
        console.print(_batch_table(answer))
    for sentence in (*answer.sentences(), *written):
        console.print(sentence, highlight=False, markup=False, soft_wrap=True)
    assumed = [
        f"model: {which}, experts in {shape.precision}; EP{', EP'.join(map(str, groups))} with "
        f"{ranks_per_node} ranks a node on {hardware}; expert times: {source}",
        f"taken as such: {seconds:g} s of serving a window (--window-seconds), {context} tokens a "
        f"sequence (--context), {kv_token_bytes:g} bytes of KV cache a token (--kv-token-bytes), "
        f"{dense_gb:g} GB a rank beside experts (--dense-gb); no queue or scheduler is modelled",
    ]
    if drafts:
        assumed.append(
            f"a step verifies {speculation.verified} tokens of a sequence and gives "
            f"{speculation.given:.2f}; each draft takes a layer of the mean length"
        )
    for sentence in assumed:
        console.print(sentence, highlight=False, soft_wrap=True)


def _table(answer: Recommendation) -> Table:
    """At most 80 columns wide: the ranks of attention are in the names of groups."""
    batch = answer.question.unit[:3]
    headings = ("slots", "policy", "every", batch, "KV GB", "imbal", "step ms", "links", "moves")
    rows = (
        (
            one.group_short,
            str(one.slots_per_rank),
            one.policy,
            str(one.interval or "-"),
            str(one.sequences),
            f"{one.kv_bytes / 1e9:.0f}",
            f"{one.imbalance:.3f}",
            f"{one.step_us / 1000:.1f}",
            f"{one.links_part:.0%}",
            f"{one.lost_part:.2%}",
            f"{one.tokens_per_s:.0f}",
        )
        for one in answer.candidates
    )
    title = "candidates: parts of a step that links take, tokens/s of a rank"
    return figures_table(title, "group", (*headings, "tok/s"), rows)


def _batch_table(answer: Recommendation) -> Table:
    """Of the best candidate: ms and tokens/s of a rank, by balance; 80 columns at most."""
    of_what = "TTFT" if answer.question.is_prefill else "TPOT"
    headings = ("tok/exp", "none ms", "ms", "least ms", "tok/s", "gain", "most")
    rows = (
        (
            str(one.sequences),
            f"{one.tokens_per_expert:.4g}",
            *(f"{ms:.2f}" for ms in (one.none_ms, one.planned_ms, one.perfect_ms)),
            f"{one.planned_tokens_per_s:.0f}",
            f"{one.gain:+.1%}",
            f"{one.most_gain:+.1%}",
        )
        for one in answer.batches
    )
    title = f"batches of {answer.best.name}: ms: {of_what}; none: without balancing"
    return figures_table(title, answer.question.unit[:3], headings, rows)
