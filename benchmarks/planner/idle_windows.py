"""Windows of few tokens beside busy ones: plans on windows against plans on their sum.

    python -m benchmarks.planner.idle_windows [--seeds 100 106] [--recorded WINDOWS]

Without ``--recorded``: windows drawn from one routing (4 layers x 64 experts, 72 slots on 8 ranks),
whose shares fluctuate by a lognormal factor of ``sigma`` from window to window; plans are judged on
20 later busy windows. With it: the controller over recorded streams of ``benchmarks.over_time``, as
they are and with six of eight windows thinned to 5 tokens a layer; excess of the imbalance over 1
on the next window, by tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from eplb import Topology, imbalance, plan

LAYERS, EXPERTS, RANKS = 4, 64, Topology.uniform(1, 8, 9)
BUSY, FEW, JUDGED = 48_000, 5, 20
Sizes = Callable[[np.random.Generator], NDArray[np.int64]]


def _mixed(few: int, num_few: int, num_busy: int, *, in_order: bool = False) -> Sizes:
    def sizes(rng: np.random.Generator) -> NDArray[np.int64]:
        found = np.array([few] * num_few + [BUSY] * num_busy)
        return found if in_order else rng.permutation(found)

    return sizes


LOADS: dict[str, Sizes] = {
    "54 of 5, 6 of 48,000": _mixed(FEW, 54, 6),
    "the same, idle ones first": _mixed(FEW, 54, 6, in_order=True),
    "14 of 5, then 2 of 48,000": _mixed(FEW, 14, 2, in_order=True),
    "54 of 500, 6 of 48,000": _mixed(500, 54, 6),
    "16 of 48,000": _mixed(FEW, 0, 16, in_order=True),
    "16 of 48,000 x lognormal(1)": lambda rng: (BUSY * rng.lognormal(0, 1, 16)).astype(np.int64),
}


def windows(rng: np.random.Generator, sizes: NDArray[np.int64], sigma: float) -> NDArray[np.int64]:
    """[T, L, E] tokens of windows of these sizes."""
    base = rng.gamma(1.5, size=(LAYERS, EXPERTS))
    found = []
    for size in sizes.tolist():
        share = base * np.exp(rng.normal(0, sigma, size=base.shape))
        share /= share.sum(axis=1, keepdims=True)
        found.append([rng.multinomial(size, row) for row in share])
    return np.array(found)


def drawn(load: str, sigma: float, seed: int) -> tuple[float, float]:
    """Imbalance on unseen busy windows of a plan on the windows, and of one on their sum."""
    rng = np.random.default_rng(seed)
    sizes = LOADS[load](rng)
    every = windows(rng, np.append(sizes, [BUSY] * JUDGED), sigma)
    past, unseen = every[: len(sizes)], every[len(sizes) :]
    on_windows, on_sum = (
        float(imbalance(unseen, plan(seen, RANKS).target, RANKS).mean())
        for seen in (past, past.sum(axis=0))
    )
    return on_windows, on_sum


def thinned(load: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
    """The windows with six of eight at night: FEW tokens a layer of the same shares."""
    rng = np.random.default_rng(seed)
    night = [[rng.multinomial(FEW, row / row.sum()) for row in window] for window in load]
    is_night = np.arange(len(load)) % 8 < 6
    return np.where(is_night[:, None, None], np.array(night), load)


def recorded(num_windows: int) -> Iterator[str]:
    """Rows of the controller over recorded streams."""
    from benchmarks.over_time.replay import GPT, LITE, TOP_K, Case, replay_controller, stream

    cases = (
        Case(GPT, "in order", "40/8", 0),
        Case(GPT, "shuffled x4", "48/16", 0),
        Case(LITE, "intent", "72/8", 0),
        Case(LITE, "mix", "72/8", 1),
        Case(LITE, "switch", "72/8", 0),
        Case(LITE, "switch", "96/32", 1),
    )
    for case in cases:
        load = np.array(stream(case, "judge", num_windows))
        for name, served in (("as recorded", load), ("nights", thinned(load, 7))):
            found = replay_controller(served, case.topology, TOP_K[case.model])
            excess = np.array(found.imbalance).mean(axis=1) - 1
            mean = np.average(excess, weights=served[1:].sum(axis=(1, 2)))
            yield f"{case.name:36} {name:12} excess {mean:.4f}  moves {found.moves}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs=2, default=(100, 106), help="first, end")
    parser.add_argument("--recorded", type=int, default=0, help="windows of recorded streams")
    arguments = parser.parse_args()
    if arguments.recorded:
        for row in recorded(arguments.recorded):
            print(row, flush=True)
        return
    for load in LOADS:
        for sigma in (0.0, 0.1, 0.3):
            found = np.array([drawn(load, sigma, seed) for seed in range(*arguments.seeds)])
            behind = found[:, 0] - found[:, 1]
            print(
                f"{load:28} sigma {sigma:.1f}  windows {found[:, 0].mean():.4f}  "
                f"sum {found[:, 1].mean():.4f}  behind {behind.mean():+.4f}, "
                f"at worst {behind.max():+.4f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
