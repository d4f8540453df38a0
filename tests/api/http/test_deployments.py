"""Several deployments of one store behind one service: which one a path means, and who may."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

import httpx
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from api.access.audit import Audit
from api.access.keys import AccessKeys
from api.cli.main import app as commands
from api.http.app import create_app
from api.http.deployments.served import Others
from api.http.server import HttpService
from eplb import ModelShape, Placement, Topology
from eplb.errors import StoreError
from eplb.migration.serialisation import model_to_dict, topology_to_dict
from telemetry import deployments_of, open_store
from telemetry.store import LoadStore, RunInfo

MODEL = ModelShape((0,), num_experts=3, top_k=1, hidden=2, intermediate=2)
TOPOLOGY = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=2)
PAUSE = {"reason": "hot rack"}
DEADLINE_S = 30.0
OWN, OTHER = "r1 prefill", "r1/decode"
AT_OTHER = "/deployments/r1%2Fdecode"


def begin(store: LoadStore) -> None:
    """Have a deployment in a store: a run and its placement."""
    run = RunInfo("a", time.time(), model_to_dict(MODEL), topology_to_dict(TOPOLOGY), 1)
    store.begin_run(run)
    first = Placement(np.array([[0, 1, 2, -1]]), num_experts=3, generation=1)
    store.commit(first, expected=None, reason="start")


class Shown:
    """A service on the store of two deployments, which it both shows."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        url = str(folder / "store.sqlite")
        self.folder = folder
        self.open: Callable[[str], LoadStore] = partial(open_store, url)
        self.stores = {name: stack.enter_context(closing(self.open(name))) for name in (OWN, OTHER)}
        for store in self.stores.values():
            begin(store)
        app = create_app(
            self.stores[OWN],
            plan_wait_s=0.0,
            state_dir=folder,
            is_watching=True,
            others=Others(lambda: deployments_of(url), self.open),
        )
        self.service = HttpService(app)
        self.service.start()
        stack.callback(self.service.stop)
        self.client = stack.enter_context(
            httpx.Client(base_url=self.service.url, timeout=DEADLINE_S)
        )


@pytest.fixture
def shown(tmp_path: Path) -> Iterator[Shown]:
    with ExitStack() as stack:
        yield Shown(stack, tmp_path)


