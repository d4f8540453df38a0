"""A URL names the kind of store."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from eplb.errors import ConfigError, StoreError
from eplb.settings.deployment import DeploymentSettings
from telemetry import deployments_of, open_store
from telemetry.state.redis_address import SCHEMES
from telemetry.state.runs import RunInfo
from telemetry.state.store import StateStore
from tests.support.redis_servers import RedisProcess
from tests.support.stores import make_placement, own_address


def test_url_names_the_kind_of_store(tmp_path: Path, redis_server: RedisProcess) -> None:
    path = tmp_path / "store.sqlite"
    for url in (path, str(path), f"sqlite:{path}"):
        with closing(open_store(url, "demo")) as opened:
            opened.add_event("note", {})

    with closing(open_store(path, "demo")) as again:
        assert len(again.events()) == 3
    assert isinstance(open_store("memory:", "demo"), StateStore)
    redis = f"{redis_server.url}/1?prefix=opened&timeout_s=3600&deadline_s=3600"
    with closing(open_store(redis, "demo")) as opened:
        assert isinstance(opened, StateStore)
        assert opened.backend.durability == "none"


@pytest.mark.parametrize("url", ["mysql://host", "memory:x", "sqlite:", "redis:host"])
def test_unknown_scheme_is_refused_with_those_known(url: str) -> None:
    with pytest.raises(ConfigError, match="memory:, sqlite:PATH, PATH") as caught:
        open_store(url, "demo")
    assert [scheme for scheme in SCHEMES if f" {scheme}://" not in str(caught.value)] == []


def test_deployments_of_a_store_are_those_that_ran_or_have_a_placement(
    tmp_path: Path, redis_server: RedisProcess
) -> None:
    path = tmp_path / "store.sqlite"
    prefix = own_address(redis_server.address).prefix + "a*b?[c]"
    urls = (str(path), f"{redis_server.url}?prefix={prefix}&timeout_s=3600&deadline_s=3600")
    for url in urls:
        for name in ("b", "a", "misspelt"):
            with closing(open_store(url, name)) as store:
                if name == "a":
                    store.begin_run(RunInfo("run-1", 1.0, {}, {}, 4))
                if name == "b":
                    store.commit(make_placement(1), expected=None, reason="first")

        assert deployments_of(url) == ["a", "b"]
    assert deployments_of(f"sqlite:{path}") == ["a", "b"]


def test_store_that_is_not_there_has_no_list(tmp_path: Path) -> None:
    with pytest.raises(StoreError):
        deployments_of(tmp_path / "none.sqlite")
    with pytest.raises(ConfigError):
        deployments_of("mysql://host")


@pytest.mark.parametrize(
    "name",
    [
        "",
        "../x",
        "a/../b",
        "/x",
        "x/",
        "a//b",
        "a b",
        "a\n",
        "a\x00b",
        "a\u2028b",
        "{a}",
        "a\\b",
        "x" * 129,
        None,
        3,
    ],
)
def test_name_that_no_deployment_may_have_is_refused_by_every_store(
    name: Any, tmp_path: Path, redis_server: RedisProcess
) -> None:
    for url in ("memory:", tmp_path / "store.sqlite", redis_server.url):
        with pytest.raises(ConfigError, match="cannot be used, expected 1 to 128 characters"):
            open_store(url, name)
    with pytest.raises(ConfigError, match="name is"):
        DeploymentSettings(name=name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["d", "west-2", "r1/pp0", "modèle.v3", "a:b_c"])
def test_names_of_deployments_and_their_groups_are_taken(name: str) -> None:
    open_store("memory:", name).close()
    assert DeploymentSettings(name=name).name == name
