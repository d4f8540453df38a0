"""``eplb pause`` and ``eplb resume``: write the kill switch, count ranks that report after it."""

from __future__ import annotations

import time
from contextlib import closing
from threading import Event

from api.access.local import note
from api.cli.admin.asking import at
from api.cli.store_place import audit_folder, open_existing
from eplb.clock import Clock, Deadline
from eplb.migration.serialisation import topology_from_dict
from telemetry.state.runs import RunInfo
from telemetry.state.store import StateStore

REPORTS_DEADLINE_S = 3.0  # ranks report every 0.25 s; a busy machine is slower
_LOOK_S = 0.05


def switch_movement(
    url: str, deployment: str, *, movement: bool, reason: str, lasts_s: int | None = None
) -> tuple[str, bool]:
    """Write the switch; return a sentence that states the change, and whether a rank has reported.

    A rank counts if it reports after the switch was written. A rank that writes to another store,
    or to a log that was removed, does not report here and does not read the switch.

    Raises:
        EplbError: there is no such deployment, or the store cannot be used.
    """
    # A deployment that never ran is refused: with a misspelt name nothing would be stopped.
    with closing(open_existing(url, deployment)) as store:
        info = store.current_run()
        assert info is not None, "a deployment that never ran is refused"
        before = store.control()
        # Before it is done: a change that the audit cannot hold is not made.
        note(audit_folder(url), deployment, "resume" if movement else "pause", reason, "asked")
        state = store.change_live({"movement": movement}, reason=reason, lasts_s=lasts_s)
        reported, expected = _reported(store, info)
    was, now = ("on" if on else "off" for on in (before.movement, movement))
    ranks = f"{reported} of {expected} ranks" if expected else f"{reported} ranks"
    end = state.until.get("movement")
    change = f"{deployment}: movement {now}{'' if end is None else f' until {at(end)}'} (was {was})"
    return f"{change}; {ranks} of run {info.run} reported since", reported > 0


def _reported(store: StateStore, info: RunInfo, clock: Clock = time.monotonic) -> tuple[int, int]:
    """Wait for reports of all ranks; the number that came in time, and the number expected."""
    known = {state.rank: state for state in store.rank_states(info.run)}
    expected = topology_from_dict(dict(info.topology)).num_ranks if info.topology else 0
    deadline = Deadline.after(REPORTS_DEADLINE_S, clock)
    while True:
        states = store.rank_states(info.run)
        reported = sum(known.get(state.rank) != state for state in states)
        is_over = deadline.has_passed
        if is_over or (reported and reported == max(expected, len(states))):
            return reported, expected
        Event().wait(_LOOK_S)
