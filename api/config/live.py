"""Live settings: the part of the tree that a running deployment takes from its store."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache

from api.config.reference import toml_value
from api.config.tree import Settings
from eplb.errors import ConfigError
from eplb.settings.tree import Known
from telemetry.state.live import LiveChange, LiveState, Value


@cache
def live_settings() -> Mapping[str, Known]:
    """The live settings by the name that the store has for them, which is without a section."""
    return {known.name: known for known in Settings.known.values() if known.about.live}


def static_layer(settings: Settings) -> dict[str, Value]:
    """The values with which a deployment starts."""
    return {name: settings.value(known) for name, known in live_settings().items()}


def parsed_changes(texts: Mapping[str, str | None], *, given_by: str) -> dict[str, Value | None]:
    """Read changes of live settings by any of their names; None: the static value applies again.

    Raises:
        ConfigError: a name that is no live setting, or a value of the wrong type or range.
    """
    changes: dict[str, Value | None] = {}
    for name, text in texts.items():
        known = Settings.names.get(name)
        if known is None or not known.about.live:
            names = ", ".join(live_settings())
            raise ConfigError(f"{given_by} {name} is no live setting, expected one of: {names}")
        if known.name in changes:
            raise ConfigError(f"{known.path} is given twice by {given_by}, expected it once")
        changes[known.name] = None if text is None else known.read(text, f"{given_by} {name}")
    return changes


def overriding(state: LiveState) -> list[str]:
    """Describe each live value that wins over another static one."""
    return [
        f"{name} is {toml_value(value)} ({_when(state.changes.get(name))}), "
        f"which wins over the setting {toml_value(state.static[name])}"
        for name, value in state.live.items()
        if name in state.static and state.static[name] != value
    ]


def live_page(deployment: str, state: LiveState) -> str:
    """The live settings of a deployment as TOML, with the source of each value."""
    lines = [f"# live settings of deployment {deployment}, revision {state.revision}"]
    static, section = state.static, ""
    for name, known in live_settings().items():
        if known.section != section:
            section = known.section
            lines += ["", f"[{section}]"]
        value = state.effective.get(name)
        shown = f"{name} = {toml_value(value)}"
        source = "static" if name in static else "not set by the deployment"
        if name in state.live:
            before = f"; static: {toml_value(static[name])}" if name in static else ""
            source = f"live, {_when(state.changes.get(name))}{before}"
        lines.append(f"{'# ' * (value is None)}{shown:<32} # {source}")
    return "\n".join(lines) + "\n"


def _when(change: LiveChange | None) -> str:
    if change is None:
        return "of an unknown revision"
    clock = f"{datetime.fromtimestamp(change.time, UTC):%Y-%m-%d %H:%M:%S} UTC"
    return f"revision {change.revision}, {clock}: {change.reason}"
