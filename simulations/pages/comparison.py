"""The page of ``eplb simulate``: policies side by side, over time and in distribution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simulations.pages.document import (
    Figure,
    Page,
    Table,
    colour_of,
    counted,
    framed,
    graph_objects,
)
from simulations.replay import Replay, Scenario


def comparison_page(
    result: dict[str, Any],
    scenario: Scenario,
    replays: Sequence[Replay],
    conclusions: Sequence[str],
    command: str,
) -> Page:
    """The page.

    Args:
        result: of ``simulations.report.summary``.
        conclusions: sentences on top.
        command: that made it, as typed.

    Raises:
        ConfigError: plotly is not installed.
    """
    go = graph_objects()
    judged = {name: one for name, one in result["policies"].items() if "imbalance_mean" in one}
    ran = [replay for replay in replays if replay.policy in judged]
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
            _moves_against_balance(go, judged),
        ),
        Figure(
            "Windows by imbalance",
            "Part of the windows whose imbalance is at most so high.",
            _distribution(
                go, [(one.policy, one.per_window[~one.idle]) for one in ran], "imbalance"
            ),
        ),
        Figure(
            "Ranks by load",
            "Part of the ranks, of all layers of the last window, whose load over the mean of "
            "their layer is at most so high. 1 is perfect.",
            _distribution(
                go,
                [(one.policy, _ratios(one.last_load, scenario).ravel()) for one in ran],
                "rank load / mean",
            ),
        ),
    ]
    if any("tokens_per_s_per_rank" in one for one in judged.values()):
        text = "Tokens a second of a rank, with the time that moves take."
        figures.append(Figure("Throughput", text, _throughput(go, judged)))
    if ran:
        shown = [one for one in ran if not one.is_oracle] or ran
        figures += _heatmaps(go, scenario, shown[-1])
    return Page(
        result["trace"],
        conclusions,
        [_table(judged)],
        figures,
        {"command": command} | _inputs(result),
    )


def _inputs(result: dict[str, Any]) -> dict[str, object]:
    names = ("windows", "windows_skipped", "windows_idle", "layers", "experts", "slots", "ranks")
    more = ("nodes", "past_windows", "plan_every", "dispatch", "steps_per_window", "seed")
    found = {name.replace("_", " "): result[name] for name in (*names, *more)}
    floor, times = f"{result['noise_floor']:.4f}", result["experts_measured"]
    return found | {"imbalance by chance alone": floor, "expert times": times or "not asked for"}


def _table(judged: dict[str, dict[str, Any]]) -> Table:
    headings = ["policy", "mean imbalance", "p95", "p99", "worst layer", "rebalances"]
    headings += ["experts moved", "GB moved", "tokens/s a rank"]
    rows = [
        (
            policy,
            f"{one['imbalance_mean']:.3f}",
            f"{one['imbalance_p95']:.3f}",
            f"{one['imbalance_p99']:.3f}",
            f"{one['imbalance_max_layer']:.2f}",
            str(one["rebalances"]),
            f"{one['experts_moved']:,}",
            f"{sum(one['bytes_by_link'].values()) / 1e9:,.1f}" if one["bytes_by_link"] else "-",
            f"{one['tokens_per_s_per_rank']:.0f}" if "tokens_per_s_per_rank" in one else "-",
        )
        for policy, one in judged.items()
    ]
    return Table(headings, rows)


def _over_time(go: Any, floor: float, replays: Sequence[Replay]) -> Any:
    figure = go.Figure()
    for number, replay in enumerate(replays):
        colour, series = colour_of(number), replay.per_window
        windows = np.arange(1, len(series) + 1)
        figure.add_scatter(
            x=windows, y=series, mode="lines", name=replay.policy, line={"color": colour}
        )
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
    return counted(framed(figure, "window", "imbalance"), x=longest)


def _moves_against_balance(go: Any, judged: dict[str, dict[str, Any]]) -> Any:
    figure = go.Figure()
    for number, (policy, one) in enumerate(judged.items()):
        figure.add_scatter(
            x=[one["experts_moved"]],
            y=[one["imbalance_mean"]],
            mode="markers",
            name=policy,
            marker={"size": 13, "color": colour_of(number)},
        )
    return framed(figure, "experts moved in all", "mean imbalance")


def _distribution(go: Any, samples: Sequence[tuple[str, NDArray[np.float64]]], x_title: str) -> Any:
    figure = go.Figure()
    for number, (name, values) in enumerate(samples):
        parts = np.linspace(0.0, 1.0, min(max(values.size, 2), 201))
        figure.add_scatter(
            x=np.quantile(values, parts) if values.size else [],
            y=parts,
            mode="lines",
            name=name,
            line={"color": colour_of(number), "shape": "hv"},
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
    for name, ratio in zip(("contiguous", replay.policy), ratios, strict=True):
        figure = go.Figure()
        figure.add_heatmap(z=ratio, colorscale="RdBu_r", zmin=1.0 - reach, zmax=1.0 + reach)
        layers, ranks = ratio.shape
        counted(framed(figure, "rank", "layer"), x=ranks, y=layers)
        figure.update_yaxes(autorange="reversed")
        worst = float(ratio.max(axis=1).mean())
        text = f"Load of each rank over the layer's mean in the last window; imbalance {worst:.3f}."
        found.append(Figure(f"Rank load: {name}", text, figure))
    return found
