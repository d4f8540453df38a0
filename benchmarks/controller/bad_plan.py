"""A plan that the next windows contradict: within how many windows is it taken back?

    python -m benchmarks.controller.bad_plan [--seeds 20]

The planted plan: windows of one load lead the controller to replicate and pack for it; the load
then becomes one for which the placement before was made. With the planner passive (no move pays)
the rule alone acts; with the planner active it may answer the change of load before the rule does.
Simulated time, the controller's own code over its shipped store.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import numpy as np

from benchmarks.controller.loads import drawn, popularity
from benchmarks.over_time.replay import Deployment
from eplb import Topology, imbalance
from eplb.decision.promises import ENOUGH
from eplb.planner import plan
from rebalance.controller.loop import ControllerSettings

LAYERS, EXPERTS, TOP_K, TOKENS = 16, 64, 6, 200_000
TOPOLOGY = Topology.uniform(num_nodes=2, ranks_per_node=8, slots_per_rank=5)
MOST = 24  # windows after the planted plan
LOSS = 0.05


def run(seed: int, *, is_passive: bool) -> tuple[int | None, str, float, float, float]:
    """Plant a plan; return the window of the answer, its trigger, and imbalance of three times."""
    random = np.random.default_rng(seed)
    usual, other = (popularity(random, LAYERS, EXPERTS) for _ in range(2))
    settings = replace(ControllerSettings(), rollback_loss=LOSS)
    deployment = Deployment(TOPOLOGY, drawn(random, usual, TOKENS), TOP_K, settings)
    # What serves is made for the usual load.
    good = plan(drawn(random, usual, 100 * TOKENS), TOPOLOGY).target.with_generation(1)
    deployment.store.commit(good, expected=0, reason="made for the usual load")
    deployment.placement = good
    while deployment.serve(drawn(random, other, TOKENS)) is None:
        if deployment.window > MOST:
            raise SystemExit(f"seed {seed}: nothing was planted in {MOST} windows")
    bad, judge = deployment.placement, drawn(random, usual, 10 * TOKENS)
    if is_passive:
        deployment.store.change_live({"pay_back_s": 0.0}, reason="only the rule acts")
    answered, trigger = None, "none"
    for window in range(1, MOST + 1):
        if deployment.serve(drawn(random, usual, TOKENS)) is not None:
            plans = [one for one in deployment.store.events() if one.kind == "plan"]
            answered, trigger = window, str(plans[-1].detail["trigger"])
            break
    before, during, after = (
        float(imbalance(judge, placement, TOPOLOGY).mean())
        for placement in (good, bad, deployment.placement)
    )
    return answered, trigger, before, during, after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=20)
    given = parser.parse_args()
    print(
        f"{LAYERS} x {EXPERTS} on {TOPOLOGY.num_ranks} ranks x 5 slots, {given.seeds} seeds, "
        f"rollback_loss {LOSS}, judged on {ENOUGH} windows\n"
        "| planner | answered | by | in window: median, most | imbalance before the planted plan "
        "| under it | after the answer |\n|---|---|---|---|---|---|---|"
    )
    for name, is_passive in (("passive", True), ("active", False)):
        found = [run(seed, is_passive=is_passive) for seed in range(given.seeds)]
        windows = [one[0] for one in found if one[0] is not None]
        by = ", ".join(
            f"{sum(one[1] == trigger for one in found)} {trigger}"
            for trigger in sorted({one[1] for one in found})
        )
        before, during, after = (np.mean([one[at] for one in found]) for at in (2, 3, 4))
        when = f"{np.median(windows):.0f}, {max(windows)}" if windows else "-"
        print(
            f"| {name} | {len(windows)} of {len(found)} | {by} | {when} | {before:.3f} | "
            f"{during:.3f} | {after:.3f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
