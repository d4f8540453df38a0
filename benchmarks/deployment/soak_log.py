"""The log of a soak: JSON lines, which several runs of one commit may continue; and its table.

A line has the commit, the part (a run of the script), the seconds since the part began, one entry
for each rank and one for each process.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.result_table import Row

Line = Mapping[str, Any]
MAX_RISE_KIB, MAX_RISE_SHARE = 1024, 0.01  # of a process, between two quarters of the longest part
MAX_RISE = 2  # open files, threads: connections that are open at a time come and go
COUNTS = ("wrong_layer_outputs", "wrong_logits", "layer_outputs", "logits", "other_choices")


def read_log(path: Path, commit: str) -> list[Line]:
    """Read the lines of a commit; a line that a killed run left unfinished ends the list."""
    lines: list[Line] = []
    if path.exists():
        for text in path.read_text().splitlines():
            try:
                line = json.loads(text)
            except ValueError:
                break
            if line["commit"] == commit:
                lines.append(line)
    return lines


def served_seconds(lines: Iterable[Line]) -> float:
    """How long all parts served together."""
    return float(sum(part[-1]["elapsed_s"] for part in parts_of(lines)))


def parts_of(lines: Iterable[Line]) -> list[list[Line]]:
    """Lines by part, in their order."""
    found: dict[int, list[Line]] = defaultdict(list)
    for line in lines:
        found[line["part"]].append(line)
    return [found[part] for part in sorted(found)]


def judge(lines: Sequence[Line]) -> tuple[list[Row], list[str]]:
    """Make the table, and name what is wrong."""
    parts = parts_of(lines)
    wrong = [text for line in lines for text in line["problems"]]
    ends = [part[-1] for part in parts]
    total = {name: _total(ends, name) for name in COUNTS}
    num_wrong = total["wrong_layer_outputs"] + total["wrong_logits"]
    worst = max(rank["worst_error"] for end in ends for rank in end["ranks"].values())
    if num_wrong:
        first = [rank["first_wrong"] for end in ends for rank in end["ranks"].values()]
        wrong.append(f"{num_wrong} wrong outputs: {[one for one in first if one]}")
    steps, moving = (_total(ends, name) // 4 for name in ("steps", "while_moving"))
    rebalances = sum(min(r["rebalances"] for r in end["ranks"].values()) for end in ends)
    if not rebalances:
        wrong.append("no rebalance")
    rows: list[Row] = [
        ("served", f"{served_seconds(lines):.0f} s in {len(parts)} parts, {steps} steps", "3600 s"),
        ("rebalances", f"{rebalances}, a step of {moving / max(steps, 1):.0%} under one", "-"),
        ("experts moved", f"{_total(ends, 'experts_moved')}", "-"),
        ("wrong layer outputs", f"{total['wrong_layer_outputs']} of {total['layer_outputs']}", "0"),
        ("wrong logits", f"{total['wrong_logits']} of {total['logits']} sequences", "0"),
        ("  a router chose otherwise", f"{total['other_choices']} sequences", "-"),
        ("largest error, relative", f"{worst:.1e}", "-"),
        ("processor time of all", f"{_cpu_share(parts):.2f} cores", "-"),
    ]
    longest = max(parts, key=lambda part: float(part[-1]["elapsed_s"]))
    for name in sorted(longest[-1]["processes"]):
        row, problems = _flatness(name, longest)
        rows.append(row)
        wrong += problems
    return rows, list(dict.fromkeys(wrong))


def _total(ends: Iterable[Line], name: str) -> int:
    return sum(int(rank[name]) for end in ends for rank in end["ranks"].values())


def _cpu_share(parts: Iterable[Sequence[Line]]) -> float:
    """Cores that all processes took together after their start."""
    cpu = seconds = 0.0
    for part in parts:
        first, last = part[0], part[-1]
        seconds += last["elapsed_s"] - first["elapsed_s"]
        for name, one in last["processes"].items():
            cpu += one["cpu_s"] - first["processes"].get(name, one)["cpu_s"]
    return cpu / max(seconds, 1.0)


def _flatness(name: str, part: Sequence[Line]) -> tuple[Row, list[str]]:
    """Medians of the second and of the last quarter of one process."""
    found = [line["processes"][name] for line in part if name in line["processes"]]
    quarter = max(1, len(found) // 4)
    early, late = found[quarter : 2 * quarter] or found, found[-quarter:]
    problems, words = [], []
    for field, unit in (("own_kib", "KiB"), ("open_files", "files"), ("threads", "threads")):
        before, after = (median(one[field] for one in some) for some in (early, late))
        is_memory = field == "own_kib"
        allowed = max(MAX_RISE_KIB, MAX_RISE_SHARE * before) if is_memory else MAX_RISE
        if after - before > allowed:
            problems.append(f"{name}: {field} rose from {before:.0f} to {after:.0f}")
        words.append(f"{before:.0f} -> {after:.0f} {unit}")
    if len({one["pid"] for one in found}) > 1:
        problems.append(f"{name} was started again")
    return (f"  {name}", ", ".join(words), "flat"), problems
