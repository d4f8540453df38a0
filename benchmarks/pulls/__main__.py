"""Runs schedules and prints what came of them; see the package."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from benchmarks.pulls.schedule import Rules, Schedule, Violation

MUTANTS = {
    "pulled before the exchange": Rules(pull_after_exchange=False),
    "not closed": Rules(combine_after_close=False),
    "closed when ordered": Rules(close_after_pull=False),
    "served early": Rules(serve_after_pull=False, combine_after_close=False),
    "digests not compared": Rules(compare_digests=False),
    "late pull not reported": Rules(report_late=False),
    "swap beside the step": Rules(swap_before_exchange=False),
    "source of another table": Rules(source_is_live=False, compare_digests=False),
    "counted nowhere": Rules(count_at_home=False),
}
ROWS = (
    "schedules",
    "pulls",
    "served by spare slots",
    "writes",
    "refused: late",
    "refused: digests differ",
    "deaths",
    "stopped",
    "turns",
    "violations",
)


def run_one(seed: int, rules: Rules, total: Counter[str], *, is_traced: bool = False) -> str:
    """Run a seed's schedule. Returns what was violated, or ""."""
    schedule, wrong = Schedule(seed, rules), ""
    try:
        schedule.run()
    except Violation as exc:
        wrong = str(exc)
    total.update(schedule.counts)
    total.update(schedules=1, violations=bool(wrong))
    if is_traced:
        print("\n".join(f"{n:>5} {what}" for n, what in enumerate(schedule.trace)))
    return wrong


def main() -> int:
    """Run the schedules of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=1000, help="how many seeds")
    parser.add_argument("--trace", action="store_true", help="print every turn")
    parser.add_argument("--mutant", choices=MUTANTS, help="leave a rule out; ends when it is found")
    args = parser.parse_args()
    rules = MUTANTS[args.mutant] if args.mutant else Rules()
    total, started = Counter[str](), time.monotonic()
    for seed in range(args.first, args.first + args.count):
        wrong = run_one(seed, rules, total, is_traced=args.trace)
        if wrong:
            print(f"seed {seed}: {wrong}")
            if args.mutant:
                break
    for name in ROWS:
        print(f"{name:<24} {total[name]:>12,}")
    print(f"{'ms a schedule':<24} {1e3 * (time.monotonic() - started) / total['schedules']:>12.2f}")
    return 1 if total["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
