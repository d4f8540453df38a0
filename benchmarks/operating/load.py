"""A store as a deployment leaves it: windows of load, a death, a plan, a migration, events.

    deployment = fill(store, Size(ranks=320), clock)
    deployment.serve_window()   # the next one, at the time of the clock

Everything is drawn with one seed; times end at ``clock.time``.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import httpx
import numpy as np

from api.app import create_app
from api.http.deployments import Others
from api.http.server import HttpService
from eplb import LoadSample, ModelShape, Placement, Plan, Topology, build_migration, plan
from eplb.migration.recovery import NO_PLAN, Recovery
from eplb.migration.serialisation import model_to_dict, topology_to_dict
from rebalance.controller.plans.planning import summary
from rebalance.controller.plans.publishing import Why, drafted
from telemetry.state.events import DECIDED, RECOVERED, Outage, PlanDecision
from telemetry.state.runs import REPORT_EVERY_S, RankState, RunInfo
from telemetry.state.store import StateStore
from tests.support.stores import MemoryStore

RANKS_PER_NODE = 8
SPARE_SLOTS = 32
WINDOW_STEPS = 100
TOKENS = 400.0  # of an expert in a window, in the mean
HOLDER = "gpu7:4242:9f31c2aa-8812345-5be012"
STAGED = 3  # transactions of an open migration
DRIFT = 0.5  # of the logarithm of load, at which a second plan is worth its moves


@dataclass(frozen=True)
class Size:
    """How large the deployment is, how much history it has, and what has happened to it."""

    ranks: int = 32
    layers: int = 58
    experts: int = 256
    windows: int = 120
    window_s: float = 5.0
    events: int = 100
    silent: tuple[int, ...] = ()
    killed: int | None = None  # the rank whose death began the second run; None: a plain restart
    cordons: str = ""  # as the live setting
    has_proposal: bool = False
    is_moving: bool = False  # a second migration is open, half staged
    seed: int = 0


class Now:
    """The clock of a store that is filled: the time that was set, or the present."""

    def __init__(self, now: float) -> None:
        self.time = now
        self.is_present = False

    def __call__(self) -> float:
        """Return the time."""
        return time.time() if self.is_present else self.time


class SeededDeployment:
    """A deployment whose ranks are drawn: two runs, and a rebalance in the second."""

    def __init__(self, store: StateStore, size: Size, clock: Now) -> None:
        self._store, self.size, self._clock = store, size, clock
        self._rng = np.random.default_rng(size.seed)
        slots = -(-(size.experts + SPARE_SLOTS) // size.ranks)
        self.topology = Topology.uniform(
            num_nodes=max(1, size.ranks // RANKS_PER_NODE),
            ranks_per_node=min(size.ranks, RANKS_PER_NODE),
            slots_per_rank=slots,
        )
        layers = tuple(range(3, 3 + size.layers))
        self.model = ModelShape(
            layers, num_experts=size.experts, top_k=8, hidden=7168, intermediate=2048
        )
        self._hot = TOKENS / 2 * self._rng.gamma(2.0, 1.0, (size.layers, size.experts))
        self._run, self._window, self._plan_id = "", 0, 0
        self.placement = self.plan("contiguous").target

    def plan(
        self, policy: str = "auto", current: Placement | None = None, *, drift: float = 0.0
    ) -> Plan:
        """Plan on the load that is drawn, or on one that has drifted from it by so much."""
        shift = self._rng.lognormal(0.0, drift, self._hot.shape) if drift else 1.0
        load = self._rng.poisson(self._hot * shift)
        return plan(load, self.topology, model=self.model, current=current, policy=policy)

    def begin(self, run: str) -> None:
        """Begin a run."""
        self._run = run
        shapes = model_to_dict(self.model), topology_to_dict(self.topology)
        self._store.begin_run(RunInfo(run, self._clock.time, *shapes, WINDOW_STEPS))

    def serve_windows(self, number: int) -> None:
        """Store so many windows, one after the other."""
        for _ in range(number):
            self._clock.time += self.size.window_s
            self.serve_window()

    def serve_window(self) -> None:
        """Store the next window of every rank that is not silent."""
        self._store.append(list(self._samples(self._clock())))
        self._window += 1

    def _samples(self, now: float) -> Iterator[LoadSample]:
        placement = self.placement
        load = self._rng.poisson(self._hot)
        of_slot = np.take_along_axis(load, np.maximum(placement.slot_to_expert, 0), axis=1)
        tokens = np.where(placement.slot_to_expert >= 0, of_slot * placement.slot_share, 0)
        for rank in range(self.size.ranks):
            held = self.topology.slots_on(rank)
            yield LoadSample(
                self._store.deployment,
                self._run,
                rank,
                self._window,
                now,
                WINDOW_STEPS * self._window,
                WINDOW_STEPS * (self._window + 1) - 1,
                "decode",
                placement.generation,
                placement.slot_to_expert[:, held],
                tokens[:, held].astype(np.int64),
            )

    def publish(self, found: Plan) -> None:
        """Store a decision and offer its migration."""
        self._plan_id = self._store.next_plan_id()
        self._store.add_event("plan", summary(found) | {"trigger": "load", "actor": "controller"})
        migration = build_migration(found.base, found.target, self.topology, plan_id=self._plan_id)
        self._store.publish(migration)

    def commit(self, found: Plan) -> None:
        """Have the ranks serve the target of a plan."""
        base, self.placement = found.base.generation, found.target
        why = "every rank swapped"
        self._store.commit(found.target, expected=base, plan_id=self._plan_id, reason=why)
        self._plan_id = 0

    def propose(self) -> None:
        """Store a plan that waits for a decision."""
        found = self.plan(current=self.placement, drift=DRIFT)
        why = Why("controller", "load", found.reason)
        made = drafted(
            found, found.target, self.placement, now=self._clock.time, lasts_s=3600.0, why=why
        )
        self._store.propose(*made)

    def report(self) -> None:
        """Have each rank report, also what it stages; silent ones did so long ago."""
        now = self._clock()
        for rank in range(self.size.ranks):
            detail = {  # silent after three minutes: nobody reports again while the page is open
                REPORT_EVERY_S: 60.0,
                "step_ms": 41.0 + rank % 3,
                "bytes_by_source": {"peer": 44_000_000 * (rank % 4)},
                "experts_moved": rank % 4,
                "swap_pauses_ms": [0.8 + 0.1 * (rank % 7)],
            }
            state = RankState(
                self._run,
                rank,
                now - (400.0 if rank in self.size.silent else 2.0),
                WINDOW_STEPS * self._window,
                self.placement.generation,
                "stage" if self._plan_id else "idle",
                self._plan_id,
                0,
                self._window,
                0,
                prepared=STAGED if self._plan_id else 0,
                detail=detail,
            )
            self._store.report(state)


def fill(store: StateStore, size: Size, clock: Now) -> SeededDeployment:
    """Write a run that ended half-way, and one with a rebalance in its middle."""
    made, now = SeededDeployment(store, size, clock), clock.time
    half, quarter = size.windows // 2, size.windows // 4
    clock.time = now - size.windows * size.window_s
    made.begin("run-1")
    store.commit(made.placement, expected=None, reason="start")
    made.serve_windows(half)
    if size.killed is not None:
        survivors = [rank for rank in range(size.ranks) if rank != size.killed]
        why = f"rank {size.killed} was killed by SIGKILL"
        death = Recovery(1, "run-1", tuple(survivors), 0, NO_PLAN, 0, why, clock.time)
        store.add_event(RECOVERED, death)
        store.add_outage(Outage(clock.time, clock.time + 8.2, 8.2, why))
        clock.time += 8.2
    made.begin("run-2")
    made.serve_windows(quarter)
    found = made.plan(current=made.placement)
    made.publish(found)
    clock.time += 4.2  # of the migration
    made.commit(found)
    clock.time -= 4.2
    made.serve_windows(size.windows - half - quarter)
    gain = found.before - found.after
    promise = {"generation": found.target.generation, "promised": gain, "given": 0.96 * gain}
    clock.time = now - quarter * size.window_s + 4 * size.window_s
    store.add_event("promise", promise | {"record": [gain, 0.96 * gain]})
    _keep(store, size, clock, made, now)
    store.acquire_lease(HOLDER, 3600.0)
    if size.cordons:
        store.change_live({"cordons": size.cordons}, reason="its GPU throttles")
    if size.has_proposal:
        made.propose()
    if size.is_moving:
        made.publish(made.plan(current=made.placement, drift=DRIFT))
    made.report()
    return made


def _keep(store: StateStore, size: Size, clock: Now, made: SeededDeployment, now: float) -> None:
    """Decide so many times to keep the placement, until now."""
    score = made.plan(current=made.placement).before
    between_s = (now - clock.time) / (size.events + 1)
    for number in range(size.events):
        clock.time += between_s
        if number % 20 == 19:  # another kind, which a page lists among all events
            store.add_event("check", {"host": f"gpu{number % 8}"})
            continue
        generation = made.placement.generation
        why = f"gain {0.1 * (number % 9):.1f}% < 1% of the mean rank load"
        kept = PlanDecision(
            decision="KEEP",
            reason=why,
            policy="auto",
            objective="tokens",
            imbalance_before=score,
            imbalance_after=score - 0.002,
            expected_gain=0.002,
            moves=0,
            bytes=0,
            cost_s=0.0,
            generation=generation,
            target_generation=generation + 1,
        )
        store.add_event(DECIDED, kept)
    clock.time = now


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
