"""How a deployment stands as a picture of characters.

``render`` is pure: answers of the API and a size in, something that rich prints out. Made for
100 x 30, it gives up layers and decisions, the last ones first, down to 80 x 24.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from textwrap import wrap

from rich.console import Group, RenderableType
from rich.text import Text

from api.monitor.anomalies import Anomaly, Severity
from api.monitor.state import (
    ABSENT,
    JOINING,
    RETIRED,
    Grade,
    Heat,
    RebalanceMark,
    State,
    WindowScore,
)
from api.terminal.printable import printable
from eplb.errors import counted
from telemetry.state.events import Event

PLOT_ROWS = 6
EIGHTHS = " ▁▂▃▄▅▆▇█"
ACCENT, QUIET, GOOD, BAD = "cyan", "bright_black", "green", "bold red"
MARK = "rgb(220,120,70)"
HEAT: tuple[tuple[float, str], ...] = (  # up to this ratio of the mean, this colour
    (0.75, "color(25)"),
    (0.90, "color(24)"),
    (0.96, "color(23)"),
    (1.04, "color(236)"),
    (1.10, "color(94)"),
    (1.25, "color(130)"),
    (1.50, "color(166)"),
    (float("inf"), "color(160)"),
)
GRADE_STYLE = {
    Grade.SERVING: "bold black on green",
    Grade.DEGRADED: "bold black on yellow",
    Grade.STOPPED: "bold white on red",
    Grade.BLIND: "bold white on magenta",
}
SEVERITY_STYLE: dict[Severity, str] = {
    "critical": BAD,
    "warning": "yellow",
    "notice": QUIET,
}
MOST_ANOMALIES = 2
DECISION_STYLE = {"MOVE": "bold black on cyan", "RESPLIT": "cyan", "KEEP": QUIET}
BYTES_PER_UNIT = 1000.0


@dataclass(frozen=True)
class Look:
    """Answers of the admin API of one moment."""

    state: State
    heat: Heat
    windows: Sequence[WindowScore]  # windows of this run, oldest first
    rebalances: Sequence[RebalanceMark]
    events: Sequence[Event]  # the latest, oldest first
    anomalies: Sequence[Anomaly]  # the latest, newest first


def render(seen: Look, width: int = 100, height: int = 30) -> RenderableType:
    """Draw what was seen, at most ``width`` columns and ``height`` rows."""
    state = seen.state
    head = [*_verdict(state, width), _header(state), _switches(state), *_operation(state)]
    head += _anomalies(seen)
    if state.start.run is None:
        waiting = "No run has begun: waiting for ranks to report."
        below = [f"eplb top --deployment {name}" for name in state.store.groups] or [waiting]
        return Group(*_printable([*head, *(Text(f" {one}", style=QUIET) for one in below)]))
    plot = _plot(seen, width)
    tail = [_migration(state, width), _pace(state), _bytes(state)]
    # Three rows stand between the parts; the heatmap gives way to one decision at least.
    times = _times(state, width)
    used = len(head) + len(times) + len(plot) + len(tail) + 3
    num_decisions = min(4, max(1, height - used - state.start.num_layers - 2))
    heat = _heatmap(seen.heat, state, width, height - used - num_decisions)
    blank = Text()
    parts = [*head, blank, *heat, *times, LEGEND.copy(), *plot, blank, *tail]
    for decision in reversed(state.plans.decisions[-num_decisions:]):
        style = DECISION_STYLE.get(decision.decision, "")
        shown = (f"{decision.decision:^9}", style)
        parts.append(Text.assemble(" ", shown, "  ", decision.reason))
    for part in _printable(parts):
        part.truncate(width, overflow="ellipsis")
    return Group(*parts[:height])


def _printable(parts: list[Text]) -> list[Text]:
    """Escape what others wrote; a style may then end early."""
    for part in parts:
        part.plain = printable(part.plain)
    return parts


def _verdict(state: State, width: int) -> list[Text]:
    """The verdict and its reason, on two rows at most."""
    grade = f" {state.verdict} "
    first, *others = wrap(state.reason, max(20, width - len(grade) - 1)) or [""]
    rows = [Text.assemble((grade, GRADE_STYLE[state.verdict]), f" {first}", no_wrap=True)]
    return rows + [Text(f" {' '.join(others)}", no_wrap=True)] * bool(others)


def _header(state: State) -> Text:
    line = Text.assemble(
        (f" {state.store.deployment} ", "bold black on cyan"),
        "  generation ",
        (str("none" if state.plans.generation is None else state.plans.generation), "bold"),
        "  step ",
        (f"{state.group.step:,}", "bold"),
        "  phase ",
        (state.plans.phase, f"bold {ACCENT}" if state.plans.phase != "idle" else "bold"),
    )
    score = state.load.last_score
    if score is not None and score.measured is not None and score.contiguous is not None:
        line.append("  imbalance ").append(f"{score.measured:.2f}", "bold")
        line.append(f" (unbalanced {score.contiguous:.2f})", QUIET)
    elif score is not None:
        line.append("  no tokens", BAD)
    return line


def _switches(state: State) -> Text:
    ranks = state.group.ranks
    num_alive = sum(view.is_alive for view in ranks)
    line = Text.assemble(
        " movement ",
        ("on", GOOD) if state.orders.movement else ("OFF", BAD),
        "  observe ",
        ("ON", BAD) if state.orders.observe else ("off", QUIET),
        f"  ranks {num_alive} of {sum(one.phase not in (RETIRED, JOINING) for one in ranks)}",
        f"  samples {state.load.samples_stored:,} stored, {state.load.samples_lost} lost",
    )
    ended = [view.rank for view in ranks if view.has_ended]
    if silent := [rank for rank in state.group.silent_ranks if rank not in ended]:
        line.append(f"  silent: {', '.join(map(str, silent))}", BAD)
    if ended:
        line.append(f"  ended: {', '.join(map(str, ended))}", QUIET)
    return line


def _operation(state: State) -> Iterator[Text]:
    """The open operation on the ranks, and what it waits for."""
    ranks = state.group.membership
    if ranks is None or ranks.operation is None or ranks.operation.ended:
        return
    line = Text.assemble(" operation ", (ranks.operation.id, "bold"), "  ", (ranks.phase, ACCENT))
    if ranks.left_s is not None:
        line.append(f"  fails in {in_time(ranks.left_s)}")
    yield line.append(f"  {ranks.waits}")


def _anomalies(seen: Look) -> Iterator[Text]:
    """What is wrong beside the verdict's reason, and what ended last: the latest of both."""
    state = seen.state
    shown = [
        one
        for one in seen.anomalies
        if one.until is not None or not state.reason.startswith(one.text)
    ]
    for one in shown[:MOST_ANOMALIES]:
        style = SEVERITY_STYLE[one.severity]
        since = "now" if one.until is None else f"{in_time(state.store.time - one.until)} ago"
        yield Text.assemble(f" {since:>8} ", (f"{one.severity}", style), f"  {one.text}")


