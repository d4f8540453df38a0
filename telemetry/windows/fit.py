"""Whether a sample fits the run that it is folded into: one sample slowly, or many at once.

Shapes:  N samples, L MoE layers, C slots of one rank, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from eplb.core.jit import jit
from eplb.core.load import LoadSample
from eplb.core.placement import EMPTY
from eplb.errors import HistoryError

# Leaves room in int64 to add up 2**23 samples. At 4096 tokens a step it takes five months.
MOST_TOKENS = 2**40


class Fit:
    """Shape and identity that the samples of one run share.

    Without ``num_layers`` the first sample that fits otherwise defines their number. It always
    defines the deployment and the run.
    """

    def __init__(self, num_ranks: int, num_experts: int, num_layers: int | None) -> None:
        self._num_ranks = num_ranks
        self._num_experts = num_experts
        self._num_layers = num_layers
        self._belongs: tuple[str, str] | None = None

    def check(self, sample: LoadSample) -> None:
        """Refuse a sample that does not fit, slots and all.

        Raises:
            HistoryError: it is of another run or shape, names a rank or an expert that is not
                there, or has more tokens in a slot than can be added up.
        """
        self.check_all_but_slots(sample)
        self.check_slots(sample)
        self.follow(sample)

    def follow(self, sample: LoadSample) -> None:
        """Expect all others to be like this one, which fits."""
        if self._belongs is None:
            self._belongs = (sample.deployment, sample.run)
            self._num_layers = len(sample.tokens)

    def check_all_but_slots(self, sample: LoadSample) -> None:
        """Refuse what ``check`` refuses, whatever the slots hold."""
        belongs = (sample.deployment, sample.run)
        if self._belongs is not None and belongs != self._belongs:
            raise HistoryError(
                f"{named(sample)} is of deployment and run {belongs}, expected {self._belongs}"
            )
        if self._num_layers is not None and len(sample.tokens) != self._num_layers:
            raise HistoryError(
                f"{named(sample)} has {len(sample.tokens)} layers, expected {self._num_layers}"
            )
        if not 0 <= sample.rank < self._num_ranks:
            raise HistoryError(f"{named(sample)}: expected rank 0..{self._num_ranks - 1}")

    def check_slots(self, sample: LoadSample) -> None:
        """Refuse experts that are not there, load on empty slots, and counts past all bounds."""
        held, tokens = sample.slot_to_expert, sample.tokens
        wrong = np.argwhere((held < EMPTY) | (held >= self._num_experts))
        if wrong.size:
            layer, slot = wrong[0]
            raise HistoryError(
                f"{named(sample)}: layer {layer} slot {slot} holds expert {held[layer, slot]}, "
                f"expected 0..{self._num_experts - 1}, or {EMPTY} for an empty slot"
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

    def find_bad_slots(self, held: NDArray[np.int32], tokens: NDArray[np.int64]) -> Sequence[bool]:
        """Return for each of N samples, as arrays [N, L, C], whether ``check_slots`` rejects it."""
        found: list[bool] = _has_bad_slot(held, tokens, self._num_experts).tolist()
        return found


def named(sample: LoadSample) -> str:
    """Name a sample in an error."""
    return f"sample {sample.sequence} of rank {sample.rank}"


@jit
def _has_bad_slot(
    held: NDArray[np.int32], tokens: NDArray[np.int64], num_experts: int
) -> NDArray[np.bool_]:
    num_samples, num_layers, num_slots = held.shape
    is_bad = np.zeros(num_samples, dtype=np.bool_)
    for sample in range(num_samples):
        for layer in range(num_layers):
            for slot in range(num_slots):
                expert, count = held[sample, layer, slot], tokens[sample, layer, slot]
                if (
                    expert < EMPTY
                    or expert >= num_experts
                    or count > MOST_TOKENS
                    or (expert == EMPTY and count > 0)
                ):
                    is_bad[sample] = True
    return is_bad
