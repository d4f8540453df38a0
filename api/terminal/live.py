"""Live output of a process: a picture on a terminal, plain lines elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal

from rich.console import Console
from rich.live import Live

from api.monitor.monitor import Monitor
from api.monitor.scores import heat_of
from api.monitor.state import Grade, WindowScore
from api.terminal.picture import Look, render
from api.terminal.printable import printable
from eplb.errors import EplbError, counted
from telemetry.state.events import Event, Failure, PlanDecision, PlanEnd, Switched

View = Literal["auto", "live", "plain", "off"]
PERIOD_S = 0.5
STOP_TIMEOUT_S = 10.0
KEPT_ANOMALIES = 3  # the picture has room for two


def look_at(monitor: Monitor) -> Look:
    """Read what is new in a store, and give what the admin API answers about it.

    Raises:
        StoreError: the store cannot be read.
    """
    monitor.refresh()
    seen = monitor.reading()
    anomalies, _ = monitor.anomalies.page(None, KEPT_ANOMALIES)
    return Look(seen.state, heat_of(seen), seen.series, seen.marks, seen.events, anomalies)


class LiveView:
    """Show a deployment from a thread of its own; a context manager.

    Its end shows the last state, and raises what the view has raised: that must not end the process
    that is shown. A look that fails after one that did not is shown as the reason of the verdict,
    and the next one is taken.

    Args:
        look: gives what is shown; raises EplbError.
    """

    def __init__(
        self, look: Callable[[], Look], *, view: View = "auto", console: Console | None = None
    ) -> None:
        self._look, self._console = look, console or Console()
        on_terminal: View = "live" if self._console.is_terminal else "plain"
        self._view = on_terminal if view == "auto" else view
        self._ended = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="eplb-view", daemon=True)

    @property
    def is_showing(self) -> bool:
        """Whether it was started, and has not ended or failed."""
        return self._thread.is_alive()

    def __enter__(self) -> LiveView:
        if self._view != "off":
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join(STOP_TIMEOUT_S)
            assert not self._thread.is_alive(), f"the view must end within {STOP_TIMEOUT_S:g} s"
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            if self._view == "live":
                self._run_live()
            else:
                self._run_plain()
        except Exception as exc:
            self._failure = exc

    def _looks(self) -> Iterator[Look]:
        """Give one now, one every period, and one last when the view ends."""
        is_last, seen = False, None
        while not is_last:
            is_last = self._ended.is_set()
            try:
                seen = self._look()
            except EplbError as exc:
                if seen is None:
                    raise
                seen = replace(
                    seen, state=replace(seen.state, verdict=Grade.BLIND, reason=str(exc))
                )
            yield seen
            self._ended.wait(PERIOD_S)

    def _run_live(self) -> None:
        with Live(console=self._console, screen=True, auto_refresh=False) as live:
            for seen in self._looks():
                width, height = self._console.size
                live.update(render(seen, width, height), refresh=True)

    def _run_plain(self) -> None:
        lines = PlainLines()
        for seen in self._looks():
            for line in lines.new(seen):
                self._console.print(printable(line), highlight=False, markup=False, soft_wrap=True)


class PlainLines:
    """One line for each window and event that was not printed before."""

    def __init__(self) -> None:
        self._run: str | None = None
        self._last_window = -1
        self._last_event = 0

    def new(self, seen: Look) -> Iterator[str]:
        """Give the lines that a look adds."""
        state = seen.state
        if state.run != self._run:
            self._run, self._last_window = state.run, -1
            sizes = f"{counted(len(state.ranks), 'rank')}, {counted(state.num_layers, 'layer')}"
            yield (
                f"run {state.run}: {sizes} x {state.num_experts} experts in {state.num_slots} slots"
            )
        for score in seen.windows:
            if score.index > self._last_window:
                self._last_window = score.index
                yield window_line(score)
        for event in seen.events:
            is_of_this_run = state.started is not None and event.time >= state.started
            if is_of_this_run and event.id > self._last_event:
                self._last_event = event.id
                yield from event_lines(event)


def event_lines(event: Event) -> Iterator[str]:
    """Give an event as one line, generation first; one without news gives none."""
    match event.fact:
        case PlanDecision() as plan:
            yield f'generation={plan.generation} decision={plan.decision} reason="{plan.reason}"'
        case PlanEnd() as end:
            generation = f"generation={end.generation}"
            yield f'{generation} {event.kind} plan={end.plan_id} reason="{end.reason}"'
        case Switched() as now:
            yield f'movement={now.movement} observe={now.observe} reason="{now.reason}"'
        case Failure() as failure:
            yield f"{failure.where}: {failure.message}"


def window_line(score: WindowScore) -> str:
    """Give a window as one line."""
    notes = " migrating" * score.is_migrating + " incomplete" * (not score.is_complete)
    figures = "imbalance=none unbalanced=none no tokens"
    if score.measured is not None and score.contiguous is not None:
        figures = f"imbalance={score.measured:.3f} unbalanced={score.contiguous:.3f}"
    return (
        f"generation={score.generation} window={score.index} "
        f"steps={score.first_step}..{score.last_step} {figures}{notes}"
    )
