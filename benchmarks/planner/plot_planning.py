"""Moves against balance when the traffic changes: the table, and docs/moves.svg drawn from it.

    python -m benchmarks.planner.plot_planning

DeepSeek-V2-Lite (26 layers, 64 experts) on 8 ranks x 9 slots serves intent classification; then
the traffic turns to summaries. Each planner sees four windows of 1,024 tokens of them, gets a
budget of moves, and is judged on the four windows that follow, which it has not seen. Recorded
routing: deepseek-ai/ESFT, results/expert_scores.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.recorded import DATA, Tokens, windows
from eplb import Budget, CostModel, Placement, Topology, imbalance, plan

ROOT = Path(__file__).parents[2]
RANKS = Topology.uniform(num_nodes=1, ranks_per_node=8, slots_per_rank=9)
NUM_EXPERTS, WINDOW, SEEN = 64, 1024, 4
BUDGETS = (0, 26, 52, 104, 156, 208, 286, 390, 546, 780, 1100, 1872)
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 420, 64, 24, 56, 52

Point = tuple[float, float]  # part of the slots that move, imbalance after


@dataclass(frozen=True)
class Curve:
    """One planner."""

    name: str
    colour: str
    points: tuple[Point, ...]


def recorded(domain: str) -> Tokens:
    """[T, L, E] counts of one domain's tokens as recorded."""
    ids = np.load(DATA / f"dsv2lite_{domain}.npz")["expert_ids"].astype(np.int64)
    return windows(ids, WINDOW, NUM_EXPERTS)


def curves(before: Tokens, after: Tokens) -> tuple[list[Curve], float]:
    """Every planner over all budgets, and the imbalance of what serves, unchanged."""
    serving = plan(before, RANKS).target
    seen, unseen = after[:SEEN], after[SEEN:]

    def judged(placement: Placement) -> Point:
        moved = float((placement.slot_to_expert != serving.slot_to_expert).mean())
        return moved, float(imbalance(unseen, placement, RANKS).mean())

    drawn = []
    for name, policy, colour, is_equal in (
        ("greedy, planned afresh", "greedy", "#8a8f98", False),
        ("auto, equal split", "auto", "#d9822b", True),
        ("auto, with its shares", "auto", "#1f6fb4", False),
    ):
        points = []
        for max_moves in BUDGETS:
            budget = Budget(max_moves=max_moves, target_imbalance=1.0)
            found = plan(
                seen,
                RANKS,
                current=serving,
                budget=budget,
                policy=policy,
                cost=CostModel(pay_back_s=1e9),
            ).target
            equal = Placement(found.slot_to_expert, NUM_EXPERTS)
            points.append(judged(equal if is_equal else found))
        drawn.append(Curve(name, colour, tuple(dict.fromkeys(points))))  # a plan may stop early
    return drawn, judged(serving)[1]


def drawing(drawn: Sequence[Curve], stale: float) -> str:
    """The curves as SVG, light and without a script."""
    most = max(moved for curve in drawn for moved, _ in curve.points)
    top = np.ceil(stale * 20) / 20

    def at(moved: float, ratio: float) -> tuple[float, float]:
        x = LEFT + moved / most * (WIDTH - LEFT - RIGHT)
        y = HEIGHT - BOTTOM - (ratio - 1.0) / (top - 1.0) * (HEIGHT - TOP - BOTTOM)
        return round(x, 1), round(y, 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="system-ui, sans-serif" font-size="13" fill="#2b2f36">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="24" font-size="15" font-weight="600">'
        "Imbalance on unseen windows after a change of traffic</text>",
        f'<text x="{LEFT}" y="42" fill="#5b616b">'
        "DeepSeek-V2-Lite, intent to summaries, 8 ranks x 9 slots, max / mean rank load</text>",
    ]
    for ratio in np.arange(1.0, top + 1e-9, 0.1):
        x, y = at(0.0, float(ratio))
        parts.append(f'<path d="M{x} {y}H{WIDTH - RIGHT}" stroke="#e3e6ea"/>')
        parts.append(f'<text x="{x - 8}" y="{y + 4}" text-anchor="end">{ratio:.1f}</text>')
    for tenth in range(0, int(most * 10) + 1, 2):
        x, y = at(tenth / 10, 1.0)
        parts.append(f'<text x="{x}" y="{y + 20}" text-anchor="middle">{tenth * 10} %</text>')
    parts.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 10}" text-anchor="middle" '
        'fill="#5b616b">slots whose weights move</text>'
    )
    for number, curve in enumerate(drawn):
        spots = [at(*point) for point in curve.points]
        line = " ".join(f"{x},{y}" for x, y in spots)
        parts.append(
            f'<polyline points="{line}" fill="none" stroke="{curve.colour}" stroke-width="2"/>'
        )
        parts += [f'<circle cx="{x}" cy="{y}" r="3" fill="{curve.colour}"/>' for x, y in spots]
        y = TOP + 24 + 20 * number
        parts.append(f'<path d="M{WIDTH - 250} {y}h24" stroke="{curve.colour}" stroke-width="2"/>')
        parts.append(f'<text x="{WIDTH - 218}" y="{y + 4}">{curve.name}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    if not DATA.is_dir():
        sys.exit(f"skipped: real traces are not at {DATA}: set EPLB_DATA")
    drawn, stale = curves(recorded("intent"), recorded("summary"))
    print(f"serving placement, unchanged: {stale:.3f}")
    for curve in drawn:
        print(f"{curve.name}: " + ", ".join(f"{m:.1%} {r:.3f}" for m, r in curve.points))
    (ROOT / "docs" / "moves.svg").write_text(drawing(drawn, stale))


if __name__ == "__main__":
    main()
