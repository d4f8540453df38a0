"""The Redis store in front of everything a server can do to it: each told in words, none fatal."""

from __future__ import annotations

import logging
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from eplb.core.load import LoadSample
from eplb.errors import StoreError
from telemetry.state.redis import SCHEMA_VERSION
from telemetry.state.redis_address import Limits, RedisAddress
from telemetry.state.store import StateStore
from tests.support.limits import NEVER_S
from tests.support.redis_servers import RedisProcess, find_redis_server, free_port
from tests.support.stores import (
    PATIENT,
    documented_rules,
    kinds,
    make_sample,
    redis_store,
    sequences,
)

# One attempt, which ends when the server has refused or ended the connection.
ONCE = replace(PATIENT, deadline_s=0.001)
PATIENTLY = "?connect_timeout_s=3600&timeout_s=3600&deadline_s=3600"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisProcess]:
    """A server of the test's own, whose settings it may change."""
    # By default the server delays a write while an fsync runs, up to 2 s on a busy disk, and a
    # kill loses what it had acknowledged.
    kept = {"appendonly": "yes", "appendfsync": "always"}
    with RedisProcess(tmp_path / "redis", kept) as started:
        yield started


@contextmanager
def opened(address: RedisAddress, limits: Limits = PATIENT) -> Iterator[StateStore]:
    with closing(redis_store(replace(address, limits=limits), "demo")) as store:
        yield store


# -- servers that must not be trusted with placements


def test_server_that_may_drop_keys_is_refused(server: RedisProcess) -> None:
    for policy in ("allkeys-lru", "volatile-ttl"):
        server.ask("CONFIG SET", "maxmemory-policy", policy)

        with pytest.raises(StoreError, match=f"{policy}, expected noevict"):
            redis_store(server.url + PATIENTLY, "demo")


def test_replica_is_refused_and_so_is_a_primary_that_becomes_one(
    server: RedisProcess, tmp_path: Path
) -> None:
    with (
        RedisProcess(tmp_path / "primary") as primary,
        opened(server.address, ONCE) as store,
    ):
        server.ask("REPLICAOF", "127.0.0.1", str(primary.port))

        with pytest.raises(StoreError, match=rf"replica of 127\.0\.0\.1:{primary.port}"):
            redis_store(server.url + PATIENTLY, "demo")
        with pytest.raises(StoreError, match="read-only replica"):
            store.add_event("note", {})


def test_keys_of_another_layout_are_refused_and_left_as_they_are(server: RedisProcess) -> None:
    server.ask("HSET", "eplb:{demo}:state", "schema", "99")

    with pytest.raises(StoreError, match=f"version 99, expected {SCHEMA_VERSION}"):
        redis_store(server.url + PATIENTLY, "demo")

    assert server.ask("KEYS", "*") == [b"eplb:{demo}:state"]


@contextmanager
def answering(info: str) -> Iterator[int]:
    """A server that answers every command with this INFO; gives its port."""
    told = f"${len(info)}\r\n{info}\r\n".encode()
    with socket.create_server(("127.0.0.1", 0)) as door:

        def serve() -> None:
            connection, _ = door.accept()
            with connection:
                while asked := connection.recv(65536):
                    for command in re.split(rb"(?:^|\r\n)\*\d+", asked)[1:]:
                        word = command.split()[1]
                        answers = {b"INFO": told, b"PING": b"+PONG\r\n"}
                        connection.sendall(answers.get(word, b"+OK\r\n"))

        thread = threading.Thread(target=serve)
        thread.start()
        yield door.getsockname()[1]
        thread.join()


@pytest.mark.parametrize(
    ("info", "words"),
    [
        ("redis_version:6.0.16\r\nrole:master\r\n", r"6\.0\.16, expected 6\.2"),
        ("motto:fast\r\n", "redis_version"),
    ],
)
def test_server_that_is_too_old_or_no_redis_is_refused(info: str, words: str) -> None:
    with answering(info) as port, pytest.raises(StoreError, match=words):
        redis_store(f"redis://127.0.0.1:{port}{PATIENTLY}", "demo")


