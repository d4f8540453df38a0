"""The page in a real Chromium: first paint, time of an update, screenshots.

    python -m benchmarks.operating.page --folder /tmp/shots

For each size: seconds until the verdict and the chart are drawn, the main thread's time of one
update (median and worst of ten), and pictures at 1280, 390 (dark) and 2560 pixels.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from pathlib import Path
from statistics import median
from typing import Any

from api.http.app import create_app
from api.http.server import HttpService
from benchmarks.operating.load import Now, Size, fill
from telemetry.stores.memory import MemoryStore

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
VIEWS = (("1280", 1280, "light"), ("390-dark", 390, "dark"), ("2560", 2560, "light"))
UPDATES = 10
DEADLINE_MS = 120_000.0


def main() -> None:
    """Print one row for each size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--ranks", type=int, nargs="*", default=[8, 32, 320])
    parser.add_argument("--events", type=int, default=100)
    parser.add_argument("--layers", type=int, default=58)
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    print("| ranks | events | first paint s | update ms, median | worst | console errors |")
    print("|---|---|---|---|---|---|")
    for ranks in asked.ranks:
        size = Size(
            ranks=ranks,
            layers=asked.layers if ranks > 8 else 6,
            windows=120 if ranks <= 32 else 24,
            window_s=5.0 if ranks <= 32 else 25.0,
            events=asked.events,
            silent=() if ranks != 320 else (17, 200),
        )
        print(row(size, asked.folder), flush=True)


def row(size: Size, folder: Path) -> str:
    """Measure one size, and take its pictures."""
    from playwright.sync_api import sync_playwright

    clock = Now(time.time())
    store = MemoryStore("west", clock=clock)
    fill(store, size, clock)
    service = HttpService(create_app(store, is_watching=True))
    service.start()
    errors: list[str] = []
    with sync_playwright() as started:
        env = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/tmp")}
        browser = started.chromium.launch(
            executable_path=shutil.which("chromium"), args=FLAGS, env=env, timeout=DEADLINE_MS
        )
        first_s = 0.0
        updates: list[float] = []
        for name, width, scheme in VIEWS:
            page = browser.new_page(
                viewport={"width": width, "height": 900}, color_scheme=scheme, bypass_csp=True
            )
            page.set_default_timeout(DEADLINE_MS)
            page.on("pageerror", lambda error: errors.append(str(error)))
            page.on("console", lambda said: _note(said, errors))
            begun = time.perf_counter()
            page.goto(service.url)
            page.locator("#chart .measured").wait_for(state="attached")
            if name == "1280":
                first_s = time.perf_counter() - begun
                page.wait_for_function(f"performance.getEntriesByName('draw').length > {UPDATES}")
                found = page.evaluate("performance.getEntriesByName('draw').map(e => e.duration)")
                updates = found[1 : UPDATES + 1]
            page.screenshot(path=folder / f"{size.ranks}-{name}.png", full_page=True)
            page.close()
        browser.close()
    service.stop()
    store.close()
    return (
        f"| {size.ranks} | {size.events} | {first_s:.2f} | {median(updates):.1f} | "
        f"{max(updates):.1f} | {len(errors)} {'; '.join(errors)[:200]} |"
    )


def _note(said: Any, errors: list[str]) -> None:
    if said.type == "error":
        errors.append(said.text)


if __name__ == "__main__":
    main()
