"""The command line: what it offers, and one sentence for each thing that it refuses."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from api.access.audit import Audit, local_actor
from api.cli.main import app
from api.processes.commands import own_command
from eplb.errors import StoreError
from telemetry import open_store
from telemetry.state.live import Control
from telemetry.state.runs import RunInfo
from telemetry.state.store import StateStore
from tests.support.rank_reports import rank_report
from tests.support.redis_servers import RedisProcess
from tests.support.repository import ROOT

EPLB = Path(sys.executable).with_name("eplb")
WIDE = {"COLUMNS": "200", "TERM": "dumb"}  # so that no word of the help is cut
RUN = RunInfo("a", 0.0, {}, {}, window_steps=4)


def run(*words: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, list(words), env=WIDE)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.output
    return done.exit_code, done.stdout, done.stderr


@pytest.mark.system
def test_installed_command_lists_what_it_can_do() -> None:
    done = subprocess.run([EPLB, "--help"], capture_output=True, text=True, check=True)

    for command in ("demo", "simulate", "pause", "resume"):
        assert f" {command} " in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["dance"], "'dance'"),
        (["demo", "--rank", "8"], "--rank"),
        (["demo", "--ranks", "many"], "integer"),
        (["simulate"], "argument"),
    ],
)
def test_unknown_commands_and_flags_are_refused(words: list[str], found: str) -> None:
    status, _, errors = run(*words)

    assert status == 2
    assert found in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["demo", "--ranks", "7"], "ranks is 7"),
        (["demo", "--setting", "hidden"], "NAME=VALUE"),
        (["demo", "--config", "/nowhere.toml"], "/nowhere.toml"),
        (["simulate", "/nowhere.npz"], "/nowhere.npz does not exist"),
        (["pause", "--store", "/nowhere.sqlite"], "no store at /nowhere.sqlite"),
    ],
)
def test_refusal_is_one_sentence_on_the_error_stream(words: list[str], named: str) -> None:
    status, output, errors = run(*words)

    assert (status, output) == (2, "")
    assert errors.startswith("eplb: ")
    assert named in errors
    assert errors.count("\n") == 1


@pytest.mark.parametrize("words", [["config"], ["journal", "--help"], ["observability", "x"]])
def test_output_that_a_full_device_refuses_is_one_line_and_status_2(
    words: list[str], tmp_path: Path
) -> None:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    with Path("/dev/full").open("wb") as full:
        command = own_command(*words)
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environ
        )

    refusal = "eplb: the output cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (2, refusal)


# -- pause and resume


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.sqlite"


@pytest.fixture
def store(path: Path) -> Iterator[StateStore]:
    with closing(open_store(path, "demo")) as opened:
        opened.begin_run(RUN)
        yield opened


# Of ranks that do not report, and of one that does, however busy the machine is.
IN_VAIN, WAITING = ["--wait", "0.001"], ["--wait", "5"]


@contextmanager
def reporting(store: StateStore) -> Iterator[None]:
    """A rank that reports, as often as ranks do."""
    is_over = threading.Event()

    def report() -> None:
        step = 0
        while not is_over.wait(0.02):
            step += 1
            store.report(rank_report(RUN.run, 0, time=float(step), step=step))

    thread = threading.Thread(target=report)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def test_pause_of_ranks_that_report_no_more_writes_the_switch_and_fails(
    store: StateStore, path: Path
) -> None:
    store.report(rank_report(RUN.run, 0))

    status, output, errors = run("pause", "--store", str(path), *IN_VAIN)

    assert status == 1
    assert "movement off (was on); 0 ranks of run" in output
    assert "no rank reports" in errors
    assert not store.control().movement


def test_pause_for_a_time_prints_and_stores_its_end(store: StateStore, path: Path) -> None:
    _, output, _ = run("pause", "--store", str(path), "--for", "2h", *IN_VAIN)

    state = store.live()
    assert state.until == {"movement": state.changes["movement"].time + 7200}
    end = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(state.until["movement"]))
    assert f"movement off until {end} (was on)" in output


@pytest.mark.parametrize("lasts", ["2", "0s", "-1h", "2 h", "8d", "forever"])
def test_pause_for_an_impossible_time_is_refused(store: StateStore, path: Path, lasts: str) -> None:
    status, _, errors = run("pause", "--store", str(path), "--for", lasts)

    assert status == 2
    assert f"--for is {lasts!r}" in errors
    assert store.control().movement


@pytest.mark.parametrize("ends", [["-wal", "-shm"], ["-wal"], ["-shm"]])
def test_pause_after_the_log_was_removed_is_refused_or_reports_no_rank(
    store: StateStore, path: Path, ends: list[str]
) -> None:
    store.report(rank_report(RUN.run, 0))
    for end in ends:
        path.with_name(path.name + end).unlink()

    status, _, errors = run("pause", "--store", str(path), *IN_VAIN)

    assert status in (1, 2)
    assert errors.startswith("eplb: ")
    for use in (store.control, lambda: store.add_event("note", {})):
        with pytest.raises(StoreError, match=r"-(wal|shm)"):
            use()


def test_pausing_and_resuming_turn_the_kill_switch_and_nothing_else(
    store: StateStore, path: Path
) -> None:
    store.set_control(Control(movement=True, observe=True), reason="a test")

    with reporting(store):
        status, output, _ = run("pause", "--store", str(path), "--reason", "too hot", *WAITING)
    said = f"demo: movement off (was on); 1 rank of run {RUN.run} reported since\n"
    assert (status, output) == (0, said)
    asked, done = Audit(path.parent).entries()
    assert (asked.action, asked.reason) == ("POST /api/v1/pause", "too hot")
    assert (asked.actor, done.outcome) == (local_actor(), "200")
    assert store.control() == Control(movement=False, observe=True)
    assert store.events()[-1].detail["reason"] == "too hot"

    with reporting(store):
        assert run("resume", "--store", str(path), *WAITING)[0] == 0
    assert store.control() == Control(movement=True, observe=True)


def test_deployment_that_never_ran_cannot_be_paused(store: StateStore, path: Path) -> None:
    status, _, errors = run("pause", "--store", str(path), "--deployment", "dmeo")

    assert status == 2
    assert "'dmeo' has no run" in errors
    assert store.control() == Control()


def test_pause_finds_the_deployment_of_the_configuration(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "eplb.toml"
    file.write_text(f'[deployment]\nname = "west"\nstore = "{path}"\n')
    monkeypatch.setenv("EPLB_CONFIG", str(file))
    with closing(open_store(path, "west")) as opened:
        opened.begin_run(RUN)

        status, shown, _ = run("pause", *IN_VAIN)

        assert status == 1  # written, and no rank reports
        assert shown.startswith("west: movement off (was on)")
        assert opened.control() == Control(movement=False)


# -- stores


def test_store_on_a_server_is_paused_and_purged_by_its_url(
    redis_server: RedisProcess, tmp_path: Path
) -> None:
    url = f"{redis_server.url}?prefix={tmp_path.name}"
    with closing(open_store(url, "demo")) as store:
        store.begin_run(RUN)

        with reporting(store):
            assert run("pause", "--store", url, *WAITING)[0] == 0
        assert store.control() == Control(movement=False)
        status, output, _ = run("store", "purge", "--store", url, "--before", "1h")
        assert (status, output.startswith("demo: removed 0 samples")) == (0, True)


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["pause"], "redis://ops@127.0.0.1:1/0"),
        (["store", "purge", "--before", "1h"], "redis://ops@127.0.0.1:1/0"),
        (["store", "purge", "--before", "1h", "--shrink"], "--shrink needs the file"),
        (["store", "backup", "copy"], "'redis://ops@127"),
        (["demo", "--port", "0", "--state-dir", "{folder}"], "redis://ops@127.0.0.1:1/0"),
    ],
)
def test_unusable_server_is_reported_without_its_password(
    words: list[str], found: str, tmp_path: Path
) -> None:
    url = "redis://ops:open-sesame@127.0.0.1:1?deadline_s=0.1"
    words = [word.format(folder=tmp_path) for word in words]

    status, output, errors = run(*words, "--store", url)

    assert status == 2
    assert found in errors
    assert errors.count("\n") == 1
    assert "open-sesame" not in output + errors


def test_store_of_another_program_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no database at all\n" * 100)

    status, _, errors = run("pause", "--store", str(tmp_path / "notes.txt"))

    assert status == 2
    assert "notes.txt" in errors
    assert errors.count("\n") == 1


# -- what a command does not need


@pytest.mark.system
def test_wrong_settings_are_refused_before_torch_is_loaded() -> None:
    script = (
        "import sys\nfrom api.cli.main import app\n"
        "try:\n    app(['demo', '--ranks', '7'])\n"
        "except SystemExit as end:\n    print(end.code, 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)

    assert done.stdout == "2 False\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="refuses a host without GPUs")
def test_demo_on_gpus_that_are_not_there_is_refused_before_anything_starts(tmp_path: Path) -> None:
    status, output, errors = run("demo", "--device", "cuda", "--state-dir", str(tmp_path / "state"))

    assert (status, output) == (2, "")
    assert "found 0 GPUs for 4 ranks" in errors
    assert errors.count("\n") == 1
    assert not (tmp_path / "state").exists()
