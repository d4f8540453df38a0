"""What a comparison found: JSON for programs, a table and sentences for the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from eplb.core.cost import NOMINAL_BYTES
from eplb.core.load import sampling_noise
from eplb.errors import counted
from simulations.differences import Difference, difference_of
from simulations.report import TextTable, percentile, text_of
from simulations.shadow.comparison import Account, Comparison, EngineSide, Variant
from simulations.windows import mean_by_tokens

SCHEMA = "eplb-shadow/1"
UNTOLD = ("no difference", "too few windows")
UNITS = {  # units of the differences below that of imbalance
    "bytes": "bytes moved less in a window",
    "move_seconds": "seconds of moves less in a window",
    "net_seconds": "seconds won in a window, moves paid",
}
LEAST_IMBALANCE, LEAST_BYTES, LEAST_SECONDS = 1e-4, 1.0, 1e-6  # smaller differences are none
WORDS = {
    "maps": "its own maps",
    "deepseek": "its algorithm replayed (DeepSeek's EPLB)",
    "none": "its first map, never rebalanced",
}


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
    terms = engine.account.terms
    topology = terms.topology
    num_layers, num_experts = comparison.shape
    found |= {
        "layers": num_layers,
        "experts": num_experts,
        "ranks": topology.num_ranks,
        "nodes": topology.num_nodes,
        "dispatch": terms.dispatch.value,
        "policy": group.policy,
        "seed": terms.seed,
        "routed_tokens_per_window": comparison.tokens_per_window,
        "noise_floor": 1.0 + sampling_noise(comparison.tokens_per_window, topology.num_ranks),
        "engine": {
            "placements": WORDS[engine.plans],
            "plans": engine.plans,
            "has_map": engine.has_map,
            "redundant": engine.redundant,
            **_figures(engine.account),
            "failed": engine.failed,
            "slots_bytes_per_rank": _slot_bytes(engine.account, num_layers),
        },
        "ours": [_ours(comparison, engine, one, prices) for one in comparison.ours],
    }
    assert comparison.judge is not None, "begun with the first window"
    verdict = comparison.judge.verdict
    found["verdict"] = verdict.to_dict()
    found["sentences"] = [*_sentences(found, comparison), f"verdict: {verdict.sentence}"]
    return found


def _figures(account: Account) -> dict[str, Any]:
    series, moved = account.imbalance, int(account.received.sum())
    has = bool(len(series))
    return {
        "imbalance_mean": mean_by_tokens(series, account.tokens) if has else None,
        "imbalance_p95": percentile(series, 95),
        "imbalance_max_layer": account.worst if has else None,
        "imbalance_series": [round(value, 6) for value in series.tolist()],
        "rebalances": account.rebalances,
        "experts_moved": moved,
        "bytes_moved": moved * account.expert_bytes if account.expert_bytes else None,
        "move_seconds": round(float(account.seconds.sum()), 6),
    }


def _ours(
    comparison: Comparison, engine: EngineSide, one: Variant, prices: Prices
) -> dict[str, Any]:
    theirs, account, num_layers = engine.account, one.account, comparison.shape[0]
    differences = _differences(theirs, account, prices)
    slots, others = (_slot_bytes(each, num_layers) for each in (account, theirs))
    freed = others - slots if others is not None and slots is not None else None
    net = differences.get("net_seconds")
    return {
        "redundant": one.num_redundant,
        "slots_less_than_engine": engine.redundant - one.num_redundant,
        **_figures(account),
        "kept": one.kept,
        "resplits": one.resplits,
        "failed": one.failed,
        "last_decision": one.last_reason,
        # Per window, the engine's less ours: above 0 is a gain.
        "gain": {name: each.to_dict() for name, each in differences.items()},
        "net_seconds": None if net is None else net.mean * net.num_windows,
        "slots_bytes_per_rank": slots,
        # By the numbers of slots alone: the same in every window, so there is no interval.
        "kv_bytes_freed_per_rank": freed,
        "kv_tokens_freed_per_rank": (
            freed // prices.kv_token_bytes if freed is not None and prices.kv_token_bytes else None
        ),
    }


def _differences(theirs: Account, ours: Account, prices: Prices) -> dict[str, Difference]:
    """What is judged over windows, each with its interval; what is not known is left out."""
    seed, cost = theirs.terms.seed, theirs.terms.cost
    # A window's imbalance costs time in proportion to its tokens; the mean of these is by tokens.
    part = ours.tokens / max(float(ours.tokens.mean()), 1e-300) if len(ours.tokens) else 1.0
    gain = (theirs.imbalance - ours.imbalance) * part
    seconds = theirs.seconds - ours.seconds
    found = {
        "imbalance": difference_of(gain, seed, least=LEAST_IMBALANCE),
        "move_seconds": difference_of(seconds, seed, least=LEAST_SECONDS),
    }
    if each := ours.expert_bytes:
        less = (theirs.received - ours.received) * each
        found["bytes"] = difference_of(less, seed, least=LEAST_BYTES)
    if prices.window_seconds:
        net = prices.window_seconds * cost.expert_part * gain + seconds
        found["net_seconds"] = difference_of(net, seed, least=LEAST_SECONDS)
    return found


def _slot_bytes(account: Account, num_layers: int) -> int | None:
    """Memory of all slots of the rank with most; None: the bytes of an expert are not known."""
    each = num_layers * int(account.terms.topology.slots_of_rank.max())
    return each * account.expert_bytes if account.expert_bytes else None


def _sentences(found: dict[str, Any], comparison: Comparison) -> list[str]:
    engine = found["engine"]
    lines = [f"engine: {engine['placements']}"]
    if not engine["has_map"]:
        start = "--current" if comparison.group.current is not None else "experts in order"
        lines.append(f"the source has no maps: the engine begins with {start}")
    for one in found["ours"]:
        gains = one["gain"]
        lines.append(f"{_name(one, found)}: {gains['imbalance']['sentence']}")
        for name, what in UNITS.items():
            if name in gains and gains[name]["verdict"] not in UNTOLD:
                lines.append(f"{_name(one, found)}, {what}: {gains[name]['sentence']}")
        if one["failed"]:
            after = counted(one["failed"], "window")
            lines.append(f"{_name(one, found)}: no plan after {after}; the placement stayed")
    if engine["failed"]:
        lines.append(
            f"the engine's algorithm has no plan after {counted(engine['failed'], 'window')}"
        )
    if engine["plans"] == "deepseek":
        lines.append(
            "the replayed algorithm never puts two replicas of an expert on one rank; the "
            "engine's own may, and is then worse than shown"
        )
    if not comparison.ours[0].account.expert_bytes:
        lines.append(
            "bytes of an expert are not known (--model, --expert-bytes): seconds are those of "
            f"{NOMINAL_BYTES / 1e6:.1f} MB"
        )
    return lines


def _name(one: dict[str, Any], found: dict[str, Any]) -> str:
    same = one["redundant"] == found["engine"]["redundant"]
    return "ours, same slots" if same else f"ours, {one['redundant']} redundant"


def table(found: dict[str, Any]) -> TextTable:
    """Lay a report out."""
    windows = found["windows"]
    title = (
        f"{counted(windows['judged'], 'window')} judged of {windows['used']} used, "
        f"{counted(found['layers'], 'layer')} x {found['experts']} experts, "
        f"{counted(found['ranks'], 'rank')}, {counted(found['nodes'], 'node')}, rule "
        f"{found['dispatch']}; chance alone makes {found['noise_floor']:.3f}"
    )
    caption = (
        "mean, p95: imbalance over windows, the mean by tokens; worst: one layer in one window; "
        "plans: rebalances that move; experts, GB: to other ranks; s: of moves; net s: serving "
        "time won less moves, against the engine; KV GB: freed on a rank against the engine's slots"
    )
    headings = ["placements", "mean", "p95", "worst", "plans", "experts"]
    headings += ["GB", "s", "net s", "KV GB"]
    rows = [["engine", *_cells(found["engine"]), "-", "-"]]
    for one in found["ours"]:
        net, freed = one["net_seconds"], one["kv_bytes_freed_per_rank"]
        won = "-" if net is None else f"{net:+.1f}"
        memory = "-" if freed is None else f"{freed / 1e9:+.2f}"
        rows.append([_name(one, found), *_cells(one), won, memory])
    return TextTable(headings, rows, title, caption)


def _cells(one: dict[str, Any]) -> list[str]:
    figures = ("imbalance_mean", "imbalance_p95", "imbalance_max_layer")
    shown = [text_of(one[name]) for name in figures]
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
    *lines, last = found["sentences"]  # what is to be done stands at the end
    for kind, one in found["windows"]["skipped"].items():
        lines.append(f"skipped: {one['count']} x {kind}; the first: {one['first']}")
    return [*lines, *(f"note: {note}" for note in found["notes"]), last]
