"""A URL names the kind of store."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from eplb.core.placement import Placement
from eplb.errors import ConfigError, StoreError
from telemetry import deployments_of, open_store
from telemetry.store import RunInfo
from telemetry.stores.memory import MemoryStore
from telemetry.stores.redis.keys import deployment_of, pattern_of_all

PLACEMENT = Placement(np.array([[0, 1]]), num_experts=2)


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


def test_deployments_of_a_store_are_those_that_ran_or_have_a_placement(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    for name in ("b", "a", "misspelt"):
        with closing(open_store(path, name)) as store:
            if name == "a":
                store.begin_run(RunInfo("run-1", 1.0, {}, {}, 4))
            if name == "b":
                store.commit(PLACEMENT, expected=None, reason="first")

    assert deployments_of(path) == deployments_of(f"sqlite:{path}") == ["a", "b"]


def test_store_that_is_not_there_has_no_list(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="there is no store at"):
        deployments_of(tmp_path / "none.sqlite")
    with pytest.raises(ConfigError, match="unknown store"):
        deployments_of("mysql://host")


@pytest.mark.parametrize("prefix", ["eplb", "a*b?[c]"])
def test_keys_of_redis_name_deployments(prefix: str) -> None:
    assert deployment_of(f"{prefix}:{{r1-decode}}:placements", prefix) == "r1-decode"
    assert deployment_of(f"{prefix}:{{r1-decode}}:run_order", prefix) == "r1-decode"
    assert deployment_of(f"{prefix}:{{r1-decode}}:state", prefix) is None
    assert deployment_of("other:{r1-decode}:placements", prefix) is None
    assert pattern_of_all("a*b?[c]") == r"a\*b\?\[c\]:{*}:*"
