"""Samples of single ranks become windows; whatever is missing is named, never guessed."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from eplb.core.load import LoadSample, Phase
from eplb.errors import HistoryError
from telemetry.load.counts import OUTCOMES, RunShape
from telemetry.load.folder import (
    Apart,
    CutBySteps,
    CutByTime,
    Window,
    WindowFolder,
    apart,
    history,
    weighted,
)
from tests.support.stores import make_sample as make_any_sample

# Two ranks of two slots, one layer, three experts: expert 0 has a replica on each rank.
HELD = ([[0, 1]], [[0, 2]])
# Tokens of the experts and of the ranks.
Sums = tuple[NDArray[np.int64], NDArray[np.int64]]
SHAPE = RunShape("demo", "run-1", num_ranks=2, num_experts=3, num_layers=1)


def make_folder(keep: int = 256) -> WindowFolder:
    return WindowFolder(CutBySteps(10), SHAPE, keep=keep)


def make_sample(rank: int, first_step: int, tokens: list[int], /, **changes: Any) -> LoadSample:
    fields = {"last_step": first_step + 9, "slot_to_expert": HELD[rank], "tokens": [tokens]}
    return make_any_sample(rank, first_step, **(fields | changes))


def folded(*samples: LoadSample) -> list[Window]:
    folder = make_folder()
    assert len(folder.add_all(samples)) == folder.outcomes.counts["accepted"]
    return folder.windows()


def test_rank_that_covers_no_step_or_only_some_is_missing() -> None:
    first, second, third = folded(
        *(make_sample(rank, 0, [1, 1]) for rank in (0, 1)),
        make_sample(0, 10, [1, 1]),
        make_sample(0, 20, [1, 1]),
        make_sample(1, 20, [1, 1], last_step=28),
    )

    assert (first.missing_ranks, first.is_complete) == (frozenset(), True)
    assert (second.missing_ranks, second.is_complete) == ({1}, False)
    assert third.missing_ranks == {1}


@settings(deadline=None, max_examples=20)
@given(st.permutations(range(8)), st.lists(st.integers(0, 7), max_size=4))
def test_order_and_repeats_change_nothing(order: list[int], repeats: list[int]) -> None:
    all_samples = [make_sample(n % 2, n // 2 * 10, [n, n * n]) for n in range(8)]
    expected = folded(*all_samples)

    windows = folded(*(all_samples[n] for n in [*order, *repeats]))

    assert [w.index for w in windows] == [0, 1, 2, 3]
    assert all(window.is_complete for window in windows)
    assert all(same(*pair) for pair in zip(windows, expected, strict=True))


def test_only_the_latest_windows_are_kept_and_older_samples_are_late() -> None:
    folder = make_folder(keep=2)
    folder.add_all([make_sample(0, first_step, [1, 1]) for first_step in (0, 10, 20)])

    assert [window.index for window in folder.windows()] == [1, 2]
    assert folder.add_all([make_sample(1, 0, [1, 1])]) == []
    assert folder.outcomes.counts["late"] == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"run": "run-2"}, r"\('demo', 'run-2'\), expected \('demo', 'run-1'\)"),
        ({"deployment": "other"}, r"\('other', 'run-1'\), expected \('demo', 'run-1'\)"),
        ({"last_step": 10}, r"0\.\.10, .*9"),
        ({"first_step": 5, "sequence": 99}, r"5\.\.9, .*0\.\.9"),
        ({"rank": 2}, r"rank 2: .*0\.\.1"),
        ({"slot_to_expert": [[0, 3]]}, r"layer 0 slot 1 holds expert 3, expected 0\.\.2"),
        ({"slot_to_expert": [[0, -1]]}, "slot 1 received 4 tokens"),
        ({"slot_to_expert": [[0, 1]] * 2, "tokens": [[1, 1]] * 2}, "2 layers, expected 1"),
        ({"time": float("nan")}, "at nan, expected a time"),
    ],
)
def test_sample_that_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    folder = make_folder()
    folder.add_all([make_sample(0, 0, [1, 1])])

    assert folder.add_all([make_sample(0, 0, [3, 4], **({"last_step": 9} | changes))]) == []

    assert re.search(message, folder.outcomes.reasons["malformed"])
    assert folder.windows()[0].tokens.sum() == 2


def test_history_takes_the_last_complete_windows() -> None:
    both = [make_sample(rank, step, [step, 0]) for step in (0, 10, 30) for rank in (0, 1)]
    windows = folded(*both, make_sample(0, 20, [7, 7]))

    result = history(windows, last=2)

    assert result is not None
    assert result.first_step.tolist() == [10, 30]
    assert result.last_step.tolist() == [19, 39]
    assert result.tokens[:, 0, 0].tolist() == [20, 60]
    assert result.phase == "decode"


def test_phases_are_counted_apart_when_asked() -> None:
    folder = make_folder()
    for rank in (0, 1):
        folder.add_all(
            [
                make_sample(rank, 0, [1, 2], last_step=3, phase="prefill"),
                make_sample(rank, 4, [30, 40], last_step=9),
                make_sample(rank, 10, [5, 6]),
            ]
        )

    decode, prefill = folder.windows("decode"), folder.windows("prefill")

    assert [window.tokens.tolist() for window in prefill] == [[[2, 2, 2]]]
    assert [window.tokens.tolist() for window in decode] == [[[60, 40, 40]], [[10, 6, 6]]]
    assert [window.phase for window in prefill + decode] == ["prefill", "decode", "decode"]
    assert [window.phase for window in folder.windows()] == ["mixed", "decode"]
    assert all(window.is_complete for window in prefill + decode)
    assert folder.windows("mixed") == []


# -- many samples at once


def make_many(rng: np.random.Generator, num_windows: int, num_ranks: int) -> list[LoadSample]:
    """3 layers x 2 slots of 5 experts; ranks of one and of two slots; a swap in each window."""
    samples = []
    for n, rank in np.ndindex(num_windows * 2, num_ranks):
        shape = (3, 1 + rank % 2)
        held = rng.integers(-1, 5, shape)
        samples.append(
            make_sample(
                0,
                n * 5,
                [0],
                rank=rank,
                last_step=n * 5 + 4,
                generation=n + 1,
                phase=("prefill", "decode")[int(rng.integers(2))],
                slot_to_expert=held,
                tokens=np.where(held == -1, 0, rng.integers(0, 1000, shape)),
            )
        )
    return [samples[n] for n in rng.permutation(len(samples))]


def same(one: Window, other: Window) -> bool:
    mine, theirs = vars(one), vars(other)
    return all(np.array_equal(mine[name], theirs[name]) for name in mine)


def plain_sums(samples: Iterable[LoadSample], phase: Phase | None) -> dict[int, Sums]:
    """Tokens [L, E] of experts and [L, R] of ranks in each window, counted slot by slot."""
    sums: dict[int, Sums] = {}
    for sample in samples:
        if phase is not None and sample.phase != phase:
            continue
        empty = np.zeros((3, 5), dtype=np.int64), np.zeros((3, 4), dtype=np.int64)
        tokens, received = sums.setdefault(sample.first_step // 10, empty)
        for (layer, slot), expert in np.ndenumerate(sample.slot_to_expert):
            if expert >= 0:
                tokens[layer, expert] += sample.tokens[layer, slot]
        received[:, sample.rank] += sample.tokens.sum(axis=1)
    return sums


@pytest.mark.parametrize("seed", range(3))
def test_windows_of_many_ranks_and_swaps_have_the_tokens_of_each_slot(seed: int) -> None:
    samples = make_many(np.random.default_rng(seed), num_windows=6, num_ranks=4)
    folder = WindowFolder(CutBySteps(10), RunShape("demo", "run-1", 4, 5, 3))

    accepted = folder.add_all([*samples, *samples[:7]])

    assert sorted(map(id, accepted)) == sorted(map(id, samples))
    assert folder.outcomes.counts == {
        **dict.fromkeys(OUTCOMES, 0),
        "accepted": len(samples),
        "repeated": 7,
    }
    phases: tuple[Phase | None, ...] = (None, "prefill", "decode")
    for phase in phases:
        sums = plain_sums(samples, phase)
        windows = folder.windows(phase)
        assert [window.index for window in windows] == sorted(sums)
        assert all(window.is_complete for window in windows)
        for window in windows:
            tokens, received = sums[window.index]
            assert np.array_equal(window.tokens, tokens)
            assert np.array_equal(window.received, received)
            assert window.generations == {2 * window.index + 1, 2 * window.index + 2}


def test_of_many_at_once_those_that_do_not_fit_are_counted_and_the_rest_counts() -> None:
    folder = make_folder(keep=1)
    bad = (
        (make_sample(1, 10, [1, 2], slot_to_expert=[[0, 9]]), "expert 9"),
        (make_sample(1, 10, [1, 2], rank=5), "rank 0..1"),
        (make_sample(1, 10, [2**40 + 1, 0]), "1099511627777 tokens"),
    )
    for sample, figures in bad:
        folder.add_all([make_sample(0, 10, [1, 2]), sample, make_sample(0, 0, [7, 7])])
        assert figures in folder.outcomes.reasons["malformed"]
    folder.add_all([make_sample(1, 10, [2**40, 4])])

    counts = folder.outcomes.counts
    assert (counts["accepted"], counts["repeated"]) == (2, 2)
    assert (counts["late"], counts["malformed"]) == (3, 3)
    (window,) = folder.windows()
    assert window.tokens.tolist() == [[2**40 + 1, 2, 4]]
    assert window.is_complete


@settings(deadline=None, max_examples=15)
@given(st.permutations(range(12)), st.lists(st.integers(1, 11), max_size=4))
def test_batches_cut_anywhere_change_nothing(order: list[int], cuts: list[int]) -> None:
    samples = [make_sample(n % 2, n // 2 * 10, [n, n * n]) for n in range(12)]
    expected = folded(*samples)
    folder = make_folder()

    edges = sorted({0, 12, *cuts})
    for start, stop in pairwise(edges):
        folder.add_all([samples[n] for n in order[start:stop]])

    assert all(same(one, two) for one, two in zip(folder.windows(), expected, strict=True))


def timed_sample(rank: int, sequence: int, time: float) -> LoadSample:
    steps = {"first_step": sequence * 10, "last_step": sequence * 10 + 9}
    return make_any_sample(rank, sequence, time=time, tokens=[[1, sequence]], **steps)


TIMED_SHAPE = RunShape("demo", "run-1", num_ranks=2, num_experts=2, num_layers=1)


def folder_of(*samples: LoadSample, **changes: Any) -> WindowFolder:
    folder = WindowFolder(CutByTime(5.0), TIMED_SHAPE, **changes)
    folder.add_all(samples)
    return folder


def missing(folder: WindowFolder) -> dict[int, set[int]]:
    return {window.index: set(window.missing_ranks) for window in folder.windows()}


def both(sequence: int, time: float) -> list[LoadSample]:
    return [timed_sample(rank, sequence, time) for rank in (0, 1)]


def test_samples_count_in_the_window_in_which_they_were_taken() -> None:
    folder = folder_of(*both(0, 1.0), *both(1, 4.9), *both(2, 5.0))

    first, second = folder.windows()
    assert (first.index, first.tokens.tolist(), first.received.tolist()) == (0, [[4, 2]], [[3, 3]])
    assert (second.index, second.tokens.tolist()) == (1, [[2, 4]])
    assert (first.first_step, first.last_step) == (0, 19)


def test_window_is_complete_once_every_rank_is_past_its_end() -> None:
    folder = folder_of(*both(0, 1.0), timed_sample(0, 1, 6.0))
    assert missing(folder) == {0: {1}, 1: {0, 1}}

    folder.add_all([timed_sample(1, 1, 6.5)])

    assert missing(folder) == {0: set(), 1: {0, 1}}


def test_lost_sample_leaves_both_windows_that_it_may_be_of_incomplete() -> None:
    folder = folder_of(*both(0, 1.0), *both(1, 6.0), timed_sample(1, 2, 8.0), *both(3, 11.0))
    folder.add_all(both(4, 16.0))

    assert missing(folder) == {0: set(), 1: {0}, 2: {0}, 3: {0, 1}}

    folder.add_all([timed_sample(0, 2, 9.0)])
    assert missing(folder) == {0: set(), 1: set(), 2: set(), 3: {0, 1}}


def test_repeated_and_late_samples_change_nothing() -> None:
    folder = folder_of(*both(0, 1.0), *both(1, 6.0), *both(2, 11.0), keep=2)

    assert folder.add_all([timed_sample(0, 1, 6.0)]) == []
    assert folder.add_all([timed_sample(0, 0, 1.0)]) == []
    assert folder.add_all([timed_sample(1, 1, 6.0), timed_sample(1, 0, 1.0)]) == []

    counts = folder.outcomes.counts
    assert (counts["repeated"], counts["late"]) == (2, 2)
    assert folder.windows()[0] is folder.windows()[0]
    assert [window.index for window in folder.windows()] == [1, 2]
    assert folder.windows()[0].is_complete


@pytest.mark.parametrize("time", [float("nan"), float("inf"), -float("inf")])
def test_time_that_is_none_is_refused(time: float) -> None:
    folder = folder_of(timed_sample(0, 0, time))

    assert folder.windows() == []
    assert "sample 0 of rank 0" in folder.outcomes.reasons["malformed"]


@pytest.mark.parametrize(
    ("seconds", "keep", "expected"), [(0.0, 2, "more than 0"), (5.0, 0, "1 or more")]
)
def test_window_of_no_length_is_refused(seconds: float, keep: int, expected: str) -> None:
    with pytest.raises(HistoryError, match=expected):
        WindowFolder(CutByTime(seconds), TIMED_SHAPE, keep=keep)


# Each window has a step of each phase: one rank of two experts in one layer.
TOKENS: dict[Phase, list[int]] = {"prefill": [100, 300], "decode": [5, 1], "mixed": [10, 10]}
HELD_TWICE = np.array([[0, 1]])


def folded_phases(*windows: tuple[Phase, ...]) -> WindowFolder:
    folder = WindowFolder(CutBySteps(3), RunShape("test", "run", 1, 2, 1))
    for window, phases in enumerate(windows):
        for number in range(3):
            step = 3 * window + number
            phase = phases[number % len(phases)]
            is_first = number < len(phases)
            tokens = np.array([TOKENS[phase] if is_first else [0, 0]])
            span = (float(step), step, step)
            folder.add_all(
                [LoadSample("test", "run", 0, step, *span, phase, 0, HELD_TWICE, tokens)]
            )
    return folder


def history_of(weight: float, *windows: tuple[Phase, ...]) -> list[tuple[str, list[int]]]:
    folder = folded_phases(*windows)
    found = weighted(apart(folder, folder.windows()), weight)
    assert found is not None
    tokens = [one[0].tolist() for one in found.tokens]
    return list(zip(found.phases, tokens, strict=True))


BOTH: tuple[Phase, ...] = ("prefill", "decode")


PREFILL: tuple[Phase, ...] = ("prefill",)


@pytest.mark.parametrize(
    ("weight", "windows", "prefill", "decode"),
    [
        (0.5, [BOTH] * 2, [[100, 300]] * 2, [[5, 1]] * 2),
        # The phase with less weight has fewer windows and all its tokens.
        (0.2, [BOTH] * 8, [[100, 300]] * 8, [[20, 4]] * 2),
        (0.8, [BOTH] * 8, [[400, 1200]] * 2, [[5, 1]] * 8),
        # A phase that is rare has its weight by the windows of the other.
        (0.5, [PREFILL] * 6 + [BOTH] * 2, [[400, 1200]] * 2, [[5, 1]] * 2),
        (0.5, [("decode",)] * 2, [], [[5, 1]] * 2),
    ],
)
def test_each_phase_has_windows_by_its_weight(
    weight: float,
    windows: list[tuple[Phase, ...]],
    prefill: list[list[int]],
    decode: list[list[int]],
) -> None:
    found = history_of(weight, *windows)

    assert [tokens for phase, tokens in found if phase == "prefill"] == prefill
    assert [tokens for phase, tokens in found if phase == "decode"] == decode


def test_phases_take_turns_and_without_windows_there_is_no_history() -> None:
    turns = [phase for phase, _ in history_of(0.5, BOTH, BOTH)]
    assert turns == ["prefill", "decode", "prefill", "decode"]
    assert weighted(Apart([], []), 0.5) is None


def test_summed_windows_span_the_steps_of_all() -> None:
    folder = folded_phases(*[BOTH] * 4)
    found = weighted(apart(folder, folder.windows()), 0.34)

    assert found is not None
    spans = zip(found.phases, found.first_step.tolist(), found.last_step.tolist(), strict=True)
    assert [span for span in spans if span[0] == "decode"] == [("decode", 0, 5), ("decode", 6, 11)]
