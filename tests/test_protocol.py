"""Every interleaving of three ranks over the real phase machine and the real votes.

An explicit-state search: ``rebalance/phases.py`` and ``rebalance/vote.py`` run as they are; what
surrounds them (when a plan is seen, bytes arrive, votes are late, ranks wish to abort or die, the
store is written) happens in every possible order. Steps are counted from the slowest rank's even
boundary, so that the states are finite although serving goes on for ever.

A rank passes boundary n only once every rank has passed n - 1: the exchange of tokens in each step
is a barrier. Votes start at even boundaries and are read at the next odd one, or, when late and
nothing was prepared, before the next vote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

import pytest

from rebalance import phases
from rebalance.phases import Phase, PlanRef, RankPhase, Swap
from rebalance.vote import Ballot, Verdict

NUM_RANKS = 3
VOTE_EVERY = 2
NONE = -9  # no vote, no transaction, no step

Layers = tuple[int, ...]  # per layer, the plan that wrote what it serves; 0: the start
ReadVerdict = Callable[[RankPhase, Ballot, Verdict], tuple[RankPhase, Swap | None]]


class Violation(AssertionError):
    """Something that must never happen, happened."""


class Write(NamedTuple):
    """What a rank has still to tell the store: what serves after a plan."""

    plan_id: int
    base: int
    generation: int
    serving: Layers


class Rank(NamedTuple):
    at: int  # the boundary that it passes next
    state: RankPhase
    serving: Layers
    awaits: int = NONE  # the boundary whose vote it has still to read
    cast: Ballot | None = None  # its ballot in that vote
    reading: int = NONE  # the transaction whose bytes it copies from its peers
    to_write: tuple[Write, ...] = ()
    wants_halt: bool = False
    halt_at: int = NONE
    has_ended: bool = False  # halted, or found a vote broken: runs no further step
    is_dead: bool = False


class World(NamedTuple):
    ranks: tuple[Rank, ...]
    votes: tuple[tuple[int, tuple[Ballot | None, ...]], ...]  # (boundary, ballots by rank)
    open_plan: PlanRef | None
    open_base: Layers  # what the open plan starts from
    committed: tuple[int, Layers]  # generation, and what serves
    num_published: int
    wishes: int  # to abort, that may still arise
    halts: int
    deaths: int


@dataclass(frozen=True)
class Scenario:
    """What may happen, and how ranks behave."""

    plans: tuple[int, ...]  # transactions of each plan, each one layer; published in order
    wishes: int = 0
    halts: int = 0
    deaths: int = 0
    is_withdrawn: bool = False  # the controller may close a plan at any moment
    staging: int = 2  # transactions that fit the ring
    read_verdict: ReadVerdict = phases.read_verdict
    skips_when_prepared: bool = False  # a broken rank: never waits for a late vote
    stages_unadopted: bool = False  # a broken rank: does not wait until all work on the plan

    def start(self) -> World:
        layers = (0,) * max(self.plans, default=1)
        rank = Rank(0, RankPhase(generation=0), layers)
        store = (None, layers, (0, layers), 0)
        return World((rank,) * NUM_RANKS, (), *store, self.wishes, self.halts, self.deaths)


# -- one rank


def with_rank(world: World, index: int, rank: Rank) -> World:
    ranks = world.ranks
    return world._replace(ranks=(*ranks[:index], rank, *ranks[index + 1 :]))


def hear(world: World, rank: Rank) -> Rank:
    """RankAgent.hear: adopt what is published, or wish for the end of what is not."""
    state, published = rank.state, world.open_plan
    if state.plan is not None:
        if published is None or published.plan_id != state.plan.plan_id:
            state = phases.want_abort(state, state.plan.plan_id, "withdrawn")
    elif published is not None and world.open_base == rank.serving:
        state = phases.see_plan(state, published)
    return rank._replace(state=state)


def may_stage(scenario: Scenario, rank: Rank) -> bool:
    """Mover.bring: in order, preloaded, adopted by all, wanted, and with room in the ring."""
    state = rank.state
    return (
        state.plan is not None
        and rank.reading == NONE
        and state.phase is not Phase.ABORTED
        and not state.abort_reason
        and state.is_preloaded
        and (state.is_adopted or scenario.stages_unadopted)
        and state.prepared < state.plan.num_transactions
        and state.prepared - state.swapped < scenario.staging
    )


def off_path(scenario: Scenario, world: World, index: int) -> Iterator[tuple[str, World]]:
    """What the threads of one rank may do next, whatever its steps do."""
    rank = world.ranks[index]
    state, plan = rank.state, rank.state.plan

    def becomes(what: str, **changes: object) -> tuple[str, World]:
        return f"rank {index} {what}", with_rank(world, index, rank._replace(**changes))

    if rank.to_write:
        yield f"rank {index} writes", written(world, index)
    elif (heard := hear(world, rank)) != rank:
        yield becomes("hears the store", state=heard.state)
    if plan is None:
        return
    if state.phase is not Phase.ABORTED and not state.is_preloaded and not state.abort_reason:
        yield becomes("preloads", state=phases.preloaded(state, plan.plan_id))
    if may_stage(scenario, rank):
        check_sources(world, index)
        yield becomes(f"reads transaction {state.prepared}", reading=state.prepared)
    if rank.reading != NONE:
        staged = phases.staged(state, plan.plan_id, rank.reading + 1)
        yield becomes("has staged", state=staged, reading=NONE)
    elif state.phase is Phase.ABORTED:
        yield becomes("has drained", state=phases.aborted(state))
    if world.wishes and state.phase is not Phase.ABORTED and not state.abort_reason:
        label, wished = becomes("fails", state=phases.want_abort(state, plan.plan_id, "failed"))
        yield label, wished._replace(wishes=world.wishes - 1)


# -- a rank's steps


def boundaries(scenario: Scenario, world: World, index: int) -> Iterator[tuple[str, World]]:
    """How one rank may pass its next boundary, as RankAgent.step does."""
    rank = world.ranks[index]
    if any(other.at < rank.at for other in world.ranks):
        return  # a slower rank has not begun the step before
    if rank.awaits == NONE:
        yield passed(world, index, rank, "passes")
        return
    assert rank.cast is not None, "a vote that is awaited was cast"
    is_due = rank.at % VOTE_EVERY == 0
    has_nothing_to_lose = rank.cast.prepared == rank.state.swapped
    if not is_due and (has_nothing_to_lose or scenario.skips_when_prepared):
        yield passed(world, index, rank, "finds the vote late and passes")
    ballots = dict(world.votes)[rank.awaits]
    if any(other.is_dead for other in world.ranks):
        broken = rank._replace(has_ended=True)
        yield f"rank {index} finds the vote broken", with_rank(world, index, broken)
    if all(ballots):
        yield passed(world, index, obeyed(scenario, world, index, ballots), "reads and passes")


@lru_cache(maxsize=None)
def verdict_of(ballots: tuple[Ballot, ...]) -> Verdict:
    columns = zip(*(ballot.encode() for ballot in ballots), strict=True)
    return Verdict.decode([min(column) for column in columns])


def obeyed(
    scenario: Scenario, world: World, index: int, ballots: tuple[Ballot | None, ...]
) -> Rank:
    """RankAgent._obey, with a swap applied at once."""
    rank = world.ranks[index]
    verdict = verdict_of(tuple(ballot for ballot in ballots if ballot))
    halt_at, before = rank.halt_at, rank.state
    if verdict.halt and halt_at == NONE:
        halt_at = rank.awaits + VOTE_EVERY
    assert rank.cast is not None, "what is read was cast"
    state, order = scenario.read_verdict(before, rank.cast, verdict)
    rank = rank._replace(state=state, awaits=NONE, cast=None, halt_at=halt_at)
    if state.frozen_reason:
        raise Violation(f"rank {index} is frozen: {state.frozen_reason}")
    if order is not None:
        return swapped(world, index, rank, order)
    if state.phase is Phase.ABORTED and before.phase is not Phase.ABORTED:
        assert state.plan is not None, "an aborted plan drains first"
        base = state.plan.base_generation
        write = Write(state.plan.plan_id, base, state.generation, rank.serving)
        return rank._replace(to_write=(*rank.to_write, write))
    return rank


def swapped(world: World, index: int, rank: Rank, order: Swap) -> Rank:
    plan = rank.state.plan
    assert plan is not None, "only a plan is swapped"
    layers = range(order.first, order.last)
    for reader, other in enumerate(world.ranks):
        if other.reading in layers:
            raise Violation(f"rank {index} overwrites layer {other.reading} that {reader} reads")
    done = [layer for layer, writer in enumerate(rank.serving) if writer == plan.plan_id]
    if done != list(range(order.first)):
        raise Violation(f"rank {index} swaps {order} of plan {plan.plan_id} on {rank.serving}")
    serving = tuple(plan.plan_id if n in layers else w for n, w in enumerate(rank.serving))
    state = phases.finish_swap(phases.completed(rank.state, plan.plan_id, order.last))
    rank = rank._replace(state=state, serving=serving)
    if state.plan is None:
        write = Write(plan.plan_id, plan.base_generation, state.generation, serving)
        rank = rank._replace(to_write=(*rank.to_write, write))
    return rank


def passed(world: World, index: int, rank: Rank, how: str) -> tuple[str, World]:
    """The rank begins the step after its boundary, and votes before it when a vote is due."""
    label = f"rank {index} {how} boundary {rank.at}"
    if rank.at == rank.halt_at:
        return f"{label}: halts", with_rank(world, index, rank._replace(has_ended=True))
    votes = dict(world.votes)
    if rank.at % VOTE_EVERY == 0:
        # The boundary's number is left out of the ballot: states would never repeat.
        ballot = phases.ballot(
            rank.state, step=0, membership=0, weights_version=0, halt=rank.wants_halt
        )
        cast = list(votes.get(rank.at, (None,) * NUM_RANKS))
        cast[index] = ballot
        votes[rank.at] = tuple(cast)
        rank = rank._replace(awaits=rank.at, cast=ballot)
    after = with_rank(world, index, rank._replace(at=rank.at + 1))
    after = after._replace(votes=tuple(sorted(votes.items(), key=lambda vote: vote[0])))
    check_step(after, index)
    return label, after


# -- the store


def written(world: World, index: int) -> World:
    """Watcher._write over the store's rules: compare and set, the first writes."""
    rank = world.ranks[index]
    write, *rest = rank.to_write
    world = with_rank(world, index, rank._replace(to_write=tuple(rest)))
    generation, serving = world.committed
    if write.generation == write.base:  # nothing of the plan was swapped
        is_open = world.open_plan is not None and world.open_plan.plan_id == write.plan_id
        return world._replace(open_plan=None) if is_open else world
    if write.generation < generation:
        return world
    if write.generation == generation:
        if write.serving != serving:
            raise Violation(f"generation {generation} is {serving} and {write.serving}")
        return world
    if write.base != generation:
        raise Violation(f"generation {write.generation} follows {write.base}, not {generation}")
    return world._replace(committed=(write.generation, write.serving), open_plan=None)


