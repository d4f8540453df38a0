"""Results of a replay: a table for the terminal, a JSON summary, and an HTML page."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table

from eplb.errors import ConfigError
from simulations.replay import Replay, Scenario


def summary(name: str, scenario: Scenario, replays: Sequence[Replay]) -> dict[str, Any]:
    """Give the result JSON-ready; all but the times repeat for the same input and seed."""
    history, topology = scenario.history, scenario.topology
    return {
        "trace": name,
        "windows": history.num_windows,
        "layers": history.num_layers,
        "experts": history.num_experts,
        "ranks": topology.num_ranks,
        "nodes": topology.num_nodes,
        "slots": topology.num_slots,
        "routed_tokens_per_window": float(history.tokens.sum(axis=2).mean()),
        "noise_floor": scenario.noise_floor,
        "past_windows": scenario.past_windows,
        "plan_every": scenario.plan_every,
        "seed": scenario.seed,
        "policies": {replay.policy: _figures(scenario, replay) for replay in replays},
    }


def _figures(scenario: Scenario, replay: Replay) -> dict[str, Any]:
    series = replay.per_window
    all_slots = scenario.history.num_layers * scenario.topology.num_slots
    return {
        "imbalance_mean": float(series.mean()),
        "imbalance_p95": float(np.percentile(series, 95)),
        "imbalance_max_layer": float(replay.imbalance.max()),
        "imbalance_series": [round(value, 6) for value in series.tolist()],
        "rebalances": len(replay.rebalances),
        "kept": replay.num_kept,
        "experts_moved": replay.moves,
        "slots_moved_per_rebalance": (
            replay.moves / len(replay.rebalances) / all_slots if replay.rebalances else 0.0
        ),
        "bytes_by_link": dict(replay.bytes_by_link),
        "rebalance_windows": [rebalance.window for rebalance in replay.rebalances],
        "plan_ms_p50": float(np.median(replay.plan_ms)),
    }


def table(result: dict[str, Any]) -> Table:
    """Lay a summary out for the terminal."""
    title = (
        f"{result['trace']}: {result['windows']} windows, {result['layers']} layers x "
        f"{result['experts']} experts on {result['slots']} slots, {result['ranks']} ranks, "
        f"{result['nodes']} nodes; chance alone makes {result['noise_floor']:.3f}"
    )
    caption = (
        "mean, p95: imbalance over windows; worst: one layer in one window; moved, kept: plans; "
        "experts: moved in all; slots: changed by a plan that moved; ms: median time of a plan"
    )
    grid = Table(
        title=title,
        title_justify="left",
        caption=caption,
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=0,
    )
    grid.add_column("policy", no_wrap=True)
    headings = ("mean", "p95", "worst", "moved", "kept", "experts", "slots", "GB", "ms")
    for heading in headings:
        grid.add_column(heading, justify="right", no_wrap=True)
    for policy, figures in result["policies"].items():
        moved_bytes = sum(figures["bytes_by_link"].values())
        grid.add_row(
            policy,
            f"{figures['imbalance_mean']:.3f}",
            f"{figures['imbalance_p95']:.3f}",
            f"{figures['imbalance_max_layer']:.2f}",
            str(figures["rebalances"]),
            str(figures["kept"]),
            f"{figures['experts_moved']:,}",
            f"{figures['slots_moved_per_rebalance']:.1%}",
            f"{moved_bytes / 1e9:.1f}" if moved_bytes else "-",
            f"{figures['plan_ms_p50']:.1f}",
        )
    return grid


def write_json(path: Path, result: dict[str, Any]) -> None:
    """Write a summary; the file is whole or not there.

    Raises:
        ConfigError: the file cannot be written.
    """
    write_whole(path, json.dumps(result, indent=2) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write a temporary file, then rename it over the target, so that no reader sees a part.

    Raises:
        ConfigError: the file cannot be written.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError as exc:
        beside.unlink(missing_ok=True)
        raise ConfigError(f"{path} cannot be written: {exc.strerror or exc}") from exc
