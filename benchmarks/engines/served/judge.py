"""Judge the answers of runs, and what their workers measured; write the table.

An answer is compared with that of the reference run, which has no EPLB, token by token: its
*difference* is the root of the mean square of the differences of its tokens' log-probabilities. A
*group* is what all ranks serve at once, with one difference over all of its tokens. The bounds of a
reference come from runs without EPLB whose batches, and whose number of ranks, differ from its own:
the largest difference of an answer and of a group, with some slack. A single answer of the 16-bit
formats may differ much because the router's choice was close; a slot that is wrong changes some
tokens of every group.

Shapes:  N steps, L layers, P slots.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from benchmarks.engines.served.run import Run

OF_ANSWER, OF_GROUP = 2.0, 1.25  # slack over what runs without EPLB differ by
LATE_S = 1e-3
Floats = NDArray[np.float64]


def answers_of(run: Run, out: Path) -> tuple[NDArray[np.int64], Floats]:
    """[G, n] numbers and [G, n, tokens] log-probabilities, by group of all ranks."""
    numbers, logs = [], []
    for rank in range(run.ranks):
        with np.load(out / run.name / f"answers.{rank}.npz") as file:
            each = len(file["numbers"]) // run.sequences * run.sequences
            numbers.append(file["numbers"][:each].reshape(-1, run.sequences))
            logs.append(file["logs"][:each].reshape(-1, run.sequences, file["logs"].shape[-1]))
    groups = min(len(of_rank) for of_rank in numbers)
    return (
        np.concatenate([of_rank[:groups] for of_rank in numbers], axis=1),
        np.concatenate([of_rank[:groups] for of_rank in logs], axis=1).astype(np.float64),
    )


def differences(numbers: NDArray[np.int64], logs: Floats, reference: Floats) -> Floats:
    """[G, n] difference of each answer to that of the reference, which has them by number."""
    return root_mean_square(logs - reference[numbers])


def root_mean_square(values: Floats) -> Floats:
    """Over the last axis; values that are nan are left out."""
    root: Floats = np.sqrt(np.nanmean(values**2, axis=-1))
    return root


def reference_of(run: Run, out: Path) -> Floats:
    """[prompts, tokens] log-probabilities of a reference, by number; nan: not served."""
    numbers, logs = answers_of(run, out)
    table = np.full((run.load.num_prompts, logs.shape[-1]), np.nan)
    table[numbers.reshape(-1)] = logs.reshape(-1, logs.shape[-1])
    return table


def bound_of(reference: Run, runs: Sequence[Run], out: Path) -> tuple[float, float]:
    """The bounds of an answer and of a group; nan without a run to take them from."""
    table, answer, group = reference_of(reference, out), np.nan, np.nan
    for run in runs:
        if run.mode == "none" and run.reference == reference.name and outcome_of(run, out) == "":
            apart = differences(*answers_of(run, out), table)
            answer = np.nanmax([answer, np.nanmax(apart)])
            group = np.nanmax([group, np.nanmax(root_mean_square(apart))])
    return OF_ANSWER * float(answer), OF_GROUP * float(group)


def outcome_of(run: Run, out: Path) -> str:
    """What went wrong in a run, or ""."""
    path = out / run.name / "outcome"
    return path.read_text() if path.exists() else "not run"


def steps_of(run: Run, out: Path) -> dict[str, Any]:
    """What the workers measured, together: rows that all ranks sent, and figures of each rank."""
    files = [
        dict(np.load(out / run.name / f"steps.{rank}.npz", allow_pickle=False))
        for rank in range(run.ranks)
    ]
    steps = min(len(file["began"]) for file in files)
    return {
        "rows": sum(file["rows"][:steps].astype(np.int64) for file in files),
        "maps": files[0]["maps"][:steps],
        "rebalance": files[0]["rebalance"][:steps],
        "began": np.stack([file["began"][:steps] for file in files]),
        "took": np.stack([file["ended"][:steps] - file["began"][:steps] for file in files]),
        "plugin": np.stack([file["plugin"][:steps] for file in files]),
        "peak_bytes": max(int(file["peak_bytes"]) for file in files),
    }


def rank_rows(rows: NDArray[np.int64], num_slots: int, ranks: int) -> NDArray[np.int64]:
    """[N, L, ranks] rows of each rank's slots."""
    steps, layers = rows.shape[:2]
    by_rank: NDArray[np.int64] = rows[..., :num_slots].reshape(steps, layers, ranks, -1).sum(-1)
    return by_rank