def controlled(scenario: Scenario, world: World) -> Iterator[tuple[str, World]]:
    """What the controller may do."""
    if world.open_plan is not None:
        if scenario.is_withdrawn:
            yield "the plan is withdrawn", world._replace(open_plan=None)
        return
    if world.num_published < len(scenario.plans):
        plan_id = world.num_published + 1
        generation, serving = world.committed
        plan = PlanRef(plan_id, plan_id, generation, scenario.plans[plan_id - 1], 1)
        yield (
            f"plan {plan_id} is published",
            world._replace(open_plan=plan, open_base=serving, num_published=plan_id),
        )


# -- claims


def check_step(world: World, index: int) -> None:
    """No two ranks run one step with different maps, or one step that another halted before."""
    rank = world.ranks[index]
    for number, other in enumerate(world.ranks):
        if other.at == rank.at and other.serving != rank.serving:
            raise Violation(
                f"ranks {index} and {number} run one step with {rank.serving} and {other.serving}"
            )
        if other.has_ended and not other.is_dead and other.at == other.halt_at == rank.at - 1:
            raise Violation(f"rank {index} runs a step before which rank {number} halted")


def check_sources(world: World, index: int) -> None:
    """What is read from a peer is what the reader's plan starts from."""
    rank = world.ranks[index]
    layer = rank.state.prepared
    for number, other in enumerate(world.ranks):
        if other.serving[layer] != rank.serving[layer]:
            raise Violation(f"rank {index} reads layer {layer} of rank {number}, which is another")


