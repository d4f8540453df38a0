"""The page in a real browser: figures and reasons are seen, and a button asks the controller."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from api.app import STATIC, create_app
from api.http.deployments import Others
from api.monitor.anomalies import EventAnomaly
from api.monitor.state import FindingKind
from eplb import ModelShape, Placement, Topology, build_migration
from eplb.decision.pace import PaceChange, StepTimes
from eplb.errors import StoreError
from telemetry.state.live import Control
from telemetry.state.memory import MemoryBackend
from telemetry.state.runs import REPORT_EVERY_S, STEP_TIMES
from telemetry.state.store import StateStore
from telemetry.state.tasks import TaskResult
from tests.support.controlled_deployment import MODEL as CONTROLLED
from tests.support.controlled_deployment import SKEWED, START, planned_by_request
from tests.support.http import serving
from tests.support.limits import NEVER_S
from tests.support.plan_events import plan_event
from tests.support.rank_reports import rank_report
from tests.support.stores import MemoryStore
from tests.support.two_ranks import FIRST, SECOND, TOPOLOGY, begin_run, serve

pytestmark = pytest.mark.system

CHROMIUM = shutil.which("chromium")
SHOWN = os.environ.get("EPLB_TEST_PICTURES")  # a folder for pictures
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
PUBLISHED = {"plan_id": 3, "moves": 1, "transactions": 2, "base_generation": 4, "generation": 5}
VIEWS = ("Overview", "Load", "Ranks", "History")
MODEL = ModelShape((7,), num_experts=3, top_k=1, hidden=2, intermediate=2)

ACTING = """[...document.querySelectorAll('a[href], button, input, select, [tabindex]')]
    .filter((one) => one.checkVisibility())"""
TWO_DRAWS = """new Promise((done) => {
    let draws = 0;
    new PerformanceObserver((found, observer) => {
        draws += found.getEntriesByName('draw').length;
        if (draws > 1) { observer.disconnect(); done(); }
    }).observe({ type: 'measure' });
})"""


def stored() -> StateStore:
    """One window of 80 and 20 tokens, and a decision with markup in its reason."""
    opened = MemoryStore("d")
    store_run(opened)
    return opened


def store_run(opened: StateStore) -> None:
    begin_run(opened, model=MODEL)
    opened.commit(FIRST, expected=None, reason="start")
    serve(opened, at=time.time())
    opened.add_event("plan", plan_event(reason="gain <b>1 %</b>"))


@pytest.fixture
def store() -> Iterator[StateStore]:
    with closing(stored()) as opened:
        yield opened


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("chromium is not installed")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as started:
        # The browser gets no settings of this process, such as proxies.
        env = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/tmp")}
        yield started.chromium.launch(executable_path=CHROMIUM, args=FLAGS, env=env, timeout=0)


@contextmanager
def opened_page(
    browser: Any, store: StateStore, folder: Path, *others: str, refusals: int = 0
) -> Iterator[Any]:
    """The page of a store; what its console says of errors fails the test.

    Args:
        others: names of deployments that are shown beside the one of the store.
        refusals: requests that are refused with 409, which the console lists.
    """
    errors: list[str] = []
    shown = Others(lambda: others, MemoryStore)
    app = create_app(store, plan_wait_s=NEVER_S, others=shown, state_dir=folder)
    with serving(app) as service, closing(browser.new_page()) as page:
        page.set_default_timeout(0)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
        page.goto(service.url)
        yield page
    refused = [one for one in errors if "status of 409 (Conflict)" in one]
    assert (errors, len(refused)) == (refused, refusals)


@pytest.fixture
def page(browser: Any, store: StateStore, tmp_path: Path) -> Iterator[Any]:
    with opened_page(browser, store, tmp_path) as opened:
        yield opened


@pytest.fixture(scope="module")
def seen(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A page that tests share which only look at it."""
    with opened_page(browser, stored(), tmp_path_factory.mktemp("state")) as opened:
        yield opened


def report(store: StateStore) -> None:
    """Have both ranks report. They are silent, and without tokens stopped, long after the test."""
    for rank in range(2):
        now = {"time": time.time(), "step": 7, "generation": 1, REPORT_EVERY_S: NEVER_S}
        store.report(rank_report("a", rank, **now))


