"""Bad input, bad disks and dying processes: one clear sentence each, and nothing left behind."""

import os
import resource
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from api.cli.main import app
from telemetry import open_store
from telemetry.store import LoadStore
from telemetry.stores.sqlite.schema import SCHEMA_VERSION
from tests.support.repository import ROOT

TEXT = ("--text", str(ROOT / "LICENSE"), "--text", str(ROOT / "README.md"))
SMALL = ["--ranks", "4", "--layers", "2", "--experts", "8", "--top-k", "2", "--port", "0", *TEXT]
SMALL += ["--setting", "hidden=32", "--setting", "intermediate=32", "--view", "plain"]
FILE_LIMIT = 300_000  # bytes

StartDemo = Callable[..., Any]


def refusal(folder: Path, *flags: str, env: dict[str, str] | None = None) -> str:
    """Start a demo that must be refused before it serves; return the sentence."""
    done = CliRunner().invoke(app, ["demo", "--state-dir", str(folder), *SMALL, *flags], env=env)
    assert (done.exit_code, type(done.exception)) == (2, SystemExit), done.output
    sentence = str(done.stderr)
    assert sentence.startswith("eplb: ")
    assert sentence.endswith("\n")
    assert sentence.count("\n") == 1
    assert not list(folder.glob("**/*.unfinished")) if folder.is_dir() else True
    return sentence.removeprefix("eplb: ").removesuffix("\n")


def store_opens(folder: Path) -> bool:
    with closing(open_store(folder / "store.sqlite", "demo")) as store:
        return store.version() >= 0


