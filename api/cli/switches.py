"""``eplb pause`` and ``eplb resume``: write the kill switch, count ranks that report after it."""

from __future__ import annotations

import re
import time
from contextlib import closing
from threading import Event
from typing import Annotated

import typer

from api.access.local import local_actor, note
from api.cli.admin.asking import asked, at, with_place
from api.cli.admin.place import Place
from api.cli.store_place import audit_folder, configured_store, open_existing
from api.http.requests import MOST_LASTS_S
from api.terminal.printable import print_error, printable
from eplb.clock import Clock, Deadline
from eplb.errors import ConfigError, EplbError
from eplb.migration.serialisation import topology_from_dict
from telemetry.state.runs import RunInfo
from telemetry.state.store import StateStore

REPORTS_DEADLINE_S = 3.0  # ranks report every 0.25 s; a busy machine is slower
_LOOK_S = 0.05
BAD_INPUT = 2
WRONG_RESULT = 1
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}

Reason = Annotated[str, typer.Option(help="Reason; stored with the change.")]


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


@with_place()
def pause(
    place: Place,
    reason: Reason = "paused from the command line",
    lasts: Annotated[
        str | None,
        typer.Option("--for", help="Resume after this time, as 90s, 30m, 2h or 1d."),
    ] = None,
) -> None:
    """Stop all movement of weights at once; serving continues."""
    lasts_s = None if lasts is None else _seconds(lasts)
    _switch(place, movement=False, reason=reason, lasts_s=lasts_s)


@with_place()
def resume(place: Place, reason: Reason = "resumed from the command line") -> None:
    """Let weights move again."""
    _switch(place, movement=True, reason=reason)


def _seconds(text: str) -> int:
    found = re.fullmatch(r"([1-9][0-9]{0,6})([smhd])", text)
    seconds = int(found[1]) * _UNITS_S[found[2]] if found else 0
    if not 0 < seconds <= MOST_LASTS_S:
        wanted = f"a whole number and s, m, h or d, {MOST_LASTS_S // 86_400}d at most, as 2h"
        print_error(ConfigError(f"--for is {text!r}, expected {wanted}"))
        raise typer.Exit(BAD_INPUT)
    return seconds


def _switch(place: Place, *, movement: bool, reason: str, lasts_s: int | None = None) -> None:
    if place.url:
        body = {"reason": reason} | ({} if lasts_s is None else {"expires_s": lasts_s})
        done = asked(place, "POST", "/resume" if movement else "/pause", body).body
        end = "" if done["until"] is None else f" until {at(done['until'])}"
        typer.echo(f"movement {'on' if movement else 'off'}{end}: {printable(reason)}")
        return
    try:
        store, deployment = configured_store(place.store, place.deployment)
        change, has_reports = switch_movement(
            store, deployment, movement=movement, reason=reason, lasts_s=lasts_s
        )
    except EplbError as exc:
        print_error(exc)
        raise typer.Exit(BAD_INPUT) from exc
    typer.echo(f"{change}\nby {local_actor()}: {printable(reason)}")
    if not has_reports:
        typer.echo(
            "eplb: no rank reports to this store: the switch is written, and may have no effect",
            err=True,
        )
        raise typer.Exit(WRONG_RESULT)