def test_server_under_a_cluster_url_and_no_server_are_errors(server: RedisProcess) -> None:
    with pytest.raises(StoreError, match="not a cluster"):
        redis_store(server.url.replace("redis:", "redis+cluster:"), "demo")
    server.kill()
    with pytest.raises(
        StoreError, match=rf"redis://127\.0\.0\.1:{server.port}/0 cannot be reached"
    ):
        redis_store(replace(server.address, limits=ONCE), "demo")


# -- logins


def test_wrong_password_is_an_error_without_the_password(
    server: RedisProcess, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    server.ask("CONFIG SET", "requirepass", "right-secret")
    url = server.url + PATIENTLY

    for login in (":wrong-secret@", "", "nobody:wrong-secret@"):
        with pytest.raises(StoreError, match="login") as caught:
            redis_store(url.replace("//", f"//{login}"), "demo")
        assert "secret" not in f"{caught.value!r} {caught.value.__cause__!r} {caplog.text}"

    with closing(redis_store(url.replace("//", "//:right-secret@"), "demo")) as store:
        assert store.events() == []
        assert "secret" not in repr(vars(store.backend.link))


@contextmanager
def logged_in(server: RedisProcess, without: str = " ") -> Iterator[StateStore]:
    """A store of the documented user, whose rules lack one word."""
    rules = documented_rules("writer-secret").replace(without, " ")
    server.ask("ACL SETUSER", "rank", *rules.split())
    with opened(replace(server.address, username="rank", password="writer-secret")) as store:
        yield store


def test_user_without_a_permission_gets_an_error_or_does_without(
    server: RedisProcess, caplog: pytest.LogCaptureFixture
) -> None:
    server.ask("ACL SETUSER", "rank", "reset")
    with logged_in(server, " +xadd ") as store, pytest.raises(StoreError, match="permissions"):
        store.add_event("note", {})
    server.ask("ACL SETUSER", "rank", "reset")
    with logged_in(server, " +config|get ") as store:
        assert store.backend.durability == "unknown"
    server.ask("ACL SETUSER", "rank", "reset")
    with logged_in(server, " +subscribe ") as store, opened(server.address) as other:
        waiting = threading.Thread(target=store.wait, args=(store.version(), NEVER_S))
        waiting.start()
        other.add_event("note", {})
        waiting.join()  # it polls

    assert "secret" not in caplog.text


# -- full, loading, slow, gone


def test_full_server_keeps_what_it_has_and_can_be_pruned(server: RedisProcess) -> None:
    def large(sequence: int) -> LoadSample:
        tokens = np.random.default_rng(sequence).integers(0, 2**40, (1, 5000))
        return make_sample(0, sequence, slot_to_expert=np.zeros_like(tokens), tokens=tokens)

    with opened(server.address) as store:

        def limit() -> None:
            # What Redis itself takes differs by release, and grows with what it has done.
            used = int(store.backend.link.ask("", "INFO")["used_memory"])
            server.ask("CONFIG SET", "maxmemory", str(used + 400_000))

        limit()
        num_stored, told = 0, ""
        while not told:
            try:
                num_stored += store.append([large(num_stored)])
            except StoreError as exc:
                told = str(exc)

        assert "is full" in told
        assert store.sample_counts("run-1") == {0: num_stored}
        server.ask("CONFIG SET", "maxmemory", "1")
        with pytest.raises(StoreError, match="is full"):
            store.add_event("note", {})
        with opened(server.address) as again:
            assert again.prune(float(num_stored)) == num_stored
        limit()
        assert store.append([large(num_stored)]) == 1


def test_full_server_says_so_and_makes_room_for_a_pause_alone(server: RedisProcess) -> None:
    def of_a_kilobyte(sequence: int) -> LoadSample:
        tokens = np.random.default_rng(sequence).integers(0, 2**60, (1, 100))
        return make_sample(0, sequence, slot_to_expert=np.zeros_like(tokens), tokens=tokens)

    with opened(server.address) as store:
        for first in range(0, 3000, 20):  # the memory of a small request is no part of the figure
            store.append([of_a_kilobyte(n) for n in range(first, first + 20)])
        assert store.backend.why_full() == ""
        used = int(store.backend.link.ask("", "INFO")["used_memory"])
        server.ask("CONFIG SET", "maxmemory", str(used - 1_000_000))

        assert "is full" in store.backend.why_full()
        with pytest.raises(StoreError, match="is full"):
            store.change_live({"movement": True}, reason="go on")
        store.change_live({"movement": False}, reason="stop")

        assert not store.control().movement
        assert 0 < len(sequences(store)) < 3000
        assert sequences(store)[-1] == 2999
        server.ask("CONFIG SET", "maxmemory", "1")
        with pytest.raises(StoreError, match="is full"):
            store.change_live({"movement": False}, reason="stop again")


@pytest.mark.system
def test_server_that_is_loading_is_waited_for(server: RedisProcess) -> None:
    with opened(server.address) as store:
        store.append([make_sample(0, n) for n in range(1200)])
        server.kill()
        server.settings["key-load-delay"] = "300"
        starting = threading.Thread(target=server.start)
        starting.start()
        # While it loads, Redis looks up once in 1,000 commands.
        told = ""
        while "is loading its data set" not in told:
            assert starting.is_alive(), f"loaded before it was asked; told last: {told}"
            try:
                redis_store(replace(server.address, limits=ONCE), "demo").close()
            except StoreError as exc:
                told = str(exc)

        assert store.sample_counts("run-1") == {0: 1200}
        starting.join()


def answers_again(store: StateStore) -> bool:
    """Wait until the store answers."""
    while True:
        try:
            return store.version() >= 0
        except StoreError:
            pass


@pytest.mark.system
def test_stopped_server_opens_the_breaker_until_it_responds(server: RedisProcess) -> None:
    hasty = Limits(timeout_s=0.1, deadline_s=0.001, breaker_failures=3, cool_down_s=0.0)
    closed = replace(hasty, cool_down_s=NEVER_S)
    with opened(server.address, hasty) as store, opened(server.address, closed) as given_up:
        assert server.process is not None
        server.process.send_signal(signal.SIGSTOP)
        for one in (store, given_up):
            for _ in range(3):
                with pytest.raises(StoreError, match="does not answer"):
                    one.add_event("note", {})
            assert one.backend.link.breaker.state != "closed"
        with pytest.raises(StoreError, match="3 attempts in a row"):
            given_up.version()

        server.process.send_signal(signal.SIGCONT)
        assert answers_again(store)
        assert store.backend.link.breaker.state == "closed"


def test_killed_server_is_an_error_and_used_after_its_restart(server: RedisProcess) -> None:
    with opened(server.address, ONCE) as store, opened(server.address) as patient:
        version = store.add_event("before", {})
        server.kill()
        with pytest.raises(StoreError, match="cannot be reached"):
            store.add_event("lost", {})
        found: list[int] = []
        calling = threading.Thread(target=patient.add_event, args=("outlasts its absence", {}))
        waiting = threading.Thread(target=lambda: found.append(patient.wait(version, NEVER_S)))
        calling.start()
        waiting.start()

        server.start()
        calling.join()
        waiting.join()

        assert answers_again(store)
        assert kinds(store) == ["before", "outlasts its absence"]
        assert found == [store.version()]


def test_wait_survives_the_loss_of_its_connection(server: RedisProcess) -> None:
    with opened(server.address) as store, opened(server.address) as other:
        found: list[int] = []
        version = store.version()
        waiting = threading.Thread(target=lambda: found.append(store.wait(version, NEVER_S)))
        waiting.start()
        server.ask("CLIENT KILL", "TYPE", "pubsub")
        other.add_event("note", {})
        waiting.join()

        assert found == [other.version()]


@pytest.mark.system
def test_close_at_any_moment_of_a_wait_is_the_error_of_a_closed_store(
    redis_server: RedisProcess,
) -> None:
    """``close`` falls between any two instructions of the waiting thread.

    redis-py then fails with whatever the closed connection makes of the next call.
    """
    random_moment = random.Random(5)
    before_s = sys.getswitchinterval()
    found: list[str] = []

    def wait(store: StateStore) -> None:
        try:
            store.wait(store.version(), NEVER_S)
        except Exception as exc:
            found.append(f"{type(exc).__name__}: {exc}")

    sys.setswitchinterval(1e-6)
    try:
        for _ in range(200):
            store = redis_store(replace(redis_server.address, limits=PATIENT), "closes")
            thread = threading.Thread(target=wait, args=(store,))
            thread.start()
            for _ in range(random_moment.randrange(20_000)):
                pass
            store.close()
            thread.join()
    finally:
        sys.setswitchinterval(before_s)

    words = f"Redis store {store.backend.link.address} is closed, expected an open one"
    assert found == [f"StoreError: {words}"] * 200


# -- TLS and socket files


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    """A folder with ca.pem, and cert.pem and key.pem that it vouches for."""
    if shutil.which("openssl") is None:
        pytest.skip("found no openssl to make certificates with")
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", "key.pem", "-out", "cert.pem"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    subprocess.run([*command, *files, *subject], cwd=tmp_path, check=True, capture_output=True)
    shutil.copy(tmp_path / "cert.pem", tmp_path / "ca.pem")
    return tmp_path


@pytest.mark.system
def test_connection_over_tls_checks_the_server(certificates: Path) -> None:
    settings = {
        "tls-cert-file": str(certificates / "cert.pem"),
        "tls-key-file": str(certificates / "key.pem"),
        "tls-ca-cert-file": str(certificates / "ca.pem"),
        "tls-auth-clients": "no",
    }
    try:
        server = RedisProcess(certificates / "redis", settings)
    except StoreError as exc:
        if "Bad directive" not in str(exc):
            raise
        pytest.skip(f"{find_redis_server()} was built without TLS")
    with server:
        tls_port = str(server.port + 1)
        server.ask("CONFIG SET", "tls-port", tls_port)
        url = f"rediss://127.0.0.1:{tls_port}"

        with closing(redis_store(f"{url}?ca_certs={certificates}/ca.pem", "demo")) as store:
            store.add_event("note", {})
        for wrong in (url, f"{url}?ca_certs={certificates}/nowhere.pem"):
            with pytest.raises(StoreError, match="fails TLS"):
                redis_store(wrong, "demo")


def test_socket_file_or_certificates_that_are_not_there_are_named(tmp_path: Path) -> None:
    path = tmp_path / "redis.sock"

    with pytest.raises(StoreError, match="no socket file") as refused:
        redis_store(f"unix://{path}?deadline_s=0.1", "demo")
    assert str(path) in str(refused.value)
    assert "TLS" not in str(refused.value)
    url = f"rediss://127.0.0.1:{free_port()}?ca_certs={tmp_path}/none.pem&deadline_s=0.1"
    with pytest.raises(StoreError, match=r"fails TLS|cannot be reached"):
        redis_store(url, "demo")


def test_server_behind_a_socket_file_is_used_and_its_absence_is_passing(tmp_path: Path) -> None:
    path = tmp_path / "redis.sock"
    with (
        RedisProcess(tmp_path, {"unixsocket": str(path)}) as server,
        opened(RedisAddress((), socket_path=str(path))) as store,
    ):
        first = store.add_event("before", {})
        server.kill()
        path.unlink(missing_ok=True)
        server.start()

        assert store.add_event("after", {}) > first