class Unsure(MemoryBackend):
    """A store that fails while it is told to."""

    fails = False

    @contextmanager
    def _read(self) -> Iterator[sqlite3.Connection]:
        if self.fails:
            raise StoreError("the store is away")
        with super()._read() as connection:
            yield connection


@pytest.mark.parametrize("fails_at_start", [False, True])
def test_page_opened_while_the_store_is_away_shows_what_is_known(
    browser: Any, tmp_path: Path, fails_at_start: bool
) -> None:
    backend = Unsure("d")
    with closing(StateStore(backend)) as store:
        store_run(store)
        report(store)
        backend.fails = fails_at_start
        app = create_app(store, is_watching=True, state_dir=tmp_path)
        with serving(app) as service, closing(browser.new_page()) as page:
            page.set_default_timeout(0)
            read = app.state.deployments.own.reader
            while not fails_at_start and read.latest is None:
                threading.Event().wait(0.01)
            backend.fails = True
            errors: list[str] = []
            page.on("pageerror", lambda error: errors.append(str(error)))
            page.goto(service.url)
            page.locator("#verdict.blind", has_text="the store has not been read for ").wait_for()
            page.locator("#trouble", has_text="the store is away").wait_for()
            facts = page.locator("#facts").inner_text()
            for name in ("Load", "Ranks", "History", "Overview"):
                view(page, name)
            backend.fails = False
            page.locator("#trouble").wait_for(state="hidden")
            page.locator("#facts", has_text="7").wait_for()
        assert errors == []
    assert ("7" in facts) is not fails_at_start  # the step of the last reading


def view(page: Any, name: str) -> None:
    page.get_by_role("navigation", name="Views").get_by_role("link", name=name).click()
    page.locator(f"main[data-view={name.lower()}]").wait_for()


def test_page_shows_heatmap_and_last_decision(seen: Any) -> None:
    seen.locator("#chart svg[aria-label^='Imbalance from ']").wait_for()
    view(seen, "Load")
    cells = seen.locator("#heatmap td")
    cells.first.wait_for()

    assert cells.all_inner_texts() == ["1.60", "0.40"]
    assert seen.locator("#heatmap tbody th").all_inner_texts() == ["7"]  # as the model numbers it
    assert cells.first.get_attribute("title").startswith("layer 7, rank 0: 1.600 ")
    assert seen.locator("#experts-layers span").all_inner_texts() == ["7"]
    assert seen.locator("#experts-numbers span").all_inner_texts() == ["0", "1", "2"]
    view(seen, "History")
    seen.locator("#decisions .entry").wait_for()
    assert "gain <b>1 %</b>" in seen.locator("#decisions").inner_text()


def test_page_begins_with_the_verdict_and_what_balancing_gains(
    page: Any, store: StateStore
) -> None:
    page.locator("#verdict.blind").wait_for()

    assert page.locator("#verdict").inner_text() == (
        "Blind silent ranks: 0, 1, expected a report from all 2 within 10 s"
    )
    assert page.title() == "blind: d"
    no_leader = page.locator("#anomalies .entry", has_text="no controller leads, expected one")
    assert "Start eplb serve or eplb controller." in no_leader.inner_text()
    shown = dict(
        zip(
            page.locator("#summary dt").all_inner_texts(),
            page.locator("#summary dd").all_inner_texts(),
            strict=True,
        )
    )
    assert shown["imbalance now"].split("\n")[0].strip() == "1.60"
    assert shown["unbalanced"].split("\n")[0].strip() == "1.60"
    assert shown["ranks that report"].split("\n")[0].strip() == "0 of 2"
    above, below = (page.locator(one).bounding_box()["y"] for one in ("#summary", "#rebalance"))
    assert above < below

    store.acquire_lease("gpu7:4242:9f31c2aa-8812345-5be012", NEVER_S)
    report(store)
    page.locator("#verdict.serving", has_text="2 ranks serve, at step 7").wait_for()
    assert page.title() == "serving: d"
    assert "process 4242 on host gpu7" in page.locator("#summary").inner_text()
    page.locator("#anomalies-count", has_text="None is open").wait_for()
    assert page.locator("#anomalies").is_hidden()


