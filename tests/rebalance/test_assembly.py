"""The builders of a rank, a host's weight cache and a controller, used as an engine would.

Here and not in a folder ``build``: pytest does not look into folders of that name.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from pydantic import TypeAdapter

from eplb.core.model import ModelShape
from eplb.core.placement import Placement
from eplb.core.topology import Topology
from eplb.decision.expert_times import POINTS
from eplb.errors import ConfigError, RankError, StoreError
from rebalance.assembly.config import NetworkConfig, RankConfig, ReportingConfig
from rebalance.assembly.controller import build_controller
from rebalance.assembly.experts import torch_failures
from rebalance.assembly.group import join_votes
from rebalance.assembly.host_cache import build_host_cache
from rebalance.assembly.rank import build_rank
from rebalance.controller.loop import ControllerSettings
from rebalance.protocol.gloo_votes import GlooVotes
from rebalance.rank.group import Group
from rebalance.rank.watcher import POLL_S
from rebalance.stage.stage_settings import StageSettings
from rebalance.weights.cache.address import HostCacheAddress
from rebalance.weights.cache.cache_settings import HostCacheSettings
from runtime.checkpoints.checkpoint import Checkpoint
from runtime.experts import ExpertBank, ExpertSchema
from telemetry import open_store
from telemetry.load.reporter import Tempo
from telemetry.state.store import StateStore
from tests.support.launch import launch
from tests.support.limits import NEVER_S
from tests.support.local_group import LocalVotes
from tests.support.models.engine_rank import EngineSetup, serve
from tests.support.stores import MemoryStore
from tests.support.two_ranks import begin_run

SECRET = bytes(range(16))
RunRanks = Callable[[int, Callable[[int], Any]], list[Any]]
START = Placement(np.tile([0, 1, 2, 3, 4, 5, 6, 7, 0, 1], (2, 1)), num_experts=8)
TARGET = Placement(np.tile([0, 1, 5, 3, 4, 2, 6, 7, 0, 1], (2, 1)), num_experts=8)


def config_of(**given: Any) -> RankConfig:
    return RankConfig("test", sample_steps=4, staging_experts=4, **given)


@pytest.mark.parametrize(
    ("num_hosts", "has_own_weights"),
    [
        pytest.param(1, False, id="one host", marks=pytest.mark.slow),
        pytest.param(2, True, id="two hosts that share nothing", marks=pytest.mark.system),
    ],
)
def test_rank_embedded_in_an_engine_migrates_without_loading_api(
    small_checkpoint: Checkpoint,
    small_model: ModelShape,
    small_schema: ExpertSchema,
    tmp_path: Path,
    num_hosts: int,
    has_own_weights: bool,
) -> None:
    topology = Topology.uniform(num_hosts, 2 // num_hosts, slots_per_rank=5)
    url, run = f"sqlite:{tmp_path / 'store.sqlite'}", f"run-{os.getpid()}-{num_hosts}"
    caches = tuple(HostCacheAddress(f"{run}-{host}", os.urandom(16)) for host in range(num_hosts))
    config = config_of(
        network=NetworkConfig(interface="lo", join_deadline_s=NEVER_S),
        vote_deadline_s=NEVER_S,
        plan_deadline_s=NEVER_S,
        reporting=ReportingConfig(spool_dir=tmp_path / "spool", tempo=Tempo(0.0, 0.15)),
        journal_dir=tmp_path / "journal",
    )
    setup = EngineSetup(
        config,
        run,
        topology,
        caches,
        small_model,
        small_schema,
        small_checkpoint.path,
        url,
        TARGET,
        has_own_weights,
    )
    with ExitStack() as stack:
        store = stack.enter_context(closing(open_store(url, "test")))
        store.commit(START, expected=None, reason="start")
        begin_run(store, run, model=small_model, topology=topology)
        for address in caches:
            made = build_host_cache(
                HostCacheSettings(), address, small_model, small_schema, small_checkpoint.path
            )
            stack.enter_context(closing(made))
        found = launch(serve, 2, setup, deadline_s=NEVER_S)
        committed, states = store.committed(), store.rank_states(run)
        samples = store.samples(run)

    assert [one.foreign for one in found] == [[], []]
    assert [(one.generation, one.num_wrong) for one in found] == [(1, 0), (1, 0)]
    assert [one.num_moved for one in found] == [2, 2]
    source = "peer" if num_hosts == 1 else "host"  # each host has a cache of its own
    assert [one.bytes_by_source[source] for one in found] == [2 * small_schema.record_bytes] * 2
    assert committed is not None
    assert committed.placement.hash == TARGET.hash
    assert [state.phase for state in states] == ["idle", "idle"]
    assert [state.report_every_s for state in states] == [POLL_S + 0.15] * 2
    for times in [state.expert_times for state in states]:
        assert times is not None
        assert set(times.rows) <= set(POINTS)  # a busy machine shows no time for some of them
    assert {sample.phase for _, sample in samples} == {"decode"}
    assert sorted(path.name for path in (tmp_path / "journal").iterdir()) == [
        "rank-0000.jsonl",
        "rank-0001.jsonl",
    ]


CONFIG = """
deployment = "west"
sample_steps = 16
staging_experts = 8
scrub_every_steps = 0
journal_dir = "/var/lib/eplb/journal"

[network]
interface = "eth0"
hosts = ["10.0.0.1", "10.0.0.2"]
join_deadline_s = 90

[stage]
in_flight = 4
peer = { chunk_bytes = 1048576, bytes_per_second = 6e9 }

[reporting]
tempo = { store_interval = 0.5 }