def problem_of(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["type"].rpartition("/")[2]


def test_list_has_every_deployment_with_its_verdict_and_path(shown: Shown) -> None:
    own, other = shown.client.get("/api/v1/deployments").json()["deployments"]

    assert (own["name"], own["path"], own["is_default"]) == (
        OWN,
        "/deployments/r1%20prefill/",
        True,
    )
    assert (other["name"], other["path"], other["is_default"]) == (OTHER, f"{AT_OTHER}/", False)
    for line in (own, other):
        state = shown.client.get(f"{line['path']}api/v1/state").json()
        assert (state["deployment"], state["run"]) == (line["name"], "a")
        assert state["verdict"] == line["verdict"] == "blind"  # no rank has reported


def test_change_is_of_the_deployment_of_its_path_and_in_the_audit_under_its_name(
    shown: Shown,
) -> None:
    key = {"idempotency-key": "one"}
    for path in (f"{AT_OTHER}/api/v1/pause", "/api/v1/resume"):
        assert shown.client.post(path, json=PAUSE, headers=key).status_code == 200

    assert not shown.stores[OTHER].control().movement
    assert shown.stores[OWN].control().movement
    found = shown.client.get("/api/v1/audit").json()["entries"]
    assert [(one["deployment"], one["action"], one["outcome"]) for one in found] == [
        (OWN, "POST /api/v1/resume", "200"),
        (OWN, "POST /api/v1/resume", "asked"),
        (OTHER, "POST /api/v1/pause", "200"),
        (OTHER, "POST /api/v1/pause", "asked"),
    ]


def test_idempotency_key_of_one_deployment_is_unused_in_another(shown: Shown) -> None:
    key = {"idempotency-key": "one"}
    for base, is_replayed in (("", False), (AT_OTHER, False), (AT_OTHER, True)):
        answer = shown.client.post(f"{base}/api/v1/pause", json=PAUSE, headers=key)
        assert ("idempotency-replayed" in answer.headers) == is_replayed, base
    assert not shown.stores[OTHER].control().movement


def test_location_of_a_task_is_of_the_deployment_of_the_path(shown: Shown) -> None:
    asked = shown.client.post(f"{AT_OTHER}/api/v1/rebalances", json=PAUSE)

    assert (asked.status_code, asked.headers["location"]) == (202, f"{AT_OTHER}/api/v1/tasks/1")
    assert shown.client.get(asked.headers["location"]).json()["id"] == 1
    assert problem_of(shown.client.get("/api/v1/tasks/1")) == (404, "no-such-task")


def test_page_is_served_below_each_deployment_and_its_files_too(shown: Shown) -> None:
    page = shown.client.get("/").text

    assert shown.client.get(f"{AT_OTHER}/").text == page
    assert shown.client.get(f"{AT_OTHER}/static/app.js").status_code == 200
    led = shown.client.get(AT_OTHER)
    assert (led.status_code, led.headers["location"]) == (307, f"{AT_OTHER}/")


def test_unknown_deployment_has_its_problem_on_every_route_and_leaves_no_trace(
    shown: Shown,
) -> None:
    for path in ("/", "/readyz", "/metrics", "/static/app.js", "/api/v1/state", "/nothing"):
        answer = shown.client.get(f"/deployments/nobody{path}")
        assert problem_of(answer) == (404, "no-such-deployment"), path
    changed = shown.client.post("/deployments/nobody/api/v1/pause", json=PAUSE)
    assert problem_of(changed) == (404, "no-such-deployment")
    assert list(Audit(shown.folder).entries()) == []


@pytest.mark.parametrize(
    "path",
    [
        f"{AT_OTHER}{AT_OTHER}/api/v1/pause",
        f"{AT_OTHER}/../api/v1/pause",
        f"{AT_OTHER}//api/v1/pause",
        f"{AT_OTHER}/api/v1/pause/",
        "/deployments//api/v1/pause",
        "//deployments/x/api/v1/pause",
        "/deployments/r1/decode/api/v1/pause",
        "/api/v1/pause/",
    ],
)
def test_path_trick_around_the_prefix_changes_no_deployment(shown: Shown, path: str) -> None:
    # As it is written: a client would take the dots out.
    target = httpx.URL(shown.service.url).copy_with(raw_path=path.encode())
    answer = shown.client.post(target, json=PAUSE)

    assert answer.status_code == 404
    assert all(store.control().movement for store in shown.stores.values())


@pytest.mark.parametrize("base", ["", AT_OTHER])
@pytest.mark.parametrize(
    "trick", ["../app.py", "%2e%2e/app.py", "..%2fapp.py", "%2fetc%2fpasswd", "..%5capp.py", "%00"]
)
def test_path_trick_reads_no_file_beside_those_of_the_page(
    shown: Shown, base: str, trick: str
) -> None:
    target = httpx.URL(shown.service.url).copy_with(raw_path=f"{base}/static/{trick}".encode())

    assert problem_of(shown.client.get(target)) == (404, "not-found")


def test_lists_of_events_and_tasks_are_read_page_by_page(shown: Shown) -> None:
    store = shown.stores[OTHER]
    tasks = [store.submit("rebalance", {"reason": f"task {number}"}).id for number in range(5)]
    events = [one.id for one in store.events(after=0, limit=100)]
    for name, expected, size in (("tasks", tasks, 2), ("events", events, 1)):
        found, after = list[int](), 0
        while after is not None:
            params = {"after": after, "limit": size}
            page = shown.client.get(f"{AT_OTHER}/api/v1/{name}", params=params).json()
            found += [one["id"] for one in page[name]]
            after = page["next"]
        assert found == expected, name
        whole = {"limit": len(expected)}
        assert shown.client.get(f"{AT_OTHER}/api/v1/{name}", params=whole).json()["next"] is None
    place = ["--service", shown.service.url, "--deployment", OTHER, "--after", str(tasks[1])]
    listed = CliRunner().invoke(commands, ["tasks", "--json", *place])
    assert [one["id"] for one in json.loads(listed.output)["tasks"]] == tasks[2:]


def test_keys_and_roles_hold_below_the_prefix(shown: Shown) -> None:
    keys = AccessKeys(shown.folder)
    roles = ("viewer", "operator", "admin")
    given = {role: {"authorization": f"Bearer {keys.add(role, role)}"} for role in roles}
    settings = {"reason": "r", "plan_windows": 8}

    nobody = shown.client.get("/deployments/nobody/api/v1/state")
    assert problem_of(nobody) == (401, "not-authenticated")
    assert shown.client.get(f"{AT_OTHER}/api/v1/state").status_code == 401
    assert shown.client.get(f"{AT_OTHER}/api/v1/state", headers=given["viewer"]).status_code == 200
    for path, least in (("pause", 1), ("settings", 2)):
        method, body = ("POST", PAUSE) if path == "pause" else ("PATCH", settings)
        for level, role in enumerate(roles):
            headers = given[role] | {"if-match": "*"}
            answer = shown.client.request(
                method, f"{AT_OTHER}/api/v1/{path}", json=body, headers=headers
            )
            expected = 200 if level >= least else 403
            assert answer.status_code == expected, (path, role)


def test_metrics_have_each_deployment_once_and_below_a_prefix_one(shown: Shown) -> None:
    def names(path: str) -> set[str]:
        text = shown.client.get(path).text
        families = list(text_string_to_metric_families(text))
        assert len({one.name for one in families}) == len(families)
        assert text.count("# HELP eplb_verdict ") == 1
        verdicts = next(one for one in families if one.name == "eplb_verdict")
        assert len(verdicts.samples) % 4 == 0
        return {one.labels["deployment"] for one in verdicts.samples}

    assert names("/metrics") == {OWN, OTHER}
    assert names(f"{AT_OTHER}/metrics") == {OTHER}


def test_deployment_that_begins_later_is_shown_without_a_restart(shown: Shown) -> None:
    with closing(shown.open("later")) as store:
        begin(store)
        until = time.monotonic() + DEADLINE_S
        while shown.client.get("/deployments/later/api/v1/state").status_code != 200:
            assert time.monotonic() < until, "the new deployment is not shown"
            threading.Event().wait(0.1)


def test_end_of_the_service_ends_streams_and_readers_of_every_deployment(shown: Shown) -> None:
    threads = {one.name for one in threading.enumerate()}
    assert {"eplb-reader", "eplb-deployments"} <= threads
    with shown.client.stream("GET", f"{AT_OTHER}/api/v1/events/stream") as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("retry")
        shown.service.stop()
        assert all(not line.startswith("data") for line in lines)

    ours = ("eplb-reader", "eplb-deployments", "eplb-events")
    until = time.monotonic() + DEADLINE_S
    while any(one.name in ours for one in threading.enumerate()):
        assert time.monotonic() < until, "a thread is left"
        threading.Event().wait(0.05)
    assert shown.stores[OWN].version() >= 0  # the caller's own store is still open


def test_deployment_whose_store_cannot_be_opened_is_listed_with_the_reason(tmp_path: Path) -> None:
    def broken(name: str) -> LoadStore:
        raise StoreError(f"no store of {name}")

    with ExitStack() as stack:
        store = stack.enter_context(closing(open_store(tmp_path / "store.sqlite", OWN)))
        service = HttpService(create_app(store, others=Others(lambda: ["lost"], broken)))
        service.start()
        stack.callback(service.stop)
        client = stack.enter_context(httpx.Client(base_url=service.url, timeout=DEADLINE_S))
        _, lost = client.get("/api/v1/deployments").json()["deployments"]

        assert (lost["verdict"], lost["reason"]) == ("blind", "no store of lost")
        answer = client.get(f"{lost['path']}api/v1/state")
        assert problem_of(answer) == (503, "store-unavailable")


def test_command_asks_the_deployment_that_it_names(shown: Shown) -> None:
    place = ["--service", shown.service.url, "--deployment", OTHER]

    done = CliRunner().invoke(commands, ["pause", "--reason", "r", *place])
    assert done.exit_code == 0, done.output
    assert not shown.stores[OTHER].control().movement
    assert shown.stores[OWN].control().movement
    unknown = CliRunner().invoke(commands, ["tasks", *place[:-1], "nobody"])
    assert unknown.exit_code == 1
    assert "shows no deployment 'nobody'" in unknown.output
