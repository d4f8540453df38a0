"""Options of all commands: one spelling and one meaning for each."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from api.cli.config import named_settings
from api.cli.main import app
from api.cli.simulator.options import replayed
from api.operations.watching import show_events
from api.terminal.printing import listing, numbers, time_of
from api.terminal.progress import progress
from eplb.core.load import as_history
from eplb.errors import ConfigError
from simulations.windows import of_history
from tests.support.documents import commands
from tests.support.plan_events import plan_event

COMMANDS = {name.removeprefix("eplb "): command for name, command in commands().items()}
NO_JSON = {
    "serve": "runs until a signal",
    "controller": "runs until a signal",
    "host-cache": "runs until a signal",
    "launch": "runs until the ranks end",
    "compile": "runs until the kernels are compiled",
    "top": "shows a picture; status answers programs",
    "config": "prints TOML",
    "observability": "prints files for Prometheus and Grafana",
    "support-bundle": "writes an archive",
    "store backup": "writes a copy of a store",
    "store purge": "removes records",
    "keys add": "prints the key alone",
    "keys remove": "removes a key",
}


def options_of(name: str) -> dict[str, Any]:
    return {spelled: one for one in COMMANDS[name].params for spelled in one.opts}


@pytest.mark.parametrize("text", ["1_0,2", "1,,2", "0x1", "2.0", ""])
def test_numbers_that_are_not_decimal_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--ranks is"):
        numbers("--ranks", text)


def test_setting_that_is_given_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"planner\.pay_back_s is given twice, as '3' and '4'"):
        named_settings(["planner.pay-back-s=3", "planner.pay_back_s=4"])


def test_commands_without_json_are_those_without_an_answer() -> None:
    assert {name for name in COMMANDS if "--json" not in options_of(name)} == set(NO_JSON)


@pytest.mark.parametrize("name", COMMANDS)
def test_options_of_a_command_have_the_spelling_and_meaning_of_all_others(name: str) -> None:
    options = options_of(name)

    if "--json" in options:
        assert options["--json"].is_flag
        assert options["--json"].help == "Print JSON."
    assert not {"--out", "--png", "--file"} & options.keys(), "a file or folder is --output, -o"
    assert ("-o" in options) == ("--output" in options)
    if "--redundant" in options:
        assert options["--redundant"].help == "Redundant experts of a layer."
    if "--redundant-per-rank" in options:
        assert options["--redundant-per-rank"].help.startswith("Redundant slots of each rank")


def test_time_of_day_is_that_of_today() -> None:
    midnight = time.time() // 86_400 * 86_400

    assert time_of("--since", "00:00") in (midnight, midnight + 86_400)  # it may be midnight
    assert time_of("--since", "00:00:00") % 86_400 == 0


def test_decision_is_printed_in_words() -> None:
    figures = {"imbalance_before": 1.15, "imbalance_after": 1.01, "moves": 188, "cost_s": 0.1}
    detail = vars(plan_event("MOVE", "rank 7 is drained", window=3, **figures))
    event = {"id": 7, "time": 0.0, "kind": "plan", "detail": detail}
    with redirect_stdout(StringIO()) as shown:
        show_events({"events": [event], "next": None})

    line = shown.getvalue().splitlines()[1]
    assert line.endswith("plan  MOVE 1.150 -> 1.010, 188 moves in 100 ms: rank 7 is drained")


LOAD = "generated:gamma:layers=2,experts=8,windows=4"


def run(*words: object) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    return done.stdout


def rows_of_load() -> Iterator[str]:
    yield f"layer,{','.join(map(str, range(8)))}"
    for layer in (3, 4):
        yield f"{layer},800{',100' * 7}"


@pytest.fixture
def load(tmp_path: Path) -> Path:
    path = tmp_path / "load.csv"
    path.write_text("\n".join(rows_of_load()))
    return path


def test_json_of_reports_is_alone_on_the_standard_output_and_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "report.json"

    printed = run("simulate", LOAD, "--ranks", 4, "--policy", "none", "--json", "-o", file)

    assert json.loads(printed) == json.loads(file.read_text())
    assert json.loads(printed)["policies"].keys() == {"none"}
    shown = run("simulate", LOAD, "--ranks", 4, "--policy", "none", "-o", file)
    assert "2 layers x 8 experts" in shown


def test_plan_and_validate_answer_programs(load: Path, tmp_path: Path) -> None:
    out = tmp_path / "placement.json"
    group = ("--ranks", 4, "--redundant", 4, "--target", "vllm", "--json")

    planned = json.loads(run("plan", load, *group, "-o", out))
    checked = json.loads(run("validate", out, *group, "--layer-ids", "3,4"))

    assert (
        planned["imbalance"]["after"]["under even"] < planned["imbalance"]["before"]["under even"]
    )
    assert (planned["layers"], planned["slots"], planned["file"]) == ([3, 4], 12, str(out))
    assert checked["is_accepted"]
    assert (checked["layers"], checked["slots"]) == ([3, 4], 12)


def test_one_judged_window_has_no_percentiles_and_singular_nouns() -> None:
    one = "generated:gamma:layers=1,experts=8,windows=2"

    found = json.loads(run("simulate", one, "--ranks", 4, "--json"))
    shown = run("simulate", one, "--ranks", 4)

    assert found["policies"]["auto"]["imbalance_p95"] is None
    assert "1 judged: no p95 or p99" in shown
    assert "1 layer x 8 experts" in shown
    assert "1 node;" in shown


def test_lines_of_a_pipe_have_no_blanks_at_their_end(capsys: pytest.CaptureFixture[str]) -> None:
    listing([{"id": 1, "text": "a"}, {"id": 2, "text": "b" * 300}], "id text", none="none")

    assert capsys.readouterr().out.splitlines() == ["id  text", " 1  a", f" 2  {'b' * 300}"]


def test_pipe_gets_no_bar(capfd: pytest.CaptureFixture[str]) -> None:
    with progress("windows", 2) as advance:
        advance(1)

    assert capfd.readouterr() == ("", "")


def test_bar_is_on_the_error_stream_of_a_terminal(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # which consoles take for a terminal

    with progress("windows", 2) as advance:
        advance(2)
        print("result", file=sys.stdout, flush=True)

    out, errors = capfd.readouterr()
    assert out == "result\n"
    assert "2/2" in errors
    with progress("windows", 2, is_shown=False):
        pass
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "option", [["--ranks", "0"], ["--nodes", "0"], ["--slots", "0"], ["--every", "0"]]
)
def test_simulation_of_nothing_is_refused(option: list[str]) -> None:
    told = CliRunner().invoke(app, ["simulate", "generated:zipf:windows=2,layers=1", *option])

    assert told.exit_code == 2
    assert "greater than or equal to 1" in told.output


def test_simulation_that_would_take_days_is_refused_before_it_begins() -> None:
    load = "generated:zipf:windows=1000000,layers=61,experts=256"
    told = CliRunner().invoke(app, ["simulate", load, "--ranks", "8"], catch_exceptions=True)

    assert told.exit_code == 2
    assert "1,000,000 windows of 61 layers x 256 experts, expected at most 10,000,000,000" in (
        told.output
    )


def test_long_replay_says_once_what_all_of_it_will_take(capfd: pytest.CaptureFixture[str]) -> None:
    load = of_history(as_history(np.ones((3, 1, 4), dtype=np.int64)))
    with replayed(load, 2, is_shown=False, estimated_after_s=0.0) as windows:
        assert len([*windows, *windows]) == 6

    told = capfd.readouterr().err.splitlines()
    assert [line for line in told if "in all" in line] == [told[1]]
    assert re.fullmatch(r"1 of 6 windows after 0 s: about .* in all", told[1])
