"""The page of ``eplb recommend``: candidates by what they give, and batches of the best one."""

from __future__ import annotations

from typing import Any

from simulations.pages.document import Figure, Page, Table, colour_of, framed, graph_objects
from simulations.questions.recommend import Answer, Batch

BALANCES = ("without balancing", "planned", "bound of any placement")


def recommendation_page(answer: Answer, load: str, expert_times: str, command: str) -> Page:
    """The page.

    Args:
        command: that made it, as typed.

    Raises:
        ConfigError: plotly is not installed.
    """
    go = graph_objects()
    figures = [
        Figure(
            "Throughput against KV cache",
            "Tokens a second of a rank against the memory left for the KV cache: redundant slots "
            "move a candidate to the left.",
            _candidates(go, answer),
        )
    ]
    if answer.batches:
        x_title = "sequences of a rank"
        figures += [
            Figure(
                "Tokens a second by batch",
                f"Of a rank, for {answer.best.name}.",
                _by_batch(go, answer, "tokens_per_s", x_title, "tokens/s of a rank"),
            ),
            Figure(
                "Time of a token by batch",
                "Milliseconds: the time of a step over the tokens that it gives to a sequence.",
                _by_batch(go, answer, "ms", x_title, "ms"),
            ),
        ]
    return Page(
        f"What to deploy for {load}",
        answer.sentences(),
        [_table(answer)],
        figures,
        {"command": command, "load": load, "expert times": expert_times},
        "No queue and no scheduler is modelled: batches are full. Attention ranks and expert ranks "
        "take turns: two batches in a pipeline between them are not modelled.",
    )


def _table(answer: Answer) -> Table:
    headings = ["group", "slots a rank", "tokens/s a rank", "plan every", "sequences", "KV GB"]
    rows = [
        (
            one.group,
            str(one.slots_per_rank),
            f"{one.tokens_per_s:.1f}",
            str(one.interval) if one.interval else "never",
            str(one.sequences),
            f"{one.kv_bytes / 1e9:.1f}",
            f"{one.imbalance:.3f}",
            f"{one.step_us / 1000:.2f}",
            " / ".join(f"{part / 1000:.2f}" for part in one.parts_us),
            "not known" if one.error is None else f"{one.error:.1%}",
            f"{one.lost_part:.2%}",
        )
        for one in answer.candidates
    ]
    parts = "dispatch / experts / combine / rest"
    return Table([*headings, "imbalance", "step ms", parts, "error of a step", "moves"], rows)


def _candidates(go: Any, answer: Answer) -> Any:
    figure = go.Figure()
    groups = list(dict.fromkeys(one.group for one in answer.candidates))
    for number, group in enumerate(groups):
        ones = [one for one in answer.candidates if one.group == group]
        figure.add_scatter(
            x=[one.kv_bytes / 1e9 for one in ones],
            y=[one.tokens_per_s for one in ones],
            mode="markers",
            name=group,
            marker={"size": 11, "color": colour_of(number)},
            text=[one.name for one in ones],
            hovertemplate="%{text}<br>%{x:.1f} GB, %{y:.1f} tokens/s<extra></extra>",
        )
    return framed(figure, "GB for the KV cache of a rank", "tokens/s of a rank")


def _by_batch(go: Any, answer: Answer, figure_of: str, x_title: str, y_title: str) -> Any:
    figure = go.Figure()
    prefixes = ("none", "planned", "perfect")
    for number, (prefix, name) in enumerate(zip(prefixes, BALANCES, strict=True)):
        figure.add_scatter(
            x=[one.sequences for one in answer.batches],
            y=[_value(one, f"{prefix}_{figure_of}") for one in answer.batches],
            name=name,
            line={"color": colour_of(number), "dash": "dot" if prefix == "perfect" else "solid"},
        )
    framed(figure, x_title, y_title)
    powers = [one.sequences for one in answer.batches if one.sequences.bit_count() == 1]
    figure.update_xaxes(type="log", tickvals=powers)
    return figure


def _value(batch: Batch, name: str) -> float:
    return float(getattr(batch, name))