def is_settled(scenario: Scenario, world: World) -> bool:
    """Every plan is finished or dropped, on all ranks and in the store."""
    if scenario.halts and not world.halts:
        return all(rank.has_ended for rank in world.ranks)
    return (
        world.num_published == len(scenario.plans)
        and world.open_plan is None
        and all(rank.state.plan is None and not rank.to_write for rank in world.ranks)
    )


# -- the search


def successors(scenario: Scenario, world: World) -> Iterator[tuple[str, World]]:
    yield from controlled(scenario, world)
    for index, rank in enumerate(world.ranks):
        if rank.is_dead:
            continue
        yield from off_path(scenario, world, index)
        if not rank.has_ended:
            yield from boundaries(scenario, world, index)
        if world.halts and not rank.wants_halt:
            asks = with_rank(world, index, rank._replace(wants_halt=True))
            yield f"rank {index} asks for a halt", asks._replace(halts=world.halts - 1)
        if world.deaths:
            dies = with_rank(world, index, rank._replace(is_dead=True, has_ended=True))
            yield f"rank {index} dies", dies._replace(deaths=world.deaths - 1)


def canonical(world: World) -> World:
    """The same situation, with boundaries counted from the slowest rank's, and ranks in order."""
    base = min(rank.at for rank in world.ranks) // VOTE_EVERY * VOTE_EVERY
    needed = {
        number
        for rank in world.ranks
        if not rank.has_ended
        for number in (rank.awaits, rank.at - rank.at % VOTE_EVERY)
    }
    votes = [vote for vote in world.votes if vote[0] in needed]

    def shifted(number: int) -> int:
        return number if number == NONE else number - base

    ranks = [
        rank._replace(at=rank.at - base, awaits=shifted(rank.awaits), halt_at=shifted(rank.halt_at))
        for rank in world.ranks
    ]
    # Ranks differ in nothing but their number: any order of them is one state.
    order = sorted(
        range(NUM_RANKS), key=lambda n: hash((ranks[n], *(ballots[n] for _, ballots in votes)))
    )
    return world._replace(
        ranks=tuple(ranks[n] for n in order),
        votes=tuple((number - base, tuple(cast[n] for n in order)) for number, cast in votes),
    )


