"""Loads settings: flags over environment over a TOML file over defaults.

Every value keeps its place, so that an error can name it: one sentence with the setting, the value
found, the place, and what was expected. An unknown name is refused too, because a misspelt setting
that is ignored leads to wrong results. Commands and the plug-ins of serving engines read the file
with this, and nothing else reads it.

A file may have profiles: several deployments of one model in one store, such as a prefill and a
decode cluster. A profile is a table ``[profiles.NAME]`` with sections of its own, which stand above
the same sections of the file. Each has its own ranks, history, plans and live settings. Model and
store are the file's, so profiles cannot differ in them.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

from eplb.errors import ConfigError, shown
from eplb.settings.deployment import DeploymentSettings
from eplb.settings.left import SETTINGS_THAT_LEFT
from eplb.settings.tree import DEFAULTS, Known, SettingsTree

Tree = TypeVar("Tree", bound=SettingsTree)

ENV_PREFIX = "EPLB_"
CONFIG_VARIABLE = "EPLB_CONFIG"  # names the file where a command is given none
PROFILE_VARIABLE = "EPLB_PROFILE"  # names the profile where a command is given none
GROUP_VARIABLE = "EPLB_GROUP"  # names one of several engines that have one file
NOT_SETTINGS = frozenset(
    {
        CONFIG_VARIABLE,
        PROFILE_VARIABLE,
        GROUP_VARIABLE,  # read by rebalance/engines/common/start.py
        "EPLB_SECRET",  # read by rebalance/weights/link/secret.py, never shown beside settings
        "EPLB_KEY",  # read by api/cli/admin/client.py
        "EPLB_SERVICE",  # read by the commands that ask a service
        "EPLB_HALT_FILE",  # set by `eplb launch`, read by rebalance/assembly/places.py
        "EPLB_MEMBERS",  # set by `eplb launch`, read by rebalance/assembly/places.py
        "EPLB_JOINS",  # the same
        "EPLB_RANK_FILE",  # set by `eplb launch`, read by rebalance/assembly/description.py
        "EPLB_REPLAY",  # a trace of routing, read by rebalance/engines/vllm/replay.py
        "EPLB_REPLAY_PASSES",
        "EPLB_DATA",  # folder of recorded traces, read by tests and benchmarks
    }
)
COMMAND_DEFAULTS = f"{DEFAULTS} of the command"  # the place of a command's own default
PROFILES = "profiles"  # the table of all
PROFILE_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")
SHARED_SECTIONS = ("model",)
# A name that is nearer than this to a setting, by ``SequenceMatcher``, is a misspelt one, where a
# file has settings of others too. ``host_cache.record_file`` and ``.record_folder`` have 0.913.
MISSPELT = 0.92
NAME, STATE_DIR, STORE = "deployment.name", "deployment.state_dir", "deployment.store"


@dataclass(frozen=True)
class _Given:
    """One value, under the name and in the place where it was found."""

    name: str  # name of a setting, with or without its section
    written: str  # the text as it stands there
    value: Any
    place: str


def load(
    tree: type[Tree],
    flags: Mapping[str, Any],
    *,
    config: Path | None,
    environ: Mapping[str, str],
    named: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
    profile: str | None = None,
    reads_variables: bool = True,
) -> Tree:
    """Merge flags, environment, TOML file and defaults, in this order of precedence.

    Args:
        tree: what settings there are.
        flags: by setting name; None and an empty list mean that the flag was not given.
        config: the TOML file, or None for the one that EPLB_CONFIG names, if it does.
        environ: the process environment; paths in a variable are separated by colons, addresses by
            commas.
        named: values of ``--setting NAME=VALUE``, which stand above all others.
        defaults: of the command, by full name, in place of those of the settings.
        profile: of the file, or None for the one that EPLB_PROFILE names, if it does.
        reads_variables: whether variables of the environment are settings.

    Raises:
        ConfigError: an unknown name, a setting that one place gives twice, a value of the wrong
            type or range, a file that cannot be read, or one with profiles of which none is chosen.
    """
    config = config or _named_file(environ)
    profile = profile or environ.get(PROFILE_VARIABLE) or None
    file, profiles = _from_file(tree, config)
    _check_choice(profile, profiles, config)
    own = profiles[profile] if profile else []
    given_flags = {key: value for key, value in flags.items() if value not in (None, [])}
    sources: tuple[Iterable[_Given], ...] = (
        file,
        own,
        _from_environment(tree, environ) if reads_variables else (),
        [_Given(key, key, value, f"flag {flag_name(key)}") for key, value in given_flags.items()],
        [_Given(key, key, value, f"--setting {key}") for key, value in (named or {}).items()],
    )
    values: dict[str, Any] = {}
    shared: dict[str, Any] = {}  # the same without what the profile sets
    places: dict[str, str] = {}
    for source in sources:
        written: dict[str, str] = {}
        for given in source:
            known = _known(tree, given)
            if known is None:
                continue
            path = known.path
            if path in written:
                raise ConfigError(
                    f"{path} is given as {written[path]!r} and as {given.written!r} in "
                    f"{given.place}, expected one of them"
                )
            written[path], values[path], places[path] = given.written, given.value, given.place
            if source is not own:
                shared[path] = given.value
    # Only what applies is read: a flag may stand above a value that could not be used.
    read = {
        path: known.read(values[path], places[path])
        for path, known in tree.known.items()
        if path in values
    }
    values = dict(defaults or {}) | read
    places = dict.fromkeys(defaults or {}, COMMAND_DEFAULTS) | places
    for (path, value), more in tree.defaults_at.items():
        if values.get(path) == value:
            places = dict.fromkeys(more, f"{DEFAULTS} of {path} {value}") | places
            values = dict(more) | values
    if profile:
        derived = _own_places(tree, profile, profiles, shared, config)
        values |= derived
        by = f"{config}, profile {profile}"
        is_named = NAME in shared
        places |= {path: by for path in derived if path != NAME or is_named}
    settings = tree(values, places)
    settings.check()
    return settings


def flag_name(key: str) -> str:
    """The command-line flag of a setting."""
    return "--" + key.replace("_", "-")


def profile_names(
    tree: type[SettingsTree], config: Path | None, environ: Mapping[str, str]
) -> list[str]:
    """The profiles of the configuration file, in its order; empty without a file.

    Raises:
        ConfigError: as ``load``, of the file.
    """
    return list(_from_file(tree, config or _named_file(environ))[1])


def _named_file(environ: Mapping[str, str]) -> Path | None:
    return Path(environ[CONFIG_VARIABLE]) if environ.get(CONFIG_VARIABLE) else None


def _from_file(
    tree: type[SettingsTree], config: Path | None
) -> tuple[list[_Given], dict[str, list[_Given]]]:
    """The file's own settings, and those of each of its profiles."""
    if config is None:
        return [], {}
    try:
        tables = tomllib.loads(config.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError(f"settings file {config} cannot be read: {exc.strerror}") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"settings file {config} is not TOML: {exc}") from exc
    found = tables.pop(PROFILES, {})
    if not isinstance(found, dict):
        raise ConfigError(f"{PROFILES} is {found!r} in {config}, expected tables [{PROFILES}.NAME]")
    profiles = {}
    for name, table in found.items():
        if not PROFILE_NAME.fullmatch(name):
            raise ConfigError(
                f"{config} has a profile {name!r}, expected up to 32 characters a-z, 0-9, _ and -"
            )
        if not isinstance(table, dict):
            raise ConfigError(
                f"{PROFILES}.{name} is {table!r} in {config}, expected a table [{PROFILES}.{name}]"
            )
        profiles[name] = _from_table(tree, table, f"{config}, profile {name}")
        for given in profiles[name]:
            known = _known(tree, given)
            path = known.path if known else given.name
            if path == STORE or path.partition(".")[0] in SHARED_SECTIONS:
                raise ConfigError(
                    f"profile {name!r} sets {path} in {config}, expected it outside the profiles: "
                    "all profiles serve one model from one store"
                )
    return _from_table(tree, tables, str(config)), profiles


