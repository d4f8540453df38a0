"""LMDeploy: counts of its experts' distribution recorder.

One rank writes the counts of all ranks since the engine started, so each file contains those before
it: a folder of them gives windows by differences. Rows are MoE layers in order.

Source: the recorder of lmdeploy, ``_ExpertsDistributionRecorderImpl``, read on 29 November 2026:
``rankR_stepS_expert_counts.pt`` has counts, balancedness, total_tokens, step and rank; in older
releases ``rankR_stepS_experts_counts.json`` has the nested lists alone.

Shapes:  L MoE layers, E experts.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from eplb.core.load import LoadHistory
from eplb.errors import HistoryError
from telemetry.formats.bounded import int_array, member, whole_array, whole_number
from telemetry.formats.types import LoadFile, ReadOptions, rows_in_order

COUNTS, TOTAL = "counts", "total_tokens"
FILE = re.compile(r"rank\d+_step(\d{1,15})_experts?_counts\.(pt|json)")


def of_counts(record: Any, path: Path, options: ReadOptions) -> LoadFile:
    """The load of a file that was read already, as one window."""
    name = FILE.fullmatch(path.name)
    if isinstance(record, list):
        counts, step = int_array(record, 2, "the file"), int(name[1]) if name else 0
    else:
        given = member(record, COUNTS, np.ndarray, "the file")
        counts = whole_array(given, (None, None), COUNTS).astype(np.int64)
        total = whole_array(record.get(TOTAL), (len(counts),), TOTAL, high=2**62)
        if not np.array_equal(total, counts.sum(axis=1)):
            raise HistoryError(f"{TOTAL} is {total[:4].tolist()}, expected the sums of {COUNTS}")
        step = whole_number(record.get("step"), "step", 0, 2**62)
    at = np.array([step])
    return LoadFile(LoadHistory(counts[None], at, at), rows_in_order(len(counts)))


def differences(file: LoadFile) -> LoadFile:
    """Windows from the counts [T, L, E] of files in order of their steps.

    Raises:
        HistoryError: counts that fall, as after a restart of the engine, or a step twice.
    """
    history, last = file.history, file.history.last_step
    tokens = np.diff(history.tokens, axis=0, prepend=0)
    wrong = (tokens < 0).any(axis=(1, 2)) | (np.diff(last, prepend=-1) <= 0)
    if wrong.any():
        raise HistoryError(
            f"counts of step {last[wrong.argmax()]} are not above those before, expected the files "
            "of one run of the engine"
        )
    first = np.concatenate(([0], last[:-1] + 1))
    note = "files count since the engine started: windows are their differences"
    return replace(file, history=LoadHistory(tokens, first, last), notes=(*file.notes, note))
