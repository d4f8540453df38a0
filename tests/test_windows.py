"""Samples of single ranks become windows; whatever is missing is named, never guessed."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb.errors import HistoryError
from eplb.load import LoadSample
from telemetry.windows import Window, WindowFolder, fold, history, left_out

# Two ranks of two slots, one layer, three experts: expert 0 has a replica on each rank.
HELD = ([[0, 1]], [[0, 2]])


def make_sample(rank: int, first_step: int, tokens: list[int], /, **changes: Any) -> LoadSample:
    fields: dict[str, Any] = {
        "deployment": "demo",
        "run": "run-1",
        "rank": rank,
        "sequence": first_step,
        "time": 0.0,
        "first_step": first_step,
        "last_step": first_step + 9,
        "phase": "decode",
        "generation": 1,
        "slot_to_expert": HELD[rank],
        "tokens": [tokens],
    }
    return LoadSample(**(fields | changes))


def folded(*samples: LoadSample) -> list[Window]:
    return fold(samples, window_steps=10, num_ranks=2, num_experts=3)


def test_replicas_of_an_expert_are_summed_over_ranks() -> None:
    (window,) = folded(make_sample(0, 0, [30, 5]), make_sample(1, 0, [20, 7]))

    assert window.tokens.tolist() == [[50, 5, 7]]
    assert window.received.tolist() == [[35, 27]]
    assert (window.first_step, window.last_step, window.index) == (0, 9, 0)
    assert window.is_complete


def test_a_silent_rank_makes_its_window_incomplete() -> None:
    first, second = folded(
        make_sample(0, 0, [1, 1]), make_sample(1, 0, [1, 1]), make_sample(0, 10, [1, 1])
    )

    assert first.missing_ranks == frozenset()
    assert second.missing_ranks == {1}
    assert not second.is_complete


def test_a_rank_that_covers_only_some_steps_is_missing() -> None:
    (window,) = folded(make_sample(0, 0, [1, 1]), make_sample(1, 0, [1, 1], last_step=8))

    assert window.missing_ranks == {1}


def test_a_window_cut_by_a_swap_has_both_generations_and_is_complete() -> None:
    before = make_sample(1, 0, [1, 2], last_step=3)
    after = make_sample(1, 4, [3, 4], last_step=9, generation=2, slot_to_expert=[[2, 1]])
    (window,) = folded(make_sample(0, 0, [0, 0]), before, after)

    assert window.is_complete
    assert window.generations == {1, 2}
    assert window.tokens.tolist() == [[1, 4, 5]]


def test_a_late_sample_completes_its_old_window() -> None:
    folder = WindowFolder(10, 2, 3)
    folder.add(make_sample(0, 0, [1, 1]))
    folder.add(make_sample(0, 10, [1, 1]))
    assert not folder.windows()[0].is_complete

    folder.add(make_sample(1, 0, [1, 1]))

    assert folder.windows()[0].is_complete


def test_a_repeated_sample_is_counted_once() -> None:
    folder = WindowFolder(10, 2, 3)

    assert folder.add(make_sample(0, 0, [5, 5]))
    assert not folder.add(make_sample(0, 0, [5, 5]))
    assert folder.windows()[0].tokens.sum() == 10


@settings(deadline=None)
@given(st.permutations(range(8)), st.lists(st.integers(0, 7), max_size=4))
def test_order_and_repeats_change_nothing(order: list[int], repeats: list[int]) -> None:
    all_samples = [make_sample(n % 2, n // 2 * 10, [n, n * n]) for n in range(8)]
    expected = folded(*all_samples)

    windows = folded(*(all_samples[n] for n in [*order, *repeats]))

    assert [w.index for w in windows] == [0, 1, 2, 3]
    for window, wanted in zip(windows, expected, strict=True):
        assert window.tokens.tolist() == wanted.tokens.tolist()
        assert window.is_complete


def test_only_the_latest_windows_are_kept_and_older_samples_are_counted_as_too_late() -> None:
    folder = WindowFolder(10, 2, 3, keep=2)
    for first_step in (0, 10, 20):
        folder.add(make_sample(0, first_step, [1, 1]))

    assert [window.index for window in folder.windows()] == [1, 2]
    assert not folder.add(make_sample(1, 0, [1, 1]))
    assert folder.too_late == 1


def test_a_window_handed_out_does_not_change_when_samples_follow() -> None:
    folder = WindowFolder(10, 2, 3)
    folder.add(make_sample(0, 0, [1, 1]))
    (before,) = folder.windows()

    folder.add(make_sample(1, 0, [9, 9]))

    assert before.tokens.tolist() == [[1, 1, 0]]
    assert folder.windows()[0].tokens.tolist() == [[10, 1, 9]]


def test_samples_of_two_phases_make_a_mixed_window() -> None:
    (window,) = folded(make_sample(0, 0, [1, 1]), make_sample(1, 0, [1, 1], phase="prefill"))

    assert window.phase == "mixed"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"run": "run-2"}, r"\('demo', 'run-2'\), expected \('demo', 'run-1'\)"),
        ({"deployment": "other"}, r"\('other', 'run-1'\), expected \('demo', 'run-1'\)"),
        ({"last_step": 10}, r"steps 0\.\.10, expected no step past 9, the last of window 0"),
        ({"first_step": 5, "sequence": 99}, r"steps 5\.\.9, expected none of 0\.\.9"),
        ({"rank": 2}, r"rank 2: expected rank 0\.\.1"),
        ({"slot_to_expert": [[0, 3]]}, r"layer 0 slot 1 holds expert 3, expected 0\.\.2"),
        ({"slot_to_expert": [[0, -1]]}, "slot 1 received 4 tokens, expected none in an empty"),
        ({"slot_to_expert": [[0, 1]] * 2, "tokens": [[1, 1]] * 2}, "has 2 layers, expected 1"),
    ],
)
def test_a_sample_that_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    folder = WindowFolder(10, 2, 3)
    folder.add(make_sample(0, 0, [1, 1]))

    with pytest.raises(HistoryError, match=message):
        folder.add(make_sample(0, 0, [3, 4], **({"last_step": 9} | changes)))

    assert folder.windows()[0].tokens.sum() == 2


def test_an_empty_slot_counts_nowhere() -> None:
    (window,) = folded(make_sample(1, 0, [6, 0], slot_to_expert=[[2, -1]]))

    assert window.tokens.tolist() == [[0, 0, 6]]


def test_history_takes_the_last_complete_windows() -> None:
    both = [make_sample(rank, step, [step, 0]) for step in (0, 10, 30) for rank in (0, 1)]
    windows = folded(*both, make_sample(0, 20, [7, 7]))

    result = history(windows, last=2)

    assert result is not None
    assert result.first_step.tolist() == [10, 30]
    assert result.last_step.tolist() == [19, 39]
    assert result.tokens[:, 0, 0].tolist() == [20, 60]
    assert result.phase == "decode"


def test_windows_left_out_are_named_with_the_ranks_that_miss() -> None:
    windows = folded(make_sample(0, 0, [1, 1]), make_sample(0, 10, [1, 1]))

    assert history(windows, last=3) is None
    assert left_out(windows)[1] == (
        "window 1 (steps 10..19) is incomplete: no samples of every step from ranks 1"
    )


def test_received_tokens_are_the_measured_rank_load_of_a_large_model() -> None:
    rng = np.random.default_rng(3)
    held = rng.permutation(288).reshape(1, 32, 9).repeat(58, axis=0) % 256
    tokens = rng.integers(0, 1000, (58, 32, 9))
    samples = [
        make_sample(0, 0, [0], rank=r, slot_to_expert=held[:, r], tokens=tokens[:, r])
        for r in range(32)
    ]

    (window,) = fold(samples, window_steps=10, num_ranks=32, num_experts=256)

    assert window.tokens.sum() == tokens.sum()
    assert np.array_equal(window.received, tokens.sum(axis=2))
