"""The admin API over a real port: answers, refusals in words, a service that starts and ends."""

import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from api.config.addresses import loopback_address
from api.config.live import live_settings
from api.http.app import create_app
from api.http.limits import DEFAULT_LIMITS
from api.http.problems import OF_REFUSAL, ProblemType
from api.http.server import HttpService
from eplb import LoadSample, ModelShape, Placement, Topology, build_migration
from eplb.errors import ConfigError
from eplb.migration.serialisation import model_to_dict, topology_to_dict
from telemetry.live import LiveSettings, LiveState
from telemetry.refusals import Refusal
from telemetry.store import Control, RunInfo, TaskResult
from telemetry.stores.memory import MemoryStore
from tests.support.certificates import Authority
from tests.support.rank_reports import rank_report

MODEL = ModelShape((0,), num_experts=3, top_k=1, hidden=2, intermediate=2)
TOPOLOGY = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=2)
EndTasks = Callable[[str, TaskResult], None]
FIRST = Placement(np.array([[0, 1, 2, -1]]), num_experts=3, generation=1)
SECOND = Placement(np.array([[0, 1, 0, 2]]), num_experts=3, generation=2)
DEADLINE_S = 10.0


# Of answers that are not JSON, or not JSON alone.
MEDIA_TYPES = {
    "/metrics": ["text/plain"],
    "/api/v1/load/matrix": ["application/json", "application/x-npy", "text/csv"],
    "/api/v1/placements/{generation}/export": [
        "application/json",
        "application/jsonl",
        "application/yaml",
    ],
    "/api/v1/events/stream": ["text/event-stream"],
}


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    """Two ranks that serve, and one complete window of 80 and 20 tokens."""
    opened = MemoryStore("d")
    model, topology = model_to_dict(MODEL), topology_to_dict(TOPOLOGY)
    opened.begin_run(RunInfo("a", 0.0, model, topology, window_steps=1))
    opened.commit(FIRST, expected=None, reason="start")
    for rank, tokens in enumerate(([60, 20], [20, 0])):
        held = FIRST.slot_to_expert[:, TOPOLOGY.slots_on(rank)]
        load = np.array([tokens])
        opened.append([LoadSample("d", "a", rank, 0, 0.0, 0, 0, "mixed", 1, held, load)])
    yield opened
    opened.close()