@dataclass
class Explored:
    """All states that can be reached, and how."""

    reached_by: dict[World, tuple[World | None, str]] = field(default_factory=dict)
    before: dict[World, list[World]] = field(default_factory=dict)

    def story(self, world: World | None) -> str:
        """One way to get there, event by event."""
        lines = []
        while world is not None:
            world, label = self.reached_by[world]
            lines.append(label)
        return "\n".join(reversed(lines))


def explore(scenario: Scenario) -> Explored:
    """Visit every state, breadth first, so that the story of a violation is a shortest one.

    Raises:
        Violation: with the events that lead to it.
    """
    start = canonical(scenario.start())
    explored = Explored({start: (None, "start")})
    front = [start]
    while front:
        reached = []
        for world in front:
            try:
                following = [(what, canonical(w)) for what, w in successors(scenario, world)]
            except Violation as exc:
                raise Violation(f"{exc}\n{explored.story(world)}") from exc
            for label, after in following:
                explored.before.setdefault(after, []).append(world)
                if after not in explored.reached_by:
                    explored.reached_by[after] = (world, label)
                    reached.append(after)
        front = reached
    return explored


def stuck(scenario: Scenario, explored: Explored) -> list[World]:
    """States from which no settled one can be reached."""
    good = {world for world in explored.reached_by if is_settled(scenario, world)}
    front = list(good)
    while front:
        earlier = {before for world in front for before in explored.before.get(world, [])} - good
        good |= earlier
        front = list(earlier)
    return [world for world in explored.reached_by if world not in good]
