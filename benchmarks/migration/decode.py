"""Decode steps while experts move without a break, against the same steps while nothing moves.

One run alternates: quiet, busy, quiet, busy, quiet. A step is one CUDA graph of the resident layers
run fourteen times, so it needs GPUs and deep_ep. On one GPU the rank's slots stand for those of a
group's ranks (``Shapes.ranks_per_gpu``).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from benchmarks.migration.big_rank import (
    BigRank,
    Shapes,
    agent_of,
    build,
    publisher_of,
    rotated,
    wait_for,
)
from benchmarks.migration.stage import PinnedHostCache
from benchmarks.result_table import Row
from eplb.core.model import ModelShape
from rebalance.rank.rank import Rank
from rebalance.swap.swapper import StepFigures
from runtime.streams import Completion

LAYER_RUNS = 14  # of four resident layers: a step of 56
NUM_PHASES = 5  # quiet first and last
PHASE_STEPS = 240
SETTLE_STEPS = 20  # after a change of phase, not counted
TOKENS = 128
VOCABULARY = 1024


def measure_decode(rank: int, num_ranks: int, shapes: Shapes, mode: str, path: Path) -> list[Row]:
    """Steps without, with and again without migrations, in one run."""
    big = build(rank, num_ranks, shapes)
    host_cache = host_cache_of_both_ends(big) if mode == "host" else None
    agent, clock = agent_of(big, path, big.sources(host_cache))
    forward = decode_step(big, agent)
    publisher = publisher_of(big, path, mode) if rank == 0 else None
    agent.start()
    marks: list[Any] = []
    in_flight = Completion(is_cuda=True)
    for step in range(NUM_PHASES * PHASE_STEPS):
        if publisher is not None:
            publisher.check()
            if step % PHASE_STEPS == 0:
                publisher.want(step // PHASE_STEPS % 2 == 1)
        marks.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        marks[-1].record()
        assert agent.step(), "nobody asked for an end"
        forward(step)
        agent.wait(in_flight)
        in_flight = Completion(is_cuda=True)
        clock.steps += 1
    torch.cuda.synchronize()
    step_us = np.array([a.elapsed_time(b) * 1e3 for a, b in itertools.pairwise(marks)])
    if publisher is not None:
        publisher.close()
    figures = agent.figures
    wrong = wrong_slots(big, agent)
    agent.leave()
    assert figures.rebalances, "nothing was migrated: there is nothing to compare"
    is_emulated = shapes.ranks_per_gpu > 1
    rows = decode_rows(f"{mode}, one GPU" if is_emulated else mode, *by_phase(step_us), figures)
    return [*rows, ("  slots with wrong bytes afterwards", str(wrong), "0")]


def wrong_slots(big: BigRank, agent: Rank) -> int:
    """Live slots whose bytes are not those of the expert that they serve."""
    wait_for(big.bank.mark())
    return sum(
        big.bank.digest(layer, slot) != tuple(big.digests[layer, expert].tolist())
        for layer, slot, expert in agent.held()
    )


def host_cache_of_both_ends(big: BigRank) -> PinnedHostCache:
    """Host memory with every expert that goes into this rank on the way there and back."""
    ends = (big.placement, rotated(big.placement, big.group, big.moves))
    span = big.topology.slots_on(big.rank)
    new = ends[0].slot_to_expert[:, span] != ends[1].slot_to_expert[:, span]
    records = {
        (layer, int(end.slot_to_expert[layer, span.start + slot]))
        for layer, slot in np.argwhere(new).tolist()
        for end in ends
    }
    return PinnedHostCache(big, sorted(records))


def by_phase(step_us: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Times of the quiet and of the busy steps."""
    phases = [
        step_us[number * PHASE_STEPS + SETTLE_STEPS : (number + 1) * PHASE_STEPS]
        for number in range(NUM_PHASES)
    ]
    return np.concatenate(phases[0::2]), np.concatenate(phases[1::2])


def decode_rows(
    mode: str, quiet: NDArray[np.float64], busy: NDArray[np.float64], figures: StepFigures
) -> list[Row]:
    """p50 and p99 without and with."""
    name, target = {
        "copy": ("copy mode, from peers", "<= +2 % / +0.5 %"),
        "flip": ("flip mode, from peers", "<= +0.7 % / +0.3 %"),
        "host": ("copy mode, from the host", "<= +3 %"),
        "copy, one GPU": ("one GPU, from its own slots", "<= +1 %"),
        "host, one GPU": ("one GPU, from the host", "<= +1 %"),
    }[mode]
    (q50, q99), (b50, b99) = (np.percentile(part, (50, 99)) for part in (quiet, busy))
    found = (
        f"p99 {q99:.0f} -> {b99:.0f} us ({b99 / q99 - 1:+.2%}), "
        f"p50 {q50:.0f} -> {b50:.0f} us ({b50 / q50 - 1:+.2%})"
    )
    amount = f"{figures.rebalances} migrations, {figures.experts_moved} experts into rank 0"
    return [
        (f"decode step while rebalancing, {name}", found, target),
        (f"  in that run, {len(quiet)} + {len(busy)} steps", amount, "-"),
    ]


def decode_step(big: BigRank, agent: Rank) -> Callable[[int], None]:
    """A captured graph of all resident layers."""
    from runtime.dispatch.deepep import DeepEPLowLatency, DeepEPShape
    from runtime.model.compute import GroupedExperts
    from runtime.model.moe import CapturedStack, MoELayer, MoEStack

    model, device = big.shapes.model, big.device
    group = dist.group.WORLD
    assert group is not None, "launch joins one"
    dispatcher = DeepEPLowLatency(
        DeepEPShape(big.topology, model.hidden, model.top_k, TOKENS), group, agent.counter
    )
    usual = 2 * TOKENS * big.topology.num_ranks * model.top_k // big.topology.num_slots
    experts = GroupedExperts(big.bank, usual_rows=usual)
    layers = [
        MoELayer(layer, model.top_k, experts, agent.table, dispatcher)
        for layer in range(model.num_layers)
    ]
    stack = MoEStack(model, dense_weights(model, device), layers)
    captured = CapturedStack(
        stack, shape=(2, TOKENS // 2), num_layers=model.num_layers, device=device
    )
    random = torch.Generator().manual_seed(big.rank)
    ids = torch.randint(VOCABULARY, (16, 2, TOKENS // 2), generator=random).to(device)

    def forward(step: int) -> None:
        for number in range(LAYER_RUNS):
            captured.forward(ids[(step + number) % 16], salt=LAYER_RUNS * step + number)

    return forward


def dense_weights(model: ModelShape, device: torch.device) -> dict[str, torch.Tensor]:
    """Seeded weights of everything but the experts."""
    random = torch.Generator(device).manual_seed(1)
    shapes = {"model.embed_tokens.weight": (VOCABULARY, model.hidden)}
    for layer in range(model.num_layers):
        name = f"model.layers.{layer}"
        shapes[f"{name}.self_attn.qkv_proj.weight"] = (3 * model.hidden, model.hidden)
        shapes[f"{name}.self_attn.o_proj.weight"] = (model.hidden, model.hidden)
        shapes[f"{name}.mlp.gate.weight"] = (model.num_experts, model.hidden)
    return {
        name: (torch.randn(shape, generator=random, device=device) * shape[-1] ** -0.5).bfloat16()
        for name, shape in shapes.items()
    }