def test_events_are_sentences_with_a_date_in_utc(page: Any, store: StateStore) -> None:
    view(page, "History")
    store.add_event("publish", PUBLISHED)
    store.add_event("compile", {"holder": "gpu7:1:9f31c2aa-8-5be012", "state": "begun"})
    store.add_event("of a plug-in", {"a_b": [1, {"c": None}], "d": 0.5})
    page.locator("#events .entry", has_text="of a plug-in").wait_for()

    lines = page.locator("#events .entry .figures").all_inner_texts()
    assert lines[:3] == [
        "a b 1, c null, d 0.500.",
        "The controller, process 1 on host gpu7, compiles the planner's kernels.",
        "Plan 3 is offered: 1 move in 2 transactions, to generation 5.",
    ]
    assert not [one for one in lines if "{" in one or '"' in one]
    shown = page.locator("#events time").first.inner_text()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ", shown), shown


def test_page_fits_its_window_and_the_header_of_a_wide_one_is_one_line(seen: Any) -> None:
    for width in (1280, 1920, 390):
        seen.set_viewport_size({"width": width, "height": 900})
        for name in VIEWS:
            view(seen, name)
            assert seen.evaluate("document.documentElement.scrollWidth") <= width
            for one in seen.locator("header button, nav a").all():
                box = one.bounding_box()
                assert box["x"] + box["width"] <= width
        if width >= 1280:
            boxes = [seen.locator(one).bounding_box() for one in (".brand", "#facts", ".switches")]
            assert max(one["y"] for one in boxes) < min(one["y"] + one["height"] for one in boxes)
    seen.set_viewport_size({"width": 1280, "height": 720})


def test_dry_run_asks_the_controller_and_shows_its_answer(page: Any, store: StateStore) -> None:
    asked: list[dict[str, Any]] = []

    def controller() -> None:
        version = 0
        while not asked:
            if (task := store.claim()) is not None:
                asked.append(dict(task.request))
                result = {"decision": "MOVE", "reason": "gain 60 %", "before": 1.6, "after": 1.0}
                store.finish(task.id, "done", TaskResult(detail=result))
            version = store.wait(version, NEVER_S)

    thread = threading.Thread(target=controller)
    thread.start()
    page.get_by_label("Reason").fill("curious")
    page.get_by_role("button", name="Plan (dry run)").click()
    page.locator("#answer", has_text="gain 60 %").wait_for()
    thread.join()

    assert asked == [{"reason": "curious", "dry_run": True}]
    assert "imbalance 1.600 → 1.000 predicted" in page.locator("#answer").inner_text()


def test_explain_button_shows_why_an_expert_is_where_it_is(browser: Any, tmp_path: Path) -> None:
    with (
        closing(MemoryStore("d")) as store,
        planned_by_request(store, replace(CONTROLLED, layer_ids=(7,))),
        opened_page(browser, store, tmp_path) as page,
    ):
        view(page, "Load")
        page.get_by_role("button", name="Explain the hottest expert of layer 7").click()
        page.locator("#explained h3", has_text="Layer 7, expert 0").wait_for()
        sentences = page.locator("#explained li").all_inner_texts()
        if SHOWN is not None:
            page.screenshot(path=Path(SHOWN) / "explained.png", full_page=True)

    assert sentences[0].startswith("Layer 7, expert 0: 60.0% of the layer's tokens")
    assert any("rank 1" in one for one in sentences)


def test_expired_proposal_is_folded_and_a_loss_is_asked_about_again(
    browser: Any, tmp_path: Path
) -> None:
    with (
        closing(MemoryStore("d")) as store,
        planned_by_request(store) as deployment,
        opened_page(browser, store, tmp_path, refusals=1) as page,
    ):
        for number in (1, 2):
            page.get_by_role("button", name="Propose").click()
            page.locator("#answer", has_text=f"Proposal {number} waits").wait_for()
        waiting = page.locator("#proposals .entry", has_text="Proposal 1:")
        store.set_control(Control(), reason="go on")
        deployment.serve(SKEWED[::-1], windows=64)
        waiting.get_by_role("button", name="Approve").click()
        page.get_by_role("button", name="Approve proposal 1", exact=True).click()
        page.locator("#sure-what", has_text="loses by the load of now").wait_for()
        page.get_by_role("button", name="Approve proposal 1 all the same").click()
        page.locator("#answer", has_text="Proposal 1 is carried out by plan").wait_for()
        other = Placement(START.slot_to_expert, 4, generation=1)
        store.commit(other, expected=0, reason="by hand")

        folded = page.locator("#expired .entry", has_text="Proposal 2:").locator(".tag.expired")
        folded.wait_for(state="attached")
        assert not folded.is_visible()
        page.locator("#expired summary", has_text="that expired").first.click()
        folded.wait_for()


