"""Windows of ranks that serve both phases: apart, and weighed in one history."""

from __future__ import annotations

import numpy as np
import pytest

from eplb.core.load import LoadSample, Phase
from telemetry.load.counts import RunShape
from telemetry.load.folder import Apart, CutBySteps, WindowFolder, apart, weighted

# Each window has a step of each phase: one rank of two experts in one layer.
TOKENS: dict[Phase, list[int]] = {"prefill": [100, 300], "decode": [5, 1], "mixed": [10, 10]}
HELD = np.array([[0, 1]])


def folded(*windows: tuple[Phase, ...]) -> WindowFolder:
    folder = WindowFolder(CutBySteps(3), RunShape("test", "run", 1, 2, 1))
    for window, phases in enumerate(windows):
        for number in range(3):
            step = 3 * window + number
            phase = phases[number % len(phases)]
            is_first = number < len(phases)
            tokens = np.array([TOKENS[phase] if is_first else [0, 0]])
            span = (float(step), step, step)
            folder.add_all([LoadSample("test", "run", 0, step, *span, phase, 0, HELD, tokens)])
    return folder


def loads(found: Apart) -> list[list[list[int]]]:
    return [[window.tokens[0].tolist() for window in part] for part in found]


@pytest.mark.parametrize(
    ("phases", "others", "decode", "name"),
    [
        (("prefill", "decode"), [[100, 300]], [[5, 1]], "prefill"),
        (("prefill", "decode", "mixed"), [[110, 310]], [[5, 1]], "mixed"),
        (("decode",), [], [[5, 1]], ""),
        (("prefill",), [[100, 300]], [], "prefill"),
    ],
)
def test_decode_is_apart_from_all_else(
    phases: tuple[Phase, ...], others: list[list[int]], decode: list[list[int]], name: str
) -> None:
    folder = folded(phases)

    found = apart(folder, folder.windows())

    assert loads(found) == [others, decode]
    assert [window.phase for window in found.others] == [name] * len(others)


def history_of(weight: float, *windows: tuple[Phase, ...]) -> list[tuple[str, list[int]]]:
    folder = folded(*windows)
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
    folder = folded(*[BOTH] * 4)
    found = weighted(apart(folder, folder.windows()), 0.34)

    assert found is not None
    spans = zip(found.phases, found.first_step.tolist(), found.last_step.tolist(), strict=True)
    assert [span for span in spans if span[0] == "decode"] == [("decode", 0, 5), ("decode", 6, 11)]
