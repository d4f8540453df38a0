"""Which group, how much redundancy, how often to plan: candidates compared on the same load.

A redundant slot balances better and takes memory from the KV cache, so fewer sequences run at once;
a larger group leaves each rank fewer slots and more memory, and is harder to balance. Each
candidate is replayed with the live planner at the batch that its memory allows:

    memory -> sequences of a rank -> rows of slots -> time of a step -> tokens a second, less moves

No queue and no scheduler is modelled: the batch is always full, one token of each sequence a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

from eplb.decision.gate import CostModel
from eplb.errors import ConfigError
from simulations.cost.expert_time import ExpertTime
from simulations.cost.memory import MemoryModel
from simulations.cost.migration import MigrationCost
from simulations.cost.step_time import StepModel
from simulations.inputs import even_topology
from simulations.replay import Replay, Scenario, replay_all
from simulations.windows import Windows

POLICY, NOTHING = "auto", "none"


@dataclass(frozen=True)
class Question:
    """What is compared, and on what.

    Raises:
        ConfigError: nothing to compare.
    """

    windows: Windows
    memory: MemoryModel
    experts: dict[int, ExpertTime]  # by ranks of a group
    ranks_per_node: int = 8
    redundant: Sequence[int] = (0, 1, 2, 4)  # slots of each rank beyond those that hold all once
    intervals: Sequence[int] = (1, 4, 16)  # windows from one plan to the next
    context: int = 4096  # tokens of a sequence
    most_sequences: int = 256  # of a rank
    other_us: float = 0.0
    window_s: float = 60.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("experts", "redundant", "intervals"):
            if not getattr(self, name):
                raise ConfigError(f"no {name} to compare, expected at least one")
        for name in ("context", "most_sequences", "ranks_per_node"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected 1 or more")
        if not self.window_s > 0:
            raise ConfigError(f"window_s is {self.window_s}, expected above 0")
        if min(self.redundant) < 0 or min(self.intervals) < 1:
            raise ConfigError(
                f"redundant {list(self.redundant)} and intervals {list(self.intervals)}, "
                "expected 0 or more, and 1 or more"
            )


@dataclass(frozen=True)
class Candidate:
    """One way to deploy, and what it gives."""

    ranks: int
    slots_per_rank: int
    redundant: int  # slots of a rank
    interval: int  # windows; 0: nothing is planned
    sequences: int  # of a rank; 0: the weights do not fit
    is_memory_bound: bool  # the KV cache limits the batch, not ``most_sequences``
    kv_bytes: float
    imbalance: float
    step_us: float
    lost_part: float  # of the time, by moves
    tokens_per_s: float  # of a rank

    @property
    def name(self) -> str:
        """As sentences have it."""
        slots = f"{self.redundant} redundant slots a rank" if self.redundant else "no redundancy"
        planned = f"a plan every {self.interval} windows" if self.interval else "no balancing"
        return f"EP{self.ranks}, {slots}, {planned}"


@dataclass(frozen=True)
class Answer:
    """Candidates, the best first."""

    candidates: tuple[Candidate, ...]
    unfit: tuple[Candidate, ...]  # whose weights do not fit

    @property
    def best(self) -> Candidate:
        """The recommendation."""
        return self.candidates[0]

    def sentences(self) -> list[str]:
        """The recommendation, its reasons, the runner-up, and what does not fit."""
        best = self.best
        nothing = [one for one in self.candidates if not one.interval and one.ranks == best.ranks]
        lines = [f"recommended: {best.name}: {best.tokens_per_s:.1f} tokens/s a rank"]
        if nothing and best.interval:
            gain = best.tokens_per_s / nothing[0].tokens_per_s - 1
            lines[0] += f", {gain:+.1%} over no balancing"
            lines.append(
                f"why: imbalance {nothing[0].imbalance:.3f} -> {best.imbalance:.3f}; a step takes "
                f"{best.step_us / 1000:.2f} ms, {nothing[0].step_us / 1000:.2f} ms without; moves "
                f"take {best.lost_part:.2%} of the time"
            )
        limit = "the KV cache" if best.is_memory_bound else "the most that was asked for"
        lines.append(
            f"batch: {best.sequences} sequences a rank, limited by {limit}; "
            f"{best.kv_bytes / 1e9:.1f} GB are left for the KV cache"
        )
        if len(self.candidates) > 1:
            lines.append(self._second(self.candidates[1]))
        lines += [
            f"does not fit: EP{one.ranks} with {one.slots_per_rank} slots a rank lacks "
            f"{max(-one.kv_bytes, 0.0) / 1e9:.1f} GB for its weights, or holds no sequence"
            for one in self.unfit
        ]
        return lines

    def _second(self, second: Candidate) -> str:
        loss = 1 - second.tokens_per_s / self.best.tokens_per_s
        reasons = []
        if second.imbalance > self.best.imbalance + 0.001:
            reasons.append(f"imbalance {second.imbalance:.3f}")
        if second.sequences < self.best.sequences:
            reasons.append(f"{second.sequences} sequences fit")
        if second.lost_part > self.best.lost_part:
            reasons.append(f"moves take {second.lost_part:.2%}")
        why = ", ".join(reasons) or "nearly the same"
        return f"runner-up: {second.name}: {loss:.1%} less ({why})"


def recommend(question: Question) -> Answer:
    """Compare groups and redundancy at the middle interval, then intervals for the best of them.

    Raises:
        ConfigError: no candidate fits the memory.
        HistoryError: load that cannot be replayed.
    """
    middle = sorted(question.intervals)[len(question.intervals) // 2]
    found: list[Candidate] = []
    unfit: list[Candidate] = []
    for ranks in question.experts:
        for redundant in question.redundant:
            intervals = (0, middle) if not redundant else (middle,)
            for one in _candidates(question, ranks, redundant, intervals):
                (found if one.sequences else unfit).append(one)
    if not found:
        raise ConfigError(
            f"no candidate fits {question.memory.hardware.memory_bytes / 1e9:.0f} GB a rank: "
            + ", ".join(f"EP{one.ranks} with {one.slots_per_rank} slots" for one in unfit)
        )
    best = _sorted(found)[0]
    others = [one for one in question.intervals if one != middle]
    if best.interval and others:
        found += _candidates(question, best.ranks, best.redundant, tuple(others))
    once = {(one.ranks, one.slots_per_rank): one for one in unfit}
    return Answer(tuple(_sorted(found)), tuple(once.values()))


def _sorted(found: Sequence[Candidate]) -> list[Candidate]:
    """The most tokens first; of equals the fewest slots."""
    return sorted(found, key=lambda one: (-one.tokens_per_s, one.slots_per_rank, one.interval))


def _candidates(
    question: Question, ranks: int, redundant: int, intervals: tuple[int, ...]
) -> list[Candidate]:
    memory, windows = question.memory, question.windows
    topology = even_topology(ranks, question.ranks_per_node, redundant, windows.num_experts)
    slots = topology.num_slots // ranks
    fits = memory.sequences(slots, question.context)
    sequences = min(fits, question.most_sequences)
    plain = Candidate(
        ranks,
        slots,
        redundant,
        0,
        sequences,
        fits < question.most_sequences,
        memory.kv_bytes(slots),
        imbalance=0.0,
        step_us=0.0,
        lost_part=0.0,
        tokens_per_s=0.0,
    )
    if not sequences:
        return [plain]
    step = StepModel(
        memory.model, topology, memory.hardware, question.experts[ranks], False, question.other_us
    )
    found = []
    for interval in intervals:
        scenario = Scenario(
            windows,
            topology,
            memory.model,
            cost=CostModel(),
            seed=question.seed,
            plan_every=max(1, interval),
            step_model=step,
            migration=MigrationCost(memory.model, memory.hardware),
            tokens_per_step=float(sequences * ranks),
        )
        (one,) = replay_all(scenario, [POLICY if interval else NOTHING])
        if one.failed:
            raise ConfigError(f"EP{ranks}, {slots} slots a rank: {one.failed}")
        found.append(_judged(question, replace(plain, interval=interval), one))
    return found


def _judged(question: Question, plain: Candidate, one: Replay) -> Candidate:
    busy = one.step_us[~one.idle]
    step_us = float(busy.mean()) if busy.size else 0.0
    lost_s = sum(rebalance.lost_s for rebalance in one.rebalances)
    lost = min(1.0, lost_s / (len(one.imbalance) * question.window_s))
    tokens = plain.sequences / (step_us / 1e6) * (1 - lost) if step_us else 0.0
    return replace(plain, imbalance=one.mean, step_us=step_us, lost_part=lost, tokens_per_s=tokens)


def first_windows(windows: Windows, most: int) -> Windows:
    """The first windows of a source."""
    count = windows.num_windows
    limited = most if count is None else min(most, count)
    return replace(windows, read=lambda: islice(windows.read(), most), num_windows=limited)
