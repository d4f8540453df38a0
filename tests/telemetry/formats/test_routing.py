"""Recorded requests in batches: steps that can be checked by hand, and files that have none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from eplb.errors import ConfigError, HistoryError
from simulations.batches import batched_windows, read_requests
from simulations.inputs import windows_of
from telemetry.formats.types import ReadOptions

# Three requests of 3, 1 and 2 tokens, top-1, one layer: a request goes to its own expert.
LENGTHS = np.array([3, 1, 2])
IDS = np.repeat([0, 1, 2], LENGTHS).reshape(1, 6, 1)
PATH = Path("trace.npz")


def written(folder: Path, ids: NDArray[np.int64] = IDS, **more: NDArray[np.int64]) -> Path:
    path = folder / "trace.npz"
    np.savez(path, expert_ids=ids, **more)
    return path


def test_steps_without_a_full_batch_and_padding_count_nowhere() -> None:
    lengths, ids = np.array([4, 2]), np.repeat([0, 1], [4, 2]).reshape(1, 6, 1)
    padded = IDS.copy()
    padded[0, 0] = -1

    found = batched_windows(PATH, ids, lengths, 2, window_tokens=2, num_experts=2)
    without = batched_windows(PATH, padded, LENGTHS, 2, window_tokens=2, num_experts=3)

    assert found.tokens.tolist() == [[[1, 1]], [[1, 1]]]
    assert without.tokens[0].tolist() == [[0, 1, 0]]


def test_batch_larger_than_the_requests_is_refused() -> None:
    with pytest.raises(HistoryError, match="batch of 4 requests for 0 steps"):
        batched_windows(PATH, IDS, LENGTHS, 4, window_tokens=4, num_experts=3)
    with pytest.raises(ConfigError, match="0 requests"):
        batched_windows(PATH, IDS, LENGTHS, 0, window_tokens=4, num_experts=3)


def test_trace_and_folder_of_requests_give_the_same_windows(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(5, 20, 12)
    ids = rng.random((int(lengths.sum()), 3, 8)).argsort(axis=2)[:, :, :2]
    trace = written(tmp_path, ids, request_len=lengths)
    folder = tmp_path / "requests"
    folder.mkdir()
    ends = np.cumsum(lengths)
    for number, (end, length) in enumerate(zip(ends, lengths, strict=True)):
        np.save(folder / f"{number:03d}.npy", ids[end - length : end].astype(np.int16))

    options = ReadOptions(window_tokens=16, num_experts=8)
    both = [list(windows_of(str(place), options, 0, batch=4)) for place in (trace, folder)]

    assert len(both[0]) > 2
    assert np.array_equal(*both)
    assert all(window.sum() == 16 * 3 * 2 for window in both[0])


def test_trace_without_lengths_has_no_batches(tmp_path: Path) -> None:
    with pytest.raises(HistoryError, match="request_len"):
        read_requests(written(tmp_path))
    wrong = written(tmp_path, np.zeros((1, 6, 1), np.int64), request_len=np.array([3, 4]))
    with pytest.raises(HistoryError, match="sums to 7 tokens"):
        read_requests(wrong)


def test_requests_of_different_layers_are_refused(tmp_path: Path) -> None:
    for number, layers in enumerate((2, 3)):
        np.save(tmp_path / f"{number}.npy", np.full((4, layers, 2), [0, 1], np.int16))

    with pytest.raises(HistoryError, match=r"1\.npy .*\(3, 2\), expected \(2, 2"):
        windows_of(str(tmp_path), ReadOptions(), 0, batch=1)
