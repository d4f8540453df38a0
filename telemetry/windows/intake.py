"""Intake of samples into windows: every sample ends in one counted outcome.

Ranks are other processes, with clocks and faults of their own. Whatever they write, the reader
continues: what cannot be counted as load is counted here by reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from math import isfinite
from typing import Literal

from eplb.core.load import LoadSample
from telemetry.windows.fit import named
from telemetry.windows.folder import WindowFolder

Outcome = Literal["accepted", "repeated", "late", "future", "stale", "malformed"]
OUTCOMES: dict[Outcome, str] = {
    "accepted": "it counts in its window",
    "repeated": "the same (rank, sequence) was counted before",
    "late": "its window is no longer kept",
    "future": "its clock or its steps are far ahead of the other ranks",
    "stale": "it was counted under a placement that the other ranks had already replaced",
    "malformed": "it is of another run, shape, rank or expert, overlaps, or cannot be added up",
}


class Intake:
    """Takes the samples of one run into a folder. Never raises because of a sample.

    Args:
        folder: where samples that can be counted go.
        run: deployment and run that every sample must be of.
        max_ahead_s: how far a rank's clock may be ahead of the reader's.
    """

    def __init__(
        self, folder: WindowFolder, run: tuple[str, str], *, max_ahead_s: float = 60.0
    ) -> None:
        self._folder, self._run, self._max_ahead_s = folder, run, max_ahead_s
        self._counts: Counter[Outcome] = Counter(dict.fromkeys(OUTCOMES, 0))
        self._reasons: dict[Outcome, str] = {}
        self._ahead: set[int] = set()  # ranks whose latest steps were far ahead
        self._serves_since: dict[int, tuple[int, int]] = {}  # rank -> generation, its first step
        self._highest = -1  # generation of any rank

    def take(
        self,
        samples: Iterable[LoadSample],
        now: float,
        note: Callable[[LoadSample], None] | None = None,
    ) -> Counter[Outcome]:
        """Fold samples and return what became of them.

        Args:
            now: the reader's clock, in seconds since the epoch.
            note: called with each sample that is accepted.
        """
        news: Counter[Outcome] = Counter()
        fitting = []
        for sample in samples:
            refusal = self._refusal(sample, now)
            if refusal is None:
                fitting.append(sample)
            else:
                outcome, self._reasons[refusal[0]] = refusal
                news[outcome] += 1
        taken = self._folder.add_all(fitting)
        news.update(
            accepted=taken.accepted,
            repeated=taken.repeated,
            late=taken.late,
            malformed=len(taken.refused),
        )
        if taken.refused:
            self._reasons["malformed"] = taken.refused[-1]
        if note is not None:
            for sample in taken.samples:
                note(sample)
        self._counts.update(news)
        return news

    def counts(self) -> dict[Outcome, int]:
        """Return what became of all samples so far."""
        return dict(self._counts)

    def reasons(self) -> dict[Outcome, str]:
        """Return the latest sentence about each outcome that needs one."""
        return dict(self._reasons)

    def _refusal(self, sample: LoadSample, now: float) -> tuple[Outcome, str] | None:
        if (sample.deployment, sample.run) != self._run:
            found = (sample.deployment, sample.run)
            return "malformed", f"{named(sample)} is of {found}, expected {self._run}"
        if not isfinite(sample.time):
            return "malformed", f"{named(sample)} was taken at {sample.time}, expected a time"
        if sample.time > now + self._max_ahead_s:
            return "future", (
                f"{named(sample)} was taken at {sample.time:.3f}, {sample.time - now:.3f} s ahead, "
                f"expected {self._max_ahead_s:g} s at most"
            )
        return self._far_ahead(sample) or self._outdated(sample)

    def _far_ahead(self, sample: LoadSample) -> tuple[Outcome, str] | None:
        """Reject steps far ahead, which would push every window out, until most ranks are there."""
        newest = self._folder.newest()
        index = self._folder.index_of(sample)
        if newest is None or index <= newest + self._folder.keep:
            self._ahead.discard(sample.rank)
            return None
        self._ahead.add(sample.rank)
        if 2 * len(self._ahead) > self._folder.num_ranks:
            return None
        return "future", (
            f"{named(sample)} is of window {index}, expected none past "
            f"{newest + self._folder.keep} while most ranks are at {newest}"
        )

    def _outdated(self, sample: LoadSample) -> tuple[Outcome, str] | None:
        """Detect a rank that missed a swap: all ranks swap at the same step."""
        generation, first_step = self._serves_since.get(sample.rank, (-1, 0))
        if sample.generation > generation:
            self._serves_since[sample.rank] = (sample.generation, sample.first_step)
        elif sample.generation == generation and sample.first_step < first_step:
            self._serves_since[sample.rank] = (generation, sample.first_step)
        if sample.generation >= self._highest:
            self._highest = sample.generation
            return None
        others = [since for rank, since in self._serves_since.items() if rank != sample.rank]
        newer = [g for g, step in others if g > sample.generation and step <= sample.first_step]
        if 2 * len(newer) < self._folder.num_ranks:
            return None
        return "stale", (
            f"{named(sample)} is of generation {sample.generation} at step {sample.first_step}, "
            f"expected {min(newer)} or later, which most ranks served by then"
        )
