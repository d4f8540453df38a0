"""What the demo needs before its first process starts: every refusal that can come early does."""

from __future__ import annotations

import hashlib
import logging
import math
import secrets
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from api.demo.settings import DemoSettings
from api.demo.state_dir import StateDir
from api.demo.text import VOCABULARY, domains_of, standard_domains
from api.demo.workers.plan import SEQUENCE_LENGTH, Reporting, WorkerPlan, schema_of
from eplb.core.model import ModelShape
from eplb.core.placement import Placement, check_fits
from eplb.core.topology import Topology
from eplb.decision.gate import CostModel
from eplb.errors import ConfigError, StoreError
from eplb.migration.build import Pace
from eplb.migration.serialisation import model_to_dict, topology_to_dict
from eplb.migration.spares import compact
from eplb.planner import plan as make_plan
from eplb.policies.table import policy_named
from rebalance.controller.lease import new_holder
from rebalance.controller.loop import ControllerSettings
from rebalance.preload.cache.server import HostCacheAddress, HostCacheSettings
from rebalance.preload.hosts.settings import HostLinkSettings
from rebalance.preload.records.record_file import record_file_beside
from rebalance.transport.ranks.settings import RankLinkSettings
from runtime.checkpoint import Checkpoint, write_random_checkpoint
from runtime.model.moe import NUM_HEADS
from simulations.traces import read_expert_ids
from telemetry.reporter.drain import Tempo
from telemetry.retention.pruning import Retention
from telemetry.store import Control, LoadStore, RunInfo

SAMPLES_PER_WINDOW = 4
HOSTS_PORT = 23718  # of host caches; ranks have the next ones. Below the ephemeral ports

LOST_GENERATIONS = 1000  # left out where nobody knows how far they had come

log = logging.getLogger(__name__)


