"""Processor time of commands that operators type: the command line's help, and ``eplb status``.

    python -m benchmarks.operating.commands [--calls 7]

Each call is a process of its own, as from a shell; its user and system time are counted, so that a
busy machine changes little. The stores are SQLite, of 32 ranks with 58 layers x 9 slots each.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import tempfile
import time
from contextlib import closing
from pathlib import Path
from statistics import median

from benchmarks.operating.load import Now, Size, fill
from telemetry import open_store
from tests.support.deployments import EPLB

RANKS, WINDOWS = 32, (1, 100, 1000)
ENDED = (0, 1)  # 1: something is wrong, as in a store whose ranks are silent by now


def processor_s(words: list[str]) -> float:
    """Run a command to its end; returns its user and system time."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ended = subprocess.run([EPLB, *words], stdout=subprocess.DEVNULL, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert ended.returncode in ENDED, f"{words} ended with status {ended.returncode}"
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Print one row for each command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=7)
    calls = parser.parse_args().calls
    with tempfile.TemporaryDirectory() as folder:
        commands = {"eplb --help": ["--help"]}
        for windows in WINDOWS:
            path = Path(folder) / f"{windows}.sqlite"
            with closing(open_store(path, "west")) as store:
                fill(store, Size(ranks=RANKS, windows=windows), Now(time.time()))
            place = ["--store", str(path), "--deployment", "west"]
            commands[f"eplb status, {windows * RANKS:,} samples"] = ["status", *place]
        print(f"load {os.getloadavg()[0]:.1f}, {calls} calls each\n")
        print("| command | p50 s of a processor | least | most |\n|---|---:|---:|---:|")
        for name, words in commands.items():
            took = [processor_s(words) for _ in range(calls)]
            print(f"| {name} | {median(took):.2f} | {min(took):.2f} | {max(took):.2f} |")


if __name__ == "__main__":
    main()
