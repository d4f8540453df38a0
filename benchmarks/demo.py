"""``eplb demo`` with several seeds, measured, one row each.

    python -m benchmarks.demo [--seconds 60] [--seeds 1,2,3]

Prints one table; a row that misses a target is marked. Figures are those of ``--output``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

COLUMNS = (
    ("seed", "{}"),
    ("steps", "{}"),
    ("imbalance_initial", "{:.3f}"),
    ("imbalance_final", "{:.3f}"),
    ("imbalance_run_contiguous", "{:.3f}"),
    ("imbalance_run", "{:.3f}"),
    ("rebalances", "{}"),
    ("experts_moved", "{}"),
    ("swap_pause_ms_p50", "{:.2f}"),
    ("swap_pause_ms_p99", "{:.2f}"),
    ("step_ms_p50", "{:.1f}"),
    ("reference_checks", "{}"),
    ("reference_failures", "{}"),
    ("reference_max_error", "{:.1e}"),
    ("samples_written", "{}"),
    ("samples_lost", "{}"),
)


def run_demo(seed: int, seconds: float, folder: Path) -> dict[str, Any]:
    """Run the demo as a user would, and read its summary."""
    path = folder / f"{seed}.json"
    subprocess.run(
        [
            *(sys.executable, "-m", "api.cli.main", "demo", "--view", "off", "--port", "0"),
            *("--seed", str(seed), "--seconds", str(seconds)),
            *("--state-dir", str(folder / f"state-{seed}"), "--output", str(path)),
        ],
        check=True,
        timeout=seconds + 240,
        stdout=subprocess.DEVNULL,
    )
    summary: dict[str, Any] = json.loads(path.read_text())
    return summary


def main() -> None:
    """Run, and print one table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seeds", default="1,2,3")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        seeds = [int(seed) for seed in given.seeds.split(",")]
        found = [run_demo(seed, given.seconds, Path(folder)) for seed in seeds]
    print("| " + " | ".join(name for name, _ in COLUMNS) + " |")
    print("|" + "---|" * len(COLUMNS))
    for summary in found:
        print("| " + " | ".join(form.format(summary[name]) for name, form in COLUMNS) + " |")
    middle = [
        form.format(median(summary[name] for summary in found)) if name != "seed" else "median"
        for name, form in COLUMNS
    ]
    print("| " + " | ".join(middle) + " |")
    for summary in found:
        sources = ", ".join(f"{k} {v / 1e6:.1f} MB" for k, v in summary["bytes_by_source"].items())
        phases = summary["reference_checks_by_phase"]
        print(
            f"seed {summary['seed']}: {sources}; rebalanced at steps "
            f"{summary['rebalance_steps']}; checks {phases}"
        )


if __name__ == "__main__":
    main()
