"""Bad input, bad disks and dying processes: one clear sentence each, and nothing left behind."""

import os
import re
import resource
import shutil
import signal
import socket
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
from telemetry.state.store import StateStore
from tests.support.demo import deaths_in, events_of
from tests.support.repository import ROOT

TEXT = ("--text", str(ROOT / "LICENSE"), "--text", str(ROOT / "README.md"))
SMALL = ["--ranks", "4", "--layers", "2", "--experts", "8", "--top-k", "2", "--port", "0", *TEXT]
SMALL += ["--view", "plain"]
SMALL_SETTINGS = ("hidden=32", "intermediate=32")
FILE_LIMIT = 300_000  # bytes
STORE_LIMIT = 2_000_000  # bytes, in which the start of a demo has room

StartDemo = Callable[..., Any]


def small(*flags: str) -> list[str]:
    """Flags of a small demo, and further ones; a setting among these replaces the usual one."""
    named = {flag.partition("=")[0] for flag in flags}
    usual = [setting for setting in SMALL_SETTINGS if setting.partition("=")[0] not in named]
    return [*SMALL, *(word for setting in usual for word in ("--setting", setting)), *flags]


def refusal(folder: Path, *flags: str) -> str:
    """Start a demo that must be refused before it serves; return the sentence."""
    done = CliRunner().invoke(app, ["demo", "--state-dir", str(folder), *small(*flags)])
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


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a start that was refused after it had written weights of the small model."""
    folder = tmp_path_factory.mktemp("written")
    refusal(folder, "--resume")
    return folder


@pytest.fixture
def weights(written: Path, tmp_path: Path) -> Path:
    """Weights where the next start in ``tmp_path`` looks for them."""
    (found,) = written.glob("weights-*")
    return shutil.copytree(found, tmp_path / found.name)


def drop(shard: Path) -> None:
    shard.unlink()


def truncate(shard: Path) -> None:
    os.truncate(shard, 5000)


@pytest.mark.parametrize(("damage", "found"), [(drop, "missing"), (truncate, "of 5000 bytes")])
def test_weight_file_that_is_not_whole_is_named(
    tmp_path: Path, weights: Path, damage: Callable[[Path], None], found: str
) -> None:
    shard = weights / "model-00002-of-00003.safetensors"
    damage(shard)

    sentence = refusal(tmp_path)

    assert str(shard) in sentence
    assert found in sentence
    assert store_opens(tmp_path)


def test_weights_of_another_shape_are_refused(tmp_path: Path, weights: Path) -> None:
    other = tmp_path / "other"
    refusal(other, "--resume", "--setting", "intermediate=16")
    shutil.rmtree(weights)
    next(other.glob("weights-*")).rename(weights)

    sentence = refusal(tmp_path)

    assert re.search(r"\((32, 16|16, 32)\), expected \(32, 32\)", sentence)
    assert store_opens(tmp_path)


@pytest.mark.parametrize("unfinished", ["weights-*", "text.npz"])
def test_full_disk_leaves_no_half_written_file(tmp_path: Path, unfinished: str) -> None:
    (words := tmp_path / "words.txt").write_text("one two three " * 50_000)
    with files_up_to(FILE_LIMIT):
        flags = ["--text", str(words)] if unfinished == "text.npz" else []
        sentence = refusal(tmp_path, *flags)

    assert f"{tmp_path}/{unfinished.partition('*')[0]}" in sentence
    assert not list(tmp_path.glob(unfinished))
    assert store_opens(tmp_path)


# -- settings


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--policy", "best"], "'best'"),
        (["--setting", "hidden=6"], "model.hidden is 6, expected a multiple of 4"),
        (["--tokens-per-rank", "100"], "--tokens-per-rank is 100, expected at most 64"),
        (["--ranks", "3"], "ranks is 3 in flag --ranks, expected a multiple of 2"),
        (["--slots", "9"], "slots is 9 in flag --slots, expected a multiple of 4"),
        (["--precision", "fp8"], "precision is fp8 with topology.device cpu, expected float32"),
        (["--top-k", "9"], "model.top_k is 9, expected at most 8"),
        (["--text", "/nowhere"], "text /nowhere cannot be read"),
        (["--output", "/nowhere/a.json"], "--output /nowhere/a.json cannot be written"),
        (["--output", "/"], "--output / cannot be written"),
        (["--resume"], "store.sqlite holds no placement"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(
    tmp_path: Path, flags: list[str], named: str
) -> None:
    assert named in refusal(tmp_path / "state", *flags)


def test_start_that_its_settings_refuse_makes_no_folder(tmp_path: Path) -> None:
    refusal(tmp_path / "state", "--slots", "4")

    assert not (tmp_path / "state").exists()


def test_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        sentence = refusal(tmp_path, "--port", str(port))

    assert f"port {port} of 127.0.0.1 (http.port, http.host)" in sentence
    assert store_opens(tmp_path)


ROUTES = np.zeros((2, 64, 2), dtype=np.int64)


@pytest.mark.parametrize(
    ("routes", "named"),
    [
        (None, "does not exist"),
        (b"not an archive", "File is not a zip file, expected an .npz file"),
        ({"expert_ids": ROUTES + 8}, "experts 8..8, expected 0..7"),
        ({"expert_ids": ROUTES - 2}, "experts -2..-2, expected 0, 1, 2, ..., or -1 for"),
        ({"expert_ids": ROUTES, "request_len": [7]}, "7 tokens, expected 64"),
    ],
    ids=["none", "no archive", "too many experts", "too few", "lengths"],
)
def test_trace_that_cannot_be_replayed_is_refused(tmp_path: Path, routes: Any, named: str) -> None:
    trace, no_text = tmp_path / "trace.npz", [word for word in small() if word not in TEXT]
    if isinstance(routes, bytes):
        trace.write_bytes(routes)
    elif routes is not None:
        np.savez(trace, **routes)
    flags = ["--state-dir", str(tmp_path / "state"), "--trace", str(trace)]

    done = CliRunner().invoke(app, ["demo", *no_text, *flags])

    assert (done.exit_code, type(done.exception)) == (2, SystemExit), done.output
    assert str(trace) in done.stderr
    assert named in done.stderr


# -- folders and disks


AS_NOBODY = """
import os, sys
import api.cli.demo, api.demo.run, pydantic.fields  # while these files can be read
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
        command = [sys.executable, "-c", AS_NOBODY, "demo", "--state-dir", str(state), *small()]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)

        sentence = f"eplb: state folder {state} cannot be used: Permission denied\n"
        assert (done.returncode, done.stderr) == (2, sentence)
        assert not list(state.iterdir())


