"""Shadow mode on recorded routing: this planner's decisions against the engine's own rule.

    python -m benchmarks.over_time.shadow --data FOLDER [--half judge|tune] [--windows N]
        [--only TEXT] [--json FILE]
    python -m benchmarks.over_time.shadow --coverage

Each stream of ``loads.py`` goes through the comparison of ``eplb shadow``. No recording has an
engine's maps, so the engine's algorithm is replayed, DeepSeek's EPLB on the load since its previous
plan, after each window or after every fourth. Both sides begin with its plan on the first four
windows, which are not judged; both are judged under the engine's rule of choosing a replica, and
pay the same price for a move.

``--coverage`` draws series of known mean 0 and counts how often the interval has it.

gain    imbalance of the engine less ours, mean over judged windows, with the 95 % interval
moves   experts that moved to another rank, in all
net     serving seconds won in a window of 60 s, moves paid, with the interval
ms      processor time of one plan: median, p99
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.over_time import loads
from eplb.core.placement import Placement
from eplb.deepseek import rebalance_experts
from eplb.dispatch_rules.rules import DispatchRule
from simulations.course import Terms
from simulations.shadow.comparison import Comparison, Group
from simulations.shadow.confidence import difference_of
from simulations.shadow.report import Prices, report
from simulations.shadow.windows import Observed, Skips
from telemetry.formats.types import rows_in_order

START = 4  # windows that the first placement is planned on
WINDOW_SECONDS = 60.0
HEADINGS = (
    "model, slots / ranks, order",
    "rule, every",
    "engine",
    "ours",
    "gain",
    "verdict",
    "its moves",
    "our moves",
    "net s",
    "its ms",
    "our ms",
)
EXPERT_BYTES = {loads.GPT: 13_219_200, loads.LITE: 17_301_504}  # MXFP4, BF16
SIDES = (  # of the engine: its rule, and windows between its plans
    (DispatchRule.EVEN, 1),
    (DispatchRule.EVEN, 4),
    (DispatchRule.SGLANG_STATIC, 4),
)


def timed(call: Callable[..., Any], ms: list[float]) -> Callable[..., Any]:
    """The same, noting its processor time."""

    def run(*arguments: Any) -> Any:
        begun = time.process_time()
        found = call(*arguments)
        ms.append((time.process_time() - begun) * 1000)
        return found

    return run


def compared(
    case: loads.Case, load: NDArray[np.int64], rule: DispatchRule, every: int
) -> dict[str, Any]:
    """The report on one stream, with processor times."""
    layers = rows_in_order(load.shape[1])
    terms = Terms(case.topology, dispatch=rule, seed=case.seed)
    redundant = case.topology.num_slots - load.shape[2]
    size = EXPERT_BYTES[case.model]
    group = Group(terms, redundant, engine_plans="deepseek", engine_every=every, expert_bytes=size)
    comparison, our_ms, engine_ms = Comparison(group, Skips()), list[float](), list[float]()
    for index, tokens in enumerate(load[START:]):
        comparison.add(Observed(tokens, layers, None, f"window {index}"))
        if not index:  # its plans are not timed: kernels are loaded with them
            engine, course = comparison.engine, comparison.ours[0].course
            assert engine is not None, "begun"
            engine.replay = timed(engine.replay, engine_ms)  # type: ignore[method-assign]
            course.plan_after = timed(course.plan_after, our_ms)  # type: ignore[method-assign]
    found = report(comparison, Prices(WINDOW_SECONDS), [])
    replays = engine_ms[(every - 2) % every :: every]  # the first window was not timed
    return found | {"case": case.name, "every": every, "ms": our_ms, "engine_ms": replays}


def start_of(case: loads.Case, load: NDArray[np.int64]) -> Placement:
    """The engine's plan on windows before those that are compared."""
    topology = case.topology
    numbers = (topology.num_slots, 1, topology.num_nodes, topology.num_ranks)
    held, _, _ = rebalance_experts(load.sum(axis=0), *numbers)
    return Placement(held.astype(np.int32), load.shape[2])


def row_of(found: dict[str, Any]) -> list[str]:
    """The row of a report."""
    engine, ours = found["engine"], found["ours"][0]
    gain, net = ours["gain"]["imbalance"], ours["gain"]["net_seconds"]
    times = (np.percentile(found[name], (50, 99)) for name in ("engine_ms", "ms"))
    return [
        found["case"],
        f"{found['dispatch']}, {found['every']}",
        f"{engine['imbalance_mean']:.3f}",
        f"{ours['imbalance_mean']:.3f}",
        f"{gain['mean']:+.3f} [{gain['low']:+.3f}, {gain['high']:+.3f}]",
        gain["verdict"],
        f"{engine['experts_moved']:,}",
        f"{ours['experts_moved']:,}",
        f"{net['mean']:+.2f} [{net['low']:+.2f}, {net['high']:+.2f}]",
        *(f"{median:.1f}, {late:.1f}" for median, late in times),
    ]


def show(cells: Sequence[str]) -> None:
    """Print a row of a table."""
    print(f"| {' | '.join(cells)} |", flush=True)


def head(headings: Sequence[str]) -> None:
    """Print the head of a table."""
    show(headings)
    show(["---"] * len(headings))


def coverage() -> None:
    """How often the interval of series of mean 0 has 0."""
    head(("correlation of neighbours", "windows", "intervals with the true mean, of 500"))
    rng = np.random.default_rng(0)
    for part in (0.0, 0.5, 0.8):
        for windows in (8, 16, 64, 256):
            noise = rng.normal(size=(500, windows + 64))
            for index in range(1, noise.shape[1]):
                noise[:, index] += part * noise[:, index - 1]
            found = [difference_of(one, 0, least=0).interval for one in noise[:, 64:]]
            hits = sum(one is not None and one[0] <= 0 <= one[1] for one in found)
            show((f"{part}", str(windows), f"{hits / len(found):.1%}"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=loads.DATA, help="folder of the recordings")
    parser.add_argument("--half", choices=loads.HALVES, default="judge", help="of requests")
    parser.add_argument("--windows", type=int, default=96, help="most windows of a stream")
    parser.add_argument("--only", default="", help="cases whose name has this text")
    parser.add_argument("--coverage", action="store_true", help="of the interval, and no streams")
    parser.add_argument("--json", type=Path, help="write all reports")
    arguments = parser.parse_args()
    if arguments.coverage:
        coverage()
        return
    if not arguments.data.is_dir():
        sys.exit(f"skipped: real traces are not at {arguments.data}, expected --data FOLDER")
    loads.DATA = arguments.data
    print(f"{datetime.now(UTC):%Y-%m-%d} python {sys.version.split()[0]} numpy {np.__version__}\n")
    reports = []
    head(HEADINGS)
    for case in loads.cases(1):
        if arguments.only in case.name:
            load = loads.stream(case, arguments.half, arguments.windows)
            for rule, every in SIDES:
                reports.append(compared(case, load, rule, every))
                show(row_of(reports[-1]))
    for name in ("imbalance", "net_seconds"):
        verdicts = Counter(one["ours"][0]["gain"][name]["verdict"] for one in reports)
        print(f"\n{name}: {', '.join(f'{word} {count}' for word, count in verdicts.items())}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(reports, indent=1))


if __name__ == "__main__":
    main()