def in_time(seconds: float) -> str:
    """Write a time with the largest unit that keeps it at 1 or more."""
    value, units = max(0.0, seconds), [(60, "s"), (60, "min"), (24, "h")]
    for most, unit in units:
        if value < most:
            return f"{value:.0f} {unit}"
        value /= most
    return f"{value:.0f} d"


def _heatmap(heat: Heat, state: State, width: int, num_rows: int) -> list[Text]:
    """Rows of layers, one cell for each rank; only the first layers where not all fit."""
    num_layers, num_ranks = len(heat.ranks), max((len(row or ()) for row in heat.ranks), default=0)
    if not num_ranks:
        return [Text(" no complete window of load yet", style=QUIET)]
    cell = _columns(width, num_ranks)
    name = "rank {}" if cell == 7 else "{}"
    ranks = "".join(name.format(rank)[-cell:].center(cell) for rank in range(num_ranks))
    lines = [Text(f" {'layer':>6} {ranks}", style=QUIET, no_wrap=True)]
    shown = num_layers if num_layers < num_rows else max(1, num_rows - 2)
    absent = [view.phase in ABSENT for view in state.group.ranks]
    for layer, row in zip(state.start.layer_ids, heat.ranks[:shown], strict=False):
        line = Text(f" {layer:>6} ", style=QUIET, no_wrap=True)
        for number, ratio in enumerate(row or (None,) * num_ranks):
            if ratio is None or absent[number]:
                line.append("-".center(cell) if cell >= 5 else " " * cell, QUIET)
            else:
                label = f"{ratio:.2f}".center(cell) if cell >= 5 else " " * cell
                line.append(label, f"rgb(240,240,240) on {_colour(ratio)}")
        lines.append(line)
    if shown < num_layers:
        lines.append(Text(f"        and {counted(num_layers - shown, 'more layer')}", style=QUIET))
    return lines