def measured_row(run: Run, out: Path) -> dict[str, Any]:
    """What the steps of a run say."""
    from benchmarks.engines.served.model import SIZES

    steps = steps_of(run, out)
    num_slots = SIZES[run.size].experts + (run.redundant if run.mode != "none" else 0)
    by_rank = rank_rows(steps["rows"], num_slots, run.ranks)
    served = by_rank.sum(axis=2) > 0
    busiest, mean = by_rank.max(axis=2)[served], by_rank.mean(axis=2)[served]
    took, plugin, maps = steps["took"], steps["plugin"], steps["maps"]
    row: dict[str, Any] = {
        "steps": int(took.shape[1]),
        "imbalance": float(busiest.sum() / max(mean.sum(), 1)),
        "busiest_rows": int(busiest.sum()),
        "step_ms": quantiles(1e3 * np.diff(steps["began"], axis=1)),
        "eplb_ms": quantiles(1e3 * took),
        "waited": float((took > LATE_S).mean()),
        "peak_mib": steps["peak_bytes"] >> 20,
    }
    if len(maps) > 1:
        changed = (maps[1:] != maps[:-1]).reshape(len(maps) - 1, -1).sum(axis=1)
        moving = np.flatnonzero(changed)
        row["moves"] = int(changed.sum())
        row["maps"] = len(set(steps["rebalance"][1:][changed > 0].tolist()))
        if moving.size:
            first = steps["began"][0]
            row["first_map_step"] = int(moving[0] + 1)
            row["first_map_s"] = float(first[moving[0] + 1] - first[0])
    if run.mode == "plugin":
        row["errors"] = logged_errors(run, out)
        row["plugin_ms"] = quantiles(1e3 * plugin)
        row["plugin_late"] = float((plugin > LATE_S).mean())
    return row


def speed_row(run: Run, out: Path, turn_s: Sequence[float]) -> dict[str, Any]:
    """Tokens in a second of serving, and times of answers over all ranks."""
    times = []
    for rank in range(run.ranks):
        with np.load(out / run.name / f"answers.{rank}.npz") as file:
            times.append(file["times"])
    first, each = 1e3 * np.concatenate(times).T
    load = run.load
    tokens = load.per_round * (load.prompt_tokens + load.answer_tokens)
    return {
        "tokens_s": [round(tokens / second) for second in np.quantile(turn_s, (0.5, 0.75, 0.25))],
        "tokens_s_mean": tokens * len(turn_s) / sum(turn_s),
        "ttft_ms": quantiles(first),
        "tpot_ms": quantiles(each),
    }


def logged_errors(run: Run, out: Path) -> int:
    """Lines of the plug-in's log, of all ranks, that are errors."""
    logs = [(out / run.name / f"log.{rank}") for rank in range(run.ranks)]
    texts = [log.read_text(errors="replace") for log in logs if log.exists()]
    return sum(text.count("EPLB ERROR") for text in texts)


def quantiles(values: Floats) -> list[float]:
    """Median, 99 % and largest."""
    if not values.size:
        return [0.0, 0.0, 0.0]
    return [round(float(value), 6) for value in np.quantile(values, (0.5, 0.99, 1.0))]


def judge_run(run: Run, runs: Sequence[Run], out: Path) -> dict[str, Any]:
    """One row of the table."""
    row: dict[str, Any] = {"run": run.name, "mode": run.mode, "outcome": outcome_of(run, out)}
    row["is_expected"] = not row["outcome"]
    if row["outcome"]:
        return row
    ranks = [
        json.loads((out / run.name / f"rank.{rank}.json").read_text()) for rank in range(run.ranks)
    ]
    row |= {"loaded_s": ranks[0]["loaded_s"], "served_s": ranks[0]["served_s"]}
    row |= measured_row(run, out) | speed_row(run, out, ranks[0]["turn_s"])
    times = out / "experts_time.json"
    if times.exists() and (timed := json.loads(times.read_text()).get(run.name)):
        keys = ("busiest_ms", "busiest_ms_least", "busiest_ms_most", "mean_rank_ms")
        row |= {"kernel_ms": [timed[key] for key in keys], "kernel_tokens": timed["tokens"]}
    by_name = {each.name: each for each in runs}
    numbers, logs = answers_of(run, out)
    row["answers"] = int(numbers.size)
    reference = by_name.get(run.reference or run.name)
    if reference is None or outcome_of(reference, out):
        row["is_expected"] = False  # not judged
        return row
    table, bounds = reference_of(reference, out), bound_of(reference, runs, out)
    if run.reference:
        apart = differences(numbers, logs, table)
        groups = root_mean_square(apart)
        over = (apart > bounds[0]).sum()
        row |= {
            "difference": quantiles(apart[np.isfinite(apart)]),
            "of_group": quantiles(groups[np.isfinite(groups)]),
            "bounds": list(bounds),
            "compared": int(np.isfinite(apart).sum()),
            "wrong": int(over),
            "wrong_groups": int((groups > bounds[1]).sum()),
            "wrong_rounds": np.flatnonzero((apart > bounds[0]).any(1) | (groups > bounds[1]))[:9],
        }
        row["wrong_rounds"] = row["wrong_rounds"].tolist()
        is_right = np.isfinite(bounds[0]) and not over and not row["wrong_groups"]
        if run.mode != "none" and not is_right:
            row["is_expected"] = False
        if run.changes and row.get("maps", 0) < run.changes:
            row["is_expected"] = False
    if run.faults:
        row |= judge_faults(ranks, table, bounds[1])
        row["is_expected"] &= row["faults_found"] == run.faults and row["control"] <= bounds[1]
    return row