def prepare(settings: DemoSettings, state: StateDir) -> WorkerPlan:
    """Write weights and text, and lay out what every process is told. Starts nothing.

    Raises:
        ConfigError: settings, text or trace that cannot be used.
        CheckpointError: weights on disk that are damaged or of another model.
    """
    policy_named(settings.policy)
    _check_shape(settings)
    model, trace = _model(settings, state)
    slots_per_rank = settings.slots // settings.ranks + settings.spare_slots
    topology = Topology.uniform(settings.nodes, settings.ranks // settings.nodes, slots_per_rank)
    pace = _pace(settings)
    tokens_per_step = settings.ranks * settings.tokens_per_rank
    sample_steps = max(1, round(settings.window_tokens / tokens_per_step / SAMPLES_PER_WINDOW))
    window_steps = sample_steps * math.ceil(settings.window_tokens / tokens_per_step / sample_steps)
    run = new_run_name()
    text = None if trace is not None else _text(settings, state)
    weights = _weights(settings, state, model)
    return WorkerPlan(
        run=run,
        store=settings.store or state.store,
        weights=weights,
        text=text,
        trace=trace,
        model=model,
        topology=topology,
        host_caches=tuple(
            HostCacheAddress(f"{run}-host{host}", secrets.token_bytes(16))
            for host in range(settings.nodes)
        ),
        rendezvous="",  # another for each start of the ranks
        tokens_per_rank=settings.tokens_per_rank,
        window_steps=window_steps,
        window_seconds=settings.window_seconds,
        sample_steps=sample_steps,
        check_every=settings.check_every,
        drift_period_s=settings.seconds,
        seed=settings.seed,
        staging_experts=pace.staging_experts,
        device=settings.device,
        precision=settings.precision,
        dispatcher=settings.dispatcher,
        controller=ControllerSettings(
            policy=settings.policy,
            plan_windows=settings.plan_windows,
            cost=CostModel(pay_back_s=settings.pay_back_s),
            pace=pace,
            seed=settings.seed,
            retention=Retention(
                settings.keep_samples_s,
                settings.keep_minutes_s,
                settings.keep_hours_s,
                settings.keep_events,
            ),
            lease_ttl_s=settings.lease_ttl_s,
        ),
        holder=new_holder(),
        host_cache=_host_cache(settings, weights, model),
        rank_links=_rank_links(settings),
        reporting=Reporting(
            settings.spool_dir or state.path / "spool",
            settings.spool_mb * 1_000_000,
            Tempo(write_s=settings.store_interval),
            settings.sample_version,
        ),
        scrub_every_steps=settings.scrub_every_steps,
        plan_deadline_s=settings.plan_deadline_s,
        vote_deadline_s=settings.vote_deadline_s,
    )


def begin(settings: DemoSettings, plan: WorkerPlan, store: LoadStore) -> Placement:
    """Record the start of a run, and the placement that it starts from.

    Contiguous, or with ``resume`` the one that the last run ended with.
    """
    committed = store.committed()
    generation = None if committed is None else committed.placement.generation
    store.set_control(
        Control(movement=settings.movement, observe=settings.observe), reason="start of the demo"
    )
    if settings.resume:
        if committed is None:
            raise ConfigError(f"{plan.store_shown} holds no placement to resume from, expected one")
        start = committed.placement
        found = (start.num_layers, start.num_experts)
        if found != (plan.model.num_layers, plan.model.num_experts):
            raise ConfigError(
                f"the placement in {plan.store_shown} has {found[0]} layers x {found[1]} experts, "
                f"expected {plan.model.num_layers} x {plan.model.num_experts} to resume"
            )
        check_fits(start, plan.topology)
        compact(start, plan.topology, plan.spare_slots)  # refuses one that leaves no spares
    else:
        idle = np.ones((plan.model.num_layers, plan.model.num_experts), dtype=np.int64)
        # Spread evenly over the ranks, it leaves their spares EMPTY.
        start = make_plan(idle, plan.topology, policy="contiguous").base
        start = start.with_generation(0 if generation is None else generation + 1)
        store.commit(start, expected=generation, reason="start of the demo: contiguous")
    _record_start(plan, store)
    return start


def begin_again(plan: WorkerPlan, store: LoadStore, start: Placement) -> WorkerPlan:
    """Record another start after a death, from what is committed; return the plan for it.

    Under a name of its own: samples count from zero, and would pass for repeats of the last run's.

    Args:
        start: the run's first placement. The new ranks load it where the store lost its contents
            after the last rank had ended: every legal placement gives right answers.
    """
    plan = replace(plan, run=new_run_name())
    if store.committed() is None:
        log.error("the store lost its contents: all ranks start from the run's first placement")
        start = start.with_generation(start.generation + LOST_GENERATIONS)
        store.commit(start, expected=None, reason="the store lost its contents")
    _record_start(plan, store)
    return plan


def give_up_lease(plan: WorkerPlan, store: LoadStore) -> None:
    """Let whoever comes next lead at once, now that this demo's controller has ended."""
    try:
        lease = store.lease()
        if lease is not None and lease.holder == plan.holder:
            store.release_lease(lease)
    except StoreError as exc:  # the demo has served all the same, and the lease runs out
        log.warning("the lease was not given up: %s", exc)


def new_run_name() -> str:
    """Name a start of the serving processes; sorts by time."""
    return f"{time.strftime('%Y%m%dT%H%M%S')}-{secrets.token_hex(3)}"


def _record_start(plan: WorkerPlan, store: LoadStore) -> None:
    open_migration = store.published()
    if open_migration is not None:
        store.withdraw(
            open_migration.plan_id, outcome="rejected", reason="the run it was made for has ended"
        )
    store.begin_run(
        RunInfo(
            plan.run,
            time.time(),
            model_to_dict(plan.model),
            topology_to_dict(plan.topology),
            plan.window_steps,
            plan.window_seconds,
        )
    )


def _host_cache(settings: DemoSettings, weights: Path, model: ModelShape) -> HostCacheSettings:
    """How every host keeps records; the file is shared, as the weights are."""
    records = settings.host_cache_records
    return HostCacheSettings(
        mode=settings.host_cache_mode,
        budget_bytes=records * model.expert_bytes if settings.host_cache_mode == "hot" else None,
        ring_records=records if settings.host_cache_mode == "ring" else None,
        record_file=record_file_beside(weights) if settings.record_file else None,
        links=_links(settings),
    )


def _links(settings: DemoSettings) -> HostLinkSettings | None:
    """The demo's hosts are processes of one machine, each at a loopback address of its own."""
    if settings.other_hosts == "off":
        return None
    block = f"127.{1 + secrets.randbelow(250)}.{secrets.randbelow(250)}"
    hosts = tuple((f"{block}.{host + 1}", HOSTS_PORT) for host in range(settings.nodes))
    return HostLinkSettings(hosts, secrets.token_bytes(32), order=settings.other_hosts)


def _rank_links(settings: DemoSettings) -> RankLinkSettings | None:
    """Where each rank can be asked: at an address of its host, which its own host asks at too."""
    if settings.other_hosts == "off":
        return None
    block = f"127.{1 + secrets.randbelow(250)}.{secrets.randbelow(250)}"
    ranks_per_host = settings.ranks // settings.nodes
    addresses = tuple(
        (f"{block}.{rank // ranks_per_host + 1}", HOSTS_PORT + 1 + rank % ranks_per_host)
        for rank in range(settings.ranks)
    )
    return RankLinkSettings(addresses, secrets.token_bytes(32))


def _pace(settings: DemoSettings) -> Pace:
    """Flip mode with spares, which needs no staging; copy mode without."""
    if settings.spare_slots:
        return Pace(staging_experts=0, mode="flip", spare_slots=settings.spare_slots)
    return Pace(staging_experts=settings.slots // settings.ranks)


def _check_shape(settings: DemoSettings) -> None:
    """Refuse what the model or the text cannot be cut into."""
    if settings.hidden % NUM_HEADS:
        raise ConfigError(
            f"hidden is {settings.hidden}, "
            f"expected a multiple of {NUM_HEADS}, the number of attention heads"
        )
    tokens = settings.tokens_per_rank
    if settings.trace is None and tokens > SEQUENCE_LENGTH and tokens % SEQUENCE_LENGTH:
        raise ConfigError(
            f"tokens_per_rank is {tokens}, expected at most {SEQUENCE_LENGTH} or a multiple of it, "
            "the tokens of one sequence of text"
        )


def _model(settings: DemoSettings, state: StateDir) -> tuple[ModelShape, Path | None]:
    shape = ModelShape(
        layer_ids=tuple(range(settings.layers)),
        num_experts=settings.experts,
        top_k=settings.top_k,
        hidden=settings.hidden,
        intermediate=settings.intermediate,
        num_shared_experts=settings.shared_experts,
        expert_bytes=schema_of(
            settings.hidden, settings.intermediate, settings.precision
        ).record_bytes,
    )
    if settings.trace is None:
        return shape, None
    ids = read_expert_ids(settings.trace)
    num_layers, _, top_k = ids.shape
    lowest, highest = int(ids.min()), int(ids.max())
    if lowest < -1 or highest >= settings.experts:
        raise ConfigError(
            f"trace {settings.trace} names experts {lowest}..{highest}, "
            f"expected 0..{settings.experts - 1} (--experts), or -1 for padding"
        )
    path = state.save_arrays("trace.npz", {"expert_ids": ids.astype(np.int16)})
    return replace(shape, layer_ids=tuple(range(num_layers)), top_k=top_k), path


def _text(settings: DemoSettings, state: StateDir) -> Path:
    domains = domains_of(settings.text) if settings.text else standard_domains()
    arrays = {f"{number}-{domain.name}": domain.tokens for number, domain in enumerate(domains)}
    return state.save_arrays("text.npz", arrays)


def _weights(settings: DemoSettings, state: StateDir, model: ModelShape) -> Path:
    """Find the weights of this model and seed, or write them."""
    schema = schema_of(model.hidden, model.intermediate, settings.precision)
    named = {name: value for name, value in model_to_dict(model).items() if name != "expert_cost"}
    key = hashlib.blake2b(
        repr((named, VOCABULARY, settings.precision, settings.seed)).encode(), digest_size=6
    )
    path = state.path / f"weights-{key.hexdigest()}"
    if not path.exists():
        write_random_checkpoint(path, model, schema, vocabulary=VOCABULARY, seed=settings.seed)
    Checkpoint(path).check(model, schema)
    return path
