"""Many samples into windows at once: what became of each, and the counting in one go."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal

from eplb.core.load import LoadSample
from eplb.errors import HistoryError
from telemetry.windows.filling import CHUNK, Counts, Filling, Stack, count
from telemetry.windows.fit import Fit

LATE: Literal["late"] = "late"
REPEATED: Literal["repeated"] = "repeated"

# Finds the window of a sample that fits, or returns why it changes none. Raises HistoryError.
Place = Callable[[LoadSample], Filling | Literal["late", "repeated"]]


@dataclass
class Taken:
    """Outcomes of samples."""

    accepted: int = 0
    repeated: int = 0  # known before
    late: int = 0  # of a window that is held no more
    samples: list[LoadSample] = field(default_factory=list)  # those accepted
    refused: list[str] = field(default_factory=list)  # for each that does not fit, why


def take_one(sample: LoadSample, fit: Fit, place: Place) -> bool:
    """Count a sample, the plain way; return whether it changed a window.

    Raises:
        HistoryError: it does not fit.
    """
    fit.check_all_but_slots(sample)
    fit.check_slots(sample)
    found = place(sample)
    if not isinstance(found, Filling):
        return False
    fit.follow(sample)
    count(sample, found.note(sample))
    return True


def take_all(samples: Sequence[LoadSample], fit: Fit, place: Place) -> Taken:
    """Count samples like ``take_one`` for each of them, and return the outcomes."""
    taken = Taken()
    for start in range(0, len(samples), CHUNK):
        chunk = sorted(samples[start : start + CHUNK], key=_shape)  # stable: order within is kept
        for _, alike in groupby(chunk, key=_shape):
            _take_alike(list(alike), fit, place, taken)
    return taken


def _shape(sample: LoadSample) -> tuple[int, ...]:
    return sample.tokens.shape


def _take_alike(samples: list[LoadSample], fit: Fit, place: Place, taken: Taken) -> None:
    stack = Stack.of(samples)
    to_count: dict[int, tuple[Counts, list[int], list[int]]] = {}
    bad_slots = fit.find_bad_slots(stack.held, stack.tokens)
    for number, (sample, has_bad_slot) in enumerate(zip(samples, bad_slots, strict=True)):
        try:
            fit.check_all_but_slots(sample)
            if has_bad_slot:
                fit.check_slots(sample)
            found = place(sample)
        except HistoryError as exc:
            taken.refused.append(str(exc))
            continue
        if isinstance(found, Filling):
            fit.follow(sample)
            taken.accepted += 1
            taken.samples.append(sample)
            counts = found.note(sample)
            _, numbers, ranks = to_count.setdefault(id(counts), (counts, [], []))
            numbers.append(number)
            ranks.append(sample.rank)
        elif found == LATE:
            taken.late += 1
        else:
            taken.repeated += 1
    for counts, numbers, ranks in to_count.values():
        stack.count(numbers, ranks, counts)


def as_sequence(samples: Iterable[LoadSample]) -> Sequence[LoadSample]:
    """Return samples as a sequence that can be cut into chunks."""
    return samples if isinstance(samples, Sequence) else list(samples)
