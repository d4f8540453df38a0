"""A window that may still get samples: what was counted so far, each phase apart.

Shapes:  N samples, L MoE layers, C slots of one rank, E experts, R ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from eplb.core.jit import jit
from eplb.core.load import LoadSample, Phase
from eplb.core.placement import EMPTY

CHUNK = 1024  # samples that are stacked at a time; 6 MB of 58 layers x 9 slots


@dataclass(frozen=True)
class Counts:
    """Tokens of one phase."""

    tokens: NDArray[np.int64]  # [L, E] received by each expert
    received: NDArray[np.int64]  # [L, R] received by each rank


@dataclass
class Filling:
    """Sums over the samples of a window."""

    num_ranks: int
    num_experts: int
    by_phase: dict[Phase, Counts] = field(default_factory=dict)
    sequences: dict[int, set[int]] = field(default_factory=dict)  # rank -> those counted
    generations: set[int] = field(default_factory=set)
    num_samples: int = 0
    first_step: int = 2**63 - 1
    last_step: int = -1

    def note(self, sample: LoadSample) -> Counts:
        """Record what a sample covers; return where its tokens are to be counted."""
        self.sequences.setdefault(sample.rank, set()).add(sample.sequence)
        self.generations.add(sample.generation)
        self.num_samples += 1
        if sample.first_step < self.first_step:
            self.first_step = sample.first_step
        if sample.last_step > self.last_step:
            self.last_step = sample.last_step
        counts = self.by_phase.get(sample.phase)
        if counts is None:
            num_layers = len(sample.tokens)
            counts = self.by_phase[sample.phase] = Counts(
                np.zeros((num_layers, self.num_experts), dtype=np.int64),
                np.zeros((num_layers, self.num_ranks), dtype=np.int64),
            )
        return counts

    def total(self, phase: Phase | None) -> Counts:
        """Return the counts of a phase, or of all phases together."""
        chosen = [c for name, c in self.by_phase.items() if phase is None or name == phase]
        if len(chosen) == 1:
            return chosen[0]
        tokens: NDArray[np.int64] = np.sum([counts.tokens for counts in chosen], axis=0)
        received: NDArray[np.int64] = np.sum([counts.received for counts in chosen], axis=0)
        return Counts(tokens, received)


def count(sample: LoadSample, counts: Counts) -> None:
    """Add a sample's tokens to what was counted."""
    layer, slot = np.nonzero(sample.slot_to_expert != EMPTY)
    expert = sample.slot_to_expert[layer, slot]
    np.add.at(counts.tokens, (layer, expert), sample.tokens[layer, slot])
    counts.received[:, sample.rank] += sample.tokens.sum(axis=1)


@dataclass(frozen=True)
class Stack:
    """Samples of one shape on top of each other."""

    held: NDArray[np.int32]  # [N, L, C]
    tokens: NDArray[np.int64]  # [N, L, C]

    @classmethod
    def of(cls, samples: Sequence[LoadSample]) -> Stack:
        """Copy the arrays of samples, of which there is at least one."""
        shape = (len(samples), *samples[0].tokens.shape)
        # Not np.stack, which makes an array of its own of each sample first.
        held = np.concatenate([sample.slot_to_expert for sample in samples]).reshape(shape)
        return cls(held, np.concatenate([sample.tokens for sample in samples]).reshape(shape))

    def count(self, chosen: Sequence[int], ranks: Sequence[int], counts: Counts) -> None:
        """Add the tokens of the chosen samples, each of its rank, to what was counted."""
        places = np.array((chosen, ranks), dtype=np.int64)
        _count(self.held, self.tokens, places, counts.tokens, counts.received)


@jit
def _count(
    held: NDArray[np.int32],
    tokens: NDArray[np.int64],
    places: NDArray[np.int64],
    of_expert: NDArray[np.int64],
    of_rank: NDArray[np.int64],
) -> None:
    _, num_layers, num_slots = held.shape
    for n in range(places.shape[1]):
        sample, rank = places[0, n], places[1, n]
        for layer in range(num_layers):
            received = 0
            for slot in range(num_slots):
                expert = held[sample, layer, slot]
                if expert != EMPTY:
                    num_tokens = tokens[sample, layer, slot]
                    of_expert[layer, expert] += num_tokens
                    received += num_tokens
            of_rank[layer, rank] += received
