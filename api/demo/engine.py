"""A serving engine with one rank of the balancer in it, to be copied.

    eplb launch --module api.demo.engine -- ENGINE.json
    eplb launch -- python -m api.demo.engine ENGINE.json

``main`` is the life of a rank: build, serve, end; after a death agree with the survivors.
``_serve`` is the loop with the calls that an engine adds. ``make_model`` puts the model over the
rank's slots. The rest of the engine is its own: the load (``api/demo/text.py``), the check of
sampled steps (``api/demo/checking.py``), and a file of figures that is written at the end.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Union

import torch

from api.demo.checking import CheckerClient, Checks, Sampling
from api.demo.text import Batches, Load
from api.processes.commands import raise_descriptor_limit, set_title
from api.terminal.logs import LogSettings, set_process_fields, set_up_logging
from eplb.errors import BrokenGroup, EplbError
from rebalance.assembly.environment import build_rank_from_env, described_by
from rebalance.assembly.plain import from_plain, to_plain
from rebalance.rank.rank import Rank
from runtime.checkpoints.checkpoint import Checkpoint
from runtime.checkpoints.own_model import layer_name
from runtime.counters import PassCounter
from runtime.dispatch.all_to_all import AllToAllDispatcher, Dispatcher
from runtime.model.compute import Experts, LoopExperts
from runtime.model.moe import MoELayer, MoEStack
from runtime.streams import Completion
from telemetry.load.reporter import Reporter

if TYPE_CHECKING:
    from runtime.model.moe import CapturedStack

Model = Union[MoEStack, "CapturedStack"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineFile:
    """What every rank of the engine is given alike."""

    load: Load
    checks: Checks
    dispatcher: str  # a name of runtime.dispatch.table.DISPATCHERS, or auto; on GPUs
    figures: Path  # folder
    log_format: str = "text"
    log_level: str = "warning"

    def to_json(self) -> str:
        """Give it as text; it holds a key."""
        return json.dumps(to_plain(self), indent=1)

    @staticmethod
    def read(path: Path) -> EngineFile:
        """Read what ``to_json`` gave."""
        made: EngineFile = from_plain(EngineFile, json.loads(path.read_text(encoding="utf-8")))
        return made


@dataclass
class Figures:
    """Measurements of a rank, for the file that it writes at its end."""

    dispatcher: str  # name of the chosen dispatcher, and the reason
    first_token: float | None = None  # seconds since the epoch
    step_ms: list[float] = field(default_factory=list)

    def stepped(self, took_s: float) -> None:
        """Record the end of a step."""
        self.first_token = self.first_token or time.time()
        self.step_ms.append(took_s * 1e3)


def main() -> None:
    """Serve until all ranks agree to end; the only argument is the engine's file."""
    engine, described = EngineFile.read(Path(sys.argv[1])), described_by(os.environ)
    number = int(os.environ["RANK"])
    set_title(f"rank {number}")
    raise_descriptor_limit()
    logs = LogSettings(engine.log_format, engine.log_level, described.config.deployment)  # type: ignore[arg-type]
    set_up_logging(logs, process=f"rank {number}", rank=number)
    if described.device == "cpu":
        torch.set_num_threads(1)
    passes = PassCounter()
    try:
        rank = build_rank_from_env(passes=passes)
        model, dispatcher = make_model(
            rank,
            engine.dispatcher,
            engine.load.batch_shape,
            has_forced_routes=engine.load.trace is not None,
        )
    except EplbError as exc:
        log.error("rank %d cannot start: %s", number, exc)
        sys.exit(exc.rank_exit_status)
    for one in (signal.SIGTERM, signal.SIGINT):
        signal.signal(one, lambda *_: rank.request_halt())  # all ranks end at one step
    rank.counter.drain()  # proving and warming up were no load
    set_process_fields(generation=lambda: rank.placement.generation)
    checker, figures = CheckerClient(engine.checks), Figures(dispatcher)
    rank.start()
    while True:
        try:
            _serve(engine, rank, passes, model, checker, figures)
            break
        except BrokenGroup as exc:  # agree with the others, and serve on or end
            log.info("rank %d: %s", number, exc)
            if not rank.survive():  # it has left as planned, or all ranks are started again
                _write(engine, rank, passes, figures, checker)
                sys.exit(0 if rank.has_left else 1)
    checker.close()
    try:
        rank.close()
    except EplbError as exc:  # all ranks have ended well; the last load samples are lost
        log.error("rank %d: %s", number, exc)
    _write(engine, rank, passes, figures, checker)


