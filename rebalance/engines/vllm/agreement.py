"""All ranks of a group have the plug-in with the same settings, or none of them uses it.

A rank without the plug-in takes part in no collective of ours, so this must not be one: each rank
writes a line into the key-value store under its process group, and the first that has all lines, or
has waited long enough, writes the decision that all others read.
"""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from eplb.errors import RankError

PREFIX = "eplb-plugin"


@dataclass(frozen=True)
class Joined:
    """What all ranks share from now on."""

    run: str
    base_generation: int  # of placements: each start of the engine begins above all earlier ones


def join(store: Any, group: str, rank: int, size: int, facts: str, deadline_s: float) -> Joined:
    """Wait for the other ranks of a group, up to a deadline.

    Args:
        store: ``torch.distributed.Store`` that all ranks reach.
        group: name of the group, alike on its ranks.
        rank: in the group.
        size: of the group.
        facts: must be alike on every rank: versions and settings.
        deadline_s: for all ranks to have loaded the plug-in.

    Raises:
        RankError: a rank is missing or has other facts; then it is raised on every rank.
    """
    key = f"{PREFIX}/{group}"
    lines = [f"{key}/{other}" for other in range(size)]
    store.set(lines[rank], facts)
    proposal: dict[str, Any] = {"refused": ""}
    try:
        store.wait(lines, timedelta(seconds=deadline_s))
    except RuntimeError:
        found = [other for other in range(size) if store.check([lines[other]])]
        proposal["refused"] = (
            f"ranks {sorted(set(range(size)) - set(found))} of {size} did not load the plug-in "
            f"within {deadline_s:g} s, expected all"
        )
    else:
        others = [str(store.get(line), "utf-8") for line in lines]
        if set(others) != {facts}:
            other = next(number for number, line in enumerate(others) if line != others[0])
            proposal["refused"] = (
                f"rank {other} has {others[other]}, rank 0 has {others[0]}, expected the same"
            )
    now = time.time()
    proposal["run"] = f"vllm-{time.strftime('%Y%m%dT%H%M%S')}-{secrets.token_hex(3)}"
    proposal["base"] = int(now)
    decided = store.compare_set(f"{key}/decision", "", json.dumps(proposal))
    decision = json.loads(str(decided, "utf-8"))
    if decision["refused"]:
        raise RankError(f"rank {rank}: {decision['refused']}")
    return Joined(decision["run"], decision["base"])
