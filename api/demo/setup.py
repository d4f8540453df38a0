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

from api.config.fields import values_of
from api.config.tree import Settings
from api.demo.state_dir import StateDir
from api.demo.text import VOCABULARY, domains_of, standard_domains
from api.demo.workers.plan import SEQUENCE_LENGTH, WorkerPlan, schema_of
from eplb.core.model import ModelShape
from eplb.core.placement import Placement, check_fits
from eplb.core.problem import Budget
from eplb.core.topology import Topology
from eplb.decision.gate import CostModel
from eplb.errors import ConfigError, StoreError
from eplb.migration.build import Pace
from eplb.migration.serialisation import model_to_dict, topology_to_dict
from eplb.migration.spares import compact
from eplb.planner import plan as make_plan
from eplb.policies.table import policy_named
from rebalance.build.config import ReportingConfig
from rebalance.controller.lease import new_holder
from rebalance.controller.loop import ControllerSettings
from rebalance.preload.cache.settings import NUM_READERS, HostCacheSettings
from rebalance.preload.cache.wire import HostCacheAddress
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

LOST_GENERATIONS = 1000  # skipped where the generations before are unknown

log = logging.getLogger(__name__)


def prepare(settings: Settings, state: StateDir) -> WorkerPlan:
    """Write weights and text, and make the plan that every process is given. Starts nothing.

    Raises:
        ConfigError: settings, text or trace that cannot be used.
        CheckpointError: weights on disk that are damaged or of another model.
    """
    policy_named(settings.planner.policy)
    _check_shape(settings)
    model, trace = _model(settings, state)
    slots_per_rank = settings.demo.slots // settings.demo.ranks + settings.demo.spare_slots
    topology = Topology.uniform(
        settings.demo.nodes, settings.demo.ranks // settings.demo.nodes, slots_per_rank
    )
    pace = _pace(settings)
    tokens_per_step = settings.demo.ranks * settings.demo.tokens_per_rank
    sample_steps = max(
        1, round(settings.telemetry.window_tokens / tokens_per_step / SAMPLES_PER_WINDOW)
    )
    window_steps = sample_steps * math.ceil(
        settings.telemetry.window_tokens / tokens_per_step / sample_steps
    )
    run = new_run_name()
    text = None if trace is not None else _text(settings, state)
    weights = _weights(settings, state, model)
    return WorkerPlan(
        run=run,
        store=settings.deployment.store or state.store,
        weights=weights,
        text=text,
        trace=trace,
        model=model,
        topology=topology,
        host_caches=tuple(
            HostCacheAddress(f"{run}-host{host}", secrets.token_bytes(16))
            for host in range(settings.demo.nodes)
        ),
        rendezvous="",  # another for each start of the ranks
        tokens_per_rank=settings.demo.tokens_per_rank,
        window_steps=window_steps,
        window_seconds=settings.telemetry.window_seconds,
        sample_steps=sample_steps,
        check_every=settings.demo.check_every,
        drift_period_s=settings.demo.seconds,
        seed=settings.demo.seed,
        staging_experts=pace.staging_experts,
        device=settings.demo.device,
        precision=settings.demo.precision,
        dispatcher=settings.demo.dispatcher,
        controller=ControllerSettings(
            policy=settings.planner.policy,
            plan_windows=settings.planner.plan_windows,
            cost=CostModel(pay_back_s=settings.planner.pay_back_s),
            budget=Budget(
                max_moves=settings.planner.max_moves or None,
                target_imbalance=settings.planner.target_imbalance,
            ),
            pace=pace,
            seed=settings.demo.seed,
            retention=Retention(
                settings.telemetry.keep_samples_s,
                settings.telemetry.keep_minutes_s,
                settings.telemetry.keep_hours_s,
                settings.telemetry.keep_events,
            ),
            lease_ttl_s=settings.controller.lease_ttl_s,
            migration_deadline_s=settings.controller.migration_deadline_s,
            keep_every_windows=settings.controller.keep_every_windows,
        ),
        controller_poll_s=settings.controller.poll_s,
        holder=new_holder(),
        host_cache=_host_cache(settings, weights, model),
        rank_links=_rank_links(settings),
        reporting=ReportingConfig(
            settings.telemetry.spool_dir or state.path / "spool",
            settings.telemetry.spool_mb * 1_000_000,
            Tempo(settings.telemetry.store_interval, settings.telemetry.state_interval),
            settings.telemetry.sample_version,
        ),
        scrub_every_steps=settings.agent.scrub_every_steps,
        vote_every=settings.agent.vote_every,
        plan_deadline_s=settings.agent.plan_deadline_s,
        vote_deadline_s=settings.agent.vote_deadline_s,
        staging=settings.staging,
    )


def begin(settings: Settings, plan: WorkerPlan, store: LoadStore) -> Placement:
    """Record the start of a run, and the placement that it starts from.

    Contiguous, or with ``resume`` the one that the last run ended with.
    """
    committed = store.committed()
    generation = None if committed is None else committed.placement.generation
    store.set_control(
        Control(movement=settings.controller.movement, observe=settings.controller.observe),
        reason="start of the demo",
    )
    if settings.demo.resume:
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
    """Release the lease of this demo's controller, which has ended: the next one leads at once."""
    try:
        lease = store.lease()
        if lease is not None and lease.holder == plan.holder:
            store.release_lease(lease)
    except StoreError as exc:  # the demo has served all the same, and the lease runs out
        log.warning("the lease was not released: %s", exc)


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


