"""Live output of a process: a picture on a terminal, plain lines elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from rich.console import Console
from rich.live import Live

from api.config.demo import View
from api.monitor.monitor import Monitor
from api.monitor.snapshot import Snapshot, WindowScore
from api.terminal.picture import render
from api.terminal.printable import printable
from telemetry.state.events import Event

PERIOD_S = 0.5
STOP_TIMEOUT_S = 10.0


class LiveView:
    """Show a monitor from a thread of its own, until it is stopped.

    Use it as a context manager, or call ``start`` and ``stop``. ``stop`` raises an exception of the
    view: it must not end the process that is shown.
    """

    def __init__(
        self, monitor: Monitor, *, view: View = "auto", console: Console | None = None
    ) -> None:
        self._monitor, self._console = monitor, console or Console()
        self._view = chosen_view(view, self._console)
        self._ended = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="eplb-view", daemon=True)

    def __enter__(self) -> LiveView:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Begin to show."""
        if self._view != "off":
            self._thread.start()

    def stop(self) -> None:
        """Show the last state and end."""
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

    def _snapshots(self) -> Iterator[Snapshot]:
        """Give one now, one every period, and one last when the view is stopped."""
        is_last = False
        while not is_last:
            is_last = self._ended.is_set()
            self._monitor.refresh()
            yield self._monitor.snapshot()
            self._ended.wait(PERIOD_S)

    def _run_live(self) -> None:
        with Live(console=self._console, screen=True, auto_refresh=False) as live:
            for snapshot in self._snapshots():
                width, height = self._console.size
                live.update(render(snapshot, width, height), refresh=True)

    def _run_plain(self) -> None:
        lines = PlainLines()
        for snapshot in self._snapshots():
            for line in lines.new(snapshot):
                self._console.print(printable(line), highlight=False, markup=False, soft_wrap=True)


class PlainLines:
    """One line for each window and event that was not printed before."""

    def __init__(self) -> None:
        self._run: str | None = None
        self._last_window = -1
        self._last_event = 0

    def new(self, seen: Snapshot) -> Iterator[str]:
        """Give the lines that a snapshot adds."""
        if seen.run != self._run:
            self._run, self._last_window = seen.run, -1
            yield f"run {seen.run}: {len(seen.ranks)} ranks, {seen.num_layers} layers x " + (
                f"{seen.num_experts} experts in {seen.num_slots} slots"
            )
        for score in seen.series:
            if score.index > self._last_window:
                self._last_window = score.index
                yield window_line(score)
        for event in seen.events:
            is_of_this_run = seen.started is not None and event.time >= seen.started
            if is_of_this_run and event.id > self._last_event:
                self._last_event = event.id
                yield from event_lines(event)


def event_lines(event: Event) -> Iterator[str]:
    """Give an event as one line, generation first; one without news gives none."""
    detail = event.detail
    reason = f'reason="{detail.get("reason", "")}"'
    generation = f"generation={detail.get('generation', '-')}"
    if event.kind == "plan":
        yield f"{generation} decision={detail.get('decision')} {reason}"
    elif event.kind in ("commit", "abort", "reject"):
        yield f"{generation} {event.kind} plan={detail.get('plan_id')} {reason}"
    elif event.kind == "control":
        yield f"movement={detail.get('movement')} observe={detail.get('observe')} {reason}"
    elif event.kind == "error":
        yield f"{detail.get('where')}: {detail.get('message')}"


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


def chosen_view(view: View, console: Console) -> View:
    """Turn auto into live or plain."""
    if view != "auto":
        return view
    return "live" if console.is_terminal else "plain"
