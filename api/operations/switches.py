"""Operations on the switches: pause, resume, change.

A pause is the kill switch: every process follows it as soon as it reads the store. The answer can
wait for reports of ranks that follow the change, because a rank that reports to another store does
not read the switch either.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from threading import Event
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import ConfigDict, Field

from api.http.arguments import MOST_LASTS_S, Reason, ReasonRequest, left_out
from api.http.dependencies import (
    Audited,
    ChangeAudit,
    Live,
    LiveChange,
    Revision,
    audited,
    audited_if_possible,
    changing,
    operator,
)
from api.http.document import refused_with
from api.http.problems import ProblemType, Refused
from api.operations.commands import Answer, Ask, command
from api.terminal.printable import print_error
from api.terminal.printing import UNITS_S, WHY, at, line
from eplb.clock import Deadline
from eplb.declared import Meaning
from eplb.errors import ConfigError, counted

if TYPE_CHECKING:
    from telemetry.state.runs import RunInfo

acts = changing(operator, audited)
stops = changing(operator, audited_if_possible)  # a full disk must not keep a deployment moving

REPORTS_WAIT_S = 3.0  # a command waits for reports: ranks send one every 0.25 s
MOST_WAIT_S = 5.0  # the request holds a thread of the service
LOOK_S = 0.05


class SwitchRequest(ReasonRequest):
    """A change of a switch."""

    wait_s: Annotated[
        float,
        Meaning(
            "longest wait for reports of ranks before the answer; 0: no wait",
            at_least=0,
            at_most=MOST_WAIT_S,
        ),
    ] = 0.0


class PauseRequest(SwitchRequest):
    """Stop all movement, for a time or until a resume."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"reason": "change 4711", "expires_s": 7200}]}
    )

    expires_s: Annotated[
        int | None,
        Meaning(
            "time after which movement resumes by itself; null: only a resume ends the pause",
            at_least=1,
            at_most=MOST_LASTS_S,
        ),
    ] = None


class ControlRequest(SwitchRequest):
    """Change switches; switches that are left out stay as they are."""

    model_config = ConfigDict(
        json_schema_extra={"anyOf": [{"required": ["movement"]}, {"required": ["observe"]}]}
    )

    movement: Annotated[bool, Meaning("the kill switch: false stops all movement")] = Field(
        default_factory=left_out
    )
    observe: Annotated[bool, Meaning("plan and report, publish nothing")] = Field(
        default_factory=left_out
    )


@dataclass(frozen=True)
class ControlAnswer:
    """The switches as they are now."""

    deployment: str
    movement: bool
    observe: bool
    until: Annotated[
        float | None,
        Meaning("when movement resumes by itself, seconds since the epoch; null: it does not"),
    ]
    was_moving: Annotated[bool, Meaning("whether movement was on before the change")]
    run: Annotated[str | None, Meaning("the current run; null: none has begun")]
    num_ranks: Annotated[int, Meaning("live ranks of the run; 0: not known")]
    num_reported: Annotated[
        int | None,
        Meaning("ranks that reported after the change, within `wait_s`; null: not waited for"),
    ]


CHANGED = refused_with(ProblemType.SETTINGS_CHANGED)


@stops.post("/pause", responses=CHANGED)
def pause(live: Live, audit: Audited, revision: Revision, body: PauseRequest) -> ControlAnswer:
    """Stop all movement at once. The kill switch: no weight moves until it is resumed, or for
    `expires_s`.
    """
    return _switch(live, audit, revision, body, {"movement": False}, body.expires_s)


@acts.post("/resume", responses=CHANGED)
def resume(live: Live, audit: Audited, revision: Revision, body: SwitchRequest) -> ControlAnswer:
    """End a pause. Weights move again."""
    return _switch(live, audit, revision, body, {"movement": True})


@acts.patch("/control", responses=CHANGED)
def control(live: Live, audit: Audited, revision: Revision, body: ControlRequest) -> ControlAnswer:
    """Change switches. Switches that are not named stay as they are."""
    changes = body.model_dump(include={"movement", "observe"}, exclude_unset=True)
    if not changes:
        why = "the body names no switch, expected movement or observe"
        raise Refused(ProblemType.INVALID_REQUEST, why)
    return _switch(live, audit, revision, body, changes)


