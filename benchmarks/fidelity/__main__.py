"""The scorecard of the simulator's times of experts, from tables that it has never seen.

    python -m benchmarks.fidelity [--fit eplb/core/kernels.json | --check] [--cards h100,h200]

Needs ``pip install eplb[calibrate]``. ``--fit`` fits the constants anew first, and writes them;
``--check`` ends with exit code 1 where a kernel's errors are not the stored ones. Rows of a slot
are those of the mean slot. *Wrong side* is the share of cells, a shape, a number of ranks and a
batch, where measured and predicted gain of 288 slots lie on different sides of 5 %.
*Told* are the cells whose predicted gain is above the kernel's median error at their rows: of the
others ``eplb recommend`` says that it cannot tell. *Regret* is what the arm that our times choose
takes longer than the best measured one; arms are no balancing, balancing in as many slots as
experts, and balancing in 288.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.fidelity.cases import Cases, Values
from benchmarks.fidelity.fit import even_part, fit, shape_of
from benchmarks.fidelity.tables import (
    CARDS,
    PACKAGE,
    VERSION,
    Measured,
    Serving,
    expert_rows,
    package_data,
)
from eplb.core.kernels import BINS, Kernel, known_kernels, left_out_kernels

MOST_RANKS = 32  # ranks of the largest group that has a target
MOST_ERROR = 0.20  # median in a bin; a kernel above it is left out by name
GAIN = 0.05
ROUNDED = 0.005  # constants are stored with four digits


def bins_of(mean_rows: Values) -> list[NDArray[np.bool_]]:
    """Which cases are in each bin of rows."""
    lows = (0.0, *BINS[:-1])
    return [(mean_rows > low) & (mean_rows <= high) for low, high in zip(lows, BINS, strict=True)]


def shown(errors: Values, mean_rows: Values) -> str:
    """Rows, median and 90th percentile of errors in each bin, as a line has them."""
    parts = []
    for ours in bins_of(mean_rows):
        size = np.abs(errors[ours])
        text = f"{np.median(size):4.0%} {np.quantile(size, 0.9):4.0%}" if size.size else "   -    -"
        parts.append(f"{len(size):5} {text}")
    return "  ".join(parts)


def judged(rows: Sequence[Measured]) -> list[tuple[str, list[Measured]]]:
    """Uneven rows of each table: in groups that targets are for, of unseen shapes, in others."""
    seen = {shape_of(one) for one in even_part(rows)}
    uneven = [one for one in rows if not one.is_even]
    found = []
    for table in sorted({one.table for one in rows}):
        ours = [one for one in uneven if one.table == table]
        small = [one for one in ours if one.spread.ranks <= MOST_RANKS]
        found.append((table, small))
        found.append((f"{table}, unseen shapes", [o for o in small if shape_of(o) not in seen]))
        found.append((f"{table}, EP > 32", [o for o in ours if o.spread.ranks > MOST_RANKS]))
    return [(name, ours) for name, ours in found if ours]


def with_errors(kernel: Kernel, rows: Sequence[Measured]) -> Kernel:
    """The kernel with its errors on uneven rows; where a bin has none, those of the bin before.

    Rows of a wide-EP table count where there are some: they were measured as serving has them.
    """
    tables = {name: ours for name, ours in judged(rows) if "," not in name}
    wide = {name: ours for name, ours in tables.items() if name.endswith("wide-EP")}
    cases = Cases([one for ours in (wide or tables).values() for one in ours])
    errors = np.abs(cases.errors(kernel))
    found: list[tuple[float, float]] = []
    for ours in bins_of(cases.mean_rows):
        if ours.any():
            of_bin = errors[ours]
            both = float(np.median(of_bin)), float(np.quantile(of_bin, 0.9))
            found.append((round(both[0], 3), round(both[1], 3)))
        else:
            found.append(found[-1])
    return replace(kernel, errors=tuple(found))


def arms(rows: Sequence[Measured], kernel: Kernel) -> list[str]:
    """Wrong sides and regret where one load was measured with and without balancing."""
    ours = [one for one in rows if one.table == "trtllm wide-EP"]
    ours = [one for one in ours if one.spread.ranks <= MOST_RANKS]
    seen = {shape_of(one) for one in even_part(rows)}
    unseen = [one for one in ours if shape_of(one) not in seen]
    return [
        f"  {name}{line}"
        for name, part in (("", ours), ("unseen shapes, ", unseen))
        for line in (_arms(part, kernel) if part else ())
    ]


def _arms(ours: Sequence[Measured], kernel: Kernel) -> list[str]:
    cases = Cases(ours)
    cells: dict[tuple[object, ...], dict[int, tuple[float, float]]] = defaultdict(dict)
    mean: dict[tuple[object, ...], float] = {}
    for one, us, guess in zip(ours, cases.us, cases.predicted_us(kernel), strict=True):
        cell = (*shape_of(one), one.spread.ranks, one.spread.tokens, one.spread.alpha)
        cells[cell][one.spread.slots or 0] = float(us), float(guess)
        mean[cell] = one.spread.tokens * one.spread.top_k / one.spread.experts
    found = []
    whole = [cell for cell, of in cells.items() if 288 in of and 0 in of]
    at = np.array([mean[cell] for cell in whole])
    gain = np.array([[cells[c][0][k] / cells[c][288][k] - 1 for k in (0, 1)] for c in whole])
    sides = (gain > GAIN)[:, 0] != (gain > GAIN)[:, 1]
    best = [min(of.values())[0] for of in cells.values()]
    chosen = [min(of.values(), key=lambda both: both[1])[0] for of in cells.values()]
    regret = np.array(chosen) / np.array(best) - 1
    errors = [kernel.error_at(rows) or 0.0 for rows in at]
    told = np.abs(gain[:, 1]) > np.array(errors)
    of_gain = (1 + gain[:, 1]) / (1 + gain[:, 0]) - 1
    found.append(f"{'error of the gain of 288 slots':<40} {shown(of_gain, at)}")
    for ours_, label in zip(bins_of(at), ("<= 32", "33 to 256", "> 256"), strict=True):
        if ours_.any():
            medians, both = np.median(1 + gain[ours_], axis=0), ours_ & told
            of_told = f"; told {told[ours_].mean():.0%}"
            of_told += f", {sides[both].mean():.0%} of them wrong" if both.any() else ""
            found.append(
                f"wrong side of 5 %, {label} rows: {sides[ours_].mean():.0%} of "
                f"{ours_.sum()}; time without over with 288 slots, median: measured "
                f"{medians[0]:.2f}, predicted {medians[1]:.2f}{of_told}"
            )
    found.append(
        f"regret of the cheapest arm: mean {regret.mean():.1%}, p90 "
        f"{np.quantile(regret, 0.9):.1%}, of {len(regret)}"
    )
    return found


def written(kernels: Sequence[Kernel], left_out: dict[str, list[list[float]]]) -> str:
    """The file of constants."""
    constants = [
        {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in asdict(one).items()}
        for one in kernels
    ]
    head = {
        "format": "eplb-kernels",
        "version": 1,
        "fitted": datetime.now(tz=UTC).date().isoformat(),
        "from": f"{PACKAGE} {VERSION}, Apache-2.0: even rows of every second shape",
        "errors": "median and 90th percentile on uneven rows, EP <= 32, by bins of rows",
    }
    lines = ",\n".join(f"  {json.dumps(one)}" for one in constants)
    names = ",\n".join(f"  {json.dumps(name)}: {of}" for name, of in left_out.items())
    start = json.dumps(head, indent=1).removesuffix("\n}")
    return f'{start},\n "kernels": [\n{lines}\n ],\n "left_out": {{\n{names}\n }}\n}}\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fit", type=Path, help="fit constants, and write them to this file")
    parser.add_argument("--check", action="store_true", help="compare errors with the stored ones")
    parser.add_argument("--cards", default=",".join(CARDS.values()))
    chosen = parser.parse_args()
    cards = chosen.cards.split(",")
    folders = [folder for folder, card in CARDS.items() if card in cards]
    of_kernel: dict[Serving, list[Measured]] = defaultdict(list)
    for one in expert_rows(package_data(), folders):
        of_kernel[one.serving].append(one)
    known = {} if chosen.fit else {str(_serving(one)): one for one in known_kernels()}
    heading = "cases, median and p90 error by rows of a slot"
    print(f"{heading:<50} <= 32        33 to 256            > 256")
    # A fit of some cards keeps the others.
    kernels = [one for one in known_kernels() if one.card not in cards]
    changed = []
    left_out = {n: of for n, of in left_out_kernels().items() if n.split()[0] not in cards}
    for serving, rows in sorted(of_kernel.items(), key=lambda item: str(item[0])):
        kernel = known.get(str(serving)) or with_errors(fit(serving, rows), rows)
        if chosen.check:
            found = with_errors(kernel, rows).errors
            if not np.allclose(found, kernel.errors, atol=ROUNDED):
                changed.append(f"{serving}: errors {found}, stored {kernel.errors}")
        is_out = max(median for median, _ in kernel.errors) > MOST_ERROR
        if is_out:
            left_out[str(serving)] = [list(both) for both in kernel.errors]
        else:
            kernels.append(kernel)
        print(f"{serving}{': LEFT OUT' if is_out else ''}")
        for name, ours in judged(rows):
            cases = Cases(ours)
            print(f"  {name:<40} {shown(cases.errors(kernel), cases.mean_rows)}")
        for line in arms(rows, kernel):
            print(line, flush=True)
        if chosen.fit:
            chosen.fit.write_text(written(kernels, left_out), encoding="utf-8")
    if changed:
        raise SystemExit("\n".join(changed))


def _serving(kernel: Kernel) -> Serving:
    return Serving(kernel.card, kernel.engine, kernel.name, kernel.precision, kernel.is_prefill)


if __name__ == "__main__":
    main()
