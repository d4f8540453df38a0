"""One real rank agent without threads: whoever holds it takes each of its steps."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from benchmarks.schedules.simulated import (
    RECORD_BYTES,
    Copy,
    Deployment,
    Event,
    Member,
    NotYet,
    Step,
    Store,
    Table,
    Transport,
    Violation,
    digest_table,
    record_words,
)
from eplb.core.load import LoadSample
from eplb.core.placement import Placement
from eplb.core.topology import Topology
from eplb.errors import RankError
from rebalance.assembly.config import RankConfig
from rebalance.protocol.phases import Phase
from rebalance.rank.group import Group
from rebalance.rank.rank import Rank as ServingRank
from rebalance.rank.watcher import Watcher, Writing
from rebalance.recovery import Deadlines, recover
from rebalance.stage.share import RankSlots, Share
from rebalance.stage.stage_settings import LinkBudget, StageSettings
from rebalance.threads.waiting import WAIT_S, Wait
from runtime.counters import PassCounter, SlotCounter
from telemetry.state.runs import RankState

# -- A real rank agent without its threads, and the settings that all schedules share.


class PlayedWatcher(Watcher):
    """The threads' work without the threads."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.shares: deque[Share] = deque()
        self._writing: Writing | None = None

    def bring(self, share: Share) -> None:
        """Note what the mover is to bring."""
        self.shares.append(share)

    @property
    def has_writing(self) -> bool:
        """Say whether the store is to have something."""
        return self._writing is not None or not self._to_write.empty()

    def write(self) -> None:
        """Try to write the next thing down."""
        self._writing = self._writing or self._to_write.get_nowait()
        assert self._writing is not None, "nobody closes the watcher"
        if self.try_write(self._writing):
            self._writing = None

    def close(self) -> None:
        """Write what is still to be written, once; the threads would end."""
        self._closing.set()
        self._shared.close()
        sources = self._mover._sources
        assert isinstance(sources, Transport), "made so"
        sources.end_copies()  # the mover's thread waits for them
        while self.has_writing:
            writing, self._writing = self._writing or self._to_write.get_nowait(), None
            assert writing is not None, "nobody else closes the watcher"
            self.try_write(writing)


class Sink:
    """Keeps nothing."""

    def offer(self, sample: LoadSample) -> bool:
        """Take a sample."""
        return True

    def state(self, state: RankState) -> None:
        """Take a report."""


