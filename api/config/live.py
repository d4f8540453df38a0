"""Live settings: the part of the tree that a running deployment takes from its store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from typing import Annotated, Literal

from api.config.reference import toml_value
from api.config.tree import Settings
from eplb.declared import Meaning
from eplb.errors import ConfigError
from eplb.settings.tree import Known
from telemetry.state.live import LiveState, Value


@dataclass(frozen=True)
class LiveSetting:
    """One live setting of a deployment."""

    name: str
    value: Annotated[Value | None, Meaning("what applies; null: not known")]
    source: Literal["live", "static"]
    static: Annotated[Value | None, Meaning("with what the deployment was started")]
    revision: Annotated[int | None, Meaning("revision that set the live value")]
    time: Annotated[float | None, Meaning("when the live value was set")]
    reason: Annotated[str | None, Meaning("why the live value was set")]


@cache
def live_settings() -> Mapping[str, Known]:
    """The live settings by the name that the store has for them, which is without a section."""
    return {known.name: known for known in Settings.known.values() if known.about.live}


def static_layer(settings: Settings) -> dict[str, Value]:
    """The values with which a deployment starts."""
    return {name: settings.value(known) for name, known in live_settings().items()}


def parsed_changes(texts: Mapping[str, str | None]) -> dict[str, Value | None]:
    """Read the changes of ``--set`` by any of their names; None: the static value applies again.

    Raises:
        ConfigError: a name that is no live setting, or a value of the wrong type or range.
    """
    changes: dict[str, Value | None] = {}
    for name, text in texts.items():
        known = Settings.names.get(name)
        if known is None or not known.about.live:
            names = ", ".join(live_settings())
            raise ConfigError(f"--set {name} is no live setting, expected one of: {names}")
        if known.name in changes:
            raise ConfigError(f"{known.path} is given twice by --set, expected it once")
        changes[known.name] = None if text is None else known.read(text, f"--set {name}")
    return changes


def settings_in(state: LiveState) -> list[LiveSetting]:
    """Every live setting of a deployment."""
    found = []
    for name in live_settings():
        is_live, change = name in state.live, state.changes.get(name)
        found.append(
            LiveSetting(
                name,
                state.effective.get(name),
                "live" if is_live else "static",
                state.static.get(name),
                change.revision if change else None,
                change.time if change else None,
                change.reason if change else None,
            )
        )
    return found


def overriding(state: LiveState) -> list[str]:
    """Describe each live value that wins over another static one."""
    return [
        f"{one.name} is {toml_value(one.value)} ({_when(one)}), "
        f"which wins over the setting {toml_value(one.static)}"
        for one in settings_in(state)
        if one.source == "live" and one.static not in (None, one.value)
    ]


def live_page(deployment: str, state: LiveState) -> str:
    """The live settings of a deployment as TOML, with the source of each value."""
    lines, section = [f"# live settings of deployment {deployment}, revision {state.revision}"], ""
    for one in settings_in(state):
        if live_settings()[one.name].section != section:
            section = live_settings()[one.name].section
            lines += ["", f"[{section}]"]
        source = "static" if one.static is not None else "not set by the deployment"
        if one.source == "live":
            before = "" if one.static is None else f"; static: {toml_value(one.static)}"
            source = f"live, {_when(one)}{before}"
        shown = f"{one.name} = {toml_value(one.value)}"
        lines.append(f"{'# ' * (one.value is None)}{shown:<32} # {source}")
    return "\n".join(lines) + "\n"


def _when(setting: LiveSetting) -> str:
    if setting.time is None:
        return "of an unknown revision"
    clock = f"{datetime.fromtimestamp(setting.time, UTC):%Y-%m-%d %H:%M:%S} UTC"
    return f"revision {setting.revision}, {clock}: {setting.reason}"
