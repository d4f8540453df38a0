"""Which source reads a place: files and folders, or the store of a deployment."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from eplb.errors import ConfigError
from simulations.shadow.files import FileSource
from simulations.shadow.store_source import StoreSource
from simulations.shadow.windows import Source, SourceOptions
from telemetry.formats.table import STORE_SCHEMES, STORE_SUFFIXES


def open_source(places: Sequence[str], options: SourceOptions) -> Source:
    """The source of these places: files and folders, or one store.

    Raises:
        ConfigError: a store among other places, or a place that does not exist.
    """
    is_store = [
        one.startswith(STORE_SCHEMES) or Path(one).suffix in STORE_SUFFIXES for one in places
    ]
    if any(is_store):
        if len(places) > 1:
            raise ConfigError(f"a store and {len(places) - 1} other places, expected it alone")
        return StoreSource(places[0], options.read)
    missing = [one for one in places if not Path(one).exists()]
    if missing:
        raise ConfigError(f"{missing[0]} does not exist, expected a file, a folder or a store")
    return FileSource([Path(one) for one in places], options)
