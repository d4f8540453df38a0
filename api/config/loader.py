"""Loads the settings: flags over environment over a TOML file over defaults.

A file may have profiles, deployments of one model in one store (``rebalance/engines/profiles.py``):
the tables of the chosen one stand above the same tables of the file.

Every value keeps its source, so that an error can name it: one sentence with the setting, the value
found, the source, and what was expected. An unknown key is refused too, because a misspelt setting
that is ignored leads to wrong results.

This is the only file that reads settings from files or the environment, but for the plug-ins of
serving engines, which never import ``api`` (``rebalance/engines/common/plugin_settings.py``).
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from api.config.fields import bounds_of
from api.config.tree import ENV_PREFIX, Known, Settings, known_names, known_settings
from api.demo.settings import CUDA_DEFAULTS
from eplb.errors import ConfigError
from rebalance.engines.profiles import (
    PROFILE_VARIABLE,
    PROFILES,
    Places,
    check_apart,
    check_choice,
    check_shared,
    profiles_of,
)

CONFIG_VARIABLE = "EPLB_CONFIG"  # names the file where a command is given none
NOT_SETTINGS = frozenset(
    {
        CONFIG_VARIABLE,
        PROFILE_VARIABLE,
        "EPLB_SECRET",  # of the deployment: never shown beside settings (api/deploy/secret.py)
        "EPLB_HALT_FILE",  # as the next
        "EPLB_RANK_FILE",  # of a rank that `eplb launch` started (rebalance/build/environment.py)
        "EPLB_REPLAY",  # a trace that an engine routes by (rebalance/engines/vllm/tools/replay.py)
        "EPLB_REPLAY_PASSES",
        "EPLB_DATA",  # where tests and benchmarks find recorded traces
    }
)
DEFAULTS = "the defaults"
NAME, STATE_DIR, STORE = "deployment.name", "deployment.state_dir", "deployment.store"
LISTS = {"demo.text": os.pathsep, "topology.hosts": ","}  # separators in the environment


@dataclass(frozen=True)
class Loaded:
    """Settings, and where each value came from."""

    settings: Settings
    places: Mapping[str, str]  # by full name; one that is missing is a default

    def place_of(self, known: Known) -> str:
        """Give the place that a setting's value came from."""
        return self.places.get(known.path, DEFAULTS)


@dataclass(frozen=True)
class _Given:
    """One value, under the name and in the place where it was found."""

    name: str  # of a setting, in either form
    written: str  # as it stands there
    value: Any
    place: str


def load_settings(
    flags: Mapping[str, Any],
    *,
    config: Path | None,
    environ: Mapping[str, str],
    named: Mapping[str, Any] | None = None,
    named_by: str = "--setting",
) -> Settings:
    """Merge flags, environment, TOML file and defaults; see ``load``."""
    return load(flags, config=config, environ=environ, named=named, named_by=named_by).settings


def load(
    flags: Mapping[str, Any],
    *,
    config: Path | None,
    environ: Mapping[str, str],
    named: Mapping[str, Any] | None = None,
    named_by: str = "--setting",
    defaults: Mapping[str, Any] | None = None,
    profile: str | None = None,
) -> Loaded:
    """Merge flags, environment, TOML file and defaults, in this order of precedence.

    Args:
        flags: by setting name; None and an empty list mean that the flag was not given.
        config: the TOML file, or None for the one that EPLB_CONFIG names, if it does.
        environ: the process environment; ``EPLB_TEXT`` holds paths with the system's path
            separator between them, ``EPLB_TOPOLOGY__HOSTS`` addresses with commas.
        named: values of ``--setting NAME=VALUE``, which stand above all others.
        named_by: the flag that gives them.
        defaults: of the command, by full name, in place of those of the settings.
        profile: of the file, or None for the one that EPLB_PROFILE names, if it does.

    Raises:
        ConfigError: an unknown key, a setting that one place gives twice, a value of the wrong
            type or range, a file that cannot be read, or one with profiles of which none is chosen.
    """
    config = config or _named_file(environ)
    profile = profile or environ.get(PROFILE_VARIABLE) or None
    file, of_profiles = _from_file(config)
    check_choice(profile, of_profiles, config)
    own = of_profiles[profile] if profile else []
    given_flags = {key: value for key, value in flags.items() if value is not None and value != []}
    sources: tuple[Iterable[_Given], ...] = (
        file,
        own,
        _from_environment(environ),
        [_Given(key, key, value, f"flag {flag_name(key)}") for key, value in given_flags.items()],
        [_Given(key, key, value, f"{named_by} {key}") for key, value in (named or {}).items()],
    )
    values: dict[str, Any] = {}
    shared: dict[str, Any] = {}  # the same without what the profile sets
    places: dict[str, str] = {}
    for source in sources:
        written: dict[str, str] = {}
        for given in source:
            path = _known(given).path
            if path in written:
                raise ConfigError(
                    f"{path} is given as {written[path]!r} and as {given.written!r} in "
                    f"{given.place}, expected one of them"
                )
            written[path], values[path], places[path] = given.written, given.value, given.place
            if source is not own:
                shared[path] = given.value
    if values.get("demo.device") == "cuda":
        sizes = {f"demo.{name}": value for name, value in CUDA_DEFAULTS.items()}
        places = dict.fromkeys(sizes, "the defaults of device cuda") | places
        values = sizes | values
    values = dict(defaults or {}) | values
    if profile:
        derived = _own_places(profile, of_profiles, shared, config)
        values |= derived
        places |= dict.fromkeys(derived, f"{config}, profile {profile}")
    tree: dict[str, dict[str, Any]] = {}
    for path, value in values.items():
        section, _, name = path.partition(".")
        tree.setdefault(section, {})[name] = value
    try:
        return Loaded(Settings.model_validate(tree), places)
    except ValidationError as exc:
        raise ConfigError(_sentence(exc, places)) from exc


