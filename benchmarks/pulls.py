"""Random interleavings of the just-in-time replicas of ``runtime.batch.pulls``, by rule.

    python -m benchmarks.pulls --first 0 --count 100000
    python -m benchmarks.pulls --mutant "not closed"

A schedule is a seed. Three ranks run some steps of some layers; each has a compute stream and a
side stream, and any stream that may go on can be the next one. A record is two halves, copied one
after the other, so that a read beside a write is seen. Decisions are the real ones
(``runtime.batch.pull_rule``) for random batches. Between steps ranks swap to another placement,
flip, or load new weights, each as soon as its own stream gets there: nothing but the protocol keeps
a rank off what another one reads. Faults: a pull that is late, counts that one rank received
otherwise, the death of a rank.

Exchanges of counts and the closing exchange end when all ranks have begun them. A dispatch or a
combine waits only for ranks that rows come from, which is the least that a dispatcher promises.

The vote that decides swaps is taken as right: ``benchmarks.schedules`` explores it. Modelled, and
not run, are the streams; ``tests/runtime/batch`` runs the real ones.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eplb.core.placement import EMPTY
from runtime.batch.pull_rule import (
    NO_SLOT,
    Ints,
    PullRule,
    SlotTokens,
    moved_by_slot,
    plan_pulls,
    pulls_digest,
)

# -- Deployments and batches of the schedules, and what the real decision makes of them.

NUM_RANKS, NUM_SLOTS, NUM_LAYERS, NUM_EXPERTS = 3, 3, 2, 6
NUM_DEPLOYMENTS, NUM_BATCHES = 16, 24
DOMAIN = np.zeros(NUM_RANKS, np.int64)


class Rows(NamedTuple):
    """Rows that a source sends to a slot; slots from ``NUM_SLOTS`` on are spare."""

    source: int
    expert: int
    rank: int
    slot: int
    tokens: int


class Read(NamedTuple):
    """One record that a rank pulls into a spare slot of its own."""

    rank: int
    slot: int
    spare: int


@dataclass(frozen=True)
class Decision:
    """What a rank decides by the counts that it gathered."""

    rows: tuple[Rows, ...]  # of all sources
    reads: tuple[tuple[Read, ...], ...]  # of each rank
    moved: Ints  # [R, C]
    digest: int


@dataclass(frozen=True)
class Deployment:
    """Two placements that a migration leads between, and a rule."""

    held: tuple[NDArray[np.int32], NDArray[np.int32]]  # [L, R, C] each
    rule: PullRule


@cache
def deployment(number: int) -> Deployment:
    """Every expert somewhere, never twice on a rank."""
    rng = np.random.default_rng(number)
    rule = PullRule(1 + number % 2, least_rows=1, least_gain=1, most_readers=1 + number % 3)
    first, second = (_held(rng) for _ in range(2))
    return Deployment((first, second), rule)


def _held(rng: np.random.Generator) -> NDArray[np.int32]:
    held = np.full((NUM_LAYERS, NUM_RANKS, NUM_SLOTS), EMPTY, np.int32)
    for layer in held:
        layer[:, :2] = rng.permutation(NUM_EXPERTS).reshape(NUM_RANKS, 2)
        for rank in layer:
            if rng.random() < 0.6:
                rank[2] = rng.choice(np.setdiff1d(np.arange(NUM_EXPERTS), rank))
    return held


@cache
def decide(number: int, which: int, layer: int, batch: int, is_altered: bool) -> Decision:
    """Of a batch under a placement; altered: as a rank with other counts decides."""
    made = deployment(number)
    held = made.held[which][layer]
    counts = _counts(number, layer, batch)
    seen = np.roll(counts, 1, axis=1) if is_altered else counts
    served = _served(held, seen.sum(axis=0))
    pulls = plan_pulls(served, DOMAIN, made.rule)
    reads = tuple(
        tuple(
            Read(*divmod(int(source), NUM_SLOTS), spare)
            for spare, source in enumerate(of_rank)
            if source != NO_SLOT
        )
        for of_rank in pulls.source
    )
    # (expert, rank, slot, first, end): runs of the slots, cut where spare slots take their end.
    runs: list[tuple[int, int, int, int, int]] = []
    moved = moved_by_slot(pulls, NUM_SLOTS)
    for rank, slot in np.argwhere(served.tokens > 0):
        first = int(served.first[rank, slot])
        end = first + int(served.tokens[rank, slot] - moved[rank, slot])
        runs.append((int(held[rank, slot]), int(rank), int(slot), first, end))
    for rank, spare in np.argwhere(pulls.source != NO_SLOT):
        expert = int(held.reshape(-1)[pulls.source[rank, spare]])
        first, end = int(pulls.first[rank, spare]), int(pulls.end[rank, spare])
        runs.append((expert, int(rank), NUM_SLOTS + int(spare), first, end))
    return Decision(_rows(runs, counts, held), reads, moved, pulls_digest(pulls, served))


def _counts(number: int, layer: int, batch: int) -> Ints:
    rng = np.random.default_rng((number, layer, batch))
    hot = rng.permutation(NUM_EXPERTS)
    share = np.full(NUM_EXPERTS, 0.02)
    share[hot[: 1 + batch % 3]] = 1.0
    tokens = rng.choice([0, 0, 20, 40], size=NUM_RANKS)
    return np.stack([rng.multinomial(n, share / share.sum()) for n in tokens]).astype(np.int64)


def _served(held: NDArray[np.int32], totals: Ints) -> SlotTokens:
    first, tokens = np.zeros(held.shape, np.int64), np.zeros(held.shape, np.int64)
    for expert, total in enumerate(totals.tolist()):
        places = np.argwhere(held == expert)
        ends = [total * (n + 1) // len(places) for n in range(len(places))]
        for (rank, slot), begin, end in zip(places, [0, *ends], ends, strict=False):
            first[rank, slot], tokens[rank, slot] = begin, end - begin
    return SlotTokens(held.astype(np.int64), first, tokens, tokens > 0)


def _rows(
    runs: list[tuple[int, int, int, int, int]], counts: Ints, held: NDArray[np.int32]
) -> tuple[Rows, ...]:
    """Each source's part of the runs. No position is past an expert's last replica."""
    found = []
    starts = np.cumsum(counts, axis=0) - counts
    left = counts.copy()
    for expert, rank, slot, first, end in runs:
        for source in range(NUM_RANKS):
            begin = int(starts[source, expert])
            tokens = min(end, begin + int(counts[source, expert])) - max(first, begin)
            if tokens > 0:
                found.append(Rows(source, expert, rank, slot, tokens))
                left[source, expert] -= tokens
    for source, expert in np.argwhere(left > 0).tolist():
        rank, slot = np.argwhere(held == expert)[-1].tolist()
        found.append(Rows(source, expert, rank, slot, int(left[source, expert])))
    return tuple(found)


def random_batch(rng: random.Random) -> int:
    """The number of a batch."""
    return rng.randrange(NUM_BATCHES)


# -- One schedule: streams of three ranks, one turn at a time, in an order of its seed.

Word = tuple[int, int]  # expert, version of the weights
Record = list[Word]  # two halves
Place = tuple[int, int, int]  # rank, layer, slot
Stream = Iterator[Callable[[], bool]]  # stops at points where it goes on once the condition holds
FAILED = -1
MOST_TURNS = 5_000


class Violation(Exception):
    """What must never happen."""


class Stopped(Exception):
    """A rank ends serving, as the protocol wants it."""


@dataclass(frozen=True)
class Rules:
    """What the streams wait for; a mutant leaves one out."""

    pull_after_exchange: bool = True
    close_after_pull: bool = True
    combine_after_close: bool = True
    serve_after_pull: bool = True
    compare_digests: bool = True
    report_late: bool = True
    swap_before_exchange: bool = True
    source_is_live: bool = True
    count_at_home: bool = True


@dataclass
class Layer:
    """What ranks have done of a layer of a step."""

    counted: set[int] = field(default_factory=set)
    sent: set[int] = field(default_factory=set)
    returned: set[int] = field(default_factory=set)
    closed: dict[int, int] = field(default_factory=dict)  # rank -> its word
    combined: set[int] = field(default_factory=set)


@dataclass
class Rank:
    """Memory of a rank, and how far its streams are."""

    number: int
    live: dict[tuple[int, int], Record]  # by layer and slot
    spare: list[Record]
    decided: int = -1  # layers of all steps that its streams are through with
    pulled: int = -1
    closed: int = -1
    counts: Counter[int] = field(default_factory=Counter)  # tokens by expert
    has_stopped: str = ""
    reading: set[int] = field(default_factory=set)  # spare records that a product reads

    def has_decided(self, turn: int) -> bool:
        """Whether the exchange of counts of a layer has ended here."""
        return self.decided >= turn

    def has_pulled(self, turn: int) -> bool:
        """Whether this rank's pulls of a layer are complete."""
        return self.pulled >= turn

    def has_closed(self, turn: int) -> bool:
        """Whether the closing exchange of a layer has ended here."""
        return self.closed >= turn