def limit_files() -> None:
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (STORE_LIMIT, hard))


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
    demo.halts_right()


@pytest.mark.slow
def test_demo_on_a_disk_that_stays_full_reports_lost_samples(
    tmp_path: Path, start_demo: StartDemo
) -> None:
    demo = demo_on_a_full_disk(start_demo, tmp_path)
    demo.process.send_signal(signal.SIGINT)

    assert demo.ends() == 1, demo.output_text()
    assert "Traceback" not in demo.errors
    assert any("not stored within 10 s" in line for line in demo.errors.splitlines())
    assert demo.summary()["missing"] or demo.summary()["samples_lost"]
    assert store_opens(demo.state_dir)


# -- processes that die


def ends_in_words(demo: Any, what: str) -> None:
    status = demo.ends()
    sentence = f"eplb: {what}, the demo cannot continue without it"
    assert (status, demo.errors.splitlines()[-1]) == (2, sentence), demo.output_text()
    assert "Traceback" not in demo.errors
    assert demo.summary()["missing"], "what is known is written, and what is not is named"
    assert store_opens(demo.state_dir)


def serves_in_start(number: int) -> Callable[[StateStore], bool]:
    def serves(store: StateStore) -> bool:
        starts = events_of(store, "run")
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
def test_ranks_restart_after_an_exit_and_a_launcher_exit_ends_the_demo(
    tmp_path: Path, start_demo: StartDemo
) -> None:
    demo = start_demo(tmp_path, "--serve", *TEXT)
    record = kill_a_rank(demo, 1, "rank 1")
    assert (record.survivors, record.reason) == ((0, 2, 3), "rank 1 died")
    demo.sees("rebalances after it", lambda store: commits(store) > record.generation)
    demo.sees("start 2", serves_in_start(2))
    demo.kill("launch 0", signal.SIGTERM)
    ends_in_words(demo, "the launcher of host 0 exited with status 0")

    start_demo(tmp_path, "--resume", *TEXT, seconds=1).ends_right()