def _from_table(tree: type[SettingsTree], table: Mapping[str, Any], place: str) -> list[_Given]:
    found = []
    for key, value in table.items():
        is_section = key in tree.sections or key in SETTINGS_THAT_LEFT
        if isinstance(value, dict) and (is_section or tree.whole is not None):
            paths = [(f"{key}.{name}", one) for name, one in value.items()]
            found += [_Given(path, path, one, place) for path, one in paths]
        elif key in tree.sections:
            raise ConfigError(f"{key} is {shown(value)} in {place}, expected a table [{key}]")
        else:
            found.append(_Given(key, key, value, place))
    return found


def _check_choice(profile: str | None, profiles: Mapping[str, object], config: Path | None) -> None:
    """Refuse a profile that is not there, and a file with profiles of which none is chosen."""
    names = ", ".join(sorted(profiles))
    if profile is None and profiles:
        raise ConfigError(
            f"{config} has the profiles {names}, expected one of them by --profile or "
            f"{PROFILE_VARIABLE}"
        )
    if profile is not None and profile not in profiles:
        has = f"{config} has {f'the profiles {names}' if profiles else 'none'}"
        raise ConfigError(
            f"profile {profile!r} is asked for and "
            f"{has if config else 'no settings file is given'}, expected one that the file has"
        )