def test_movement_is_switched_with_the_keyboard_and_weights_move_after_a_second_question(
    page: Any, store: StateStore
) -> None:
    page.get_by_role("button", name="Pause movement").press("Enter")
    page.locator(".switches", has_text="movement off").wait_for()
    assert not store.control().movement

    page.get_by_role("button", name="Resume movement").press("Enter")
    page.locator(".switches", has_text="movement on").wait_for()
    assert store.control().movement

    page.get_by_role("button", name="Rebalance now").click()
    page.get_by_role("button", name="Cancel").click()
    page.locator("#sure").wait_for(state="hidden")
    assert store.claim() is None


def test_selection_focus_and_nodes_survive_updates(page: Any, store: StateStore) -> None:
    page.locator("#anomalies .entry").first.wait_for()
    page.locator("#chart .measured[d]").wait_for(state="attached")
    page.evaluate("""() => {
      getSelection().selectAllChildren(document.querySelector("#anomalies .entry .figures"));
      document.querySelector("#chart svg").focus();
      window.line = document.querySelector("#chart .measured");
      window.entry = document.querySelector("#anomalies .entry");
    }""")
    selected = page.evaluate("getSelection().toString()")
    store.add_event("error", {"where": "here", "message": "seen with a later update"})
    page.locator("#anomalies-count", has_text="seen with a later update").wait_for()

    assert "no-leader" in selected
    assert page.evaluate("getSelection().anchorNode.isConnected")
    assert page.evaluate("document.activeElement === document.querySelector('#chart svg')")
    assert page.evaluate("window.line.isConnected && window.entry.isConnected")

    view(page, "History")
    page.locator("#decisions .entry").wait_for()
    page.evaluate("getSelection().selectAllChildren(document.querySelector('#decisions .entry'))")
    selected = page.evaluate("getSelection().toString()")
    store.add_event("plan", plan_event(reason="a later one"))
    page.locator("#decisions .entry", has_text="a later one").wait_for()

    assert "gain <b>1 %</b>" in selected
    assert page.evaluate("getSelection().toString()") == selected


def test_load_of_the_start_placement_is_told_as_the_same_imbalance(page: Any) -> None:
    page.locator("#chart .measured[d]").wait_for(state="attached")

    page.get_by_text("start placement: imbalance is the same now").wait_for()


def test_range_is_chosen_by_a_button_and_is_the_address(page: Any) -> None:
    page.get_by_role("button", name="24 h").click()
    page.wait_for_url("**#range=86400")
    page.reload()

    pressed = page.locator("#ranges [aria-pressed=true]")
    assert pressed.all_inner_texts() == ["24 h"]
    page.locator("#chart .measured").wait_for(state="attached")


def test_chart_ends_now_and_moves_without_room_for_a_label_leave_the_curve_free(
    page: Any, store: StateStore
) -> None:
    for plan in range(1, 41):
        migration = {"plan_id": plan, "generation": plan + 4}
        store.add_event("publish", PUBLISHED | migration)
        store.add_event("commit", migration | {"reason": "served"})
    page.locator("#chart .mark.MOVE").nth(39).wait_for(state="attached")
    page.evaluate(TWO_DRAWS)

    heights = page.evaluate(
        """[...document.querySelectorAll('#chart .mark.MOVE')].map((mark) =>
            mark.children[1].getAttribute('y2') - mark.children[1].getAttribute('y1'))"""
    )
    last = page.evaluate("+document.querySelector('#chart .last').getAttribute('cx')")
    width = page.evaluate("document.querySelector('#chart').clientWidth")
    # All of it is at one time, where the label of the start is.
    assert (sum(height < 10 for height in heights), len(heights)) == (40, 40)
    assert last > 0.5 * width


