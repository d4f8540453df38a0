"""Profiles: several deployments of one model, described by one file, in one store.

A profile is a table ``[profiles.NAME]`` with sections of its own, which stand above the same
sections of the file. Prefill and decode clusters are two profiles: each has its own ranks, history,
plans and live settings. Model, checkpoint and store are the file's, so profiles cannot differ in
them.

``api/config/loader.py`` reads all of a profile, and an engine's plug-in the few settings that it
needs (``rebalance/engines/common/plugin_settings.py``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eplb.errors import ConfigError

PROFILE_VARIABLE = "EPLB_PROFILE"  # names the profile where a command is given none
PROFILES = "profiles"  # the table of all
SHARED_SECTIONS = ("demo", "model")
SHARED = ("deployment.store",)
NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")
STORE_FILE = "store.sqlite"  # in the state folder, where no store is named


@dataclass(frozen=True)
class Places:
    """Where a deployment keeps what is its own."""

    name: str  # in the store and on its hosts
    state_dir: Path
    store: str  # "": a file in the state folder

    def of_profile(self, profile: str, *, name: str | None, state_dir: str | Path | None) -> Places:
        """The places of a profile: one store, and a name and a state folder of its own.

        Args:
            profile: its name.
            name: of its deployment, if it sets one.
            state_dir: its state folder, if it sets one.
        """
        return Places(
            name or f"{self.name}-{profile}",
            Path(state_dir) if state_dir else self.state_dir / profile,
            self.store or str(self.state_dir / STORE_FILE),
        )


def profiles_of(tree: Mapping[str, Any], file: Path) -> Mapping[str, Mapping[str, Any]]:
    """The profiles of a configuration file, by name.

    Args:
        tree: all of the file.
        file: its path, for errors.

    Raises:
        ConfigError: something that is no table, or a name that is no part of a deployment's.
    """
    found = tree.get(PROFILES, {})
    if not isinstance(found, dict):
        raise ConfigError(f"{PROFILES} is {found!r} in {file}, expected tables [{PROFILES}.NAME]")
    for name, table in found.items():
        if not NAME.fullmatch(name):
            raise ConfigError(
                f"{file} has a profile {name!r}, expected up to 32 characters a-z, 0-9, _ and -"
            )
        if not isinstance(table, dict):
            raise ConfigError(
                f"{PROFILES}.{name} is {table!r} in {file}, expected a table [{PROFILES}.{name}]"
            )
    return found


def check_choice(profile: str | None, known: Mapping[str, Any], file: Path | None) -> None:
    """Refuse a profile that is not there, and a file with profiles of which none is chosen.

    Raises:
        ConfigError: either.
    """
    names = ", ".join(sorted(known))
    if profile is None and known:
        raise ConfigError(
            f"{file} has the profiles {names}, expected one of them by --profile or "
            f"{PROFILE_VARIABLE}"
        )
    if profile is not None and profile not in known:
        has = f"{file} has {f'the profiles {names}' if known else 'none'}"
        raise ConfigError(
            f"profile {profile!r} is asked for and {has if file else 'no settings file is given'}, "
            "expected one that the file has"
        )


def check_shared(path: str, profile: str, file: Path) -> None:
    """Refuse a setting in a profile that all profiles share.

    Args:
        path: ``section.name`` of the setting.
        profile: the one that sets it.
        file: with the profile.

    Raises:
        ConfigError: it is shared.
    """
    if path in SHARED or path.partition(".")[0] in SHARED_SECTIONS:
        raise ConfigError(
            f"profile {profile!r} sets {path} in {file}, expected it outside the profiles: all "
            "profiles serve one model from one store"
        )


def check_apart(places: Mapping[str, Places], file: Path | None) -> None:
    """Refuse profiles of one deployment: their samples, plans and journals would mix.

    Args:
        places: of each profile.
        file: with the profiles.

    Raises:
        ConfigError: two have one name, or one state folder.
    """
    for setting in ("name", "state_dir"):
        taken: dict[str, str] = {}
        for profile, one in places.items():
            found = str(getattr(one, setting))
            other = taken.setdefault(found, profile)
            if other != profile:
                raise ConfigError(
                    f"profiles {other!r} and {profile!r} of {file} have the deployment.{setting} "
                    f"{found!r}, expected another for each"
                )
