"""The page of ``eplb sweep``: every configuration, by balance, moves and throughput."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from simulations.pages.document import Figure, Page, Table, colour_of, framed, graph_objects
from simulations.sweep.results import Row

MOST_SHOWN = 200  # rows of the page's table; the Parquet file has all


def sweep_page(rows: Sequence[Row], load: str, command: str) -> Page:
    """The page.

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
            _scatter(go, judged, lambda row: row.experts_moved, lambda row: row.imbalance_mean)
            .update_xaxes(title="experts moved in all")
            .update_yaxes(title="mean imbalance"),
        )
    ]
    if any(row.tokens_per_s_per_rank is not None for row in judged):
        figures.append(
            Figure(
                "Throughput against slots",
                "Tokens a second of a rank against slots of a layer, before the KV memory that "
                "they take: eplb recommend prices it.",
                _scatter(go, judged, lambda row: row.slots, lambda row: row.tokens_per_s_per_rank)
                .update_xaxes(title="slots of a layer")
                .update_yaxes(title="tokens/s of a rank"),
            )
        )
    return Page(
        f"Sweep of {load}",
        conclusions(rows),
        [_table(rows[:MOST_SHOWN])],
        figures,
        {"command": command, "load": load, "configurations": len(rows)},
    )


def conclusions(rows: Sequence[Row]) -> list[str]:
    """The best configuration, and how many policies ended early."""
    judged = [row for row in rows if row.imbalance_mean is not None]
    found = [f"best: {words(judged[0])}: {_gives(judged[0])}"] if judged else []
    if len(judged) > 1:
        found.append(f"last: {words(judged[-1])}: {_gives(judged[-1])}")
    failed = sum(bool(row.failed) for row in rows)
    return [*found, f"{failed} of {len(rows)} configurations ended early"] if failed else found


def words(row: Row) -> str:
    """A configuration, as sentences have it."""
    return (
        f"{row.policy} on {row.ranks} ranks, {row.slots} slots, "
        f"a plan every {row.interval} windows, {row.dispatch}, seed {row.seed}"
    )


def _gives(row: Row) -> str:
    text = f"imbalance {row.imbalance_mean:.3f}, {row.experts_moved:,} experts moved"
    if row.tokens_per_s_per_rank is None:
        return text
    return f"{text}, {row.tokens_per_s_per_rank:.0f} tokens/s a rank"


def _table(rows: Sequence[Row]) -> Table:
    headings = ["policy", "ranks", "slots", "every", "dispatch", "seed", "imbalance", "p99"]
    return Table(
        [*headings, "rebalances", "experts moved", "tokens/s a rank"],
        [
            (
                row.policy,
                str(row.ranks),
                str(row.slots),
                str(row.interval),
                row.dispatch,
                str(row.seed),
                "failed" if row.imbalance_mean is None else f"{row.imbalance_mean:.3f}",
                "-" if row.imbalance_p99 is None else f"{row.imbalance_p99:.3f}",
                str(row.rebalances),
                f"{row.experts_moved:,}",
                "-" if row.tokens_per_s_per_rank is None else f"{row.tokens_per_s_per_rank:.0f}",
            )
            for row in rows
        ],
    )


def _scatter(
    go: Any,
    rows: Sequence[Row],
    x_of: Callable[[Row], float | None],
    y_of: Callable[[Row], float | None],
) -> Any:
    figure = go.Figure()
    for number, policy in enumerate(dict.fromkeys(row.policy for row in rows)):
        ones = [row for row in rows if row.policy == policy]
        figure.add_scatter(
            x=[x_of(row) for row in ones],
            y=[y_of(row) for row in ones],
            mode="markers",
            name=policy,
            marker={"size": 10, "color": colour_of(number)},
            text=[words(row) for row in ones],
            hovertemplate="%{text}<br>%{x:,}, %{y:.3f}<extra></extra>",
        )
    return framed(figure, "", "")
