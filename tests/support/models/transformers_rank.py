"""One rank that serves a model of the ``transformers`` library, and compares every answer."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eplb.core.placement import Placement
from eplb.core.topology import Topology
from eplb.migration.build import Pace, build_migration
from rebalance.assembly.config import RankConfig
from rebalance.assembly.group import join_votes
from rebalance.assembly.rank import build_rank
from rebalance.rank.rank import Rank
from rebalance.weights.cache.address import HostCacheAddress
from runtime import AllToAllDispatcher, Checkpoint
from runtime.model.transformers import library_schema, prove_experts, serve_experts

NUM_TOKENS = (2, 12)  # sequences of a rank, and their length
STEPS_AFTER = 4  # steps that are compared once all has moved


@dataclass(frozen=True)
class ModelSetup:
    """One model and its deployment, alike on every rank."""

    name: str
    model: Any  # the library's, which forked ranks share
    folder: Path
    config: RankConfig
    cache: HostCacheAddress
    store: str
    run: str
    targets: tuple[Placement, ...]  # of one migration after another


@dataclass(frozen=True)
class Served:
    """What a rank found."""

    name: str
    num_proved: int  # slots that held the library's bytes at the start
    errors: dict[int, float]  # generation that served -> largest difference of a logit
    largest_logit: float
    num_moved: int
    num_steps: int
    num_while_moving: int  # of these, while a migration was open


def serve_models(rank: int, topology: Topology, setups: list[ModelSetup]) -> list[Served]:
    """Serve one model after the other."""
    return [_serve(rank, topology, setup) for setup in setups]


def _serve(rank: int, topology: Topology, setup: ModelSetup) -> Served:
    model = copy.deepcopy(setup.model)
    checkpoint = Checkpoint(setup.folder)
    schema = library_schema(model, checkpoint)
    group = join_votes(setup.config, topology, run=setup.run)
    shape = checkpoint.model_shape()
    built = build_rank(setup.config, group, setup.cache, shape, schema, setup.store)
    num_proved = prove_experts(model, built.bank, built.held())
    dispatcher = AllToAllDispatcher(topology, group.tokens, rank, built.counter)
    serve_experts(model, built.bank, built.table, dispatcher, rank=rank)
    built.start()
    found = _run_steps(rank, setup, topology, built, model)
    moved = built.figures.experts_moved
    built.close()
    return Served(setup.name, num_proved, *found[:2], moved, *found[2:])


def _run_steps(
    rank: int, setup: ModelSetup, topology: Topology, built: Rank, model: Any
) -> tuple[dict[int, float], float, int, int]:
    random = torch.Generator().manual_seed(rank)
    vocabulary = int(model.config.vocab_size)
    errors, largest = dict[int, float](), 0.0
    step, num_while_moving, since_last = 0, 0, 0
    agent = built
    while agent.step(step, "mixed"):
        ids = torch.randint(vocabulary, NUM_TOKENS, generator=random)
        with torch.inference_mode():  # not around the builders: the mover writes what they make
            served, expected = model(ids).logits, setup.model(ids).logits
        generation = agent.placement.generation
        error = float((served - expected).abs().max())
        errors[generation] = max(errors.get(generation, 0.0), error)
        largest = max(largest, float(expected.abs().max()))
        num_while_moving += agent.phase != "idle"
        if rank == 0 and agent.phase == "idle" and since_last == 2:
            _publish_next(setup, topology, built)
        since_last = since_last + 1 if agent.phase == "idle" else 0
        if generation == len(setup.targets) and since_last == STEPS_AFTER:
            agent.request_halt()
        step += 1
    return errors, largest, step, num_while_moving


def _publish_next(setup: ModelSetup, topology: Topology, built: Rank) -> None:
    """Stand in for the controller."""
    base = built.placement
    if base.generation < len(setup.targets):
        target = setup.targets[base.generation]
        pace = Pace(staging_experts=setup.config.staging_experts)
        plan_id = built.store.next_plan_id()
        built.store.publish(build_migration(base, target, topology, plan_id=plan_id, pace=pace))
