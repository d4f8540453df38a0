"""``eplb recommend``: which group, how much redundancy, and how often to plan, with reasons."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from api.cli.options import FileOptions, ReportOptions, RoutingOptions, Seed, numbers, with_options
from api.cli.simulator.options import (
    EngineOptions,
    ExpertTimes,
    Intervals,
    PayBack,
    PlotOptions,
    Ranks,
    RanksPerNode,
    RedundantPerRank,
    StepOptions,
    Trace,
    command_line,
    reading_of,
    replayed,
)
from api.terminal.printable import print_plain
from api.terminal.progress import telling_of_compiler
from eplb.core.cost import CostModel
from eplb.core.model import kv_token_bytes as model_kv_bytes
from eplb.errors import ConfigError
from simulations.inputs import kernel_of, model_named, model_of, windows_of
from simulations.pages.of_commands import recommendation_page
from simulations.recommend import (
    Candidate,
    MemoryModel,
    Question,
    Speculation,
    batch_table,
    candidate_table,
    part_of,
    recommend,
    verdict_of,
)
from simulations.step_time import hardware_named
from simulations.workloads import PREFIX

HARDWARE, OTHER_US = "h200", 100.0  # where the user tells none
RANKS, RANKS_PER_NODE, WINDOW_S = 32, 8, 60.0  # where neither the user nor the load tells
NUM_COLUMNS = 11  # columns of candidates that fit into 80 characters
STEP_TOKENS = 16_384  # tokens of a rank in a step of prefill


def engine_options(best: Candidate, num_experts: int) -> dict[str, str]:
    """The engines' own options for a candidate; none where attention has ranks of its own."""
    ranks, redundant = best.ranks, best.ranks * best.slots_per_rank - num_experts
    vllm = f"--data-parallel-size {ranks} --enable-expert-parallel"
    sglang = f"--tp {ranks} --ep-size {ranks}"
    if best.interval:
        vllm += f""" --enable-eplb --eplb-config '{{"num_redundant_experts": {redundant}}}'"""
        sglang += f" --enable-eplb --ep-num-redundant-experts {redundant}"
    return {} if best.attention_ranks else {"vllm": vllm, "sglang": sglang}


