"""Operations on the ranks that serve, over HTTP and as commands, with a controller that drains."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from typer.testing import CliRunner

from api.app import create_app
from api.cli.main import app
from api.http.problems import ProblemType
from eplb.core.model import ModelShape
from eplb.core.placement import EMPTY, Placement
from eplb.core.topology import Topology
from eplb.migration.recovery import Recovery
from eplb.migration.serialisation import topology_to_dict
from telemetry import open_store
from telemetry.state.groups import Joiner
from telemetry.state.runs import GROUP_STAYS
from telemetry.state.store import StateStore
from tests.support.controlled_deployment import Deployment
from tests.support.http import client_of, problem_of
from tests.support.rank_reports import rank_report
from tests.support.stores import MemoryStore

PATH = "/api/v1/membership"
WHY = {"reason": "change 4711"}
# One layer of four experts over four ranks of three slots on two hosts; rank 3 alone has expert 3.
TOPOLOGY = Topology.uniform(num_nodes=2, ranks_per_node=2, slots_per_rank=3)
MODEL = ModelShape((7,), 4, 2, hidden=16, intermediate=8, expert_bytes=6_000_000)
START = Placement([[0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 3]], num_experts=4)
EVEN = [25_000, 25_000, 25_000, 25_000]


def serving_in(store: StateStore, why: str | None = "") -> Deployment:
    """Four ranks that serve; why: their group cannot change, None: they do not tell."""
    store.commit(START, expected=None, reason="start")
    served = Deployment(store, topology=TOPOLOGY, model=MODEL)
    tell(served, why)
    served.serve(EVEN)
    return served


def tell(served: Deployment, why: str | None) -> None:
    for rank in served.ranks:
        detail: dict[str, Any] = {} if why is None else {GROUP_STAYS: why}
        served.store.report(rank_report(served.run, rank, **detail))


@pytest.fixture
def deployment() -> Deployment:
    return serving_in(MemoryStore("test"))


@pytest.fixture
def client(deployment: Deployment, tmp_path: Path) -> Iterator[httpx.Client]:
    with client_of(create_app(deployment.store, state_dir=tmp_path)) as opened:
        yield opened


def ask(client: httpx.Client, epoch: int | None = None, **body: Any) -> httpx.Response:
    headers = {} if epoch is None else {"if-match": f'"{epoch}"'}
    return client.post(PATH, json=WHY | body, headers=headers)


def members_become(deployment: Deployment, *ranks: int) -> None:
    """What the ranks do between two steps: a group of others, and a run of its own."""
    store, epoch = deployment.store, deployment.store.epoch()
    committed = store.committed()
    assert committed is not None
    serving = committed.placement
    record = Recovery(epoch + 1, "run-1", ranks, serving.generation, 0, 0, "planned", 9.5)
    store.recover(record, expected_membership=epoch)
    alive = np.isin(np.arange(TOPOLOGY.num_ranks), ranks)
    info = store.current_run()
    assert info is not None
    topology = topology_to_dict(replace(TOPOLOGY, alive=alive))
    store.commit(
        serving.with_generation(serving.generation + 1),
        expected=serving.generation,
        reason="planned",
        run=replace(info, run=f"run-1-member{epoch + 1}", topology=topology),
    )


def test_dry_run_says_what_moves_and_changes_nothing(
    deployment: Deployment, client: httpx.Client
) -> None:
    before = deployment.store.events()

    planned = ask(client, retire=[3])

    assert planned.status_code == 200, planned.text
    found = planned.json()
    assert (found["is_dry_run"], found["refusal"], found["operation"]) == (True, "", None)
    assert (found["wanted"], found["joins"], found["retires"]) == ([0, 1, 2], [], [3])
    loss = found["loss"]
    assert loss["uncovered_experts"] == [{"layer": 7, "expert": 3}]
    assert (loss["refill_bytes"], loss["refill_s"], loss["spare_slots"]) == (6_000_000, 0.001, 5)
    assert loss["imbalance"] > 1.0
    assert deployment.store.events() == before


def test_retired_rank_is_drained_leaves_and_is_safe_to_delete(
    deployment: Deployment, client: httpx.Client
) -> None:
    asked = ask(client, epoch=0, id="op-7", retire=[3], dry_run=False).json()
    assert asked["operation"]["id"] == "op-7"
    draining = client.get(PATH).json()
    assert (draining["phase"], draining["survivors"]) == ("draining", [0, 1, 2])
    assert draining["waits"] == "3 slots of all layers hold experts on rank 3"
    assert draining["safe_to_delete"] == []
    assert 0 < draining["left_s"] <= 1800
    assert client.get("/api/v1/ranks").json()["ranks"][3]["state"] == "draining"

    deployment.controller().turn()
    assert deployment.swap().target.slot_to_expert[0, 9:].tolist() == [EMPTY] * 3
    assert client.get(PATH).json()["phase"] == "leaving"
    members_become(deployment, 0, 1, 2)

    found = client.get(PATH)
    assert found.headers["etag"] == '"1"'
    done = found.json()
    assert (done["phase"], done["operation"]["ended"]) == ("settled", "done")
    assert (done["members"], done["safe_to_delete"]) == ([0, 1, 2], [3])
    repeated = ask(client, epoch=0, id="op-7", retire=[3], dry_run=False).json()
    assert repeated["operation"] == done["operation"]


def test_scaled_down_deployment_keeps_its_hosts_even_and_grows_again(
    deployment: Deployment, client: httpx.Client
) -> None:
    assert ask(client, to=2).json()["retires"] == [1, 2]
    ask(client, id="down", to=2, dry_run=False)
    deployment.controller().turn()
    deployment.swap()
    members_become(deployment, 0, 3)

    info = deployment.store.current_run()
    assert info is not None
    for rank in (0, 3):
        deployment.store.report(rank_report(info.run, rank, **{GROUP_STAYS: ""}))
    grown = ask(client, id="up", to=3, dry_run=False).json()

    assert (grown["joins"], grown["retires"], grown["loss"]["uncovered"]) == ([1], [], 0)
    found = client.get(PATH).json()
    assert (found["phase"], found["waits"]) == ("waiting", "not ready to be admitted: rank 1")
    deployment.store.offer_to_join(Joiner(1, "10.0.0.1", "a7"))
    assert client.get(PATH).json()["phase"] == "joining"
    members_become(deployment, 0, 1, 3)
    assert client.get(PATH).json()["operation"]["ended"] == "done"


def test_cancelled_operation_wants_the_ranks_of_before(
    deployment: Deployment, client: httpx.Client
) -> None:
    ask(client, id="op-7", retire=[3], dry_run=False)

    cancelled = client.post(f"{PATH}/op-7/cancel", json=WHY).json()

    assert (cancelled["phase"], cancelled["wanted"]) == ("settled", [0, 1, 2, 3])
    assert cancelled["operation"]["ended"] == "cancelled"
    for change_id, found in (("op-7", "it is cancelled"), ("op-8", "there is no such operation")):
        again = client.post(f"{PATH}/{change_id}/cancel", json=WHY)
        assert problem_of(again)[0] is ProblemType.OTHER_OPERATION
        assert found in problem_of(again)[1]


def test_second_operation_another_body_and_a_stale_epoch_are_refused(
    deployment: Deployment, client: httpx.Client
) -> None:
    ask(client, id="op-7", retire=[3], dry_run=False)
    open_one = deployment.store.membership_change()

    second = ask(client, id="op-8", to=2, dry_run=False)
    other = ask(client, id="op-7", to=2, dry_run=False)
    stale = ask(client, epoch=5, id="op-9", to=2)

    assert problem_of(second)[0] is ProblemType.OTHER_OPERATION
    assert "'op-7' is open" in problem_of(second)[1]
    assert problem_of(other)[0] is ProblemType.OTHER_OPERATION
    assert '{"retire": [3]}' in problem_of(other)[1]
    assert problem_of(stale)[0] is ProblemType.MEMBERSHIP_CHANGED
    assert deployment.store.membership_change() == open_one


@pytest.mark.parametrize(
    ("body", "kind", "detail"),
    [
        ({"retire": [4]}, ProblemType.NO_SUCH_RANK, "there is no rank 4, expected 0..3"),
        ({"to": 5}, ProblemType.NO_SUCH_RANK, "5 ranks are to serve, expected 1..4"),
        ({"to": 1}, ProblemType.IMPOSSIBLE_MEMBERSHIP, "a layer on rank 0 for 4 experts"),
        (
            {"retire": [0, 1, 2]},
            ProblemType.IMPOSSIBLE_MEMBERSHIP,
            "found 3 slots in a layer on rank 3",
        ),
        ({"to": 2, "retire": [1]}, ProblemType.INVALID_REQUEST, "names to, retire of"),
        ({}, ProblemType.INVALID_REQUEST, "names none of"),
        ({"id": "-", "to": 3}, ProblemType.INVALID_REQUEST, "id"),
        ({"to": 3, "within_s": 0}, ProblemType.INVALID_REQUEST, "within_s"),
    ],
)
def test_impossible_request_is_refused_and_changes_nothing(
    deployment: Deployment,
    client: httpx.Client,
    body: dict[str, Any],
    kind: ProblemType,
    detail: str,
) -> None:
    refused = ask(client, dry_run=False, **body)

    assert problem_of(refused)[0] is kind
    assert detail in problem_of(refused)[1]
    assert deployment.store.membership_change() is None


def test_spare_slots_of_the_configuration_are_no_room_for_experts(
    deployment: Deployment, client: httpx.Client
) -> None:
    assert ask(client, to=2).json()["refusal"] == ""
    deployment.store.set_static({"spare_slots": 2}, reason="start")

    assert problem_of(ask(client, to=2))[0] is ProblemType.IMPOSSIBLE_MEMBERSHIP
    named = ask(client, retire=[0, 1]).json()
    assert named["refusal"].startswith("found 2 slots in a layer on ranks 2, 3 (without 2 of each)")


def test_drain_that_cordons_do_not_allow_is_refused_with_the_slots(
    deployment: Deployment, client: httpx.Client
) -> None:
    deployment.store.change_live({"cordons": "0:cordon, 1:cordon, 2:cordon"}, reason="full")

    dry, real = ask(client, retire=[3]), ask(client, retire=[3], dry_run=False)

    assert dry.json()["refusal"].startswith("rank 3 (drain): found 0 slots in a layer on no rank")
    assert problem_of(real) == (ProblemType.IMPOSSIBLE_MEMBERSHIP, dry.json()["refusal"])


@pytest.mark.parametrize(
    ("why", "found"),
    [
        ("agent.serve_on is off", "agent.serve_on is off; start all ranks again"),
        (None, "it does not tell that its group can change; start all ranks again"),
    ],
)
def test_ranks_whose_group_cannot_change_refuse_the_operation_and_say_what_to_do(
    deployment: Deployment, client: httpx.Client, why: str | None, found: str
) -> None:
    tell(deployment, why)

    refused = ask(client, to=3, dry_run=False)

    kind, detail = problem_of(refused)
    assert kind is ProblemType.IMPOSSIBLE_MEMBERSHIP
    assert detail.startswith("rank 0 cannot change its group while it serves: ")
    assert found in detail


def test_wanted_rank_that_has_died_is_waited_for_and_can_be_given_up(
    deployment: Deployment, client: httpx.Client
) -> None:
    members_become(deployment, 0, 1, 2)
    info = deployment.store.current_run()
    assert info is not None
    for rank in (0, 1, 2):
        deployment.store.report(rank_report(info.run, rank, **{GROUP_STAYS: ""}))
    assert client.get(PATH).json()["waits"] == "not ready to be admitted: rank 3"

    given_up = ask(client, retire=[3], dry_run=False).json()

    assert given_up["operation"]["ended"] == "done"
    assert client.get(PATH).json()["safe_to_delete"] == [3]


def test_operator_scales_retires_and_follows_with_commands(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    with closing(open_store(path, "test")) as store:
        serving_in(store)

    def run(*words: str) -> tuple[int, str]:
        place = ["--store", str(path), "--deployment", "test"]
        done = CliRunner().invoke(app, [*words, *place])
        return done.exit_code, done.output

    status, text = run("retire", "3")
    assert status == 0, text
    assert "serve afterwards: ranks 0..2" in text
    assert "experts that have to move: 1, 6.0 MB" in text
    assert "--yes carries it out" in text
    assert "settled" in run("membership")[1]
    retire = "retire", "3", "--yes", "--id", "op-7", "--within", "60"
    assert "operation op-7 is open" in run(*retire)[1]
    found = run("membership")[1]
    assert "draining: 3 slots of all layers hold experts on rank 3" in found
    assert re.search(r": open, fails in (5[0-9]|60) s$", found, re.MULTILINE)
    assert run("scale", "--to", "3", "--yes")[0] == 1
    assert "cancelled" in run("cancel-membership", "op-7")[1]
    assert json.loads(run("scale", "--to", "2", "--json")[1])["retires"] == [1, 2]
    assert run("scale", "--to", "1")[0] == 1
    assert run("scale", "--to", "2", "--yes", "--epoch", "4")[0] == 1
    assert run("retire", "x")[0] == 2
