"""Cuts one rank's counters into samples, at given steps and before every swap."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

import numpy as np

from eplb.core.load import LoadSample, Phase
from eplb.core.placement import Placement
from eplb.errors import RankError
from rebalance.rank.parts import RankInGroup
from runtime.counters import Cut
from runtime.streams import Completion

NONE = np.zeros(1, dtype=np.int64)


class Sampler:
    """Makes samples without stopping the compute stream: figures are read once they arrive.

    Args:
        rank: whose counters are read.
        step: the first one that counts: passes before it were those of another group.
    """

    def __init__(self, rank: RankInGroup, step: int) -> None:
        self._deployment, self._run = rank.config.deployment, rank.group.run
        self._counter, self._clock, self._sink = rank.counter, rank.clock, rank.reporter
        self._slots, self._strays = rank.slots, rank.slots.table.strays
        self._last_strays = Cut(self._strays, NONE)
        self._first_unsampled = step
        # Samples without their tokens, and the figures that are copied to the host.
        self._on_the_way: deque[tuple[Callable[..., LoadSample], Cut, Cut]] = deque()
        self._phase: Phase | None = None  # of the passes since the last cut
        self.num_cut = 0

    def begin_pass(self, phase: Phase) -> None:
        """Note what the forward pass is that is about to begin."""
        self._phase = phase if self._phase in (None, phase) else "mixed"

    def cut(self, step: int, placement: Placement) -> None:
        """Mark what was counted under ``placement`` in the steps before ``step``."""
        if step == self._first_unsampled:
            return
        assert self._phase is not None, "a pass has begun since the last cut"
        make_sample = partial(
            LoadSample,
            deployment=self._deployment,
            run=self._run,
            rank=self._slots.rank,
            sequence=self.num_cut,
            time=self._clock(),
            first_step=self._first_unsampled,
            last_step=step - 1,
            phase=self._phase,
            generation=placement.generation,
            slot_to_expert=self._slots.held(placement),
        )
        cut = self._counter.cut()
        # Last, on the same stream: once these figures have arrived, so have the others.
        self._last_strays = Cut(self._strays, self._last_strays)
        self._on_the_way.append((make_sample, cut, self._last_strays))
        self._first_unsampled, self._phase = step, None
        self.num_cut += 1

    @property
    def arrival(self) -> Completion:
        """Of the figures of everything that was cut so far."""
        return self._last_strays.arrival

    def hand_over(self, *, wait: bool = False) -> None:
        """Pass the samples whose figures have arrived to the sink, or wait and pass all.

        Raises:
            RankError: a router gave ids that no expert has. Their tokens were dropped, so answers
                since the previous sample are wrong.
        """
        while self._on_the_way and (wait or self._on_the_way[0][-1].is_ready()):
            make_sample, cut, strays = self._on_the_way.popleft()
            sample = make_sample(tokens=cut.tokens())
            if num_strays := int(strays.tokens()[0]):
                raise RankError(
                    f"rank {self._slots.rank}: {num_strays} expert ids of steps "
                    f"{sample.first_step} to {sample.last_step} are too high, expected them below "
                    "the number of experts: their tokens were dropped"
                )
            self._sink.offer(sample)