@pytest.mark.slow
def test_demo_survives_two_rank_exits_and_reports_them(
    tmp_path: Path, start_demo: StartDemo
) -> None:
    demo = start_demo(tmp_path, "--serve", *TEXT)
    kill_a_rank(demo, 1, "rank 1")
    record = kill_a_rank(demo, 2, "rank 0")
    assert (record.survivors, record.reason) == ((1, 2, 3), "rank 0 died")
    demo.sees("rebalances after it", lambda store: commits(store) > record.generation)

    summary = demo.halts_right()
    assert summary["deaths"] == 2
    assert summary["unserved_s"] > 0
    with closing(open_store(demo.state_dir / "store.sqlite", "demo")) as store:
        errors = deaths_in(store)
    assert errors == [
        "rank 1 was killed by SIGKILL; restarting the ranks of host 0",
        "rank 0 was killed by SIGKILL; restarting the ranks of host 0",
    ]


def commits(store: StateStore) -> int:
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

    assert (record.survivors, record.reason) == ((0, 1, 3), "rank 2 sent no report in time")
    summary = demo.halts_right()
    assert summary["deaths"] == 1
    assert summary["unserved_s"] > 3.0  # from the last token on, not from when it is left behind


def serves_on(membership: int) -> Callable[[StateStore], Any]:
    def found(store: StateStore) -> Any:
        events = [one.detail for one in events_of(store, "membership")]
        return next((one for one in events if one["membership"] == membership), None)

    return found


@pytest.mark.slow
def test_survivors_of_two_deaths_serve_on_without_another_start(
    tmp_path: Path, start_demo: StartDemo
) -> None:
    # Dead ranks are started again to join the others only in a minute.
    given = {"slots_per_rank": 5, "restart_after_death": 0}
    demo = start_demo(tmp_path, "--serve", *TEXT, serve_on=True, **given)
    demo.sees("serving", serves_in_start(1))
    pids = {title: pid for pid, title in demo.processes().items()}

    demo.kill("rank 0")  # where all ranks met
    first = demo.sees("three ranks", serves_on(1))
    demo.sees("rebalances of three", lambda store: commits(store) > first["generation"])
    demo.kill("rank 3")
    second = demo.sees("two ranks", serves_on(2))
    demo.sees("rebalances of two", lambda store: commits(store) > second["generation"])

    assert first["survivors"] == [1, 2, 3]
    assert second["survivors"] == [1, 2]
    left = {title: pid for pid, title in demo.processes().items() if title.startswith("rank")}
    assert left == {title: pids[title] for title in ("rank 1", "rank 2")}
    assert demo.halts_right()["deaths"] == 2


@pytest.mark.slow
def test_survivors_without_enough_slots_say_why_all_ranks_start_again(
    tmp_path: Path, start_demo: StartDemo
) -> None:
    demo = start_demo(tmp_path, "--serve", *TEXT, serve_on=True, slots_per_rank=2)
    demo.sees("serving", serves_in_start(1))

    demo.kill("rank 1")
    demo.sees("serving again", serves_in_start(2))

    with closing(open_store(demo.state_dir / "store.sqlite", "demo")) as store:
        (restart,) = events_of(store, "restart")
        assert restart.detail["lost"] == [1]
        assert "6 slots are left for 8 experts" in restart.detail["reason"]
        assert "expected topology.slots_per_rank = 3 or more" in restart.detail["reason"]
        told = f"ranks lost: 1; all ranks start again: {restart.detail['reason']}"
        assert (
            demo.sees("the outage", lambda store: events_of(store, "outage"))[0].detail["reason"]
            == told
        )
    demo.halts_right()


@pytest.mark.slow
def test_others_serve_on_without_a_rank_that_is_stopped(
    tmp_path: Path, start_demo: StartDemo
) -> None:
    demo = start_demo(tmp_path, "--serve", *TEXT, serve_on=True, **{"agent.silence_s": 5.0})
    demo.sees("serving", serves_in_start(1))
    demo.kill("rank 2", signal.SIGSTOP)

    found = demo.sees("three ranks", serves_on(1))

    assert found["survivors"] == [0, 1, 3]
    demo.halts_right()
