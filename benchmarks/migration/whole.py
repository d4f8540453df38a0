"""A whole rebalance, timed: from the moment it is published until every layer serves."""

from __future__ import annotations

import time
from pathlib import Path

import torch.distributed as dist

from benchmarks.migration.agent import Clockwork, agent_of, publisher_of
from benchmarks.migration.big_rank import BigRank, Shapes, build, wait_for
from benchmarks.publishing import Publisher
from benchmarks.result_table import Row
from rebalance.agent import RankAgent

FIRST_STEPS = 4  # before it begins, so that all threads and votes run


def measure_whole(
    rank: int, num_ranks: int, shapes: Shapes, path: Path, step_s: float
) -> list[Row]:
    """From published to committed, four experts a rank in every layer, steps of ``step_s``."""
    big = build(rank, num_ranks, shapes)
    wired, clock = agent_of(big, path, big.transport())
    agent = wired.agent
    publisher = publisher_of(big, path, "copy") if rank == 0 else None
    agent.start()
    for _ in range(FIRST_STEPS):
        agent.step()
        clock.steps += 1
    dist.barrier()
    took_s = step_until_committed(agent, clock, publisher, step_s)
    wait_for(big.bank.mark())
    wrong = sum(
        big.bank.digest(layer, slot) != tuple(big.digests[layer, expert].tolist())
        for layer, slot, expert in agent.held()
    )
    moved = agent.figures.experts_moved
    if publisher is not None:
        publisher.close()
    agent.close()
    amounts = (clock.steps - FIRST_STEPS, moved, wrong)
    return whole_rows(big, took_s, step_s, amounts)


def step_until_committed(
    agent: RankAgent, clock: Clockwork, publisher: Publisher | None, step_s: float
) -> float:
    """Publish one migration, step until it is committed, and return the seconds that took."""
    started, begun_at = time.monotonic(), clock.steps
    if publisher is not None:
        publisher.want(True)
    while agent.figures.rebalances == 0:
        assert agent.step(), "nobody asked for an end"
        if publisher is not None:
            publisher.check()
            if publisher.num_published:
                publisher.want(False)
        next_at = started + (clock.steps - begun_at + 1) * step_s
        # In place of a forward pass, which this measurement does not need.
        time.sleep(max(0.0, next_at - time.monotonic()))
        clock.steps += 1
    return time.monotonic() - started


def whole_rows(
    big: BigRank, took_s: float, step_s: float, amounts: tuple[int, int, int]
) -> list[Row]:
    """Rows of (steps, experts moved into this rank, wrong slots)."""
    (steps, moved, wrong), shapes = amounts, big.shapes
    size = shapes.schema.record_bytes
    what = f"whole rebalance, {shapes.model.num_layers} layers x 4 experts a rank of "
    return [
        (
            f"{what}{size / 1e6:.2g} MB, steps of {step_s * 1e3:.0f} ms",
            f"{took_s:.2f} s, {steps} steps, {moved * size / 1e9:.1f} GB into rank 0",
            "<= 3 s",
        ),
        ("  slots with wrong bytes afterwards", str(wrong), "0"),
        (
            "  staging memory of a rank",
            f"{shapes.staging_experts} experts, {shapes.staging_experts * size / 1e6:.0f} MB",
            "16 experts",
        ),
    ]
