"""A URL names the kind of store."""

from __future__ import annotations

from pathlib import Path

import pytest

from eplb.errors import ConfigError
from telemetry import open_store
from telemetry.stores.memory import MemoryStore


def test_url_names_the_kind_of_store(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    for url in (path, str(path), f"sqlite:{path}"):
        opened = open_store(url, "demo")
        opened.add_event("note", {})
        opened.close()

    again = open_store(path, "demo")
    assert isinstance(open_store("memory:", "demo"), MemoryStore)
    assert len(again.events()) == 3
    again.close()


@pytest.mark.parametrize("url", ["mysql://host", "memory:x", "sqlite:", "redis:host"])
def test_unknown_scheme_is_refused_with_those_known(url: str) -> None:
    with pytest.raises(ConfigError, match="expected one of: memory:, sqlite:PATH, PATH"):
        open_store(url, "demo")


def test_version_of_samples_that_cannot_be_written_is_refused() -> None:
    with pytest.raises(ConfigError, match="samples of version 3 asked for, expected one of: 1, 2"):
        open_store("memory:", "demo", sample_version=3)
