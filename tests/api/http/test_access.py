"""Roles, failed logins, the audit of every change, and requests that are repeated."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from starlette.types import Message, Send
from typer.testing import CliRunner

from api.access.audit import Audit, AuditEntry, AuditError, AuditLines
from api.access.keys import AccessKeys, Role
from api.app import create_app
from api.cli.main import app as commands
from api.http import authentication
from api.http.authentication import FAILURES, FAILURES_S, OF_HOST, FailedLogins
from api.http.dependencies import least_role
from api.http.problems import ProblemType
from api.operations.table import ROUTES
from eplb.errors import ConfigError
from telemetry import open_store
from tests.support.http import client_of, problem_of
from tests.support.limits import NEVER_S
from tests.support.stores import MemoryStore
from tests.support.two_ranks import begin_run

PAUSE = {"reason": "maintenance"}
REPOSITORY = Path(__file__).parents[3]


@pytest.fixture
def service(tmp_path: Path) -> Iterator[httpx.Client]:
    with client_of(create_app(MemoryStore("d"), state_dir=tmp_path, plan_wait_s=0.0)) as client:
        yield client


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def lines(folder: Path) -> list[AuditEntry]:
    return list(Audit(folder).entries())


def test_each_role_may_do_what_those_before_it_may_and_no_more(
    service: httpx.Client, tmp_path: Path
) -> None:
    keys = {
        role: bearer(AccessKeys(tmp_path).add(role, role, force=True))
        for role in ("viewer", "operator", "admin")
    }

    def statuses(method: str, path: str, body: object = None, **more: str) -> list[int]:
        return [
            service.request(method, path, json=body, headers=key | more).status_code
            for key in keys.values()
        ]

    assert statuses("GET", "/api/v1/state") == [200, 200, 200]
    assert statuses("GET", "/api/v1/audit") == [403, 200, 200]
    assert statuses("POST", "/api/v1/pause", PAUSE) == [403, 200, 200]
    settings = {"reason": "r", "plan_windows": 8}
    changed = statuses("PATCH", "/api/v1/settings", settings, **{"if-match": "*"})
    assert changed == [403, 403, 200]
    who = service.get("/api/v1/whoami", headers=keys["operator"]).json()
    assert who == {"name": "operator", "role": "operator"}


def test_removed_key_and_unknown_key_are_refused_at_the_next_request(
    service: httpx.Client, tmp_path: Path
) -> None:
    assert service.get("/api/v1/state").status_code == 200  # no file of keys: open to this host
    key = bearer(AccessKeys(tmp_path).add("alice", "viewer", force=True))
    assert service.get("/api/v1/state").status_code == 401
    assert service.get("/api/v1/state", headers=key).status_code == 200
    browser = service.get("/", auth=("any", key["authorization"].split()[1]))
    assert browser.status_code == 200

    AccessKeys(tmp_path).remove("alice")
    assert service.get("/api/v1/state", headers=key).status_code == 401
    assert service.get("/livez").status_code == 200


def test_file_has_salted_hashes_and_no_log_has_a_key(
    service: httpx.Client, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    first, second = (AccessKeys(tmp_path).add(name, "admin") for name in ("a", "b"))
    wrong = first[:-1] + ("0" if first[-1] != "0" else "1")
    refused = service.get("/api/v1/state", headers=bearer(wrong))
    service.post("/api/v1/pause", json=PAUSE, headers=bearer(first))

    written = "".join(path.read_text() for path in tmp_path.iterdir() if path.is_file())
    for secret in (first, second, wrong, first.rpartition("_")[2], second.rpartition("_")[2]):
        assert secret not in written + caplog.text + refused.text
    assert "failed login of 127.0.0.1: GET /api/v1/state" in caplog.text
    records = json.loads((tmp_path / "access-keys.json").read_text())["keys"]
    assert len({one["salt"] for one in records}) == 2
    assert (tmp_path / "access-keys.json").stat().st_mode & 0o077 == 0


def test_keys_that_others_can_read_close_the_service(service: httpx.Client, tmp_path: Path) -> None:
    key = bearer(AccessKeys(tmp_path).add("alice", "admin"))
    (tmp_path / "access-keys.json").chmod(0o644)
    os.utime(tmp_path / "access-keys.json", (1, 1))

    answer = service.get("/api/v1/state", headers=key)

    kind, detail = problem_of(answer)
    assert (kind, "mode 644, expected 600" in detail) == (ProblemType.KEYS_UNAVAILABLE, True)


def test_keys_of_another_user_close_the_service(service: httpx.Client, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file to another user")
    key = bearer(AccessKeys(tmp_path).add("mallory", "admin"))
    os.chown(tmp_path / "access-keys.json", 65534, 65534)
    os.utime(tmp_path / "access-keys.json", (1, 1))

    kind, detail = problem_of(service.get("/api/v1/state", headers=key))
    assert kind == ProblemType.KEYS_UNAVAILABLE
    assert "belongs to user 65534" in detail


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"version": 1, "keys": [{}]}', '{"version": 1, "keys": 7}', "\xff"]
)
def test_damaged_file_of_keys_closes_the_service_and_names_the_way_back(
    service: httpx.Client, tmp_path: Path, text: str
) -> None:
    file = tmp_path / "access-keys.json"
    file.touch(0o600)
    file.write_text(text, "latin-1")

    kind, detail = problem_of(service.get("/api/v1/state", headers=bearer("eplb_a_1")))

    assert kind is ProblemType.KEYS_UNAVAILABLE
    assert f"{file} is damaged: found" in detail
    assert "Restore a copy of it, or remove it" in detail


def test_key_with_a_salt_that_is_no_text_closes_the_service(
    service: httpx.Client, tmp_path: Path
) -> None:
    key = AccessKeys(tmp_path).add("alice", "admin")
    file = tmp_path / "access-keys.json"
    file.write_text(file.read_text().replace('"salt": "', '"salt": 7, "x": "'))

    kind, _ = problem_of(service.get("/api/v1/state", headers=bearer(key)))
    assert kind is ProblemType.KEYS_UNAVAILABLE


@pytest.mark.parametrize(("name", "role"), [("A", "admin"), ("", "admin"), ("a", "root")])
def test_key_with_an_unusable_name_or_role_is_refused(tmp_path: Path, name: str, role: str) -> None:
    with pytest.raises(ConfigError, match="expected"):
        AccessKeys(tmp_path).add(name, role)
    assert not AccessKeys(tmp_path).exists


def test_failed_logins_of_an_address_are_limited_for_a_while() -> None:
    now = [0.0]
    failed = FailedLogins(lambda: now[0])

    assert [failed.wait_s("a") for _ in range(FAILURES)] == [0.0] * FAILURES
    assert failed.wait_s("a") == FAILURES_S
    assert failed.wait_s("b") == 0.0
    now[0] = FAILURES_S
    assert failed.wait_s("a") == 0.0


def test_address_with_too_many_failed_logins_is_told_so_and_a_right_key_still_served(
    service: httpx.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(authentication, "FAILURES_S", NEVER_S)
    key = bearer(AccessKeys(tmp_path).add("alice", "viewer", force=True))
    answers = [service.get("/api/v1/state", headers=bearer("wrong")) for _ in range(FAILURES + 1)]

    kinds = [problem_of(answer)[0] for answer in answers]
    assert kinds[:-1] == [ProblemType.NOT_AUTHENTICATED] * FAILURES
    assert kinds[-1] is ProblemType.TOO_MANY_FAILED_LOGINS
    assert service.get("/api/v1/state", headers=key).status_code == 200


def test_reads_need_a_viewer_and_changes_an_operator_or_an_admin() -> None:
    roles = {(*one.methods, one.path): least_role(one) for one in ROUTES}

    assert roles["GET", "/api/v1/state"] is Role.VIEWER
    assert roles["GET", "/api/v1/audit"] is Role.OPERATOR
    assert roles["PATCH", "/api/v1/settings"] is Role.ADMIN
    of_changes = {path: role for (method, path), role in roles.items() if method != "GET"}
    assert [path for path, role in of_changes.items() if role is Role.VIEWER] == [
        "/api/v1/explanations"
    ]


def test_change_is_in_the_audit_before_and_after_it_is_done(
    service: httpx.Client, tmp_path: Path
) -> None:
    key = AccessKeys(tmp_path).add("alice", "operator", force=True)
    done = service.post("/api/v1/pause", json=PAUSE, headers=bearer(key))
    refused = service.post("/api/v1/pause", json={}, headers=bearer(key))
    service.get("/api/v1/state", headers=bearer(key))
    asked, answered, *others = lines(tmp_path)

    assert (asked.actor, asked.role, asked.address) == ("alice", "operator", "127.0.0.1")
    assert (asked.action, asked.reason) == ("POST /api/v1/pause", "maintenance")
    assert (asked.outcome, answered.outcome) == ("asked", "200")
    assert (asked.detail, answered.detail) == ("", "movement null -> false")
    assert asked.request == answered.request == done.headers["x-request-id"]
    assert [one.outcome for one in others] == ["asked", "422"]
    assert refused.headers["x-request-id"] == others[0].request
    first = service.get("/api/v1/audit?limit=3", headers=bearer(key)).json()
    assert [one["number"] for one in first["entries"]] == [4, 3, 2]
    rest = service.get(f"/api/v1/audit?before={first['next']}", headers=bearer(key)).json()
    assert ([one["number"] for one in rest["entries"]], rest["next"]) == ([1], None)


@pytest.mark.parametrize("damage", [Path.mkdir, lambda file: file.symlink_to("/dev/full")])
def test_change_that_cannot_be_audited_is_not_done(
    service: httpx.Client, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    damage(tmp_path / "audit.jsonl")
    observe = {"reason": "r", "observe": True}

    answer = service.patch("/api/v1/control", json=observe)

    assert problem_of(answer)[0] is ProblemType.AUDIT_UNAVAILABLE
    assert service.get("/api/v1/state").json()["observe"] is False


def figure(service: httpx.Client, name: str) -> float:
    (line,) = (one for one in service.get("/metrics").text.splitlines() if one.startswith(name))
    return float(line.split()[-1])


def test_pause_with_an_audit_that_is_full_is_done_and_its_lines_follow(
    service: httpx.Client, tmp_path: Path
) -> None:
    file = tmp_path / "audit.jsonl"
    file.symlink_to("/dev/full")

    paused = service.post("/api/v1/pause", json=PAUSE)
    state = service.get("/api/v1/state").json()
    waiting = figure(service, "eplb_audit_waiting")
    file.unlink()
    figure(service, "eplb_audit_waiting")  # a scrape moves them

    assert paused.status_code == 200
    assert (state["movement"], state["audit_waiting"], waiting) == (False, 2, 2.0)
    assert any("2 lines of the audit wait in the store" in one for one in state["problems"])
    assert (state["switched"]["by"], state["switched"]["reason"]) == (OF_HOST.name, "maintenance")
    assert [one.outcome for one in lines(tmp_path)] == ["asked", "200"]
    assert Audit(tmp_path).verify() is not None
    assert (figure(service, "eplb_audit_waiting"), figure(service, "eplb_audit_lost")) == (0.0, 0.0)


def test_line_that_neither_audit_nor_store_takes_counts_as_lost(tmp_path: Path) -> None:
    (tmp_path / "audit.jsonl").symlink_to("/dev/full")
    store = open_store(tmp_path / "store.sqlite", "d")
    kept = AuditLines(Audit(tmp_path), store)

    assert kept.keep(entry(1)) is True
    store.close()
    assert kept.keep(entry(2)) is False


FULL_DISK = """
import os, subprocess, sys
from telemetry import open_store
from tests.support.two_ranks import FIRST, begin_run

