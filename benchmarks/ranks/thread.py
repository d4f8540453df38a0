"""The steel thread, measured: dispatch, counters, swaps, tables, and decode steps under migrations.

    python3 -m benchmarks.ranks.thread --device cuda [--ranks 4] [--steps 10000] [--swap-every 50]
    python -m benchmarks.ranks.thread              # the decode part alone, on CPU ranks
    python -m benchmarks.ranks.thread --seconds 3600 --swap-every 0       # the soak

On GPUs it needs that many of one host, and deep_ep. Prints one table; losing rows too. Seeded.

A soak looks at the bytes of all live slots at every percent, keeps a bounded sample of step times,
and says every minute on the error stream how far it is. SIGINT or SIGTERM ends it in order: the
ranks halt together, the rows are of what was reached, and the status is 128 + the signal.

    thread_kernels   the rows of GPU kernels     thread_rank   one rank that serves
    thread_soak      processes and their rows    thread_plans  what is migrated
"""

from __future__ import annotations

import argparse
from pathlib import Path

from api.processes.children import preload_modules
from benchmarks.ranks.kernels import measure_dispatch, measure_swap
from benchmarks.ranks.processes import Interrupts
from benchmarks.ranks.rank import Decode, Length
from benchmarks.ranks.soak import measure_decode
from benchmarks.result_table import Row, keep, show
from runtime.group.launch import launch


def main() -> None:
    """Measure, and print one table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=0, help="10000 on cuda, 1000 on the cpu")
    parser.add_argument("--seconds", type=float, default=0.0, help="in place of steps: a soak")
    parser.add_argument("--swap-every", type=int, default=50)
    parser.add_argument("--precision", default="", help="bfloat16 or fp8, on cuda")
    parser.add_argument("--progress-every", type=float, default=60.0, help="seconds")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    is_cuda, rows = given.device == "cuda", list[Row]()
    if is_cuda:
        rows += launch(measure_dispatch, given.ranks, deadline_s=120)[0]
        rows += launch(measure_swap, 1, deadline_s=60)[0]
    wanted = Decode(
        given.device,
        given.ranks,
        given.precision or ("bfloat16" if is_cuda else "float32"),
        Length(given.steps or (10_000 if is_cuda else 1_000), given.seconds),
        given.swap_every,
    )
    preload_modules("api.demo.workers.rank", "api.demo.workers.host_cache")
    with Interrupts() as interrupts:
        rows += measure_decode(wanted, interrupts, given.progress_every)
        show(rows, max(len(row[0]) for row in rows))
        keep(rows, given.json)
    if interrupts.found is not None:
        raise SystemExit(128 + interrupts.found)


if __name__ == "__main__":
    main()
