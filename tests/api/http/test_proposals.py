"""Proposals and If-Match, with a real controller on a SQLite store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import httpx
import pytest

from api.app import create_app
from api.http.problems import ProblemType
from eplb.core.placement import Placement
from telemetry import open_store
from telemetry.state.live import Control
from telemetry.state.store import StateStore
from tests.support.controlled_deployment import EVEN, SKEWED, START, Deployment, planned_by_request
from tests.support.http import client_of, problem_of
from tests.support.limits import NEVER_S

OTHER = Placement(START.slot_to_expert, 4, generation=1)
WHY = {"reason": "hot expert"}
Open = Callable[[], httpx.Client]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StateStore]:
    with closing(open_store(tmp_path / "store.sqlite", "test")) as opened:
        yield opened


@pytest.fixture
def deployment(store: StateStore) -> Iterator[Deployment]:
    with planned_by_request(store) as served:
        yield served


@pytest.fixture
def open_service(store: StateStore) -> Iterator[Open]:
    """Open a service on the store; each call another, as after a restart."""
    with ExitStack() as stack:

        def start() -> httpx.Client:
            app = create_app(store, plan_wait_s=NEVER_S)
            return stack.enter_context(client_of(app, "/api/v1"))

        yield start


def refusal(response: httpx.Response, kind: ProblemType, *named: str) -> None:
    found, detail = problem_of(response)
    assert found is kind
    assert all(one in detail for one in named), detail


def test_proposal_is_made_read_and_carried_out_after_a_restart(
    deployment: Deployment, open_service: Open
) -> None:
    made = open_service().post("/proposals", json=WHY)
    client = open_service()
    listed = client.get("/proposals", params={"state": "open"}).json()["proposals"]

    assert made.status_code == 201, made.text
    proposal = made.json()
    path = f"/proposals/{proposal['id']}"
    assert made.headers["Location"] == f"/api/v1{path}"
    assert [one["id"] for one in listed] == [proposal["id"]]
    assert client.get(path).json() == proposal
    assert (proposal["state"], proposal["by"]) == ("open", "a user of this host")
    assert proposal["imbalance_before"] == pytest.approx(1.6)
    assert len(proposal["move_list"]) == proposal["moves"] > 0
    assert proposal["explanation"][0]["sentences"]
    refusal(client.post(f"{path}/approve", json=WHY), ProblemType.MOVEMENT_OFF)
    deployment.store.set_control(Control(), reason="go on")
    deployment.serve(EVEN)
    stale = client.post(f"{path}/approve", json=WHY, headers={"If-Match": '"7"'})
    refusal(stale, ProblemType.GENERATION_MOVED_ON, '"0", expected "7"')

    tag = client.get("/placement").headers["ETag"]
    approved = client.post(f"{path}/approve", json=WHY, headers={"If-Match": tag})

    assert approved.status_code == 200, approved.text
    migration = deployment.swap()
    assert approved.json()["result"]["plan_id"] == migration.plan_id
    assert migration.target.slot_to_expert.tolist() == proposal["slot_to_expert"]
    ended = client.get(path).json()
    assert (ended["state"], ended["plan_id"]) == ("approved", migration.plan_id)
    assert ended["plan_end"]["outcome"] == "committed"
    again = client.post(f"{path}/approve", json=WHY)
    refusal(again, ProblemType.PROPOSAL_ENDED, "approved (hot expert)")


def test_proposal_that_loses_by_the_load_of_now_is_carried_out_once_accepted(
    deployment: Deployment, open_service: Open
) -> None:
    client = open_service()
    path = f"/proposals/{client.post('/proposals', json=WHY).json()['id']}"
    deployment.store.set_control(Control(), reason="go on")
    deployment.serve(SKEWED[::-1], windows=64)

    refused = client.post(f"{path}/approve", json=WHY)
    state = client.get(path).json()["state"]
    accepted = client.post(f"{path}/approve", json=WHY | {"accept_loss": True})

    refusal(refused, ProblemType.LOSES, "by the load of now", "saves -", "costs 100 ms")
    assert state == "open"
    assert accepted.json()["result"]["published"] is True


def test_proposal_that_is_not_open_is_refused(
    deployment: Deployment, open_service: Open, store: StateStore
) -> None:
    client = open_service()
    first, second = (client.post("/proposals", json=WHY).json()["id"] for _ in range(2))
    page = client.get("/proposals", params={"limit": 1}).json()
    rest = client.get("/proposals", params={"limit": 1, "before": page["next"]}).json()
    assert [one["id"] for one in page["proposals"] + rest["proposals"]] == [second, first]
    assert (page["next"], rest["next"]) == (second, None)

    rejected = client.post(f"/proposals/{first}/reject", json={"reason": "not tonight"})
    store.commit(OTHER, expected=0, reason="by hand")

    assert rejected.json()["state"] == "rejected"
    for act in ("approve", "reject"):
        closed = client.post(f"/proposals/{first}/{act}", json=WHY)
        refusal(closed, ProblemType.PROPOSAL_ENDED, f"{first} is rejected (not tonight)")
        stale = client.post(f"/proposals/{second}/{act}", json=WHY)
        refusal(stale, ProblemType.BASE_MOVED_ON, "generation 1", "expected generation 0")
        missing = client.post(f"/proposals/99/{act}", json=WHY)
        refusal(missing, ProblemType.NO_SUCH_PROPOSAL, "99")
    assert store.published() is None


@pytest.mark.parametrize(
    ("path", "body"), [("rebalances", WHY), ("rollbacks", WHY | {"generation": 0})]
)
def test_change_with_a_stale_tag_is_refused_before_it_is_a_task(
    store: StateStore, open_service: Open, path: str, body: dict[str, object]
) -> None:
    store.commit(START, expected=None, reason="start")

    refused = open_service().post(f"/{path}", json=body, headers={"If-Match": '"3"'})

    refusal(refused, ProblemType.GENERATION_MOVED_ON, '"0", expected "3"')
    assert store.tasks("queued") == []