def test_last_rebalance_shows_cost_prediction_and_what_it_brought(
    page: Any, store: StateStore
) -> None:
    told = {"trigger": "request", "actor": "task 3", "stage": "propose"}
    figures = {"bytes": 7_000_000, "imbalance_before": 1.6, "imbalance_after": 1.1}
    store.add_event("plan", plan_event("MOVE", "worth it", **figures, **told))
    migration = build_migration(FIRST, SECOND, TOPOLOGY, plan_id=store.next_plan_id())
    store.publish(migration)
    store.commit(SECOND, expected=1, plan_id=migration.plan_id, reason="served")
    store.add_event(
        "promise", {"generation": 2, "promised": 0.5, "given": 0.4, "record": [0.5, 0.4]}
    )
    page.locator("#last", has_text="of \N{MINUS SIGN}0.500 promised").wait_for()

    shown = page.locator("#last").inner_text()
    assert "1.60 → 1.10" in shown
    assert "7.0 MB" in shown
    assert "\N{MINUS SIGN}0.400" in shown
    assert "by task 3" in shown
    assert "propose" in shown
    page.locator("#chart .mark.MOVE title").wait_for(state="attached")
    view(page, "History")
    page.locator("#decisions .entry", has_text="worth it").wait_for()
    entry = page.locator("#decisions .entry", has_text="worth it").inner_text()
    assert "trigger request · by task 3 · stage propose" in entry
    assert "imbalance 1.600 → 1.100 predicted" in entry
    assert "realised \N{MINUS SIGN}0.400 of \N{MINUS SIGN}0.500 promised" in entry


def test_page_shows_why_the_pace_changed_and_how_many_experts_stay_uncovered(
    page: Any, store: StateStore
) -> None:
    store.report(rank_report("a", 0, time=0.0, **{STEP_TIMES: vars(StepTimes())}))
    store.change_live({"step_time_budget": 0.05}, reason="decode must not slow down")
    reason = "plan 1 made the p95 of step time +20.0%, expected +5.0% at most: part 1 -> 0.5"
    store.add_event("pace", vars(PaceChange(1, 0.2, 0.05, 1.0, 0.5, reason)))
    asked = {"min_domains": 2, "num_uncovered": 3, "uncovered": [[0, 0], [0, 1], [0, 2]]}
    store.add_event("plan", plan_event(asked=asked))

    page.locator("#pace", has_text=f"0.5 of the deployment's own; {reason}, ").wait_for()
    view(page, "History")
    event = page.locator("#events .entry", has_text="The next migration has").inner_text()
    assert f"0.5 of the deployment's pace: {reason}." in event
    entry = page.locator("#decisions .entry", has_text="even")
    entry.locator("text=3 experts in fewer failure domains than asked for").wait_for()


def test_many_ranks_are_a_picture_that_fits_and_names_the_cell_under_the_pointer(
    page: Any, store: StateStore
) -> None:
    topology = Topology.uniform(num_nodes=40, ranks_per_node=8, slots_per_rank=1)
    model = ModelShape((3, 4), num_experts=320, top_k=1, hidden=2, intermediate=2)
    begin_run(store, "b", time.time(), model=model, topology=topology)
    held = Placement(np.array([range(320)] * 2), num_experts=320, generation=1)
    load = [[[1 + rank % 3]] * 2 for rank in range(320)]
    serve(store, 0, load, placement=held, run="b", at=time.time(), topology=topology)
    view(page, "Load")
    page.locator("#ranks").wait_for()
    page.locator("#ranks").hover()
    page.locator("#rank-readout", has_text="mean").wait_for()

    assert page.locator("#heatmap").is_hidden()
    assert page.evaluate("document.querySelector('#ranks').width") == 320
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280
    page.locator("#ranks").focus()
    page.keyboard.press("ArrowRight")
    page.locator("#rank-readout", has_text="layer").wait_for()


def test_anomalies_have_severity_begin_and_what_to_do_and_stay_in_history_when_they_end(
    page: Any, store: StateStore
) -> None:
    silent = page.locator("#anomalies .entry", has_text="silent ranks: 0, 1")
    silent.wait_for()
    assert silent.locator(".tag").inner_text() == "critical"
    assert "restart the rank" in silent.locator(".figures").inner_text()

    report(store)
    silent.wait_for(state="detached")
    view(page, "History")
    page.locator("#ended .entry", has_text="silent ranks: 0, 1").wait_for()


