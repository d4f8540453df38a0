"""Runs schedules and prints what came of them; see the package."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections import Counter
from contextlib import nullcontext

from benchmarks.schedules.membership import MembershipSchedule
from benchmarks.schedules.mutants import MUTANTS, MUTANTS_OF_PLANNED, MUTANTS_OF_SURVIVORS
from benchmarks.schedules.planned import PlannedSchedule
from benchmarks.schedules.run import run_one
from benchmarks.schedules.world import Schedule

ROWS = (
    "schedules",
    "plans",
    "committed",
    "dropped",
    "deaths",
    "cuts",
    "recoveries",
    "served on",
    "started again",
    "operations",
    "operations refused",
    "operations done",
    "operations failed",
    "operations cancelled",
    "planned groups",
    "started",
    "joined",
    "left",
    "refusals",
    "updates",
    "bytes refused",
    "turns",
    "violations",
    "hangs",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=1000, help="how many seeds")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    parser.add_argument("--trace", action="store_true", help="print every turn of every schedule")
    mutants = MUTANTS | MUTANTS_OF_SURVIVORS | MUTANTS_OF_PLANNED
    parser.add_argument(
        "--mutant", choices=mutants, help="break the ranks on purpose; ends when it is found"
    )
    parser.add_argument("--membership", action="store_true", help="survivors serve on")
    parser.add_argument("--planned", action="store_true", help="ranks join and leave as well")
    args = parser.parse_args()
    make = MembershipSchedule if args.membership else Schedule
    make = PlannedSchedule if args.planned else make
    logging.disable(logging.CRITICAL)  # what ranks say of the faults that they are given
    started, began_s, total = time.monotonic(), time.process_time(), Counter[str]()
    with mutants[args.mutant]() if args.mutant else nullcontext():
        for seed in range(args.first, args.first + args.count):
            found = run_one(seed, make=make)
            total.update(found.counts)
            if args.trace or found.violation:
                print(found.story(seed))
            if time.monotonic() - started > args.seconds or (args.mutant and found.violation):
                break
    spent_s = time.process_time() - began_s  # of the processor: other work may run beside
    for name in ROWS:
        print(f"{name:<16} {total[name]:>12,}")
    print(f"{'ms a schedule':<16} {1e3 * spent_s / max(1, total['schedules']):>12.2f}")
    print(f"{'seeds':<16} {args.first}..{args.first + total['schedules'] - 1}")
    return 1 if total["violations"] or total["hangs"] else 0


if __name__ == "__main__":
    sys.exit(main())
