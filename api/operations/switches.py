"""Operations on the switches and the live settings: pause, resume, change.

A pause is the kill switch: every process follows it as soon as it reads the store. The answer can
wait for reports of ranks that follow the change, because a rank that reports to another store does
not read the switch either.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from api.access.keys import Role
from api.http.problems import ProblemType, Refused
from api.operations.declaration import (
    MOST_LASTS_S,
    NOT_GIVEN,
    V1,
    Answer,
    Ask,
    Call,
    Reason,
    ReasonRequest,
    command,
    operation,
)
from api.operations.printing import UNITS_S, WHY, at, line
from eplb.declared import Meaning

if TYPE_CHECKING:
    from telemetry.state.runs import RunInfo
    from telemetry.state.store import StateStore

REPORTS_WAIT_S = 3.0  # a command waits for reports: ranks send one every 0.25 s
MOST_WAIT_S = 5.0  # the request holds a thread of the service
LOOK_S = 0.05
FOR = {"lasts": "for"}  # option of the argument: "for" is a keyword


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class PauseRequest(SwitchRequest):
    """Stop all movement, for a time or until a resume."""

    shown: ClassVar[dict[str, Any]] = {"examples": [{"reason": "change 4711", "expires_s": 7200}]}

    expires_s: Annotated[
        int | None,
        Meaning(
            "time after which movement resumes by itself; null: only a resume ends the pause",
            at_least=1,
            at_most=MOST_LASTS_S,
        ),
    ] = None


@dataclass(frozen=True)
class ControlRequest(SwitchRequest):
    """Change switches; switches that are left out stay as they are."""

    shown: ClassVar[dict[str, Any]] = {
        "anyOf": [{"required": ["movement"]}, {"required": ["observe"]}]
    }

    movement: Annotated[bool, Meaning("the kill switch: false stops all movement")] = NOT_GIVEN
    observe: Annotated[bool, Meaning("plan and report, publish nothing")] = NOT_GIVEN


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


@operation(f"POST {V1}/pause", if_match="revision")
def pause(call: Call, body: PauseRequest) -> ControlAnswer:
    """Stop all movement at once. The kill switch: no weight moves until it is resumed, or for
    `expires_s`.
    """
    return _switch(call, body, {"movement": False}, body.expires_s)


@operation(f"POST {V1}/resume", if_match="revision")
def resume(call: Call, body: SwitchRequest) -> ControlAnswer:
    """End a pause. Weights move again."""
    return _switch(call, body, {"movement": True})


@operation(f"PATCH {V1}/control", if_match="revision")
def control(call: Call, body: ControlRequest) -> ControlAnswer:
    """Change switches. Switches that are not named stay as they are."""
    named = {"movement": body.movement, "observe": body.observe}
    changes = {name: value for name, value in named.items() if value is not NOT_GIVEN}
    if not changes:
        why = "the body names no switch, expected movement or observe"
        raise Refused(ProblemType.INVALID_REQUEST, why)
    return _switch(call, body, changes)


def _switch(
    call: Call, body: SwitchRequest, changes: dict[str, Any], lasts_s: int | None = None
) -> ControlAnswer:
    store, info = call.store, call.store.current_run()
    known = store.rank_states(info.run) if info is not None else []
    before = store.control()
    state = call.change_live(changes, reason=body.reason, lasts_s=lasts_s)
    reported = None
    if body.wait_s:
        call.done()
        reported = 0 if info is None else _num_reported(store, info, known, body.wait_s)
    return ControlAnswer(
        deployment=store.deployment,
        movement=state.control.movement,
        observe=state.control.observe,
        until=state.until.get("movement"),
        was_moving=before.movement,
        run=info.run if info is not None else None,
        num_ranks=_num_ranks(info),
        num_reported=reported,
    )


def _num_ranks(info: RunInfo | None) -> int:
    from eplb.migration.serialisation import topology_from_dict

    if info is None or not info.topology:
        return 0
    return int(topology_from_dict(dict(info.topology)).alive.sum())


def _num_reported(store: StateStore, info: RunInfo, known: Any, wait_s: float) -> int:
    """Wait for new reports of all ranks; return the number of ranks that reported in time."""
    import time
    from threading import Event

    from eplb.clock import Deadline

    before = {state.rank: state for state in known}
    deadline, expected = Deadline.after(wait_s, time.monotonic), _num_ranks(info)
    while True:
        states = store.rank_states(info.run)
        reported: int = sum(before.get(state.rank) != state for state in states)
        is_over = deadline.has_passed
        if is_over or (reported and reported == max(expected, len(states))):
            return reported
        Event().wait(LOOK_S)


# -- live settings

SETTINGS = "api.http.live_settings:SettingsAnswer"


@operation(f"GET {V1}/settings", answer=SETTINGS)
def settings(call: Call) -> Any:
    """Live settings. Each value, its source and its revision; the `ETag` is for `PATCH`."""
    from api.http.live_settings import settings_answer

    state = call.store.live()
    call.tag(state.revision)
    return settings_answer(state)


@operation(
    f"PATCH {V1}/settings",
    answer=SETTINGS,
    body="api.http.live_settings:SettingsRequest",
    if_match="known revision",
    role=Role.ADMIN,
)
def change_settings(call: Call, body: Any) -> Any:
    """Change live settings. At the revision in `If-Match`. Those that are not named stay; null
    removes a live value.
    """
    from api.http.live_settings import changes_in, settings_answer

    call.expected_revision()  # first: without the header it is refused whatever it names
    return settings_answer(call.change_live(changes_in(body), reason=body.reason))


# -- commands

Wait = Annotated[
    float,
    Meaning("seconds to wait for reports of ranks; 0: no wait", at_least=0, at_most=MOST_WAIT_S),
]


def show_switch(found: dict[str, Any]) -> int:
    """Print a switch and the number of ranks that reported after it; 1: no rank did."""
    from eplb.errors import counted

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
    from api.terminal.printable import print_error

    print_error("no rank reports to this store: the switch is written, and may have no effect")
    return 1


@command("pause", "eplb pause --for 2h --reason 'change 4711'", show=show_switch, names=FOR)
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


@command("resume", "eplb resume --reason 'change 4711 is done'", show=show_switch)
def ask_to_resume(ask: Ask, reason: Reason = WHY, wait: Wait = REPORTS_WAIT_S) -> Answer:
    """Let weights move again. Exit status 1: no rank reported since."""
    return ask(resume, reason=reason, wait_s=wait)


def _seconds(text: str) -> int:
    from eplb.errors import ConfigError

    found = re.fullmatch(r"([1-9][0-9]{0,6})([smhd])", text)
    seconds = int(found[1]) * UNITS_S[found[2]] if found else 0
    if not 0 < seconds <= MOST_LASTS_S:
        wanted = f"a whole number and s, m, h or d, {MOST_LASTS_S // 86_400}d at most, as 2h"
        raise ConfigError(f"--for is {text!r}, expected {wanted}")
    return seconds
