"""Samples of one run are checked against its shape and counted, many at once.

Shapes:  N samples, L MoE layers, C slots of one rank, E experts, R ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import isfinite
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from eplb.core.load import LoadSample, Phase
from eplb.core.placement import EMPTY
from eplb.errors import HistoryError

CHUNK = 1024  # samples that are stacked at a time; 6 MB of 58 layers x 9 slots
# Leaves room in int64 to add up 2**23 samples. At 4096 tokens a step it takes five months.
MOST_TOKENS = 2**40

Outcome = Literal[
    "accepted",  # it counts in its window
    "repeated",  # the same (rank, sequence) was counted before
    "late",  # its window is no longer kept
    "future",  # its clock or its steps are far ahead of the other ranks
    "stale",  # it was counted under a placement that the other ranks had already replaced
    "malformed",  # it is of another run, shape, rank or expert, overlaps, or cannot be added up
]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)

Tokens = tuple[NDArray[np.int64], NDArray[np.int64]]  # [L, E] of each expert, [L, R] of each rank


@dataclass
class Outcomes:
    """Number of samples by outcome, and the latest sentence about each outcome that needs one."""

    counts: Counter[Outcome] = field(default_factory=lambda: Counter(dict.fromkeys(OUTCOMES, 0)))
    reasons: dict[Outcome, str] = field(default_factory=dict)

    def exclude(self, outcome: Outcome, reason: str) -> None:
        """Count a sample that is excluded for a reason."""
        self.counts[outcome] += 1
        self.reasons[outcome] = reason


@dataclass(frozen=True)
class RunShape:
    """What the samples of one run have in common."""

    deployment: str
    run: str
    num_ranks: int
    num_experts: int
    num_layers: int
    dead: frozenset[int] = frozenset()  # ranks without which the others serve on

    def check(self, sample: LoadSample) -> None:
        """Refuse a sample that does not fit, whatever its slots hold.

        Raises:
            HistoryError: it is of another run, rank or number of layers, or its time is none.
        """
        if (sample.deployment, sample.run) != (self.deployment, self.run):
            raise HistoryError(
                f"{named(sample)} is of deployment and run {(sample.deployment, sample.run)}, "
                f"expected {(self.deployment, self.run)}"
            )
        if len(sample.tokens) != self.num_layers:
            raise HistoryError(
                f"{named(sample)} has {len(sample.tokens)} layers, expected {self.num_layers}"
            )
        if not 0 <= sample.rank < self.num_ranks:
            raise HistoryError(f"{named(sample)}: expected rank 0..{self.num_ranks - 1}")
        if not isfinite(sample.time):
            raise HistoryError(f"{named(sample)} was taken at {sample.time}, expected a time")

    def check_slots(self, sample: LoadSample) -> None:
        """Refuse experts that are not there, load on empty slots, and counts past all bounds.

        Raises:
            HistoryError: names the slot.
        """
        held, tokens = sample.slot_to_expert, sample.tokens
        wrong = np.argwhere((held < EMPTY) | (held >= self.num_experts))
        if wrong.size:
            layer, slot = wrong[0]
            raise HistoryError(
                f"{named(sample)}: layer {layer} slot {slot} holds expert {held[layer, slot]}, "
                f"expected 0..{self.num_experts - 1}, or {EMPTY} for an empty slot"
            )
        lost = np.argwhere((held == EMPTY) & (tokens > 0))
        if lost.size:
            layer, slot = lost[0]
            raise HistoryError(
                f"{named(sample)}: layer {layer} slot {slot} received {tokens[layer, slot]} "
                "tokens, expected none in an empty slot"
            )
        if (tokens > MOST_TOKENS).any():
            raise HistoryError(
                f"{named(sample)}: {tokens.max()} tokens in a slot, expected {MOST_TOKENS} at most"
            )


class WindowSums:
    """Sums over the samples of a window that may still get more, each phase apart."""

    def __init__(self, shape: RunShape) -> None:
        self._shape = shape
        self.by_phase: dict[Phase, Tokens] = {}
        self.ranks: set[int] = set()
        self.generations: set[int] = set()
        self.num_samples = 0
        self.first_step, self.last_step = 2**63 - 1, -1

    def note(self, sample: LoadSample) -> Tokens:
        """Record what a sample covers; return where its tokens are to be counted."""
        self.ranks.add(sample.rank)
        self.generations.add(sample.generation)
        self.num_samples += 1
        self.first_step = min(self.first_step, sample.first_step)
        self.last_step = max(self.last_step, sample.last_step)
        if sample.phase not in self.by_phase:
            sizes = self._shape.num_experts, self._shape.num_ranks
            experts, ranks = (np.zeros((self._shape.num_layers, n), np.int64) for n in sizes)
            self.by_phase[sample.phase] = experts, ranks
        return self.by_phase[sample.phase]

    def total(self, phase: Phase | None) -> Tokens:
        """Return the tokens of a phase, or of all phases together."""
        chosen = [tokens for name, tokens in self.by_phase.items() if phase in (None, name)]
        if len(chosen) == 1:
            return chosen[0]
        experts, ranks = zip(*chosen, strict=True)
        return np.sum(experts, axis=0), np.sum(ranks, axis=0)


# Finds the window of a sample that fits its run, or returns why it is in none. Raises HistoryError.
Place = Callable[[LoadSample], WindowSums | Outcome]


def count_all(
    samples: Sequence[LoadSample], shape: RunShape, place: Place, outcomes: Outcomes
) -> list[LoadSample]:
    """Count samples in the windows that ``place`` finds; return those that are accepted.

    Args:
        place: called with each sample that fits the run, those of one rank in their order.
        outcomes: the outcome of each sample is added here.
    """
    accepted: list[LoadSample] = []
    for start in range(0, len(samples), CHUNK):
        chunk = sorted(samples[start : start + CHUNK], key=_slots)  # stable: ranks keep their order
        for _, alike in groupby(chunk, key=_slots):
            accepted += _count_alike(list(alike), shape, place, outcomes)
    outcomes.counts["accepted"] += len(accepted)
    return accepted


def _slots(sample: LoadSample) -> tuple[int, ...]:
    return sample.tokens.shape


def _count_alike(
    samples: Sequence[LoadSample], shape: RunShape, place: Place, outcomes: Outcomes
) -> list[LoadSample]:
    """As ``count_all``, of samples with arrays of one shape."""
    stacked = (len(samples), *samples[0].tokens.shape)
    # Not np.stack, which makes an array of its own of each sample first.
    held = np.concatenate([sample.slot_to_expert for sample in samples]).reshape(stacked)
    tokens = np.concatenate([sample.tokens for sample in samples]).reshape(stacked)
    accepted: list[LoadSample] = []
    to_count: dict[int, tuple[Tokens, list[int], list[int]]] = {}
    for number, has_bad_slot in enumerate(_has_bad_slot(held, tokens, shape.num_experts).tolist()):
        sample = samples[number]
        try:
            shape.check(sample)
            if has_bad_slot:
                shape.check_slots(sample)
            window = place(sample)
        except HistoryError as exc:
            outcomes.exclude("malformed", str(exc))
            continue
        if not isinstance(window, WindowSums):
            outcomes.counts[window] += 1
            continue
        accepted.append(sample)
        counts = window.note(sample)
        _, numbers, ranks = to_count.setdefault(id(counts), (counts, [], []))
        numbers.append(number)
        ranks.append(sample.rank)
    for counts, numbers, ranks in to_count.values():
        places = np.array((numbers, ranks), dtype=np.int64)
        _count(held, tokens, places, *counts)
    return accepted


def _has_bad_slot(
    held: NDArray[np.int32], tokens: NDArray[np.int64], num_experts: int
) -> NDArray[np.bool_]:
    """[N] whether ``RunShape.check_slots`` refuses a sample."""
    is_bad = (held < EMPTY) | (held >= num_experts) | (tokens > MOST_TOKENS)
    is_bad |= (held == EMPTY) & (tokens > 0)
    return np.asarray(is_bad.any(axis=(1, 2)))


def _count(
    held: NDArray[np.int32],
    tokens: NDArray[np.int64],
    places: NDArray[np.int64],
    of_expert: NDArray[np.int64],
    of_rank: NDArray[np.int64],
) -> None:
    """Add tokens of some samples; ``places`` [2, n] has their numbers and their ranks."""
    numbers, ranks = places
    counted = np.where(held[numbers] == EMPTY, 0, tokens[numbers])  # [n, L, S]
    num_layers, num_experts = of_expert.shape
    first = np.arange(num_layers)[:, None] * num_experts
    expert = np.maximum(held[numbers], 0) + first  # of all layers
    np.add.at(of_expert.reshape(-1), expert.ravel(), counted.ravel())
    np.add.at(of_rank.T, ranks, counted.sum(axis=2))


def named(sample: LoadSample) -> str:
    """Name a sample in an error."""
    return f"sample {sample.sequence} of rank {sample.rank}"