@with_options
def recommend_command(
    trace: Trace,
    chosen_by: EngineOptions,
    plots: PlotOptions,
    timed: StepOptions,
    stated: FileOptions,
    routing: RoutingOptions,
    report: ReportOptions,
    ranks: Ranks = "",
    ranks_per_node: RanksPerNode = 0,
    redundant_per_rank: RedundantPerRank = "0,1,2,4",
    every: Intervals = "1,4,16",
    policy: Annotated[
        str | None,
        typer.Option(
            help="Policies to compare; raw:NAME has no gate. If not given: --engine's own, auto."
        ),
    ] = None,
    pay_back: PayBack = CostModel.pay_back_s,
    step_tokens: Annotated[
        int,
        typer.Option(min=1, max=10_000_000, help="Tokens of a rank in a step of prefill, at most."),
    ] = STEP_TOKENS,
    context: Annotated[
        int, typer.Option(min=1, max=100_000_000, help="Tokens of a sequence in the KV cache.")
    ] = 4096,
    most_sequences: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="Most sequences of a rank.")
    ] = 256,
    dense_gb: Annotated[
        float,
        typer.Option(min=0.0, max=1e6, help="GB of a rank beside routed experts and KV cache."),
    ] = 20.0,
    kv_token_bytes: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=1e9,
            help="KV cache of a token on a rank. If not given, that of the known model.",
        ),
    ] = None,
    attention_share: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=0.99,
            help="Part of a step at even load outside of MoE layers, in place of --other-us.",
        ),
    ] = None,
    expert_times: ExpertTimes = None,
    windows: Annotated[
        int,
        typer.Option(
            min=1, max=1_000_000, help="Windows to replay, the latest of a recorded load."
        ),
    ] = 96,
    window_seconds: Annotated[
        float | None,
        typer.Option(
            min=0.0, max=1e9, help="Serving time of a window. If not given, as in the load, or 60."
        ),
    ] = None,
    attention_ranks: Annotated[
        str, typer.Option(help="Ranks for attention alone beside the group, to compare; 0: none.")
    ] = "0",
    most_ms: Annotated[
        float | None,
        typer.Option(
            min=0.0, max=1e9, help="Milliseconds that a token may take; in prefill, a prompt."
        ),
    ] = None,
    drafts: Annotated[
        int, typer.Option(min=0, max=64, help="Tokens that each sequence drafts in a step (MTP).")
    ] = 0,
    acceptance: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, help="Chance that a draft is right, if all before it are."),
    ] = Speculation.acceptance,
    seed: Seed = 0,
) -> None:
    """Compare groups, redundancy and intervals on a load; print the best, and why.

    What neither the options nor the load tell is assumed, and printed first: the model by the shape
    of the load, an h200, 32 ranks, 8 of them on a node, 60 s of serving in a window.
    """
    report.check()
    plots.check()
    rule, prefill = chosen_by.rule(), timed.prefill
    speculation = Speculation(drafts, acceptance)
    card = hardware_named(timed.hardware or HARDWARE)
    options = reading_of(trace, stated, timed, num_hidden=chosen_by.hidden_layers, **vars(routing))
    load = windows_of(trace, options, seed, timed.shape(), name=stated.input_format)
    load = replace(load, phase="prefill" if prefill else "decode")
    shape, which = model_named(timed.model, load)
    shape = timed.at_precision(shape)
    model_of(shape, load, trace)
    at = load.deployment
    groups = numbers("--ranks", ranks or str(at.num_ranks or RANKS))
    of_load = (at.num_ranks or 0) // (at.num_nodes or 1)
    on_node = ranks_per_node or of_load or RANKS_PER_NODE
    seconds = window_seconds or at.window_s or WINDOW_S
    other_us = OTHER_US if timed.other_us is None else timed.other_us
    assumed = [
        text
        for text, is_told in (
            (f"the model {which} (--model)", timed.model or at.model),
            (f"the card {card.name} (--hardware)", timed.hardware),
            (f"{groups[0]} ranks (--ranks)", ranks or at.num_ranks),
            (f"{on_node} ranks on a node (--ranks-per-node)", ranks_per_node or of_load),
            (f"{seconds:g} s of a window (--window-seconds)", window_seconds or at.window_s),
        )
        if not is_told
    ]
    kv_bytes = kv_token_bytes or model_kv_bytes(shape)
    if kv_bytes is None:
        raise ConfigError(
            f"the KV cache of {which} is not known, expected --kv-token-bytes: bytes of a token in "
            "all layers"
        )
    kernel = kernel_of(
        shape,
        card.name,
        engine=chosen_by.name,
        expert_times=expert_times,
        is_prefill=prefill,
    )
    question = Question(
        part_of(load, windows, is_latest=not trace.startswith(PREFIX)),
        MemoryModel(card, shape, 0.9, dense_gb * 1e9, kv_bytes),
        kernel,
        groups,
        on_node,
        numbers("--redundant-per-rank", redundant_per_rank, least=0),
        numbers("--every", every),
        chosen_by.compared(policy, "auto"),
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
    is_shown = not report.json_output
    replays = replayed(question.windows, question.most_replays, is_shown=is_shown)
    with telling_of_compiler(is_shown=is_shown), replays as counted:
        answer = recommend(replace(question, windows=counted))
    best, source = answer.best, kernel.source
    assert best.placement is not None, "the best candidate was replayed"
    inputs: dict[str, object] = {
        "command": command_line(),
        "load": Path(trace).name,
        "model": which,
        "hardware": card.name,
        "expert times": source,
        "assumed": "; ".join(assumed) or "nothing",
    }
    plots.write(lambda: recommendation_page(answer, Path(trace).name, inputs))
    plots.write_rows([one.as_json() for one in answer.candidates])
    about = {"source": Path(trace).name, "chosen": best.name}
    written = chosen_by.write(best.placement, best.ranks, shape, about)
    flags = engine_options(best, shape.num_experts)
    remarks = [
        *(f"{name}: {text}" for name, text in flags.items() if chosen_by.name in (None, name)),
        f"model: {which}, experts in {shape.precision}; EP{', EP'.join(map(str, groups))} with "
        f"{on_node} ranks a node on {card.name}; expert times: {source}",
        f"taken as such: {seconds:g} s of serving a window (--window-seconds), {context} tokens a "
        f"sequence (--context), {kv_bytes:g} bytes of KV cache a token (--kv-token-bytes), "
        f"{dense_gb:g} GB a rank beside experts (--dense-gb); no queue or scheduler is modelled",
    ]
    if drafts:
        remarks.append(
            f"a step verifies {speculation.verified} tokens of a sequence and gives "
            f"{speculation.given:.2f}; each draft takes a layer of the mean length"
        )

    def show() -> None:
        first = [f"assumed, as nothing tells: {'; '.join(assumed)}"] if assumed else []
        tables = [candidate_table(answer).for_terminal(NUM_COLUMNS)]
        tables += [batch_table(answer).for_terminal()] if answer.batches else []
        print_plain(*first, *tables, *sentences)

    remarks += [f"note: {note}" for note in load.notes]
    verdict = verdict_of(question, best)
    sentences = [*answer.sentences(), *written, *remarks, f"verdict: {verdict.sentence}"]
    found = {
        "command": command_line(),
        "model": which,
        "hardware": card.name,
        "most_ms": most_ms,
        "recommended": best.as_json() if question.is_within(best) else None,
        "runner_up": answer.candidates[1].as_json() if len(answer.candidates) > 1 else None,
        "engine_options": flags,
        "assumed": assumed,
        "expert_times": source,
        "candidates": [one.as_json() for one in answer.candidates],
        "unfit": [one.as_json() for one in answer.unfit],
        "batches": [asdict(one) for one in answer.batches],
        "verdict": verdict.to_dict(),
        "sentences": sentences,
    }
    report.give(found, show)
