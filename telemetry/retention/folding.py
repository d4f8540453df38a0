"""Samples as roll-ups of a minute, and those as roll-ups of an hour: pure folds.

Shapes:  L MoE layers, E experts, R ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from eplb.core.load import LoadSample, Phase
from eplb.errors import EplbError, HistoryError
from eplb.migration.serialisation import model_from_dict, topology_from_dict
from telemetry.retention.rollup import HOUR, MINUTE, Rollup
from telemetry.store import RunInfo
from telemetry.windows.batch_intake import LATE, Taken, take_all
from telemetry.windows.filling import Filling
from telemetry.windows.fit import Fit

_MOST_MINUTES = 64  # filled at once; 58 layers x 256 experts x 320 ranks take 17 MB


class RunShape(NamedTuple):
    """Model and topology of a run, for the checks of its samples."""

    num_ranks: int
    num_experts: int
    num_layers: int

    @classmethod
    def of(cls, info: RunInfo) -> RunShape:
        """Read the shape of a run.

        Raises:
            HistoryError: what was recorded is no model or no topology.
        """
        try:
            model = model_from_dict(dict(info.model))
            topology = topology_from_dict(dict(info.topology))
        except (EplbError, LookupError, TypeError, ValueError) as exc:
            raise HistoryError(
                f"run {info.run!r} has no readable model or topology: {exc!r}"
            ) from exc
        return cls(topology.num_ranks, model.num_experts, model.num_layers)


class Minutes:
    """Samples of any run, in any order, as roll-ups of a minute.

    Only so many minutes are held, the oldest: ``end`` is where those begin that are not.
    """

    def __init__(self, shapes: dict[str, RunShape], end: float) -> None:
        self.end = end
        self._shapes = shapes
        self._fits = {run: Fit(*shape) for run, shape in shapes.items()}
        self._filling: dict[float, dict[tuple[str, Phase], Filling]] = defaultdict(dict)

    def add(self, samples: Sequence[LoadSample]) -> Taken:
        """Count samples; those of minutes that are not held are late."""
        total = Taken()
        by_run: dict[str, list[LoadSample]] = defaultdict(list)
        for sample in samples:
            by_run[sample.run].append(sample)
        for run, of_run in by_run.items():
            if run not in self._fits:
                total.refused += [f"run {run!r} is not recorded, expected its start"] * len(of_run)
                continue
            taken = take_all(of_run, self._fits[run], self._place)
            total.accepted += taken.accepted
            total.late += taken.late
            total.refused += taken.refused
        return total

    def rollups(self) -> list[Rollup]:
        """Return the roll-ups of the minutes that are held, oldest first."""
        return [
            Rollup(
                run,
                phase,
                MINUTE,
                start,
                filling.first_step,
                filling.last_step,
                filling.num_samples,
                frozenset(filling.generations),
                frozenset(filling.sequences),
                filling.by_phase[phase].tokens,
                filling.by_phase[phase].received,
            )
            for start, fillings in sorted(self._filling.items())
            for (run, phase), filling in sorted(fillings.items())
        ]

    def _place(self, sample: LoadSample) -> Filling | Literal["late", "repeated"]:
        if not sample.time < self.end:
            return LATE
        start = sample.time // MINUTE * MINUTE
        fillings = self._filling[start]
        key = (sample.run, sample.phase)
        if key not in fillings:
            num_ranks, num_experts, _ = self._shapes[sample.run]
            fillings[key] = Filling(num_ranks, num_experts)
        if len(self._filling) > _MOST_MINUTES:
            self.end = max(self._filling)
            del self._filling[self.end]
        return fillings[key] if start < self.end else LATE


def hours_of(minutes: Iterable[Rollup]) -> list[Rollup]:
    """Fold roll-ups of a minute into those of an hour, oldest first."""
    hours: dict[tuple[float, str, Phase], Rollup] = {}
    for minute in minutes:
        key = (minute.start // HOUR * HOUR, minute.run, minute.phase)
        hours[key] = _joined(hours.get(key), minute, start=key[0])
    return [hours[key] for key in sorted(hours)]


def _joined(hour: Rollup | None, minute: Rollup, start: float) -> Rollup:
    parts = [minute] if hour is None else [hour, minute]
    return Rollup(
        minute.run,
        minute.phase,
        HOUR,
        start,
        min(part.first_step for part in parts),
        max(part.last_step for part in parts),
        sum(part.num_samples for part in parts),
        frozenset[int]().union(*(part.generations for part in parts)),
        frozenset[int]().union(*(part.ranks for part in parts)),
        np.sum([part.tokens for part in parts], axis=0),
        np.sum([part.received for part in parts], axis=0),
    )
