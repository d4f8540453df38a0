"""One rank of the steel thread: it serves decode steps while experts move, and proves its bytes.

In a soak, which has no end in steps, every percent of it ends with a look at all live slots: are
their bytes those of the experts that the placement names? Between two steps nobody writes them.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from api.demo.workers.build import Rank, build_demo_rank
from api.demo.workers.plan import WorkerPlan
from api.processes.children import Parent
from benchmarks.publishing import Publisher
from benchmarks.ranks.plans import publisher_of
from benchmarks.ranks.soak_readings import Level, Progress, Reservoir
from benchmarks.ranks.workers import VOCABULARY
from eplb.errors import RankError
from runtime.streams import Completion

BEGIN_DEADLINE_S = 120.0
TELL_EVERY_S = 1.0
WARM_UP_STEPS = 100  # whose times are not kept
KEPT_STEPS = 20_000  # times of a rank; of more steps than that it is a seeded sample
FIRST_PERCENT = 10  # memory is read from here on: before, caches fill


@dataclass(frozen=True)
class Length:
    """How long to serve: steps, or seconds where they are given, which makes it a soak."""

    steps: int
    seconds: float = 0.0

    def part(self, steps: int, since: float) -> float:
        """How much of it is over."""
        if self.seconds:
            return (time.monotonic() - since) / self.seconds
        return steps / self.steps


@dataclass(frozen=True)
class Decode:
    """What is to be measured."""

    device: str  # cpu or cuda
    num_ranks: int
    precision: str
    length: Length
    swap_every: int  # steps; 0: a migration at every opportunity


@dataclass(frozen=True)
class Served:
    """What a rank found."""

    progress: Progress
    captures: int | None  # of graphs; None: there are none
    num_swaps: int
    pauses_ms: list[float]  # of the latest swaps
    step_us: Reservoir
    memory: Level
    experts_moved: int
    bytes_by_source: Mapping[str, int]
    wrong_at_end: int
    scrubbed: Mapping[str, int]  # looks of the built-in scrubber, by result
    sweeps: int  # its rounds over all live slots
    placement_hash: str


def run_decode(parent: Parent, plan: WorkerPlan, rank: int, wanted: Decode) -> None:
    """Serve decode steps under random migrations, and prove what is left in memory."""

    def publisher(built: Rank) -> Publisher:
        return publisher_of(plan, lambda: built.passes.steps, wanted.swap_every)

    decode(parent, plan, rank, wanted.length, publisher)


def decode(
    parent: Parent,
    plan: WorkerPlan,
    rank: int,
    length: Length,
    make_publisher: Callable[[Rank], Publisher],
) -> None:
    """Serve decode steps under the migrations that rank 0 publishes.

    Raises:
        RankError: no command to begin.
        BrokenGroup: a peer is dead or late.
        EplbError: the publisher stopped, so that nothing moves any more.
    """
    begun, is_halting = threading.Event(), threading.Event()
    commands = {"begin": begun, "halt": is_halting}
    parent.receive_commands(lambda command: commands[command[0]].set())
    built = build_demo_rank(plan, rank)
    parent.send("ready")
    if not begun.wait(BEGIN_DEADLINE_S):
        raise RankError(f"rank {rank}: no command to begin within {BEGIN_DEADLINE_S:.0f} s")
    publisher = None
    if rank == 0:
        publisher = make_publisher(built)
    watch = Watch(parent, built, rank, length)
    built.agent.start()
    if publisher is not None:
        publisher.want(True)
    serve(plan, rank, watch, publisher, is_halting)
    if publisher is not None:
        publisher.close()
    watch.memory.note(used_memory(built))
    built.parts.close()
    parent.send("served", watch.served())


class Watch:
    """What a rank finds out about itself while it serves; it takes no more memory after an hour."""

    def __init__(self, parent: Parent, built: Rank, rank: int, length: Length) -> None:
        self.built, self.memory = built, Level()
        self.is_over = False
        self._parent, self._length, self._since = parent, length, time.monotonic()
        self._step_us = Reservoir(KEPT_STEPS, seed=rank)
        self._placement = built.agent.placement
        self._num_swaps = self._num_looks = self._num_wrong = self._percent = 0
        self._tell_at = self._since

    def after_step(self, took_us: float, in_flight: Completion) -> None:
        """Take in what one step took; look around where a percent or a second is over."""
        steps, agent = self.built.passes.steps, self.built.agent
        if steps > WARM_UP_STEPS:
            self._step_us.add(took_us)
        # Every swap makes a new placement serve, and a step makes one swap at most.
        self._num_swaps += agent.placement is not self._placement
        self._placement = agent.placement
        part = self._length.part(steps, self._since)
        self.is_over = part >= 1.0
        if int(100 * part) > self._percent:
            self._percent = int(100 * part)
            self._at_percent(in_flight)
        if time.monotonic() >= self._tell_at:
            self._tell_at = time.monotonic() + TELL_EVERY_S
            self._parent.send("progress", self.progress())

    def progress(self) -> Progress:
        """How far this rank has come."""
        return Progress(
            self.built.passes.steps,
            self.built.agent.figures.rebalances,
            self._num_looks,
            self._num_wrong,
            used_memory(self.built),
        )

    def served(self) -> Served:
        """All of it, once serving has ended."""
        figures, detail = self.built.agent.figures, self.built.agent.describe().detail
        _, wrong_at_end = look_at_slots(self.built)
        return Served(
            self.progress(),
            captures=getattr(self.built.model, "num_captures", None),
            num_swaps=self._num_swaps,
            pauses_ms=figures.swap_pauses_ms,
            step_us=self._step_us,
            memory=self.memory,
            experts_moved=figures.experts_moved,
            bytes_by_source=detail["bytes_by_source"],
            wrong_at_end=wrong_at_end,
            scrubbed=detail["scrubbed"],
            sweeps=detail["sweeps"],
            placement_hash=self.built.agent.placement.hash,
        )

    def _at_percent(self, in_flight: Completion) -> None:
        if self._percent >= FIRST_PERCENT:
            self.memory.note(used_memory(self.built))
        if self._length.seconds:
            self.built.agent.wait(in_flight)  # first: a digest would wait without asking the vote
            looks, wrong = look_at_slots(self.built)
            self._num_looks += looks
            self._num_wrong += wrong


def serve(
    plan: WorkerPlan,
    rank: int,
    watch: Watch,
    publisher: Publisher | None,
    is_halting: threading.Event,
) -> None:
    """Step until all ranks have agreed to end; the host is one step ahead of the device at most."""
    built, is_cuda = watch.built, plan.device == "cuda"
    random = torch.Generator().manual_seed(rank)
    batches = torch.randint(VOCABULARY, (16, *plan.batch_shape), generator=random).to(built.device)
    in_flight = Completion(is_cuda=is_cuda)
    while built.begin_step():
        started = time.perf_counter()
        step = built.passes.begin()
        built.model.forward(batches[step % 16], salt=step)
        built.agent.wait(in_flight)
        in_flight = Completion(is_cuda=is_cuda)
        watch.after_step((time.perf_counter() - started) * 1e6, in_flight)
        if publisher is not None:
            publisher.check()
        if watch.is_over or is_halting.is_set():
            built.agent.request_halt()
    built.agent.wait(in_flight)


def used_memory(built: Rank) -> int:
    """Bytes of the device that are taken, or of this process on a CPU.

    The latter has peers' memory in it, page by page as this rank reads from them: in the first
    minutes it rises until every slot of every peer was read once (18 MB here), and then no more.
    """
    if built.device.type == "cuda":
        free, total = torch.cuda.mem_get_info()
        return total - free
    resident = Path("/proc/self/statm").read_text().split()[1]
    return int(resident) * os.sysconf("SC_PAGESIZE")


def look_at_slots(built: Rank) -> tuple[int, int]:
    """(live slots of this rank, those whose bytes are not those of the expert that they hold)."""
    bank, digests = built.agent.core.parts.bank, built.agent.core.parts.digests
    is_wrong = [
        bank.digest(layer, slot) != tuple(digests[layer, expert].tolist())
        for layer, slot, expert in built.agent.held()
    ]
    return len(is_wrong), sum(is_wrong)
