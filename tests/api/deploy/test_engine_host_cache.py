"""``eplb host-cache`` without a checkpoint keeps the records that a serving engine offers."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import pytest

from rebalance.engines.common.plugin_settings import settings_of
from rebalance.weights.cache.engine_records import EngineRecordsClient
from rebalance.weights.disk.record_file import RecordOrigin
from runtime.memory import PAGE_BYTES, SharedArena, digest
from telemetry import open_store
from tests.support.deployments import CommandProcess, clean_environ
from tests.support.limits import NEVER_S
from tests.support.redis_servers import free_port
from tests.support.repository import ROOT

ORIGIN = RecordOrigin("kinds", "model", num_layers=1, num_experts=2, record_bytes=PAGE_BYTES)


@pytest.mark.system
def test_rank_of_an_engine_finds_the_host_cache_of_its_deployment(tmp_path: Path) -> None:
    file = tmp_path / "eplb.toml"
    file.write_text(
        f"[deployment]\nname = 'engine-{os.getpid()}'\nstate_dir = '{tmp_path}'\n"
        f"[host_cache]\nrecord_folder = '{tmp_path / 'records'}'\n"
    )
    environ = clean_environ(EPLB_CONFIG=str(file), PYTHONPATH=str(ROOT))
    process = CommandProcess(["eplb", "host-cache"], tmp_path, environ)
    try:
        process.wait_for("ready: records that an engine offers")
        settings = settings_of({"EPLB_CONFIG": str(file)})
        assert settings is not None
        place = settings.place_of_records()
        assert place is not None
        arena = SharedArena("offer", PAGE_BYTES)
        with closing(EngineRecordsClient(place, ORIGIN, deadline_s=NEVER_S)) as client:
            offered = [((0, 1), digest(arena.bytes))]
            assert client.offer(offered, arena, deadline_s=NEVER_S) == ["memory"]
            assert client.lacks([(0, 0), (0, 1)], deadline_s=NEVER_S) == [(0, 0)]
        assert len(list((tmp_path / "records").iterdir())) == 1
    finally:
        process.kill()


@pytest.mark.system
def test_serve_shows_an_engine_without_a_model_and_starts_no_controller(tmp_path: Path) -> None:
    file = tmp_path / "eplb.toml"
    store = f"sqlite:{tmp_path / 'store.sqlite'}"
    file.write_text(
        f"[deployment]\nname = 'engine'\nstore = '{store}'\n[http]\nport = {free_port()}\n"
    )
    environ = clean_environ(EPLB_CONFIG=str(file), PYTHONPATH=str(ROOT))
    process = CommandProcess(["eplb", "serve"], tmp_path, environ)
    try:
        process.wait_for("eplb serve: an engine's plug-in leads, in")
        with closing(open_store(store, "engine")) as opened:
            assert opened.committed() is None
            assert opened.latest_lease() is None
    finally:
        process.kill()
