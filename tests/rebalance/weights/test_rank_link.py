"""Ranks asked for their live slots over the network: what is given, refused, broken off, moved."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from eplb.core.model import ModelShape
from eplb.core.placement import EMPTY, Placement
from eplb.core.topology import Topology
from eplb.errors import ConfigError, MigrationError
from eplb.migration.build import Move, Pace, Source, build_migration
from rebalance.agent import RankAgent
from rebalance.assembly.config import RankConfig
from rebalance.assembly.experts import fill_bank
from rebalance.assembly.rank import wire_agent
from rebalance.protocol.gloo_votes import GlooVotes
from rebalance.protocol.phases import RankPhase
from rebalance.rank.parts import AgentSettings, Links
from rebalance.stage.digest_table import agree_on_digests
from rebalance.stage.lanes import Pull
from rebalance.stage.share import RankSlots, Share
from rebalance.stage.source_choice import SourceChoice
from rebalance.stage.stage_settings import LinkBudget, StageSettings
from rebalance.stage.stager import StageFigures, Stager
from rebalance.threads.waiting import SharedPhase, drive
from rebalance.weights.cache.address import HostCacheAddress
from rebalance.weights.cache.client import HostCacheClient
from rebalance.weights.cache.server import HostCacheServer
from rebalance.weights.link.link_settings import RankLinkSettings
from rebalance.weights.link.server import PIECE_BYTES
from rebalance.weights.link.wire import Message, RefusedError, Wire, client_handshake, connect
from rebalance.weights.rank_link import (
    PROTOCOL,
    GroupName,
    OtherRanks,
    Served,
    SlotPart,
    serve_slots,
)
from rebalance.weights.sources import HOST, MappedSlots, Place, WeightSources
from runtime.checkpoints.checkpoint import Checkpoint
from runtime.experts import ExpertBank, ExpertSchema
from runtime.memory import digest
from runtime.model.compute import swiglu
from runtime.routing import RoutingTable
from telemetry.state.runs import RankState
from telemetry.state.store import StateStore
from tests.support.agent_group import StepClock
from tests.support.limits import NEVER_S
from tests.support.local_group import LocalHost
from tests.support.stores import MemoryStore

SECRET = b"known to the ranks of one deployment"
PORT = 23722
GROUP = GroupName("run", 0)
SCHEMA = ExpertSchema.swiglu(16, 8)  # records of one page
SIZE = SCHEMA.record_bytes
BIG_SCHEMA = ExpertSchema.swiglu(1024, 768)  # of several pieces, and larger than socket buffers
numbers = itertools.count(1)


def links(num_ranks: int, **more: Any) -> RankLinkSettings:
    """Addresses of this machine that nobody else has: all of 127/8 is."""
    pid = os.getpid()
    block = f"127.{1 + pid % 250}.{1 + pid // 250 % 250}"
    addresses = tuple((f"{block}.{next(numbers) % 250 + 1}", PORT) for _ in range(num_ranks))
    given = {"secret": SECRET, "silence_s": NEVER_S, "deadline_s": NEVER_S} | more
    return RankLinkSettings(addresses, **given)


def record_of(expert: int, schema: ExpertSchema = SCHEMA) -> torch.Tensor:
    """Bytes that tell the expert, and where in the record they are."""
    places = torch.arange(schema.record_bytes // 4, dtype=torch.int32)
    return (places * 7 + 1000 * (expert + 1)).view(torch.uint8)


HOLDS_5 = Served(np.array([[3, EMPTY, 5]], dtype=np.int32), 0, is_open=True)


@dataclass
class Rank:
    """Rank 1 in this process: one layer, of which slot 2 holds expert 5."""

    settings: RankLinkSettings
    schema: ExpertSchema = SCHEMA
    served: Served = HOLDS_5
    afterwards: list[Served] = field(default_factory=list)  # how it stands at each next look

    def __post_init__(self) -> None:
        self.bank = ExpertBank(self.schema, 1, 3, num_staging=0)
        self.bank.live(0, 0).copy_(record_of(3, self.schema))
        self.bank.live(0, 2).copy_(record_of(5, self.schema))
        self.open()

    def open(self) -> None:
        self.server = serve_slots(self.settings, 1, GROUP, self.bank, self.look)

    def look(self) -> Served:
        now = self.served
        if self.afterwards:
            self.served = self.afterwards.pop(0)
        return now


PART = SlotPart(0, 0, 2, 5, 0, SIZE)


@pytest.fixture
def start() -> Iterator[Callable[..., tuple[Rank, OtherRanks]]]:
    """Start rank 1, and rank 0's way to it."""
    with ExitStack() as stack:

        def started(**given: Any) -> tuple[Rank, OtherRanks]:
            rank = Rank(given.pop("settings", None) or links(2), **given)
            stack.callback(lambda: rank.server.close())
            asks = OtherRanks(rank.settings, 0, GROUP, rank.schema.record_bytes)
            stack.callback(asks.close)
            return rank, asks

        yield started


