"""Ranks whose batches a configuration file splits: right outputs, and the split at work."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from api.config.tree import load
from eplb.core.model import ModelShape
from eplb.core.placement import Placement
from eplb.core.topology import Topology
from eplb.errors import ConfigError
from eplb.shares.switches import BatchSwitches
from rebalance.assembly.config import NetworkConfig, RankConfig
from rebalance.assembly.host_cache import build_host_cache
from rebalance.weights.cache.address import HostCacheAddress
from rebalance.weights.cache.cache_settings import HostCacheSettings
from runtime.batch.split_rule import EVERY_BATCH
from runtime.checkpoints.checkpoint import Checkpoint
from runtime.experts import ExpertSchema
from telemetry import open_store
from tests.support.limits import NEVER_S
from tests.support.models.batching_rank import BatchingSetup, Served, serve_switches
from tests.support.processes import ForkedProcess

# Experts 0 and 1 are on both ranks, 2, 3 and 4 on rank 0 alone, 5, 6 and 7 on rank 1.
START = Placement(np.tile([0, 1, 2, 3, 4, 5, 6, 7, 0, 1], (2, 1)), num_experts=8)
TOPOLOGY = Topology.uniform(1, 2, slots_per_rank=5)
Started = tuple[BatchingSetup, str]  # a start of ranks, and their file
Ranks = Callable[[list[Started]], list[list[list[Served]]]]
PAIRS = 24 * 2  # tokens of a rank times top-k
FILES = {
    "off": "",
    "split": "split = true",
}


def switches_of(text: str, folder: Path) -> BatchSwitches:
    path = folder / "eplb.toml"
    path.write_text(f"[batch]\n{text}\n")
    return load({}, config=path, environ={}).batch


def config_of(switches: BatchSwitches) -> RankConfig:
    return RankConfig(
        "test",
        sample_steps=4,
        staging_experts=4,
        network=NetworkConfig(interface="lo", join_deadline_s=NEVER_S),
        batch=switches,
        vote_deadline_s=NEVER_S,
        plan_deadline_s=NEVER_S,
    )


def keep_records(pipe: Connection, address: HostCacheAddress, weights: Path, *experts: Any) -> None:
    with closing(build_host_cache(HostCacheSettings(), address, *experts, weights)):
        pipe.send("ready")
        pipe.recv()


@pytest.fixture
def setup(
    small_model: ModelShape,
    small_schema: ExpertSchema,
    small_checkpoint: Checkpoint,
    tmp_path: Path,
    fork: Callable[..., ForkedProcess],
) -> BatchingSetup:
    url = f"sqlite:{tmp_path / 'store.sqlite'}"
    address = HostCacheAddress(f"batch-{os.getpid()}", os.urandom(16))
    weights = small_checkpoint.path
    with closing(open_store(url, "test")) as store:
        store.commit(START, expected=None, reason="start")
    # A process of its own: ranks are forked from this one, which has no other thread.
    assert fork(keep_records, address, weights, small_model, small_schema).receive() == "ready"
    return BatchingSetup(
        (), TOPOLOGY, address, small_model, small_schema, weights, url, ((0, 2), (2, 3))
    )


@pytest.fixture
def served(run_ranks: Callable[..., Any], tmp_path: Path) -> Ranks:
    """What two ranks find, by start, batch and rank."""

    def serve(starts: list[Started]) -> list[list[list[Served]]]:
        setups = [
            replace(setup, configs=(config_of(switches_of(text, tmp_path)),))
            for setup, text in starts
        ]

        def rank_of(rank: int) -> list[list[Served]]:
            return [found for setup in setups for found in serve_switches(rank, 2, setup)]

        return [
            list(zip(*start, strict=True)) for start in zip(*run_ranks(2, rank_of), strict=True)
        ]

    return serve


def test_every_switch_of_a_file_gives_the_outputs_of_the_reference(
    setup: BatchingSetup, served: Ranks
) -> None:
    starts = [(setup, text) for text in FILES.values()]
    found = dict(zip(FILES, served(starts), strict=True))

    errors = {name: max(one.max_error for b in of for one in b) for name, of in found.items()}
    assert max(errors.values()) <= 1e-5, errors
    # Experts 0 and 2: planned shares halve 0 beside all of 2; the batch's split makes ranks even.
    rows = {name: [one.routed for one in of[0]] for name, of in found.items()}
    assert rows["off"] == [72, 24]
    assert rows["split"] == [PAIRS, PAIRS]
    assert [of[0][0].reported for of in found.values()] == ["off", "split"]
    assert found["split"][0][0].before == "split: configured, and not made by this engine"


def test_split_that_does_not_fit_the_device_or_other_ranks_is_refused_on_all_ranks(
    setup: BatchingSetup, served: Ranks
) -> None:
    differ = replace(setup, rules=(EVERY_BATCH, replace(EVERY_BATCH, num_off=2)))
    wrong = {
        ('batch.exchange is "peer_memory" on a CPU', 'expected "group"'): (
            setup,
            'split = true\nexchange = "peer_memory"',
        ),
        ("rules of the ranks differ", "rank 1"): (differ, FILES["split"]),
    }

    for words, (ranks,) in zip(wrong, served(list(wrong.values())), strict=True):
        assert all(word in one.refusal for word in words for one in ranks), ranks


def test_exchange_over_memory_without_a_split_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"and batch\.split is false, expected true"):
        switches_of('exchange = "peer_memory"', tmp_path)