def test_history_has_open_requests_to_cancel_and_who_changed_what(
    page: Any, store: StateStore
) -> None:
    task = store.submit("rebalance", {"reason": "curious", "dry_run": True}).id
    view(page, "History")
    page.get_by_label("Reason").fill("no longer")
    page.get_by_role("button", name=f"Cancel request {task}").click()
    page.locator("#answer", has_text=f"Request {task} is failed").wait_for()
    change = page.locator("#changes .entry", has_text="no longer")
    change.wait_for()

    assert store.claim() is None
    assert "200" in change.locator(".tag").inner_text()
    assert "127.0.0.1" in change.inner_text()
    page.locator("#no-task").wait_for()


def test_rank_is_cordoned_with_a_reason_and_opened_again(page: Any, store: StateStore) -> None:
    report(store)
    view(page, "Ranks")
    rank = page.locator("#rank-table tr[data-key='1']")
    page.get_by_label("Reason").fill("its fan")
    rank.get_by_role("button", name="cordon rank 1", exact=True).click()
    page.get_by_role("button", name="Cordon rank 1", exact=True).last.click()
    page.locator("#answer", has_text="Rank 1 is cordoned").wait_for()
    rank.locator(".tag.cordoned").wait_for()

    assert store.live().effective["cordons"] == "1:cordon"
    assert store.live().changes["cordons"].reason == "its fan"
    assert "1 cordoned" in page.locator("#rank-note").inner_text()
    rank.get_by_role("button", name="uncordon").press("Enter")
    page.locator("#sure-yes").press("Enter")
    rank.get_by_role("button", name="cordon rank 1", exact=True).wait_for()
    assert store.live().effective["cordons"] == ""


def test_view_is_the_address_and_back_leads_to_the_one_before(page: Any) -> None:
    view(page, "Ranks")
    page.wait_for_url("**#view=ranks")
    page.reload()
    page.locator("#rank-table tr").first.wait_for()
    assert page.locator("#views [aria-current=page]").inner_text() == "Ranks"

    view(page, "Load")
    page.go_back()
    page.locator("main[data-view=ranks]").wait_for()
    assert page.locator("#summary").is_hidden()


def test_deployment_is_chosen_and_its_address_keeps_the_view(
    browser: Any, store: StateStore, seen: Any, tmp_path: Path
) -> None:
    assert seen.locator("#deployments").is_hidden()  # where there is one alone
    with opened_page(browser, store, tmp_path, "other") as page:
        view(page, "Load")
        page.locator("#deployments").wait_for()
        page.locator("#deployments option", has_text="other: blind").wait_for(state="attached")
        page.get_by_label("Deployment").select_option("/deployments/other/")
        page.wait_for_url("**/deployments/other/#view=load")

        page.locator("#deployment", has_text="other").wait_for()
        assert page.title() == "blind: other"
        assert page.locator("#deployments").input_value() == "/deployments/other/"
        page.get_by_label("Deployment").select_option("/deployments/d/")
        page.locator("#heatmap td").first.wait_for()


