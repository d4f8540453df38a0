"""The page of a deployment that is drawn, in a real Chromium, while its ranks go on.

with shown(Size(ranks=320)) as page:
    tab = page.open(width=1280)
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import httpx

from api.http.app import create_app
from api.http.deployments import Others
from api.http.server import HttpService
from benchmarks.operating.load import Now, SeededDeployment, Size, fill
from telemetry.state.store import StateStore
from tests.support.stores import MemoryStore

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
DEADLINE_MS = 60_000.0
HEIGHT = 900
# Resolves when the frame after the first drawing of the whole view is on the screen.
FIRST_PAINT = """
window.firstPaint = new Promise((resolve) => new PerformanceObserver((list, observer) => {
  if (!list.getEntriesByName("draw").length) return;
  observer.disconnect();
  requestAnimationFrame(() => requestAnimationFrame(() => resolve(performance.now())));
}).observe({ type: "measure" }));
"""


class ShownPage:
    """The address of a page, a browser for it, and what went wrong in either."""

    def __init__(self, url: str, browser: Any) -> None:
        self.url, self._browser = url, browser
        self.errors: list[str] = []  # of consoles
        self.elsewhere: list[str] = []  # requests that left the service

    def open(self, width: int = 1280, scheme: Literal["light", "dark"] = "light") -> Any:
        """Return a new tab, without a cache, on no page yet."""
        # The policy of the page allows no scripts but its own; those here read clocks.
        tab = self._browser.new_page(
            viewport={"width": width, "height": HEIGHT}, color_scheme=scheme, bypass_csp=True
        )
        tab.set_default_timeout(DEADLINE_MS)
        tab.on("pageerror", lambda error: self.errors.append(str(error)))
        tab.on("console", self._heard)
        tab.on("request", self._asked)
        tab.add_init_script(FIRST_PAINT)
        return tab

    def _heard(self, said: Any) -> None:
        if said.type == "error":
            self.errors.append(said.text)

    def _asked(self, request: Any) -> None:
        if not request.url.startswith(self.url):
            self.elsewhere.append(request.url)


@contextmanager
def shown(size: Size, *, others: tuple[str, ...] = ()) -> Iterator[ShownPage]:
    """Serve a deployment that is drawn, with a new window and new reports all the time.

    Args:
        size: of the deployment.
        others: names of small deployments that the service shows beside it.
    """
    from playwright.sync_api import sync_playwright

    stores: dict[str, StateStore] = {}
    with ExitStack() as stack:
        small = Size(ranks=8, layers=6, windows=40, events=20)
        for name, its in (("west", size), *((one, small) for one in others)):
            clock = Now(time.time())
            stores[name] = MemoryStore(name, clock=clock)
            stack.callback(stores[name].close)
            made = fill(stores[name], its, clock)
            clock.is_present = True
            stack.enter_context(_going_on(made))
        app = create_app(
            stores["west"],
            is_watching=True,
            others=Others(lambda: list(others), stores.__getitem__) if others else None,
            state_dir=Path(stack.enter_context(TemporaryDirectory(prefix="eplb-shown-"))),
        )
        service = HttpService(app)
        service.start()
        stack.callback(service.stop)
        for change, why in (("pause", "a switch is updated"), ("resume", "all links are up")):
            answer = httpx.post(
                f"{service.url}/api/v1/{change}", json={"reason": why}, timeout=DEADLINE_MS / 1000
            )
            answer.raise_for_status()
        started = stack.enter_context(sync_playwright())
        env = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/tmp")}
        browser = started.chromium.launch(
            executable_path=shutil.which("chromium"), args=FLAGS, env=env, timeout=DEADLINE_MS
        )
        stack.callback(browser.close)
        yield ShownPage(service.url, browser)


@contextmanager
def _going_on(made: SeededDeployment) -> Iterator[None]:
    """Have the ranks serve a window every so often, in a thread."""
    stopping = threading.Event()

    def serve(wait: Callable[[float], bool]) -> None:
        while not wait(made.size.window_s):
            made.serve_window()
            made.report()

    thread = threading.Thread(target=serve, args=(stopping.wait,))
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join()