def _own_places(
    tree: type[SettingsTree],
    profile: str,
    profiles: Mapping[str, Sequence[_Given]],
    shared: Mapping[str, Any],
    config: Path | None,
) -> dict[str, Any]:
    """Name, state folder and store of a profile's deployment, as far as it does not set them.

    Two profiles of one name or folder are refused: their samples, plans and journals would mix.
    """
    base = DeploymentSettings(
        **{
            path.partition(".")[2]: tree.known[path].read(shared[path], str(config))
            for path in (NAME, STATE_DIR, STORE)
            if path in shared
        }
    )
    own, derived, taken = {}, {}, dict[tuple[str, str], str]()
    for name, found in profiles.items():
        own[name] = {known.path: one.value for one in found if (known := _known(tree, one))}
        derived[name] = {
            NAME: f"{base.name}-{name}",
            STATE_DIR: base.state_dir / name,
            STORE: base.store_url,
        }
        for path in (NAME, STATE_DIR):
            value = str(own[name].get(path, derived[name][path]))
            other = taken.setdefault((path, value), name)
            if other != name:
                raise ConfigError(
                    f"profiles {other!r} and {name!r} of {config} have the {path} {value!r}, "
                    "expected another for each"
                )
    return {path: one for path, one in derived[profile].items() if path not in own[profile]}


def _from_environment(tree: type[SettingsTree], environ: Mapping[str, str]) -> list[_Given]:
    found = []
    for variable, text in sorted(environ.items()):
        if not variable.startswith(ENV_PREFIX) or variable in NOT_SETTINGS:
            continue
        name = variable.removeprefix(ENV_PREFIX).lower().replace("__", ".")
        given = _Given(name, variable, text, f"environment variable {variable}")
        known = _known(tree, given)
        value: str | list[str] = text
        if known is not None and get_origin(known.kind) is tuple:
            separator = ":" if get_args(known.kind)[0] is Path else ","
            value = [one for one in text.split(separator) if one]
        found.append(_Given(name, variable, value, given.place))
    return found


def _known(tree: type[SettingsTree], given: _Given) -> Known | None:
    """The setting that a name stands for; None: it is one of others, in a file for them too."""
    names = tree.names
    if given.name in names:
        return names[given.name]
    section = given.name.partition(".")[0]
    if expected := SETTINGS_THAT_LEFT.get(given.name, SETTINGS_THAT_LEFT.get(section)):
        raise ConfigError(f"{given.written!r} in {given.place} is no setting any more: {expected}")
    is_of_others = tree.whole is not None and section not in tree.whole
    if is_of_others and not difflib.get_close_matches(given.name, tree.known, 1, MISSPELT):
        return None
    candidates = [path for path, one in tree.known.items() if one.name == given.name]
    found = difflib.get_close_matches(given.name, names, n=3, cutoff=0.5)
    closest = candidates or found or [one.shown for one in tree.known.values()]
    is_variable = given.written.startswith(ENV_PREFIX)
    if is_variable:
        closest = [ENV_PREFIX + name.replace(".", "__").upper() for name in closest]
    place = "the environment" if is_variable else given.place
    raise ConfigError(
        f"unknown key {given.written!r} in {place}, closest known: {', '.join(closest)}"
    )