@pytest.fixture
def client(store: MemoryStore, request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    """A service that waits for a controller where the test has one, and else for none."""
    plan_wait_s = DEADLINE_S if "controller" in request.fixturenames else 0.0
    service = HttpService(create_app(store, plan_wait_s=plan_wait_s, probe_wait_s=DEADLINE_S))
    service.start()
    with httpx.Client(base_url=service.url, timeout=DEADLINE_S) as opened:
        yield opened
    service.stop()


def ranks_report(store: MemoryStore, **detail: Any) -> None:
    for rank in range(2):
        now = {"time": time.time(), "step": 7, "generation": 1}
        store.report(rank_report("a", rank, **now | detail))


def publish_second(store: MemoryStore) -> None:
    store.publish(build_migration(FIRST, SECOND, TOPOLOGY, plan_id=store.next_plan_id()))


@pytest.fixture
def controller(store: MemoryStore) -> Iterator[EndTasks]:
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
            version = store.wait(version, 0.05)

    thread = threading.Thread(target=work)
    thread.start()
    yield lambda state, result: ending.append((state, result))
    is_stopping.set()
    thread.join(DEADLINE_S)


def refusal(response: httpx.Response, status: int) -> str:
    assert response.status_code == status
    assert response.headers["content-type"] == "application/problem+json"
    problem = response.json()
    assert problem["status"] == status
    return str(problem["detail"])


def test_livez_and_healthz_answer_while_the_store_does(client: httpx.Client) -> None:
    assert client.get("/livez").json()["status"] == "ok"
    assert client.get("/healthz").json()["detail"].startswith("the store answers, at version")


def test_silent_ranks_are_not_ready_and_reporting_ones_are(
    client: httpx.Client, store: MemoryStore
) -> None:
    assert refusal(client.get("/readyz"), 503).startswith("silent ranks: 0, 1, expected a report")

    ranks_report(store)

    assert client.get("/readyz").json()["detail"] == "2 ranks serve, at step 7"


def test_ranks_that_make_no_progress_are_not_ready(
    client: httpx.Client, store: MemoryStore
) -> None:
    ranks_report(store, progress_age_s=45.0)

    assert refusal(client.get("/readyz"), 503).startswith("no progress for 45.")


def test_state_is_everything_at_a_glance(client: httpx.Client) -> None:
    state = client.get("/api/v1/state").json()

    assert (state["deployment"], state["run"], state["generation"]) == ("d", "a", 1)
    assert state["heatmap"] == [[1.6, 0.4]]
    assert state["last_score"]["measured"] == 1.6
    assert (state["movement"], state["observe"], state["migration"]) == (True, False, None)


def test_load_is_given_by_expert_and_by_rank(client: httpx.Client) -> None:
    load = client.get("/api/v1/load", params={"last": 4}).json()

    assert load["tokens"] == [[[60, 20, 20]]]
    assert load["rank_load"] == [[[80, 20]]]
    assert load["windows"][0]["missing_ranks"] == []


def test_imbalance_and_its_rebalances_are_given_over_time(
    client: httpx.Client, store: MemoryStore
) -> None:
    publish_second(store)
    store.commit(SECOND, expected=1, plan_id=1, reason="drift")

    answer = client.get("/api/v1/imbalance").json()

    assert [score["contiguous"] for score in answer["windows"]] == [1.6]
    assert [(mark["generation"], mark["reason"]) for mark in answer["rebalances"]] == [(2, "drift")]


def test_drift_of_a_first_placement_is_not_known(client: httpx.Client) -> None:
    found = client.get("/api/v1/drift").json()

    assert found == {"generation": 1, "overall": None, "layers": None, "noise": None}


def test_placements_are_given_by_generation(client: httpx.Client, store: MemoryStore) -> None:
    store.commit(SECOND, expected=1, reason="by hand")

    assert client.get("/api/v1/placement").json()["slot_to_expert"] == [[0, 1, 0, 2]]
    first = client.get("/api/v1/placement", params={"generation": 1}).json()
    assert (first["slot_to_expert"], first["num_replicas"]) == ([[0, 1, 2, -1]], [0])
    history = client.get("/api/v1/placements").json()["placements"]
    assert [(line["generation"], line["reason"]) for line in history] == [
        (2, "by hand"),
        (1, "start"),
    ]
    missing = client.get("/api/v1/placement", params={"generation": 9})
    assert refusal(missing, 404) == "the store holds no placement that is generation 9"


def test_rebalances_are_given_newest_first_page_by_page(
    client: httpx.Client, store: MemoryStore
) -> None:
    for plan_id in (1, 2):
        publish_second(store)
        store.withdraw(plan_id, outcome="aborted", reason="too slow")

    page = client.get("/api/v1/rebalances", params={"limit": 1}).json()
    rest = client.get("/api/v1/rebalances", params={"limit": 1, "before": page["next"]}).json()

    assert [one["plan_id"] for one in page["rebalances"] + rest["rebalances"]] == [2, 1]
    assert (page["next"], rest["next"]) == (2, None)
    assert rest["rebalances"][0]["end_reason"] == "too slow"


def test_open_migration_is_shown_with_its_moves(client: httpx.Client, store: MemoryStore) -> None:
    store.add_event("plan", {"decision": "MOVE", "reason": "worth it", "generation": 1})
    publish_second(store)

    plan = client.get("/api/v1/plan").json()

    assert plan["last_decision"]["reason"] == "worth it"
    assert plan["migration"]["progress"]["num_moves"] == 2
    assert plan["migration"]["moves_by_source"] == {"peer": 1, "same_rank": 1}
    assert plan["migration"]["transactions"][0]["layers"] == [0]


def test_events_are_read_on_from_an_id(client: httpx.Client, store: MemoryStore) -> None:
    last = client.get("/api/v1/events").json()["events"][-1]["id"]
    store.add_event("error", {"where": "rank 1", "message": "lost"})

    (event,) = client.get("/api/v1/events", params={"after": last}).json()["events"]

    assert (event["kind"], event["detail"]["message"]) == ("error", "lost")


def test_rebalance_is_a_dry_run_by_default(client: httpx.Client, controller: EndTasks) -> None:
    controller("done", TaskResult(detail={"decision": "KEEP"}))

    answer = client.post("/api/v1/rebalances", json={"reason": "look", "policy": "greedy"})

    assert answer.status_code == 200
    result = answer.json()["result"]
    assert result["decision"] == "KEEP"
    assert result["request"] == {"reason": "look", "policy": "greedy", "dry_run": True}


def test_rollback_is_a_dry_run_by_default(client: httpx.Client, controller: EndTasks) -> None:
    controller("done", TaskResult(detail={"decision": "MOVE"}))

    answer = client.post("/api/v1/rollbacks", json={"reason": "bad text", "generation": 3})

    assert answer.status_code == 200
    result = answer.json()["result"]
    assert (result["published"], result["plan_id"]) == (False, None)
    assert result["request"] == {"reason": "bad text", "generation": 3, "dry_run": True}


@pytest.mark.parametrize("generation", [-1, 2**63, 1.5, "1", True, None])
def test_rollback_to_no_generation_is_refused(
    client: httpx.Client, store: MemoryStore, generation: object
) -> None:
    answer = client.post("/api/v1/rollbacks", json={"reason": "x", "generation": generation})

    assert answer.status_code == 422
    assert store.task(1) is None


def test_explanation_is_asked_of_the_controller(client: httpx.Client, controller: EndTasks) -> None:
    sentences = ["Layer 0, expert 1: 20.0% of the layer's tokens."]
    controller("done", TaskResult(detail={"sentences": sentences}))

    answer = client.post("/api/v1/explanations", json={"layer": 0, "expert": 1})

    assert answer.status_code == 200
    result = answer.json()["result"]
    assert result["request"] == {"layer": 0, "expert": 1}
    assert result["sentences"][0].startswith("Layer 0, expert 1")


@pytest.mark.parametrize("expert", [-1, 2**31, 10**30, 1.5, "1", True, None, "NaN"])
def test_expert_that_is_no_index_is_refused(
    client: httpx.Client, store: MemoryStore, expert: object
) -> None:
    answer = client.post("/api/v1/explanations", json={"layer": 0, "expert": expert})

    assert answer.status_code == 422
    assert store.task(1) is None


def test_whole_number_with_a_point_is_an_index(client: httpx.Client) -> None:
    answer = client.post("/api/v1/explanations", json={"layer": 0, "expert": 1.0})

    assert answer.json()["request"] == {"layer": 0, "expert": 1}


def test_without_an_answer_in_time_the_task_can_be_asked_for(
    client: httpx.Client, store: MemoryStore
) -> None:
    answer = client.post("/api/v1/rebalances", json={"reason": "look"})

    assert answer.status_code == 202
    task = client.get(answer.headers["location"]).json()
    assert (task["kind"], task["state"]) == ("rebalance", "queued")
    assert refusal(client.get("/api/v1/tasks/99"), 404) == "there is no task 99"


def test_refusal_by_the_controller_is_a_conflict(
    client: httpx.Client, controller: EndTasks
) -> None:
    controller("failed", TaskResult("no complete window yet"))

    answer = client.post("/api/v1/rebalances", json={"reason": "look"})

    assert refusal(answer, 409) == "task 1: no complete window yet"


@pytest.mark.parametrize("refusal_", list(Refusal))
def test_each_reason_of_the_controller_has_a_problem_type(
    client: httpx.Client, controller: EndTasks, refusal_: Refusal
) -> None:
    controller("failed", TaskResult("not now", refusal=refusal_.value))

    answer = client.post("/api/v1/rebalances", json={"reason": "look"})

    kind = OF_REFUSAL[refusal_.value]
    assert kind is not ProblemType.CONTROLLER_REFUSED
    assert refusal(answer, kind.status) == "task 1: not now"
    assert answer.json()["type"] == kind.uri


@pytest.mark.parametrize(
    ("throttle", "expected"),
    [
        ({}, "the throttle names no limit"),
        ({"link_part": 0}, "greater than 0"),
        ({"link_part": 1.5}, "less than or equal to 1"),
        ({"experts_per_transaction": 0}, "greater than or equal to 1"),
        ({"layers": 1}, "extra inputs are not permitted"),
    ],
)
def test_throttle_out_of_range_is_refused(
    client: httpx.Client, throttle: dict[str, float], expected: str
) -> None:
    answer = client.post("/api/v1/rebalances", json={"reason": "now", "throttle": throttle})

    assert expected in refusal(answer, 422)


def test_throttle_of_a_request_is_stored_with_its_task(
    client: httpx.Client, store: MemoryStore
) -> None:
    limits = {"link_part": 0.25, "experts_per_transaction": 2}
    asked = client.post("/api/v1/rebalances", json={"reason": "now", "throttle": limits})

    assert asked.status_code == 202
    assert asked.json()["request"]["throttle"] == limits


def test_only_dry_runs_are_accepted_while_movement_is_off(
    client: httpx.Client, store: MemoryStore
) -> None:
    store.set_control(Control(movement=False), reason="test")

    move = client.post("/api/v1/rebalances", json={"reason": "now", "dry_run": False})

    assert refusal(move, 409) == "movement is off, expected it on; a dry run is possible"
    assert client.post("/api/v1/rebalances", json={"reason": "look"}).status_code == 202


def test_open_migration_is_a_conflict(client: httpx.Client, store: MemoryStore) -> None:
    publish_second(store)

    answer = client.post("/api/v1/rebalances", json={"reason": "look"})

    assert refusal(answer, 409).startswith("the migration of plan 1 is open, expected it committed")


def test_unknown_policy_is_refused_with_the_known_ones(client: httpx.Client) -> None:
    answer = client.post("/api/v1/rebalances", json={"reason": "look", "policy": "best"})

    assert refusal(answer, 422).startswith("unknown policy 'best', expected one of: auto")


def test_switches_are_set_with_a_reason(client: httpx.Client, store: MemoryStore) -> None:
    paused = client.post("/api/v1/pause", json={"reason": "maintenance"}).json()
    assert paused == {"movement": False, "observe": False, "until": None}

    patched = client.patch("/api/v1/control", json={"reason": "watch", "observe": True}).json()
    assert patched == {"movement": False, "observe": True, "until": None}

    client.post("/api/v1/resume", json={"reason": "done"})
    assert store.control() == Control(movement=True, observe=True)
    reasons = [e.detail["reason"] for e in store.events() if e.kind == "control"]
    assert reasons == ["maintenance", "watch", "done"]


def test_pause_for_a_time_says_until_when(client: httpx.Client, store: MemoryStore) -> None:
    body = {"reason": "change 4711", "expires_s": 7200}

    paused = client.post("/api/v1/pause", json=body).json()

    assert paused["until"] == store.live().changes["movement"].time + 7200
    state = client.get("/api/v1/state").json()
    assert (state["movement"], state["until"]) == (False, paused["until"])
    resumed = client.post("/api/v1/resume", json={"reason": "done"}).json()
    assert resumed == {"movement": True, "observe": False, "until": None}


@pytest.mark.parametrize("expires_s", [0, -1, 604_801, "2h", True])
def test_impossible_expiry_of_a_pause_is_refused(
    client: httpx.Client, store: MemoryStore, expires_s: object
) -> None:
    answer = client.post("/api/v1/pause", json={"reason": "r", "expires_s": expires_s})

    assert "body.expires_s" in refusal(answer, 422)
    assert store.live() == LiveState()


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/api/v1/pause", {}),
        ("POST", "/api/v1/resume", {}),
        ("PATCH", "/api/v1/control", {"observe": True}),
    ],
)
def test_of_two_changes_of_switches_at_one_revision_one_is_refused(
    client: httpx.Client, store: MemoryStore, method: str, path: str, body: dict[str, Any]
) -> None:
    body = body | {"reason": "r"}
    tag = {"If-Match": client.get("/api/v1/settings").headers["etag"]}

    first = client.request(method, path, json=body, headers=tag)
    second = client.request(method, path, json=body, headers=tag)

    assert (first.status_code, first.headers["etag"]) == (200, '"1"')
    assert "at revision 0, found revision 1" in refusal(second, 412)
    assert store.live().revision == 1
    for later in (first.headers["etag"], "*"):
        done = client.request(method, path, json=body, headers={"If-Match": later})
        assert done.status_code == 200


