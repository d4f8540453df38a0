"""What is printed of others' text: escaped on the terminal and in the log, and not without end."""

import io
import json
import logging
import sys
from functools import partial

import pytest
from rich.console import Console

from api.monitor.monitor import Monitor
from api.terminal.live import LiveView, look_at
from api.terminal.logs import (
    MOST,
    PERIOD_S,
    EscapingFormatter,
    JsonFormatter,
    RepeatLimit,
    set_up_logging,
)
from api.terminal.picture import render
from api.terminal.printable import printable
from eplb import ModelShape, Topology
from eplb.migration.serialisation import model_to_dict, topology_to_dict
from telemetry.log_context import set_log_fields
from telemetry.state.runs import RunInfo
from tests.support.plan_events import plan_event
from tests.support.stores import MemoryStore

HOSTILE = "\x1b[2J\x1b]0;owned\x07\x9b31m\rgood\ngeneration=9 decision=MOVE\u202egnp\u2028x\ud800\t"
SHOWN = r"\x1b[2J\x1b]0;owned\x07\x9b31m\rgood\ngeneration=9 decision=MOVE\u202egnp\u2028x\ud800\t"


def test_control_characters_are_escaped_and_other_text_is_kept() -> None:
    assert printable(HOSTILE) == SHOWN
    assert printable("größer als 5 % — 東京 🙂") == "größer als 5 % — 東京 🙂"


@pytest.fixture
def monitor() -> Monitor:
    store = MemoryStore("d")
    model = model_to_dict(ModelShape((0,), num_experts=3, top_k=1, hidden=2, intermediate=2))
    topology = topology_to_dict(Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=2))
    store.begin_run(RunInfo("a", 0.0, model, topology, window_steps=1))
    store.add_event("plan", plan_event("MOVE", HOSTILE))
    store.add_event("error", {"where": HOSTILE, "message": HOSTILE})
    return Monitor(store)


@pytest.mark.parametrize("view", ["plain", "live"])
def test_view_shows_no_control_character_of_a_reason(monitor: Monitor, view: str) -> None:
    shown = io.StringIO()
    console = Console(file=shown, width=200, height=40, force_terminal=False)
    if view == "plain":
        with LiveView(partial(look_at, monitor), view="plain", console=console):
            pass
    else:
        console.print(render(look_at(monitor), 200, 40))

    assert r"\x1b[2J" in shown.getvalue()  # rich itself drops some of the others
    unsafe = [one for one in shown.getvalue() if one != "\n" and printable(one) != one]
    assert unsafe == []
    assert not any(line.startswith("generation=9") for line in shown.getvalue().splitlines())


def test_log_record_is_one_line_and_its_traceback_is_indented() -> None:
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        record = logging.LogRecord("x", 30, "f", 1, "%s", (HOSTILE,), sys.exc_info())

    first, *others = EscapingFormatter("%(name)s: %(message)s").format(record).splitlines()

    assert first == f"x: {SHOWN}"
    assert all(line.startswith("    ") for line in others)


def test_json_log_record_is_one_line_with_the_fields_of_its_thread() -> None:
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        record = logging.LogRecord("x", 30, "f", 1, "%s", (HOSTILE,), sys.exc_info())
    set_log_fields(task=7, generation=3)
    text = JsonFormatter().format(record)
    set_log_fields(task=None, generation=None)

    assert printable(text) == text
    line = json.loads(text)
    assert (line["message"], line["level"], line["logger"]) == (HOSTILE, "warning", "x")
    assert (line["task"], line["generation"]) == (7, 3)
    assert line["exception"].startswith("Traceback")
    assert "task" not in json.loads(JsonFormatter().format(record))


def test_record_after_the_error_stream_was_replaced_is_on_the_new_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root, handlers = logging.getLogger(), logging.getLogger().handlers[:]
    first, second = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", first)
    set_up_logging()
    first.close()
    monkeypatch.setattr(sys, "stderr", second)
    try:
        logging.getLogger("x").warning("of a thread that outlived the first")
    finally:
        root.handlers[:] = handlers

    assert second.getvalue() == "x: of a thread that outlived the first\n"


def test_message_that_repeats_is_dropped_and_counted() -> None:
    now = [0.0]
    limit = RepeatLimit(lambda: now[0])

    def passes(line: int) -> str | None:
        record = logging.LogRecord("x", 30, "f", line, "lost %s", ("it",), None)
        return record.getMessage() if limit.filter(record) else None

    assert [passes(1) for _ in range(MOST + 3)] == ["lost it"] * MOST + [None] * 3
    assert passes(2) == "lost it"
    now[0] = PERIOD_S
    assert passes(1) == "lost it (3 more in 60 s)"
    assert passes(1) == "lost it"