Start = Callable[..., tuple[Rank, OtherRanks]]


def taken(asks: OtherRanks, part: SlotPart = PART) -> torch.Tensor:
    into = torch.zeros(part.num_bytes, dtype=torch.uint8)
    assert asks.fetch(1, part, into).is_complete()
    return into


# -- what is given


def test_part_of_a_live_slot_is_given_as_it_is(start: Start) -> None:
    rank, asks = start()

    assert asks.ranks == {1}
    assert torch.equal(taken(asks), record_of(5))
    assert torch.equal(taken(asks, replace(PART, offset=100, num_bytes=7)), record_of(5)[100:107])
    assert rank.server.num_bytes_sent == SIZE + 7


def test_record_of_several_pieces_is_complete(start: Start) -> None:
    _, asks = start(schema=BIG_SCHEMA)
    size = BIG_SCHEMA.record_bytes

    assert size > 4 * PIECE_BYTES
    whole = taken(asks, replace(PART, num_bytes=size))
    assert torch.equal(whole, record_of(5, BIG_SCHEMA))


def num_connections() -> int:
    return sum(thread.name == "rank-client" for thread in threading.enumerate())


def test_connection_is_reused_and_reopened_after_it_was_closed(start: Start) -> None:
    rank, asks = start()
    for _ in range(3):
        taken(asks)
    assert num_connections() == 1

    rank.server.close()
    rank.open()

    assert torch.equal(taken(asks), record_of(5))


# -- what is refused, in words


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"weights_version": 1}, "weights version 0, expected 1"),
        ({"slot": 0}, "layer 0 slot 0 holds expert 3, expected expert 5"),
        ({"slot": 1}, "layer 0 slot 1 holds nothing, expected expert 5"),
        ({"slot": 1, "expert": -1}, "layer 0 slot 1 holds nothing, expected expert -1"),
        ({"slot": 3}, "1 layers of 3 slots, found a request for layer 0 slot 3"),
        ({"layer": -1}, "1 layers of 3 slots, found a request for layer -1 slot 2"),
        ({"offset": 1}, "has 4096 bytes, found a request for 4096 bytes from byte 1 on"),
        ({"offset": -1}, "has 4096 bytes, found a request for 4096 bytes from byte -1 on"),
    ],
)
def test_refused_request_has_a_reason_and_causes_no_back_off(
    start: Start, changes: dict[str, int], words: str
) -> None:
    rank, asks = start()

    with pytest.raises(RefusedError, match=rf"rank 1 at .*: .*{words}"):
        taken(asks, replace(PART, **changes))

    assert torch.equal(taken(asks), record_of(5))
    assert rank.server.num_bytes_sent == SIZE


def test_while_the_weights_are_replaced_nothing_is_given(start: Start) -> None:
    rank, asks = start()
    rank.served = replace(rank.served, is_open=False)

    with pytest.raises(RefusedError, match="being replaced"):
        taken(asks)


