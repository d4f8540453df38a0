"""Opens the store of a command: a file that must exist, or a server.

A misspelt path must not create a new store, and a password is never printed.
"""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

from api.config.tree import Settings, load
from eplb.errors import ConfigError, StoreError
from eplb.settings.loader import PROFILE_VARIABLE
from telemetry import file_of, open_store
from telemetry.state.store import StateStore, without_password


def configured_store(
    store: str | None = None, deployment: str | None = None, settings: Settings | None = None
) -> tuple[str, str]:
    """Give the URL of a deployment's store and its name, as given or else as configured.

    Args:
        store: as given on the command line.
        deployment: as given on the command line.
        settings: the configuration; None: that of the environment (``EPLB_CONFIG``, ...).

    Raises:
        ConfigError: the configuration cannot be used.
    """
    if store is not None and deployment is not None:
        return store, deployment
    configured = (settings or load({}, config=None, environ=os.environ)).deployment
    return store or configured.store_url, deployment or configured.name


def audit_folder(url: str) -> Path:
    """Return the folder whose audit has the changes of a store: as configured, or its own.

    A file that deployments of several profiles share has none: each has its own state folder.

    Raises:
        ConfigError: the configuration cannot be used.
    """
    path, is_shared = file_of(url), PROFILE_VARIABLE in os.environ
    if path is not None and path.is_file() and not is_shared:
        return path.parent
    return load({}, config=None, environ=os.environ).deployment.state_dir


def deployments_with_runs(url: str, deployment: str) -> list[str]:
    """Return the deployments of the EP groups of a deployment, or itself where it is one group.

    Raises:
        ConfigError, StoreError: as ``open_existing``.
    """
    with closing(open_existing(url, deployment)) as store:
        return store.groups() or [deployment]


def open_existing(url: str, deployment: str) -> StateStore:
    """Open a store that a deployment has run in.

    Raises:
        ConfigError: the URL cannot be used.
        StoreError: there is no such file, the store cannot be used, or the deployment never ran.
    """
    path = file_of(url)
    if path is not None and not path.is_file():
        raise StoreError(f"there is no store at {path}, expected the file of a deployment")
    store = open_store(url, deployment)
    if store.current_run() is not None or store.committed() is not None or store.groups():
        return store
    store.close()
    shown = path or without_password(url)
    raise StoreError(f"deployment {deployment!r} has no run in {shown}, expected one")


def file_at(url: str, what: str) -> Path:
    """Path of a store's file, which ``what`` needs.

    Raises:
        ConfigError: the store is not a file.
    """
    path = file_of(url)
    if path is None:
        raise ConfigError(f"{what} needs the file of a store, found {without_password(url)!r}")
    return path
