"""What Python's collections cost in a step of a rank: thresholds that take turns in one process.

    python -m benchmarks.ranks.collecting [--steps 20000]

Two ranks of the tests' engine on this host move experts at every chance. Every 250 steps the
threshold changes between 700 objects (``api.processes.commands.settle``) and 50,000 (a start).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import numpy as np

from eplb.core.model import ModelShape
from runtime import ExpertSchema, write_random_checkpoint
from tests.support.deployments import OneHost

MODEL = ModelShape((0, 1), num_experts=8, top_k=2, hidden=16, intermediate=8)
THRESHOLDS = (700, 50_000)
LOOP = '    while rank.step(number, "decode"):  # before every forward pass\n'
# The engine's loop, with the time of each step and of each collection in it.
TIMED = f"""    import gc, json, time
    times, took, at = {{700: [], 50_000: []}}, {{700: [], 50_000: []}}, [0.0]

    def noted(phase, _):
        if phase == "stop":
            took[limit].append(1e3 * (time.perf_counter() - at[0]))
        at[0] = time.perf_counter()

    gc.collect()
    gc.freeze()
    gc.callbacks.append(noted)
    while True:
        limit = {THRESHOLDS}[number // 250 % 2]
        gc.set_threshold(limit, 10, 10)
        begun = time.perf_counter()
        if not rank.step(number, "decode"):
            gc.callbacks.remove(noted)
            open(f"rank-{{here}}.json", "w").write(json.dumps([times, took]))
            break
"""
END = """        times[limit].append(1e3 * (time.perf_counter() - begun))
        number += 1
        if number == STEPS:
            rank.request_halt()
"""


def main() -> None:
    """Run, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    given = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        schema = ExpertSchema.swiglu(MODEL.hidden, MODEL.intermediate)
        write_random_checkpoint(folder / "weights", MODEL, schema, vocabulary=64, seed=1)
        host = OneHost(stack, folder, folder / "weights")
        host.environ |= {"EPLB_PLANNER__TARGET_IMBALANCE": "1", "EPLB_PLANNER__PLAN_WINDOWS": "1"}
        engine = (folder / "engine.py").read_text()
        assert LOOP in engine, "the loop of the engine is another one now"
        timed = engine.replace(LOOP, TIMED).replace(
            "        number += 1\n", END.replace("STEPS", str(given.steps))
        )
        # Compared steps would be the longest, and hot experts change before each plan is old.
        timed = timed.replace(" = 64, 32, 500", " = 64, 10**9, 200")
        (folder / "engine.py").write_text(timed)
        host.start_cache()
        host.start("eplb", "controller").wait_for("ready")
        launch = host.start("eplb", "launch", "--", sys.executable, "engine.py")
        if launch.ends():
            raise SystemExit("\n".join(launch.lines))
        moves = sum("serves" in line for line in launch.lines) - 1
        print(f"{moves} rebalances, load average {os.getloadavg()[0]:.1f}; ms")
        print("| rank | threshold | steps | p50 | p99 | max | collections: number, median, max |")
        print("|---|---|---|---|---|---|---|")
        for rank in range(2):
            times, took = json.loads((folder / f"rank-{rank}.json").read_text())
            for limit in map(str, THRESHOLDS):
                p50, p99 = np.quantile(times[limit], [0.5, 0.99])
                of = took[limit] or [0.0]
                steps = f"{len(times[limit])} | {p50:.2f} | {p99:.2f} | {max(times[limit]):.0f}"
                cost = f"{len(took[limit])}, {median(of):.2f}, {max(of):.2f}"
                print(f"| {rank} | {limit} | {steps} | {cost} |")


if __name__ == "__main__":
    main()