def judge_faults(ranks: Sequence[dict[str, Any]], table: Floats, bound: float) -> dict[str, Any]:
    """How many of the planted faults the answers show; the probe without one is the control."""
    means = []
    for each in zip(*(rank["planted"] for rank in ranks), strict=True):
        apart = [
            differences(np.array(probe["numbers"]), np.array(probe["logs"]), table)
            for probe in each
        ]
        means.append(float(root_mean_square(np.concatenate(apart))))
    control, planted = means[0], means[1:]
    return {
        "faults": len(planted),
        "faults_found": sum(mean > bound for mean in planted),
        "least_fault": min(planted),
        "control": control,
        "fault_bound": bound,
    }


def judge_runs(runs: Sequence[Run], out: Path) -> list[dict[str, Any]]:
    """The rows of all runs."""
    return [judge_run(run, runs, out) for run in runs]


COLUMNS = (
    ("run", "run"),
    ("answers", "answers"),
    ("compared", "compared"),
    ("wrong", "wrong"),
    ("wrong_groups", "wrong groups"),
    ("wrong_rounds", "their rounds, the first 9"),
    ("difference", "difference p50, p99, max"),
    ("bounds", "bounds of answer, group"),
    ("maps", "maps"),
    ("moves", "moves"),
    ("imbalance", "imbalance"),
    ("busiest_rows", "rows of the busiest rank"),
    ("kernel_ms", "experts' ms: busiest rank, least, most; mean rank"),
    ("kernel_tokens", "tokens of these steps"),
    ("tokens_s_mean", "tokens/s, mean"),
    ("tokens_s", "tokens/s of a round p50, p25, p75"),
    ("ttft_ms", "ms to the first token p50, p99, max"),
    ("tpot_ms", "ms of each further token p50, p99, max"),
    ("steps", "steps"),
    ("step_ms", "step ms p50, p99, max"),
    ("eplb_ms", "EPLB's ms in a step"),
    ("waited", "steps over 1 ms of it"),
    ("plugin_ms", "plug-in's ms in a step"),
    ("plugin_late", "steps over 1 ms of it"),
    ("errors", "errors that it logged"),
    ("first_map_step", "first map, step"),
    ("first_map_s", "s"),
    ("faults_found", "faults found"),
    ("peak_mib", "peak MiB of a rank"),
    ("loaded_s", "loaded s"),
    ("served_s", "served s"),
    ("outcome", "outcome"),
)


def cell(value: Any) -> str:
    """A value as the table shows it."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(cell(part) for part in value)
    return "" if value is None else str(value)


def write_table(rows: Sequence[dict[str, Any]], out: Path, options: dict[str, Any]) -> None:
    """Write ``served.json`` and ``served.md``."""
    content = {"options": {name: str(value) for name, value in options.items()}, "rows": rows}
    (out / "served.json").write_text(json.dumps(content, indent=1))
    lines = []
    for key, title in COLUMNS:
        if any(key in row for row in rows):
            cells = " | ".join(cell(row.get(key)) for row in rows)
            lines.append(f"| {title} | {cells} |")
            if key == "run":
                lines.append("|---" * (len(rows) + 1) + "|")
    (out / "served.md").write_text("\n".join(lines) + "\n")
