"""What several test files share: ranks as real processes, small models, small checkpoints."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from eplb.model import ModelShape
from runtime.checkpoint import Checkpoint, write_random_checkpoint
from runtime.experts import ExpertSchema

RANKS_DEADLINE_S = 60.0

# Ranks are forked; a library thread of the parent would leave its locks held in the child.
torch.set_num_threads(1)

RankFunction = Callable[..., Any]


def _run_rank(rank: int, size: int, port: Path, function: RankFunction, pipe: Connection) -> None:
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{port}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=RANKS_DEADLINE_S / 2),
        )
        pipe.send((True, function(rank)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    finally:
        pipe.close()
        # No exit handlers: the fixtures of the parent process are not this one's to tear down.
        os._exit(0)


@pytest.fixture
def run_ranks(tmp_path: Path) -> Callable[[int, RankFunction], list[Any]]:
    """Run ``function(rank)`` in ``size`` processes that are one gloo group; return all results."""

    def run(size: int, function: RankFunction) -> list[Any]:
        context = multiprocessing.get_context("fork")
        pipes, processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_run_rank, args=(rank, size, tmp_path / "rendezvous", function, theirs)
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        results: dict[int, Any] = {}
        try:
            while len(results) < size:
                ready = wait([p for i, p in enumerate(pipes) if i not in results], RANKS_DEADLINE_S)
                silent = sorted(set(range(size)) - results.keys())
                assert ready, f"ranks {silent} gave no result in {RANKS_DEADLINE_S} s"
                for pipe in ready:
                    rank = pipes.index(pipe)
                    good, result = pipe.recv()
                    assert good, f"rank {rank} failed:\n{result}"
                    results[rank] = result
        finally:
            for process in processes:
                process.kill()
                process.join()
        return [results[rank] for rank in range(size)]

    return run


@pytest.fixture(scope="session")
def small_model() -> ModelShape:
    """Two layers of eight experts, top-2, and a shared expert."""
    return ModelShape((0, 1), 8, 2, hidden=16, intermediate=8, num_shared_experts=1)


@pytest.fixture(scope="session")
def small_schema(small_model: ModelShape) -> ExpertSchema:
    return ExpertSchema.swiglu(small_model.hidden, small_model.intermediate)


@pytest.fixture(scope="session")
def small_checkpoint(
    small_model: ModelShape, small_schema: ExpertSchema, tmp_path_factory: pytest.TempPathFactory
) -> Checkpoint:
    path = tmp_path_factory.mktemp("weights") / "small"
    write_random_checkpoint(path, small_model, small_schema, vocabulary=64, seed=1)
    return Checkpoint(path)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)
