"""Runs shadow mode: polls a source, compares, and reports; once, or until it is stopped."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from api.shadow.recorder import EngineRecorder
from eplb.errors import ConfigError
from simulations.report import write_json
from simulations.shadow.comparison import Comparison
from simulations.shadow.report import Prices, report
from simulations.shadow.sources import WindowSource

# Between two checks for a stop while waiting for the next poll. No event: a signal handler that
# sets one can deadlock with the wait that it interrupts.
LOOK_EVERY_S = 0.2


@dataclass(frozen=True)
class Watch:
    """How a source is watched."""

    poll_s: float = 10.0
    most_s: float | None = None  # None: until interrupted
    recorder: EngineRecorder | None = None
    record_every_s: float = 60.0
    # Asked between polls: an exception amid a window would leave it judged on one side alone.
    is_stopped: Callable[[], bool] = lambda: False


def run(
    source: WindowSource,
    comparison: Comparison,
    prices: Prices,
    *,
    watch: Watch | None = None,
    json_file: Path | None = None,
    said: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Compare all that the source gives, and return the report.

    Args:
        watch: None: read what there is, once.
        json_file: written after each poll with new windows, and at the end.
        said: gets a line after each poll with new windows, while watching.
    """

    def taken(*, is_last: bool) -> dict[str, Any] | None:
        before = comparison.num_windows
        for window in source.poll(is_last=is_last):
            comparison.add(window)
        if comparison.num_windows == before and not is_last:
            return None
        found = report(comparison, prices, source.notes)
        if json_file is not None:
            write_json(json_file, found)
        return found

    with closing(source):
        if watch is not None:
            _watch(watch, lambda: taken(is_last=False), source, said)
        found = taken(is_last=True)
    assert found is not None, "the last poll reports"
    return found


def _watch(
    watch: Watch,
    poll: Callable[[], dict[str, Any] | None],
    source: WindowSource,
    said: Callable[[str], None],
) -> None:
    """Poll until the time is over or the user stops it; both end with a report."""
    begun = asked = time.monotonic()
    end = float("inf") if watch.most_s is None else begun + watch.most_s
    if watch.recorder is not None:
        watch.recorder.start()
    try:
        while not watch.is_stopped() and time.monotonic() < end:
            if watch.recorder is not None and time.monotonic() - asked >= watch.record_every_s:
                asked = time.monotonic()
                _ask(watch.recorder.dump, source)
            if (found := poll()) is not None:
                said(_line(found))
            due = min(time.monotonic() + watch.poll_s, end)
            while not watch.is_stopped() and (left := due - time.monotonic()) > 0:
                time.sleep(min(left, LOOK_EVERY_S))
    finally:
        if watch.recorder is not None:
            _ask(watch.recorder.dump, source)
            _ask(watch.recorder.stop, source)
    if watch.is_stopped():
        said("stopped: what is left is read, and reported")


def _ask(call: Callable[[], None], source: WindowSource) -> None:
    """Ask the engine; one that does not answer is noted, and asked again later."""
    try:
        call()
    except ConfigError as exc:
        source.notes[f"the engine was not asked: {exc}"] = None


def _line(found: dict[str, Any]) -> str:
    if "engine" not in found or found["engine"]["imbalance_mean"] is None:
        return f"{found['windows']['used']} windows"
    ours = found["ours"][0]
    return (
        f"{found['windows']['judged']} windows judged: imbalance of the engine "
        f"{found['engine']['imbalance_mean']:.3f}, ours {ours['imbalance_mean']:.3f}; "
        f"{ours['gain']['imbalance']['sentence']}; last decision {ours['last_decision']}"
    )
