"""Results of a replay: a table for the terminal, a JSON summary, and limits that fail a build.

A limit, ``imbalance>1.1``, names a figure, optionally of a policy: ``auto.imbalance>1.1``. Without
a policy it is that of the last policy that is no oracle.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.box import SIMPLE_HEAD
from rich.table import Table

from eplb.clock import duration_text
from eplb.errors import ConfigError, counted
from simulations.replay import Replay, Scenario, labelled, noise_floor

Cells = Sequence[str]  # texts of a row
FEWEST_JUDGED = 20  # windows for a 95th percentile
LITTLE, FEW_MOVES = 0.02, 0.5  # imbalance, as the planner's target; part of the winner's moves


def summary(name: str, scenario: Scenario, replays: Sequence[Replay]) -> dict[str, Any]:
    """Give the result JSON-ready; all but the times repeat for the same input and seed."""
    windows, topology = scenario.windows, scenario.topology
    longest = max(replays, key=lambda replay: len(replay.tokens))
    routed = float(longest.tokens.mean()) if len(longest.tokens) else 0.0
    return {
        "trace": name,
        "windows": len(longest.tokens) + 1,
        "windows_skipped": windows.skipped,
        "windows_idle": int(longest.idle.sum()),
        "layers": windows.num_layers,
        "experts": windows.num_experts,
        "ranks": topology.num_ranks,
        "nodes": topology.num_nodes,
        "slots": topology.num_slots,
        "routed_tokens_per_window": routed,
        "noise_floor": noise_floor(scenario, routed),
        "past_windows": scenario.past_windows,
        "plan_every": scenario.plan_every,
        "dispatch": scenario.dispatch.value,
        "seed": scenario.seed,
        "steps_per_window": windows.steps,
        "experts_measured": (
            None if scenario.step_model is None else scenario.step_model.kernel.source
        ),
        "policies": {replay.policy: _figures(scenario, replay) for replay in replays},
    }


def _figures(scenario: Scenario, replay: Replay) -> dict[str, Any]:
    if not len(replay.imbalance):
        return {"oracle": replay.is_oracle, "failed": replay.failed}
    series = replay.per_window[~replay.idle]
    series = series if series.size else np.ones(1)
    all_slots = scenario.windows.num_layers * scenario.topology.num_slots
    return {
        "oracle": replay.is_oracle,
        "failed": replay.failed,
        "objective": replay.objective,
        "imbalance_mean": replay.mean,
        "imbalance_p95": percentile(series, 95),
        "imbalance_p99": percentile(series, 99),
        "imbalance_max_layer": float(replay.imbalance.max()),
        "imbalance_series": [round(value, 6) for value in replay.per_window.tolist()],
        "rebalances": len(replay.rebalances),
        "kept": replay.num_kept,
        "experts_moved": replay.moves,
        "slots_moved_per_rebalance": (
            replay.moves / len(replay.rebalances) / all_slots if replay.rebalances else 0.0
        ),
        "bytes_by_link": dict(replay.bytes_by_link),
        "rebalance_windows": [rebalance.window for rebalance in replay.rebalances],
        "plan_ms_p50": float(np.median(replay.plan_ms)) if replay.plan_ms.size else 0.0,
        **_times(scenario, replay),
    }


def percentile(series: NDArray[np.float64], part: int) -> float | None:
    """Of windows; None: a single window has none."""
    return float(np.percentile(series, part)) if len(series) > 1 else None


def text_of(value: float | None, digits: int = 3) -> str:
    """A figure as tables have it."""
    return "-" if value is None else f"{value:.{digits}f}"


def _times(scenario: Scenario, replay: Replay) -> dict[str, float]:
    """What windows and moves take; nothing without a step model."""
    if scenario.step_model is None:
        return {}
    steps, tokens = scenario.windows.steps, replay.tokens / scenario.step_model.model.top_k
    lost_s = float(sum(rebalance.lost_s for rebalance in replay.rebalances))
    seconds = float(replay.step_us[~replay.idle].sum()) * steps / 1e6 + lost_s
    num_ranks = int(scenario.topology.serving.sum())
    return {
        "step_us_mean": float(replay.step_us[~replay.idle].mean()) if tokens.any() else 0.0,
        "lost_s": lost_s,
        "lost_part": lost_s / seconds if seconds else 0.0,
        "tokens_per_s_per_rank": float(tokens.sum()) / seconds / num_ranks if seconds else 0.0,
    }


def conclusions(result: dict[str, Any]) -> list[str]:
    """What a summary says, in sentences with numbers: each policy against the first one."""
    judged = {name: one for name, one in result["policies"].items() if "imbalance_mean" in one}
    ended = [
        f"{name} failed: {one['failed']}"
        for name, one in result["policies"].items()
        if name not in judged
    ]
    if not judged:
        return ended
    base_name, base = next(iter(judged.items()))
    found = [
        _against(name, one, base_name, base) for name, one in judged.items() if name != base_name
    ]
    best = best_policy(result)
    if best is not None and len(judged) > 1:
        by = "tokens/s" if "tokens_per_s_per_rank" in judged[best] else "mean imbalance"
        found.insert(0, f"best by {by}, oracles aside: {best}{_nearly(best, judged)}")
    found += ended
    count = result["windows"] - 1
    if result["steps_per_window"] == 1 and "step_us_mean" in base:
        found.append(
            f"one step in each window: {counted(count, 'judged window')} of "
            f"{duration_text(count * base['step_us_mean'] / 1e6)} in all, in which moves hardly "
            "pay back; --steps states the forward passes of a window where the load does not"
        )
    if count < FEWEST_JUDGED:
        what = "no p95 or p99" if count == 1 else "p95 and p99 are close to the worst of them"
        found.append(
            f"few windows: {count} judged: {what}; expected {FEWEST_JUDGED} or more "
            "(--window-tokens with fewer tokens, or a longer load)"
        )
    return found


def _nearly(best: str, judged: dict[str, dict[str, Any]]) -> str:
    """A policy that is as good but for a little, with far fewer moves; "": there is none."""
    winner = judged[best]
    if "tokens_per_s_per_rank" in winner:  # what moves take is in it
        return ""
    near = {
        name: one
        for name, one in judged.items()
        if not (one["oracle"] or one["failed"])
        and one["imbalance_mean"] - winner["imbalance_mean"] <= LITTLE
        and one["experts_moved"] <= FEW_MOVES * winner["experts_moved"]
    }
    fewest = min(near, key=lambda name: near[name]["experts_moved"], default=best)
    if fewest == best:
        return ""
    more = near[fewest]["imbalance_mean"] - winner["imbalance_mean"]
    moved = near[fewest]["experts_moved"]
    return (
        f", by {more:.3f} over {fewest}, which moves {counted(moved, 'expert')} in place of "
        f"{winner['experts_moved']:,}; --hardware and --model price moves"
    )


def best_policy(result: dict[str, Any]) -> str | None:
    """The policy, no oracle, with the most tokens a second, else with the lowest imbalance."""
    judged = {
        name: one
        for name, one in result["policies"].items()
        if "imbalance_mean" in one and not one["oracle"] and not one["failed"]
    }

    def order(name: str) -> tuple[float, float]:
        one = judged[name]
        return -one.get("tokens_per_s_per_rank", 0.0), one["imbalance_mean"]

    return min(judged, key=order, default=None)


def _against(name: str, one: dict[str, Any], base_name: str, base: dict[str, Any]) -> str:
    balance = f"imbalance {base['imbalance_mean']:.3f} -> {one['imbalance_mean']:.3f}"
    moved = (
        f"{counted(one['experts_moved'], 'expert')} moved in {counted(one['rebalances'], 'plan')}"
    )
    text = f"{name} against {base_name}: {balance}, {moved}"
    if "tokens_per_s_per_rank" in one:
        gain = one["tokens_per_s_per_rank"] / max(base["tokens_per_s_per_rank"], 1e-12) - 1
        text += (
            f", {gain:+.1%} tokens/s, of which moves took {one['lost_part']:.2%}"
            f" ({one['lost_s']:.1f} s)"
        )
    if one["oracle"]:
        text += "; an oracle: it sees the window that it serves"
    if one["failed"]:
        text += f"; ended early: {one['failed']}"
    return text


def comparison_table(result: dict[str, Any]) -> TextTable:
    """Lay a summary out."""
    title = (
        f"{result['trace']}: {counted(result['windows'], 'window')}, "
        f"{counted(result['layers'], 'layer')} x {result['experts']} experts on {result['slots']} "
        f"slots, {counted(result['ranks'], 'rank')}, {counted(result['nodes'], 'node')}; chance "
        f"alone makes {result['noise_floor']:.3f}"
    )
    caption = (
        "mean, p95: imbalance over windows, the mean by tokens; worst: one layer in one window; "
        "plans: that moved, of "
        "those made; experts: moved in all; ms: median time of a plan; tok/s: of a rank. "
        "An oracle looks at the window that it serves: a limit, not a competitor"
    )
    of_policies = result["policies"].values()
    if any("time" in one.get("objective", "") for one in of_policies):
        caption += ". (time): plans lower the time of steps, not the imbalance of tokens"
    is_timed = any("step_us_mean" in one for one in of_policies)
    headings = ["policy", "mean", "p95", "worst", "plans", "experts", "GB", "ms"]
    headings += ["step us", "tok/s"] if is_timed else []
    rows = [
        (labelled(policy, one.get("objective")), *_cells(one))
        for policy, one in result["policies"].items()
    ]
    return TextTable(headings, rows, title, caption)


def _cells(one: dict[str, Any]) -> Cells:
    if "imbalance_mean" not in one:
        return ["failed"]
    moved_bytes = sum(one["bytes_by_link"].values())
    return [
        f"{one['imbalance_mean']:.3f}",
        text_of(one["imbalance_p95"]),
        f"{one['imbalance_max_layer']:.2f}",
        f"{one['rebalances']}/{one['rebalances'] + one['kept']}",
        f"{one['experts_moved']:,}",
        f"{moved_bytes / 1e9:.1f}" if moved_bytes else "-",
        f"{one['plan_ms_p50']:.1f}",
        *(f"{one[name]:.0f}" for name in ("step_us_mean", "tokens_per_s_per_rank") if name in one),
    ]


MOST_BEFORE = 16  # rows of a table of a page that figures come after


@dataclass(frozen=True)
class TextTable:
    """Rows of text: the first column is of names, on the left, the others of figures."""

    headings: Cells
    rows: Sequence[Cells]
    title: str = ""
    caption: str = ""

    @property
    def is_long(self) -> bool:
        """On a page it comes after the figures."""
        return len(self.rows) > MOST_BEFORE

    def for_terminal(self, num_columns: int | None = None) -> Table:
        """Give its first columns, or all, as a table for the terminal."""
        grid = Table(
            title=self.title or None,
            title_justify="left",
            caption=self.caption or None,
            caption_justify="left",
            box=SIMPLE_HEAD,
            padding=0,
        )
        for number, heading in enumerate(self.headings[:num_columns]):
            grid.add_column(heading, justify="right" if number else "left", no_wrap=True)
        for row in self.rows:
            grid.add_row(*row[:num_columns])
        return grid


FIGURES = {
    "imbalance": "imbalance_mean",
    "p95": "imbalance_p95",
    "p99": "imbalance_p99",
    "worst": "imbalance_max_layer",
    "rebalances": "rebalances",
    "experts": "experts_moved",
    "tokens_per_s": "tokens_per_s_per_rank",
}
COMPARED: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}
LIMIT = re.compile(r"(?:(?P<policy>[\w:-]+)\.)?(?P<figure>\w+)\s*(?P<sign>[<>]=?)\s*(?P<value>\S+)")


@dataclass(frozen=True)
class Limit:
    """A figure that fails the comparison where the sign holds."""

    text: str
    policy: str | None
    figure: str
    sign: str
    value: float

    def broken_by(self, result: dict[str, Any]) -> str | None:
        """A sentence where a summary breaks the limit; None where it keeps it.

        Raises:
            ConfigError: the summary has no such policy or figure.
        """
        policies: dict[str, dict[str, Any]] = result["policies"]
        compared = [name for name, figures in policies.items() if not figures["oracle"]]
        policy = self.policy or (compared[-1] if compared else next(reversed(policies)))
        if policy not in policies:
            raise ConfigError(
                f"--fail-if {self.text!r}: no policy {policy!r}, expected one of: "
                f"{', '.join(policies)}"
            )
        figures = policies[policy]
        if figures["failed"]:
            return f"{policy} failed: {figures['failed']}"
        found = figures.get(FIGURES[self.figure])
        if found is None:
            raise ConfigError(
                f"--fail-if {self.text!r}: {self.figure} is not known, expected --hardware or "
                "--expert-times, and --model; for p95 and p99 two judged windows"
            )
        if COMPARED[self.sign](found, self.value):
            return f"{policy}: {self.figure} is {found:.6g}, the limit fails at {self.text}"
        return None


def limit_of(text: str) -> Limit:
    """Read a limit.

    Raises:
        ConfigError: another form, or an unknown figure.
    """
    match = LIMIT.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"--fail-if is {text!r}, expected a form like 'imbalance>1.1'")
    if match["figure"] not in FIGURES:
        raise ConfigError(
            f"--fail-if {text!r}: unknown figure {match['figure']!r}, expected one of: "
            f"{', '.join(FIGURES)}"
        )
    try:
        value = float(match["value"])
    except ValueError:
        value = float("nan")
    if not isfinite(value):
        raise ConfigError(f"--fail-if {text!r}: {match['value']!r} is no number, expected one")
    return Limit(text.strip(), match["policy"], match["figure"], match["sign"], value)
