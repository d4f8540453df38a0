"""Runs the attacks and prints a table; see the package. Exit status 1: at least one finding."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import traceback
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

import benchmarks.attack
from benchmarks.attack import Attack, Outcome


def known_attacks() -> list[Attack]:
    """All attacks: every module of this package may define ``ATTACKS``."""
    modules = sorted(module.name for module in iter_modules(benchmarks.attack.__path__))
    found: list[Attack] = []
    for module in modules:
        if module != "__main__":
            found.extend(getattr(import_module(f"benchmarks.attack.{module}"), "ATTACKS", ()))
    return found


def attempted(attack: Attack) -> Outcome:
    """The outcome of an attack; one that could not be tried counts as a finding."""
    with tempfile.TemporaryDirectory(prefix="eplb-attack-") as folder:
        try:
            return attack.run(Path(folder))
        except Exception as error:
            traceback.print_exc()
            return Outcome(False, f"not tried: {type(error).__name__}: {error}"[:200])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="names of attacks")
    parser.add_argument("--list", action="store_true", help="print names and claims, run nothing")
    arguments = parser.parse_args()
    attacks = known_attacks()
    unknown = set(arguments.only) - {attack.name for attack in attacks}
    if unknown:
        parser.error(f"unknown attacks: {', '.join(sorted(unknown))}")
    findings = 0
    for attack in attacks:
        if arguments.only and attack.name not in arguments.only:
            continue
        if arguments.list:
            print(f"{attack.name}: {attack.claim}")
            continue
        start = time.monotonic()
        outcome = attempted(attack)
        findings += not outcome.held
        verdict = "held" if outcome.held else "FINDING"
        took = time.monotonic() - start
        print(f"| {attack.name} | {attack.claim} | {verdict} | {outcome.figure} | {took:.0f} s |")
        sys.stdout.flush()
    if not arguments.list:
        print(f"{findings} findings")
    return min(findings, 1)


if __name__ == "__main__":
    sys.exit(main())
