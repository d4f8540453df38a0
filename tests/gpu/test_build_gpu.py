"""A rank on a GPU, built as an engine would: its slots in symmetric memory, pulled by its peer."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("zstandard", reason="the store packs samples with it")

from eplb.core.model import ModelShape
from eplb.core.placement import Placement
from eplb.core.topology import Topology
from rebalance.assembly.config import RankConfig
from rebalance.assembly.host_cache import build_host_cache
from rebalance.weights.cache.address import HostCacheAddress
from rebalance.weights.cache.cache_settings import HostCacheSettings
from runtime.checkpoints.own_model import write_random_checkpoint
from runtime.experts import ExpertSchema
from telemetry import open_store
from tests.support.launch import launch
from tests.support.limits import NEVER_S
from tests.support.models.engine_rank import EngineSetup, serve
from tests.support.two_ranks import begin_run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs of one host"),
]
MODEL = ModelShape((0, 1), 8, 2, hidden=256, intermediate=128)
SCHEMA = ExpertSchema.swiglu(MODEL.hidden, MODEL.intermediate, torch.bfloat16)
START = Placement(np.tile([0, 1, 2, 3, 4, 5, 6, 7, 0, 1], (2, 1)), num_experts=8)
TARGET = Placement(np.tile([0, 1, 5, 3, 4, 2, 6, 7, 0, 1], (2, 1)), num_experts=8)


def test_two_gpu_ranks_that_the_builder_made_swap_experts(tmp_path: Path) -> None:
    url, run = f"sqlite:{tmp_path / 'store.sqlite'}", f"gpu-run-{os.getpid()}"
    address, weights = HostCacheAddress(run, os.urandom(16)), tmp_path / "weights"
    write_random_checkpoint(weights, MODEL, SCHEMA, vocabulary=64, seed=1)
    config = RankConfig("test", sample_steps=4, staging_experts=4)
    topology = Topology.uniform(1, 2, slots_per_rank=5)
    setup = EngineSetup(
        config,
        run,
        topology,
        (address,),
        MODEL,
        SCHEMA,
        weights,
        url,
        TARGET,
        has_own_weights=False,
        on_gpus=True,
    )
    with (
        closing(open_store(url, "test")) as store,
        closing(build_host_cache(HostCacheSettings(), address, MODEL, SCHEMA, weights)),
    ):
        store.commit(START, expected=None, reason="start")
        begin_run(store, run, model=MODEL, topology=topology)
        found = launch(serve, 2, setup, deadline_s=NEVER_S)

    assert [(one.generation, one.num_wrong, one.num_moved) for one in found] == [(1, 0, 2)] * 2
    assert [one.bytes_by_source["peer"] for one in found] == [2 * SCHEMA.record_bytes] * 2
