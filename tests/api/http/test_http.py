"""The admin API: its answers, the requests that it accepts, and those that it refuses."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import httpx
import pytest

from api.app import create_app
from api.config.live import live_settings
from api.http.problems import ProblemType
from api.http.service import OF_REFUSAL
from eplb import build_migration
from telemetry.state.live import Control, LiveState
from telemetry.state.runs import REPORT_EVERY_S
from telemetry.state.store import StateStore
from telemetry.state.tasks import Refusal, TaskResult
from tests.support.http import IN_PROCESS, client_of, problem_of
from tests.support.limits import NEVER_S
from tests.support.plan_events import plan_event
from tests.support.rank_reports import rank_report
from tests.support.stores import MemoryStore
from tests.support.two_ranks import FIRST, SECOND, TOPOLOGY, begin_run, serve

EndTasks = Callable[[str, TaskResult], None]
LOOK = {"reason": "look"}
# Of answers that are not JSON, or not JSON alone.
MEDIA_TYPES = {
    "/metrics": ["text/plain"],
    "/api/v1/placements/{generation}/export": [
        "application/json",
        "application/jsonl",
        "application/yaml",
    ],
    "/api/v1/events/stream": ["text/event-stream"],
}


@pytest.fixture
def store() -> Iterator[StateStore]:
    """Two ranks that serve, and one complete window of 80 and 20 tokens."""
    with closing(MemoryStore("d")) as opened:
        begin_run(opened)
        opened.commit(FIRST, expected=None, reason="start")
        serve(opened)
        yield opened


@pytest.fixture
def client(store: StateStore, request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    """A client of a service that waits for a controller where the test has one, and else not."""
    plan_wait_s = NEVER_S if "controller" in request.fixturenames else 0.0
    app = create_app(store, plan_wait_s=plan_wait_s)
    with client_of(app, "/api/v1") as opened:
        yield opened


def ranks_report(store: StateStore, **detail: Any) -> None:
    for rank in range(2):
        # Silent only long after the test.
        now = {"time": time.time(), "step": 7, "generation": 1, REPORT_EVERY_S: NEVER_S}
        store.report(rank_report("a", rank, **now | detail))


def publish_second(store: StateStore) -> None:
    store.publish(build_migration(FIRST, SECOND, TOPOLOGY, plan_id=store.next_plan_id()))


@pytest.fixture
def controller(store: StateStore) -> Iterator[EndTasks]:
    """A controller that ends every task in the state and with the result that the test sets."""
    ending: list[tuple[Any, Any]] = []
    is_stopping = threading.Event()

    def work() -> None:
        version = 0
        while not is_stopping.is_set():
            if ending and (task := store.claim()) is not None:
                state, result = ending[0]
                detail = result.detail | {"request": dict(task.request)}
                store.finish(task.id, state, replace(result, detail=detail))
            version = store.wait(version, NEVER_S)

    thread = threading.Thread(target=work)
    thread.start()
    yield lambda state, result: ending.append((state, result))
    is_stopping.set()
    store.add_event("end of the test", {})  # wakes it
    thread.join()


def test_probes_answer_while_the_store_does_and_report_when_it_does_not(
    client: httpx.Client, store: StateStore
) -> None:
    assert client.get(f"{IN_PROCESS}/livez").json()["status"] == "ok"
    assert client.get(f"{IN_PROCESS}/healthz").json()["detail"].endswith(str(store.version()))

    store.close()

    refused = problem_of(client.get(f"{IN_PROCESS}/healthz"))
    assert refused[0] is ProblemType.STORE_UNAVAILABLE


def test_only_ranks_that_report_and_make_progress_are_ready(
    client: httpx.Client, store: StateStore
) -> None:
    ready = f"{IN_PROCESS}/readyz"
    kind, why = problem_of(client.get(ready))
    assert (kind, "0, 1" in why) == (ProblemType.NOT_READY, True)

    ranks_report(store)
    assert client.get(ready).json()["detail"] == "2 ranks serve, at step 7"

    ranks_report(store, frozen="torn copy")
    kind, why = problem_of(client.get(ready))
    assert (kind, "torn copy" in why) == (ProblemType.NOT_READY, True)


def test_state_load_and_drift_are_those_of_the_store(client: httpx.Client) -> None:
    state, heat = client.get("/state").json(), client.get("/heat").json()
    load = client.get("/load", params={"last": 4}).json()
    drift = client.get("/drift").json()

    assert (state["deployment"], state["run"], state["generation"]) == ("d", "a", 1)
    assert (heat["run"], heat["window"], heat["ranks"]) == ("a", 0, [[1.6, 0.4]])
    assert heat["experts"] == [[1.8, 0.6, 0.6]]
    assert state["last_score"]["measured"] == 1.6
    assert (state["movement"], state["observe"], state["migration"]) == (True, False, None)
    assert (load["tokens"], load["rank_load"]) == ([[[60, 20, 20]]], [[[80, 20]]])
    assert load["windows"][0]["missing_ranks"] == []
    assert drift == {"generation": 1, "overall": None, "layers": None, "noise": None}


def test_imbalance_and_its_rebalances_are_given_over_time(
    client: httpx.Client, store: StateStore
) -> None:
    publish_second(store)
    store.commit(SECOND, expected=1, plan_id=1, reason="drift")

    answer = client.get("/imbalance").json()

    assert [score["contiguous"] for score in answer["windows"]] == [1.6]
    assert [(mark["generation"], mark["reason"]) for mark in answer["rebalances"]] == [(2, "drift")]


def test_placements_are_given_by_generation(client: httpx.Client, store: StateStore) -> None:
    store.commit(SECOND, expected=1, reason="by hand")

    assert client.get("/placement").json()["slot_to_expert"] == [[0, 1, 0, 2]]
    first = client.get("/placement", params={"generation": 1}).json()
    assert (first["slot_to_expert"], first["num_replicas"]) == ([[0, 1, 2, -1]], [0])
    history = client.get("/placements").json()["placements"]
    assert [(line["generation"], line["reason"]) for line in history] == [
        (2, "by hand"),
        (1, "start"),
    ]


def test_rebalances_are_given_newest_first_page_by_page(
    client: httpx.Client, store: StateStore
) -> None:
    for plan_id in (1, 2):
        publish_second(store)
        store.withdraw(plan_id, outcome="aborted", reason="too slow")

    page = client.get("/rebalances", params={"limit": 1}).json()
    rest = client.get("/rebalances", params={"limit": 1, "before": page["next"]}).json()

    assert [one["plan_id"] for one in page["rebalances"] + rest["rebalances"]] == [2, 1]
    assert (page["next"], rest["next"]) == (2, None)
    assert rest["rebalances"][0]["end_reason"] == "too slow"


def test_open_migration_is_shown_with_its_moves_and_is_a_conflict(
    client: httpx.Client, store: StateStore
) -> None:
    store.add_event("plan", plan_event("MOVE", "worth it"))
    publish_second(store)

    plan = client.get("/plan").json()

    assert plan["last_decision"]["reason"] == "worth it"
    assert plan["migration"]["progress"]["num_moves"] == 2
    assert plan["migration"]["moves_by_source"] == {"peer": 1, "same_rank": 1}
    assert plan["migration"]["transactions"][0]["layers"] == [0]
    refused = problem_of(client.post("/rebalances", json=LOOK))
    assert (refused[0], "plan 1" in refused[1]) == (ProblemType.MIGRATION_OPEN, True)


def test_events_are_read_by_time_kind_and_rank(client: httpx.Client, store: StateStore) -> None:
    first = store.latest_events(limit=1)[0].id
    for kind, detail in (
        ("error", {"where": "ranks", "message": "rank 1 died; restarting the ranks of host 0"}),
        ("scrub", {"rank": 1, "result": "ok"}),
        ("scrub", {"rank": 11, "result": "ok"}),
        ("recovery", {"survivors": [0, 1], "reason": "rank 12 is late"}),
        ("note", {"message": "silent ranks: 0-2, 12 for 30 s"}),
    ):
        store.add_event(kind, detail)
    times = [one.time for one in store.events(after=first)]

    def found(**query: object) -> list[int]:
        answer = client.get("/events", params={"after": first, **query})  # type: ignore[arg-type]
        assert answer.status_code == 200, answer.text
        return [one["id"] - first for one in answer.json()["events"]]

    assert found(rank=1) == [1, 2, 4, 5]
    assert found(rank=12) == [4, 5]
    assert found(rank=30) == []
    assert found(kind="scrub") == found(kind="scrub", latest=9) == [2, 3]
    assert found(kind="scrub", rank=11, latest=1) == [3]
    assert found(since=times[0], until=times[-1] + 1) == [1, 2, 3, 4, 5]
    assert found(until=times[0]) == found(since=times[-1] + 1) == []
    page = client.get("/events", params={"kind": "scrub", "limit": 1}).json()
    assert page["next"] == page["events"][0]["id"] == first + 2


# -- what is asked of the controller


@pytest.mark.parametrize(
    ("path", "body", "asked"),
    [
        ("rebalances", {"reason": "look", "policy": "greedy"}, {"dry_run": True}),
        ("rollbacks", {"reason": "bad text", "generation": 3}, {"dry_run": True}),
        ("explanations", {"layer": 0, "expert": 1.0}, {}),  # 1.0 is a whole number of JSON
    ],
)
def test_request_reaches_the_controller_as_a_dry_run_unless_it_says_otherwise(
    client: httpx.Client,
    controller: EndTasks,
    path: str,
    body: dict[str, Any],
    asked: dict[str, Any],
) -> None:
    found = {"decision": "KEEP", "sentences": ["Layer 0, expert 1: 20.0 %"]}
    controller("done", TaskResult(detail=found))

    answer = client.post(f"/{path}", json=body)

    assert answer.status_code == 200
    result = answer.json()["result"]
    assert result["request"] == body | asked
    assert (result["decision"], result["sentences"]) == ("KEEP", found["sentences"])
    assert (result.get("published", False), result.get("plan_id")) == (False, None)


def test_without_an_answer_in_time_the_task_can_be_asked_for(client: httpx.Client) -> None:
    limits = {"link_part": 0.25, "experts_per_transaction": 2}

    answer = client.post("/rebalances", json=LOOK | {"throttle": limits})

    assert answer.status_code == 202
    task = client.get(IN_PROCESS + answer.headers["location"]).json()
    assert (task["kind"], task["state"]) == ("rebalance", "queued")
    assert task["request"]["throttle"] == limits


@pytest.mark.parametrize("refusal", ["", *Refusal])
def test_each_reason_of_the_controller_has_a_problem_type(
    client: httpx.Client, controller: EndTasks, refusal: Refusal | str
) -> None:
    controller("failed", TaskResult("not now", refusal=str(refusal)))

    found = problem_of(client.post("/rebalances", json=LOOK))

    expected = OF_REFUSAL[str(refusal)] if refusal else ProblemType.CONTROLLER_REFUSED
    assert found == (expected, "task 1: not now")
    assert (expected is ProblemType.CONTROLLER_REFUSED) is (refusal == "")


def test_only_dry_runs_are_accepted_while_movement_is_off(
    client: httpx.Client, store: StateStore
) -> None:
    for off in (Control(movement=False), Control(observe=True)):
        store.set_control(off, reason="test")
        move = client.post("/rebalances", json=LOOK | {"dry_run": False})

        assert problem_of(move)[0] is ProblemType.MOVEMENT_OFF
        assert client.post("/rebalances", json=LOOK).status_code == 202


# -- switches and live settings


def switches(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: answer[name] for name in ("movement", "observe", "until")}


def test_switches_are_set_with_a_reason(client: httpx.Client, store: StateStore) -> None:
    paused = client.post("/pause", json={"reason": "maintenance"}).json()
    assert switches(paused) == {"movement": False, "observe": False, "until": None}
    assert (paused["was_moving"], paused["num_reported"]) == (True, None)

    patched = client.patch("/control", json={"reason": "watch", "observe": True}).json()
    assert switches(patched) == {"movement": False, "observe": True, "until": None}

    waited = client.post("/resume", json={"reason": "done", "wait_s": 0.001}).json()
    assert (waited["run"], waited["num_ranks"], waited["num_reported"]) == ("a", 2, 0)
    assert store.control() == Control(movement=True, observe=True)
    reasons = [e.detail["reason"] for e in store.events() if e.kind == "control"]
    assert reasons == ["maintenance", "watch", "done"]


def test_pause_for_a_time_says_until_when(client: httpx.Client, store: StateStore) -> None:
    body = {"reason": "change 4711", "expires_s": 7200}

    paused = client.post("/pause", json=body).json()

    assert paused["until"] == store.live().changes["movement"].time + 7200
    state = client.get("/state").json()
    assert (state["movement"], state["until"]) == (False, paused["until"])
    resumed = client.post("/resume", json={"reason": "done"}).json()
    assert switches(resumed) == {"movement": True, "observe": False, "until": None}


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/pause", {}),
        ("POST", "/resume", {}),
        ("PATCH", "/control", {"observe": True}),
        ("PATCH", "/settings", {"max_moves": 3}),
    ],
)
def test_of_two_changes_at_one_revision_one_is_refused(
    client: httpx.Client, store: StateStore, method: str, path: str, body: dict[str, Any]
) -> None:
    body = body | {"reason": "r"}
    tag = {"If-Match": client.get("/settings").headers["etag"]}

    first = client.request(method, path, json=body, headers=tag)
    second = problem_of(client.request(method, path, json=body, headers=tag))

    assert (first.status_code, first.headers["etag"]) == (200, '"1"')
    assert second[0] is ProblemType.SETTINGS_CHANGED
    assert "at revision 0, found revision 1" in second[1]
    assert store.live().revision == 1
    for later in (first.headers["etag"], "*"):
        done = client.request(method, path, json=body, headers={"If-Match": later})
        assert done.status_code == 200


def setting(answer: httpx.Response, name: str) -> dict[str, Any]:
    (found,) = [one for one in answer.json()["settings"] if one["name"] == name]
    return dict(found)


def test_live_settings_are_shown_with_source_and_revision(
    client: httpx.Client, store: StateStore
) -> None:
    store.set_static({"pay_back_s": 60.0}, reason="start")
    store.change_live({"movement": False}, reason="incident 7")

    answer = client.get("/settings")

    assert (answer.status_code, answer.headers["etag"]) == (200, '"2"')
    assert answer.json()["revision"] == 2
    assert [one["name"] for one in answer.json()["settings"]] == list(live_settings())
    paid, moves = setting(answer, "pay_back_s"), setting(answer, "movement")
    assert (paid["value"], paid["source"], paid["revision"]) == (60.0, "static", None)
    assert (moves["value"], moves["source"], moves["static"]) == (False, "live", None)
    assert (moves["revision"], moves["reason"]) == (2, "incident 7")


def test_live_setting_is_changed_at_its_revision_and_removed(
    client: httpx.Client, store: StateStore
) -> None:
    store.set_static({"pay_back_s": 60.0}, reason="start")
    tag = client.get("/settings").headers["etag"]

    body = {"reason": "less churn", "pay_back_s": 300}
    answer = client.patch("/settings", json=body, headers={"If-Match": tag})

    assert (answer.status_code, answer.headers["etag"]) == (200, '"2"')
    assert setting(answer, "pay_back_s")["value"] == 300.0
    assert store.live().live == {"pay_back_s": 300.0}
    body = {"reason": "as before", "pay_back_s": None}
    client.patch("/settings", json=body, headers={"If-Match": answer.headers["etag"]})
    assert store.live().effective == {"pay_back_s": 60.0}


# -- refusals


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        *(("rollbacks", {"generation": n}, "body.generation") for n in (-1, 2**63, 1.5, "1", True)),
        ("rollbacks", {"generation": None}, "body.generation"),
        *(
            ("explanations", {"layer": 0, "expert": n}, "body.expert")
            for n in (-1, 2**31, 10**30, 1.5, "1", True, None, "NaN")
        ),
        *(
            ("rebalances", {"dry_run": value}, "body.dry_run")
            for value in ("no", "off", "false", 0, 1, None, 0.0, [])
        ),
        ("rebalances", {"throttle": {}}, "the throttle names no limit"),
        ("rebalances", {"throttle": {"link_part": 0}}, "greater than 0"),
        ("rebalances", {"throttle": {"link_part": 1.5}}, "less than or equal to 1"),
        ("rebalances", {"throttle": {"experts_per_transaction": 0}}, "or equal to 1"),
        ("rebalances", {"throttle": {"layers": 1}}, "layers"),
        ("rebalances", {"policy": "best"}, "'best', expected one of: auto"),
        ("rebalances", {"reason": None}, "body.reason"),
        ("rebalances", {"reason": ""}, "body.reason"),
        ("rebalances", {"dryrun": 1}, "body.dryrun"),
        *(("pause", {"expires_s": s}, "body.expires_s") for s in (0, -1, 604_801, "2h", True)),
        ("control", {}, "movement or observe"),
        ("settings", {}, "no setting"),
        ("settings", {"port": 1}, "body.port: "),
        ("settings", {"movement": 0}, "body.movement: "),
        *(("settings", {"plan_windows": n}, "body.plan_windows: ") for n in (True, "4", 65)),
        ("settings", {"pay_back_s": -1}, "body.pay_back_s: "),
        ("settings", {"policy": "best"}, "'best', expected one of: auto"),
    ],
)
def test_body_that_does_not_fit_is_refused_by_key_and_changes_nothing(
    client: httpx.Client, store: StateStore, path: str, body: dict[str, Any], named: str
) -> None:
    before = store.version()
    method, tag = ("PATCH", '"0"') if path in ("control", "settings") else ("POST", '"1"')
    given = {} if path == "explanations" else {"reason": "a test"}

    answer = client.request(method, f"/{path}", json=given | body, headers={"If-Match": tag})

    kind, detail = problem_of(answer)
    assert (kind, named in detail) == (ProblemType.INVALID_REQUEST, True), detail
    assert (store.version(), store.live()) == (before, LiveState())


@pytest.mark.parametrize("tag", [None, "", "0", 'W/"0"'])
def test_settings_change_only_at_a_revision(
    client: httpx.Client, store: StateStore, tag: str | None
) -> None:
    headers = {} if tag is None else {"If-Match": tag}
    body = {"reason": "a test", "observe": True}

    refused = problem_of(client.patch("/settings", json=body, headers=headers))

    missing, malformed = ProblemType.PRECONDITION_REQUIRED, ProblemType.INVALID_REQUEST
    assert refused[0] is (malformed if tag else missing)
    assert refused[1].startswith("header.if-match: " if tag else "found no If-Match, expected the ")
    assert store.live() == LiveState()


@pytest.mark.parametrize("path", ["/livez", "/metrics", "/", "/api/v1/state", "/api/v1/tasks/99"])
def test_head_has_the_status_and_type_of_get_and_no_body(client: httpx.Client, path: str) -> None:
    url = client.base_url.join(path)
    head, get = client.head(url), client.get(url)

    assert (head.status_code, head.content) == (get.status_code, b"")
    assert head.headers["content-type"] == get.headers["content-type"]


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("/livez?x=1", "'x', expected none"),
        ("/metrics?x=1", "'x', expected none"),
        ("/?x=1", "'x', expected none"),
        ("/api/v1/state?x=1", "'x', expected none"),
        ("/api/v1/events?afetr=1", "'afetr', expected one of: after, kind, latest, limit"),
        ("/api/v1/load?last=1&last=2", "['last', 'last'], expected each once"),
        *(
            (f"/api/v1/{path}{number}", str(number) if "?" in path else "")
            for path in ("tasks/", "placement?generation=", "events?after=")
            for number in (2**53, -1, 10**30)  # beyond what a store can hold
        ),
    ],
)
def test_query_that_does_not_fit_is_refused(client: httpx.Client, path: str, named: str) -> None:
    kind, detail = problem_of(client.get(IN_PROCESS + path))

    assert (kind, named in detail) == (ProblemType.INVALID_REQUEST, True), detail


def test_names_of_other_sites_are_not_served(client: httpx.Client) -> None:
    answer = client.get("/state", headers={"Host": "elsewhere.test"})

    assert problem_of(answer)[0] is ProblemType.FOREIGN_HOST
    for known in ("localhost:1", "127.0.0.1", "[::1]:7"):
        assert client.get("/state", headers={"Host": known}).status_code == 200


@pytest.mark.parametrize(
    ("header", "kind"),
    [
        ({"Origin": "https://elsewhere.test"}, ProblemType.FOREIGN_ORIGIN),
        ({"Origin": "http://localhost:1"}, ProblemType.FOREIGN_ORIGIN),
        ({"Origin": "null"}, ProblemType.FOREIGN_ORIGIN),
        ({"Sec-Fetch-Site": "cross-site"}, ProblemType.FOREIGN_ORIGIN),
        ({"Sec-Fetch-Site": "same-site"}, ProblemType.FOREIGN_ORIGIN),
        ({"Content-Type": "text/plain"}, ProblemType.NOT_JSON),
        ({"Origin": IN_PROCESS, "Sec-Fetch-Site": "same-origin"}, None),
    ],
)
def test_page_of_another_site_cannot_change_state_and_the_own_one_can(
    client: httpx.Client, store: StateStore, header: dict[str, str], kind: ProblemType | None
) -> None:
    given = {"Content-Type": "application/json"} | header

    answer = client.post("/pause", content=b'{"reason": "x"}', headers=given)

    assert (kind is None) is (answer.status_code == 200)
    if kind is not None:
        assert problem_of(answer)[0] is kind
    assert store.control().movement is (kind is not None)


def test_unknown_route_and_method_are_answered_with_a_problem(client: httpx.Client) -> None:
    deleted = client.delete("/settings")

    assert problem_of(client.get("/none"))[0] is ProblemType.NOT_FOUND
    assert problem_of(deleted)[0] is ProblemType.METHOD_NOT_ALLOWED
    assert deleted.headers["allow"] == "GET, PATCH"


def test_refusal_does_not_return_the_body(client: httpx.Client) -> None:
    for body in ({"reason": "x" * 60_000}, {"reason": "x", "k" * 60_000: 1}, ["x" * 60_000]):
        assert len(problem_of(client.post("/pause", json=body))[1]) <= 500
    assert len(problem_of(client.get("/" + "x" * 10_000))[1]) <= 500


def test_page_with_its_files_and_the_state_that_it_shows_are_served(client: httpx.Client) -> None:
    page = client.get(f"{IN_PROCESS}/")
    script = client.get(f"{IN_PROCESS}/static/app.js")

    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in page.headers["content-security-policy"]
    assert "static/app.js" in page.text
    assert (script.status_code, "javascript" in script.headers["content-type"]) == (200, True)
    assert client.get("/state").json()["verdict"] == "blind"  # no rank has reported
    assert client.get("/whoami").json()["role"] == "admin"


def test_every_operation_is_documented(client: httpx.Client) -> None:
    paths = client.get("/openapi.json").json()["paths"]

    for path, operations in paths.items():
        for operation in operations.values():
            assert operation["summary"], path
            answers = operation["responses"]
            done = answers.get("200") or answers.get("201") or answers["202"]
            assert all("schema" in one for one in done["content"].values()), path
            assert list(done["content"]) == MEDIA_TYPES.get(path, ["application/json"]), path
            problems = [one for status, one in operation["responses"].items() if status >= "400"]
            assert problems, path
            assert all(list(one["content"]) == ["application/problem+json"] for one in problems)
    assert len(paths) == 45
