"""``eplb pause`` and ``eplb resume``: turn the kill switch, and see who is there to obey it."""

from __future__ import annotations

import time
from contextlib import closing
from threading import Event

from api.store_place import open_existing
from eplb.records import topology_from_dict
from telemetry.store import Control, LoadStore, RunInfo

HEARD_S = 3.0  # ranks report every 0.25 s; a busy machine is slower
_LOOK_S = 0.05


def switch_movement(url: str, deployment: str, *, movement: bool, reason: str) -> tuple[str, bool]:
    """Turn the switch; return what was done in words, and whether any rank was heard from since.

    A rank counts that reports after the switch was written: who writes to another store, or to a
    log that was removed, is not seen here and does not obey.

    Raises:
        EplbError: there is no such deployment, or the store cannot be used.
    """
    # One that never ran is refused: a misspelt name must not pass for a stop.
    with closing(open_existing(url, deployment)) as store:
        info = store.current_run()
        assert info is not None, "a deployment that never ran is refused"
        before = store.control()
        store.set_control(Control(movement=movement, observe=before.observe), reason=reason)
        heard, expected = _heard_from(store, info)
    was, now = ("on" if on else "off" for on in (before.movement, movement))
    ranks = f"{heard} of {expected} ranks" if expected else f"{heard} ranks"
    words = f"{deployment}: movement {now} (was {was}); heard from {ranks} of run {info.run} since"
    return words, heard > 0


def _heard_from(store: LoadStore, info: RunInfo) -> tuple[int, int]:
    """Wait for reports of all ranks; how many came in time, of how many."""
    known = {state.rank: state for state in store.rank_states(info.run)}
    expected = topology_from_dict(dict(info.topology)).num_ranks if info.topology else 0
    deadline = time.monotonic() + HEARD_S
    while True:
        states = store.rank_states(info.run)
        heard = sum(known.get(state.rank) != state for state in states)
        is_over = time.monotonic() >= deadline
        if is_over or (heard and heard == max(expected, len(states))):
            return heard, expected
        Event().wait(_LOOK_S)
