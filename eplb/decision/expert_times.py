"""Time of experts by their tokens, g(n), as ranks measure it, and which curve a plan uses.

A curve given by the user has precedence, then what the ranks measured when they started, then the
constant of ``eplb.core.cost``. The ranks' curve has, at each number of tokens that all of them
measured, the median over ranks: one that was disturbed while it measured does not count, and ranks
that are slower for good are told apart by ``Topology.rank_speed``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from statistics import median

from eplb.core.kernels import Curve
from eplb.errors import ConfigError

# In the order in which they are measured: a deadline leaves the curve coarse, and not short.
POINTS = (1, 16, 256, 4096, 64, 1024, 4, 32, 128, 512, 2048, 96, 192)
LEAST_LAST = 256  # tokens: the planner extends the last segment, which must not be the flat part
BUDGET_S = 2.0  # time of a rank's start that the measurement may take


@dataclass(frozen=True)
class ExpertTimes:
    """Microseconds of one slot by its rows, as a rank measured them; lists, as JSON has them.

    Raises:
        ConfigError: rows that do not rise, or times that are none.
    """

    rows: list[int]
    us: list[float]
    of: str  # device, implementation and experts that were measured
    seconds: float  # duration of the measurement

    def __post_init__(self) -> None:
        rise = all(one < two for one, two in pairwise([0, *self.rows]))
        if len(self.rows) != len(self.us) or not rise or not all(0 < us < inf for us in self.us):
            raise ConfigError(
                f"times of experts: rows {self.rows} and times {self.us}, expected as many times, "
                "rows above 0 and rising, finite times above 0"
            )


def chosen_curve(given: Curve, measured: Sequence[ExpertTimes]) -> tuple[Curve, str]:
    """Choose the curve of a plan, (): the constant; and where it is from.

    Args:
        given: by the user; (): by none.
        measured: by the ranks that serve; most CPU ranks measure none.
    """
    if given:
        return given, "given by the configuration"
    constant = "the constant, of DeepSeek-V3's experts in FP8 on an H200"
    if not measured:
        return (), f"{constant}: no rank measured its experts"
    found = _agreed(measured)
    if len(found) < 2 or found[-1][0] < LEAST_LAST:
        last = f"up to {found[-1][0]:g} rows" if found else "nothing that all ranks measured"
        why = f"ranks measured {last}, expected two points and {LEAST_LAST} rows or more"
        return (), f"{constant}: {why}"
    names = "; ".join(sorted({one.of for one in measured}))
    num_ranks = "one rank" if len(measured) == 1 else f"{len(measured)} ranks"
    return found, f"measured at the start by {num_ranks}: {names}"


def _agreed(measured: Sequence[ExpertTimes]) -> Curve:
    """The median over ranks at the rows that all measured, as a curve that never falls."""
    from scipy.optimize import isotonic_regression  # late: slow to import, and rarely needed

    times = [dict(zip(one.rows, one.us, strict=True)) for one in measured]
    rows = sorted(set.intersection(*(set(one) for one in times)))
    if not rows:
        return ()
    us = isotonic_regression([median(one[row] for one in times) for row in rows]).x
    return tuple(zip(map(float, rows), us.tolist(), strict=True))
