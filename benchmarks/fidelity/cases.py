"""Predicted times of many measured rows at once.

Shapes:  C cases, V different counts of rows, of all cases one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from benchmarks.fidelity.tables import Measured
from eplb.core.kernels import Kernel

Values = NDArray[np.float64]


class Cases:
    """Measured rows with the rows of their slots, in which draws are averaged."""

    def __init__(self, rows: Sequence[Measured]) -> None:
        self.rows = tuple(rows)
        counts, weights, lengths = [], [], []
        for one in self.rows:
            draws = one.counts()
            # One value of no weight, for a rank that no draw gave a row.
            drawn = np.append(np.concatenate(draws), 1)
            values, times = np.unique(drawn[drawn > 0], return_counts=True)
            times[0] -= 1
            counts.append(values.astype(np.float64))
            weights.append(times / len(draws))
            lengths.append(len(values))
        self._counts, self._weights = np.concatenate(counts), np.concatenate(weights)  # [V]
        self._first = np.cumsum([0, *lengths[:-1]])  # [C]
        self._case = np.repeat(np.arange(len(lengths)), lengths)  # [V]
        self.us = self._each(lambda one: one.us)
        self.mean_rows = self._each(lambda one: one.rows)
        self._hidden = self._each(lambda one: one.hidden)
        self._weights_of_expert = self._each(lambda one: 3.0 * one.hidden * one.intermediate)
        self._columns = self._each(
            lambda one: one.hidden * one.spread.tokens * one.spread.top_k * one.has_all_tokens
        )

    def _each(self, of: Callable[[Measured], float]) -> Values:
        return np.array([of(one) for one in self.rows], dtype=np.float64)

    def predicted_us(self, kernel: Kernel) -> Values:
        """[C] microseconds."""
        weights, hidden = self._weights_of_expert[self._case], self._hidden[self._case]
        slots = kernel.slot_us(self._counts, weights, hidden) * self._weights
        whole = kernel.rank_us(np.add.reduceat(slots, self._first))
        return whole + self._columns * kernel.other_ps / 1e6

    def errors(self, kernel: Kernel) -> Values:
        """[C] of predicted times, relative."""
        return self.predicted_us(kernel) / self.us - 1
