"""Windows of ranks that serve both phases, with decode apart from all else, and their weights.

Prefill routes many more tokens than decode, so their sum shows prefill alone. Kept apart, both are
windows of one history, in the order of their steps. All windows of a history weigh the same, so a
phase weighs by its number of windows: those of the phase with too many are summed, neighbours
first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from eplb.core.load import LoadHistory, Phase
from telemetry.load.folder import Window, WindowFolder, common_phase, history


class Apart(NamedTuple):
    """The windows of a run by phase, each oldest first."""

    others: list[Window]  # prefill, and what the engine does not tell apart
    decode: list[Window]


def apart(folder: WindowFolder, windows: Sequence[Window]) -> Apart:
    """Divide windows of all phases, as ``folder.windows()`` returns them."""
    decode = {window.index: window for window in folder.windows("decode")}
    undivided = {window.index for window in folder.windows("mixed")}
    found = Apart([], [])
    for window in windows:
        part = decode.get(window.index)
        if part is None:
            found.others.append(window)
            continue
        found.decode.append(part)
        if window.phase != "decode":
            phase: Phase = "mixed" if window.index in undivided else "prefill"
            rest = window.tokens - part.tokens
            found.others.append(replace(window, tokens=rest, phase=phase))
    return found


def weighted(windows: Apart, decode_weight: float) -> LoadHistory | None:
    """Return both phases as one history; None without a window.

    Args:
        windows: complete ones.
        decode_weight: part of the history's windows that are of decode, above 0 and below 1, as
            nearly as whole windows allow. Where one phase is missing the other has all.
    """
    others, decode = windows
    if not others or not decode:
        return history(others or decode, last=len(others or decode))
    ratio = decode_weight / (1 - decode_weight)
    num_others, num_decode = len(others), len(decode)
    if num_decode >= num_others * ratio:
        num_decode = max(1, round(num_others * ratio))
    else:
        num_others = max(1, round(num_decode / ratio))
    pieces = _summed(others, num_others) + _summed(decode, num_decode)
    pieces.sort(key=lambda piece: piece.last_step)
    return LoadHistory(
        np.stack([piece.tokens for piece in pieces]),
        np.array([piece.first_step for piece in pieces]),
        np.array([piece.last_step for piece in pieces]),
        common_phase({piece.phase for piece in pieces}),
        phases=tuple(piece.phase for piece in pieces),
    )


def _summed(windows: Sequence[Window], number: int) -> list[Window]:
    """That many windows, each the sum of neighbours, all of one phase."""
    phase = common_phase({window.phase for window in windows})
    runs = np.array_split(np.arange(len(windows)), number)
    return [
        replace(
            windows[run[-1]],
            first_step=windows[run[0]].first_step,
            phase=phase,
            tokens=np.sum([windows[place].tokens for place in run], axis=0),
        )
        for run in runs
    ]
