"""One rank of the demo: a serving process with a rank agent embedded in it.

This is the example to read for whoever embeds the agent in an engine: ``build_rank`` in
``api/demo/workers/build.py`` puts the parts together, and ``_serve`` is the engine's loop with two
added calls.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, MutableSequence
from statistics import median
from typing import Any

from api.demo.batches import Batches
from api.demo.check_feed import CheckFeed
from api.demo.workers.build import START_DEADLINE_S, Rank, build_rank, reach_rendezvous
from api.demo.workers.checker import SampledStep
from api.demo.workers.plan import WorkerPlan
from api.processes.children import Parent
from eplb.errors import BrokenGroup, EplbError, RankError
from rebalance.agent import RankAgent
from rebalance.recovery.survivors import end_together, recover, rejoin
from runtime.model.moe import Forward
from runtime.streams import Completion

log = logging.getLogger(__name__)

FLUSH_DEADLINE_S = 20.0
FIRST_WAITED = 1  # the step at which the first one's answer is complete
CHECKED_AFTER_COMMIT = 4  # steps after a swap that are still sampled densely


def run_rank(
    parent: Parent, plan: WorkerPlan, rank: int, step_times: MutableSequence[float]
) -> None:
    """Serve until all ranks agree to halt.

    Args:
        parent: the process that started it.
        plan: what all processes are told alike.
        rank: which one this is.
        step_times: [R] when each rank last finished a step, in memory that the parent reads.

    Raises:
        BrokenGroup: a peer is dead or late; the survivors have agreed, as far as they could.
    """
    started = threading.Event()
    agents: list[RankAgent] = []
    start_at: list[float] = []
    feed = CheckFeed()

    def on_command(command: tuple[str, Any]) -> None:
        kind, body = command
        if kind == "start":
            start_at.append(body)
            started.set()
        elif kind == "checks":
            feed.connect(body)
        elif kind == "halt":
            for agent in agents:
                agent.request_halt()

    parent.listen(on_command)
    built = build_rank(plan, rank)
    agents.append(built.agent)
    parent.tell("ready")
    if not started.wait(START_DEADLINE_S):
        raise RankError(f"rank {rank}: no start within {START_DEADLINE_S:.0f} s of being ready")
    built.agent.start()

    def served(step: int) -> None:
        step_times[rank] = time.monotonic()
        if step == FIRST_WAITED:
            parent.tell("serving")

    try:
        _serve(plan, rank, built, feed, start_at[0], served)
    except BrokenGroup as exc:
        _survive(parent, plan, rank, built, exc)
        raise
    feed.close()
    built.agent.close()
    built.reporter.state(built.agent.describe())
    built.reporter.close(FLUSH_DEADLINE_S)
    built.journal.close()
    parent.tell("served", _figures(built) | {"checks_left_out": feed.num_left_out})


def _survive(parent: Parent, plan: WorkerPlan, rank: int, built: Rank, exc: BrokenGroup) -> None:
    """Agree with the other survivors on one placement, and end with them.

    A peer that is late without end cannot be distinguished from a dead one: a rank without a
    survivor report in time is excluded. A failure here is only reported: a start of all ranks is
    correct without it, because it loads every slot from the committed placement of the store.
    """
    try:
        record = recover(built.agent, built.store, num_ranks=plan.topology.num_ranks)
        votes = rejoin(record, reach_rendezvous(plan), rank, host=plan.host_of(rank))
        end_together(votes, record, built.agent.placement, rank)
        votes.close()
        parent.tell("recovered", record)
    except EplbError as failure:
        log.warning("rank %d: no recovery after %s: %s", rank, exc, failure)
        parent.tell("warning", f"no recovery after a death: {failure}")
    built.agent.close()  # takes its leave: the others must not mourn a rank that only ends
    built.journal.close()


def _serve(
    plan: WorkerPlan,
    rank: int,
    built: Rank,
    feed: CheckFeed,
    start_at: float,
    served: Callable[[int], None],
) -> None:
    batches = Batches(plan, rank, built.device)
    in_flight = Completion(is_cuda=built.device.type == "cuda")
    sample_until = 0
    while built.agent.step():
        started = time.perf_counter()
        step = built.dispatcher.steps
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
            feed.offer(SampledStep(rank, step, phase, token_ids.cpu(), on_host, forced is not None))
        built.figures.step_ms.append((time.perf_counter() - started) * 1e3)
        reported = built.reporter.stats()
        built.agent.notes = {
            "step_ms": round(median(built.figures.step_ms[-50:]), 2),
            "samples_lost": reported.dropped,
            "store_errors": reported.errors,
        }


def _is_sampled(plan: WorkerPlan, rank: int, step: int, *, is_dense: bool) -> bool:
    """One rank in turn: every step around a migration, else every ``check_every`` steps."""
    turn = step if is_dense else step // plan.check_every
    is_due = is_dense or step % plan.check_every == 0
    return is_due and turn % plan.topology.num_ranks == rank


def _salt(plan: WorkerPlan, rank: int, step: int) -> int:
    return plan.seed + 1_000_003 * step + 7919 * rank


def _figures(built: Rank) -> dict[str, Any]:
    return {
        "steps": built.dispatcher.steps,
        "dispatcher": built.figures.dispatcher,
        "step_ms": built.figures.step_ms,
        "swap_pauses_ms": built.agent.figures.swap_pauses_ms,
        "samples": built.agent.num_samples,
        "experts_moved": built.agent.figures.experts_moved,
        "bytes_by_source": dict(built.agent.describe().detail["bytes_by_source"]),
    }
