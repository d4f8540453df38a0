"""The pages of ``eplb simulate``, ``eplb recommend`` and ``eplb sweep``.

simulate   policies side by side, over time and in distribution
recommend  candidates by what they give, and batches of the best one
sweep      every configuration, by balance, moves and throughput
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eplb.errors import counted
from simulations.pages.document import (
    Figure,
    ReportPage,
    colour_of,
    framed,
    graph_objects,
    line_of,
    marker_of,
    whole_numbers,
)
from simulations.recommend import Recommendation, batch_table, candidate_table
from simulations.replay import UNBALANCED, Replay, Scenario
from simulations.report import best_policy, comparison_table
from simulations.sweep.grid import SweepTask
from simulations.sweep.results import Row, rows_table


def comparison_page(
    result: dict[str, Any],
    scenario: Scenario,
    replays: Sequence[Replay],
    conclusions: Sequence[str],
    command: str,
) -> ReportPage:
    """The page of ``eplb simulate``.

    Args:
        result: of ``simulations.report.summary``.
        conclusions: sentences on top.
        command: that made it, as typed.

    Raises:
        ConfigError: plotly is not installed.
    """
    go = graph_objects()
    ran = [one for one in replays if "imbalance_mean" in result["policies"][one.policy]]
    judged = {one.label: result["policies"][one.policy] for one in ran}
    figures = [
        Figure(
            "Imbalance over time",
            "Busiest over mean rank load, mean over layers, of each window under what was planned "
            "before it. Triangles are rebalances; the dotted line is what chance alone makes.",
            _over_time(go, result["noise_floor"], ran),
        ),
        Figure(
            "Gain against moves",
            "Mean imbalance against experts moved. Left and low is good.",
            _scatter(
                go,
                [(n, one["experts_moved"], one["imbalance_mean"], n) for n, one in judged.items()],
                "experts moved in all",
                "mean imbalance",
            ),
        ),
        Figure(
            "Windows by imbalance",
            "Part of the windows whose imbalance is at most so high.",
            _distribution(go, [(one.label, one.per_window[~one.idle]) for one in ran], "imbalance"),
        ),
        Figure(
            "Ranks by load",
            "Part of the ranks, of all layers of the last window, whose load over the mean of "
            "their layer is at most so high. 1 is perfect.",
            _distribution(
                go,
                [(one.label, _ratios(one.last_load, scenario).ravel()) for one in ran],
                "rank load / mean",
            ),
        ),
    ]
    if any("tokens_per_s_per_rank" in one for one in judged.values()):
        text = "Tokens a second of a rank, with the time that moves take."
        figures.append(Figure("Throughput", text, _throughput(go, judged)))
    best = best_policy(result)
    figures += [
        one for replay in ran if replay.policy == best for one in _heatmaps(go, scenario, replay)
    ]
    return ReportPage(
        result["trace"],
        conclusions,
        [comparison_table(result)],
        figures,
        {"command": command} | _inputs(result),
    )


def _inputs(result: dict[str, Any]) -> dict[str, object]:
    names = ("windows", "windows_skipped", "windows_idle", "layers", "experts", "slots", "ranks")
    more = ("nodes", "past_windows", "plan_every", "dispatch", "steps_per_window", "seed")
    found = {name.replace("_", " "): result[name] for name in (*names, *more)}
    floor, times = f"{result['noise_floor']:.4f}", result["experts_measured"]
    return found | {"imbalance by chance alone": floor, "expert times": times or "not asked for"}


def _over_time(go: Any, floor: float, replays: Sequence[Replay]) -> Any:
    figure = go.Figure()
    for number, replay in enumerate(replays):
        colour, series = colour_of(number), replay.per_window
        windows = np.arange(1, len(series) + 1)
        line = line_of(number)
        figure.add_scatter(x=windows, y=series, mode="lines", name=replay.label, line=line)
        taken = [one for one in replay.rebalances if one.window < len(series)]
        served_from = np.array([rebalance.window + 1 for rebalance in taken], dtype=int)
        figure.add_scatter(
            x=served_from,
            y=series[served_from - 1],
            mode="markers",
            showlegend=False,
            marker={"color": colour, "symbol": "triangle-up", "size": 8},
            text=[rebalance.reason for rebalance in taken],
            hovertemplate="window %{x}: %{y:.3f}<br>%{text}<extra></extra>",
        )
    figure.add_hline(y=floor, line={"dash": "dot", "color": "#888"})
    longest = max((len(replay.per_window) for replay in replays), default=0)
    return whole_numbers(framed(figure, "window", "imbalance"), x=longest)


def _scatter(
    go: Any,
    points: Iterable[tuple[str, float | None, float | None, str]],
    x_title: str,
    y_title: str,
    hover: str = "%{text}<br>%{x:,}, %{y:.3f}",
) -> Any:
    """Points (group, x, y, text), each group in a colour of its own."""
    of_group: dict[str, list[tuple[float | None, float | None, str]]] = {}
    for group, x_of, y_of, name in points:
        of_group.setdefault(group, []).append((x_of, y_of, name))
    figure = go.Figure()
    for number, (group, found) in enumerate(of_group.items()):
        x, y, text = zip(*found, strict=True)
        figure.add_scatter(
            x=x,
            y=y,
            mode="markers",
            name=group,
            marker=marker_of(number, 11),
            text=text,
            hovertemplate=f"{hover}<extra></extra>",
        )
    return framed(figure, x_title, y_title)


def _distribution(go: Any, samples: Sequence[tuple[str, NDArray[np.float64]]], x_title: str) -> Any:
    figure = go.Figure()
    for number, (name, values) in enumerate(samples):
        parts = np.linspace(0.0, 1.0, min(max(values.size, 2), 201))
        figure.add_scatter(
            x=np.quantile(values, parts) if values.size else [],
            y=parts,
            mode="lines",
            name=name,
            line=line_of(number, shape="hv"),
        )
    return framed(figure, x_title, "part")


def _throughput(go: Any, judged: dict[str, dict[str, Any]]) -> Any:
    figure = go.Figure()
    timed = {name: one for name, one in judged.items() if "tokens_per_s_per_rank" in one}
    figure.add_bar(
        x=[one["tokens_per_s_per_rank"] for one in timed.values()],
        y=list(timed),
        orientation="h",
        marker={"color": [colour_of(number) for number in range(len(timed))]},
        text=[f"{one['tokens_per_s_per_rank']:.0f}" for one in timed.values()],
        textposition="outside",  # within a bar its contrast depends on the bar's colour
        cliponaxis=False,
    )
    framed(figure, "tokens/s of a rank", "")
    figure.update_yaxes(autorange="reversed")
    return figure


def _ratios(load: NDArray[np.float64], scenario: Scenario) -> NDArray[np.float64]:
    """[L, serving R] load over the mean of the layer's ranks that serve."""
    served = load[:, scenario.topology.serving]
    ratios: NDArray[np.float64] = served / np.maximum(served.mean(axis=1, keepdims=True), 1e-12)
    return ratios


