"""The page in a real Chromium: first useful paint, and what an update costs its main thread.

    python -m benchmarks.operating.page

First paint is from the start of the navigation, in a tab without a cache, to the frame after the
first drawing of the whole view. Updates are counted in a tab that stays open while windows, reports
and decisions come: processor time of the main thread by ``Performance.getMetrics`` (tasks, of them
scripts and layout with styles), and wall time of the drawing alone.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.operating.load import ShownPage, Size, shown

SIZES = (
    Size(ranks=8, layers=6, window_s=1.0, windows=300),
    Size(ranks=32, window_s=1.0, windows=300),
    Size(ranks=320, window_s=2.0, windows=60, silent=(17, 200)),
)
VIEWS = ("overview", "load", "ranks", "history")
KINDS = "median, p99, worst"
# Resolves after the frame of the drawing of that number; nothing looks in between.
NEXT_FRAME = """(number) => new Promise((resolve) => {
  const isDrawn = () => performance.getEntriesByName("draw").length >= number;
  const end = () => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(resolve)));
  if (isDrawn()) return end();
  const observer = new PerformanceObserver(() => {
    if (!isDrawn()) return;
    observer.disconnect();
    end();
  });
  observer.observe({ type: "measure" });
})"""
COSTS = ("TaskDuration", "ScriptDuration", "LayoutDuration", "RecalcStyleDuration")


def main() -> None:
    """Print a table of first paints, one of updates, and what went wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--ranks", type=int, nargs="*", default=[8, 32, 320])
    asked = parser.parse_args()
    paints, updates, wrong = [], [], []
    for size in (one for one in SIZES if one.ranks in asked.ranks):
        with shown(replace(size, events=asked.events)) as page:
            print(f"{size.ranks} ranks, load {os.getloadavg()[0]:.1f}", flush=True)
            both = np.array(_paints(page, asked.repeats)).T
            paints.append(f"| {size.ranks} | {_figures(both[0])} | {_figures(both[1])} |")
            for view in VIEWS:
                found = np.array(list(_updates(page, view, asked.repeats)))
                columns = " | ".join(_figures(column) for column in found.T)
                updates.append(f"| {size.ranks} | {view} | {columns} |")
            wrong += [*page.errors, *page.elsewhere]
    print(
        f"\n| ranks | first paint ms: {KINDS} | main thread ms |\n|---|---|---|", *paints, sep="\n"
    )
    names = ("tasks", "scripts", "layout and styles", "drawing, wall")
    print(f"\n| ranks | view | {' | '.join(f'{name} ms: {KINDS}' for name in names)} |")
    print("|---|---|---|---|---|---|", *updates, sep="\n")
    print(f"\n{len(wrong)} console errors and requests elsewhere", *wrong, sep="\n")


def _figures(found: Any) -> str:
    middle, late = np.quantile(found, [0.5, 0.99])
    return f"{middle:.1f}, {late:.1f}, {np.max(found):.1f}"


def _paints(page: ShownPage, repeats: int) -> list[tuple[float, float]]:
    """Milliseconds of wall time, and of processor time of the main thread."""
    found = []
    for _ in range(repeats):
        tab = page.open()
        metrics = _metrics(tab)
        tab.goto(page.url)
        wall = float(tab.evaluate("window.firstPaint"))
        found.append((wall, 1e3 * _spent(metrics)[0]))
        tab.close()
    return found


def _updates(page: ShownPage, view: str, repeats: int) -> Iterator[tuple[float, ...]]:
    """Milliseconds of each update: tasks, scripts, layout with styles, and drawing alone."""
    tab = page.open()
    tab.goto(f"{page.url}/#view={view}")
    tab.evaluate("window.firstPaint")
    metrics = _metrics(tab)
    before = _spent(metrics)
    drawn = tab.evaluate("performance.getEntriesByName('draw').length")
    for number in range(drawn + 1, drawn + repeats + 1):
        tab.evaluate(NEXT_FRAME, number)
        after = _spent(metrics)
        tasks, scripts, layout, styles = (1e3 * (after - before)).tolist()
        drawing = tab.evaluate(f"performance.getEntriesByName('draw')[{number - 1}].duration")
        yield tasks, scripts, layout + styles, float(drawing)
        before = after
    tab.close()


def _metrics(tab: Any) -> Any:
    metrics = tab.context.new_cdp_session(tab)
    metrics.send("Performance.enable", {"timeDomain": "threadTicks"})
    return metrics


def _spent(metrics: Any) -> np.ndarray:
    found = {one["name"]: one["value"] for one in metrics.send("Performance.getMetrics")["metrics"]}
    return np.array([found[name] for name in COSTS])


if __name__ == "__main__":
    main()