# -- live settings


def setting(answer: httpx.Response, name: str) -> dict[str, Any]:
    (found,) = [one for one in answer.json()["settings"] if one["name"] == name]
    return dict(found)


def test_live_settings_are_shown_with_source_and_revision(
    client: httpx.Client, store: MemoryStore
) -> None:
    store.set_static(LiveSettings(pay_back_s=60.0), reason="start")
    store.change_live({"movement": False}, reason="incident 7")

    answer = client.get("/api/v1/settings")

    assert (answer.status_code, answer.headers["etag"]) == (200, '"2"')
    assert answer.json()["revision"] == 2
    assert [one["name"] for one in answer.json()["settings"]] == list(live_settings())
    paid, moves = setting(answer, "pay_back_s"), setting(answer, "movement")
    assert (paid["value"], paid["source"], paid["revision"]) == (60.0, "static", None)
    assert (moves["value"], moves["source"], moves["static"]) == (False, "live", None)
    assert (moves["revision"], moves["reason"]) == (2, "incident 7")


def test_refused_method_names_those_of_all_routes_of_the_path(client: httpx.Client) -> None:
    answer = client.delete("/api/v1/settings")

    assert refusal(answer, 405).startswith("DELETE /api/v1/settings: ")
    assert answer.headers["allow"] == "GET, PATCH"


