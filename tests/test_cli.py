"""The command line: what it offers, and one sentence for each thing that it refuses."""

import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from api.cli import app
from telemetry import open_store
from telemetry.store import Control, RunInfo

EPLB = Path(sys.executable).with_name("eplb")
DEADLINE_S = 60.0
WIDE = {"COLUMNS": "200", "TERM": "dumb"}  # so that no word of the help is cut
RUN = RunInfo("a", 0.0, {}, {}, window_steps=4)


def run(*words: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, list(words), env=WIDE)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.output
    return done.exit_code, done.stdout, done.stderr


def test_the_installed_command_lists_what_it_can_do() -> None:
    done = subprocess.run(
        [EPLB, "--help"], capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )

    for command in ("demo", "simulate", "pause", "resume"):
        assert f" {command} " in done.stdout
    assert done.stderr == ""


def test_the_help_of_the_demo_names_its_flags() -> None:
    status, help_text, _ = run("demo", "--help")

    assert status == 0
    for flag in ("--ranks", "--text", "--trace", "--observe", "--serve", "--resume", "--json"):
        assert flag in help_text


def test_no_command_at_all_is_answered_with_the_help() -> None:
    _, shown, more = run()

    assert "Usage" in shown + more


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["dance"], "No such command 'dance'"),
        (["demo", "--rank", "8"], "No such option: --rank"),
        (["demo", "--ranks", "many"], "valid integer"),
        (["simulate"], "Missing argument"),
    ],
)
def test_words_that_nobody_knows_are_refused(words: list[str], found: str) -> None:
    status, _, errors = run(*words)

    assert status == 2
    assert found in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["demo", "--ranks", "7"],
            "ranks is 7 in flag --ranks, expected a multiple of 2, the number of nodes",
        ),
        (
            ["demo", "--setting", "hidden"],
            "hidden is '' in --setting hidden, expected a whole number",
        ),
        (
            ["demo", "--config", "/nowhere.toml"],
            "settings file /nowhere.toml cannot be read: No such file or directory",
        ),
        (
            ["simulate", "/nowhere.npz"],
            "trace /nowhere.npz does not exist, expected an .npz file",
        ),
        (
            ["pause", "--store", "/nowhere.sqlite"],
            "there is no store at /nowhere.sqlite, expected the file of a deployment",
        ),
    ],
)
def test_a_refusal_is_one_sentence_on_the_error_stream(words: list[str], sentence: str) -> None:
    status, output, errors = run(*words)

    assert (status, output) == (2, "")
    assert errors.splitlines() == [f"eplb: {sentence}"]


def test_pausing_and_resuming_turn_the_kill_switch_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    with closing(open_store(path, "demo")) as store:
        store.begin_run(RUN)
        store.set_control(Control(movement=True, observe=True), reason="a test")

        assert run("pause", "--store", str(path), "--reason", "too hot")[0] == 0
        assert store.control() == Control(movement=False, observe=True)
        assert store.events()[-1].detail["reason"] == "too hot"

        assert run("resume", "--store", str(path))[0] == 0
        assert store.control() == Control(movement=True, observe=True)


def test_a_deployment_that_never_ran_cannot_be_paused(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    with closing(open_store(path, "demo")) as store:
        store.begin_run(RUN)

        status, _, errors = run("pause", "--store", str(path), "--deployment", "dmeo")

        assert (status, errors) == (
            2,
            f"eplb: deployment 'dmeo' has no run in {path}, expected one\n",
        )
        assert store.control() == Control()


def test_a_store_of_another_program_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no database at all\n" * 100)

    status, _, errors = run("pause", "--store", str(tmp_path / "notes.txt"))

    assert status == 2
    assert "notes.txt is damaged or no store at all" in errors
    assert errors.count("\n") == 1


def test_wrong_settings_are_refused_before_torch_is_loaded() -> None:
    script = (
        "import sys\nfrom api.cli import app\n"
        "try:\n    app(['demo', '--ranks', '7'])\n"
        "except SystemExit as end:\n    print(end.code, 'torch' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=DEADLINE_S
    )

    assert done.stdout == "2 False\n"
