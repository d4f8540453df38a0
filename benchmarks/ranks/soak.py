"""Decode steps of real ranks under random migrations: the processes and their rows.

Real ranks, agents, votes, store and host cache; only the plans are random.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.ranks.children import Child
from benchmarks.ranks.serving import (
    FIRST_PERCENT,
    MIB,
    WARM_UP_STEPS,
    Decode,
    Level,
    Served,
    begin_run,
    plan_of,
    received_message,
    run_decode,
    run_host_cache,
)
from benchmarks.result_table import Row

START_DEADLINE_S = 240.0
SILENCE_S = 90.0  # beyond the length of a run; a vote may wait 30
END_DEADLINE_S = 30.0  # a rank hands its last samples over first
GRACE_S = 2.0  # after a first failure, for reports of the others


def measure_decode(wanted: Decode) -> list[Row]:
    """Start everything, serve, end everything; return the rows.

    Raises:
        SystemExit: a process failed or was silent, in its words.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        plan = plan_of(
            Path(folder),
            wanted.num_ranks,
            device=wanted.device,
            precision=wanted.precision,
        )
        store = begin_run(plan)
        stack.callback(store.close)

        def start(name: str, *words: Any) -> Child:
            child = Child(name, *words)
            stack.callback(child.stop, 0.0)  # before the folder goes: it writes to it while it runs
            return child

        host_cache = start("host_cache", run_host_cache, plan)
        received_message(host_cache, "ready", START_DEADLINE_S)
        ranks = [start(f"rank {r}", run_decode, plan, r, wanted) for r in range(wanted.num_ranks)]
        for child in ranks:
            received_message(child, "ready", START_DEADLINE_S)
        for child in ranks:
            child.command("begin")
        try:
            deadline_s = wanted.length.seconds + SILENCE_S
            reports = [received_message(child, "served", deadline_s) for child in ranks]
        except SystemExit:
            for child in ranks:  # peers of a failed rank fail too, and may be heard first
                while child.messages.poll(GRACE_S) and (message := child.receive()) is not None:
                    print(f"{child.name}: {message}", file=sys.stderr)
            raise
        host_cache.command("end")
        for child in [*ranks, host_cache]:
            child.process.join(END_DEADLINE_S)
            if child.process.exitcode != 0:
                raise SystemExit(f"at the end, {child.exit_text()}")
    return rows_of(reports, wanted)


def rows_of(reports: Sequence[Served], wanted: Decode) -> list[Row]:
    """Sum the ranks' reports up."""
    first, moved = reports[0], sum(report.experts_moved for report in reports)
    from_peers = sum(report.bytes_by_source.get("peer", 0) for report in reports)
    what = f"{first.steps} {wanted.precision} decode steps, a swap every"
    return [
        (
            f"{what} {wanted.swap_every} or as soon as done",
            f"{first.num_swaps} swaps in {first.migrations} migrations,"
            f" {moved} experts moved, {from_peers / 1e9:.1f} GB from peers",
            "-",
        ),
        ("graph captures", f"{first.captures or 'no graph'}", "1, on cuda"),
        *byte_rows(reports),
        ("placements at the end", f"{len({r.placement_hash for r in reports})}", "1"),
        *memory_rows([report.memory for report in reports]),
        *time_rows(reports),
    ]


def byte_rows(reports: Sequence[Served]) -> list[Row]:
    """Wrong bytes: at the end, and, where anybody looked, meanwhile."""
    wrong_at_end = sum(report.wrong_at_end for report in reports)
    rows = [("slots with wrong bytes at the end", f"{wrong_at_end}", "0")]
    looks = sum(report.num_looks for report in reports)
    if looks:
        wrong = sum(report.num_wrong for report in reports)
        rows.append(("  meanwhile, at every percent", f"{wrong} in {looks} looks", "0"))
    found = sum((Counter(dict(report.scrubbed)) for report in reports), Counter[str]())
    if found.total():
        sweeps = [report.sweeps for report in reports]
        by_result = ", ".join(f"{found[key]} {key}" for key in reports[0].scrubbed)
        rounds = f"{min(sweeps)} to {max(sweeps)} rounds of a rank"
        rows.append(("  by the scrubber, in idle steps", f"{by_result}; {rounds}", "0 damaged"))
    return rows


def memory_rows(levels: Sequence[Level]) -> list[Row]:
    """The largest change of a rank, and the rank whose memory rose the most."""
    what = f"memory, change from {FIRST_PERCENT} % of the steps to the end"
    if any(level.num_readings < 2 for level in levels):
        return [(what, f"ended before {FIRST_PERCENT} %", "flat")]
    drop = max(abs(level.first - level.last) for level in levels) / MIB
    most = max(levels, key=lambda level: level.rise)
    found = ", ".join(f"{n / MIB:.1f}" for n in (most.first, most.highest, most.last))
    return [
        (what, f"{drop:.1f} MiB", "flat"),
        (
            "  of the rank that rose the most: first, highest, last",
            f"{found} MiB in {most.num_readings} readings",
            "flat",
        ),
    ]


def time_rows(reports: Sequence[Served]) -> list[Row]:
    """Percentiles of boundaries and of steps, over all ranks."""
    pauses_ms = sorted(pause for report in reports for pause in report.pauses_ms)
    step_us = sorted(us for report in reports for us in report.step_us.values)
    num_swaps = sum(report.num_swaps for report in reports)
    num_steps = sum(report.step_us.num_seen for report in reports)
    return [
        (
            "boundary with a swap, host time, p50 / p99",
            percentiles(pauses_ms, 2, "ms") + part_of(len(pauses_ms), num_swaps, "the latest"),
            "-",
        ),
        (
            "decode step, host time, p50 / p99",
            percentiles(step_us, 0, "us") + part_of(len(step_us), num_steps, "a sample of"),
            "-",
        ),
    ]


def percentiles(found: Sequence[float], digits: int, unit: str) -> str:
    """The median and the 99th of sorted times, in words where there are none."""
    if not found:
        return (
            f"none yet (the first {WARM_UP_STEPS} steps do not count)" if unit == "us" else "none"
        )
    p99 = found[int(len(found) * 0.99)]
    return f"{median(found):.{digits}f} / {p99:.{digits}f} {unit}"


def part_of(num_kept: int, num_seen: int, how: str) -> str:
    """Say that times are of a part of all, where they are."""
    return f" ({how} {num_kept} of {num_seen})" if num_kept < num_seen else ""
