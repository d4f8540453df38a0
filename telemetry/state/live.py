"""Live settings: what a running deployment takes from its store.

Two layers. The static one has the values with which the deployment was started; each start replaces
it. The live one has what was set since, and wins: it outlasts restarts, so that no start switches
on what an operator has switched off. Only switches that let weights move end with the next start,
and a value that was set for a time ends with it (``expired``).
Every change has a revision, which a writer may compare first.

A store keeps one ``LiveState`` for each deployment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from math import inf, isfinite
from typing import Any, get_type_hints

from eplb.errors import ConfigError, StaleRevision
from telemetry.state.backend import HEAD, Change, Reader
from telemetry.state.codec import encode, is_of
from telemetry.state.events import note
from telemetry.state.part import LIVE, Part, head

Value = bool | int | float | str


@dataclass(frozen=True)
class Control:
    """Switches that every process follows at once.

    ``movement`` is the kill switch: while it is off no weight moves, and a migration in flight is
    dropped at the next vote. ``observe`` plans and reports but publishes nothing.
    """

    movement: bool = True
    observe: bool = False


@dataclass(frozen=True)
class LiveSettings:
    """Settings that may change while a deployment runs; None: not set in this layer."""

    movement: bool | None = None
    observe: bool | None = None
    policy: str | None = None
    plan_windows: int | None = None
    pay_back_s: float | None = None
    max_moves: int | None = None  # 0: no limit
    target_imbalance: float | None = None
    migration_deadline_s: float | None = None
    keep_every_windows: int | None = None
    back_off_s: float | None = None
    task_expiry_s: float | None = None  # 0: tasks do not expire
    rollback_loss: float | None = None  # 0: no plan is taken back by rule
    # What is asked of the planner: see rebalance/controller/plans/planner_request.py and CostModel.
    objective: str | None = None
    dispatch: str | None = None
    min_domains: int | None = None
    curve: str | None = None
    rank_speed: str | None = None
    redundancy: str | None = None
    pins: str | None = None
    cordons: str | None = None
    decode_weight: float | None = None
    expert_part: float | None = None
    bytes_per_s: float | None = None
    seconds_per_rebalance: float | None = None
    far_moves: float | None = None
    node_traffic: float | None = None
    dead_zone: bool | None = None
    # When a plan is made: see eplb/decision/triggers.py. 0: that rule is off.
    interval_tokens: int | None = None
    interval_s: float | None = None
    start_imbalance: float | None = None
    rearm_imbalance: float | None = None
    cool_down_s: float | None = None
    # How much of a plan is carried out: see eplb/decision/rollout.py.
    stage: str | None = None
    stage_layers: int | None = None
    stage_loss: float | None = None  # 0: no step back by rule
    step_time_budget: float | None = None  # see eplb/decision/pace.py; 0: the pace is fixed

    def set_values(self) -> dict[str, Value]:
        """Return the values that are set, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def over(self, other: LiveSettings) -> LiveSettings:
        """Return these values, and the other's where none is set here."""
        return replace(other, **self.set_values())  # type: ignore[arg-type]


LIVE_NAMES = tuple(setting.name for setting in fields(LiveSettings))
_HINTS = get_type_hints(LiveSettings)
_AT_LEAST = {
    "plan_windows": 1,
    "pay_back_s": 0,
    "max_moves": 0,
    "target_imbalance": 1,
    "migration_deadline_s": 0,
    "keep_every_windows": 1,
    "back_off_s": 0,
    "task_expiry_s": 0,
    "rollback_loss": 0,
    "min_domains": 1,
    "decode_weight": 0,
    "expert_part": 0,
    "bytes_per_s": 1,
    "seconds_per_rebalance": 0,
    "far_moves": 0,
    "node_traffic": 0,
    "interval_tokens": 0,
    "interval_s": 0,
    "start_imbalance": 0,
    "rearm_imbalance": 0,
    "cool_down_s": 0,
    "stage_layers": 1,
    "stage_loss": 0,
    "step_time_budget": 0,
}


@dataclass(frozen=True)
class LiveChange:
    """When and why a live value was set."""

    revision: int
    time: float  # seconds since the epoch, by the store's clock
    reason: str


@dataclass(frozen=True)
class LiveState:
    """Both layers of a deployment."""

    revision: int = 0  # grows with each change; 0: nothing was ever set
    static: LiveSettings = LiveSettings()
    live: LiveSettings = LiveSettings()
    changes: Mapping[str, LiveChange] = field(default_factory=dict)  # of each live value, by name
    until: Mapping[str, float] = field(default_factory=dict)  # end of live values set for a time

    @property
    def effective(self) -> LiveSettings:
        """What applies: the live value, else the static one."""
        return self.live.over(self.static)

    @property
    def control(self) -> Control:
        """The switches that apply."""
        values = self.effective.set_values()
        switches = {name: values[name] for name in SWITCHES if name in values}
        return Control(**switches)  # type: ignore[arg-type]


SWITCHES = tuple(switch.name for switch in fields(Control))
EXPIRED = "expired"  # begins the reason of the event


