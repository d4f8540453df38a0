"""A deployment with several EP groups: each is shown by its name, and a switch holds for all."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from api.cli.main import app
from eplb import ModelShape, Topology
from eplb.migration.serialisation import model_to_dict, topology_to_dict
from rebalance.engines.common.fsck.report import BEGUN, FAULT, ROUND
from telemetry.state.runs import RunInfo, group_name
from tests.support.stores import sqlite_store

GROUPS = ("r1/pp0", "r1/pp1")
SHAPE = model_to_dict(ModelShape((3,), 3, 1, 1, 1)), topology_to_dict(Topology.uniform(1, 2, 2))


def begin(path: Path, name: str, *events: tuple[str, dict[str, Any]]) -> None:
    """A run of a group of two ranks, and what its ranks have found."""
    with closing(sqlite_store(path, name)) as store:
        run = f"vllm-{name}"
        store.add_event(BEGUN, {"run": "vllm-before", "rank": 0, "reason": "of an earlier start"})
        store.begin_run(RunInfo(run, 5.0, *SHAPE, 10))
        for rank in range(2):
            store.add_event(BEGUN, {"run": run, "rank": rank, "reason": ""})
        store.add_event(FAULT, {"run": "vllm-before", "rank": 0, "kind": "map", "text": "late"})
        for kind, detail in events:
            store.add_event(kind, {"run": run} | detail)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Two groups, of which the second has a fault."""
    path = tmp_path / "store.sqlite"
    with closing(sqlite_store(path, "r1")) as store:
        store.set_groups("", GROUPS)
    begin(path, GROUPS[0])
    begin(path, GROUPS[1], (FAULT, {"rank": 1, "kind": "map", "text": "layer 3 slot 2: planted"}))
    return path


def run(path: Path, *words: str, deployment: str = "r1") -> Result:
    place = ["--store", str(path), "--deployment", deployment]
    return CliRunner().invoke(app, [*words, *place], env={"COLUMNS": "200"})


def test_fsck_shows_the_faults_of_each_group_by_its_name(path: Path) -> None:
    found = run(path, "fsck")

    assert found.exit_code == 1
    assert found.output.splitlines() == [
        "r1/pp0: run vllm-r1/pp0: 2 of 2 ranks check, 0 complete rounds",
        "r1/pp0: 0 faults so far: not every slot has been checked",
        "r1/pp1: run vllm-r1/pp1: 2 of 2 ranks check, 0 complete rounds",
        "r1/pp1: rank 1: layer 3 slot 2: planted",
        "r1/pp1: 1 fault so far: not every slot has been checked",
    ]
    assert run(path, "fsck", deployment=GROUPS[0]).exit_code == 0


@pytest.mark.parametrize(
    ("reason", "rounds", "last", "status"),
    [
        ("", (1, 2), "0 faults", 0),
        ("", (1, 0), "0 faults so far: not every slot has been checked", 0),
        ("off", (), "0 faults: no rank checks", 2),
    ],
)
def test_fsck_states_whether_all_slots_were_checked(
    tmp_path: Path, reason: str, rounds: tuple[int, ...], last: str, status: int
) -> None:
    path = tmp_path / "store.sqlite"
    with closing(sqlite_store(path, "r1")) as store:
        store.begin_run(RunInfo("run", 5.0, *SHAPE, 10))
        for rank in range(2):
            store.add_event(BEGUN, {"run": "run", "rank": rank, "reason": reason})
        for rank, number in enumerate(rounds):
            store.add_event(ROUND, {"run": "run", "rank": rank, "rounds": number})

    found = run(path, "fsck")

    assert (found.output.splitlines()[-1], found.exit_code) == (last, status)


def test_status_shows_each_group_by_its_name(path: Path) -> None:
    text, listed = run(path, "status"), json.loads(run(path, "status", "--json").output)

    assert {line.partition(": ")[0] for line in text.output.splitlines()} == set(GROUPS)
    assert [one["deployment"] for one in listed] == list(GROUPS)
    assert json.loads(run(path, "status", "--json", deployment=GROUPS[1]).output)["run"] == (
        "vllm-r1/pp1"
    )


def test_plan_is_asked_for_of_a_group_and_a_pause_of_all(path: Path) -> None:
    refused = run(path, "rebalance")
    run(path, "pause", "--reason", "test")

    assert refused.exit_code == 1
    assert "r1 has the EP groups r1/pp0, r1/pp1, expected one of them" in refused.output
    with closing(sqlite_store(path, "r1")) as store:
        assert not store.control().movement
        assert not store.task(1)


def test_groups_of_an_earlier_start_leave_the_list(tmp_path: Path) -> None:
    with closing(sqlite_store(tmp_path / "store.sqlite", "r1")) as store:
        store.set_groups("a", ["r1/a"])
        store.set_groups("", [group_name("r1", f"pp{stage}") for stage in range(4)])
        store.set_groups("", GROUPS)
        with_stages = store.groups()
        store.set_groups("", [])

        assert with_stages == ["r1/a", *GROUPS]
        assert store.groups() == ["r1/a"]
