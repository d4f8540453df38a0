"""``eplb status``: what it reads of a store, and the exit status that scripts go by."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from api.app import create_app
from api.cli.main import app
from api.deploy.first_placement import START_EVENT
from api.deploy.roles import CompileReports
from api.monitor.state import PaceView
from api.operations import watching
from api.operations.table import read_answer
from eplb import LoadSample, ModelShape, Placement, Topology, build_migration
from eplb.errors import ConfigError
from eplb.migration.serialisation import model_to_dict, topology_to_dict
from eplb.versions import RANKS, Announcement
from rebalance.weights.link.secret import deployment_secret
from telemetry import open_store
from telemetry.state.events import COMPILE
from telemetry.state.live import Control
from telemetry.state.proposals import Content, Proposal
from telemetry.state.runs import REPORT_EVERY_S, RankState, RunInfo
from telemetry.state.store import StateStore
from tests.support.http import serving
from tests.support.limits import NEVER_S
from tests.support.plan_events import plan_event
from tests.support.readings import read

SECRET = "0123456789abcdef"
HEAT_OF_NOW = {"run": "a", "window": 0, "ranks": [], "experts": []}
MODEL = ModelShape((0,), num_experts=3, top_k=1, hidden=2, intermediate=2)
TOPOLOGY = Topology.uniform(num_nodes=2, ranks_per_node=1, slots_per_rank=2)
FIRST = Placement(np.array([[0, 1, 2, -1]]), num_experts=3, generation=1)
SECOND = Placement(np.array([[0, 1, 0, 2]]), num_experts=3, generation=2)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StateStore]:
    """Two ranks that serve one complete window of 80 and 20 tokens, and a leader."""
    with closing(open_store(tmp_path / "store.sqlite", "west")) as opened:
        shapes = model_to_dict(MODEL), topology_to_dict(TOPOLOGY)
        opened.begin_run(RunInfo("a", time.time(), *shapes, window_steps=1))
        opened.commit(FIRST, expected=None, reason="start")
        for rank, tokens in enumerate(([60, 20], [20, 0])):
            held = FIRST.slot_to_expert[:, TOPOLOGY.slots_on(rank)]
            load = np.array([tokens])
            opened.append(
                [LoadSample("west", "a", rank, 0, time.time(), 0, 0, "mixed", 1, held, load)]
            )
        report(opened, time.time())
        opened.acquire_lease("someone", 60.0)
        yield opened


def report(store: StateStore, at: float) -> None:
    """Reports of ranks that count as silent after 3 minutes: a busy host reads them late."""
    for rank in range(2):
        detail = {REPORT_EVERY_S: 60.0}
        store.report(RankState("a", rank, at, 7, 1, "idle", 0, 0, 1, 0, detail=detail))


def run(tmp_path: Path, *words: str, **environ: str) -> tuple[int, str]:
    file = tmp_path / "eplb.toml"
    file.write_text(f'[deployment]\nname = "west"\nstore = "{tmp_path}/store.sqlite"\n')
    found = CliRunner().invoke(app, ["status", *words], env={"EPLB_CONFIG": str(file)} | environ)
    return found.exit_code, found.output


def test_status_has_the_last_problem_of_a_day(tmp_path: Path, store: StateStore) -> None:
    assert "last problem" not in run(tmp_path)[1]
    store.add_event("error", {"where": "load", "message": "a sample of rank 1 was refused"})

    status, shown = run(tmp_path)

    line = r"last problem at \d{4}-.*Z: a sample of rank 1 was refused"
    assert (status, bool(re.search(line, shown))) == (0, True), shown


def test_deployment_that_serves_has_status_0_and_shows_its_leader(
    tmp_path: Path, store: StateStore
) -> None:
    status, shown = run(tmp_path, "--verbose")
    short = run(tmp_path)

    assert status == 0, shown
    assert f"deployment west in {tmp_path}/store.sqlite" in shown
    assert "leader     'someone', last turn " in shown
    assert "serves     generation 1, step 7, run a" in shown
    assert "imbalance  1.60 in the latest window, 1.60 unbalanced" in shown
    assert "pace       the deployment's own; fixed: step_time_budget is 0" in shown
    assert "so objective auto balances tokens: no rank measured its experts" in shown
    assert "switches   movement on, observe off" in shown
    ours = Announcement(RANKS, "a").version
    assert f"versions   ranks: {ours}; controller: a version not announced" in shown
    assert shown.startswith("serving: 2 ranks serve, at step 7\n")
    assert short == (0, "serving: 2 ranks serve, at step 7\n")


def test_first_lines_say_who_paused_what_waits_and_why_nothing_moved(
    tmp_path: Path, store: StateStore
) -> None:
    store.change_live({"stage": "propose"}, reason="rollout")
    paused = store.change_live({"movement": False}, reason="change 4711", by="alice")
    target = SECOND.with_generation(2)
    given = dict.fromkeys(("trigger", "reason", "plan_reason", "policy"), "")
    store.propose(
        Proposal(
            time=time.time(),
            expires=time.time() + NEVER_S,
            base_generation=1,
            base_hash=FIRST.hash,
            target_generation=2,
            by="bob",
            decision="MOVE",
            imbalance_before=1.6,
            imbalance_after=1.0,
            expected_gain=0.6,
            moves=1,
            bytes=8,
            cost_s=0.1,
            **given,
        ),
        Content(target),
    )
    store.add_event("plan", plan_event(reason="the gain is less than the cost"))

    first, plan = run(tmp_path)[1].splitlines()

    at = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(paused.changes["movement"].time))
    assert first == (
        f"serving: 2 ranks serve, at step 7; movement is off since {at} by alice: change 4711; "
        "stage propose; 1 proposal waits for a decision"
    )
    assert re.fullmatch(r"KEEP at .*Z: the gain is less than the cost", plan)


def test_open_operation_on_ranks_is_shown_with_the_time_until_it_fails(
    tmp_path: Path, store: StateStore
) -> None:
    asked = {"asked": {"to": 1}, "alive": (True, True), "reason": "night", "by": "ops"}
    store.change_membership("down", (0,), within_s=NEVER_S, **asked)

    line = run(tmp_path)[1]

    shown = re.search(r"; operation down on the ranks, fails in (\d+) s, draining: ", line)
    assert shown is not None, line
    assert 0 < int(shown[1]) <= NEVER_S


def test_json_has_what_the_text_has(tmp_path: Path, store: StateStore) -> None:
    store.publish(build_migration(FIRST, SECOND, TOPOLOGY, plan_id=store.next_plan_id()))
    store.set_control(Control(movement=False), reason="an operator")

    status, shown = run(tmp_path, "--json")
    found: dict[str, Any] = json.loads(shown)

    assert status == 0
    assert (found["problems"], found["controller"]["leader"]) == ([], "'someone'")
    assert (found["verdict"], found["generation"]) == ("serving", 1)
    assert [one["rank"] for one in found["ranks"]] == [0, 1]
    assert found["migration"]["plan_id"] == 1
    assert found["movement"] is False
    assert found["pace"] | {"reason": ""} == vars(PaceView())


def test_status_and_top_of_a_service_are_those_of_its_store(
    tmp_path: Path, store: StateStore
) -> None:
    of_store = json.loads(run(tmp_path, "--json")[1])
    with serving(create_app(store)) as service:
        status, shown = run(tmp_path, "--json", "--service", service.url)
        in_lines = run(tmp_path, "--verbose", "--service", service.url)
        picture = CliRunner().invoke(app, ["top", "--once", "--service", service.url])
    of_service = json.loads(shown)

    assert status == in_lines[0] == picture.exit_code == 0
    assert f"deployment west at {service.url}" in in_lines[1]
    assert list(of_service) == list(of_store)
    steady = {name for name, value in of_store.items() if of_service[name] == value}
    assert steady >= {"verdict", "reason", "run", "last_score", "versions", "bytes_by_source"}
    assert picture.output.startswith(" serving  2 ranks serve, at step 7")
    assert "imbalance 1.60" in picture.output


def test_service_and_a_configuration_of_a_store_are_refused_together(tmp_path: Path) -> None:
    status, shown = run(tmp_path, "--service", "http://127.0.0.1:1", "--profile", "decode")

    assert status == 2
    assert "a configuration names a store, found the service http://127.0.0.1:1 as well" in shown


def test_answer_of_another_version_is_refused_with_its_field() -> None:
    with pytest.raises(
        ConfigError, match=r"the answer to GET /api/v1/heat has 'ranks.0': .* of this version"
    ):
        read_answer(watching.heat, json.dumps(HEAT_OF_NOW | {"ranks": [7]}).encode())


@pytest.mark.parametrize(
    ("of_rank_1", "of_rank_0", "reported"),
    [
        (0, 20_000, "rank 1: the counters stay at zero while those of other ranks grow"),
        (0, 10_000, None),
        (1, 20_000, None),
        (0, 0, "no token was counted since the run began 0 s ago"),
    ],
    ids=["never counted", "too few tokens", "cold", "all idle"],
)
def test_rank_whose_counters_stay_at_zero_is_a_problem(
    tmp_path: Path, of_rank_0: int, of_rank_1: int, reported: str | None
) -> None:
    with closing(open_store(tmp_path / "store.sqlite", "west")) as opened:
        shapes = model_to_dict(MODEL), topology_to_dict(TOPOLOGY)
        opened.begin_run(RunInfo("a", time.time(), *shapes, window_steps=256))
        opened.commit(FIRST, expected=None, reason="start")
        for rank, tokens in enumerate((of_rank_0, of_rank_1)):
            held = FIRST.slot_to_expert[:, TOPOLOGY.slots_on(rank)]
            load = np.array([[tokens, 0]])
            opened.append(
                [LoadSample("west", "a", rank, 0, time.time(), 0, 255, "mixed", 1, held, load)]
            )
        report(opened, time.time())
        opened.acquire_lease("someone", 60.0)

        problems = read(opened).state.problems

    found = [re.sub(r"\d+ s ago", "0 s ago", one.partition(",")[0]) for one in problems]
    assert found == ([] if reported is None else [reported])


@pytest.mark.parametrize(
    ("secret", "ranks", "refusal"),
    [
        ("another secret of 16", 2, "'west' was started with a secret of fingerprint "),
        (SECRET, 3, "'west' serves with 2 ranks (run a), expected 3 (topology.nodes x"),
        (SECRET, 2, ""),
    ],
    ids=["another secret", "another number of ranks", "its own"],
)
def test_status_by_another_configuration_is_refused(
    tmp_path: Path, store: StateStore, secret: str, ranks: int, refusal: str
) -> None:
    known = deployment_secret(None, {"EPLB_SECRET": SECRET}, addresses={}, state_dir=tmp_path)
    store.add_event(START_EVENT, {"by": "eplb serve", "secret": known.fingerprint})

    status, shown = run(
        tmp_path, "--setting", f"topology.ranks_per_node={ranks}", EPLB_SECRET=secret
    )

    assert status == (2 if refusal else 0), shown
    assert refusal in shown


def test_status_without_the_host_s_own_secret_makes_none(tmp_path: Path, store: StateStore) -> None:
    store.add_event(START_EVENT, {"by": "eplb serve", "secret": "0123456789abcdef"})

    status, shown = run(tmp_path, "--setting", f"deployment.state_dir={tmp_path}/state")

    assert (status, shown) == (
        2,
        f"eplb: the host's own secret {tmp_path}/state/secret cannot be read: "
        "No such file or directory\n",
    )
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(("age_s", "is_ok"), [(170.0, True), (190.0, False)])
def test_rank_is_silent_after_three_of_its_own_intervals(
    store: StateStore, age_s: float, is_ok: bool
) -> None:
    now = time.time()
    for rank in range(2):
        detail = {REPORT_EVERY_S: 60.0}  # telemetry.store_interval = 60
        store.report(RankState("a", rank, now - age_s, 7, 1, "idle", 0, 0, 1, 0, detail=detail))

    silent = "silent ranks: 0, 1, expected a report from all 2 within 180 s"

    found = read(store, now).state.problems
    assert any(one.startswith(silent) for one in found) is not is_ok


def test_silent_ranks_and_a_lost_leader_have_status_1(tmp_path: Path, store: StateStore) -> None:
    lease = store.lease()
    assert lease is not None
    store.release_lease(lease)
    report(store, time.time() - 600.0)

    status, shown = run(tmp_path)

    assert status == 1
    assert "problem    no controller leads, expected one (eplb serve, eplb controller or" in shown
    assert shown.startswith("blind: silent ranks: 0, 1")


def test_leader_that_compiles_kernels_is_shown_until_it_is_done(
    tmp_path: Path, store: StateStore
) -> None:
    clock = iter([0.0, 0.0, 1.0, 3.0, 7.0, 8.0])
    said: list[str] = []

    def record(state: str, **figures: float) -> None:
        store.add_event(COMPILE, {"holder": "someone", "state": state} | figures)

    reports = CompileReports(said.append, record, clock=lambda: next(clock))
    for function in ("eplb.search.improve", "eplb.search.improve", "eplb.search.layer"):
        reports.note(function)

    status, shown = run(tmp_path)

    assert status == 0
    assert "at step 7; the controller has been compiling kernels for " in shown.splitlines()[0]
    reports.note("eplb.search.layer")
    reports.note("")
    assert "compiling" not in run(tmp_path)[1]
    assert said == [
        "compiling the kernels: 1 functions in 0 s",
        "compiling the kernels: 2 functions in 7 s",
        "compiled the kernels: 2 functions in 8 s",
    ]


def test_deployment_whose_ranks_never_started_can_be_read(tmp_path: Path) -> None:
    with closing(open_store(tmp_path / "store.sqlite", "west")) as opened:
        opened.commit(FIRST, expected=None, reason="start")

    status, shown = run(tmp_path, "-v")

    assert status == 1
    assert "serves     nothing yet" in shown
    assert shown.startswith("blind: no run has begun, expected one\n")


def test_deployment_that_cannot_be_read_has_status_2(tmp_path: Path) -> None:
    status, shown = run(tmp_path)

    assert status == 2
    assert shown == (
        f"eplb: there is no store at {tmp_path}/store.sqlite, expected the file of a deployment\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["eplb.toml"]


def test_top_shows_the_verdict_in_its_first_line_and_why(tmp_path: Path, store: StateStore) -> None:
    file = tmp_path / "eplb.toml"
    file.write_text(f'[deployment]\nname = "west"\nstore = "{tmp_path}/store.sqlite"\n')
    report(store, time.time() - 600.0)

    found = CliRunner().invoke(app, ["top", "--once"], env={"EPLB_CONFIG": str(file)})

    assert found.exit_code == 0, found.output
    assert found.output.startswith(" blind  silent ranks: 0, 1")
    assert "imbalance 1.60" in found.output
