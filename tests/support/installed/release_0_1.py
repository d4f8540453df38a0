"""A rank, host cache and controller of release 0.1.0, which had no commands for them.

Runs under that release alone: ``python release_0_1.py start | cache | controller``, and
``build_rank_from_env`` for the engine of the deployment page. RELEASE_0_1 has what they need.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np

import eplb
from eplb import ModelShape, Topology
from eplb.decision.gate import CostModel
from eplb.migration.build import Pace
from eplb.migration.serialisation import model_to_dict, topology_to_dict
from telemetry import open_store
from telemetry.store import RunInfo

GIVEN: dict[str, Any] = json.loads(os.environ["RELEASE_0_1"])
MODEL = ModelShape((0, 1), num_experts=8, top_k=2, hidden=16, intermediate=8)
TOPOLOGY = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=GIVEN["slots"])
RUN = "of-0.1.0"


def start() -> None:
    """Write the first placement, and record the start of the ranks."""
    store = open_store(GIVEN["store"], GIVEN["name"])
    idle = np.ones((MODEL.num_layers, MODEL.num_experts), dtype=np.int64)
    first = eplb.plan(idle, TOPOLOGY, policy="contiguous").base.with_generation(0)
    store.commit(first, expected=None, reason="first placement")
    shapes = model_to_dict(MODEL), topology_to_dict(TOPOLOGY)
    store.begin_run(RunInfo(RUN, time.time(), *shapes, GIVEN["window_steps"]))
    store.close()


def run_controller() -> None:
    """Plan until SIGTERM."""
    from rebalance.build.controller import build_controller
    from rebalance.controller.loop import ControllerSettings

    pace, cost = Pace(staging_experts=GIVEN["slots"]), CostModel(pay_back_s=1e9)
    settings = ControllerSettings(cost=cost, pace=pace)
    controller = build_controller(settings, GIVEN["store"], GIVEN["name"])
    has_to_stop = until_terminated()
    print("controller: ready", flush=True)
    controller.run(has_to_stop.is_set)


def run_cache() -> None:
    """Give records until SIGTERM."""
    from rebalance.build.host_cache import build_host_cache
    from rebalance.preload.cache.settings import HostCacheSettings

    has_to_stop = until_terminated()
    weights = Path(GIVEN["weights"])
    cache = build_host_cache(HostCacheSettings(), cache_address(), MODEL, schema(), weights)
    print("cache: ready", flush=True)
    has_to_stop.wait()
    cache.close()


def until_terminated() -> Event:
    """Set by SIGTERM."""
    ended = Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    return ended


def schema() -> Any:
    """What an expert consists of."""
    from runtime.experts import ExpertSchema

    return ExpertSchema.swiglu(MODEL.hidden, MODEL.intermediate)


def cache_address() -> Any:
    """Where ranks find the cache."""
    from rebalance.preload.cache.wire import HostCacheAddress

    return HostCacheAddress(GIVEN["name"], bytes.fromhex(GIVEN["key"]))


@dataclass(frozen=True)
class Described:
    """What the engine asks of its deployment."""

    model: ModelShape
    checkpoint: Path


@dataclass(frozen=True)
class Rank:
    """As ``rebalance.build.environment.EmbeddedRank`` of later releases."""

    built: Any
    place: Any
    deployment: Described

    def __getattr__(self, name: str) -> Any:
        return getattr(self.built, name)

    def all_to_all(self) -> Any:
        """The plain dispatcher."""
        from runtime.dispatch.all_to_all import AllToAllDispatcher

        tokens, rank = self.place.groups.tokens, self.place.rank
        made = AllToAllDispatcher(TOPOLOGY, tokens, rank, self.built.counter)
        made.wait = self.built.agent.wait_for_exchange
        return made

    def close(self) -> None:
        """Write what is still to be reported."""
        self.built.close()
        self.built.store.close()

    def end_after_break(self) -> None:
        """No recovery here."""


def build_rank_from_env() -> Rank:
    """Build this process's rank."""
    import torch
    from torch.distributed import FileStore

    from rebalance.build.config import NetworkConfig, RankConfig
    from rebalance.build.experts import RankPlace
    from rebalance.build.group import join_ranks
    from rebalance.build.rank import build_rank

    rank, network = int(os.environ["RANK"]), NetworkConfig(interface="lo")
    device = torch.device("cpu")
    groups = join_ranks(network, FileStore(GIVEN["rendezvous"]), rank, 2, device)
    config = RankConfig(
        GIVEN["name"], GIVEN["sample_steps"], staging_experts=GIVEN["slots"], network=network
    )
    place = RankPlace(rank, RUN, TOPOLOGY, groups, device, cache_address())
    built = build_rank(config, place, MODEL, schema(), GIVEN["store"])
    return Rank(built, place, Described(MODEL, Path(GIVEN["weights"])))


if __name__ == "__main__":
    {"start": start, "cache": run_cache, "controller": run_controller}[sys.argv[1]]()