def flag_name(key: str) -> str:
    """Give the command-line flag of a setting."""
    return "--json" if key == "json_path" else "--" + key.replace("_", "-")


def profile_names(config: Path | None, environ: Mapping[str, str]) -> list[str]:
    """Give the profiles of the configuration file, in its order; empty without a file.

    Raises:
        ConfigError: as ``load``, of the file.
    """
    return list(_from_file(config or _named_file(environ))[1])


def _named_file(environ: Mapping[str, str]) -> Path | None:
    return Path(environ[CONFIG_VARIABLE]) if environ.get(CONFIG_VARIABLE) else None


def _from_file(config: Path | None) -> tuple[list[_Given], dict[str, list[_Given]]]:
    """The file's own settings, and those of each of its profiles."""
    if config is None:
        return [], {}
    try:
        tree = tomllib.loads(config.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError(f"settings file {config} cannot be read: {exc.strerror}") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"settings file {config} is not TOML: {exc}") from exc
    profiles = {
        name: _from_table(table, f"{config}, profile {name}")
        for name, table in profiles_of(tree, config).items()
    }
    for name, found in profiles.items():
        for given in found:
            check_shared(_known(given).path, name, config)
    file = _from_table({key: one for key, one in tree.items() if key != PROFILES}, str(config))
    return file, profiles


def _from_table(table: Mapping[str, Any], place: str) -> list[_Given]:
    found = []
    for key, value in table.items():
        if key not in Settings.model_fields:
            found.append(_Given(key, key, value, place))
        elif isinstance(value, dict):
            paths = [(f"{key}.{name}", one) for name, one in value.items()]
            found += [_Given(path, path, one, place) for path, one in paths]
        else:
            raise ConfigError(f"{key} is {_shown(value)} in {place}, expected a table [{key}]")
    return found


def _own_places(
    profile: str,
    of_profiles: Mapping[str, Iterable[_Given]],
    shared: Mapping[str, Any],
    config: Path | None,
) -> dict[str, Any]:
    """Name, state folder and store of a profile's deployment, as far as it does not set them."""
    default = Settings.model_fields["deployment"].default
    base = Places(
        str(shared.get(NAME, default.name)),
        Path(str(shared.get(STATE_DIR, default.state_dir))),
        str(shared.get(STORE, default.store)),
    )
    set_by = {
        name: {_known(given).path: given.value for given in found}
        for name, found in of_profiles.items()
    }
    each = {
        name: base.of_profile(name, name=own.get(NAME), state_dir=own.get(STATE_DIR))
        for name, own in set_by.items()
    }
    check_apart(each, config)
    mine = each[profile]
    derived = {NAME: mine.name, STATE_DIR: mine.state_dir, STORE: mine.store}
    return {path: one for path, one in derived.items() if path not in set_by[profile]}


def _from_environment(environ: Mapping[str, str]) -> list[_Given]:
    found = []
    for variable, text in sorted(environ.items()):
        if not variable.startswith(ENV_PREFIX) or variable in NOT_SETTINGS:
            continue
        name = variable.removeprefix(ENV_PREFIX).lower().replace("__", ".")
        given = _Given(name, variable, text, f"environment variable {variable}")
        separator = LISTS.get(_known(given).path)
        parts = text if separator is None else [one for one in text.split(separator) if one]
        found.append(_Given(name, variable, parts, given.place))
    return found


def _known(given: _Given) -> Known:
    """Find the setting that a name stands for."""
    names = known_names()
    if given.name in names:
        return names[given.name]
    candidates = [path for path, one in known_settings().items() if one.name == given.name]
    found = difflib.get_close_matches(given.name, names, n=3, cutoff=0.5)
    closest = candidates or found or [one.shown for one in known_settings().values()]
    is_variable = given.written.startswith(ENV_PREFIX)
    if is_variable:
        closest = [ENV_PREFIX + name.replace(".", "__").upper() for name in closest]
    place = "the environment" if is_variable else given.place
    raise ConfigError(
        f"unknown key {given.written!r} in {place}, closest known: {', '.join(closest)}"
    )


def _sentence(exc: ValidationError, places: Mapping[str, str]) -> str:
    """Report the first refusal in one sentence."""
    error = exc.errors(include_url=False)[0]
    known = known_settings()[".".join(map(str, error["loc"][:2]))]
    found, place = known.masked(error["input"]), places.get(known.path, DEFAULTS)
    return f"{known.shown} is {_shown(found)} in {place}, {_expected(error, known)}"


def _shown(value: object) -> str:
    return repr(value) if isinstance(value, str) else str(value)


def _expected(error: Mapping[str, Any], known: Known) -> str:
    """Translate what pydantic found."""
    limits, kind = error.get("ctx", {}), str(error["type"])
    if kind in ("greater_than_equal", "greater_than", "less_than_equal", "less_than"):
        return f"expected {bounds_of(known.field)}"
    words = {
        "literal_error": "{expected}",
        "finite_number": "a finite number",
        "string_too_short": "at least {min_length} character",
    }
    if kind == "value_error":
        return str(limits["error"])
    if kind in words:
        return "expected " + words[kind].format(**limits)
    kinds = {"int": "a whole number", "float": "a number", "bool": "true or false"}
    parts = "paths" if known.path == "demo.text" else "addresses"
    kinds |= {"path": "a path", "list": f"a list of {parts}", "string": "text"}
    wanted = kinds.get(kind.split("_")[0])
    return f"expected {wanted}" if wanted else str(error["msg"])