class Passes(PassCounter):
    """Counts steps; schedules set the count."""

    @property
    def steps(self) -> int:
        """Steps begun so far."""
        return self._begun

    @steps.setter
    def steps(self, number: int) -> None:
        self._begun = number


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
    peer=LinkBudget(RECORD_BYTES // 2, 4.0 * RECORD_BYTES),
    host=LinkBudget(RECORD_BYTES // 2),
    in_flight=2,
    preload_records=2,
    pull_deadline_s=250.0,
)


class PlayedRank(ServingRank):
    """A real rank, whose threads a scheduler plays."""

    new_watcher = PlayedWatcher


def make_agent(
    number: int,
    world: World,
    member: Member,
    transport: Transport,
    steps: Passes,
    topology: Topology,
    placement: Placement,
    run: str = "run",
) -> ServingRank:
    """Make the real rank; its memory is empty yet."""
    deployment, clock, bank = world.deployment, world.clock, transport.bank
    layers, experts = deployment.start.num_layers, deployment.start.num_experts
    config = RankConfig(
        "schedules",
        sample_steps=1000,
        staging_experts=1,
        plan_deadline_s=500.0,
        scrub_every_steps=0,
        stage=STAGE,
        serve_on=True,
    )
    slots = RankSlots(
        number,
        topology,
        bank,  # type: ignore[arg-type]
        Table(placement),  # type: ignore[arg-type]
        digest_table(0, layers, experts).clone(),
    )
    made = PlayedRank(
        config,
        slots,
        SlotCounter(layers, bank.num_slots),
        world.store,
        Sink(),
        passes=steps,
        journal=world.abort_requests,
        clock=clock,
        monotonic=clock,
    )
    made.enter(Group(number, run, topology, member), placement, transport)
    return made


class Life(Enum):
    """What a rank is at."""

    SERVING = "serving"
    UPDATING = "updating"  # between begin_update and the end of end_update
    RECOVERING = "recovering"
    RECOVERED = "recovered"
    REFUSED = "refused"  # to recover: only a start from the store can help
    JOINING = "joining"  # no member: it waits to be admitted
    LEFT = "left"  # as planned
    DEAD = "dead"


class Rank:
    """An agent, its memory, its links, and the state of its threads."""

    def __init__(self, number: int, world: World, member: Member, transport: Transport) -> None:
        self.number, self.world = number, world
        self.columns = world.deployment.topology.slots_on(number)
        self.begin(member, transport, world.deployment.topology, world.deployment.start)
        self._update: Iterator[str] | None = None
        self.update_waits_for = ""
        self.patience_s = 1e9  # for others' last words

    def begin(
        self,
        member: Member,
        transport: Transport,
        topology: Topology,
        placement: Placement,
        run: str = "run",
    ) -> None:
        """Start a process of this rank, with the experts of a placement in its slots."""
        self.member, self.transport = member, transport
        self.bank, self.stream = transport.bank, transport.bank.stream
        self.steps, self.life, self.why = Passes(), Life.SERVING, ""
        self.agent = make_agent(
            self.number, self.world, member, transport, self.steps, topology, placement, run
        )
        self.take_turns()
        for layer, slot, expert in self.agent.held():
            self.bank.words[layer * self.bank.num_slots + slot] = record_words(0)[layer, expert]

    def take_turns(self) -> None:
        """Go on in the group that it has entered; before its first turn."""
        agent, table = self.agent, self.agent.table
        self.member, self.transport = agent.group.votes, agent.sources  # type: ignore[assignment]
        assert isinstance(table, Table), "made by make_agent"  # type: ignore[unreachable]
        self.table = table  # type: ignore[unreachable]
        watcher = agent.watcher
        assert isinstance(watcher, PlayedWatcher), "the rank names the class"
        self.watcher, self.shared = watcher, agent.shared
        self.seen_version, self.polls_at = -1, 0.0
        self._work: Iterator[Wait] | None = None
        self.wait: Wait | None = None
        self._seen, self._is_for_news = -1, False
        self.transport.plan_id = self._plan_id

    def _plan_id(self) -> int:
        plan = self.shared.state.plan
        return plan.plan_id if plan else 0

    @property
    def is_alive(self) -> bool:
        """Say whether it was not killed."""
        return self.life is not Life.DEAD

    @property
    def has_ended(self) -> bool:
        """Say whether it runs no step any more."""
        return self.life not in (Life.SERVING, Life.UPDATING)

    def is_live(self, plan_id: int) -> bool:
        """Say whether bytes of a plan may still come to serve here."""
        return self.is_alive and self.shared.is_live(plan_id)

    # -- steps

    def would_wait(self) -> bool:
        """Say whether the next step would wait for a vote that others have yet to cast."""
        pending = self.agent.voter.pending
        if pending is None or self.member.result is not None or self.member.can_arrive:
            return False
        is_vote_due = self.steps.steps % self.agent.config.vote_every == 0
        return is_vote_due or pending[0].prepared > self.shared.state.swapped

    def step(self) -> Step:
        """Begin the next step."""
        number = self.steps.steps
        if not self.agent.step():
            raise Violation(f"rank {self.number} halts without a request")
        rows, version = self.table.rows, self.shared.state.weights_version
        if self.table.generation != self.agent.placement.generation and not self._is_moving():
            raise Violation(f"rank {self.number}: table and placement differ in generation")
        step = Step(number, rows, (rows.tobytes(), version))
        self.stream.queue.append(step)
        self.steps.steps += 1
        return step

    def _is_moving(self) -> bool:
        return self.shared.state.phase is not Phase.IDLE

    def step_again(self) -> None:
        """Call the hook twice between two steps: the second call must do nothing."""
        before = (self.shared.version, self.table.generation, self.member.number)
        self.steps.steps -= 1
        is_on = self.agent.step()
        self.steps.steps += 1
        if not is_on or before != (self.shared.version, self.table.generation, self.member.number):
            raise Violation(f"rank {self.number}: a repeated call of step did something")

    # -- off the steps

    def can_poll_store(self) -> bool:
        """Say whether the store has news, or it is time to look again all the same."""
        if not self.is_alive:
            return False
        if self.seen_version != self.world.store.known_version:
            return True
        if self.world.clock() < self.polls_at:
            return False
        opened = self.world.store.peek(self.world.store.published)
        return (opened.plan_id if opened else 0) != self._plan_id()

    def poll_store(self) -> None:
        """The watcher's thread, once."""
        heard = self.watcher.poll_store(self.seen_version, 0.0)
        if heard is not None:
            self.seen_version, patience_s = heard
            self.polls_at = self.world.clock() + patience_s

    @property
    def is_moving(self) -> bool:
        """Say whether the mover has something to do or to wait for."""
        return self._work is not None or bool(self.watcher.shares)

    def can_move(self) -> bool:
        """Say whether the mover's wait is over."""
        if self._work is None:
            return self.is_alive and bool(self.watcher.shares)
        if not self.is_alive:
            return False
        if self.wait is None or self._seen != self.shared.version:
            return True
        return not self._is_for_news and self.wait.is_over(self.world.clock())

    def move(self) -> None:
        """The mover's thread, from one wait to the next."""
        if self._work is None:
            self._work = self.agent.mover.work(self.watcher.shares.popleft(), self.shared)
        self._seen = self.shared.version
        self.wait = next(self._work, None)
        # Who waits for news alone looks again after WAIT_S, should some be lost. None may be: here
        # that would be a hang.
        until = self.world.clock() + WAIT_S
        self._is_for_news = self.wait is not None and self.wait.until == until
        if self.wait is None:
            self._work = None
            self.agent.mover.beat.idle()

    def device_is_free(self) -> bool:
        """Say whether the device can get on without the others."""
        orders = self.stream.queue
        return bool(orders) and (not isinstance(orders[0], Step) or bool(self.member.votes.dead))

    def get_on(self) -> Copy | None:
        """Let the device do the next thing; return a copy that is to be made."""
        order = self.stream.queue.popleft()
        if isinstance(order, Event):
            order.is_done = True
        return order if isinstance(order, Copy) else None

    # -- new weights

    def begin_update(self, version: int) -> None:
        """Begin to replace the weights."""
        self.life = Life.UPDATING
        self._update = self._updating(version)

    def _updating(self, version: int) -> Iterator[str]:
        update = self.agent.update
        yield from update.begin_steps(version, self.agent.last_step)
        for layer, slot, expert in self.agent.held():
            row = layer * self.bank.num_slots + slot
            self.watch_load(row)
            self.bank.words[row] = record_words(version)[layer, expert]
        yield "engine"
        yield from update.end_steps()

    def watch_load(self, row: int) -> None:
        """Told of each slot that is loaded; the claims' to replace."""

    def can_update(self) -> bool:
        """Say whether the update's next step would not wait."""
        if self.life is not Life.UPDATING:
            return False
        if self.update_waits_for in ("vote", "digests"):
            has_vote = self.agent.voter.pending is not None or self.update_waits_for == "digests"
            is_there = self.member.result is not None or self.member.can_arrive
            return is_there or not has_vote
        if self.update_waits_for == "rest":
            is_done = self.agent.swapper.last_swap.is_complete() or self.member.known_dead
            return self.shared.state.phase is Phase.IDLE and bool(is_done)
        return True

    def update(self) -> None:
        """The update's next step."""
        assert self._update is not None, "it was begun"
        waits_for = next(self._update, None)
        self.update_waits_for = waits_for or ""
        if waits_for is None:
            self.life = Life.SERVING

    # -- after a death

    def can_detect_death(self) -> bool:
        """Whether a liveness connection broke that the rank has not detected yet."""
        return self.is_alive and len(self.member.votes.dead) > len(self.member.known_dead)

    def detect_death(self) -> None:
        """Detect it."""
        self.member.known_dead = frozenset(self.member.votes.dead)

    def can_recover(self) -> bool:
        """Say whether it may try to agree with the others; each try asks the store anew."""
        return self.life is Life.RECOVERING and not self.world.store.is_down

    def breaks(self, why: str) -> None:
        """Run no further step."""
        self.life, self.why = Life.RECOVERING, why

    def recover(self) -> None:
        """Try to agree with the other survivors."""
        deadlines = Deadlines(reports_s=self.patience_s, store_s=1e9)
        try:
            recover(self.agent, self.world.store, deadlines=deadlines)
        except NotYet:
            return
        except RankError as exc:
            self.life, self.why = Life.REFUSED, str(exc)
        else:
            self.life = Life.RECOVERED