"""


def test_rank_config_is_filled_from_toml_field_by_field() -> None:
    config = TypeAdapter(RankConfig).validate_python(tomllib.loads(CONFIG))

    assert (config.deployment, config.sample_steps, config.staging_experts) == ("west", 16, 8)
    assert config.network == NetworkConfig("eth0", ("10.0.0.1", "10.0.0.2"), join_deadline_s=90.0)
    assert config.stage_on("cpu").in_flight == 4
    assert config.reporting.tempo == Tempo(store_interval=0.5)
    assert config.journal_dir == Path("/var/lib/eplb/journal")
    assert config.host_of(1) == "10.0.0.2"
    assert config.vote_every == config_of().vote_every


def test_rank_config_of_strings_is_filled_as_from_an_environment() -> None:
    found = {"deployment": "west", "sample_steps": "16", "staging_experts": "8"}

    config = TypeAdapter(RankConfig).validate_python(found | {"vote_deadline_s": "2.5"})

    assert (config.sample_steps, config.vote_deadline_s) == (16, 2.5)


def test_staging_of_a_config_without_limits_is_that_of_the_device() -> None:
    config = config_of()

    assert config.stage_on("cpu") == StageSettings()
    assert config.stage_on("cuda") == StageSettings.while_serving()


@pytest.mark.parametrize(
    ("make", "name", "value"),
    [
        (config_of, "vote_every", 0),
        (config_of, "plan_deadline_s", -1.0),
        (config_of, "scrub_every_steps", -1),
        (NetworkConfig, "join_deadline_s", 0),
    ],
)
def test_config_out_of_range_is_refused(
    make: Callable[..., object], name: str, value: float
) -> None:
    with pytest.raises(ConfigError, match=f"{name} is {value}"):
        make(**{name: value})


def test_addresses_of_another_number_of_ranks_are_refused() -> None:
    config = config_of(network=NetworkConfig(hosts=("10.0.0.1",)))

    with pytest.raises(ConfigError, match=r"network\.hosts has 1"):
        config.check_ranks(2)


def refusal(
    model: ModelShape,
    experts: ExpertSchema | ExpertBank,
    store: StateStore,
) -> str:
    """Why the one rank of a group cannot be built."""
    topology = Topology.uniform(1, 1, slots_per_rank=10)
    group = Group(0, "run", topology, LocalVotes(1).member(0), control=dist.group.WORLD)
    nobody = HostCacheAddress("nobody", SECRET)
    try:
        build_rank(config_of(), group, nobody, model, experts, store)
    except (ConfigError, StoreError) as exc:
        return f"{type(exc).__name__}: {exc}"
    return "built"


def test_rank_that_does_not_fit_is_refused_before_it_waits_for_others(
    run_ranks: RunRanks, small_model: ModelShape, small_schema: ExpertSchema
) -> None:
    wide = ModelShape((0, 1, 2), 8, 2, hidden=16, intermediate=8)

    def build(rank: int) -> list[str]:
        empty, unbegun, filled = (MemoryStore("test") for _ in range(3))
        unbegun.commit(START, expected=None, reason="start")
        filled.commit(START, expected=None, reason="start")
        begin_run(filled, "run")
        bank = ExpertBank(small_schema, 2, 3, num_staging=1)
        return [
            refusal(small_model, small_schema, empty),
            refusal(small_model, small_schema, unbegun),
            refusal(wide, small_schema, filled),
            refusal(small_model, bank, filled),
        ]

    ((unplaced, unrecorded, other_model, other_bank),) = run_ranks(1, build)

    assert unplaced.startswith("StoreError: ")
    assert "StoreError: the store holds no record of run 'run'" in unrecorded
    assert "(layers, slots, experts) (2, 10, 8), expected (3, 10, 8)" in other_model
    assert "rank 0: a bank with (layers, slots) (2, 3) on cpu, expected (2, 10)" in other_bank


def test_death_of_a_peer_while_experts_are_prepared_is_named(
    run_ranks: RunRanks, small_model: ModelShape, small_schema: ExpertSchema
) -> None:
    """Each rank has filled its slots; rank 1 leaves the build when the agreement begins."""

    def build(rank: int) -> str:
        world = dist.group.WORLD
        assert world is not None
        votes = GlooVotes(world)
        group = Group(rank, "run-7", Topology.uniform(1, 2, slots_per_rank=5), votes)
        if rank == 1:
            votes.close(is_failure=True)
            return "left"
        try:
            with torch_failures(group, "its first experts"):
                raise RuntimeError("Connection closed by peer [127.0.0.1]:4242")  # as gloo's
        except RankError as exc:
            return str(exc)
        return "built"

    found, _ = run_ranks(2, build)

    assert found.startswith("rank 0: its first experts")
    assert "run-7 (rank 1 died)" in found


def test_votes_without_an_engines_group_are_refused() -> None:
    with pytest.raises(RankError, match="no default process group"):
        join_votes(config_of(), Topology.uniform(1, 1, slots_per_rank=10))


def test_controller_built_over_a_stores_url_takes_the_lease(
    tmp_path: Path, small_model: ModelShape
) -> None:
    url = f"sqlite:{tmp_path / 'store.sqlite'}"
    topology = Topology.uniform(1, 2, slots_per_rank=5)
    controller = build_controller(ControllerSettings(), url, "test", holder="first")
    with closing(open_store(url, "test")) as store:
        store.commit(START, expected=None, reason="start")
        begin_run(store, "run", model=small_model, topology=topology)
        controller.turn()
        lease = store.lease()

    assert lease is not None
    assert lease.holder == "first"
