"""A rank's journal: nothing waits for it, the newest is kept, and damage costs a line at most."""

from __future__ import annotations

import json
import logging
import os
import signal
import stat
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from api.cli.journal import num_dropped, render
from api.cli.main import app
from rebalance.protocol import phases
from rebalance.protocol.ballot import Verdict
from rebalance.protocol.journal import (
    Entry,
    Journal,
    JournalRecorder,
    NoJournal,
    changes,
    read_journals,
)
from rebalance.protocol.phases import Phase, PlanRef, RankPhase
from tests.support.processes import ForkedProcess

PLAN = PlanRef(7, 70, base_generation=4, num_transactions=2, transactions_per_commit=1)


def entry(rank: int, number: int, time: float, what: str = "staged", **changes: Any) -> Entry:
    return replace(
        Entry("run-1", rank, number, time, time, 5, 4, 7, what, {"transactions": 2}), **changes
    )


def write(folder: Path, *entries: Entry) -> None:
    for one in entries:
        with (folder / f"rank-{one.rank:04d}.jsonl").open("a") as file:
            file.write(json.dumps(vars(one)) + "\n")


def whats(folder: Path) -> list[str]:
    return [one.what for one in read_journals(folder)[0]]


# -- the file


def test_notes_are_lines_with_place_and_time(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "new", "run-1", 3)
    journal.note("staged", (12, 4, 7), {"transactions": 2})
    journal.note("death detected", (13, 4, 7), {"dead": [1]})
    journal.close()

    entries, num_torn = read_journals(tmp_path / "new")
    assert num_torn == 0
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
    assert stat.S_IMODE(journal.path.stat().st_mode) == 0o600
    first, second = entries
    assert (first.run, first.rank, first.number) == ("run-1", 3, 1)
    assert (first.step, first.generation, first.plan_id) == (12, 4, 7)
    assert (second.what, second.detail) == ("death detected", {"dead": [1]})
    assert second.time >= first.time > 1e9
    assert second.monotonic >= first.monotonic


def test_later_start_appends_to_the_same_journal(tmp_path: Path) -> None:
    for run in ("run-1", "run-2"):
        journal = Journal(tmp_path, run, 0)
        journal.note("staged", (1, 1, 1), {})
        journal.close()

    assert [(one.run, one.number) for one in read_journals(tmp_path)[0]] == [
        ("run-1", 1),
        ("run-2", 1),
    ]


def test_torn_line_costs_nothing_but_itself(tmp_path: Path) -> None:
    path = tmp_path / "rank-0000.jsonl"
    path.write_text(json.dumps(vars(entry(0, 1, 1.0))) + '\n{"run": "run-1", "ra')
    journal = Journal(tmp_path, "run-2", 0)
    journal.note("recovery", (1, 1, 1), {})
    journal.close()

    assert whats(tmp_path) == ["staged", "recovery"]
    assert read_journals(tmp_path)[1] == 1


def test_file_that_has_grown_is_put_aside(tmp_path: Path) -> None:
    for number in range(4):
        journal = Journal(tmp_path, f"run-{number}", 0, max_bytes=100)
        journal.note("staged", (1, 1, 1), {"note": "x" * 100})
        journal.close()

    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "rank-0000.jsonl",
        "rank-0000.jsonl.1",
    ]
    assert [one.run for one in read_journals(tmp_path)[0]] == ["run-2", "run-3"]


def test_unwritable_folder_is_logged_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    journal = Journal(blocked, "run-1", 0)
    with caplog.at_level(logging.WARNING):
        journal.note("staged", (1, 1, 1), {})
        journal.close()

    assert journal.num_dropped == 1
    assert "1 journal entries lost" in caplog.text


def test_journal_writes_entries_after_one_that_cannot_be_encoded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journal(tmp_path, "run", 0)
    journal.note("odd", (0, 0, 0), {"by": {(1, 2): "no key of JSON"}})
    while not journal.num_dropped:
        threading.Event().wait(0.001)
    journal.note("sound", (1, 0, 0), {})
    journal.close()

    assert whats(tmp_path) == ["sound"]
    assert "1 journal entries lost" in caplog.text


def test_full_journal_queue_drops_the_oldest_entries(tmp_path: Path) -> None:
    is_writing, may_write = threading.Event(), threading.Event()

    class HoldsUp:
        def __str__(self) -> str:  # as the writer encodes it
            is_writing.set()
            may_write.wait()
            return "an odd value"

    journal = Journal(tmp_path, "run-1", 0, capacity=3)
    journal.note("held up", (1, 1, 1), {"by": HoldsUp()})
    is_writing.wait()
    for number in range(5):
        journal.note(f"note {number}", (1, 1, 1), {})
    may_write.set()
    journal.close()

    assert whats(tmp_path) == ["held up", "note 2", "note 3", "note 4"]
    assert journal.num_dropped == 2


@pytest.mark.system
def test_written_journal_entries_survive_a_kill(
    tmp_path: Path, fork: Callable[..., ForkedProcess]
) -> None:
    def note_and_die(pipe: object) -> None:
        journal = Journal(tmp_path, "run-1", 0)
        for number in range(1000):
            journal.note("staged", (number, 1, 1), {})
            while number == 990 and not whats(tmp_path):
                threading.Event().wait(0.001)
            if number == 990:
                os.kill(os.getpid(), signal.SIGKILL)

    assert fork(note_and_die).ends() == -signal.SIGKILL

    steps = [one.step for one in read_journals(tmp_path)[0]]
    assert steps == list(range(len(steps))) != []