@contextmanager
def files_up_to(num_bytes: int) -> Iterator[None]:
    """A disk with little room: no file of this process can grow beyond ``num_bytes``."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# -- weights


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """Weights of the small model, in the folder where the next start looks for them.

    The start that wrote them was refused afterwards, so that nothing had to be served.
    """
    (tmp_path / "store.sqlite").unlink(missing_ok=True)
    refusal(tmp_path, "--resume")
    (found,) = tmp_path.glob("weights-*")
    return found


def test_missing_weight_file_is_named(tmp_path: Path, weights: Path) -> None:
    (weights / "model-00002-of-00003.safetensors").unlink()

    missing = weights / "model-00002-of-00003.safetensors"
    assert refusal(tmp_path) == f"weight file {missing} is missing, the index names it"
    assert store_opens(tmp_path)


def test_truncated_weight_file_is_named_with_its_size(tmp_path: Path, weights: Path) -> None:
    os.truncate(weights / "model-00003-of-00003.safetensors", 5000)

    expected = f"weight file {weights / 'model-00003-of-00003.safetensors'} of 5000 bytes is trunc"
    assert refusal(tmp_path).startswith(expected)
    assert store_opens(tmp_path)


def test_weights_of_another_shape_are_refused(tmp_path: Path, weights: Path) -> None:
    other = tmp_path / "other"
    refusal(other, "--resume", "--setting", "intermediate=16")
    shutil.rmtree(weights)
    next(other.glob("weights-*")).rename(weights)

    sentence = refusal(tmp_path)
    assert "has shape (32, 16), expected (32, 32) for this model" in sentence or (
        "has shape (16, 32), expected (32, 32) for this model" in sentence
    )
    assert store_opens(tmp_path)


def test_full_disk_leaves_no_half_written_weights(tmp_path: Path) -> None:
    with files_up_to(FILE_LIMIT):
        sentence = refusal(tmp_path)

    assert sentence.startswith(f"weights cannot be written to {tmp_path}/weights-")
    assert not list(tmp_path.glob("weights-*"))
    assert store_opens(tmp_path)


def test_full_disk_leaves_no_half_written_text(tmp_path: Path) -> None:
    tmp_path.joinpath("words.txt").write_text("one two three " * 50_000)
    with files_up_to(FILE_LIMIT):
        sentence = refusal(tmp_path, "--text", str(tmp_path / "words.txt"))

    assert sentence == f"{tmp_path / 'text.npz'} cannot be written: File too large"
    assert not (tmp_path / "text.npz").exists()


# -- settings


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            ["--slots", "4"],
            "slots is 4 in flag --slots, expected at least 8, the number of experts",
        ),
        (["--policy", "best"], "unknown policy 'best', expected one of: "),
        (["--setting", "colour=red"], "unknown key 'colour' in --setting colour, closest known: "),
        (
            ["--setting", "hidden=6"],
            "hidden is 6, expected a multiple of 4, the number of attention heads",
        ),
        (
            ["--setting", "tokens_per_rank=100"],
            "tokens_per_rank is 100, expected at most 64 or a multiple of it, the tokens of one",
        ),
        (["--text", "/nowhere"], "text /nowhere cannot be read: No such file or directory"),
        (["--json", "/nowhere/a.json"], "--json /nowhere/a.json cannot be written: No such file"),
        (["--json", "/"], "--json / is a folder, expected a file"),
        (["--resume"], "store.sqlite holds no placement to resume from, expected one"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(
    tmp_path: Path, flags: list[str], sentence: str
) -> None:
    assert sentence in refusal(tmp_path / "state", *flags)


def test_unknown_key_in_the_settings_file_is_refused(tmp_path: Path) -> None:
    config = tmp_path / "demo.toml"
    config.write_text("rank = 4\n")

    sentence = refusal(tmp_path / "state", "--config", str(config))
    assert sentence.startswith(f"unknown key 'rank' in {config}, closest known: ranks")
    assert not (tmp_path / "state").exists()


def test_unknown_variable_of_the_environment_is_refused(tmp_path: Path) -> None:
    sentence = refusal(tmp_path / "state", env={"EPLB_POLCY": "auto"})

    assert sentence.startswith("unknown key 'EPLB_POLCY' in the environment")
    assert "EPLB_POLICY" in sentence


def test_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        sentence = refusal(tmp_path, "--port", str(port))

    assert sentence == (
        f"port {port} of 127.0.0.1 (http.port, http.host) cannot be used: Address already in use, "
        "expected a free port of this host; 0 takes any"
    )
    assert store_opens(tmp_path)


def write_routes(path: Path, ids: Any, **more: Any) -> list[str]:
    np.savez(path, expert_ids=np.array(ids), **more)
    return ["--trace", str(path)]


@pytest.mark.slow
def test_traces_that_cannot_be_replayed_are_refused(tmp_path: Path) -> None:
    trace, state = tmp_path / "trace.npz", tmp_path / "state"
    no_text = [word for word in SMALL if word not in TEXT]
    assert len(no_text) == len(SMALL) - len(TEXT)
    routes = np.zeros((2, 64, 2), dtype=np.int64)

    def refused(flags: list[str]) -> str:
        command = ["demo", "--state-dir", str(state), *no_text, *flags]
        done = CliRunner().invoke(app, command)
        assert (done.exit_code, type(done.exception)) == (2, SystemExit), done.output
        return str(done.stderr)

    flags = ["--trace", str(trace)]
    assert refused(flags) == f"eplb: {trace} does not exist, expected an .npz file\n"
    trace.write_bytes(b"not an archive")
    assert refused(flags).startswith(f"eplb: {trace} cannot be read as an .npz file: ")
    expected = "expected 0..7 (--experts), or -1 for padding"
    write_routes(trace, routes + 8)
    assert refused(flags) == f"eplb: trace {trace} names experts 8..8, {expected}\n"
    write_routes(trace, routes - 2)
    assert f"names experts -2..-2, {expected}" in refused(flags)
    write_routes(trace, routes, request_len=[7])
    assert "request_len sums to 7 tokens, expected 2 or 64" in refused(flags)
    assert store_opens(state)


# -- stores and folders


def test_store_of_another_version_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    open_store(tmp_path / "store.sqlite", "demo").close()
    with closing(sqlite3.connect(tmp_path / "store.sqlite")) as connection:
        connection.execute("PRAGMA user_version = 99")
    before = (tmp_path / "store.sqlite").read_bytes()

    sentence = refusal(tmp_path)
    wrong = f"has schema version 99, expected {SCHEMA_VERSION}: it was written by another version"
    assert wrong in sentence
    assert (tmp_path / "store.sqlite").read_bytes() == before


def test_store_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store.sqlite").write_text("a shopping list\n" * 100)

    sentence = refusal(tmp_path)
    assert sentence.startswith(
        f"store {tmp_path / 'store.sqlite'} is corrupted or not a SQLite file"
    )
    assert sentence.endswith("expected a whole SQLite file")


AS_NOBODY = """
import os, sys
import api.demo.run  # while the interpreter's own files can be read
from api.cli.main import main
if os.geteuid() == 0:  # nothing is read-only to root
    os.setgroups([])
    os.setuid(65534)