def _host_cache(settings: Settings, weights: Path, model: ModelShape) -> HostCacheSettings:
    """How every host keeps records; the file is shared, as the weights are."""
    records = settings.host_cache.records
    return HostCacheSettings(
        mode=settings.host_cache.mode,
        budget_bytes=records * model.expert_bytes if settings.host_cache.mode == "hot" else None,
        ring_records=records if settings.host_cache.mode == "ring" else None,
        record_file=record_file_beside(weights) if settings.host_cache.record_file else None,
        num_readers=settings.host_cache.num_readers or NUM_READERS,
        links=_links(settings),
    )


def _links(settings: Settings) -> HostLinkSettings | None:
    """The demo's hosts are processes of one machine, each at a loopback address of its own."""
    if settings.host_cache.other_hosts == "off":
        return None
    block = f"127.{1 + secrets.randbelow(250)}.{secrets.randbelow(250)}"
    hosts = tuple((f"{block}.{host + 1}", HOSTS_PORT) for host in range(settings.demo.nodes))
    return HostLinkSettings(
        hosts,
        secrets.token_bytes(32),
        order=settings.host_cache.other_hosts,
        **values_of(settings.host_link),
    )


def _rank_links(settings: Settings) -> RankLinkSettings | None:
    """Where each rank listens: at an address of its host, which its own host uses too."""
    if settings.host_cache.other_hosts == "off":
        return None
    block = f"127.{1 + secrets.randbelow(250)}.{secrets.randbelow(250)}"
    ranks_per_host = settings.demo.ranks // settings.demo.nodes
    addresses = tuple(
        (f"{block}.{rank // ranks_per_host + 1}", HOSTS_PORT + 1 + rank % ranks_per_host)
        for rank in range(settings.demo.ranks)
    )
    return RankLinkSettings(addresses, secrets.token_bytes(32), **values_of(settings.transport))


def _pace(settings: Settings) -> Pace:
    """Flip mode with spares, which needs no staging; copy mode without."""
    if settings.demo.spare_slots:
        return Pace(staging_experts=0, mode="flip", spare_slots=settings.demo.spare_slots)
    return Pace(staging_experts=settings.demo.slots // settings.demo.ranks)


def _check_shape(settings: Settings) -> None:
    """Refuse what the model or the text cannot be cut into."""
    if settings.demo.hidden % NUM_HEADS:
        raise ConfigError(
            f"hidden is {settings.demo.hidden}, "
            f"expected a multiple of {NUM_HEADS}, the number of attention heads"
        )
    tokens = settings.demo.tokens_per_rank
    if settings.demo.trace is None and tokens > SEQUENCE_LENGTH and tokens % SEQUENCE_LENGTH:
        raise ConfigError(
            f"tokens_per_rank is {tokens}, expected at most {SEQUENCE_LENGTH} or a multiple of it, "
            "the tokens of one sequence of text"
        )


def _model(settings: Settings, state: StateDir) -> tuple[ModelShape, Path | None]:
    shape = ModelShape(
        layer_ids=tuple(range(settings.demo.layers)),
        num_experts=settings.demo.experts,
        top_k=settings.demo.top_k,
        hidden=settings.demo.hidden,
        intermediate=settings.demo.intermediate,
        num_shared_experts=settings.demo.shared_experts,
        expert_bytes=schema_of(
            settings.demo.hidden, settings.demo.intermediate, settings.demo.precision
        ).record_bytes,
    )
    if settings.demo.trace is None:
        return shape, None
    ids = read_expert_ids(settings.demo.trace)
    num_layers, _, top_k = ids.shape
    lowest, highest = int(ids.min()), int(ids.max())
    if lowest < -1 or highest >= settings.demo.experts:
        raise ConfigError(
            f"trace {settings.demo.trace} names experts {lowest}..{highest}, "
            f"expected 0..{settings.demo.experts - 1} (--experts), or -1 for padding"
        )
    path = state.save_arrays("trace.npz", {"expert_ids": ids.astype(np.int16)})
    return replace(shape, layer_ids=tuple(range(num_layers)), top_k=top_k), path


def _text(settings: Settings, state: StateDir) -> Path:
    domains = domains_of(settings.demo.text) if settings.demo.text else standard_domains()
    arrays = {f"{number}-{domain.name}": domain.tokens for number, domain in enumerate(domains)}
    return state.save_arrays("text.npz", arrays)


def _weights(settings: Settings, state: StateDir, model: ModelShape) -> Path:
    """Find the weights of this model and seed, or write them."""
    schema = schema_of(model.hidden, model.intermediate, settings.demo.precision)
    named = {name: value for name, value in model_to_dict(model).items() if name != "expert_cost"}
    key = hashlib.blake2b(
        repr((named, VOCABULARY, settings.demo.precision, settings.demo.seed)).encode(),
        digest_size=6,
    )
    path = state.path / f"weights-{key.hexdigest()}"
    if not path.exists():
        write_random_checkpoint(path, model, schema, vocabulary=VOCABULARY, seed=settings.demo.seed)
    Checkpoint(path).check(model, schema)
    return path