# Text whose contrast with what is behind it is too low, by WCAG 2.2 AA. Colours of any notation
# become pixels of a canvas first.
LOW_CONTRAST = """() => {
  const context = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    context.clearRect(0, 0, 1, 1);
    context.fillStyle = colour;
    context.fillRect(0, 0, 1, 1);
    return [...context.getImageData(0, 0, 1, 1).data];
  };
  const light = (colour) => colour.slice(0, 3)
    .map((value) => value / 255)
    .map((value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4))
    .reduce((sum, value, at) => sum + value * [0.2126, 0.7152, 0.0722][at], 0);
  const behind = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const colour = rgba(getComputedStyle(at).backgroundColor);
      if (colour[3] === 255) return colour;
    }
    return [255, 255, 255, 255];
  };
  const found = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let checked = 0;
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !node.checkVisibility()) continue;
    if (node.closest("button:disabled, .unseen, noscript, script")) continue;
    const style = getComputedStyle(node);
    const own = node.namespaceURI.endsWith("svg") ? style.fill : style.color;
    const [lower, upper] = [light(rgba(own)), light(behind(node))].sort((a, b) => a - b);
    const size = parseFloat(style.fontSize), isBold = style.fontWeight >= 700;
    const least = size >= 24 || (size >= 18.66 && isBold) ? 3 : 4.5;
    const ratio = (upper + 0.05) / (lower + 0.05);
    checked += 1;
    if (ratio < least) found.push(`${ratio.toFixed(2)} ${node.className} ${node.textContent}`);
  }
  return { found, checked };
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_of_every_view_has_the_contrast_of_wcag_aa(
    page: Any, store: StateStore, scheme: str
) -> None:
    page.emulate_media(color_scheme=scheme)
    store.change_live({"cordons": "1:drain"}, reason="its fan")
    store.add_event("publish", PUBLISHED)
    store.add_event("error", {"where": "here", "message": "none"})
    for kind in ("commit", "abort", "reject"):
        store.add_event(kind, {"reason": "none", "plan_id": 1, "generation": 1})
    for decision in ("MOVE", "RESPLIT"):
        store.add_event("plan", plan_event(decision, "worth it"))
    page.locator("#anomalies .entry").first.wait_for()
    for name in VIEWS:
        view(page, name)
        waited = {"Load": "#heatmap td", "Ranks": "#rank-table tr", "History": "#events .tag.error"}
        page.locator(waited.get(name, "#chart .mark")).first.wait_for(state="attached")
        text = page.evaluate(LOW_CONTRAST)

        assert text["checked"] > 20
        assert text["found"] == []
    for grade in ("serving", "degraded", "stopped", "blind"):
        page.evaluate(f"document.querySelector('#verdict').className = 'verdict {grade}'")
        assert page.evaluate(LOW_CONTRAST)["found"] == []


def test_everything_that_acts_is_reached_by_tab_and_shows_its_focus(page: Any) -> None:
    page.locator("#chart .measured[d]").wait_for(state="attached")
    for name in VIEWS:
        view(page, name)
        page.evaluate(TWO_DRAWS)  # by then the view has what it asks for
        page.evaluate("document.activeElement.blur()")
        # Elements, not their positions: a tick of the chart's time that comes or goes shifts those.
        page.evaluate("reached = new Set()")
        for _ in range(2 * page.evaluate(f"{ACTING}.length")):  # the body comes before the first
            page.keyboard.press("Tab")
            is_body, outline = page.evaluate(
                "reached.add(document.activeElement);"
                "[document.activeElement === document.body,"
                " getComputedStyle(document.activeElement).outlineStyle]"
            )
            assert is_body or outline != "none"

        differing = page.evaluate(
            f"[...new Set({ACTING}).symmetricDifference(reached)]"
            ".filter((one) => one.isConnected && one !== document.body).map((one) => one.outerHTML)"
        )
        assert differing == []


def test_page_has_landmarks_and_headings_in_order(seen: Any) -> None:
    for role in ("banner", "navigation", "main"):
        assert seen.get_by_role(role).count() == 1
    for name in VIEWS:
        view(seen, name)
        levels = seen.evaluate(
            "[...document.querySelectorAll('h1, h2, h3')].filter((one) => one.checkVisibility())"
            ".map((one) => Number(one.tagName[1]))"
        )
        assert levels[0] == 1
        assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
        unnamed = "section:not([aria-label]):not([aria-labelledby])"
        assert seen.locator(unnamed).count() == 0


def test_nothing_is_animated_and_every_module_is_preloaded(seen: Any) -> None:
    view(seen, "Overview")
    seen.locator("#chart .measured[d]").wait_for(state="attached")
    preloaded = seen.locator("link[rel=modulepreload]").evaluate_all("all => all.map(a => a.href)")

    assert seen.evaluate("document.getAnimations().length") == 0
    assert seen.evaluate(
        "[...document.querySelectorAll('*')].map((one) => getComputedStyle(one)).every((style) =>"
        " style.transitionDuration === '0s' && style.animationName === 'none')"
    )
    names = {Path(one).name for one in preloaded} | {"app.js"}
    assert names == {path.name for path in STATIC.glob("*.js")}


def test_every_kind_of_anomaly_has_an_advice(seen: Any) -> None:
    known = seen.evaluate("import('/static/anomalies.js').then((it) => Object.keys(it.ADVICE))")

    assert sorted(known) == sorted([*get_args(FindingKind), *get_args(EventAnomaly)])
