"""How a command line finds a store: a file that must exist, or a server.

A misspelt path must not make a new store, and a password is never shown.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from eplb.errors import ConfigError, StoreError
from telemetry import file_of, open_store
from telemetry.store import LoadStore
from telemetry.stores.redis.connection.address import without_password

DEFAULT_STORE = ".eplb/store.sqlite"

StoreUrl = Annotated[str, typer.Option(help="The store: a file, or a URL as redis://HOST:PORT.")]


def open_existing(url: str, deployment: str) -> LoadStore:
    """Open a store that a deployment has run in.

    Raises:
        ConfigError: the URL cannot be used.
        StoreError: there is no such file, the store cannot be used, or the deployment never ran.
    """
    path = file_of(url)
    if path is not None and not path.is_file():
        raise StoreError(f"there is no store at {path}, expected the file of a deployment")
    store = open_store(url, deployment)
    if store.current_run() is not None:
        return store
    store.close()
    shown = path or without_password(url)
    raise StoreError(f"deployment {deployment!r} has no run in {shown}, expected one")


def file_at(url: str, what: str) -> Path:
    """Give the file of a store, for ``what`` can only be done to a file.

    Raises:
        ConfigError: the store is no file.
    """
    path = file_of(url)
    if path is None:
        raise ConfigError(f"{what} needs the file of a store, found {without_password(url)!r}")
    return path
