"""A real rank agent without its threads, and the settings that all schedules share."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.schedules.ballots import Member, Violation
from benchmarks.schedules.deployments import Deployment
from benchmarks.schedules.device import RECORD_BYTES, Table, digest_table
from benchmarks.schedules.simulated_links import Store, Transport
from eplb.core.load import LoadSample
from eplb.migration.build import Migration
from rebalance.agent import RankAgent
from rebalance.rank.parts import AgentSettings, Links, RankParts
from rebalance.rank.watcher import Watcher, Writing
from rebalance.stage.stage_settings import LinkSettings, StageSettings
from runtime.counters import SlotCounter
from telemetry.store import RankState


class PlayedWatcher(Watcher):
    """The threads' work without the threads."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.migrations: deque[Migration] = deque()
        self._writing: Writing | None = None

    def bring(self, migration: Migration) -> None:
        """Note what the mover is to bring."""
        self.migrations.append(migration)

    @property
    def has_writing(self) -> bool:
        """Say whether the store is to have something."""
        return self._writing is not None or not self._to_write.empty()

    def write(self) -> None:
        """Try to write the next thing down."""
        self._writing = self._writing or self._to_write.get_nowait()
        assert self._writing is not None, "nobody closes the watcher"
        if self.is_written(self._writing):
            self._writing = None


class Sink:
    """Keeps nothing."""

    def offer(self, sample: LoadSample) -> bool:
        """Take a sample."""
        return True

    def state(self, state: RankState) -> None:
        """Take a report."""


@dataclass
class StepCounter:
    """A dispatcher's, without a dispatcher."""

    steps: int = 0


class AbortRequests:
    """The journal of all ranks: none drops a plan that nobody has asked to be dropped."""

    def __init__(self) -> None:
        self._unwanted: set[int] = set()

    def note(self, what: str, where: tuple[int, int, int], detail: Mapping[str, Any]) -> None:
        """Record an abort request; check that there is one when a plan is dropped."""
        plan_id = where[2]
        if what == "abort requested":
            self._unwanted.add(plan_id)
        if what == "aborted" and plan_id not in self._unwanted:
            raise Violation(f"plan {plan_id} is dropped ({detail['reason']}) without a request")


@dataclass(frozen=True)
class World:
    """What ranks share."""

    deployment: Deployment
    store: Store
    clock: Callable[[], float]
    rng: random.Random
    abort_requests: AbortRequests = field(default_factory=AbortRequests)


STAGE = StageSettings(
    peer=LinkSettings(RECORD_BYTES // 2, 4.0 * RECORD_BYTES),
    host=LinkSettings(RECORD_BYTES // 2),
    in_flight=2,
    preload_records=2,
    pull_deadline_s=250.0,
)


def make_agent(
    number: int, world: World, member: Member, transport: Transport, steps: StepCounter
) -> RankAgent:
    """Make the agent of one rank; its memory is empty yet."""
    deployment, clock, bank = world.deployment, world.clock, transport.bank
    layers, experts = deployment.start.num_layers, deployment.start.num_experts
    settings = AgentSettings(
        "schedules",
        "run",
        deployment.topology,
        sample_steps=1000,
        plan_deadline_s=500.0,
        scrub_every_steps=0,
        stage=STAGE,
    )
    parts = RankParts(
        number,
        bank,  # type: ignore[arg-type]
        Table(deployment.start),  # type: ignore[arg-type]
        SlotCounter(layers, bank.num_slots),
        steps,
        digest_table(0, layers, experts).clone(),
    )
    links = Links(
        member,
        transport,
        world.store,
        Sink(),
        clock=clock,
        journal=world.abort_requests,
        monotonic=clock,
        threads=PlayedWatcher,
    )
    return RankAgent(settings, parts, links, deployment.start)