sys.argv[0] = "eplb"
main()
"""


@pytest.mark.slow
def test_folder_that_cannot_be_written_is_refused() -> None:
    # Not in tmp_path, which only its owner may enter.
    with tempfile.TemporaryDirectory() as name:
        state = Path(name, "state")
        state.mkdir(mode=0o555)
        state.parent.chmod(0o755)
        command = [sys.executable, "-c", AS_NOBODY, "demo", "--state-dir", str(state), *SMALL]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)

        sentence = f"eplb: state folder {state} cannot be used: Permission denied\n"
        assert (done.returncode, done.stderr) == (2, sentence)
        assert not list(state.iterdir())


def limit_files() -> None:
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_LIMIT, hard))


def demo_on_a_full_disk(start_demo: StartDemo, folder: Path) -> Any:
    """Start a demo whose store soon has no room, and wait until its ranks say so."""
    tiny = {"hidden": 8, "intermediate": 8}
    demo = start_demo(folder, "--serve", *TEXT, before_exec=limit_files, **tiny)
    demo.sees("a full store", lambda _: "load store failed, retrying" in demo.errors)
    return demo


@pytest.mark.slow
def test_full_disk_for_a_while_loses_no_output_and_no_sample(
    tmp_path: Path, start_demo: StartDemo
) -> None:
    demo = demo_on_a_full_disk(start_demo, tmp_path)
    for pid in demo.processes():
        hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))
    demo.process.send_signal(signal.SIGINT)

    assert demo.ends() == 0, demo.output_text()
    assert "Traceback" not in demo.errors
    summary = demo.summary()
    assert summary["reference_checks"] > 0
    assert (summary["reference_failures"], summary["samples_lost"]) == (0, 0)


@pytest.mark.slow
def test_disk_that_stays_full_ends_the_demo_with_one_line(
    tmp_path: Path, start_demo: StartDemo
) -> None:
    demo = demo_on_a_full_disk(start_demo, tmp_path)
    demo.process.send_signal(signal.SIGINT)

    assert demo.ends() == 2, demo.output_text()
    assert "Traceback" not in demo.errors
    last = demo.errors.splitlines()[-1]
    assert "not stored within 20 s" in last
    assert "could not be read or written" in last
    assert store_opens(demo.state_dir)


# -- processes that die


def ends_in_words(demo: Any, what: str) -> None:
    status = demo.ends()
    sentence = f"eplb: {what}, the demo cannot continue without it"
    assert (status, demo.errors.splitlines()[-1]) == (2, sentence), demo.output_text()
    assert "Traceback" not in demo.errors
    assert demo.summary()["missing"], "what is known is written, and what is not is named"
    assert store_opens(demo.state_dir)


def is_right(demo: Any) -> Any:
    assert demo.ends() == 0, demo.output_text()
    assert "Traceback" not in demo.errors
    summary = demo.summary()
    assert summary["reference_checks"] > 0
    assert (summary["reference_failures"], summary["samples_lost"]) == (0, 0)
    return summary


def serves_in_start(number: int) -> Callable[[LoadStore], bool]:
    def serves(store: LoadStore) -> bool:
        starts = [event for event in store.events(limit=100_000) if event.kind == "run"]
        if len(starts) != number:
            return False
        states = store.rank_states(starts[-1].detail["run"])
        return len(states) == 4 and min(state.step for state in states) > 20

    return serves


def kill_a_rank(demo: Any, number: int, title: str) -> Any:
    """Kill a rank once it serves in start ``number``; return the record of the recovery."""
    demo.sees(f"start {number}", serves_in_start(number))
    demo.kill(title)
    return demo.sees(
        "the record",
        lambda store: (found := store.recovery()) and found.membership == 2 * number - 1 and found,
    )


@pytest.mark.slow
def test_ranks_restart_after_an_exit_until_the_budget_is_used_up(
    tmp_path: Path, start_demo: StartDemo
) -> None:
    demo = start_demo(tmp_path, "--serve", *TEXT, restart_after_death=1)
    record = kill_a_rank(demo, 1, "rank 1")
    assert (record.survivors, record.reason) == ((0, 2, 3), "rank 1 died")
    demo.sees("rebalances after it", lambda store: commits(store) > record.generation)
    demo.sees("start 2", serves_in_start(2))
    demo.kill("rank 2")
    ends_in_words(demo, "rank 2 was killed by SIGKILL")

    is_right(start_demo(tmp_path, "--resume", *TEXT, seconds=1))


@pytest.mark.slow
def test_demo_survives_two_rank_exits_and_reports_them(
    tmp_path: Path, start_demo: StartDemo
) -> None:
    demo = start_demo(tmp_path, "--serve", *TEXT)
    kill_a_rank(demo, 1, "rank 1")
    record = kill_a_rank(demo, 2, "rank 0")
    assert (record.survivors, record.reason) == ((1, 2, 3), "rank 0 died")
    demo.sees("rebalances after it", lambda store: commits(store) > record.generation)
    demo.process.send_signal(signal.SIGINT)

    summary = is_right(demo)
    assert summary["deaths"] == 2
    assert 0 < summary["unserved_s"] < 60
    with closing(open_store(demo.state_dir / "store.sqlite", "demo")) as store:
        errors = [event.detail["message"] for event in store.events() if event.kind == "error"]
    assert errors == [
        "rank 1 was killed by SIGKILL; restarting all ranks",
        "rank 0 was killed by SIGKILL; restarting all ranks",
    ]


def commits(store: LoadStore) -> int:
    committed = store.committed()
    assert committed is not None
    return committed.placement.generation


@pytest.mark.slow
def test_hung_rank_is_excluded_and_all_ranks_restart(tmp_path: Path, start_demo: StartDemo) -> None:
    demo = start_demo(tmp_path, "--serve", *TEXT, vote_deadline_s=3.0)
    demo.sees("serving", serves_in_start(1))
    demo.kill("rank 2", signal.SIGSTOP)

    record = demo.sees("a recovery", lambda store: store.recovery())
    demo.sees("serving again", serves_in_start(2))
    demo.process.send_signal(signal.SIGINT)

    assert (record.survivors, record.reason) == ((0, 1, 3), "rank 2 sent no report in time")
    summary = is_right(demo)
    assert summary["deaths"] == 1
    assert summary["unserved_s"] > 3.0  # from the last token on, not from when it is left behind