def test_bytes_are_void_if_an_update_or_a_swap_began_while_they_were_sent(start: Start) -> None:
    rank, asks = start()
    well = rank.served
    moved = replace(well, slot_to_expert=np.array([[3, 5, EMPTY]], dtype=np.int32))
    began, ended = replace(well, is_open=False), replace(well, weights_version=1)

    for later, words in (
        (began, "the weights are being replaced"),
        (ended, "weights version 1, expected 0"),
        (moved, "layer 0 slot 2 holds nothing, expected expert 5"),
    ):
        rank.afterwards = [later, well]
        with pytest.raises(RefusedError, match=f"received bytes are invalid: {words}"):
            taken(asks)

    assert rank.server.num_bytes_sent == 0
    assert torch.equal(taken(asks), record_of(5))


@pytest.mark.parametrize("group", [GroupName("another run", 0), GroupName("run", 1)])
def test_client_of_another_run_or_membership_is_refused(start: Start, group: GroupName) -> None:
    rank, _ = start()

    with (
        closing(OtherRanks(rank.settings, 0, group, SIZE)) as asks,
        pytest.raises(RefusedError, match=f"request of {group}, expected {GROUP}"),
    ):
        taken(asks)


def test_rank_that_is_another_one_is_refused(start: Start) -> None:
    rank, _ = start()
    astray = replace(rank.settings, addresses=rank.settings.addresses[::-1])

    with closing(OtherRanks(astray, 1, GROUP, SIZE)) as asks:
        into = torch.zeros(SIZE, dtype=torch.uint8)
        with pytest.raises(MigrationError, match=r"found rank 1 .*, expected rank 0"):
            asks.fetch(0, PART, into)


@contextmanager
def greeted(rank: Rank) -> Iterator[Wire]:
    """A connection to a rank, spoken by hand."""
    with closing(connect(rank.settings.addresses[1], NEVER_S)) as end:
        wire = Wire(end, time.monotonic() + NEVER_S, NEVER_S)
        client_handshake(wire, SECRET, protocol=PROTOCOL)
        yield wire


def request(part: SlotPart, answer_s: float) -> Message:
    """What a client sends for a part."""
    return asdict(GROUP) | asdict(part) | {"answer_s": answer_s, "deadline_s": NEVER_S}


def test_client_with_malformed_requests_is_disconnected_others_are_served(start: Start) -> None:
    rank, asks = start()
    with greeted(rank) as wire:
        wire.send({"layer": "the first one"})
        assert not wire.wait_for_data(NEVER_S)

    assert torch.equal(taken(asks), record_of(5))


def test_part_that_gets_no_turn_in_time_is_refused(start: Start) -> None:
    rank, _ = start(settings=links(2, max_transfers=1), schema=BIG_SCHEMA)
    size = BIG_SCHEMA.record_bytes
    with greeted(rank) as slow, greeted(rank) as in_a_hurry:
        slow.send(request(replace(PART, num_bytes=size), NEVER_S))
        assert slow.receive() == {"num_bytes": size}  # and takes none of it in

        in_a_hurry.send(request(PART, 0.01))
        with pytest.raises(RefusedError, match="1 transfers are under way"):
            in_a_hurry.receive_answer()


def test_rank_gives_no_more_than_its_budget(start: Start) -> None:
    _, asks = start(settings=links(2, bytes_per_second=1.0), schema=BIG_SCHEMA)
    two_pieces = replace(PART, num_bytes=2 * PIECE_BYTES)
    for _ in range(2):
        taken(asks, two_pieces)  # what a time of silence has saved up

    with pytest.raises(RefusedError, match="budget"):
        taken(asks, two_pieces)


# -- death and silence


def test_unreachable_rank_is_in_back_off_and_used_once_reachable() -> None:
    settings = links(2, back_off_s=0.01)
    with closing(OtherRanks(settings, 0, GROUP, SIZE)) as asks:
        with pytest.raises(MigrationError, match=r"rank 1 at .* port .*: cannot connect"):
            taken(asks)
        with closing(Rank(settings).server):
            assert torch.equal(taken_after_back_off(asks), record_of(5))


def taken_after_back_off(asks: OtherRanks) -> torch.Tensor:
    while True:
        try:
            return taken(asks)
        except RefusedError as exc:
            if "in back-off" not in str(exc):
                raise