def _switch(
    live: LiveChange,
    audit: ChangeAudit,
    revision: int | None,
    body: SwitchRequest,
    changes: dict[str, Any],
    lasts_s: int | None = None,
) -> ControlAnswer:
    store, info = live.store, live.store.current_run()
    known = store.rank_states(info.run) if info is not None else []
    before = store.control()
    state = live.make(changes, expected=revision, reason=body.reason, lasts_s=lasts_s)
    reported = None
    if body.wait_s:
        audit.end(200)  # before the wait
        reported = 0 if info is None else _num_reported(live, info, known, body.wait_s)
    return ControlAnswer(
        deployment=store.deployment,
        movement=state.control.movement,
        observe=state.control.observe,
        until=state.until.get("movement"),
        was_moving=before.movement,
        run=info.run if info is not None else None,
        num_ranks=live.service.num_ranks(info),
        num_reported=reported,
    )


def _num_reported(live: LiveChange, info: RunInfo, known: Any, wait_s: float) -> int:
    """Wait for new reports of all ranks; return the number of ranks that reported in time."""
    before = {state.rank: state for state in known}
    deadline, expected = Deadline.after(wait_s, time.monotonic), live.service.num_ranks(info)
    while True:
        states = live.store.rank_states(info.run)
        reported: int = sum(before.get(state.rank) != state for state in states)
        is_over = deadline.has_passed
        if is_over or (reported and reported == max(expected, len(states))):
            return reported
        Event().wait(LOOK_S)


# -- commands

Wait = Annotated[
    float,
    Meaning("seconds to wait for reports of ranks; 0: no wait", at_least=0, at_most=MOST_WAIT_S),
]


def show_switch(found: dict[str, Any]) -> int:
    """Print a switch and the number of ranks that reported after it; 1: no rank did."""
    now, was = ("on" if found[name] else "off" for name in ("movement", "was_moving"))
    end = "" if found["until"] is None else f" until {at(found['until'])}"
    change = f"{found['deployment']}: movement {now}{end} (was {was})"
    reported, expected = found["num_reported"], found["num_ranks"]
    if reported is None:
        line(change)
        return 0
    ranks = f"{reported} of {counted(expected, 'rank')}" if expected else counted(reported, "rank")
    line(f"{change}; {ranks} of run {found['run']} reported since")
    if reported:
        return 0
    print_error("no rank reports to this store: the switch is written, and may have no effect")
    return 1


def ask_to_pause(
    ask: Ask,
    reason: Reason = WHY,
    lasts: Annotated[str | None, Meaning("resume after this time, as 90s, 30m, 2h or 1d")] = None,
    wait: Wait = REPORTS_WAIT_S,
) -> Answer:
    """Stop all movement of weights at once; serving continues. Exit status 1: no rank reported
    since.
    """
    expires_s = None if lasts is None else _seconds(lasts)
    return ask(pause, reason=reason, wait_s=wait, expires_s=expires_s)


def ask_to_resume(ask: Ask, reason: Reason = WHY, wait: Wait = REPORTS_WAIT_S) -> Answer:
    """Let weights move again. Exit status 1: no rank reported since."""
    return ask(resume, reason=reason, wait_s=wait)


def _seconds(text: str) -> int:
    found = re.fullmatch(r"([1-9][0-9]{0,6})([smhd])", text)
    seconds = int(found[1]) * UNITS_S[found[2]] if found else 0
    if not 0 < seconds <= MOST_LASTS_S:
        wanted = f"a whole number and s, m, h or d, {MOST_LASTS_S // 86_400}d at most, as 2h"
        raise ConfigError(f"--for is {text!r}, expected {wanted}")
    return seconds


command(
    "pause",
    "eplb pause --for 2h --reason 'change 4711'",
    ask_to_pause,
    of=pause,
    show=show_switch,
    names={"lasts": "for"},  # "for" is a keyword
)
command(
    "resume",
    "eplb resume --reason 'change 4711 is done'",
    ask_to_resume,
    of=resume,
    show=show_switch,
)
