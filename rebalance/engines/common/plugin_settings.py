"""Settings of an engine's plug-in, from the deployment's configuration file.

A serving process never imports ``api``, so this reads the few settings that it needs from the same
TOML file that the commands read. ``api/config/sections.py`` lists them for the commands.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_args

from eplb.core.load import Phase
from eplb.errors import ConfigError
from rebalance.engines.profiles import (
    PROFILE_VARIABLE,
    STORE_FILE,
    Places,
    check_choice,
    check_shared,
    profiles_of,
)

CONFIG_VARIABLE = "EPLB_CONFIG"
STATE_DIR = ".eplb"


@dataclass(frozen=True)
class EngineSettings:
    """Section ``engine``: which parts of the plug-in are on, and how it plans.

    Raises:
        ConfigError: a value is out of its range.
    """

    plan: bool = True  # plan in place of the engine
    shares: bool = True  # uneven shares by repeated ids; needs the policy
    tap: bool = True  # write loads and placements to the store
    mover: bool = True  # check the digests of moved experts
    check: bool = True  # compare live slots with the experts of the map, now and then
    records_gb: float = 0.0  # memory of a rank for records of experts; 0: none
    records_dir: str = ""  # folder of files with records of experts; "": none
    phase: str = "auto"  # of the engine's passes: auto, prefill, decode or mixed
    plan_time_ms: float = 16.0  # of search in each plan, counted in steps
    max_moved: float = 0.1  # part of all slots that one plan moves, after the first plan
    load_deadline_s: float = 60.0  # for all ranks of the group to load the plug-in

    def __post_init__(self) -> None:
        if self.phase not in ("auto", *get_args(Phase)):
            known = ", ".join(("auto", *get_args(Phase)))
            raise ConfigError(f"engine.phase is {self.phase!r}, expected one of: {known}")
        if not 0.0 <= self.max_moved <= 1.0:
            raise ConfigError(f"engine.max_moved is {self.max_moved}, expected 0 to 1")
        if not self.records_gb >= 0.0:
            raise ConfigError(f"engine.records_gb is {self.records_gb}, expected 0 or more")
        for name in ("plan_time_ms", "load_deadline_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"engine.{name} is {getattr(self, name)}, expected more than 0")


@dataclass(frozen=True)
class PluginSettings:
    """What the plug-in takes from the deployment's file."""

    deployment: str
    store: str
    engine: EngineSettings
    pay_back_s: float = 60.0
    target_imbalance: float = 1.02
    sample_steps: int = 16
    window_steps: int = 64
    spool_dir: Path | None = None


def settings_of(environ: Mapping[str, str]) -> PluginSettings | None:
    """Return the settings of the deployment that ``EPLB_CONFIG`` names; None where it names none.

    ``EPLB_PROFILE`` names the profile of a file with several.

    Raises:
        ConfigError: the file cannot be read, names no deployment, or has a wrong value.
    """
    if not environ.get(CONFIG_VARIABLE):
        return None
    path, profile = Path(environ[CONFIG_VARIABLE]), environ.get(PROFILE_VARIABLE) or None
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{CONFIG_VARIABLE} {path} cannot be read: {exc}") from exc
    profiles = profiles_of(tree, path)
    check_choice(profile, profiles, path)
    if profile is not None:
        tree = _with_profile(tree, profile, profiles[profile], path)
    deployment = _table(tree, "deployment", path)
    name = deployment.get("name")
    if not isinstance(name, str) or not name:
        raise ConfigError(
            f"{path}: deployment.name is {name!r}, expected the name of a deployment: without it "
            "the plug-in does nothing"
        )
    state_dir = Path(str(deployment.get("state_dir", STATE_DIR)))
    telemetry, planner = _table(tree, "telemetry", path), _table(tree, "planner", path)
    spool = telemetry.get("spool_dir")
    plain = {
        **_taken(planner, path, "planner", pay_back_s=60.0, target_imbalance=1.02),
        **_taken(telemetry, path, "telemetry", sample_steps=16, window_steps=64),
    }
    if plain["window_steps"] % plain["sample_steps"] or plain["sample_steps"] < 1:
        raise ConfigError(
            f"{path}: telemetry.sample_steps is {plain['sample_steps']}, expected a divisor of "
            f"telemetry.window_steps, {plain['window_steps']}"
        )
    return PluginSettings(
        name,
        str(deployment.get("store") or f"sqlite:{state_dir / STORE_FILE}"),
        _engine(_table(tree, "engine", path), path),
        spool_dir=None if spool is None else Path(str(spool)),
        **plain,
    )


def _with_profile(
    tree: Mapping[str, Any], profile: str, own: Mapping[str, Any], path: Path
) -> dict[str, Any]:
    """The file's tables with those of a profile above them."""
    of_file, given = _table(tree, "deployment", path), _table(own, "deployment", path)
    for section in own:
        for name in _table(own, section, path):
            check_shared(f"{section}.{name}", profile, path)
    merged = {
        section: {**_table(tree, section, path), **_table(own, section, path)} for section in own
    }
    base = Places(
        str(of_file.get("name") or ""),
        Path(str(of_file.get("state_dir", STATE_DIR))),
        str(of_file.get("store") or ""),
    )
    mine = base.of_profile(profile, name=given.get("name"), state_dir=given.get("state_dir"))
    places = {"state_dir": str(mine.state_dir), "store": mine.store}
    if base.name:  # without one the profile has to set it, as a file without profiles has
        places["name"] = mine.name
    return {**tree, **merged, "deployment": {**of_file, **given, **places}}


def _engine(table: Mapping[str, Any], path: Path) -> EngineSettings:
    known = {field.name: field.default for field in fields(EngineSettings)}
    for name in table:
        if name not in known:
            raise ConfigError(
                f"{path}: unknown setting engine.{name}, expected one of: {', '.join(known)}"
            )
    return EngineSettings(**_taken(table, path, "engine", **known))


def _taken(table: Mapping[str, Any], path: Path, section: str, **defaults: Any) -> dict[str, Any]:
    """The named settings of a table, each of the type of its default."""
    taken = {}
    for name, default in defaults.items():
        value = table.get(name, default)
        if isinstance(default, float) and type(value) is int:
            value = float(value)
        if type(value) is not type(default):
            raise ConfigError(
                f"{path}: {section}.{name} is {value!r}, expected {type(default).__name__}"
            )
        taken[name] = value
    return taken


def _table(tree: Mapping[str, Any], name: str, path: Path) -> Mapping[str, Any]:
    table = tree.get(name, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: {name} is {table!r}, expected a table")
    return table
