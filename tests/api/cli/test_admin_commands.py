"""Commands of an operator against a store and against a service, with a real controller."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from api.access.audit import Audit, local_actor
from api.app import create_app
from api.cli.main import PLACES, app
from api.operations.commands import COMMANDS
from api.operations.plans import show_task
from telemetry import open_store
from telemetry.state.events import MEMBERSHIP, Outage
from telemetry.state.live import Control
from tests.support.controlled_deployment import START, Deployment, planned_by_request
from tests.support.documents import commands
from tests.support.http import serving


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    with (
        closing(open_store(tmp_path / "store.sqlite", "test")) as store,
        planned_by_request(store) as served,
    ):
        yield served


class Shell:
    """Runs commands on one deployment."""

    def __init__(self, *place: str) -> None:
        self.place = place

    def run(self, *words: str) -> tuple[int, str]:
        """Return exit status, and output with errors."""
        done = CliRunner().invoke(app, [*words, *self.place])
        return done.exit_code, done.output

    def json(self, *words: str, status: int = 0) -> Any:
        """Return the JSON that a command prints."""
        code, output = self.run(*words, "--json")
        assert code == status, output
        return json.loads(output)


@pytest.fixture
def on_store(tmp_path: Path) -> Shell:
    return Shell("--store", str(tmp_path / "store.sqlite"), "--deployment", "test")


def test_operator_proposes_approves_and_goes_back_on_a_store(
    deployment: Deployment, on_store: Shell, tmp_path: Path
) -> None:
    store = deployment.store
    status, text = on_store.run("propose", "--reason", "evening load")
    assert status == 0, text
    number = str(store.proposals()[0].id)
    assert f"eplb approve {number} carries it out while generation 0 serves" in text
    assert re.search(rf"^ *{number} +open .* MOVE +1\.600 .*evening load$", text, re.MULTILINE)
    status, text = on_store.run("approve", number)
    assert (status, "movement is off" in text) == (1, True)
    store.set_control(Control(), reason="go on")

    status, text = on_store.run("approve", number, "--if-generation", "7")
    assert (status, 'is "0", expected "7"' in text) == (1, True)
    status, text = on_store.run("approve", number, "--if-generation", "0")
    assert (status, "is published to the ranks" in text) == (0, True), text
    deployment.swap()
    (found,) = on_store.json("proposals")["proposals"]
    assert (found["state"], found["ended_by"]) == ("approved", local_actor())
    dry = on_store.json("rollback", "0")["result"]
    assert (dry["dry_run"], dry["published"]) == (True, False)
    assert store.published() is None
    assert on_store.json("tasks", "--state", "failed") == {"tasks": [], "next": None}
    entries = list(Audit(tmp_path).entries())
    assert entries[0].action == "POST /api/v1/proposals"
    assert (asked := entries[-2]).action == "POST /api/v1/rollbacks"
    assert asked.detail == "generation 0, dry_run true"
    assert re.match("task [0-9]+ done: generation 0, dry_run true, decision ", entries[-1].detail)


def test_operator_reads_and_rejects_at_a_service(deployment: Deployment) -> None:
    with serving(create_app(deployment.store, plan_wait_s=60.0)) as service:
        shell = Shell("--service", service.url)
        number = str(shell.json("propose")["id"])
        status, text = shell.run("explain", number)
        assert (status, "layer 0" in text.lower()) == (0, True), text
        assert "eplb: found neither a proposal alone nor" in shell.run("explain")[1]
        assert shell.run("explain", "--layer", "0", "--expert", "0")[0] == 0
        assert shell.json("reject", number, "--reason", "not tonight")["state"] == "rejected"
        assert shell.run("reject", number)[0] == 1
        assert [one["rank"] for one in shell.json("ranks")] == [0, 1]
        assert "rejected" in shell.run("events", "--last", "5")[1]
        dry = shell.json("rebalance")["result"]
        assert (dry["decision"], dry["published"]) == ("MOVE", False)
    status, text = shell.run("ranks")
    assert (status, "no answer of a service at" in text) == (2, True)


def test_event_of_an_outage_has_its_dates(deployment: Deployment, on_store: Shell) -> None:
    deployment.store.add_outage(Outage(1_795_808_263.9, 1_795_808_272.1, 8.2, "rank 1 died"))

    text = on_store.run("events", "--kind", "outage")[1]

    assert "start=2026-11-27 19:37:43Z end=2026-11-27 19:37:52Z unserved_s=8.2" in text


def test_event_of_a_new_group_has_the_seconds_of_its_stages(
    deployment: Deployment, on_store: Shell
) -> None:
    detail = {"broke_at": 1_795_808_263.9, "seconds": {"agree": 0.02, "first pass": 0.3}}
    deployment.store.add_event(MEMBERSHIP, detail)

    text = on_store.run("events", "--kind", "membership")[1]

    assert "broke_at=2026-11-27 19:37:43Z seconds=agree 0.02, first pass 0.3" in text


def test_service_and_store_give_each_command_the_same_answer(
    deployment: Deployment, on_store: Shell
) -> None:
    number = str(on_store.json("propose")["id"])
    reads = [("proposals",), ("explain", number), ("events", "--last", "3"), ("pins", "list")]
    reads += [("placements", "list"), ("tasks", "--state", "done"), ("drain", "9")]
    pause = ["pause", "--wait", "0.001", "--reason", "change 4711"]
    with serving(create_app(deployment.store)) as service:
        at_service = Shell("--service", service.url)
        for words in reads:
            answers = [shell.run(*words, "--json") for shell in (on_store, at_service)]
            assert answers[0] == answers[1], words
        deployment.store.set_control(Control(), reason="go on")
        status, text = on_store.run(*pause)
        assert (status, "off (was on); 0 of 2 ranks of run" in text) == (1, True), text
        deployment.store.set_control(Control(), reason="go on")
        assert at_service.run(*pause) == (status, text)


def test_request_without_a_controller_is_queued_and_cancelled(
    tmp_path: Path, on_store: Shell
) -> None:
    with closing(open_store(tmp_path / "store.sqlite", "test")) as store:
        store.commit(START, expected=None, reason="start")
        Deployment(store)

        task = on_store.json("propose", "--wait", "0", status=3)

        assert (task["kind"], task["state"]) == ("propose", "queued")
        status, text = on_store.run("tasks", "--cancel", str(task["id"]))
        assert (status, "cancelled: from the command line" in text) == (0, True), text


THROTTLE = {"experts_per_transaction": 3, "layers_per_transaction": 2, "link_part": 0.25}
THROTTLED = [
    word for name, limit in THROTTLE.items() for word in (f"--{name.replace('_', '-')}", str(limit))
]
ASKED: dict[str, tuple[list[str], dict[str, Any]]] = {
    "propose": (
        ["--policy", "greedy", "--expires-s", "60"],
        {"policy": "greedy", "expires_s": 60},
    ),
    "rebalance": (
        ["--policy", "greedy", "--move", *THROTTLED],
        {"policy": "greedy", "dry_run": False, "throttle": THROTTLE},
    ),
    "rollback": (
        ["0", "--move", *THROTTLED],
        {"generation": 0, "dry_run": False, "throttle": THROTTLE},
    ),
}


@pytest.mark.parametrize("command", ASKED)
def test_every_option_of_a_command_reaches_the_request_of_its_task(
    tmp_path: Path, on_store: Shell, command: str
) -> None:
    words, expected = ASKED[command]
    with closing(open_store(tmp_path / "store.sqlite", "test")) as store:
        store.commit(START, expected=None, reason="start")
        Deployment(store)

        task = on_store.json(command, *words, "--reason", "slowly", "--wait", "0", status=3)

        assert {name: task["request"][name] for name in expected} == expected
        assert task["request"]["reason"] == "slowly"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["ranks", "--service", "ftp://x"], "--service is 'ftp://x', expected http://HOST:PORT"),
        (["tasks", "--store", "/nowhere/s.sqlite"], "there is no store at /nowhere/s.sqlite"),
    ],
)
def test_place_that_cannot_be_asked_is_bad_input(words: list[str], sentence: str) -> None:
    done = CliRunner().invoke(app, words)

    assert done.exit_code == 2
    assert sentence in done.output


def test_command_with_an_example_shows_it_at_the_end_of_its_help() -> None:
    found = {words.removeprefix("eplb "): command.epilog for words, command in commands().items()}

    assert found["approve"] == (
        "Example: eplb approve 12 --reason 'looks right' --if-generation 41"
    )
    assert found["sweep"].startswith("Example: eplb sweep dump.jsonl --output sweep")


def test_list_of_commands_loads_neither_torch_nor_fastapi_nor_a_compiler() -> None:
    heavy = ("torch", "fastapi", "ortools", "numba", "numpy", "pydantic", "scipy", "httpx")
    script = (
        "import sys\nfrom api.cli.main import app\ntry:\n    app(['--help'])\n"
        f"except SystemExit:\n    print([one for one in {heavy} if one in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )

    assert "placements" in done.stdout
    assert done.stdout.rstrip().endswith("[]")


def test_every_command_of_the_admin_api_is_in_the_table_and_has_an_example() -> None:
    known = {words.removeprefix("eplb "): command for words, command in commands().items()}

    assert COMMANDS
    assert all(f"eplb {words}" in str(known[words].epilog) for words in COMMANDS)


def test_list_of_commands_has_the_first_sentence_of_the_help_of_each() -> None:
    helps = {words.split()[1]: command.help or "" for words, command in commands().items()}
    groups = {words.split()[1] for words in commands() if len(words.split()) > 2}

    for name in PLACES.keys() - groups:
        assert " ".join(helps[name].split()).startswith(PLACES[name].help), name


def test_configuration_is_read_beside_the_variable_of_a_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EPLB_SERVICE", "http://127.0.0.1:1")

    found = CliRunner().invoke(app, ["audit", "--setting", f"state_dir={tmp_path}"])

    assert found.exit_code == 0, found.output


@pytest.mark.parametrize(
    ("result", "last"),
    [
        ({"decision": "MOVE", "num_moves": 4, "dry_run": True}, "nothing moves: a dry run"),
        ({"decision": "MOVE", "num_moves": 4, "kept": "a pause"}, "nothing moves: a pause"),
        ({"decision": "KEEP", "num_moves": 0, "dry_run": False}, "nothing moves"),
        (
            {"decision": "MOVE", "num_moves": 4, "serves": 7, "plan_id": 3, "published": True},
            "generation 7 serves",
        ),
    ],
    ids=["a dry run", "kept by a switch", "not worth it", "moved by an engine"],
)
def test_answer_to_a_rebalance_ends_with_what_came_of_it(
    result: dict[str, Any], last: str, capsys: pytest.CaptureFixture[str]
) -> None:
    show_task({"id": 3, "kind": "rebalance", "result": result})

    *_, row, ending = capsys.readouterr().out.splitlines()
    assert row.split()[1] == result["decision"]
    assert ending == last