class Schedule:
    """A seed's schedule under some rules."""

    def __init__(self, seed: int, rules: Rules) -> None:
        self.rng, self.rules = random.Random(seed), rules
        rng = self.rng
        self.number = rng.randrange(NUM_DEPLOYMENTS)
        self.held, self.rule = deployment(self.number).held, deployment(self.number).rule
        self.num_steps = rng.choice([2, 3, 4])
        # What happens before each step: the placement that serves, the version of the weights.
        self.which, self.version, self.batches = self._program()
        self.altered = (
            (rng.randrange(NUM_RANKS), self._some_layer()) if rng.random() < 0.1 else None
        )
        self.late = (rng.randrange(NUM_RANKS), self._some_layer()) if rng.random() < 0.1 else None
        self.dies_at = rng.randrange(20, 400) if rng.random() < 0.1 else None
        self.dead: set[int] = set()
        self.layers: dict[int, Layer] = defaultdict(Layer)
        self.pulling: Counter[Place] = Counter()  # records that are being read
        self.ranks = [self._rank(number) for number in range(NUM_RANKS)]
        self.counts: Counter[str] = Counter()
        self.trace: list[str] = []

    def _program(self) -> tuple[list[int], list[int], list[int]]:
        rng, which, version = self.rng, [0], [0]
        for _ in range(1, self.num_steps):
            which.append(which[-1] ^ (rng.random() < 0.6))
            version.append(version[-1] + (rng.random() < 0.2))
        batches = [random_batch(rng) for _ in range(self.num_steps * NUM_LAYERS)]
        return which, version, batches

    def _some_layer(self) -> int:
        return self.rng.randrange(self.num_steps * NUM_LAYERS)

    def _rank(self, number: int) -> Rank:
        live = {
            (layer, slot): [(int(self.held[0][layer, number, slot]), 0)] * 2
            for layer in range(NUM_LAYERS)
            for slot in range(NUM_SLOTS)
        }
        return Rank(number, live, [[(EMPTY, 0)] * 2 for _ in range(self.rule.spare_slots)])

    # -- what ranks decide

    def decision(self, rank: int, turn: int) -> Decision:
        """Of a rank for a layer of a step."""
        step, layer = divmod(turn, NUM_LAYERS)
        which = self.which[step]
        if not self.rules.source_is_live and rank == 0 and step + 1 < self.num_steps:
            which = self.which[step + 1]  # of a table that is to serve next
        is_altered = self.altered == (rank, turn)
        return decide(self.number, which, layer, self.batches[turn], is_altered)

    def rows_to(self, rank: int, turn: int) -> list[Rows]:
        """Rows that reach a rank, as each source sends them."""
        return [
            row
            for source in range(NUM_RANKS)
            for row in self.decision(source, turn).rows
            if row.source == source and row.rank == rank
        ]

    # -- streams

    def compute(self, rank: Rank) -> Stream:
        """The compute stream: swaps, exchanges, products."""
        for turn in range(self.num_steps * NUM_LAYERS):
            step, layer = divmod(turn, NUM_LAYERS)
            if layer == 0 and self.rules.swap_before_exchange:
                yield from self.swap(rank, step)
            state = self.layers[turn]
            state.counted.add(rank.number)
            yield partial(self.all_in, state.counted)
            rank.decided = turn
            state.sent.add(rank.number)
            rows = self.rows_to(rank.number, turn)
            sources = {row.source for row in rows}
            yield partial(self.all_in, state.sent, sources)
            self.count(rank, turn, rows)
            yield from self.product(rank, turn, [row for row in rows if row.slot < NUM_SLOTS])
            if self.rules.serve_after_pull:
                yield partial(rank.has_pulled, turn)
            if self.rules.combine_after_close:
                yield partial(rank.has_closed, turn)
            yield from self.product(rank, turn, [row for row in rows if row.slot >= NUM_SLOTS])
            state.returned.add(rank.number)
            holders = {
                row.rank
                for row in self.decision(rank.number, turn).rows
                if row.source == rank.number
            }
            yield partial(self.all_in, state.returned, holders)
            state.combined.add(rank.number)
        yield partial(rank.has_closed, self.num_steps * NUM_LAYERS - 1)

    def side(self, rank: Rank) -> Stream:
        """The side stream: pulls and closing exchanges."""
        for turn in range(self.num_steps * NUM_LAYERS):
            step, layer = divmod(turn, NUM_LAYERS)
            if not self.rules.swap_before_exchange and layer == 0:
                yield from self.swap(rank, step)
            state = self.layers[turn]
            if self.rules.pull_after_exchange:
                yield partial(rank.has_decided, turn)
            if not self.rules.close_after_pull:
                state.closed[rank.number] = self.decision(rank.number, turn).digest
            is_late = self.late == (rank.number, turn)
            for read in self.decision(rank.number, turn).reads[rank.number]:
                yield from self.pull(rank, layer, read, is_late)
            has_failed = is_late and bool(self.decision(rank.number, turn).reads[rank.number])
            word = self.decision(rank.number, turn).digest
            if has_failed and self.rules.report_late:
                word = FAILED
            rank.pulled = turn
            state.closed.setdefault(rank.number, word)
            if self.rules.combine_after_close:
                yield partial(self.all_in, state.closed.keys())
                self.check_words(rank, state)
            rank.closed = turn

    def pull(self, rank: Rank, layer: int, read: Read, is_late: bool) -> Stream:
        """Copy a record, half by half; a late one never gets its second half."""
        place, target = (read.rank, layer, read.slot), rank.spare[read.spare]
        self.pulling[place] += 1
        self.counts["pulls"] += 1
        for half in range(2):
            yield _at_once
            if read.spare in rank.reading:
                raise Violation(f"rank {rank.number} pulls into spare {read.spare}, which is read")
            if half == 0 or not is_late:
                target[half] = self.ranks[read.rank].live[layer, read.slot][half]
        self.pulling[place] -= 1

    def swap(self, rank: Rank, step: int) -> Stream:
        """Write what the placement and the weights of a step change, half by half."""
        held, version = self.held[self.which[step]], self.version[step]
        for (layer, slot), record in rank.live.items():
            word = (int(held[layer, rank.number, slot]), version)
            for half in range(2):
                if record[half] == word:
                    continue
                yield _at_once
                if self.pulling[rank.number, layer, slot] and not self.dead:
                    raise Violation(
                        f"rank {rank.number} layer {layer} slot {slot} is overwritten before step "
                        f"{step} while a peer reads it"
                    )
                record[half] = word
                self.counts["writes"] += 1

    def product(self, rank: Rank, turn: int, rows: list[Rows]) -> Stream:
        """Read the records of rows, in two looks."""
        if rank.has_stopped:
            raise Stopped(rank.has_stopped)
        step, layer = divmod(turn, NUM_LAYERS)
        spares = {row.slot - NUM_SLOTS for row in rows if row.slot >= NUM_SLOTS}
        rank.reading |= spares
        for half in range(2):
            yield _at_once
            for row in rows:
                is_spare = row.slot >= NUM_SLOTS
                record = (
                    rank.spare[row.slot - NUM_SLOTS] if is_spare else rank.live[layer, row.slot]
                )
                if record[half] != (row.expert, self.version[step]):
                    raise Violation(
                        f"rank {rank.number} step {step} layer {layer} slot {row.slot} holds "
                        f"{record[half]} for tokens of expert {row.expert}"
                    )
        rank.reading -= spares
        self.counts["served by spare slots"] += len(spares)

    def count(self, rank: Rank, turn: int, rows: list[Rows]) -> None:
        """Telemetry: resident slots count what they receive, and what they gave away."""
        layer = turn % NUM_LAYERS
        for row in rows:
            if row.slot < NUM_SLOTS or not self.rules.count_at_home:
                rank.counts[row.expert if row.slot < NUM_SLOTS else EMPTY] += row.tokens
        if self.rules.count_at_home:
            held = self.held[self.which[turn // NUM_LAYERS]][layer, rank.number]
            moved = self.decision(rank.number, turn).moved[rank.number]
            for expert, tokens in zip(held.tolist(), moved.tolist(), strict=True):
                rank.counts[expert] += tokens

    def all_in(self, found: Collection[int], wanted: Collection[int] = range(NUM_RANKS)) -> bool:
        """Whether an exchange ends; it breaks where a rank is dead or has stopped."""
        missing = set(wanted).difference(found)
        if any(rank in self.dead or self.ranks[rank].has_stopped for rank in missing):
            raise Stopped("a peer is dead or late")
        return not missing

    def check_words(self, rank: Rank, state: Layer) -> None:
        """What a rank makes of the closing exchange."""
        words = set(state.closed.values())
        if FAILED in words:
            self.counts["refused: late"] += 1
            raise Stopped("a rank could not pull")
        if len(words) > 1 and self.rules.compare_digests:
            self.counts["refused: digests differ"] += 1
            raise Stopped("ranks decided different pulls")

    # -- a whole schedule

    def run(self) -> None:
        """Take turns until all streams have ended.

        Raises:
            Violation: something happened that must never happen.
        """
        streams = [
            (rank, name, made(rank))
            for rank in self.ranks
            for name, made in (("compute", self.compute), ("side", self.side))
        ]
        waits = [next(stream) for _, _, stream in streams]
        paces = [self.rng.choice([0.05, 0.3, 1.0, 1.0]) for _ in streams]
        for turns in range(MOST_TURNS):
            if turns == self.dies_at:
                self.dead.add(self.rng.randrange(NUM_RANKS))
            if not self._take_turn(streams, waits, paces):
                self.counts["turns"] += turns
                self.check_end()
                return
        raise Violation(f"not settled after {MOST_TURNS} turns")

    def _take_turn(
        self,
        streams: list[tuple[Rank, str, Stream]],
        waits: list[Callable[[], bool]],
        paces: list[float],
    ) -> bool:
        open_ones = [n for n, (rank, _, _) in enumerate(streams) if self._is_open(rank, waits[n])]
        ready = [n for n in open_ones if self._may_go_on(streams[n][0], waits[n])]
        if not ready:
            return False
        chosen = self.rng.choices(ready, [paces[n] for n in ready])[0]
        rank, name, stream = streams[chosen]
        self.trace.append(f"{name} of rank {rank.number}")
        try:
            waits[chosen] = next(stream)
        except StopIteration:
            waits[chosen] = _ended
        except Stopped as exc:
            rank.has_stopped = rank.has_stopped or str(exc)
        return True

    def _is_open(self, rank: Rank, wait: Callable[[], bool]) -> bool:
        return wait is not _ended and rank.number not in self.dead and not rank.has_stopped

    def _may_go_on(self, rank: Rank, wait: Callable[[], bool]) -> bool:
        try:
            return wait()
        except Stopped as exc:
            rank.has_stopped = rank.has_stopped or str(exc)
            return False

    def check_end(self) -> None:
        """Once nothing can happen any more."""
        last = self.num_steps * NUM_LAYERS - 1
        stopped = [rank for rank in self.ranks if rank.has_stopped]
        done = [rank for rank in self.ranks if rank.number in self.layers[last].combined]
        self.counts["deaths"] += len(self.dead)
        self.counts["stopped"] += bool(stopped)
        if not stopped and not self.dead and len(done) < NUM_RANKS:
            raise Violation(f"hang: {len(done)} of {NUM_RANKS} ranks ended")
        if stopped and not self.dead:
            turn = max(self.layers)
            if self.layers[turn].combined:
                raise Violation(f"a rank combined layer {turn}, which others refused")
        if not stopped and not self.dead:
            self._check_counts()

    def _check_counts(self) -> None:
        found: Counter[int] = sum((rank.counts for rank in self.ranks), Counter())
        for expert in range(NUM_EXPERTS):
            wanted = sum(
                row.tokens
                for turn in range(self.num_steps * NUM_LAYERS)
                for row in self.decision(0, turn).rows
                if row.expert == expert
            )
            if found[expert] != wanted:
                raise Violation(f"expert {expert} counts {found[expert]} tokens, expected {wanted}")


def _ended() -> bool:
    return False


def _at_once() -> bool:
    return True


MUTANTS = {
    "pulled before the exchange": Rules(pull_after_exchange=False),
    "not closed": Rules(combine_after_close=False),
    "closed when ordered": Rules(close_after_pull=False),
    "served early": Rules(serve_after_pull=False, combine_after_close=False),
    "digests not compared": Rules(compare_digests=False),
    "late pull not reported": Rules(report_late=False),
    "swap beside the step": Rules(swap_before_exchange=False),
    "source of another table": Rules(source_is_live=False, compare_digests=False),
    "counted nowhere": Rules(count_at_home=False),
}
ROWS = (
    "schedules",
    "pulls",
    "served by spare slots",
    "writes",
    "refused: late",
    "refused: digests differ",
    "deaths",
    "stopped",
    "turns",
    "violations",
)


def run_one(seed: int, rules: Rules, total: Counter[str], *, is_traced: bool = False) -> str:
    """Run a seed's schedule. Returns what was violated, or ""."""
    schedule, wrong = Schedule(seed, rules), ""
    try:
        schedule.run()
    except Violation as exc:
        wrong = str(exc)
    total.update(schedule.counts)
    total.update(schedules=1, violations=bool(wrong))
    if is_traced:
        print("\n".join(f"{n:>5} {what}" for n, what in enumerate(schedule.trace)))
    return wrong


def main() -> int:
    """Run the schedules of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=1000, help="how many seeds")
    parser.add_argument("--trace", action="store_true", help="print every turn")
    parser.add_argument("--mutant", choices=MUTANTS, help="leave a rule out; ends when it is found")
    args = parser.parse_args()
    rules = MUTANTS[args.mutant] if args.mutant else Rules()
    total, started = Counter[str](), time.monotonic()
    for seed in range(args.first, args.first + args.count):
        wrong = run_one(seed, rules, total, is_traced=args.trace)
        if wrong:
            print(f"seed {seed}: {wrong}")
            if args.mutant:
                break
    for name in ROWS:
        print(f"{name:<24} {total[name]:>12,}")
    print(f"{'ms a schedule':<24} {1e3 * (time.monotonic() - started) / total['schedules']:>12.2f}")
    return 1 if total["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