def test_live_setting_is_changed_at_its_revision_and_removed(
    client: httpx.Client, store: MemoryStore
) -> None:
    store.set_static(LiveSettings(pay_back_s=60.0), reason="start")
    tag = client.get("/api/v1/settings").headers["etag"]

    body = {"reason": "less churn", "pay_back_s": 300}
    answer = client.patch("/api/v1/settings", json=body, headers={"If-Match": tag})

    assert (answer.status_code, answer.headers["etag"]) == (200, '"2"')
    assert setting(answer, "pay_back_s")["value"] == 300.0
    assert store.live().live == LiveSettings(pay_back_s=300.0)
    body = {"reason": "as before", "pay_back_s": None}
    client.patch("/api/v1/settings", json=body, headers={"If-Match": answer.headers["etag"]})
    assert store.live().effective == LiveSettings(pay_back_s=60.0)


def test_second_change_at_the_same_revision_is_refused(
    client: httpx.Client, store: MemoryStore
) -> None:
    body = {"reason": "first", "max_moves": 3}
    first = client.patch("/api/v1/settings", json=body, headers={"If-Match": '"0"'})
    second = client.patch("/api/v1/settings", json=body, headers={"If-Match": '"0"'})

    assert first.status_code == 200
    assert refusal(second, 412).endswith("at revision 0, found revision 1: read them again")
    any_revision = client.patch("/api/v1/settings", json=body, headers={"If-Match": "*"})
    assert any_revision.headers["etag"] == '"2"'