def test_rank_link_leaves_no_threads_or_files() -> None:
    def standing() -> tuple[int, int]:
        is_socket = [one.is_socket() for one in Path("/proc/self/fd").iterdir() if one.exists()]
        return threading.active_count(), sum(is_socket)

    before = standing()
    for _ in range(3):
        rank = Rank(links(2))
        asks = OtherRanks(rank.settings, 0, GROUP, SIZE)
        taken(asks)
        asks.close()
        rank.server.close()
        with pytest.raises(RefusedError, match="closing"):
            taken(asks)

    assert standing() == before


@contextmanager
def rank_with_expert_0(
    settings: RankLinkSettings, rank: int, corrupt: int = 0, at_the_end: Callable[[], object] = int
) -> Iterator[None]:
    """Hold expert 0 in slot 1; do something once its bytes are sent, before they count."""
    bank, looks = ExpertBank(SCHEMA, 1, 2, num_staging=0), itertools.count()
    bank.live(0, 1).copy_(record_of(0))
    bank.live(0, 1)[17] ^= corrupt

    def served() -> Served:
        if next(looks) == 1:
            at_the_end()
        return Served(np.array([[EMPTY, 0]], dtype=np.int32), 0, is_open=True)

    with closing(serve_slots(settings, rank, GROUP, bank, served)):
        yield


def be_a_rank(pipe: Connection, settings: RankLinkSettings, how: signal.Signals) -> None:
    """Rank 1, as a process that signals itself."""

    def signal_itself() -> None:
        # The thread itself: a stop of the process may strike a thread after this one has sent.
        signal.pthread_kill(threading.get_ident(), how)

    with rank_with_expert_0(settings, 1, at_the_end=signal_itself):
        pipe.send("ready")
        pipe.recv()


# One host, of which no GPU maps another's memory: ranks 1, 2 and 3 hold expert 0, rank 0 wants it.
UNMAPPED = Topology.uniform(num_nodes=1, ranks_per_node=4, slots_per_rank=2)
HELD = np.array([[EMPTY, EMPTY, EMPTY, 0, EMPTY, 0, EMPTY, 0]], dtype=np.int32)
SIX_RANKS = Topology.uniform(num_nodes=1, ranks_per_node=6, slots_per_rank=2)
HELD_BY_FIVE = np.concatenate([HELD, HELD[:, 4:]], axis=1)
WANTED = Move(0, 0, 0, Source.HOST)


def updated_host() -> LocalHost:
    """The memory of a host whose weights were updated: it has no record of them."""
    host = LocalHost({})
    host.invalidate(1, deadline_s=NEVER_S)
    return host


@dataclass
class Receiver:
    """Rank 0, with what its mover's thread works with."""

    stager: Stager
    choice: SourceChoice
    held: NDArray[np.int32]

    def stage(self, move: Move = WANTED) -> torch.Tensor:
        into = torch.zeros(SIZE, dtype=torch.uint8)
        pull = Pull(move, into, self.held)
        drive(self.stager.stage([pull], lambda: True), SharedPhase(RankPhase(0)), time.monotonic)
        return into

    @property
    def figures(self) -> StageFigures:
        return self.stager.figures


