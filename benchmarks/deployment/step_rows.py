"""Rows of the pairs that ``step_cost`` measured."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from benchmarks.deployment.step_pairs import Block, Sides
from benchmarks.result_table import Row

TARGET = "<= 0.5 % at p50"


def rows_of(ranks: Sequence[Sides], what: str, *, is_cuda: bool) -> list[Row]:
    """Ratios of whole steps, pair by pair, and the processor time of the agent's parts.

    A step ends when the slowest rank has ended: of the ranks' times of one step the largest counts.
    """
    without = [slowest(blocks) for blocks in zip(*(r.without for r in ranks), strict=True)]
    with_agent = [slowest(blocks) for blocks in zip(*(r.with_agent for r in ranks), strict=True)]
    rows: list[Row] = [
        (
            f"{what}: step without, p50 / p99",
            "{:.1f} / {:.1f} us, {} pairs of 2 x {} steps, store in {}".format(
                *_p50_p99(without), len(without), len(without[0]), ranks[0].store
            ),
            "-",
        ),
        ("  step with, p50 / p99", "{:.1f} / {:.1f} us".format(*_p50_p99(with_agent)), "-"),
    ]
    for percent in (50, 99):
        target = (TARGET if percent == 50 else "reported") if is_cuda else "-"
        pairs = zip(without, with_agent, strict=True)
        found = ratios(((a, b) for a, b in pairs), percent)
        rows.append((f"  with / without, p{percent} of each pair", _spread(found), target))
    neighbours = ratios(itertools.pairwise(without), 50)
    rows.append(("  noise: without / without, p50 of neighbours", _spread(neighbours), "-"))
    calls = np.concatenate([block.call_us for r in ranks for block in r.with_agent])
    threads = [block.threads_us for r in ranks for block in r.with_agent]
    p50, p99 = np.percentile(calls, (50, 99))
    rows += [
        (
            "  step(), processor time of a call: p50 / p99 / mean",
            f"{p50:.1f} / {p99:.1f} / {calls.mean():.1f} us",
            "-",
        ),
        (
            "  the agent's threads, processor time of a step, a rank",
            f"{np.median(threads):.1f} us ({min(threads):.1f} to {max(threads):.1f})",
            "-",
        ),
    ]
    return rows


def slowest(blocks: Iterable[Block]) -> NDArray[np.float64]:
    """Times [steps] of one block: of all ranks the largest."""
    times: NDArray[np.float64] = np.array([block.step_us for block in blocks]).max(axis=0)
    return times


def ratios(
    pairs: Iterable[tuple[NDArray[np.float64], NDArray[np.float64]]], percent: int
) -> NDArray[np.float64]:
    """Second over first at a percentile, less 1."""
    return np.array([np.percentile(b, percent) / np.percentile(a, percent) - 1 for a, b in pairs])


def _spread(found: NDArray[np.float64]) -> str:
    low, middle, high = np.percentile(found, (25, 50, 75))
    return f"{middle:+.2%} median of pairs (quartiles {low:+.2%}, {high:+.2%})"


def _p50_p99(blocks: Sequence[NDArray[np.float64]]) -> tuple[float, float]:
    p50, p99 = np.percentile(np.concatenate(blocks), (50, 99))
    return float(p50), float(p99)
