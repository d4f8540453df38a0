"""The scrubber on rank agents in one process: corrupted bytes are found, said, and replaced."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from eplb.core.placement import EMPTY, Placement
from eplb.core.topology import Topology
from eplb.errors import RankError
from eplb.migration.build import Migration, Pace
from rebalance.swap.scrubber import Scrubber, in_hex
from rebalance.swap.swapper import LiveSlot, Loan
from rebalance.types import Record
from rebalance.weights.sources import HOST, Place, WeightSources
from runtime.experts import ExpertBank, ExpertSchema
from runtime.memory import digest
from runtime.streams import Completion
from telemetry.state.events import Event
from telemetry.state.runs import RankState
from tests.support.agent_group import AgentGroup, Notes, digests_of, record_of
from tests.support.limits import NEVER_S
from tests.support.local_group import LocalHost, local_slots

NUM_LAYERS, NUM_EXPERTS = 2, 3
SCHEMA = ExpertSchema.swiglu(hidden=8, intermediate=4)
# Two ranks of one host; three slots each for three experts; expert 2 has rank 1's slot alone.
TOPOLOGY = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=3)
START = Placement(np.tile([0, EMPTY, 1, 1, 2, EMPTY], (NUM_LAYERS, 1)), NUM_EXPERTS)
FULL = Placement(np.tile([0, 2, 1, 1, 2, 0], (NUM_LAYERS, 1)), NUM_EXPERTS)
NEXT = Placement(np.tile([0, 2, 1, 1, 2, EMPTY], (NUM_LAYERS, 1)), NUM_EXPERTS)


@dataclass(frozen=True)
class Setting:
    """What the group of a test is made of."""

    every_steps: int = 1
    plan_deadline_s: float = NEVER_S
    num_staging: int = 2
    start: Placement = START


class GatedSources(WeightSources):
    """Pulls that wait while the gate is shut, and fail as often as they are told to."""

    gate: threading.Event
    failures: list[Exception]
    asked: list[Place]

    def pull(self, record: Record, place: Place, offset: int, into: torch.Tensor) -> Completion:
        self.asked.append(place)
        self.gate.wait()
        if self.failures:
            raise self.failures.pop()
        return super().pull(record, place, offset, into)


class ForgetfulBank(ExpertBank):
    """Memory that loses a byte of what is written into the slots named."""

    forgets: frozenset[tuple[int, int]] = frozenset()

    def swap(self, layer: int, slot: int, entry: int) -> None:
        super().swap(layer, slot, entry)
        if (layer, slot) in self.forgets:
            self.live(layer, slot)[0] ^= 255


RECORDS = {
    (layer, expert): record_of(SCHEMA, layer, expert, NUM_EXPERTS)
    for layer in range(NUM_LAYERS)
    for expert in range(NUM_EXPERTS)
}


class Group(AgentGroup):
    """Two ranks that scrub, each behind a gate that the test may shut."""

    def __init__(self, start: Placement) -> None:
        super().__init__(start, TOPOLOGY)
        self.records = {place: data.clone() for place, data in RECORDS.items()}
        self.gates: list[threading.Event] = []
        self.failures: list[list[Exception]] = []  # of each rank's next pulls
        self.asked: list[list[Place]] = []  # by each rank
        self.journal = Notes()

    def report(self, rank: int) -> RankState:
        return self.agents[rank].describe()

    def detail(self, rank: int) -> dict[str, Any]:
        return dict(self.report(rank).detail)

    def is_looking(self, rank: int) -> bool:
        return self.agents[rank].scrub_schedule.is_looking

    def scrubs(self, result: str) -> list[Event]:
        events = [event for event in self.store.events() if event.kind == "scrub"]
        return [event for event in events if event.detail["result"] == result]

    def offer(self) -> Migration:
        """Publish a plan, whatever the ranks are at."""
        return self.publish(NEXT, Pace(staging_experts=2))

    def is_right(self) -> bool:
        return all(
            torch.equal(bank.live(layer, slot), RECORDS[layer, expert])
            for agent, bank in zip(self.agents, self.banks, strict=True)
            for layer, slot, expert in agent.held()
        )


@pytest.fixture
def group(request: pytest.FixtureRequest) -> Iterator[Group]:
    setting: Setting = getattr(request, "param", Setting())
    made = Group(setting.start)
    for _ in range(TOPOLOGY.num_ranks):
        made.banks.append(ForgetfulBank(SCHEMA, NUM_LAYERS, 3, num_staging=setting.num_staging))
    for rank in range(TOPOLOGY.num_ranks):
        slots = local_slots(TOPOLOGY, rank, made.banks)
        sources = GatedSources(slots, LocalHost(made.records))
        sources.gate, sources.failures, sources.asked = threading.Event(), [], []
        sources.gate.set()
        made.fill(rank, made.records)
        made.add(
            sources,
            digests_of(made.records),
            journal=made.journal,
            plan_deadline_s=setting.plan_deadline_s,
            scrub_every_steps=setting.every_steps,
        )
        made.gates.append(sources.gate)
        made.failures.append(sources.failures)
        made.asked.append(sources.asked)
    made.begin()
    yield made
    for gate in made.gates:
        gate.set()
    made.close()


def a_scrubber() -> Scrubber:
    records = {(layer, e): RECORDS[layer, e] for layer in range(2) for e in range(3)}
    bank = ExpertBank(SCHEMA, NUM_LAYERS, 3, num_staging=2)
    return Scrubber(0, TOPOLOGY, bank, digests_of(records))


def test_sweep_visits_every_live_slot_once() -> None:
    scrubber = a_scrubber()

    sweep = [scrubber.next_slot(START) for _ in range(4)]

    assert sweep == [LiveSlot(0, 0, 0), LiveSlot(0, 2, 1), LiveSlot(1, 0, 0), LiveSlot(1, 2, 1)]
    assert scrubber.num_sweeps == 1
    assert scrubber.next_slot(START) == sweep[0]


def test_rank_without_experts_scrubs_nothing() -> None:
    nothing = Placement(np.array([[EMPTY, EMPTY, EMPTY, 0, 1, 2]] * NUM_LAYERS), NUM_EXPERTS)

    assert a_scrubber().next_slot(nothing) is None


def test_slot_that_lost_its_bytes_is_no_source_of_them() -> None:
    scrubber, loan = a_scrubber(), Loan(torch.zeros(SCHEMA.record_bytes, dtype=torch.uint8))

    pull = scrubber.right_bytes(LiveSlot(1, 2, 1), START, loan)

    assert pull.held.tolist() == [[0, EMPTY, 1, 1, 2, EMPTY], [0, EMPTY, EMPTY, 1, 2, EMPTY]]
    assert (pull.record, pull.move.dst_slot) == ((1, 1), 2)


def test_first_empty_slot_of_a_layer_is_lent() -> None:
    scrubber = a_scrubber()
    lent = scrubber.spare(0, START)

    assert lent is not None
    lent.record.copy_(RECORDS[0, 2])
    assert scrubber.damage(LiveSlot(0, 1, 2)) is None  # slot 1 of rank 0
    assert scrubber.spare(0, FULL) is None


def test_peers_of_the_host_are_asked_before_the_host_cache(group: Group) -> None:
    # Before any step: no check may come between the two, or the first is repaired from the second.
    # Both replicas of expert 1: rank 0 finds its own corrupted, and so is rank 1's.
    group.banks[1].live(1, 0)[9] ^= 255
    group.banks[0].live(1, 2)[9] ^= 255

    group.step_until(lambda: len(group.scrubs("repaired")) == 2)

    assert group.is_right()
    for_one = [place for rank in range(2) for place in group.asked[rank]]
    assert for_one.count(HOST) in (1, 2)  # the second repair may find the first replica whole
    firsts = [asked[0] for asked in group.asked if asked]
    assert HOST not in firsts


def test_clean_slots_are_checked_in_turn_without_events(group: Group) -> None:
    group.step_until(lambda: min(group.detail(rank)["sweeps"] for rank in range(2)) >= 2)

    assert group.scrubs("damaged") == []
    assert group.detail(0)["scrubbed"]["clean"] >= 7  # all of two sweeps but the very last
    assert group.report(0).digest_failures == 0


def test_corrupted_byte_is_reported_and_repaired_within_a_sweep(group: Group) -> None:
    group.step_until(lambda: group.detail(0)["sweeps"] == 1)
    group.banks[0].live(1, 2)[5] ^= 255
    found = in_hex(group.banks[0].digest(1, 2))
    looked_at_before = group.detail(0)["scrubbed"]["clean"]

    group.step_until(lambda: group.detail(0)["scrubbed"]["damaged"] == 1)
    looked_at = group.detail(0)["scrubbed"]["clean"] - looked_at_before
    group.step_until(lambda: bool(group.scrubs("repaired")))

    # A rank holds four experts. The look under way may have passed the slot just before.
    assert looked_at <= 4
    assert group.is_right()
    counts = group.detail(0)["scrubbed"]
    assert (counts["repaired"], counts["lost"]) == (1, 0)
    (damaged,) = group.scrubs("damaged")
    assert damaged.detail == {
        "rank": 0,
        "result": "damaged",
        "reason": "digest mismatch",
        "layer": 1,
        "slot": 2,
        "expert": 1,
        "found": found,
        "expected": in_hex(digest(RECORDS[1, 1])),
    }


def test_scrubber_repairs_a_sole_replica_from_the_host(group: Group) -> None:
    group.banks[1].live(0, 1).zero_()

    group.step_until(lambda: bool(group.scrubs("repaired")))

    assert group.is_right()
    assert group.report(1).frozen == ""


def test_unrepairable_slot_freezes_the_rank_and_serving_continues(group: Group) -> None:
    group.records[0, 2].zero_()  # the host's record, of which the peers know nothing
    group.banks[1].live(0, 1).zero_()

    group.step_until(lambda: bool(group.report(1).frozen))
    group.step()

    assert "layer 0 slot 1 expert 2" in group.report(1).frozen
    assert "the host: digest mismatch" in group.report(1).frozen
    assert group.report(0).frozen == ""
    group.step_until(lambda: bool(group.scrubs("lost")))


def test_memory_that_loses_its_bytes_again_and_again_is_given_up(group: Group) -> None:
    group.banks[0].forgets = frozenset({(0, 0)})
    group.banks[0].live(0, 0)[0] ^= 255

    group.step_until(lambda: bool(group.report(0).frozen))

    assert "layer 0 slot 0 expert 0" in group.report(0).frozen
    assert "2 repairs" in group.report(0).frozen


def test_journal_records_damage_and_repair(group: Group) -> None:
    group.banks[1].live(0, 1).zero_()

    group.step_until(lambda: bool(group.scrubs("repaired")))

    (damaged,), (repaired,) = group.journal.of("scrub damaged"), group.journal.of("scrub repaired")
    assert (damaged["rank"], damaged["layer"], damaged["slot"], damaged["expert"]) == (1, 0, 1, 2)
    assert damaged["expected"] == in_hex(digest(RECORDS[0, 2]))
    assert repaired["reason"] == "digest correct after the repair"


@pytest.mark.parametrize("group", [Setting(num_staging=0)], indirect=True)
def test_repair_without_staging_entries_uses_an_empty_slot(
    group: Group,
) -> None:
    group.banks[1].live(0, 1).zero_()

    group.step_until(lambda: bool(group.scrubs("repaired")))

    assert group.is_right()
    assert torch.equal(group.banks[1].live(0, 2), RECORDS[0, 2])  # it was brought here first
    assert group.report(1).frozen == ""


@pytest.mark.parametrize("group", [Setting(num_staging=0, start=FULL)], indirect=True)
def test_repair_without_memory_freezes_the_rank_with_a_reason(group: Group) -> None:
    group.banks[1].live(0, 1).zero_()

    group.step_until(lambda: bool(group.report(1).frozen))

    assert "found 0 staging entries" in group.report(1).frozen


def test_nothing_is_scrubbed_while_a_migration_is_under_way(group: Group) -> None:
    group.step_until(lambda: group.detail(0)["sweeps"] == 1)
    group.gates[0].clear()
    group.offer()
    # Rank 0 stands at the gate; rank 1 has nothing to bring and waits for it.
    group.step_until(lambda: [agent.phase for agent in group.agents] == ["stage", "swap"])
    group.banks[1].live(1, 0)[9] ^= 255
    before = [dict(group.detail(rank)["scrubbed"]) for rank in range(2)]
    for _ in range(50):
        group.step()

    assert [group.detail(rank)["scrubbed"] for rank in range(2)] == before
    group.gates[0].set()
    group.step_until(lambda: bool(group.scrubs("repaired")))
    assert group.agents[1].placement.hash == NEXT.hash
    assert group.is_right()


def test_plan_during_a_repair_is_served_before_the_repair(
    group: Group,
) -> None:
    group.gates[0].clear()
    group.banks[0].live(0, 0)[3] ^= 255
    group.step_until(lambda: bool(group.scrubs("damaged")))
    group.offer()  # the mover's thread waits at the gate, with the repair's bytes
    group.step_until(lambda: all(agent.phase != "idle" for agent in group.agents))
    for _ in range(10):
        group.step()
    assert {agent.placement.hash for agent in group.agents} == {START.hash}
    group.gates[0].set()

    group.step_until(lambda: bool(group.scrubs("repaired")))
    group.step_until(lambda: group.agents[0].placement.hash == NEXT.hash)

    assert group.is_right()
    assert group.report(0).frozen == ""


def test_weight_update_clears_results_of_old_weights(group: Group) -> None:
    group.gates[0].clear()
    group.banks[0].live(0, 0)[3] ^= 255
    group.step_until(lambda: bool(group.scrubs("damaged")))

    with ThreadPoolExecutor(2) as pool:
        beginning = [pool.submit(agent.begin_update, 1) for agent in group.agents]
        group.gates[0].set()  # only then can the look under way end
        for began in beginning:
            began.result()
        for agent, bank in zip(group.agents, group.banks, strict=True):
            for layer, slot, expert in agent.held():
                bank.live(layer, slot).copy_(RECORDS[layer, expert] + 1)
        for ended in [pool.submit(agent.end_update) for agent in group.agents]:
            ended.result()
    sweeps = group.detail(0)["sweeps"]
    group.step_until(lambda: group.detail(0)["sweeps"] >= sweeps + 2)

    assert torch.equal(group.banks[0].live(0, 0), RECORDS[0, 0] + 1)
    assert len(group.scrubs("damaged")) == 1


def update_weights(group: Group) -> None:
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(agent.begin_update, 1) for agent in group.agents]:
            done.result()
        for done in [pool.submit(agent.end_update) for agent in group.agents]:
            done.result()


def test_scrubber_repairs_from_peers_only_after_an_update(group: Group) -> None:
    update_weights(group)
    group.banks[0].live(1, 2)[5] ^= 255
    group.step_until(lambda: bool(group.scrubs("repaired")))

    assert group.is_right()
    assert HOST not in group.asked[0]


def test_bytes_that_no_peer_has_after_an_update_are_reported_lost(group: Group) -> None:
    update_weights(group)
    group.banks[1].live(0, 1).zero_()
    group.step_until(lambda: bool(group.report(1).frozen))

    assert "weights version 1" in group.report(1).frozen


def test_survivor_report_waits_for_the_check_and_stops_repairs(
    group: Group,
) -> None:
    group.gates[0].clear()
    group.banks[0].live(1, 2)[5] ^= 255
    group.step_until(lambda: bool(group.asked[0]))  # for the right bytes, which the gate holds back

    with ThreadPoolExecutor(1) as pool:
        said = pool.submit(group.agents[0].survivor_report)
        with pytest.raises(TimeoutError):
            said.result(0.1)
        group.gates[0].set()
        assert said.result().generation == 0

    assert group.agents[0].mover.ring.num_in_use == 0
    assert not torch.equal(group.banks[0].live(1, 2), RECORDS[1, 1])
    with pytest.raises(RankError, match="rank 0: no step may follow a death"):
        group.agents[0].step()


def test_survivor_report_is_in_time_while_the_host_is_reading(group: Group) -> None:
    group.gates[0].clear()
    group.banks[0].live(1, 2)[5] ^= 255
    group.step_until(lambda: bool(group.asked[0]))  # for the right bytes, which the gate holds back

    said = group.agents[0].survivor_report(0.05)
    group.gates[0].set()

    assert (said.generation, said.prepared) == (0, 0)
    done = group.agents[0].shared
    with done.changed:  # it ends as soon as it can, and repairs nothing
        done.changed.wait_for(lambda: not group.is_looking(0))
    assert group.agents[0].mover.ring.num_in_use == 0
    assert not torch.equal(group.banks[0].live(1, 2), RECORDS[1, 1])


@pytest.mark.parametrize("group", [Setting(every_steps=0)], indirect=True)
def test_disabled_scrubber_checks_no_slot(group: Group) -> None:
    group.banks[0].live(0, 0)[3] ^= 255
    for _ in range(50):
        group.step()

    assert sum(group.detail(0)["scrubbed"].values()) == 0


@pytest.mark.parametrize("group", [Setting(0)], indirect=True)
def test_plan_of_a_stalled_mover_is_aborted_and_the_reason_names_it(group: Group) -> None:
    group.gates[0].clear()
    group.offer()
    pulling = "mover: pulling layer 0 expert 2 from slot 1 of rank 1"
    # The other rank's mover is not stalled: the time that is skipped must not be its own.
    group.step_until(
        lambda: (
            group.report(0).progress_of == pulling
            and "computing" not in group.report(1).progress_of
        )
    )
    group.time.skip(NEVER_S + 0.5)
    group.step_until(lambda: group.store.published() is None)

    reasons = [event.detail["reason"] for event in group.store.events() if event.kind == "abort"]
    words = f"rank 0: {pulling} for {NEVER_S:.0f}"
    assert any(reason.startswith(words) for reason in reasons) or reasons == [
        "requested by another rank"
    ]
    report = group.report(0)
    assert (report.progress_of, report.progress_thread) == (pulling, "mover")
    assert report.progress_age_s > NEVER_S

    group.gates[0].set()
    group.step_until(lambda: all(agent.phase == "idle" for agent in group.agents))
    group.offer()
    group.step_until(lambda: group.agents[0].placement.hash == NEXT.hash)


@pytest.mark.parametrize("group", [Setting(every_steps=0)], indirect=True)
def test_failing_mover_drops_its_plan_and_the_next_one_is_brought(group: Group) -> None:
    group.failures[0].append(ValueError("a torn wire"))
    group.offer()
    group.step_until(lambda: group.store.published() is None)
    group.step_until(lambda: all(agent.phase == "idle" for agent in group.agents))
    assert group.agents[0].placement.hash == START.hash

    group.offer()
    group.step_until(lambda: group.agents[0].placement.hash == NEXT.hash)
    assert group.is_right()
    assert (group.report(0).mover_failures, group.report(0).frozen) == (1, "")


@pytest.mark.parametrize("group", [Setting(every_steps=0)], indirect=True)
def test_mover_that_fails_twice_freezes_the_rank_and_serving_continues(group: Group) -> None:
    for _ in range(2):
        group.failures[0].append(ValueError("a torn wire"))
        group.offer()
        group.step_until(lambda: group.store.published() is None)
        group.step_until(lambda: not any(agent.describe().plan_id for agent in group.agents))
    group.step_until(lambda: bool(group.report(0).frozen))
    group.step()

    assert "ValueError: a torn wire" in group.report(0).frozen
    assert group.report(0).mover_failures == 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_exited_thread_is_reported_and_weights_can_still_be_updated(
    group: Group,
) -> None:
    watcher = group.agents[1].watcher
    watcher.do(lambda: (_ for _ in ()).throw(SystemExit))  # the only way to end a thread unheard
    group.step_until(lambda: bool(group.report(1).frozen))

    assert group.report(1).frozen == "rank 1: thread eplb-mover exited unexpectedly"
    with ThreadPoolExecutor(2) as pool:
        for call in ("begin_update", "end_update"):
            args = (1,) if call == "begin_update" else ()
            asked = [pool.submit(getattr(agent, call), *args) for agent in group.agents]
            for done in asked:
                done.result()
    group.step()
