"""The reference checker: a process that recomputes sampled steps of the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from multiprocessing.connection import Connection, wait

import torch

from api.demo.workers.plan import ROUTE_TIE, WorkerPlan
from api.processes.children import Parent, ProgressReports
from runtime.checkpoints.checkpoint import Checkpoint
from runtime.model.moe import Forward
from runtime.model.reference import ReferenceModel

POLL_S = 0.5


@dataclass(frozen=True)
class SampledStep:
    """One rank's forward pass, to be checked."""

    rank: int
    step: int
    phase: str  # of the rank's migration in that step
    token_ids: torch.Tensor  # [B, N]
    answer: Forward
    is_forced: bool


@dataclass(frozen=True)
class CheckedStep:
    """The result of the reference."""

    rank: int
    step: int
    phase: str
    max_error: float
    wrong_routes: int


def run_checker(parent: Parent, plan: WorkerPlan, pipes: list[Connection]) -> None:
    """Check what comes over the pipes until every rank has closed its end."""
    parent.receive_commands(lambda _: None)
    # Beside GPUs there are cores to spare; beside CPU ranks there is one at most.
    torch.set_num_threads(8 if plan.device == "cuda" else 1)
    weights = Checkpoint(plan.weights).reference_weights()
    reference = ReferenceModel(plan.model, weights, tie=ROUTE_TIE[plan.precision])
    progress = ProgressReports(parent)
    parent.send("ready")
    while pipes:
        progress.report()
        for pipe in wait(pipes, POLL_S):
            assert isinstance(pipe, Connection), "only pipes are waited for"
            try:
                sampled: SampledStep = pipe.recv()
            except (EOFError, OSError):
                pipes.remove(pipe)
                continue
            progress.report()
            found = reference.check(sampled.token_ids, sampled.answer, forced=sampled.is_forced)
            parent.send(
                "checked",
                CheckedStep(
                    sampled.rank, sampled.step, sampled.phase, found.max_error, found.wrong_routes
                ),
            )
    parent.send("done")
