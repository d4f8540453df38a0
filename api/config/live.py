"""Live settings: the part of the tree that a running deployment takes from its store."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache

from api.config.loader import load_settings
from api.config.reference import toml_value
from api.config.tree import Known, Settings, known_names, known_settings
from eplb.errors import ConfigError
from eplb.policies.table import policy_named
from rebalance.controller.plans.planner_request import (
    curve_of,
    read_cordons,
    read_pins,
    redundancy_of,
    speeds_of,
)
from telemetry.state.live import LiveChange, LiveSettings, LiveState, Value


@cache
def live_settings() -> Mapping[str, Known]:
    """Give the live settings by the name that the store has for them."""
    return {known.name: known for known in known_settings().values() if known.is_live}


def static_layer(settings: Settings) -> LiveSettings:
    """Give the values with which a deployment starts."""
    return LiveSettings(**{name: one.value_in(settings) for name, one in live_settings().items()})


def parsed_changes(texts: Mapping[str, str | None], *, given_by: str) -> dict[str, Value | None]:
    """Read changes of live settings by any of their names; None: the static value applies again.

    Raises:
        ConfigError: a name that is no live setting, or a value of the wrong type or range.
    """
    values = {name: text for name, text in texts.items() if text is not None}
    settings = load_settings({}, config=None, environ={}, named=values, named_by=given_by)
    changes: dict[str, Value | None] = {}
    for name, text in texts.items():
        known = known_names().get(name)
        if known is None or not known.is_live:
            names = ", ".join(live_settings())
            raise ConfigError(f"{given_by} {name} is no live setting, expected one of: {names}")
        changes[known.name] = None if text is None else known.value_in(settings)
    check_policy(changes)
    return changes


def check_policy(changes: Mapping[str, Value | None]) -> None:
    """Refuse a placement policy that is not there, and lists of figures that cannot be read.

    Raises:
        ConfigError: the policy is unknown, or a text is no list of speeds or of slots.
    """
    policy, speeds = changes.get("policy"), changes.get("rank_speed")
    if policy is not None:
        policy_named(str(policy))
    if speeds is not None:
        speeds_of(str(speeds))
    curve_of(str(changes.get("curve") or ""))
    redundancy_of(str(changes.get("redundancy") or ""))
    read_pins(str(changes.get("pins") or ""))
    read_cordons(str(changes.get("cordons") or ""))


def overriding(state: LiveState) -> list[str]:
    """Describe each live value that wins over another static one."""
    static, live = state.static.set_values(), state.live.set_values()
    return [
        f"{name} is {toml_value(value)} ({_when(state.changes.get(name))}), "
        f"which wins over the setting {toml_value(static[name])}"
        for name, value in live.items()
        if name in static and static[name] != value
    ]


def live_page(deployment: str, state: LiveState) -> str:
    """Give the live settings of a deployment as TOML, with the source of each value."""
    lines = [f"# live settings of deployment {deployment}, revision {state.revision}"]
    static, live = state.static.set_values(), state.live.set_values()
    section = ""
    for name, known in live_settings().items():
        if known.section != section:
            section = known.section
            lines += ["", f"[{section}]"]
        value = live.get(name, static.get(name))
        shown = f"{name} = {toml_value(value)}"
        source = "not set by the deployment"
        if name in static:
            source = "static"
        if name in live:
            before = f"; static: {toml_value(static[name])}" if name in static else ""
            source = f"live, {_when(state.changes.get(name))}{before}"
        lines.append(f"{'# ' * (value is None)}{shown:<32} # {source}")
    return "\n".join(lines) + "\n"


def _when(change: LiveChange | None) -> str:
    if change is None:
        return "of an unknown revision"
    clock = f"{datetime.fromtimestamp(change.time, UTC):%Y-%m-%d %H:%M:%S} UTC"
    return f"revision {change.revision}, {clock}: {change.reason}"