# -- what is noted


class Notes:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.taken: list[tuple[str, tuple[int, int, int], Mapping[str, Any]]] = []

    def note(self, what: str, where: tuple[int, int, int], detail: Mapping[str, Any]) -> None:
        self.taken.append((what, where, detail))


def told(before: RankPhase, after: RankPhase) -> list[str]:
    return [what for what, _ in changes(before, after)]


def test_every_phase_change_has_a_journal_entry() -> None:
    idle = RankPhase(generation=4)
    seen = phases.see_plan(idle, PLAN)
    loaded = phases.preloaded(seen, 7)
    adopted = replace(loaded, is_adopted=True, phase=Phase.STAGE)
    staged = phases.staged(adopted, 7, 1)
    ordered = replace(staged, swapped=1)
    applied = phases.completed(ordered, 7, 1)
    wants = phases.want_abort(applied, 7, "the disk is full")
    dropped = replace(wants, phase=Phase.ABORTED, generation=5)
    last = phases.finish_swap(replace(applied, prepared=2, swapped=2, applied=2))

    assert told(idle, seen) == ["plan seen"]
    assert told(seen, loaded) == ["preloaded"]
    assert told(loaded, adopted) == ["adopted by all"]
    assert told(adopted, staged) == ["staged"]
    assert told(staged, ordered) == ["swap ordered"]
    assert told(ordered, applied) == ["applied"]
    assert told(applied, wants) == ["abort requested"]
    assert told(wants, dropped) == ["aborted"]
    assert told(dropped, phases.aborted(dropped)) == ["drained"]
    assert told(applied, last) == ["committed"]
    assert told(idle, phases.freeze(idle, "ranks disagree")) == ["frozen"]
    assert told(staged, staged) == []


def test_journal_records_a_vote_only_when_it_changes() -> None:
    notes = Notes()
    recorder = JournalRecorder(notes)
    recorder.step = 9
    ballots = [
        phases.ballot(RankPhase(generation=4), step=s, membership=0, halt=s > 4)
        for s in (0, 2, 4, 6)
    ]
    for ballot in ballots:
        recorder.note_ballot(ballot)
        recorder.note_verdict(ballot, Verdict.decode(ballot.encode()))

    assert [what for what, _, _ in notes.taken] == ["vote cast", "verdict"] * 2
    assert notes.taken[2] == ("vote cast", (9, 4, 0), {"halt": True})
    assert notes.taken[3] == ("verdict", (9, 4, 0), {"of_step": 6, "halt": True})


def test_rank_without_a_journal_takes_no_notes() -> None:
    JournalRecorder(NoJournal()).note("staged", RankPhase(generation=4))


# -- the table


def test_journals_of_all_ranks_are_one_table_by_time(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    folder.mkdir()
    write(folder, entry(0, 1, 10.0, "plan seen"), entry(0, 3, 30.0, "death detected"))
    write(folder, entry(1, 1, 20.0, "verdict"), entry(1, 2, 40.0, "recovery", run="run-2"))

    done = CliRunner().invoke(app, ["journal", str(tmp_path)], env={"COLUMNS": "120"})
    assert done.exit_code == 0, done.output
    rows = [line.split() for line in done.output.splitlines()]
    assert [row[5:7] for row in rows if ":" in row[0]] == [
        ["plan", "seen"],
        ["verdict", "transactions=2"],
        ["death", "detected"],
        ["recovery", "transactions=2"],
    ]
    assert [row for row in rows if row[0] == "start"] == [["start", "run-1"], ["start", "run-2"]]
    assert done.output.splitlines()[-1] == "4 of 4 lines, 1 dropped"

    flags = ["--rank", "1", "--no-votes", "--last", "5"]
    done = CliRunner().invoke(app, ["journal", str(tmp_path), *flags], env={"COLUMNS": "120"})
    assert "verdict" not in done.output
    assert done.output.splitlines()[-1].startswith("1 of 1 line")


def test_journals_are_those_of_the_configured_state_folder(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    folder.mkdir()
    write(folder, entry(0, 1, 10.0, "plan seen"))

    setting = f"deployment.state_dir={tmp_path}"
    done = CliRunner().invoke(app, ["journal", "--setting", setting], env={"COLUMNS": "120"})

    assert done.output.splitlines()[-1] == "1 of 1 line"


def test_folder_without_journals_is_an_error(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["journal", str(tmp_path)])
    assert done.exit_code == 2
    assert f"{tmp_path}/journal" in done.stderr
    (tmp_path / "journal").mkdir()
    write(tmp_path / "journal", entry(0, 1, 1.0))
    done = CliRunner().invoke(app, ["journal", str(tmp_path), "--rank", "5"])
    assert (done.exit_code, "rank 5" in done.stderr) == (2, True)


def test_hashes_are_shown_short_and_markup_is_not_obeyed() -> None:
    console = Console(width=120, record=True)
    console.print(
        render([entry(0, 1, 1.0, detail={"plan_hash": 2**61, "abort": True, "reason": "[red]x"})])
    )

    assert "plan_hash=20000000  abort=yes  reason=[red]x" in console.export_text()


def test_numbers_that_are_missing_between_two_are_dropped_notes() -> None:
    assert num_dropped([entry(0, 3, 1.0), entry(0, 6, 2.0), entry(1, 1, 1.0)]) == 2