def _heatmaps(go: Any, scenario: Scenario, replay: Replay) -> list[Figure]:
    ratios = [_ratios(load, scenario) for load in (replay.first_load, replay.last_load)]
    # As far below 1 as above, so that the middle of the colours is perfect balance.
    reach = max(0.5, float(np.percentile(np.concatenate(ratios), 99)) - 1.0)
    found = []
    names = ["contiguous"] if replay.policy in UNBALANCED else ["contiguous", replay.policy]
    for name, ratio in zip(names, ratios, strict=False):
        figure = go.Figure()
        figure.add_heatmap(z=ratio, colorscale="RdBu_r", zmin=1.0 - reach, zmax=1.0 + reach)
        layers, ranks = ratio.shape
        whole_numbers(framed(figure, "rank", "layer"), x=ranks, y=layers)
        figure.update_yaxes(autorange="reversed")
        worst = float(ratio.max(axis=1).mean())
        text = f"Load of each rank over the layer's mean in the last window; imbalance {worst:.3f}."
        found.append(Figure(f"Rank load: {name}", text, figure))
    return found


BALANCES = ("without balancing", "planned", "bound of any placement")


def recommendation_page(answer: Recommendation, load: str, inputs: dict[str, object]) -> ReportPage:
    """The page of ``eplb recommend``.

    Args:
        inputs: by what they are called; the command is among them.

    Raises:
        ConfigError: plotly is not installed.
    """
    go, is_prefill = graph_objects(), answer.question.is_prefill
    figures = [
        Figure(
            "Throughput against KV cache",
            "Tokens a second of a rank against the memory left for the KV cache: redundant slots "
            "move a candidate to the left.",
            _scatter(
                go,
                [
                    (one.group, one.kv_bytes / 1e9, one.tokens_per_s, one.name)
                    for one in answer.candidates
                ],
                "GB for the KV cache of a rank",
                "tokens/s of a rank",
                "%{text}<br>%{x:.1f} GB, %{y:.1f} tokens/s",
            ),
        )
    ]
    if answer.batches:
        x_title = f"{answer.question.unit} of a rank"
        figures += [
            Figure(
                "Tokens a second by batch",
                f"Of a rank, for {answer.best.name}.",
                _by_batch(go, answer, "tokens_per_s", x_title, "tokens/s of a rank"),
            ),
            Figure(
                "Time to the first token by batch" if is_prefill else "Time of a token by batch",
                "Milliseconds of a prompt's steps, with no queue."
                if is_prefill
                else "Milliseconds: the time of a step over the tokens that it gives a sequence.",
                _by_batch(go, answer, "ms", x_title, "ms"),
            ),
        ]
    return ReportPage(
        f"What to deploy for {load}",
        answer.sentences(),
        [candidate_table(answer), *([batch_table(answer)] if answer.batches else [])],
        figures,
        inputs,
        "No queue and no scheduler is modelled: batches are full. Attention ranks and expert ranks "
        "take turns: two batches in a pipeline between them are not modelled.",
    )