def _columns(width: int, num_ranks: int) -> int:
    """Columns of each rank."""
    return max(1, min(7, (width - 9) // num_ranks))


def _times(state: State, width: int) -> list[Text]:
    """Time of a step and wait for others, of each rank or, in narrow columns, of the slowest."""
    steps = [view.step_ms for view in state.group.ranks if view.step_ms is not None]
    if not steps:
        return []
    cell = _columns(width, len(state.group.ranks))
    if cell < 5:
        waits = sorted(
            (one.wait_ms, one.rank) for one in state.group.ranks if one.wait_ms is not None
        )
        least = [f"; rank {rank} waits least: {wait_ms:.1f} ms" for wait_ms, rank in waits[:1]]
        return [Text("".join([f" step {median(steps):.1f} ms", *least]))]
    rows = {
        "step ms": [view.step_ms for view in state.group.ranks],
        "wait ms": [view.wait_ms for view in state.group.ranks],
    }
    lines = []
    for name, figures in rows.items():
        shown = ("-" if ms is None else f"{ms:.{int(ms < 100)}f}" for ms in figures)
        cells = "".join(one.center(cell) for one in shown)
        lines.append(Text.assemble((f"{name} ", QUIET), cells, no_wrap=True))
    return lines


def _colour(ratio: float) -> str:
    """Blue below the mean, orange above it, in steps that a 256-colour terminal has exactly."""
    return next(colour for limit, colour in HEAT if ratio <= limit)


LEGEND = Text.assemble(
    " imbalance, mean over layers: ",
    ("█ measured", ACCENT),
    ("  · unbalanced", "yellow"),
    ("  ▲ rebalance", MARK),
    style=QUIET,
)


def _plot(seen: Look, width: int) -> list[Text]:
    """Columns of measured imbalance, a dot for contiguous, and a mark under each rebalance."""
    scores = [score for score in seen.windows if score.is_complete][-(width - 8) :]
    if not scores:
        return []
    most = max(1.1, *(max(score.measured or 0, score.contiguous or 0) for score in scores))
    columns = max(1, min(4, (width - 8) // len(scores)))  # columns of each window
    rows = [Text(no_wrap=True) for _ in range(PLOT_ROWS)]
    for row, line in enumerate(rows):
        top = most - (most - 1.0) * row / PLOT_ROWS
        label = f"{top:6.2f} " if row % 2 == 0 else " " * 7
        line.append(label, QUIET)
        for score in scores:
            character, style = _plot_cell(score, PLOT_ROWS - 1 - row, most)
            line.append(character * columns, style)
    return [*rows, _mark_row(seen, scores, columns)]


def _plot_cell(score: WindowScore, row: int, most: float) -> tuple[str, str]:
    """One character; ``row`` counts from the bottom, where imbalance is 1."""
    if score.measured is None or score.contiguous is None:
        return " ", QUIET  # no tokens
    scale = PLOT_ROWS * 8 / (most - 1.0)
    filled = round((score.measured - 1.0) * scale) - 8 * row
    contiguous = min(PLOT_ROWS - 1, int((score.contiguous - 1.0) * scale / 8))
    if filled <= 0 and row == contiguous:
        return "·", "yellow"
    if row == 0:
        filled = max(1, filled)  # perfect balance still shows that there was a window
    return EIGHTHS[max(0, min(8, filled))], ACCENT


def _mark_row(seen: Look, scores: list[WindowScore], columns: int) -> Text:
    """The axis; a mark stands under the window in which its generation first served."""
    steps = {mark.step: mark.generation for mark in seen.rebalances if mark.step is not None}
    axis = ["─"] * (columns * len(scores))
    for at, score in enumerate(scores):
        for step, generation in steps.items():
            if score.first_step <= step <= score.last_step:
                label = f"▲{generation}"[: len(axis) - at * columns]
                axis[at * columns : at * columns + len(label)] = label
    line = Text("  1.00 " + "".join(axis), style=QUIET, no_wrap=True)
    line.highlight_regex(r"▲\d*", MARK)
    return line


def _migration(state: State, width: int) -> Text:
    open_one = state.plans.migration
    if open_one is None:
        return Text(" migration  none is open", style=QUIET)
    size = max(10, width - 70)
    full = round(size * open_one.fraction)
    return Text.assemble(
        f" migration  plan {open_one.plan_id}: ",
        (f"{state.plans.phase:<8}", f"bold {ACCENT}"),
        ("━" * full, ACCENT),
        ("━" * (size - full), QUIET),
        f"  {open_one.applied}/{open_one.num_transactions} transactions serve, "
        f"{open_one.staged_part:.0%} staged",
    )


def _pace(state: State) -> Text:
    return Text.assemble(
        " pace  ", (state.plans.pace.text, "" if state.plans.pace.part == 1 else ACCENT)
    )


def _bytes(state: State) -> Text:
    line = Text(f" moved {counted(state.moved.experts_moved, 'expert')}  ")
    for source, count in state.moved.bytes_by_source.items():
        if not count:
            continue
        line.append(f"{source.replace('_', ' ')} ", QUIET).append(f"{in_units(count)}  ")
    return line


def in_units(count: int) -> str:
    """Write a number of bytes with the largest unit that keeps it at 1 or more."""
    value, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while value >= BYTES_PER_UNIT and len(units) > 1:
        value /= BYTES_PER_UNIT
        units.pop(0)
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.1f} {units[0]}"