class LivePart(Part):
    """Live settings, the switches that every process obeys among them."""

    def live(self) -> LiveState:
        """Return the live settings."""
        return _live_in(self.backend)

    def change_live(
        self,
        changes: Mapping[str, Value | None],
        *,
        expected: int | None = None,
        reason: str,
        lasts_s: float | None = None,
    ) -> LiveState:
        """Set live values, and return what applies then; the change is an event.

        Args:
            changes: by name; None: the static value applies again.
            expected: the revision that the caller has read; None: whatever it is now.
            reason: stored with the change.
            lasts_s: after which the values are removed; None: they stay.

        Raises:
            ConfigError: an unknown setting, or a value of another type or out of range.
            StaleRevision: another change came first.
        """

        def decision(change: Change) -> LiveState:
            return _change(change, changes, expected=expected, reason=reason, lasts_s=lasts_s)

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
            state = _live_in(change)
            over = expired(state, change.time)
            if not over:
                return state
            reason = f"{EXPIRED}: {state.changes[next(iter(over))].reason}"
            return _change(change, over, expected=None, reason=reason)

        return self.backend.decide("expiry of live settings", decision)

    def set_static(self, static: LiveSettings, *, reason: str) -> LiveState:
        """Set with what the deployment was started; live values stay, and win.

        Not those of a switch that lets weights move: the start may forbid it.
        """

        def decision(change: Change) -> LiveState:
            state = put_live(change, started(_live_in(change), static))
            note(change, "control", _control_detail(state, reason))
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
    change.put(HEAD, LIVE, encode(state))
    return state


def changed(
    state: LiveState,
    changes: Mapping[str, Value | None],
    *,
    expected: int | None,
    now: float,
    reason: str,
    lasts_s: float | None = None,
) -> LiveState:
    """Return the state after a change of live values.

    Args:
        changes: by name; None removes a live value, so that the static one applies again.
        expected: the revision that the writer has read; None: whatever it is now.
        now: seconds since the epoch, by the store's clock.
        lasts_s: for how long the values apply; None: until the next change of them.

    Raises:
        ConfigError: an unknown setting, or a value of another type or out of range.
        StaleRevision: another change came first.
    """
    values = checked(changes)
    if lasts_s is not None and not 0 < lasts_s < inf:
        raise ConfigError(f"live settings are to last {lasts_s} s, expected more than 0 s")
    if expected is not None and expected != state.revision:
        raise StaleRevision(
            f"live settings are to be changed at revision {expected}, "
            f"found revision {state.revision}: read them again"
        )
    revision = state.revision + 1
    kept = {name: mark for name, mark in state.changes.items() if name not in values}
    mark = LiveChange(revision, now, reason)
    marks = {name: mark for name, value in values.items() if value is not None}
    until = {name: end for name, end in state.until.items() if name not in values}
    if lasts_s is not None:
        until |= dict.fromkeys(marks, now + lasts_s)
    live = replace(state.live, **values)
    return replace(state, revision=revision, live=live, changes=kept | marks, until=until)


def expired(state: LiveState, now: float) -> dict[str, Value | None]:
    """Return the changes that remove live values whose time has passed; mostly none."""
    return {name: None for name, end in state.until.items() if end <= now}


def started(state: LiveState, static: LiveSettings) -> LiveState:
    """Return the state after a start with other static values.

    Live values stay, but for switches that let weights move: a start may be stricter than what an
    operator has set before it, and is never less strict.
    """
    free = vars(Control())
    dropped = {name: None for name in SWITCHES if getattr(state.live, name) is free[name]}
    changes = {name: change for name, change in state.changes.items() if name not in dropped}
    until = {name: end for name, end in state.until.items() if name not in dropped}
    live = replace(state.live, **dropped)
    return LiveState(state.revision + 1, static, live, changes, until)


def checked(changes: Mapping[str, Value | None]) -> dict[str, Any]:
    """Return changes whose names and values can be used.

    Raises:
        ConfigError: an unknown setting, or a value of another type or out of range.
    """
    if not changes:
        raise ConfigError("no live setting is named, expected one of: " + ", ".join(LIVE_NAMES))
    return {name: _checked(name, value) for name, value in changes.items()}


def _checked(name: str, value: Value | None) -> Value | None:
    if name not in LIVE_NAMES:
        known = ", ".join(LIVE_NAMES)
        raise ConfigError(f"{name!r} is no live setting, expected one of: {known}")
    if value is None:
        return None
    if not is_of(value, _HINTS[name]):
        kind = str(_HINTS[name]).removesuffix(" | None")
        raise ConfigError(f"{name} is {value!r}, expected a value of type {kind}")
    if isinstance(value, float) and not isfinite(value):
        raise ConfigError(f"{name} is {value}, expected a finite number")
    if name in _AT_LEAST and float(value) < _AT_LEAST[name]:
        raise ConfigError(f"{name} is {value}, expected {_AT_LEAST[name]} or more")
    return float(value) if "float" in str(_HINTS[name]) else value


def _live_in(reader: Reader) -> LiveState:
    return head(reader, LiveState, LIVE, "the record of live settings") or LiveState()


def _change(
    change: Change,
    changes: Mapping[str, Value | None],
    *,
    expected: int | None,
    reason: str,
    lasts_s: float | None = None,
) -> LiveState:
    """Write a change of live values with its events."""
    before = _live_in(change)
    state = put_live(
        change,
        changed(
            before, changes, expected=expected, now=change.time, reason=reason, lasts_s=lasts_s
        ),
    )
    if changes.keys() & set(SWITCHES):
        note(change, "control", _control_detail(state, reason))
    others = {name: value for name, value in changes.items() if name not in SWITCHES}
    if others:
        note(change, "settings", {"revision": state.revision, "live": others, "reason": reason})
    return state


def _control_detail(state: LiveState, reason: str) -> dict[str, Any]:
    until = state.until.get("movement")
    ends = {} if until is None else {"until": until}
    return vars(state.control) | {"reason": reason} | ends
