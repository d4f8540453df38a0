"""Several deployments of one store behind one service: which one a path means, and who may."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from api.access.audit import Audit
from api.access.keys import AccessKeys
from api.app import create_app
from api.cli.main import app as commands
from api.http import deployments
from api.http.deployments import Others
from api.http.problems import ProblemType
from eplb.errors import StoreError
from telemetry.state.store import StateStore
from tests.support.http import IN_PROCESS, client_of, client_on, problem_of, serving
from tests.support.stores import MemoryStore
from tests.support.two_ranks import FIRST, begin_run

PAUSE = {"reason": "hot rack"}
OWN, OTHER = "r1 prefill", "r1/decode"
AT_OTHER = "/deployments/r1%2Fdecode"


class Shown:
    """Two deployments, and a service that shows both."""

    def __init__(self, folder: Path, **others: Any) -> None:
        self.folder, self.stores = folder, dict[str, StateStore]()
        for name in (OWN, OTHER):
            self.begin(name)
        self.app = create_app(
            self.stores[OWN],
            plan_wait_s=0.0,
            state_dir=folder,
            others=Others(lambda: list(self.stores), self.stores.__getitem__),
            **others,
        )

    def begin(self, name: str) -> None:
        """Have a deployment in the store: a run and its placement."""
        store = MemoryStore(name)
        begin_run(store)
        store.commit(FIRST, expected=None, reason="start")
        self.stores[name] = store

    @contextmanager
    def opened(self) -> Iterator[Shown]:
        with client_of(self.app) as self.client:
            yield self


@pytest.fixture
def shown(tmp_path: Path) -> Iterator[Shown]:
    with Shown(tmp_path).opened() as opened:
        yield opened


def kind_of(answer: httpx.Response) -> ProblemType:
    return problem_of(answer)[0]


def test_list_has_every_deployment_with_its_verdict_and_path(shown: Shown) -> None:
    own, other = shown.client.get("/api/v1/deployments").json()["deployments"]

    found = [(one["name"], one["path"], one["is_default"]) for one in (own, other)]
    assert found[0] == (OWN, "/deployments/r1%20prefill/", True)
    assert found[1] == (OTHER, f"{AT_OTHER}/", False)
    for line in (own, other):
        state = shown.client.get(f"{line['path']}api/v1/state").json()
        assert (state["deployment"], state["run"]) == (line["name"], "a")
        assert state["verdict"] == line["verdict"] == "blind"  # no rank has reported


def test_change_is_of_the_deployment_of_its_path_and_in_the_audit_under_its_name(
    shown: Shown,
) -> None:
    key = {"idempotency-key": "one"}  # of one deployment: unused in another
    for path, is_replayed in (
        (f"{AT_OTHER}/api/v1/pause", False),
        ("/api/v1/resume", False),
        (f"{AT_OTHER}/api/v1/pause", True),
    ):
        answer = shown.client.post(path, json=PAUSE, headers=key)
        assert answer.status_code == 200
        assert ("idempotency-replayed" in answer.headers) == is_replayed, path

    assert not shown.stores[OTHER].control().movement
    assert shown.stores[OWN].control().movement
    found = shown.client.get("/api/v1/audit").json()["entries"]
    assert [(one["deployment"], one["action"], one["outcome"]) for one in found] == [
        (OWN, "POST /api/v1/resume", "200"),
        (OWN, "POST /api/v1/resume", "asked"),
        (OTHER, "POST /api/v1/pause", "200"),
        (OTHER, "POST /api/v1/pause", "asked"),
    ]


def test_location_of_a_task_is_of_the_deployment_of_the_path(shown: Shown) -> None:
    asked = shown.client.post(f"{AT_OTHER}/api/v1/rebalances", json=PAUSE)

    assert (asked.status_code, asked.headers["location"]) == (202, f"{AT_OTHER}/api/v1/tasks/1")
    assert shown.client.get(asked.headers["location"]).json()["id"] == 1
    assert kind_of(shown.client.get("/api/v1/tasks/1")) is ProblemType.NO_SUCH_TASK


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
        assert kind_of(answer) is ProblemType.NO_SUCH_DEPLOYMENT, path
    changed = shown.client.post("/deployments/nobody/api/v1/pause", json=PAUSE)
    assert kind_of(changed) is ProblemType.NO_SUCH_DEPLOYMENT
    assert list(Audit(shown.folder).entries()) == []


TRICKS = ("../app.py", "%2e%2e/app.py", "..%2fapp.py", "%2fetc%2fpasswd", "..%5capp.py", "%00")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", f"{AT_OTHER}{AT_OTHER}/api/v1/pause"),
        ("POST", f"{AT_OTHER}/../api/v1/pause"),
        ("POST", f"{AT_OTHER}//api/v1/pause"),
        ("POST", f"{AT_OTHER}/api/v1/pause/"),
        ("POST", "/deployments//api/v1/pause"),
        ("POST", "//deployments/x/api/v1/pause"),
        ("POST", "/deployments/r1/decode/api/v1/pause"),
        ("POST", "/api/v1/pause/"),
        *(("GET", f"{base}/static/{trick}") for base in ("", AT_OTHER) for trick in TRICKS),
    ],
)
def test_path_trick_changes_no_deployment_and_reads_no_other_file(
    shown: Shown, method: str, path: str
) -> None:
    # As it is written: a client would take the dots out.
    target = httpx.URL(IN_PROCESS).copy_with(raw_path=path.encode())
    answer = shown.client.request(method, target, json=PAUSE if method == "POST" else None)

    assert answer.status_code == 404
    assert all(store.control().movement for store in shown.stores.values())


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


def test_keys_and_roles_hold_below_the_prefix(shown: Shown) -> None:
    key = {"authorization": f"Bearer {AccessKeys(shown.folder).add('alice', 'viewer', force=True)}"}

    nobody = shown.client.get("/deployments/nobody/api/v1/state")
    assert kind_of(nobody) is ProblemType.NOT_AUTHENTICATED
    assert shown.client.get(f"{AT_OTHER}/api/v1/state").status_code == 401
    assert shown.client.get(f"{AT_OTHER}/api/v1/state", headers=key).status_code == 200
    refused = shown.client.post(f"{AT_OTHER}/api/v1/pause", json=PAUSE, headers=key)
    assert kind_of(refused) is ProblemType.ROLE_TOO_LOW


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


def test_deployment_that_begins_later_is_shown_without_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deployments, "LOOK_S", 0.01)
    with Shown(tmp_path).opened() as shown:
        shown.begin("later")
        while shown.client.get("/deployments/later/api/v1/state").status_code != 200:
            pass


def test_end_of_the_service_ends_streams_and_readers_of_every_deployment(tmp_path: Path) -> None:
    shown = Shown(tmp_path, is_watching=True)
    with (
        serving(shown.app) as service,
        client_on(service) as client,
        client.stream("GET", f"{AT_OTHER}/api/v1/events/stream") as stream,
    ):
        ours = ("eplb-reader", "eplb-deployments")
        threads = [one for one in threading.enumerate() if one.name in ours]
        assert {"eplb-reader", "eplb-deployments"} <= {one.name for one in threads}
        lines = stream.iter_lines()
        assert next(lines).startswith("retry")
        service.stop()
        assert all(not line.startswith("data") for line in lines)

    for thread in threads:
        thread.join()
    assert shown.stores[OWN].version() >= 0  # the caller's own store is still open


def test_deployment_whose_store_cannot_be_opened_is_listed_with_the_reason() -> None:
    def broken(name: str) -> StateStore:
        raise StoreError(f"no store of {name}")

    app = create_app(MemoryStore(OWN), others=Others(lambda: ["lost"], broken))
    with client_of(app) as client:
        _, lost = client.get("/api/v1/deployments").json()["deployments"]

        assert (lost["verdict"], lost["reason"]) == ("blind", "no store of lost")
        answer = client.get(f"{lost['path']}api/v1/state")
        assert kind_of(answer) is ProblemType.STORE_UNAVAILABLE


def test_command_asks_the_deployment_that_it_names(tmp_path: Path) -> None:
    shown = Shown(tmp_path)
    with ExitStack() as stack:
        service = stack.enter_context(serving(shown.app))

        def run(deployment: str, *words: str) -> tuple[int, str]:
            place = ["--service", service.url, "--deployment", deployment]
            done = CliRunner().invoke(commands, [*words, *place])
            return done.exit_code, done.output

        assert run(OTHER, "pause", "--reason", "r", "--wait", "0")[0] == 0
        assert not shown.stores[OTHER].control().movement
        assert shown.stores[OWN].control().movement
        ids = [shown.stores[OTHER].submit("rebalance", PAUSE).id for _ in range(3)]
        listed = json.loads(run(OTHER, "tasks", "--json", "--after", str(ids[0]))[1])["tasks"]
        assert [one["id"] for one in listed] == ids[1:]
        status, text = run("nobody", "tasks")
        assert (status, "'nobody'" in text) == (1, True)