def _by_batch(go: Any, answer: Recommendation, figure_of: str, x_title: str, y_title: str) -> Any:
    figure = go.Figure()
    prefixes = ("none", "planned", "perfect")
    for number, (prefix, name) in enumerate(zip(prefixes, BALANCES, strict=True)):
        figure.add_scatter(
            x=[one.sequences for one in answer.batches],
            y=[getattr(one, f"{prefix}_{figure_of}") for one in answer.batches],
            name=name,
            line={"color": colour_of(number), "dash": "dot" if prefix == "perfect" else "solid"},
        )
    framed(figure, x_title, y_title)
    powers = [one.sequences for one in answer.batches if one.sequences.bit_count() == 1]
    figure.update_xaxes(type="log", tickvals=powers)
    return figure


MOST_SHOWN = 200  # rows of the page's table; the Parquet file has all


def sweep_page(rows: Sequence[Row], load: str, command: str) -> ReportPage:
    """The page of ``eplb sweep``.

    Args:
        rows: the best first.
        command: that made it, as typed.

    Raises:
        ConfigError: plotly is not installed.
    """
    go = graph_objects()
    judged = [row for row in rows if row.imbalance_mean is not None]
    figures = [
        Figure(
            "Gain against moves",
            "Mean imbalance against experts moved. Left and low is good.",
            _scatter(
                go,
                [(row.label, row.experts_moved, row.imbalance_mean, words(row)) for row in judged],
                "experts moved in all",
                "mean imbalance",
            ),
        )
    ]
    is_timed = any(row.tokens_per_s_per_rank is not None for row in judged)
    y_title = "tokens/s of a rank" if is_timed else "mean imbalance"
    priced = " KV memory that redundant slots take is not in it: eplb recommend prices it."
    for title, x_title, name, more in (
        ("By ranks", "ranks of a group", "ranks", ""),
        ("By redundancy", "redundant slots of a rank", "redundant", priced if is_timed else ""),
    ):
        if len({getattr(row, name) for row in judged}) > 1:
            text = f"The best of each policy, group and redundancy: {y_title}.{more}"
            best = _best_of(judged, lambda row: (row.policy, row.ranks, row.redundant))
            figures.append(Figure(title, text, _by(go, best, name, x_title, y_title)))
    return ReportPage(
        f"Sweep of {load}",
        conclusions(rows),
        [rows_table(rows, MOST_SHOWN)],
        figures,
        {"command": command, "load": load, "configurations": len(rows)},
    )


def conclusions(rows: Sequence[Row]) -> list[str]:
    """The best configuration of each group, and how many policies ended early.

    Imbalance is not compared between groups: fewer ranks are easier to balance.
    """
    judged = [row for row in rows if row.imbalance_mean is not None]
    best = _best_of(judged, lambda row: row.ranks)
    found = [f"best of EP{row.ranks}: {words(row)}: {_gives(row)}" for row in best]
    failed = sum(bool(row.failed) for row in rows)
    if failed:
        found.append(f"{failed} of {counted(len(rows), 'configuration')} ended early")
    return found


def _best_of(rows: Sequence[Row], key: Callable[[Row], object]) -> list[Row]:
    """The first row of each key: rows come the best first."""
    found: dict[object, Row] = {}
    for row in rows:
        found.setdefault(key(row), row)
    return list(found.values())


def _by(go: Any, rows: Sequence[Row], name: str, x_title: str, y_title: str) -> Any:
    """A line for each policy and value of the other axis of the grid."""
    other = "redundant" if name == "ranks" else "ranks"
    lines: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: (row.policy, getattr(row, other), getattr(row, name))):
        label = f"+{row.redundant} slots" if other == "redundant" else f"EP{row.ranks}"
        lines.setdefault(f"{row.label}, {label}", []).append(row)
    figure = go.Figure()
    for number, (label, of_line) in enumerate(lines.items()):
        figure.add_scatter(
            x=[getattr(row, name) for row in of_line],
            y=[row.tokens_per_s_per_rank or row.imbalance_mean for row in of_line],
            mode="lines+markers",
            name=label,
            line=line_of(number),
            marker=marker_of(number, 8),
        )
    framed(figure, x_title, y_title)
    figure.update_xaxes(tickvals=sorted({getattr(row, name) for row in rows}))
    return figure


def words(one: Row | SweepTask) -> str:
    """A configuration, as sentences have it."""
    return (
        f"{one.policy} on {counted(one.ranks, 'rank')}, {one.redundant} redundant a rank, "
        f"a plan every {'window' if one.interval == 1 else f'{one.interval} windows'}, "
        f"{one.dispatch}, seed {one.seed}"
    )


def _gives(row: Row) -> str:
    text = f"imbalance {row.imbalance_mean:.3f}, {counted(row.experts_moved, 'expert')} moved"
    if row.tokens_per_s_per_rank is None:
        return text
    return f"{text}, {row.tokens_per_s_per_rank:.0f} tokens/s a rank"