folder = sys.argv[1]
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m,mode=700", "tmpfs", folder], check=True)
store = open_store(f"{folder}/store.sqlite", "d")  # as ranks have it open
begin_run(store)
store.commit(FIRST, expected=None, reason="start")
ballast = os.open(f"{folder}/ballast", os.O_CREAT | os.O_WRONLY)
try:
    while True:
        os.write(ballast, bytes(4096))
except OSError:
    pass
for act in ("resume", "pause"):
    words = [act, "--store", f"{folder}/store.sqlite", "--deployment", "d", "--wait", "0"]
    subprocess.run([sys.executable, "-m", "api.cli.main", *words])
print("movement", store.control().movement, flush=True)
subprocess.run(["cat", f"{folder}/audit.jsonl"])
"""


@pytest.mark.system
def test_pause_by_command_on_a_full_disk_takes_effect(tmp_path: Path) -> None:
    command = ["unshare", "-Urm", sys.executable, "-c", FULL_DISK, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)

    assert "nothing was changed: the audit" in done.stderr, done.stdout + done.stderr  # the resume
    assert "d: movement off (was on)" in done.stdout, done.stdout + done.stderr
    assert "movement False" in done.stdout
    outcomes = [json.loads(one)["outcome"] for one in done.stdout.splitlines() if one[0] == "{"]
    assert outcomes == ["asked", "200"]


@pytest.mark.system
def test_pause_that_is_ended_while_it_waits_for_ranks_has_its_outcome(tmp_path: Path) -> None:
    with closing(open_store(tmp_path / "store.sqlite", "d")) as store:
        begin_run(store)
        command = [
            sys.executable,
            "-m",
            "api.cli.main",
            "pause",
            "--wait",
            "5",
            "--deployment",
            "d",
        ]
        command += ["--store", str(tmp_path / "store.sqlite")]
        with subprocess.Popen(command, cwd=REPOSITORY) as process:
            while len(lines(tmp_path)) < 2 and process.poll() is None:
                store.wait(store.version(), 0.05)
            process.terminate()

        assert process.returncode == -signal.SIGTERM
        assert [one.outcome for one in lines(tmp_path)] == ["asked", "200"]
        assert store.live().changes["movement"].by == lines(tmp_path)[0].actor


@pytest.mark.parametrize(
    ("body", "refused", "expected"),
    [
        (b'{"reason": "\\ud800"}', ProblemType.INVALID_REQUEST, "surrogate"),
        (b"[" * 20_000, ProblemType.BAD_REQUEST, "nested deeper than 32 levels"),
        (b'{"reason": NaN}', ProblemType.INVALID_REQUEST, "NaN"),
    ],
)
def test_body_that_no_answer_could_repeat_changes_nothing(
    service: httpx.Client, tmp_path: Path, body: bytes, refused: ProblemType, expected: str
) -> None:
    json_type = {"content-type": "application/json"}

    answer = service.post("/api/v1/pause", content=body, headers=json_type)

    kind, detail = problem_of(answer)
    assert (kind, expected in detail) == (refused, True)
    assert service.get("/api/v1/state").json()["movement"] is True
    assert lines(tmp_path) == []


def entry(number: int) -> AuditEntry:
    return AuditEntry(float(number), "d", "a", "admin", "local", "", "pause", f"r{number}", "asked")


FORGED = json.dumps(vars(entry(9).sealed(2, "0" * 64)))


def audit_of(folder: Path, number: int) -> Audit:
    """An audit of so many lines, of differing length."""
    audit = Audit(folder)
    for line in range(1, number + 1):
        audit.append(replace(entry(line), reason="r" * (line * 7 % number)))
    return audit


def test_page_of_the_audit_is_what_all_of_it_gives(tmp_path: Path) -> None:
    assert Audit(tmp_path).page(None, 7) == []
    audit = audit_of(tmp_path, 40)

    for before, limit in itertools.product((None, 1, 2, 3, 17, 40, 41, 99), (1, 7, 100)):
        older = [one for one in audit.entries() if before is None or one.number < before]
        assert audit.page(before, limit) == older[::-1][:limit], (before, limit)


def test_latest_page_does_not_read_the_lines_before_it(tmp_path: Path) -> None:
    audit = audit_of(tmp_path, 4)
    text = audit.path.read_bytes()
    audit.path.write_bytes(b"#" * text.index(b"\n") + text[text.index(b"\n") :])

    assert [one.number for one in audit.page(None, 2)] == [4, 3]
    with pytest.raises(AuditError, match="byte 0"):
        audit.page(None, 4)


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (lambda kept: [*kept[:1], kept[1].replace('"rr"', '"r9"'), *kept[2:]], "line 2"),
        (lambda kept: [kept[0], *kept[2:]], r"line 2.* 3, expected 2"),
        (lambda kept: [kept[0], kept[2], kept[1], *kept[3:]], r"line 2.* 3, expected 2"),
        (lambda kept: [*kept[:3], "{}"], "line 4"),
        (lambda kept: [kept[0], FORGED, *kept[2:]], "line 2 follows 0000"),
    ],
    ids=["changed", "removed", "swapped", "malformed", "forged with its own hash"],
)
def test_audit_that_was_changed_is_found(tmp_path: Path, damage: object, found: str) -> None:
    audit = audit_of(tmp_path, 4)
    last = audit.verify()
    assert last is not None
    assert last.number == 4

    kept = audit.path.read_text().splitlines()
    audit.path.write_text("\n".join(damage(kept)) + "\n")  # type: ignore[operator]

    with pytest.raises(AuditError, match=found):
        audit.verify()


@pytest.mark.parametrize("missing", [1, 20], ids=["end of the line", "20 bytes"])
def test_audit_that_a_crash_cut_keeps_its_tail_aside_and_goes_on(
    tmp_path: Path, missing: int
) -> None:
    audit = audit_of(tmp_path, 4)
    whole = audit.path.read_bytes()
    partial = whole[whole.rfind(b"\n", 0, -1) + 1 : -missing]
    audit.path.write_bytes(whole[:-missing])

    assert [one.number for one in audit.page(None, 9)] == [3, 2, 1]
    assert [one.number for one in audit.page(3, 9)] == [2, 1]
    added = audit.append(entry(5))

    (aside,) = tmp_path.glob("audit.jsonl.partial-*")
    repair = audit.page(None, 2)[1]
    assert aside.read_bytes() == partial
    assert (repair.action, repair.number, added.number) == ("audit repaired", 4, 5)
    assert f"{len(partial)} bytes" in repair.reason
    assert aside.name in repair.reason
    assert audit.verify() == added


def test_processes_that_append_at_once_make_one_chain(tmp_path: Path) -> None:
    writers = [
        threading.Thread(target=lambda: [Audit(tmp_path).append(entry(n)) for n in range(20)])
        for _ in range(4)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    last = Audit(tmp_path).verify()

    assert last is not None
    assert last.number == 80


def run(folder: Path, *words: str) -> tuple[int, str]:
    file = folder / "eplb.toml"
    file.write_text(f'[deployment]\nname = "west"\nstate_dir = "{folder}"\n')
    found = CliRunner().invoke(commands, list(words), env={"EPLB_CONFIG": str(file)})
    return found.exit_code, found.output


def test_commands_add_list_and_remove_keys_and_the_audit_has_each(tmp_path: Path) -> None:
    words = ("--role", "operator", "--reason", "new", "--force")
    status, shown = run(tmp_path, "keys", "add", "alice", *words)
    actor = AccessKeys(tmp_path).actor(shown.split()[0])
    listed = run(tmp_path, "keys", "list")[1]
    removed = run(tmp_path, "keys", "remove", "alice")
    again = run(tmp_path, "keys", "remove", "alice")
    told = run(tmp_path, "audit")[1]

    assert (status, actor.role if actor else None) == (0, Role.OPERATOR)
    assert listed.split()[:2] == ["alice", "operator"]
    assert removed[0] == 0
    assert again == (2, "eplb: there is no key 'alice', expected one of: none\n")
    assert "keys add alice operator asked: new" in told
    assert "keys add alice operator done: new" in told
    assert told.splitlines()[-1].endswith("keys remove alice failed: removed from the command line")


def test_first_key_is_an_admin_s_and_the_last_one_of_an_admin_stays(tmp_path: Path) -> None:
    viewer = run(tmp_path, "keys", "add", "bob")
    first = run(tmp_path, "keys", "add", "alice", "--role", "admin")
    second = run(tmp_path, "keys", "add", "bob")
    last = run(tmp_path, "keys", "remove", "alice")

    assert (viewer[0], first[0], second[0], last[0]) == (2, 0, 0, 2)
    assert "no admin has a key, expected --role admin first, or --force" in viewer[1]
    assert "to open the service again, remove" in first[1]
    assert "to open the service again" not in second[1]
    assert "expected another one first (eplb keys add NAME --role admin)" in last[1]
    assert [key.name for key in AccessKeys(tmp_path).all()] == ["alice", "bob"]


def test_audit_command_verifies_the_chain_against_a_noted_line(tmp_path: Path) -> None:
    run(tmp_path, "keys", "add", "alice", "--role", "admin")
    run(tmp_path, "keys", "add", "bob")
    status, shown = run(tmp_path, "audit", "--verify")
    mark = shown.split()[-1]
    held = run(tmp_path, "audit", "--verify", "--expect", mark)
    file = tmp_path / "audit.jsonl"
    file.write_text(file.read_text().splitlines()[0] + "\n")  # cut off at the end
    cut = run(tmp_path, "audit", "--verify")
    found = run(tmp_path, "audit", "--verify", "--expect", mark)

    assert (status, held[0], cut[0]) == (0, 0, 0)
    assert shown.startswith("4 lines, the chain holds; the last is 4:")
    assert found[0] == 1
    assert "line 4 has the hash no such line, expected " in found[1]


def test_repeated_request_for_another_version_is_refused(service: httpx.Client) -> None:
    key, asked = {"idempotency-key": "one"}, {"reason": "r"}
    first = service.post("/api/v1/rebalances", json=asked, headers=key | {"if-match": "*"})
    again = service.post("/api/v1/rebalances", json=asked, headers=key | {"if-match": "*"})
    other = service.post("/api/v1/rebalances", json=asked, headers=key | {"if-match": '"7"'})
    without = service.post("/api/v1/rebalances", json=asked, headers=key)

    assert again.json() == first.json()
    assert again.headers["idempotency-replayed"] == "true"
    for refused in (other, without):
        kind, detail = problem_of(refused)
        assert (kind, "If-Match" in detail) == (ProblemType.KEY_REUSED, True)


def test_repeated_request_is_done_once_and_another_body_is_refused(
    service: httpx.Client, tmp_path: Path
) -> None:
    key = {"idempotency-key": "one"}
    first = service.post("/api/v1/rebalances", json={"reason": "r"}, headers=key)
    again = service.post("/api/v1/rebalances", json={"reason": "r"}, headers=key)
    other = service.post("/api/v1/rebalances", json={"reason": "s"}, headers=key)
    fresh = service.post("/api/v1/rebalances", json={"reason": "r"})
    too_long = service.post("/api/v1/pause", json=PAUSE, headers={"idempotency-key": "k" * 201})

    assert (first.status_code, again.status_code) == (202, 202)
    assert again.json() == first.json()
    assert again.headers["idempotency-replayed"] == "true"
    assert problem_of(other)[0] is ProblemType.KEY_REUSED
    assert problem_of(too_long)[0] is ProblemType.INVALID_REQUEST
    assert fresh.json()["id"] == first.json()["id"] + 1
    assert len(lines(tmp_path)) == 4  # the repeated and the refused one changed nothing


async def pause_in(app: FastAPI, send: Send, *headers: tuple[bytes, bytes]) -> None:
    body = json.dumps(PAUSE).encode()

    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    named = [(b"host", b"localhost"), (b"content-type", b"application/json"), *headers]
    scope = {"type": "http", "method": "POST", "path": "/api/v1/pause", "headers": named}
    rest = {"raw_path": b"/api/v1/pause", "query_string": b"", "client": None, "scheme": "http"}
    await app(scope | rest | {"server": ("localhost", 80)}, receive, send)


def test_outcome_is_in_the_audit_before_the_answer_is_sent(tmp_path: Path) -> None:
    found: list[tuple[str, ...]] = []

    async def send(message: Message) -> None:
        found.append((message["type"], *(entry.outcome for entry in lines(tmp_path))))

    asyncio.run(pause_in(create_app(MemoryStore("d"), state_dir=tmp_path), send))

    assert [kind for kind, *_ in found] == ["http.response.start", "http.response.body"]
    assert {tuple(outcomes) for _, *outcomes in found} == {("asked", "200")}


def test_clock_that_jumps_does_not_have_a_repeated_request_done_again(tmp_path: Path) -> None:
    now, replayed = [1.8e9], list[bool]()
    app = create_app(MemoryStore("d"), state_dir=tmp_path)
    app.state.clock = lambda: now[0]

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            replayed.append(b"idempotency-replayed" in dict(message["headers"]))

    for jump in (0.0, 3e6, -6e6):
        now[0] += jump
        asyncio.run(pause_in(app, send, (b"idempotency-key", b"one")))

    assert replayed == [False, True, True]
    assert [entry.outcome for entry in lines(tmp_path)] == ["asked", "200"]


@pytest.mark.parametrize("option", ["--version", "-h"])
def test_command_line_has_version_and_short_help(option: str) -> None:
    found = CliRunner().invoke(commands, [option])

    assert found.exit_code == 0
    assert found.output.startswith("eplb ") if option == "--version" else "Usage" in found.output