@pytest.mark.parametrize(
    ("body", "tag", "status", "detail"),
    [
        ({"observe": True}, None, 422, "header.if-match: field required"),
        ({"observe": True}, "0", 422, "header.if-match: string should match pattern"),
        ({"observe": True}, 'W/"0"', 422, "header.if-match: string should match pattern"),
        ({}, '"0"', 422, "the body names no setting, expected one or more beside the reason"),
        ({"port": 1}, '"0"', 422, "body.port: extra inputs are not permitted, found 1"),
        ({"movement": 0}, '"0"', 422, "body.movement: input should be a valid boolean, found 0"),
        (
            {"plan_windows": True},
            '"0"',
            422,
            "body.plan_windows: value error, expected a whole number",
        ),
        ({"plan_windows": "4"}, '"0"', 422, "body.plan_windows: value error, expected a whole"),
        ({"plan_windows": 65}, '"0"', 422, "body.plan_windows: input should be less than or"),
        ({"pay_back_s": -1}, '"0"', 422, "body.pay_back_s: input should be greater than or"),
        ({"policy": "best"}, '"0"', 422, "unknown policy 'best', expected one of: auto"),
    ],
)
def test_unusable_change_of_live_settings_is_refused(
    client: httpx.Client,
    store: MemoryStore,
    body: dict[str, Any],
    tag: str | None,
    status: int,
    detail: str,
) -> None:
    headers = {} if tag is None else {"If-Match": tag}

    answer = client.patch("/api/v1/settings", json=body | {"reason": "a test"}, headers=headers)

    assert refusal(answer, status).startswith(detail)
    assert store.live() == LiveState()


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        ({}, "body.reason: field required"),
        ({"reason": ""}, "body.reason: string should have at least 1 character, found ''"),
        ({"reason": "x", "dryrun": 1}, "body.dryrun: extra inputs are not permitted, found 1"),
    ],
)
def test_body_that_does_not_fit_is_refused_by_key(
    client: httpx.Client, body: dict[str, Any], detail: str
) -> None:
    assert refusal(client.post("/api/v1/rebalances", json=body), 422) == detail


