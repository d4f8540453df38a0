"""What a comparison found: JSON for programs, a table and sentences for the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table

from eplb.measure.noise import sampling_noise
from simulations.shadow.accounts import Account
from simulations.shadow.comparison import WORDS, Comparison, Ours
from simulations.shadow.confidence import gain_of

SCHEMA = "eplb-shadow/1"


@dataclass(frozen=True)
class Prices:
    """What the user states about time and memory; 0: not known."""

    window_seconds: float = 0.0  # serving time of a window
    kv_token_bytes: int = 0  # bytes that a token takes in the KV cache of a rank


def report(comparison: Comparison, prices: Prices, notes: Iterable[str]) -> dict[str, Any]:
    """Give the figures JSON-ready; they are the same for the same windows, seed and options."""
    engine, group = comparison.engine, comparison.group
    found: dict[str, Any] = {
        "schema": SCHEMA,
        "windows": {
            "used": comparison.num_windows,
            "judged": max(comparison.num_windows - 1, 0),
            "skipped": comparison.skips.counts(),
        },
        "notes": list(notes),
    }
    if engine is None:
        return found | {"sentences": ["no window could be used: nothing was compared"]}
    topology, terms = engine.terms.topology, engine.terms
    num_layers, num_experts = comparison.shape
    found |= {
        "layers": num_layers,
        "experts": num_experts,
        "ranks": topology.num_ranks,
        "nodes": topology.num_nodes,
        "dispatch": terms.dispatch.value,
        "seed": terms.seed,
        "routed_tokens_per_window": comparison.tokens_per_window,
        "noise_floor": 1.0 + sampling_noise(comparison.tokens_per_window, topology.num_ranks),
        "engine": {
            "placements": WORDS[comparison.plans],
            "plans": comparison.plans,
            "redundant": topology.num_slots - num_experts,
            **_figures(engine),
        },
        "ours": [_ours(comparison, one, prices) for one in comparison.ours],
    }
    found["engine"]["slots_bytes_per_rank"] = _slot_bytes(engine, num_layers)
    found["policy"] = group.policy
    found["sentences"] = _sentences(found, comparison)
    return found


def _figures(account: Account) -> dict[str, Any]:
    series = account.series
    has = bool(len(series))
    return {
        "imbalance_mean": float(series.mean()) if has else None,
        "imbalance_p95": float(np.percentile(series, 95)) if has else None,
        "imbalance_max_layer": account.worst if has else None,
        "imbalance_series": [round(value, 6) for value in series.tolist()],
        "rebalances": account.rebalances,
        "experts_moved": account.experts_moved,
        "bytes_moved": account.bytes_moved if account.expert_bytes else None,
        "move_seconds": round(account.seconds, 6),
    }


def _ours(comparison: Comparison, one: Ours, prices: Prices) -> dict[str, Any]:
    engine, account = comparison.engine, one.account
    assert engine is not None, "there are windows"
    gain = gain_of(engine.series - account.series, engine.terms.seed)
    less = engine.terms.topology.num_slots - account.terms.topology.num_slots
    slot_bytes = _slot_bytes(account, comparison.shape[0])
    freed = _slot_bytes(engine, comparison.shape[0])
    freed = None if freed is None or slot_bytes is None else freed - slot_bytes
    part = engine.terms.cost.expert_part
    saved = None
    if prices.window_seconds:
        saved = prices.window_seconds * part * gain.mean * gain.num_windows
    return {
        "redundant": one.num_redundant,
        "slots_less_than_engine": less,
        **_figures(account),
        "kept": one.kept,
        "resplits": one.resplits,
        "last_decision": one.last_reason,
        "gain": {
            "mean": gain.mean,
            "low": gain.low,
            "high": gain.high,
            "windows": gain.num_windows,
            "verdict": gain.verdict,
            "sentence": gain.sentence,
        },
        "serving_seconds_saved": saved,
        "net_seconds": None if saved is None else saved - account.seconds + engine.seconds,
        "slots_bytes_per_rank": slot_bytes,
        "kv_bytes_freed_per_rank": freed,
        "kv_tokens_freed_per_rank": (
            freed // prices.kv_token_bytes if freed is not None and prices.kv_token_bytes else None
        ),
    }


def _slot_bytes(account: Account, num_layers: int) -> int | None:
    """Memory of all slots of a rank; None: the bytes of an expert are not known."""
    topology = account.terms.topology
    each = num_layers * topology.num_slots // topology.num_ranks
    return each * account.expert_bytes if account.expert_bytes else None


def _sentences(found: dict[str, Any], comparison: Comparison) -> list[str]:
    lines = [f"engine: {found['engine']['placements']}"]
    lines += [f"{_name(one, found)}: {one['gain']['sentence']}" for one in found["ours"]]
    if comparison.plans == "deepseek":
        lines.append(
            "the replayed algorithm never puts two replicas of an expert on one rank; the "
            "engine's own may, and is then worse than shown"
        )
    return lines


def _name(one: dict[str, Any], found: dict[str, Any]) -> str:
    same = one["redundant"] == found["engine"]["redundant"]
    return "ours, same slots" if same else f"ours, {one['redundant']} redundant"


def table(found: dict[str, Any]) -> Table:
    """Lay a report out for the terminal."""
    windows = found["windows"]
    title = (
        f"{windows['judged']} windows judged of {windows['used']} used, {found['layers']} layers x "
        f"{found['experts']} experts, {found['ranks']} ranks, {found['nodes']} nodes, rule "
        f"{found['dispatch']}; chance alone makes {found['noise_floor']:.3f}"
    )
    caption = (
        "mean, p95: imbalance over windows; worst: one layer in one window; plans: rebalances that "
        "move; experts, GB: to other ranks; s: of moves; net s: serving time won less moves, "
        "against the engine; KV GB: freed on a rank against the engine's slots"
    )
    grid = Table(
        title=title,
        title_justify="left",
        caption=caption,
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=0,
    )
    grid.add_column("placements", no_wrap=True)
    for heading in ("mean", "p95", "worst", "plans", "experts", "GB", "s", "net s", "KV GB"):
        grid.add_column(heading, justify="right", no_wrap=True)
    grid.add_row("engine", *_cells(found["engine"]), "-", "-")
    for one in found["ours"]:
        net, freed = one["net_seconds"], one["kv_bytes_freed_per_rank"]
        grid.add_row(
            _name(one, found),
            *_cells(one),
            "-" if net is None else f"{net:+.1f}",
            "-" if freed is None else f"{freed / 1e9:+.2f}",
        )
    return grid


def _cells(one: dict[str, Any]) -> list[str]:
    figures = ("imbalance_mean", "imbalance_p95", "imbalance_max_layer")
    shown = ["-" if one[name] is None else f"{one[name]:.3f}" for name in figures]
    moved = one["bytes_moved"]
    return [
        *shown,
        str(one["rebalances"]),
        f"{one['experts_moved']:,}",
        "-" if moved is None else f"{moved / 1e9:.1f}",
        f"{one['move_seconds']:.1f}",
    ]


def text_below(found: dict[str, Any]) -> list[str]:
    """The sentences below the table."""
    lines = list(found["sentences"])
    for kind, one in found["windows"]["skipped"].items():
        lines.append(f"skipped: {one['count']} x {kind}; the first: {one['first']}")
    return [*lines, *(f"note: {note}" for note in found["notes"])]
