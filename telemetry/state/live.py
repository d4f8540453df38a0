"""Live settings: what a running deployment takes from its store.

Two layers. The static one has the values with which the deployment was started; each start replaces
it. The live one has what was set since, and wins: it outlasts restarts, so that no start switches
on what an operator has switched off. Only switches that let weights move end with the next start,
and a value that was set for a time ends with it (``expire_live``).
Every change has a revision, which a writer may compare first.

A store keeps one ``LiveState`` for each deployment: values by name. What settings there are, and
what values they may have, is declared by the components that take them (``Setting(live=True)``);
who changes them for a user checks that first. Only the switches are the store's own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from math import inf
from typing import Annotated, Any, TypeVar

from eplb.declared import Setting
from eplb.errors import ConfigError, StaleRevision, StoreError
from telemetry.state.backend import Change, Reader
from telemetry.state.events import SWITCHED, Switched, note
from telemetry.state.part import Part, Single

Value = bool | int | float | str
T = TypeVar("T")


@dataclass(frozen=True)
class Control:
    """Switches that every process follows at once.

    ``movement`` is the kill switch: while it is off no weight moves, and a migration in flight is
    dropped at the next vote. ``observe`` plans and reports but publishes nothing.
    """

    movement: Annotated[
        bool, Setting("the kill switch: off means that no weight moves", live=True)
    ] = True
    observe: Annotated[bool, Setting("plan and report, publish no migration", live=True)] = False


SWITCHES = tuple(switch.name for switch in fields(Control))
EXPIRED = "expired"  # begins the reason of the event


@dataclass(frozen=True)
class LiveChange:
    """When and why a live value was set."""

    revision: int
    time: float  # seconds since the epoch, by the store's clock
    reason: str
    by: str | None = None


@dataclass(frozen=True)
class LiveState:
    """Both layers of a deployment."""

    revision: int = 0  # grows with each change; 0: nothing was ever set
    static: Mapping[str, Value] = field(default_factory=dict)
    live: Mapping[str, Value] = field(default_factory=dict)
    # Latest change of each live value, by name.
    changes: Mapping[str, LiveChange] = field(default_factory=dict)
    until: Mapping[str, float] = field(default_factory=dict)  # end of live values set for a time

    def __post_init__(self) -> None:
        # A switch that is read as something else could let weights move.
        for layer in (self.static, self.live):
            for name in SWITCHES:
                if not isinstance(layer.get(name, True), bool):
                    raise ConfigError(f"{name} is {layer[name]!r}, expected true or false")

    @property
    def effective(self) -> Mapping[str, Value]:
        """What applies: the live value, else the static one."""
        return {**self.static, **self.live}

    @property
    def control(self) -> Control:
        """The switches that apply."""
        values: Mapping[str, Any] = self.effective
        return Control(**{name: values[name] for name in SWITCHES if name in values})

    def text(self, name: str) -> str:
        """What applies of a setting that is text; "" where no layer has it."""
        return str(self.effective.get(name, ""))


LIVE = Single(LiveState, "live", "the record of live settings")


class LivePart(Part):
    """Live settings, the switches that every process obeys among them."""

    def live(self) -> LiveState:
        """Return the live settings."""
        return live_in(self.backend)

    def change_live(
        self,
        changes: Mapping[str, Value | None],
        *,
        expected: int | None = None,
        reason: str,
        by: str | None = None,
        lasts_s: float | None = None,
    ) -> LiveState:
        """Set live values, and return what applies then; the change is an event.

        One that stops movement takes the room that is reserved for it, where the disk is full.

        Args:
            changes: by name; None: the static value applies again.
            expected: the revision that the caller has read; None: whatever it is now.
            reason: stored with the change.
            by: who makes it, stored with it; None: the program itself.
            lasts_s: after which the values are removed; None: they stay.

        Raises:
            ConfigError: no setting is named, a switch is neither true nor false, or the time is
                none.
            StaleRevision: another change came first.
        """

        def decision(change: Change) -> LiveState:
            return write_live(change, changes, expected, reason, by, lasts_s)

        try:
            return self.backend.decide("live settings", decision)
        except StoreError:
            if changes.get("movement") is not False or not self.backend.make_room():
                raise
            return self.backend.decide("live settings", decision)

    def expire_live(self) -> LiveState:
        """Remove live values whose time has passed by the store's clock; each end is an event.

        A controller calls this in each turn. Until then such a value applies: every process follows
        the same switches.
        """
        state = self.live()
        if not state.until:
            return state

        def decision(change: Change) -> LiveState:
            state = live_in(change)
            over = [name for name, end in state.until.items() if end <= change.time]
            if not over:
                return state
            reason = f"{EXPIRED}: {state.changes[over[0]].reason}"
            return write_live(change, dict.fromkeys(over), None, reason)

        return self.backend.decide("expiry of live settings", decision)

    def set_static(self, static: Mapping[str, Value], *, reason: str) -> LiveState:
        """Set with what the deployment was started; live values stay, and win.

        Not those of a switch that lets weights move: a start may be stricter than what an operator
        has set before it, and is never less strict.
        """

        def decision(change: Change) -> LiveState:
            state, free = live_in(change), vars(Control())
            dropped = [name for name in SWITCHES if state.live.get(name) is free[name]]
            state = put_live(
                change,
                LiveState(
                    state.revision + 1,
                    dict(static),
                    _without(state.live, dropped),
                    _without(state.changes, dropped),
                    _without(state.until, dropped),
                ),
            )
            note(change, SWITCHED, _switched(state, reason))
            return state

        return self.backend.decide("static settings", decision)

    def control(self) -> Control:
        """Return the switches that apply."""
        return self.live().control

    def set_control(self, control: Control, *, reason: str) -> None:
        """Set both switches as live values, at whatever revision."""
        self.change_live(vars(control), reason=reason)


def put_live(change: Change, state: LiveState) -> LiveState:
    """Write the live settings; a store that may have lost revisions raises theirs."""
    revision = max(state.revision, change.last("live") + 1)
    state = replace(state, revision=change.give_out("live", revision))
    LIVE.put(change, state)
    return state


def _without(values: Mapping[str, T], names: Collection[str]) -> dict[str, T]:
    return {name: value for name, value in values.items() if name not in names}


def live_in(reader: Reader) -> LiveState:
    """Return the live settings, also in the middle of a change."""
    return LIVE.get(reader) or LiveState()


def write_live(
    change: Change,
    changes: Mapping[str, Value | None],
    expected: int | None,
    reason: str,
    by: str | None = None,
    lasts_s: float | None = None,
) -> LiveState:
    """Write a change of live values with its events."""
    state = live_in(change)
    if not changes:
        raise ConfigError("no live setting is named, expected one or more")
    if lasts_s is not None and not 0 < lasts_s < inf:
        raise ConfigError(f"live settings are to last {lasts_s} s, expected more than 0 s")
    if expected is not None and expected != state.revision:
        raise StaleRevision(
            f"live settings are to be changed at revision {expected}, "
            f"found revision {state.revision}: read them again"
        )
    given = {name: value for name, value in changes.items() if value is not None}
    mark = LiveChange(state.revision + 1, change.time, reason, by)
    ends = {} if lasts_s is None else dict.fromkeys(given, change.time + lasts_s)
    state = put_live(
        change,
        replace(
            state,
            revision=mark.revision,
            live=_without(state.live, changes) | given,
            changes=_without(state.changes, changes) | dict.fromkeys(given, mark),
            until=_without(state.until, changes) | ends,
        ),
    )
    if changes.keys() & set(SWITCHES):
        note(change, SWITCHED, _switched(state, reason, by))
    others = {name: value for name, value in changes.items() if name not in SWITCHES}
    if others:
        detail = {"revision": state.revision, "live": others, "reason": reason}
        note(change, "settings", detail | ({} if by is None else {"actor": by}))
    return state


def _switched(state: LiveState, reason: str, by: str | None = None) -> Switched:
    until = state.until.get("movement")
    return Switched(state.control.movement, state.control.observe, reason, by, until)
