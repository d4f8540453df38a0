"""Whether every rank of the engine has the plug-in: decided once, the same on all ranks.

A plug-in that loads in one process and not in another would wait in a collective for a rank that
never comes. So the ranks first leave a word in the engine's own rendezvous store, which needs
nobody's presence. One key decides; the first writer wins, and all follow what it says.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import distributed_c10d

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Decision:
    """What all ranks do."""

    is_on: bool
    number: int  # of this start; later starts have greater ones
    reason: str


def decide(refusal: str, *, config: str, deadline_s: float) -> Decision:
    """Decide with all ranks of the default group.

    Args:
        refusal: why this rank cannot take part; "" if it can.
        config: what must be alike on all ranks.
        deadline_s: for all ranks to come. A rank without the plug-in never does.
    """
    world, rank = distributed_c10d.get_world_size(), distributed_c10d.get_rank()
    store = distributed_c10d.PrefixStore("eplb/sglang", distributed_c10d._get_default_store())
    store.set(f"rank/{rank}", f"refused: {refusal}" if refusal else f"ready: {config}")
    if rank == 0:
        verdict = _verdict(store, world, deadline_s)
    else:
        # Twice as long as rank 0 waits: it decides, unless it is not there.
        verdict = "off: rank 0 did not load the plug-in"
        if _wait(store, ["decision"], 2 * deadline_s):
            verdict = store.get("decision").decode()
    # The first writer wins: a rank that gave up and rank 0 cannot decide differently.
    word, _, rest = store.compare_set("decision", "", verdict).decode().partition(": ")
    is_on = word == "on"
    return Decision(is_on, int(rest) if is_on else 0, "" if is_on else rest)


def _verdict(store: distributed_c10d.Store, world: int, deadline_s: float) -> str:
    keys = [f"rank/{rank}" for rank in range(world)]
    if not _wait(store, keys, deadline_s):
        missing = [rank for rank in range(world) if not store.check([f"rank/{rank}"])]
        return f"off: ranks {missing} did not load the plug-in within {deadline_s:g} s"
    words = [store.get(key).decode() for key in keys]
    refused = [(rank, word) for rank, word in enumerate(words) if word.startswith("refused")]
    if refused:
        rank, word = refused[0]
        return f"off: rank {rank} {word}"
    for rank, word in enumerate(words):
        if word != words[0]:
            return f"off: rank {rank} is {word}, expected as on rank 0: {words[0]}"
    return f"on: {int(time.time())}"


def _wait(store: distributed_c10d.Store, keys: list[str], deadline_s: float) -> bool:
    try:
        store.wait(keys, timedelta(seconds=deadline_s))
    except RuntimeError:  # torch's DistStoreError among them
        return False
    return True
