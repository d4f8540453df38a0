"""One rank of the steel thread: it serves decode steps while experts move, and proves its bytes.

In a soak, which has no end in steps, every percent of it ends with a look at all live slots: are
their bytes those of the experts that the placement names? Between two steps nobody writes them.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from api.demo.engine import Model, make_model
from benchmarks.publishing import Publisher
from benchmarks.ranks.children import Child, Parent
from eplb.core.model import ModelShape
from eplb.core.placement import EMPTY, Placement
from eplb.core.topology import Topology
from eplb.errors import RankError
from eplb.migration.build import Migration, Pace, build_migration
from rebalance.assembly.config import NetworkConfig, RankConfig
from rebalance.assembly.description import RANK_FILE_VARIABLE, DeploymentDescription, schema_of
from rebalance.assembly.environment import build_rank_from_env
from rebalance.assembly.host_cache import build_host_cache
from rebalance.rank.rank import Rank as ServingRank
from rebalance.weights.cache.address import HostCacheAddress
from rebalance.weights.cache.cache_settings import HostCacheSettings
from runtime.checkpoints.own_model import write_random_checkpoint
from runtime.counters import PassCounter
from runtime.streams import Completion
from telemetry.state.store import StateStore

# -- What the benchmarks of live ranks share: a small model, its plan, its start, its messages.

SPARE_SLOTS = 2  # of a rank, for replicas
VOCABULARY = 4096
RANK_FILE = "rank.json"
GPU_MODEL = ModelShape(tuple(range(6)), 32, 6, hidden=2048, intermediate=768)
CPU_MODEL = ModelShape(tuple(range(6)), 32, 6, hidden=64, intermediate=128)


@dataclass(frozen=True)
class RankPlan:
    """What every process of a benchmark is given alike."""

    folder: Path
    deployment: DeploymentDescription
    port: int  # where the ranks meet
    precision: str
    dispatcher: str = "deepep_low_latency"  # on cuda
    batch_shape: tuple[int, int] = (2, 64)  # of a rank's step
    seed: int = 3

    @property
    def model(self) -> ModelShape:
        """The model that is served."""
        return self.deployment.model

    @property
    def topology(self) -> Topology:
        """The ranks and their slots."""
        return self.deployment.topology

    @property
    def weights(self) -> Path:
        """Folder of the checkpoint."""
        assert self.deployment.checkpoint is not None, "plan_of writes one"
        return self.deployment.checkpoint


def plan_of(
    folder: Path,
    num_ranks: int,
    *,
    device: Literal["cpu", "cuda"] = "cuda",
    precision: str = "bfloat16",
    model: ModelShape | None = None,
) -> RankPlan:
    """Write seeded weights of a small model, and lay out what every process is given."""
    model = model or (GPU_MODEL if device == "cuda" else CPU_MODEL)
    slots_per_rank = -(-model.num_experts // num_ranks) + SPARE_SLOTS
    schema = schema_of(model.hidden, model.intermediate, precision)
    weights = folder / "weights"
    if not weights.exists():
        write_random_checkpoint(weights, model, schema, vocabulary=VOCABULARY, seed=3)
    name = f"bench-{secrets.token_hex(3)}"
    deployment = DeploymentDescription(
        config=RankConfig(
            name, sample_steps=16, staging_experts=8, network=NetworkConfig(interface="lo")
        ),
        store=str(folder / "store.sqlite"),
        model=model,
        schema=schema,
        topology=Topology.uniform(1, num_ranks, slots_per_rank),
        device=device,
        hosts=("127.0.0.1",),
        host_caches=(HostCacheAddress(name, secrets.token_bytes(16)),),
        join_key=secrets.token_bytes(16),
        window_steps=64,
        checkpoint=weights,
    )
    (folder / RANK_FILE).write_text(deployment.to_json())
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return RankPlan(folder, deployment, port, precision)


@dataclass(frozen=True)
class Rank:
    """One rank that serves, and its model."""

    agent: ServingRank
    model: Model
    passes: PassCounter

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.agent.group.device


def build_bench_rank(plan: RankPlan, rank: int) -> Rank:
    """Build a rank up to the point where it can start."""
    if plan.deployment.device == "cpu":
        torch.set_num_threads(1)
    environ = {
        RANK_FILE_VARIABLE: str(plan.folder / RANK_FILE),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(plan.topology.num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(plan.port),
    }
    passes = PassCounter()
    agent = build_rank_from_env(environ=environ, passes=passes)
    model, _ = make_model(agent, plan.dispatcher, plan.batch_shape, has_forced_routes=False)
    agent.counter.drain()  # proving and warming up were no load
    return Rank(agent, model, passes)


def run_host_cache(parent: Parent, plan: RankPlan) -> None:
    """Serve records to the ranks until stopped."""
    is_stopping = threading.Event()
    parent.receive_commands(lambda _: is_stopping.set())
    given = plan.deployment
    address, settings = given.host_caches[0], HostCacheSettings()
    host_cache = build_host_cache(settings, address, given.model, given.schema, plan.weights)
    parent.send("ready")
    is_stopping.wait()
    host_cache.close()


def begin_run(plan: RankPlan) -> StateStore:
    """Open the store with a random first placement in it."""
    store = plan.deployment.opened_store()
    start = random_placement(plan, np.random.default_rng(0))
    store.commit(start, expected=None, reason="start")
    return store


def random_placement(plan: RankPlan, rng: np.random.Generator) -> Placement:
    """Every expert somewhere, other slots filled at random, never twice on a rank."""
    num_ranks, num_experts = plan.topology.num_ranks, plan.model.num_experts
    slots_per_rank = plan.topology.num_slots // num_ranks
    held = np.full((plan.model.num_layers, num_ranks, slots_per_rank), EMPTY)
    for layer in held:
        for number, expert in enumerate(rng.permutation(num_experts)):
            layer[number % num_ranks, number // num_ranks] = expert
        for slots in layer:
            spare = np.flatnonzero(slots == EMPTY)
            absent = np.setdiff1d(np.arange(num_experts), slots)
            slots[spare] = rng.choice(absent, size=len(spare), replace=False)
    return Placement(held.reshape(plan.model.num_layers, -1), num_experts)


def received_message(child: Child, kind: str, silence_s: float) -> Any:
    """Wait for one message of a child, which may be silent for so long.

    Raises:
        SystemExit: it was silent for longer, or has ended or failed.
    """
    if not child.messages.poll(silence_s):
        raise SystemExit(f"{child.name} sent no {kind} in {silence_s:.0f} s")
    message = child.receive()
    if message is None or message[0] != kind:
        child.process.join(2)
        raise SystemExit(f"{child.name} sent {message}: {child.exit_text()}")
    return message[1]


# -- Random migrations of a few experts, one after the other, for ranks that serve meanwhile.

MOVES_PER_LAYER = 4  # into one rank
LAYERS_PER_MIGRATION = 2
POLL_S = 0.01


def publisher_of(plan: RankPlan, steps: Callable[[], int], swap_every: int) -> Publisher:
    """Publish random migrations, each once ``steps`` says that it is due."""
    store = plan.deployment.opened_store()
    return Publisher(store, RandomPlans(store, plan, steps, swap_every).next, poll_s=POLL_S)


class RandomPlans:
    """Makes migrations of two swaps, seeded; one is due ``swap_every`` steps a swap after another.

    Args:
        store: numbers the plans.
        steps: how many were served so far.
    """

    def __init__(
        self, store: StateStore, plan: RankPlan, steps: Callable[[], int], swap_every: int
    ) -> None:
        self._store, self._plan, self._steps = store, plan, steps
        self._swap_every, self._due = swap_every, swap_every
        self._random = np.random.default_rng(plan.seed)

    def next(self, base: Placement) -> Migration | None:
        """Lead from ``base``, which is committed, to a random placement near it, when it is due."""
        if self._steps() < self._due:
            return None
        plan, topology = self._plan, self._plan.topology
        fresh = in_place(base, random_placement(plan, self._random), topology)
        # Two layers at a time, and in place where an expert stays: a few moves, as a plan has.
        layers = self._random.choice(
            plan.model.num_layers, size=LAYERS_PER_MIGRATION, replace=False
        )
        target = base.with_layers(fresh, layers.tolist())
        # As much as one layer needs: each layer is a transaction, and a swap, of its own.
        pace = Pace(max(1, most_moves(base, target, topology)))
        plan_id = self._store.next_plan_id()
        made = build_migration(base, target, topology, plan_id=plan_id, pace=pace)
        self._due = self._steps() + LAYERS_PER_MIGRATION * self._swap_every
        return made


def most_moves(base: Placement, target: Placement, topology: Topology) -> int:
    """Experts that one layer brings into one rank, at most."""
    is_new = base.slot_to_expert != target.slot_to_expert
    per_rank = [
        is_new[:, topology.slots_on(rank)].sum(axis=1) for rank in range(topology.num_ranks)
    ]
    return int(np.max(per_rank))


def in_place(base: Placement, fresh: Placement, topology: Topology) -> Placement:
    """``MOVES_PER_LAYER`` changed experts a rank at most; the others stay where they are."""
    held = base.slot_to_expert.copy()
    for layer, wanted in zip(held, fresh.slot_to_expert, strict=True):
        for rank in range(topology.num_ranks):
            span = topology.slots_on(rank)
            new = np.setdiff1d(wanted[span], layer[span])[:MOVES_PER_LAYER]
            for expert in new.tolist():
                slot = replaceable(layer, span, base.num_experts)
                if slot is not None:
                    layer[slot] = expert
    return Placement(held, base.num_experts, base.generation)


def replaceable(layer: NDArray[np.int32], span: slice, num_experts: int) -> int | None:
    """The first slot in ``span`` that is EMPTY, or whose expert another slot holds too."""
    count = np.bincount(layer[layer != EMPTY], minlength=num_experts)
    for slot in range(span.start, span.stop):
        if layer[slot] == EMPTY or count[layer[slot]] > 1:
            return slot
    return None


BEGIN_DEADLINE_S = 120.0
WARM_UP_STEPS = 100  # whose times are not kept
KEPT_STEPS = 20_000  # times of a rank; of more steps than that it is a seeded sample
MIB = 1 << 20
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

    device: Literal["cpu", "cuda"]
    num_ranks: int
    precision: str
    length: Length
    swap_every: int  # steps; 0: a migration at every opportunity


class Reservoir:
    """A sample of all values that came: every one is in it with the same chance.

    Until ``capacity`` values have come it holds all of them. After that a new one takes the place
    of a random one with the chance capacity / values so far: Vitter's Algorithm R ("Random Sampling
    with a Reservoir", 1985).
    """

    def __init__(self, capacity: int, *, seed: int) -> None:
        self.values: list[float] = []
        self.num_seen = 0
        self._capacity, self._random = capacity, Random(seed)

    def add(self, value: float) -> None:
        """Take one value in, or leave it."""
        self.num_seen += 1
        if len(self.values) < self._capacity:
            self.values.append(value)
            return
        place = self._random.randrange(self.num_seen)
        if place < self._capacity:
            self.values[place] = value


@dataclass
class Level:
    """The first, the highest and the last of many readings: a slow leak shows, a peak too."""

    first: int = 0
    highest: int = 0
    last: int = 0
    num_readings: int = 0

    def note(self, reading: int) -> None:
        """Take one more."""
        if not self.num_readings:
            self.first = self.highest = reading
        self.highest, self.last = max(self.highest, reading), reading
        self.num_readings += 1

    @property
    def rise(self) -> int:
        """How far it was above the first, at its highest."""
        return self.highest - self.first


@dataclass(frozen=True)
class Served:
    """What a rank found."""

    steps: int
    migrations: int
    num_looks: int  # at live slots; 0: they are looked at only at the end
    num_wrong: int
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


def run_decode(parent: Parent, plan: RankPlan, rank: int, wanted: Decode) -> None:
    """Serve decode steps under random migrations of rank 0, and prove what is left in memory.

    Raises:
        RankError: no command to begin.
        BrokenGroup: a peer is dead or late.
        EplbError: the publisher stopped, so that nothing moves any more.
    """
    begun = threading.Event()
    parent.receive_commands(lambda _: begun.set())
    built = build_bench_rank(plan, rank)
    parent.send("ready")
    if not begun.wait(BEGIN_DEADLINE_S):
        raise RankError(f"rank {rank}: no command to begin within {BEGIN_DEADLINE_S:.0f} s")
    publisher = None
    if rank == 0:
        publisher = publisher_of(plan, lambda: built.passes.steps, wanted.swap_every)
    watch = Watch(built, rank, wanted.length)
    built.agent.start()
    if publisher is not None:
        publisher.want(True)
    serve(plan, rank, watch, publisher)
    if publisher is not None:
        publisher.close()
    watch.memory.note(used_memory(built))
    built.agent.close()
    parent.send("served", watch.served())


class Watch:
    """What a rank finds out about itself while it serves; it takes no more memory after an hour."""

    def __init__(self, built: Rank, rank: int, length: Length) -> None:
        self.built, self.memory = built, Level()
        self.is_over = False
        self._length, self._since = length, time.monotonic()
        self._step_us = Reservoir(KEPT_STEPS, seed=rank)
        self._placement = built.agent.placement
        self._num_swaps = self._num_looks = self._num_wrong = self._percent = 0

    def after_step(self, took_us: float, in_flight: Completion) -> None:
        """Take in what one step took; look around where a percent is over."""
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

    def served(self) -> Served:
        """All of it, once serving has ended."""
        figures, detail = self.built.agent.figures, self.built.agent.describe().detail
        _, wrong_at_end = look_at_slots(self.built)
        return Served(
            self.built.passes.steps,
            figures.rebalances,
            self._num_looks,
            self._num_wrong,
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
    plan: RankPlan,
    rank: int,
    watch: Watch,
    publisher: Publisher | None,
) -> None:
    """Step until all ranks have agreed to end; the host is one step ahead of the device at most."""
    built, is_cuda = watch.built, plan.deployment.device == "cuda"
    random = torch.Generator().manual_seed(rank)
    batches = torch.randint(VOCABULARY, (16, *plan.batch_shape), generator=random).to(built.device)
    in_flight = Completion(is_cuda=is_cuda)
    while built.agent.step():
        started = time.perf_counter()
        step = built.passes.begin()
        built.model.forward(batches[step % 16], salt=step)
        built.agent.wait(in_flight)
        in_flight = Completion(is_cuda=is_cuda)
        watch.after_step((time.perf_counter() - started) * 1e6, in_flight)
        if publisher is not None:
            publisher.check()
        if watch.is_over:
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
    slots = built.agent.slots
    is_wrong = [
        slots.bank.digest(layer, slot) != tuple(slots.digests[layer, expert].tolist())
        for layer, slot, expert in built.agent.held()
    ]
    return len(is_wrong), sum(is_wrong)
