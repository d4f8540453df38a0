"""An operator's way through the page of a deployment that serves, in a real browser."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from telemetry.state.store import StateStore

pytestmark = pytest.mark.slow  # a demo with its ranks, and a browser

CHROMIUM = shutil.which("chromium")
SHOWN = os.environ.get("EPLB_TEST_PICTURES")  # a folder for pictures of each view


@pytest.fixture
def demo(tmp_path: Path, start_demo: Any) -> Iterator[Any]:
    """A demo whose controller proposes and moves nothing of its own accord."""
    started = start_demo(tmp_path, serve=True, stage="propose")
    yield started
    started.process.send_signal(signal.SIGINT)
    assert started.ends() == 0


@pytest.fixture
def page(demo: Any) -> Iterator[Any]:
    """Its page; what the console says of errors fails the test."""
    if CHROMIUM is None:
        pytest.skip("chromium is not installed")
    playwright = pytest.importorskip("playwright.sync_api")
    address = demo.wait_for_line("eplb demo: http://").split("eplb demo: ")[1].strip()
    errors: list[str] = []
    with playwright.sync_playwright() as started:
        env = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/tmp")}
        browser = started.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"], env=env, timeout=0
        )
        opened = browser.new_page(viewport={"width": 1280, "height": 900})
        opened.set_default_timeout(0)
        opened.on("pageerror", lambda error: errors.append(str(error)))
        opened.deployment = address
        opened.goto(address)
        yield opened
        browser.close()
    assert errors == []


def picture(page: Any, name: str) -> None:
    if SHOWN is not None:
        page.screenshot(path=Path(SHOWN) / f"{name}.png", full_page=True)


def committed(at_least: int) -> Callable[[StateStore], Any]:
    def look(store: StateStore) -> Any:
        found = store.committed()
        return found if found and found.placement.generation >= at_least else None

    return look


def waiting_proposal(page: Any) -> tuple[Any, str]:
    """The latest proposal that is open, by its number however its state goes on."""
    waiting = page.locator("#proposals .entry", has=page.locator(".tag.open")).first
    waiting.wait_for()
    number = re.search(r"Proposal (\d+)", waiting.inner_text())
    assert number is not None
    return page.locator("#proposals .entry", has_text=f"Proposal {number[1]}:"), number[1]


def test_proposals_are_rejected_and_approved_watched_and_rolled_back_on_the_page(
    demo: Any, page: Any
) -> None:
    start = demo.sees("a placement", committed(0)).placement
    rejected, _ = waiting_proposal(page)
    page.get_by_label("Reason").fill("not today")
    rejected.get_by_role("button", name="Reject").click()
    rejected.locator(".tag.rejected").wait_for()
    assert "not today" in rejected.inner_text()
    assert not rejected.get_by_role("button", name="Approve").is_visible()

    chosen, number = waiting_proposal(page)
    chosen.get_by_text("Moves and reasons").click()
    chosen.locator("table.moves tbody tr").first.wait_for()
    picture(page, "proposal")
    page.get_by_label("Reason").fill("looks right")
    chosen.get_by_role("button", name="Approve").click()
    picture(page, "sure")
    page.get_by_role("button", name=f"Approve proposal {number}").click()
    chosen.locator(".tag.approved").wait_for()
    page.locator("#last-reason", has_text="committed").wait_for()
    moved = demo.sees("the move", committed(start.generation + 1)).placement
    picture(page, "approved")

    page.get_by_label("Reason").fill("back")
    page.get_by_role("button", name="Roll back", exact=True).click()
    page.get_by_role("button", name=f"Roll back to generation {start.generation}").click()
    back = demo.sees("the rollback", committed(moved.generation + 1)).placement
    page.locator("#last", has_text="rollback").wait_for()
    picture(page, "rolled-back")

    assert (moved.slot_to_expert != start.slot_to_expert).any()
    assert (back.slot_to_expert == start.slot_to_expert).all()


def test_death_of_a_rank_is_found_out_later_on_a_page_that_was_not_open(
    demo: Any, page: Any
) -> None:
    page.goto("about:blank")
    demo.sees("a plan", lambda store: [one for one in store.events() if one.kind == "plan"])
    demo.kill("rank 1")
    demo.sees("the next start", lambda store: len(runs(store)) > 1)
    page.goto(page.deployment + "#range=3600")
    page.locator("#verdict.serving").wait_for()

    page.locator("#chart .mark.death").first.wait_for()
    page.locator("#anomalies-count", has_text="rank 1").wait_for()
    assert "None is open" in page.locator("#anomalies-count").inner_text()
    page.get_by_role("link", name="History").click()
    death = page.locator("#ended .entry", has_text="rank-death")
    death.wait_for()
    assert death.locator(".tag").inner_text() == "critical"
    assert "rank 1" in death.inner_text()
    assert "Read eplb journal" in death.inner_text()
    story = page.locator("#events .entry", has_text="Ranks 0, 2, 3 continue")
    story.wait_for()
    picture(page, "after-a-death")

    assert "rank 1" in story.inner_text()
    assert page.locator("#events .entry", has_text="from generation").count() == 0


def runs(store: StateStore) -> set[str]:
    return {
        str(event.detail["run"]) for event in store.events(limit=100_000) if event.kind == "run"
    }