def test_patch_of_no_switch_is_refused(client: httpx.Client) -> None:
    answer = client.patch("/api/v1/control", json={"reason": "x"})

    assert refusal(answer, 422) == "the body names no switch, expected movement or observe"


def test_unknown_route_is_answered_with_a_problem(client: httpx.Client) -> None:
    assert refusal(client.get("/api/v1/none"), 404) == "GET /api/v1/none: Not Found"


def test_names_of_other_sites_are_not_served(client: httpx.Client) -> None:
    answer = client.get("/api/v1/state", headers={"Host": "elsewhere.test"})

    assert refusal(answer, 400).startswith("the host is 'elsewhere.test', expected one of: ")
    for known in ("localhost:1", "127.0.0.1", "[::1]:7"):
        assert client.get("/livez", headers={"Host": known}).status_code == 200


def test_form_of_another_site_cannot_post(client: httpx.Client, store: MemoryStore) -> None:
    answer = client.post(
        "/api/v1/pause", content=b'{"reason": "x"}', headers={"Content-Type": "text/plain"}
    )

    assert refusal(answer, 415) == (
        "POST /api/v1/pause: a body of 'text/plain', expected application/json"
    )
    assert store.control().movement


@pytest.mark.parametrize(
    "header",
    [
        {"Origin": "https://elsewhere.test"},
        {"Origin": "http://localhost:1"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
def test_page_of_another_site_cannot_change_state(
    client: httpx.Client, store: MemoryStore, header: dict[str, str]
) -> None:
    answer = client.post("/api/v1/pause", json={"reason": "x"}, headers=header)

    assert " expected http://127.0.0.1:" in refusal(answer, 403)
    assert store.control().movement


def test_page_of_the_service_itself_may_change_state(
    client: httpx.Client, store: MemoryStore
) -> None:
    own = {"Origin": str(client.base_url).rstrip("/"), "Sec-Fetch-Site": "same-origin"}

    assert client.post("/api/v1/pause", json={"reason": "x"}, headers=own).status_code == 200
    assert not store.control().movement


@pytest.mark.parametrize(
    "path", ["tasks/{}", "placement?generation={}", "events?after={}"], ids=lambda path: path[:6]
)
def test_id_beyond_what_a_store_can_hold_is_refused(client: httpx.Client, path: str) -> None:
    for number in (2**53, -1, 10**30):
        answer = client.get("/api/v1/" + path.format(number))
        assert "input should be" in refusal(answer, 422)

    assert client.get("/api/v1/" + path.format(2**53 - 1)).status_code in (200, 404)


@pytest.mark.parametrize("value", ["no", "off", "false", 0, 1, None, 0.0, []])
def test_dry_run_is_true_or_false_and_nothing_like_it(
    client: httpx.Client, store: MemoryStore, value: object
) -> None:
    answer = client.post("/api/v1/rebalances", json={"reason": "x", "dry_run": value})

    assert refusal(answer, 422).startswith("body.dry_run: input should be a valid boolean")
    assert store.task(1) is None


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/livez?x=1", "GET /livez: unknown query parameter 'x', expected none"),
        ("/metrics?x=1", "GET /metrics: unknown query parameter 'x', expected none"),
        ("/?x=1", "GET /: unknown query parameter 'x', expected none"),
        ("/api/v1/state?x=1", "GET /api/v1/state: unknown query parameter 'x', expected none"),
        (
            "/api/v1/events?afetr=1",
            "GET /api/v1/events: unknown query parameter 'afetr', expected one of: "
            "after, latest, limit",
        ),
        (
            "/api/v1/load?last=1&last=2",
            "GET /api/v1/load: repeated query parameter in ['last', 'last'], expected each once",
        ),
    ],
)
def test_unknown_query_parameter_is_refused(client: httpx.Client, path: str, expected: str) -> None:
    assert refusal(client.get(path), 422) == expected


def test_refusal_does_not_return_the_body(client: httpx.Client) -> None:
    for body in ({"reason": "x" * 60_000}, {"reason": "x", "k" * 60_000: 1}, ["x" * 60_000]):
        answer = client.post("/api/v1/pause", json=body)

        assert len(refusal(answer, 422)) <= 500
    missing = client.get("/api/v1/" + "x" * 10_000)
    assert len(refusal(missing, 404)) <= 500


def test_closed_store_is_reported(client: httpx.Client, store: MemoryStore) -> None:
    store.close()

    assert refusal(client.get("/healthz"), 503).startswith("StoreError: ")


def test_every_operation_is_documented(client: httpx.Client) -> None:
    paths = client.get("/api/v1/openapi.json").json()["paths"]

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


def test_port_in_use_is_refused_with_one_line(store: MemoryStore) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        service = HttpService(create_app(store), port=port)

        with pytest.raises(
            ConfigError, match=rf"port {port} of 127.0.0.1 \(http.port, http.host\) cannot be used"
        ):
            service.start()


def test_service_with_a_certificate_answers_https_alone(store: MemoryStore, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate = authority.issue("127.0.0.1").certificate
    service = HttpService(create_app(store), certificate=certificate)
    service.start()
    trust = ssl.create_default_context(cafile=authority.file)

    assert service.url.startswith("https://127.0.0.1:")
    with httpx.Client(base_url=service.url, timeout=DEADLINE_S, verify=trust) as client:
        assert client.get("/livez").status_code == 200
        own = client.post("/api/v1/pause", json={}, headers={"Origin": service.url})
        other = client.post("/api/v1/pause", json={}, headers={"Origin": "http://127.0.0.1"})
    assert own.status_code != 403
    assert other.status_code == 403
    with pytest.raises(httpx.TransportError):
        httpx.get(service.url.replace("https", "http") + "/livez", timeout=DEADLINE_S)
    service.stop()


def test_connection_that_begins_no_tls_handshake_is_closed(
    store: MemoryStore, tmp_path: Path
) -> None:
    certificate = Authority(tmp_path).issue("127.0.0.1").certificate
    limits = replace(DEFAULT_LIMITS, request_deadline_s=0.2)
    service = HttpService(create_app(store), certificate=certificate, limits=limits)
    service.start()
    port = int(service.url.rpartition(":")[2])

    with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as silent:
        assert silent.recv(1) == b""  # asyncio alone would wait for 60 s
    service.stop()


def test_expired_certificate_is_refused_before_the_port_is_bound(
    store: MemoryStore, tmp_path: Path
) -> None:
    certificate = Authority(tmp_path).issue("127.0.0.1", expired=True).certificate

    with pytest.raises(ConfigError, match=r"TLS of HTTP: certificate .* has expired, expected one"):
        HttpService(create_app(store), certificate=certificate)


def test_service_that_ended_gives_its_port_back(store: MemoryStore) -> None:
    service = HttpService(create_app(store))
    service.start()
    port = int(service.url.rpartition(":")[2])
    service.stop()

    again = HttpService(create_app(store), port=port)
    again.start()
    assert httpx.get(f"{again.url}/livez", timeout=DEADLINE_S).status_code == 200
    again.stop()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.com"])
def test_only_loopback_is_served_without_authentication(host: str) -> None:
    with pytest.raises(ConfigError, match=f"host is '{host}', expected a loopback address"):
        loopback_address(host)
