"""The project's own kernel on an H200 against the form: 64 uneven rows of 23 November 2026.

    python -m benchmarks.fidelity.own_kernel

Constants are fitted to the even rows of the report on uneven rows (5 and 9 slots of DeepSeek-V3's
experts); its drawn rows judge them. The report has their mean and busiest rows; the counts are
drawn again from its seed, and the busiest ones must be equal. The tile of 64 rows is the largest of
the kernel's decode tilings. The time of one row is the mean of its three draws.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from eplb import ModelShape
from eplb.core.kernels import Kernel
from simulations.step_time import fitted, predicted_us

REPORT = Path(__file__).parents[1] / "reports" / "2026-11-23-experts-uneven.md"
MODEL = ModelShape((0,), 256, 8, 7168, 2048)
SKEWS = {"mild": 4.7, "strong": 0.7}  # shape of the Gamma draw
ROWS, SLOTS, DRAWS, SEED, TILE, NEAR = (8, 32, 64, 102, 192, 320, 512, 1536), (9, 5), 3, 11, 64, 0.1
Case = tuple[str, int, int]  # kind, slots, mean rows


def drawn_counts() -> dict[Case, list[list[int]]]:
    """Rows of slots in each draw, as they were measured."""
    generator, found = torch.Generator().manual_seed(SEED), {}
    for slots in SLOTS:
        for skew, shape in SKEWS.items():
            alpha = torch.full((slots,), shape)
            for rows in ROWS:
                parts = [torch._standard_gamma(alpha, generator=generator) for _ in range(DRAWS)]
                found[f"drawn, {skew}", slots, rows] = [
                    (part / part.sum() * rows * slots).round().int().tolist() for part in parts
                ]
    return found


def measured(precision: str) -> list[tuple[Case, int, float]]:
    """Case, busiest rows and microseconds of each row of the report's table."""
    table = REPORT.read_text(encoding="utf-8").split(f"\n## {precision}\n")[1].split("\n## ")[0]
    cells = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("| ")]
    return [
        ((one[0].strip(), int(one[1]), int(one[2])), int(one[3]), float(one[7]))
        for one in cells
        if one[1].strip().isdigit()
    ]


def kernel_of(precision: str) -> Kernel:
    """Constants from the even rows."""
    even = [(case, us) for case, _, us in measured(precision) if case[0] == "even"]
    start = Kernel(
        *("h200", "", f"grouped GEMM, {precision}", precision.lower(), False),
        *(10.0, 3e12, 6e14, 1.0),
        tile=TILE,
    )
    names = ("fixed_us", "reads", "flops", "column_ps")

    def of_rows(kernel: Kernel) -> np.ndarray:
        return np.array([predicted_us(kernel, [case[2]] * case[1], MODEL) for case, _ in even])

    return fitted(start, names, of_rows, np.array([us for _, us in even]))


def main() -> None:
    counts = drawn_counts()
    for precision in ("FP8", "BF16"):
        kernel, near, ratios = kernel_of(precision), 0, []
        print(f"{kernel.name}: {kernel.fixed_us:.1f} us, {kernel.reads / 1e12:.2f} TB/s")
        for case, busiest, us in measured(precision):
            if case not in counts:
                continue
            found = max(max(one) for one in counts[case])
            assert found == busiest, f"{case}: busiest {found}, the report has {busiest}"
            guess = np.mean([predicted_us(kernel, one, MODEL) for one in counts[case]])
            ratios.append(float(guess / us))
            near += abs(ratios[-1] - 1) <= NEAR
            print(f"  {case[0]:14}{case[1]:3}{case[2]:6}{us:9.1f} us {ratios[-1]:6.2f}")
        print(
            f"  within {NEAR:.0%}: {near} of {len(ratios)}; {min(ratios):.2f} to {max(ratios):.2f}"
        )


if __name__ == "__main__":
    main()
