"""A self-contained HTML page of a comparison: the script is included, nothing is downloaded."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from eplb.errors import ConfigError
from eplb.measure.balance import imbalance_of
from simulations.replay import Replay, Scenario
from simulations.report import conclusions, write_whole

# Told apart by people who see colours differently, and readable on white (Okabe and Ito, 2008).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
STYLE = """
body { font-family: system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; color: #1a1a1a; }
h1 { font-size: 1.4rem; margin-bottom: 0.2rem; }
h2 { font-size: 1.1rem; margin: 2rem 0 0.2rem; }
p { margin: 0.2rem 0 0.8rem; color: #444; }
table { border-collapse: collapse; }
th, td { padding: 0.3rem 0.9rem; text-align: right; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; }
"""


def write_page(
    path: Path, result: dict[str, Any], scenario: Scenario, replays: Sequence[Replay]
) -> None:
    """Write the page atomically.

    Raises:
        ConfigError: plotly is not installed, or the file cannot be written.
    """
    try:
        import plotly.graph_objects as go
        from plotly.offline import get_plotlyjs
    except ImportError as exc:
        raise ConfigError("the HTML page needs plotly: install eplb[sim]") from exc
    figures = [
        (
            "Imbalance over time",
            "Mean over layers of busiest over mean rank load, each window under the placement "
            "planned before it. Marks are rebalances.",
            _over_time(go, result, replays),
        ),
        (
            "Imbalance against moves",
            "Mean imbalance against experts moved. Left and low is good.",
            _moves_against_balance(go, result),
        ),
        (
            f"Rank load in the last window: contiguous, then {replays[-1].policy}",
            "Load of each rank over the layer's mean. 1 is perfect.",
            _heatmaps(go, scenario, replays[-1]),
        ),
    ]
    parts = [
        f"<h2>{escape(title)}</h2><p>{escape(text)}</p>"
        + figure.to_html(full_html=False, include_plotlyjs=False, config={"displaylogo": False})
        for title, text, figure in figures
    ]
    write_whole(path, _document(result, get_plotlyjs(), parts))


def _document(result: dict[str, Any], script: str, parts: Sequence[str]) -> str:
    shape = (
        f"{result['windows']} windows, {result['layers']} layers x {result['experts']} experts on "
        f"{result['slots']} slots, {result['ranks']} ranks, {result['nodes']} nodes. "
        f"Chance alone makes {result['noise_floor']:.3f} of a window."
    )
    name = escape(str(result["trace"]))
    found = "".join(f"<li>{escape(sentence)}</li>" for sentence in conclusions(result))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{name}</title>'
        f"<style>{STYLE}</style><script>{script}</script></head><body>"
        f"<h1>{name}</h1><ul>{found}</ul><p>{escape(shape)}</p>{_table(result)}{''.join(parts)}</body></html>\n"
    )


def _table(result: dict[str, Any]) -> str:
    headings = ("policy", "mean imbalance", "p95", "worst layer", "rebalances", "experts moved")
    rows = [
        (
            escape(policy),
            f"{figures['imbalance_mean']:.3f}",
            f"{figures['imbalance_p95']:.3f}",
            f"{figures['imbalance_max_layer']:.2f}",
            str(figures["rebalances"]),
            f"{figures['experts_moved']:,}",
        )
        for policy, figures in result["policies"].items()
        if "imbalance_mean" in figures
    ]
    head = "".join(f"<th>{heading}</th>" for heading in headings)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _over_time(go: Any, result: dict[str, Any], replays: Sequence[Replay]) -> Any:
    figure = go.Figure()
    for number, replay in enumerate(replays):
        colour = COLOURS[number % len(COLOURS)]
        series = replay.per_window
        windows = np.arange(1, len(series) + 1)
        figure.add_scatter(x=windows, y=series, name=replay.policy, line={"color": colour})
        served_from = np.array([rebalance.window + 1 for rebalance in replay.rebalances], dtype=int)
        figure.add_scatter(
            x=served_from,
            y=series[served_from - 1],
            mode="markers",
            name=f"{replay.policy}: rebalance",
            marker={"color": colour, "symbol": "triangle-up", "size": 9},
            text=[rebalance.reason for rebalance in replay.rebalances],
            hovertemplate="window %{x}: %{y:.3f}<br>%{text}<extra></extra>",
        )
    figure.add_hline(
        y=result["noise_floor"],
        line={"dash": "dot", "color": "#888"},
        annotation_text="chance alone",
        annotation_position="bottom right",
    )
    return _framed(figure, "window", "imbalance")


def _moves_against_balance(go: Any, result: dict[str, Any]) -> Any:
    figure = go.Figure()
    judged = {name: one for name, one in result["policies"].items() if "imbalance_mean" in one}
    for number, (policy, figures) in enumerate(judged.items()):
        figure.add_scatter(
            x=[figures["experts_moved"]],
            y=[figures["imbalance_mean"]],
            mode="markers+text",
            text=[policy],
            textposition="top center",
            marker={"size": 13, "color": COLOURS[number % len(COLOURS)]},
            showlegend=False,
        )
    return _framed(figure, "experts moved in all", "mean imbalance")


def _heatmaps(go: Any, scenario: Scenario, replay: Replay) -> Any:
    from plotly.subplots import make_subplots

    loads = (replay.first_load, replay.last_load)
    worst = [imbalance_of(load, scenario.topology).mean() for load in loads]
    titles = [
        f"{name}, imbalance {value:.3f}"
        for name, value in zip(("contiguous", replay.policy), worst, strict=True)
    ]
    figure = make_subplots(cols=2, shared_yaxes=True, subplot_titles=titles)
    serving = scenario.topology.serving
    means = [load[:, serving].mean(axis=1, keepdims=True) for load in loads]
    ratios = [load / np.maximum(mean, 1e-12) for load, mean in zip(loads, means, strict=True)]
    for column, ratio in enumerate(ratios, start=1):
        figure.add_heatmap(z=ratio, coloraxis="coloraxis", row=1, col=column)
        figure.update_xaxes(title_text="rank", row=1, col=column)
    figure.update_yaxes(title_text="layer", row=1, col=1, autorange="reversed")
    top = max(2.0, float(np.percentile(np.concatenate(ratios), 99)))
    figure.update_layout(
        template="plotly_white",
        height=460,
        margin={"t": 40},
        # As far below 1 as above: plotly ignores a middle once both ends are given.
        coloraxis={"colorscale": "RdBu_r", "cmin": 2.0 - top, "cmax": top},
    )
    return figure


def _framed(figure: Any, x_title: str, y_title: str) -> Any:
    figure.update_layout(
        template="plotly_white",
        height=420,
        xaxis_title=x_title,
        yaxis_title=y_title,
        margin={"t": 30},
    )
    return figure