@pytest.fixture
def receiver(fork: Callable[..., Any]) -> Iterator[Callable[..., Receiver]]:
    """Rank 0 and others: ``receiver(how rank 1 ends, as a process then; its corruption)``."""
    with ExitStack() as stack:

        def started(
            how: signal.Signals | None = None,
            corrupt: int = 0,
            topology: Topology = UNMAPPED,
            present: tuple[int, ...] = (1, 2, 3),
        ) -> Receiver:
            # Only a rank that is stopped is silent: a busy one has as long as it takes.
            silence_s = 0.6 if how is signal.SIGSTOP else NEVER_S
            settings = links(topology.num_ranks, silence_s=silence_s)
            for rank in present:
                if rank == 1 and how is not None:
                    assert fork(be_a_rank, settings, how).receive() == "ready"
                else:
                    spoilt = corrupt if rank == 1 else 0
                    stack.enter_context(rank_with_expert_0(settings, rank, spoilt))
            others = OtherRanks(settings, 0, GROUP, SIZE)
            stack.callback(others.close)
            bank = ExpertBank(SCHEMA, 1, 2, num_staging=1)
            sources = WeightSources(MappedSlots(0, bank), updated_host(), others)
            choice = SourceChoice(
                0, topology, sources.readable, frozenset, reachable=sources.reachable
            )
            digests = torch.tensor([[digest(record_of(0))]])
            chunked = StageSettings(network=LinkBudget(SIZE // 4))
            stager = Stager(sources, choice, digests, chunked, time.monotonic)
            return Receiver(stager, choice, HELD if topology is UNMAPPED else HELD_BY_FIVE)

        yield started


def test_expert_missing_in_the_host_cache_is_read_from_another_rank(
    receiver: Callable[..., Receiver],
) -> None:
    made = receiver()

    assert torch.equal(made.stage(), record_of(0))
    figures = made.figures
    assert figures.bytes_by_source == {"other_rank": SIZE}
    assert (figures.num_staged, figures.num_retries) == (1, 0)


@pytest.mark.system
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_source_that_dies_or_stops_in_mid_transfer_is_left_for_the_next_replica(
    receiver: Callable[..., Receiver], how: signal.Signals
) -> None:
    made = receiver(how)

    for _ in range(2):  # the second time nobody asks it
        assert torch.equal(made.stage(), record_of(0))
    assert made.figures.num_retries == 2


def test_wrong_digest_quarantines_the_slot(
    receiver: Callable[..., Receiver],
) -> None:
    made = receiver(corrupt=255)
    for _ in range(2):
        assert torch.equal(made.stage(), record_of(0))

    figures = made.figures
    assert figures.bytes_by_source == {"rejected": SIZE, "other_rank": 2 * SIZE}
    assert (figures.num_wrong_digests, made.choice.num_quarantined) == (1, 1)


def test_ranks_that_give_nothing_are_passed_over_however_many(
    receiver: Callable[..., Receiver],
) -> None:
    made = receiver(topology=SIX_RANKS, present=(5,))

    assert torch.equal(made.stage(), record_of(0))
    assert made.figures.num_retries == 4


def test_record_on_no_host_is_an_error_that_names_each_host(
    receiver: Callable[..., Receiver],
) -> None:
    made = receiver()

    with pytest.raises(MigrationError, match=r"layer 0 expert 1: .*not in the host cache"):
        made.stage(replace(WANTED, expert=1))


# -- in its turn, and never a slot that is being written

# Two hosts of one rank with a spare each. Rank 0's expert 0 moves to rank 1's spare, and expert 1
# follows; then rank 0's slot 0 is free.
TWO_HOSTS = Topology.uniform(num_nodes=2, ranks_per_node=1, slots_per_rank=3)
FULL = Placement(np.array([[0, 1, EMPTY, 2, 3, EMPTY]]), num_experts=4)
TRADED = Placement(np.array([[2, 3, EMPTY, 0, 1, EMPTY]]), num_experts=4)


def test_network_ranks_come_after_the_host_and_mapped_peers() -> None:
    everybody = frozenset(range(4))
    sources = SourceChoice(0, UNMAPPED, frozenset([0, 1]), frozenset, reachable=everybody)
    mapped = Place(Source.PEER, 1, 1)
    far = [Place(Source.PEER, rank, 1, is_far=True) for rank in (2, 3)]

    assert sources.choose(replace(WANTED, source=Source.PEER), HELD, (), 0) == (mapped,)
    assert sources.choose(WANTED, HELD, (), 0) == (HOST,)
    assert sources.choose(WANTED, HELD, (mapped, HOST), 0) == (far[0],)
    assert sources.choose(WANTED, HELD, (mapped, HOST, far[0]), 1) == (far[1],)
    dead = SourceChoice(0, UNMAPPED, frozenset([0]), lambda: frozenset([1, 2]), reachable=everybody)
    assert dead.choose(WANTED, HELD, (HOST,), 0) == (far[1],)


def test_slot_freed_by_an_earlier_transaction_is_not_read(
    start: Start,
) -> None:
    pace = Pace(mode="flip", spare_slots=1, staging_experts=0)
    migration = build_migration(FULL, TRADED, TWO_HOSTS, plan_id=1, pace=pace)
    bank, table = ExpertBank(SCHEMA, 1, 3, num_staging=0), RoutingTable(FULL, max_replicas=2)
    share = Share(migration, RankSlots(1, TWO_HOSTS, bank, table, torch.zeros(1, 4, 2)))
    share.prepare(num_staging=0)
    sources = SourceChoice(1, TWO_HOSTS, frozenset([1]), frozenset, reachable=frozenset([0]))
    freed = {slot: n for n, txn in enumerate(migration.transactions) for _, slot in txn.frees}
    assert len(migration.transactions) > 1

    for slot, first in freed.items():
        expert = int(FULL.slot_to_expert[0, slot])
        move = Move(0, expert, 5, Source.HOST)
        for number in range(len(migration.transactions)):
            held = share.readable(number)
            found = [place.slot for place in sources.holders(move, held) if place.rank == 0]
            assert (slot in found) == (number <= first and slot < 3)

    # The source keeps to it, too: by what serves there, the slot holds nothing any more.
    rank, asks = start()
    rank.served = replace(rank.served, slot_to_expert=np.array([[3, EMPTY, EMPTY]], dtype=np.int32))
    with pytest.raises(RefusedError, match="slot 2 holds nothing, expected expert 5"):
        taken(asks)
    assert torch.equal(rank.bank.live(0, 2), record_of(5))


# -- new weights, and then a move between hosts

TWO_RANKS = Topology.uniform(num_nodes=2, ranks_per_node=1, slots_per_rank=4)
START = Placement(np.tile([0, 1, 2, 3, 4, 5, 6, 7], (2, 1)), num_experts=8)
SWAPPED = Placement(np.tile([7, 1, 2, 3, 4, 5, 6, 0], (2, 1)), num_experts=8)
# By rank: what it gets in every layer, and in which of its slots.
NEWCOMERS = ((7, 0), (0, 3))


class Sink:
    """Samples and states are nobody's here."""

    def offer(self, sample: object) -> bool:
        return True

    def state(self, state: RankState) -> None:
        pass


def new_weights(layer: int, expert: int) -> torch.Tensor:
    """A record that no checkpoint has."""
    generator = torch.Generator().manual_seed(100 * layer + expert)
    return torch.randn(SIZE // 4, generator=generator).view(torch.uint8)


def answer_of(weights: dict[str, torch.Tensor]) -> torch.Tensor:
    return swiglu(torch.linspace(-1, 1, 16).view(1, 16), weights["gate_up"], weights["down"])


@dataclass
class LiveRank:
    """One rank of two, with the host cache of a host of its own; nothing is shared but votes."""

    rank: int
    agent: RankAgent
    bank: ExpertBank
    store: StateStore
    clock: StepClock

    def step_until(self, is_reached: Callable[[], bool]) -> None:
        while not is_reached():
            if not self.agent.step():
                return
            self.clock.steps += 1

    def update(self, version: int) -> None:
        self.agent.begin_update(version)
        for layer, slot, expert in self.agent.held():
            self.bank.live(layer, slot).copy_(new_weights(layer, expert))
        self.agent.end_update()

    def move(self) -> None:
        """Every rank publishes the same plan in a store of its own."""
        plan_id, pace = self.store.next_plan_id(), Pace(staging_experts=4)
        migration = build_migration(
            START, SWAPPED, TWO_RANKS, plan_id=plan_id, pace=pace, weights_version=1
        )
        self.store.publish(migration)

    def halt(self) -> None:
        self.agent.request_halt()
        self.step_until(lambda: False)
        self.agent.close()

    def is_right(self, layer: int) -> bool:
        """Say whether the newcomer's slot has the new bytes, and gives the new answer."""
        expert, slot = NEWCOMERS[self.rank]
        expected = new_weights(layer, expert)
        found = {name: part[slot] for name, part in self.bank.weights(layer).items()}
        is_same_answer = torch.equal(answer_of(found), answer_of(SCHEMA.views(expected)))
        return self.bank.digest(layer, slot) == digest(expected) and is_same_answer


@contextmanager
def live_rank(
    rank: int, checkpoint: Checkpoint, model: ModelShape, settings: RankLinkSettings | None
) -> Iterator[LiveRank]:
    address = HostCacheAddress(f"far-{os.getpid()}-{rank}", os.urandom(16))
    group, bank = dist.group.WORLD, ExpertBank(SCHEMA, 2, 4, num_staging=4)
    assert group is not None
    votes = GlooVotes(group, deadline_s=NEVER_S)
    with (
        closing(HostCacheServer.of_checkpoint(address, checkpoint, model, SCHEMA)),
        closing(HostCacheClient(address, 8, SIZE, deadline_s=NEVER_S)) as host_cache,
    ):
        held = START.slot_to_expert[:, TWO_RANKS.slots_on(rank)].tolist()
        filled = fill_bank(bank, held, host_cache, deadline_s=NEVER_S)
        digests = agree_on_digests(filled, 2, 8, votes, deadline_s=NEVER_S)
        name = GroupName("run", 0)
        others = OtherRanks(settings, rank, name, SIZE) if settings is not None else None
        sources = WeightSources(MappedSlots(rank, bank), host_cache, others)
        store, clock = MemoryStore("test"), StepClock()
        store.commit(START, expected=None, reason="start")
        agent = wire_agent(
            AgentSettings(
                RankConfig("test", 4, 1, vote_deadline_s=NEVER_S, rank_links=settings),
                name.run,
                TWO_RANKS,
            ),
            Links(votes, sources, store, Sink()),
            rank=rank,
            bank=bank,
            digests=digests,
            placement=START,
            steps=clock,
        )
        agent.start()
        yield LiveRank(rank, agent, bank, store, clock)


@pytest.mark.system
def test_after_an_update_experts_move_between_hosts_that_share_nothing(
    run_ranks: Callable[..., list[Any]], small_checkpoint: Checkpoint, small_model: ModelShape
) -> None:
    settings = links(2)

    def serve(rank: int) -> tuple[bool, list[bool], dict[str, int], int]:
        with live_rank(rank, small_checkpoint, small_model, settings) as live:
            live.step_until(lambda: live.clock.steps == 4)
            live.update(version=1)
            live.move()
            live.step_until(lambda: live.agent.placement.generation == 1)
            live.halt()
            is_there = bool((live.agent.placement.slot_to_expert == SWAPPED.slot_to_expert).all())
            detail = live.agent.describe().detail
            names = {thread.name for thread in threading.enumerate()}
            left = [name for name in names if name.startswith("rank-")]
            right = [live.is_right(layer) for layer in (0, 1)]
            return is_there, right, detail["bytes_by_source"], len(left)

    found = run_ranks(2, serve)

    assert found == [(True, [True, True], {"other_rank": 2 * SIZE}, 0)] * 2


@pytest.mark.system
def test_move_without_links_is_aborted_and_serving_continues(
    run_ranks: Callable[..., list[Any]], small_checkpoint: Checkpoint, small_model: ModelShape
) -> None:
    def serve(rank: int) -> tuple[list[str], bool]:
        with live_rank(rank, small_checkpoint, small_model, None) as live:
            live.update(version=1)
            live.move()
            live.step_until(lambda: live.store.published() is None)
            live.halt()
            reasons = [str(event.detail) for event in live.store.events()]
            is_as_before = bool((live.agent.placement.slot_to_expert == START.slot_to_expert).all())
            return reasons, is_as_before

    found = run_ranks(2, serve)

    assert all(is_as_before for _, is_as_before in found)
    said = str(found)
    assert "weights version 1 is not in the host" in said


def test_addresses_that_do_not_fit_the_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match="one address"):
        RankLinkSettings((("127.0.0.1", PORT),) * 2, secret=SECRET)
    with pytest.raises(ConfigError, match=r"3 ranks, .* of 2"):
        RankConfig("test", 4, 1, rank_links=links(3)).check_ranks(TWO_HOSTS.num_ranks)


def test_address_that_is_taken_is_named(start: Start) -> None:
    rank, _ = start()

    with pytest.raises(MigrationError, match=r"cannot listen .* 127"):
        rank.open()
