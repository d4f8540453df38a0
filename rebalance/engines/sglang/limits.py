"""With which settings of SGLang the plug-in can work, at a start and in a command."""

from __future__ import annotations

from typing import Any

from rebalance.engines.sglang.planning import RULES

MODES = ("stat", "stat_approx")  # of the recorder, whose counts the plug-in reads


def why_unserved(moe: Any, parallel: Any, num_ranks: int) -> str:
    """Why the plug-in cannot work with these settings of the engine; "" if it can.

    Args:
        moe: SGLang's settings of experts.
        parallel: those of ranks.
        num_ranks: of a replica of the model.
    """
    if moe.ep_dispatch_algorithm not in RULES:
        known = ", ".join(RULES)
        return f"--ep-dispatch-algorithm {moe.ep_dispatch_algorithm}, expected one of: {known}"
    if moe.ep_dispatch_algorithm in ("static", "lp") and moe.moe_a2a_backend == "none":
        return (
            f"--ep-dispatch-algorithm {moe.ep_dispatch_algorithm} without an all-to-all back end: "
            "ranks would choose different replicas of one token's expert, expected dynamic"
        )
    mode = moe.expert_distribution_recorder_mode
    if mode not in MODES:
        return f"--expert-distribution-recorder-mode {mode}, expected stat"
    if parallel.pp_size > 1:
        return (
            f"--pp-size {parallel.pp_size}, expected 1: the engine's updater counts the ranks of a "
            "stage from 0, and would move experts between stages"
        )
    if num_ranks != parallel.ep_size:
        return (
            f"{num_ranks} ranks and an expert-parallel size of {parallel.ep_size}, "
            "expected the same"
        )
    if parallel.ep_size % parallel.nnodes:
        return f"{parallel.ep_size} ranks on {parallel.nnodes} nodes, expected as many on each"
    return ""
