"""The summary of a demo: as a dictionary and as a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import mean, median
from string import Formatter
from typing import Any

import numpy as np
from rich.console import Group
from rich.panel import Panel
from rich.table import Table

from api.demo.checking import CheckedStep
from api.demo.engine import EngineFile
from api.deploy.deployment import Deployment
from api.monitor.state import Reading, WindowScore

FINAL_WINDOWS = 5

p50, p99 = partial(np.percentile, q=50), partial(np.percentile, q=99)
RankReport = Mapping[str, Any]  # what a rank of api.demo.engine writes at its end


def summarise(
    deployment: Deployment,
    engine: EngineFile,
    run: str,
    seen: Reading,
    ranks: Sequence[RankReport],
    stored: Mapping[int, int] | None,
    checks: Sequence[CheckedStep],
) -> dict[str, Any]:
    """Put the figures of a run together, JSON-ready.

    ``imbalance_final`` is the median over the last windows after the last commit, by the tokens
    that ranks received; ``imbalance_initial`` is that of the same windows under the contiguous
    placement. ``imbalance_run`` and ``imbalance_run_contiguous`` are the means of both over every
    complete window, those before the first commit included. ``stored`` is None where the store
    could not be read.
    """
    final, complete = final_windows(seen), complete_windows(seen)
    pauses = [pause for rank in ranks for pause in rank["swap_pauses_ms"]]
    steps = [ms for rank in ranks for ms in rank["step_ms"]]
    sources = sorted({source for rank in ranks for source in rank["bytes_by_source"]})
    precision = engine.checks.precision
    failures = [check for check in checks if not check.is_right(precision)]
    turns = [mark for mark in seen.marks if mark.plan_id]
    model, topology = deployment.model, deployment.topology
    tokens_per_step = engine.load.tokens_per_rank * topology.num_ranks
    window_steps = deployment.settings.telemetry.window_steps
    cut = sum(rank["samples"] for rank in ranks)
    written = None if stored is None else sum(stored.values())
    means = [mean(rank["step_ms"]) for rank in ranks if rank["step_ms"]]
    return {
        "run": run,
        "ranks": topology.num_ranks,
        "nodes": topology.num_nodes,
        "layers": model.num_layers,
        "experts": model.num_experts,
        "slots": topology.num_slots,
        "top_k": model.top_k,
        "expert_bytes": deployment.schema.record_bytes,
        "device": deployment.settings.topology.device,
        "precision": precision,
        "dispatcher": ranks[0]["dispatcher"] if ranks else None,
        "policy": deployment.settings.controller.policy,
        "seed": engine.load.seed,
        "steps": max((rank["steps"] for rank in ranks), default=0),
        "tokens_per_window": window_steps * tokens_per_step,
        "imbalance_initial": _figure(median, [score.contiguous for score in final]),
        "imbalance_final": _figure(median, [score.measured for score in final]),
        "imbalance_run": _figure(mean, [score.measured for score in complete]),
        "imbalance_run_contiguous": _figure(mean, [score.contiguous for score in complete]),
        "imbalance_series": [
            {
                "window": score.index,
                "last_step": score.last_step,
                "measured": _figure(mean, [score.measured]),
                "contiguous": _figure(mean, [score.contiguous]),
                "generation": score.generation,
                "is_migrating": score.is_migrating,
            }
            for score in complete
        ],
        "rebalances": len(turns),
        "rebalance_steps": [mark.step for mark in turns],
        "experts_moved": sum(rank["experts_moved"] for rank in ranks),
        "bytes_by_source": {
            source: sum(rank["bytes_by_source"].get(source, 0) for rank in ranks)
            for source in sources
        },
        "swap_pause_ms_p50": _figure(p50, pauses),
        "swap_pause_ms_p99": _figure(p99, pauses),
        "step_ms_p50": _figure(p50, steps),
        "step_ms_p99": _figure(p99, steps),
        "reference_checks": len(checks),
        "reference_checks_by_phase": {
            phase: sum(check.phase == phase for check in checks)
            for phase in sorted({check.phase for check in checks})
        },
        "reference_max_error": max((check.max_error for check in checks), default=None),
        "reference_failures": len(failures),
        "reference_checks_dropped": sum(rank["checks_dropped"] for rank in ranks),
        "samples_written": written,
        "samples_lost": cut - written if ranks and written is not None else None,
        # A step takes as long as its slowest rank.
        "tokens_per_second": _figure(lambda ms: tokens_per_step / max(ms) * 1e3, means, 1),
    }


def complete_windows(seen: Reading) -> list[WindowScore]:
    """Return the windows that every rank reported."""
    return [score for score in seen.series if score.is_complete]


def final_windows(seen: Reading) -> list[WindowScore]:
    """Return the last complete windows that lie wholly after the last commit.

    Without any such window, the last ones there are.
    """
    complete = complete_windows(seen)
    last = seen.marks[-1].step if seen.marks else None
    settled = [score for score in complete if last is not None and score.first_step >= last]
    return (settled or complete)[-FINAL_WINDOWS:]


def render_summary(summary: Mapping[str, Any]) -> Group:
    """Give the summary as a table for a terminal."""
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right", style="dim", no_wrap=True)
    table.add_column()
    for name, text in _lines(summary):
        table.add_row(name, text)
    is_good = summary["reference_failures"] == 0 and summary["samples_lost"] == 0
    style = "green" if is_good else "red"
    title = _verdict(summary) if is_good else "something went wrong"
    return Group(Panel(table, title=f"eplb demo: {title}", border_style=style, expand=False))


def _verdict(summary: Mapping[str, Any]) -> str:
    """The title of the summary; it names only what was checked."""
    claims = ["rebalanced"] * bool(summary["rebalances"])
    claims += ["every answer right"] * bool(summary["reference_checks"])
    return ", and ".join(claims) or "nothing was checked"


def _lines(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    sources = ", ".join(
        f"{source.replace('_', ' ')} {count / 1e6:.1f} MB"
        for source, count in summary["bytes_by_source"].items()
        if count
    )
    phases = ", ".join(
        f"{phase} {count}" for phase, count in summary["reference_checks_by_phase"].items()
    )
    right = summary["reference_checks"] - summary["reference_failures"]
    lines = {
        "model": "{layers} MoE layers x {experts} experts, top-{top_k}, {slots} slots on {ranks} "
        "ranks",
        "served": "{steps} steps, {tokens_per_second:,.0f} tokens/s",
        "imbalance": "{imbalance_final:.3f} max/mean rank load in the last windows; "
        "{imbalance_initial:.3f} without balancing",
        "whole run": "{imbalance_run:.3f} mean of all windows; {imbalance_run_contiguous:.3f} "
        "without balancing",
        "rebalances": "{rebalances}, {experts_moved} experts moved",
        "bytes": sources or "none",
        "pause of a swap": "p50 {swap_pause_ms_p50:.2f} ms, p99 {swap_pause_ms_p99:.2f} ms; "
        "step p50 {step_ms_p50:.1f} ms",
        "right answers": f"{right} of {{reference_checks}} checks ({phases}); "
        "largest error {reference_max_error:.1e}",
        "samples": "{samples_written} written, {samples_lost} lost",
    }
    if summary.get("deaths"):
        lines["deaths"] = (
            "{deaths} of ranks; {unserved_s:.1f} s without tokens, from the last token to the next "
            "(steps and samples: since then)"
        )
    form = _KnownFigures()
    return [(name, form.vformat(text, (), summary)) for name, text in lines.items()]


class _KnownFigures(Formatter):
    """Formats a figure that is not known as a dash."""

    def format_field(self, value: Any, format_spec: str) -> str:
        return "-" if value is None else str(format(value, format_spec))


def _figure(
    of: Callable[[list[float]], float], values: Sequence[float | None], digits: int = 4
) -> float | None:
    """Give a figure of the known values; None where none is known."""
    known = [value for value in values if value is not None]
    return round(float(of(known)), digits) if known else None
