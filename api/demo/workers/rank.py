"""One rank of the demo: a serving process with a rank agent embedded in it.

It is an example of how to embed the agent in an engine: ``build_demo_rank`` in
``api/demo/workers/build.py`` calls the builder and makes the model from its result, and ``_serve``
is the engine's loop with two added calls.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, MutableSequence
from statistics import median
from typing import Any

from api.demo.batches import Batches
from api.demo.checker_client import CheckerClient
from api.demo.workers.build import START_DEADLINE_S, Rank, build_demo_rank, reach_rendezvous
from api.demo.workers.checker import SampledStep
from api.demo.workers.plan import WorkerPlan
from api.processes.children import Parent
from api.terminal.logs import set_process_fields
from eplb.errors import BrokenGroup, EplbError, RankError
from rebalance.agent import RankAgent
from rebalance.recovery.survivors import end_together, recover, rejoin
from runtime.model.moe import Forward
from runtime.streams import Completion

log = logging.getLogger(__name__)

FIRST_WAITED = 1  # the step at which the first one's answer is complete
CHECKED_AFTER_COMMIT = 4  # steps after a swap that are still sampled densely


def run_rank(
    parent: Parent, plan: WorkerPlan, rank: int, step_times: MutableSequence[float]
) -> None:
    """Serve until all ranks agree to halt.

    Args:
        parent: the process that started it.
        plan: arguments that are equal in all processes.
        rank: the number of this rank.
        step_times: [R] when each rank last finished a step, in memory that the parent reads.

    Raises:
        BrokenGroup: a peer is dead or late; the survivors have agreed, as far as they could.
    """
    started = threading.Event()
    agents: list[RankAgent] = []
    start_at: list[float] = []
    checker = CheckerClient()

    def on_command(command: tuple[str, Any]) -> None:
        kind, body = command
        if kind == "start":
            start_at.append(body)
            started.set()
        elif kind == "checks":
            checker.connect(body)
        elif kind == "halt":
            for agent in agents:
                agent.request_halt()

    parent.receive_commands(on_command)
    built = build_demo_rank(plan, rank)
    agents.append(built.agent)
    set_process_fields(generation=lambda: built.agent.placement.generation)
    parent.send("ready")
    if not started.wait(START_DEADLINE_S):
        raise RankError(f"rank {rank}: no start within {START_DEADLINE_S:.0f} s of being ready")
    built.agent.start()

    def served(step: int) -> None:
        step_times[rank] = time.monotonic()
        if step == FIRST_WAITED:
            parent.send("serving")

    try:
        _serve(plan, rank, built, checker, start_at[0], served)
    except BrokenGroup as exc:
        _survive(parent, plan, rank, built, exc)
        raise
    checker.close()
    built.parts.close()
    parent.send("served", _figures(built) | {"checks_dropped": checker.num_dropped})


def _survive(parent: Parent, plan: WorkerPlan, rank: int, built: Rank, exc: BrokenGroup) -> None:
    """Agree with the other survivors on one placement, and end with them.

    A peer that hangs is handled as one that has exited: a rank without a survivor report in time is
    excluded. A failure here is only reported: a start of all ranks does not need it, because it
    loads every slot again by the committed placement.
    """
    try:
        record = recover(built.agent, built.store, num_ranks=plan.topology.num_ranks)
        votes = rejoin(record, reach_rendezvous(plan), rank, host=plan.ranks.host_of(rank))
        end_together(votes, record, built.agent.placement, rank)
        votes.close()
        parent.send("recovered", record)
    except EplbError as failure:
        log.warning("rank %d: no recovery after %s: %s", rank, exc, failure)
        parent.send("warning", f"no recovery after a death: {failure}")
    built.agent.close()  # an orderly leave: the others must not handle it as the exit of a rank
    built.parts.close_journal()


def _serve(
    plan: WorkerPlan,
    rank: int,
    built: Rank,
    checker: CheckerClient,
    start_at: float,
    served: Callable[[int], None],
) -> None:
    batches = Batches(plan, rank, built.device)
    in_flight = Completion(is_cuda=built.device.type == "cuda")
    sample_until = 0
    while built.begin_step():
        started = time.perf_counter()
        step = built.passes.begin()
        token_ids, forced = batches.at(step, time.monotonic() - start_at)
        answer = built.model.forward(token_ids, salt=_salt(plan, rank, step), forced=forced)
        built.agent.wait(in_flight)  # the host may be one step ahead of the device, not more
        served(step)
        in_flight = Completion(is_cuda=built.device.type == "cuda")
        phase = built.agent.phase
        if phase != "idle":
            sample_until = step + CHECKED_AFTER_COMMIT
        if _is_sampled(plan, rank, step, is_dense=step < sample_until):
            built.agent.wait(in_flight)  # first: the copy below would wait without asking the vote
            on_host = Forward(answer.hidden.cpu(), answer.experts.cpu())
            checker.offer(
                SampledStep(rank, step, phase, token_ids.cpu(), on_host, forced is not None)
            )
        built.figures.step_ms.append((time.perf_counter() - started) * 1e3)
        reported = built.reporter.stats()
        built.agent.notes = {
            "step_ms": round(median(built.figures.step_ms[-50:]), 2),
            "samples_lost": reported.dropped,
            "store_errors": reported.errors,
        }


def _is_sampled(plan: WorkerPlan, rank: int, step: int, *, is_dense: bool) -> bool:
    """Ranks alternate: at every step around a migration, else every ``check_every`` steps."""
    turn = step if is_dense else step // plan.check_every
    is_due = is_dense or step % plan.check_every == 0
    return is_due and turn % plan.topology.num_ranks == rank


def _salt(plan: WorkerPlan, rank: int, step: int) -> int:
    return plan.seed + 1_000_003 * step + 7919 * rank


def _figures(built: Rank) -> dict[str, Any]:
    return {
        "steps": built.passes.steps,
        "dispatcher": built.figures.dispatcher,
        "step_ms": built.figures.step_ms,
        "swap_pauses_ms": built.agent.figures.swap_pauses_ms,
        "samples": built.agent.num_samples,
        "experts_moved": built.agent.figures.experts_moved,
        "bytes_by_source": dict(built.agent.describe().detail["bytes_by_source"]),
    }
