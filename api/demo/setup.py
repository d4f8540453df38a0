"""Preparation of the demo before its first process starts, with all checks of its input."""

from __future__ import annotations

import hashlib
import logging
import math
import secrets
from dataclasses import replace
from pathlib import Path

import numpy as np

from api.config.components import (
    controller_settings,
    host_cache_settings,
    pace_of,
    reporting,
)
from api.config.deployment import Batch
from api.config.fields import values_of
from api.config.live import overriding, static_layer
from api.config.tree import Settings
from api.demo.state_dir import StateDir
from api.demo.text import VOCABULARY, domains_of, standard_domains
from api.demo.workers.plan import SEQUENCE_LENGTH, WorkerPlan
from api.deploy.first_placement import LOST_GENERATIONS, contiguous_placement
from eplb.core.model import ModelShape
from eplb.core.placement import Placement, check_fits
from eplb.core.topology import Topology
from eplb.errors import ConfigError, StoreError
from eplb.migration.serialisation import model_to_dict
from eplb.migration.spares import compact
from eplb.policies.table import policy_named
from rebalance.build.description import schema_of
from rebalance.build.rank import new_run_name, record_start
from rebalance.controller.lease import new_holder
from rebalance.weights.cache.address import HostCacheAddress
from rebalance.weights.link.host_link_settings import HostLinkSettings
from rebalance.weights.link.rank_link_settings import RankLinkSettings
from runtime.checkpoints.checkpoint import Checkpoint
from runtime.checkpoints.own_model import write_random_checkpoint
from runtime.model.moe import NUM_HEADS
from telemetry.formats.routing import read_expert_ids
from telemetry.state.store import StateStore

SAMPLES_PER_WINDOW = 4
HOSTS_PORT = 23718  # of host caches; ranks have the next ones. Below the ephemeral ports

log = logging.getLogger(__name__)


def prepare(settings: Settings, state: StateDir) -> WorkerPlan:
    """Write weights and text, and build the ``WorkerPlan`` of all processes. Starts nothing.

    Raises:
        ConfigError: settings, text or trace that cannot be used.
        CheckpointError: weights on disk that are damaged or of another model.
    """
    policy_named(settings.planner.policy)
    _check_batch(settings)
    _check_shape(settings)
    model, trace = _model(settings, state)
    slots_per_rank = settings.demo.slots // settings.demo.ranks + settings.demo.spare_slots
    topology = Topology.uniform(
        settings.demo.nodes, settings.demo.ranks // settings.demo.nodes, slots_per_rank
    )
    pace = pace_of(settings.demo.slots // settings.demo.ranks, settings.demo.spare_slots)
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
        controller=controller_settings(settings, pace, settings.demo.seed),
        controller_poll_s=settings.controller.poll_s,
        holder=new_holder(),
        host_cache=host_cache_settings(settings, weights, model.expert_bytes, _links(settings)),
        rank_links=_rank_links(settings),
        reporting=reporting(settings, state.path),
        scrub_every_steps=settings.agent.scrub_every_steps,
        vote_every=settings.agent.vote_every,
        plan_deadline_s=settings.agent.plan_deadline_s,
        vote_deadline_s=settings.agent.vote_deadline_s,
        staging=settings.staging,
    )


def begin(settings: Settings, plan: WorkerPlan, store: StateStore) -> Placement:
    """Record the start of a run, and the placement that it starts from.

    Contiguous, or with ``resume`` the one that the last run ended with.
    """
    committed = store.committed()
    generation = None if committed is None else committed.placement.generation
    state = store.set_static(static_layer(settings), reason="start of the demo")
    for one in overriding(state):
        log.warning("live setting: %s; eplb config --live changes it", one)
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
        compact(start, plan.topology, plan.spare_slots)  # refuses a placement without spares
    else:
        start = contiguous_placement(plan.model, plan.topology)
        start = start.with_generation(0 if generation is None else generation + 1)
        store.commit(
            start, expected=generation, reason="start of the demo: unbalanced, experts in order"
        )
    _record_start(plan, store)
    return start


def begin_again(plan: WorkerPlan, store: StateStore, start: Placement) -> WorkerPlan:
    """Record another start after a death, from what is committed; return the plan for it.

    With a new run name: sequences start from zero, so samples would look like repeats otherwise.

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


def give_up_lease(plan: WorkerPlan, store: StateStore) -> None:
    """Release the lease of this demo's controller, which has ended: the next one need not wait."""
    try:
        lease = store.lease()
        if lease is not None and lease.holder == plan.holder:
            store.release_lease(lease)
    except StoreError as exc:  # the demo has served all the same, and the lease runs out
        log.warning("the lease was not released: %s", exc)


def _record_start(plan: WorkerPlan, store: StateStore) -> None:
    windows = plan.window_steps, plan.window_seconds
    record_start(store, plan.run, plan.model, plan.topology, windows)


def _links(settings: Settings) -> HostLinkSettings | None:
    """Links between the demo's hosts, which are processes with different loopback addresses."""
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


def _check_batch(settings: Settings) -> None:
    """Refuse parts that the demo's ranks do not make."""
    if settings.batch != Batch():
        raise ConfigError(
            f"batch: found {settings.batch}, expected its defaults: the demo's ranks balance by "
            "plans alone"
        )


def _check_shape(settings: Settings) -> None:
    """Check that heads divide the hidden size, and sequences the tokens of a rank."""
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