def _serve(
    engine: EngineFile,
    rank: Rank,
    passes: PassCounter,
    model: Model,
    checker: CheckerClient,
    figures: Figures,
) -> None:
    """The engine's loop; the rank is called before each forward pass."""
    here, has_tokens, reporter = rank.number, rank.topology.has_tokens, rank.reporter
    assert isinstance(reporter, Reporter), "of a rank of a deployment"
    number = int(has_tokens[:here].sum()) if has_tokens[here] else -1
    num_ranks = int(has_tokens.sum())
    is_cuda, seed = rank.group.device.type == "cuda", engine.load.seed
    batches = Batches(engine.load, number, num_ranks, rank.group.device)
    sampling = Sampling(engine.checks.every, number, num_ranks)
    begun, in_flight = time.monotonic(), Completion(is_cuda=is_cuda)
    while rank.step():
        started = time.perf_counter()
        step = passes.begin()
        token_ids, forced = batches.at(step, time.monotonic() - begun)
        salt = seed + 1_000_003 * step + 7919 * here
        answer = model.forward(token_ids, salt=salt, forced=forced)
        rank.wait(in_flight)  # the host may be one step ahead of the device, not more
        in_flight = Completion(is_cuda=is_cuda)
        if sampling.is_due(step, phase := rank.phase):
            rank.wait(in_flight)  # first: the copy would wait without asking the vote
            checker.offer(here, step, phase, token_ids, answer, is_forced=forced is not None)
        figures.stepped(time.perf_counter() - started)
        reported = reporter.stats()
        rank.notes |= {
            "samples_lost": reported.dropped,
            "store_errors": reported.errors,
            "first_token": figures.first_token or 0.0,
        }


def make_model(
    rank: Rank, dispatcher: str, batch_shape: tuple[int, int], *, has_forced_routes: bool
) -> tuple[Model, str]:
    """Make the model over the rank's slots; returns also which dispatcher it has, and why.

    Args:
        rank: has the slots.
        dispatcher: on GPUs the name of one, or ``auto``.
        batch_shape: (sequences, positions) of a step.
        has_forced_routes: whether tokens are routed as recorded, which a CUDA graph cannot do.
    """
    device = rank.group.device
    made, why, experts = (
        (rank.all_to_all(), "all_to_all over gloo, the one for CPUs", LoopExperts(rank.bank))
        if device.type == "cpu"
        else _on_gpu(rank, dispatcher, batch_shape[0] * batch_shape[1])
    )
    log.info("rank %d: dispatcher: %s", rank.number, why)
    assert rank.deployment.checkpoint is not None, "the demo writes one"
    dense = {
        name: tensor.to(device)
        for name, tensor in Checkpoint(rank.deployment.checkpoint).dense_weights().items()
    }
    model = rank.deployment.model
    layers = [
        MoELayer(number, model.top_k, experts, rank.table, made, _shared(dense, layer))
        for number, layer in enumerate(model.layer_ids)
    ]
    stack = MoEStack(model, dense, layers)
    if device.type == "cpu":
        return stack, why
    from runtime.dispatch.deepep import DeepEPLowLatency
    from runtime.model.moe import CapturedStack

    # Shapes of the others differ from step to step.
    if not isinstance(made, DeepEPLowLatency) or has_forced_routes:
        return stack, why
    return CapturedStack(stack, shape=batch_shape, num_layers=model.num_layers, device=device), why


def _on_gpu(rank: Rank, name: str, num_tokens: int) -> tuple[Dispatcher, str, Experts]:
    """Choose the first dispatcher that passes the self-test; all slots in one grouped GEMM."""
    from runtime.dispatch.table import Trial, choose_dispatcher
    from runtime.model.compute import GroupedExperts

    model, topology = rank.deployment.model, rank.topology
    tokens = rank.group.tokens
    assert tokens is not None, "a rank of a deployment has a group for them"
    trial = Trial(
        topology, model.hidden, model.top_k, num_tokens, rank.group.device, torch.bfloat16
    )
    made, why = choose_dispatcher(name, trial, rank.counter, tokens, max_tokens=num_tokens)
    if isinstance(made, AllToAllDispatcher):
        made = rank.all_to_all()  # this one ends at a peer's death
    pairs = num_tokens * topology.num_ranks * model.top_k
    experts = GroupedExperts(rank.bank, usual_rows=2 * pairs // topology.num_slots)
    rank.measure_experts(experts)  # a CPU computes in proportion to rows
    return made, why, experts


def _shared(
    dense: Mapping[str, torch.Tensor], layer: int
) -> tuple[torch.Tensor, torch.Tensor] | None:
    name = f"{layer_name(layer)}.mlp.shared_experts"
    if f"{name}.gate_proj.weight" not in dense:
        return None
    gate_up = torch.cat([dense[f"{name}.gate_proj.weight"], dense[f"{name}.up_proj.weight"]])
    return gate_up, dense[f"{name}.down_proj.weight"]


def _write(
    engine: EngineFile,
    rank: Rank,
    passes: PassCounter,
    figures: Figures,
    checker: CheckerClient,
) -> None:
    """Write the figures of this rank: all of the file appears, or nothing."""
    run = rank.group.run
    found = vars(figures) | {
        "run": run,
        "rank": rank.number,
        "steps": passes.steps,
        "swap_pauses_ms": rank.figures.swap_pauses_ms,
        "samples": rank.num_samples,
        "experts_moved": rank.figures.experts_moved,
        "bytes_by_source": dict(rank.describe().detail["bytes_by_source"]),
        "checks_dropped": checker.num_dropped,
    }
    path = engine.figures / f"{run}-rank-{rank.number}.json"
    unfinished = path.with_suffix(".unfinished")
    try:
        engine.figures.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(json.dumps(found), encoding="utf-8")
        unfinished.replace(path)
    except OSError as exc:
        log.error("rank %d: %s cannot be written: %s", rank.number, path, exc.strerror)


if __name__ == "__main__":
    main()
