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
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from eplb.core.load import LoadSample
from eplb.errors import StoreError
from telemetry.stores.redis.connection.address import Limits, RedisAddress
from telemetry.stores.redis.connection.local_server import (
    RedisClusterProcesses,
    RedisProcess,
    find_redis_server,
    free_port,
)
from telemetry.stores.redis.keys import SCHEMA_VERSION
from telemetry.stores.redis.store import RedisStore
from tests.support.limits import NEVER_S
from tests.support.repository import ROOT

PATIENT = Limits(deadline_s=10.0, breaker_failures=1000)
HASTY = Limits(timeout_s=0.1, deadline_s=0.3, breaker_failures=3, cool_down_s=0.2)


def make_sample(sequence: int, slots: int = 2) -> LoadSample:
    held = np.zeros((1, slots), np.int32)
    tokens = np.random.default_rng(sequence).integers(0, 2**40, (1, slots))
    return LoadSample(
        "demo", "run-1", 0, sequence, float(sequence), 0, 0, "decode", 1, held, tokens
    )


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisProcess]:
    """A server of the test's own, whose settings it may change."""
    # By default the server delays a write while an fsync runs, up to 2 s on a busy disk, and a
    # kill loses what it had acknowledged.
    kept = {"appendonly": "yes", "appendfsync": "always"}
    with RedisProcess(tmp_path / "redis", kept) as started:
        yield started


@contextmanager
def opened(address: RedisAddress, limits: Limits = PATIENT) -> Iterator[RedisStore]:
    with closing(RedisStore(replace(address, limits=limits), "demo")) as store:
        yield store


# -- servers that must not be trusted with placements


def test_server_that_may_drop_keys_is_refused(server: RedisProcess) -> None:
    for policy in ("allkeys-lru", "volatile-ttl"):
        server.ask("CONFIG SET", "maxmemory-policy", policy)

        with pytest.raises(StoreError, match=f"has maxmemory-policy {policy}, expected noevict"):
            RedisStore(server.url, "demo")


def test_replica_is_refused_and_so_is_a_primary_that_becomes_one(
    server: RedisProcess, tmp_path: Path
) -> None:
    with (
        RedisProcess(tmp_path / "primary") as primary,
        opened(server.address, HASTY) as store,
    ):
        server.ask("REPLICAOF", "127.0.0.1", str(primary.port))

        with pytest.raises(StoreError, match=rf"is a replica of 127\.0\.0\.1:{primary.port}"):
            RedisStore(server.url, "demo")
        with pytest.raises(StoreError, match="is a read-only replica, expected a primary: event"):
            store.add_event("note", {})


def test_keys_of_another_layout_are_refused_and_left_as_they_are(server: RedisProcess) -> None:
    server.ask("HSET", "eplb:{demo}:state", "schema", "99")

    with pytest.raises(StoreError, match=f"with schema version 99, expected {SCHEMA_VERSION}"):
        RedisStore(server.url, "demo")

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
        ("redis_version:6.0.16\r\nrole:master\r\n", r"is version 6\.0\.16, expected 6\.2 or later"),
        ("motto:fast\r\n", "reports no redis_version, expected a Redis server"),
    ],
)
def test_server_that_is_too_old_or_no_redis_is_refused(info: str, words: str) -> None:
    with answering(info) as port, pytest.raises(StoreError, match=words):
        RedisStore(f"redis://127.0.0.1:{port}", "demo")


# -- logins


def test_wrong_password_is_an_error_without_the_password(
    server: RedisProcess, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    server.ask("CONFIG SET", "requirepass", "right-secret")
    url = server.url.replace("//", "//:wrong-secret@")

    for wrong in (url, server.url, server.url.replace("//", "//nobody:wrong-secret@")):
        with pytest.raises(
            StoreError, match="refuses the login, expected the URL's user"
        ) as caught:
            RedisStore(wrong, "demo")
        assert "secret" not in f"{caught.value!r} {caught.value.__cause__!r} {caplog.text}"

    with closing(RedisStore(server.url.replace("//", "//:right-secret@"), "demo")) as store:
        assert store.events() == []
        assert "secret" not in repr(vars(store.link))


def writer_of_the_docs() -> str:
    """The rules of the user that docs/telemetry-redis.md tells to set up."""
    page = (ROOT / "docs" / "telemetry-redis.md").read_text()
    _, _, rule = page.partition("```text\nACL SETUSER eplb ")
    return " ".join(rule.partition("\n```")[0].split()).replace("PASSWORD", "writer-secret")


WRITER = writer_of_the_docs()


def test_user_of_the_docs_may_do_all_that_a_store_does(server: RedisProcess) -> None:
    server.ask("ACL SETUSER", "rank", *WRITER.split())
    url = server.url.replace("//", "//rank:writer-secret@")

    with closing(RedisStore(url, "demo")) as store:
        store.add_event("note", {})
        store.append([make_sample(0)])
        store.claim(fence=None)
        lease = store.acquire_lease("one", 30.0)
        assert lease is not None
        store.wait(store.version(), 0.05)
        store.prune(99.0)
        store.prune_events(0)
        assert store.durability == "always"


def test_missing_permission_is_an_error(server: RedisProcess) -> None:
    server.ask("ACL SETUSER", "rank", *WRITER.replace(" +xadd", "").split())
    server.ask("ACL SETUSER", "half", *WRITER.replace(" +config|get", "").split())

    with (
        closing(RedisStore(server.url.replace("//", "//rank:writer-secret@"), "demo")) as store,
        pytest.raises(StoreError, match="forbids the user a command, expected the permissions"),
    ):
        store.add_event("note", {})
    with closing(RedisStore(server.url.replace("//", "//half:writer-secret@"), "demo")) as store:
        assert store.durability == "unknown"


def test_user_without_subscribe_polls_instead(
    server: RedisProcess, caplog: pytest.LogCaptureFixture
) -> None:
    server.ask("ACL SETUSER", "rank", *WRITER.replace(" +subscribe", "").split())

    with (
        closing(RedisStore(server.url.replace("//", "//rank:writer-secret@"), "demo")) as store,
        opened(server.address) as other,
    ):
        before = store.version()
        waiting = threading.Thread(target=store.wait, args=(before, NEVER_S))
        waiting.start()
        other.add_event("note", {})
        waiting.join()

        assert not waiting.is_alive()
        assert "secret" not in caplog.text


# -- full, loading, slow, gone


def test_full_server_keeps_what_it_has_and_can_be_pruned(server: RedisProcess) -> None:
    with opened(server.address) as store:
        used = int(store.link.ask("", "INFO")["used_memory"])
        server.ask("CONFIG SET", "maxmemory", str(used + 2_000_000))
        num_stored, told = 0, ""
        while not told:
            try:
                num_stored += store.append([make_sample(num_stored, slots=5000)])
            except StoreError as exc:
                told = str(exc)

        assert "is full, expected room below its maxmemory; what was acknowledged" in told
        assert store.sample_counts("run-1") == {0: num_stored}
        server.ask("CONFIG SET", "maxmemory", "1")
        with pytest.raises(StoreError, match="is full"):
            store.add_event("note", {})
        with opened(server.address) as again:
            assert again.prune(float(num_stored)) == num_stored
        server.ask("CONFIG SET", "maxmemory", str(used + 2_000_000))
        assert store.append([make_sample(num_stored)]) == 1


def test_server_that_is_loading_is_waited_for(server: RedisProcess) -> None:
    with opened(server.address) as store:
        store.append([make_sample(n) for n in range(1200)])
        server.kill()
        server.settings["key-load-delay"] = "300"
        starting = threading.Thread(target=server.start)
        starting.start()
        # One attempt, but a long one: while it loads, Redis looks up once in 1,000 commands.
        once = replace(server.address, limits=Limits(timeout_s=5.0, deadline_s=0.001))
        told = ""
        while "is loading its data set" not in told:
            assert starting.is_alive(), (
                f"loaded before it was asked; the last that was told: {told}"
            )
            try:
                RedisStore(once, "demo").close()
            except StoreError as exc:
                told = str(exc)

        assert store.sample_counts("run-1") == {0: 1200}
        starting.join()


def test_stopped_server_opens_the_breaker_until_it_responds(server: RedisProcess) -> None:
    with opened(server.address, HASTY) as store:
        assert server.process is not None
        server.process.send_signal(signal.SIGSTOP)
        with pytest.raises(StoreError, match=r"does not answer, expected .* may or may not have"):
            store.add_event("note", {})
        while store.link.breaker.state == "closed":
            with pytest.raises(StoreError):
                store.version()

        with pytest.raises(StoreError, match="was not tried, because 3 attempts in a row"):
            store.version()

        server.process.send_signal(signal.SIGCONT)
        answers_again(store)
        assert store.link.breaker.state == "closed"


def answers_again(store: RedisStore) -> int:
    """Wait until the store answers, and return its version."""
    deadline = time.monotonic() + NEVER_S
    while True:
        try:
            return store.version()
        except StoreError:
            if time.monotonic() > deadline:
                raise
            threading.Event().wait(0.02)


def test_killed_server_is_an_error_and_used_after_its_restart(
    server: RedisProcess,
) -> None:
    with opened(server.address, HASTY) as store:
        store.add_event("before", {})
        server.kill()
        with pytest.raises(
            StoreError, match=r"cannot be reached, .* after \d+ attempts in 0\.\d s"
        ):
            store.add_event("lost", {})

        server.start()
        answers_again(store)
        store.add_event("after", {})

        assert [event.kind for event in store.events()] == ["before", "after"]


def test_call_outlasts_a_short_absence_of_the_server(server: RedisProcess) -> None:
    with opened(server.address) as store:
        server.kill()
        calling = threading.Thread(target=store.add_event, args=("note", {}))
        calling.start()
        server.start()
        calling.join()

        assert [event.kind for event in store.events()] == ["note"]


def test_wait_survives_the_loss_of_its_connection(server: RedisProcess) -> None:
    with opened(server.address) as store, opened(server.address) as other:
        version = store.version()
        found: list[int] = []
        waiting = threading.Thread(target=lambda: found.append(store.wait(version, NEVER_S)))
        waiting.start()
        server.ask("CLIENT KILL", "TYPE", "pubsub")
        other.add_event("note", {})
        waiting.join()

        assert found == [other.version()]


def test_close_at_any_moment_of_a_wait_is_the_error_of_a_closed_store(
    redis_server: RedisProcess,
) -> None:
    """``close`` falls between any two instructions of the waiting thread.

    redis-py then fails with whatever the closed connection makes of the next call.
    """
    random_moment = random.Random(5)
    before_s = sys.getswitchinterval()
    found: Counter[str] = Counter()

    def wait(store: RedisStore) -> None:
        try:
            store.wait(store.version(), NEVER_S)
        except Exception as exc:
            found[f"{type(exc).__name__}: {exc}"] += 1

    sys.setswitchinterval(1e-6)
    try:
        for _ in range(200):
            store = RedisStore(redis_server.url, "closes")
            thread = threading.Thread(target=wait, args=(store,))
            thread.start()
            threading.Event().wait(random_moment.uniform(0.0, 0.003))
            store.close()
            thread.join()
    finally:
        sys.setswitchinterval(before_s)

    words = f"Redis store {store.link.address} is closed, expected an open one"
    assert found == {f"StoreError: {words}": 200}


def test_unreachable_address_is_an_error(server: RedisProcess) -> None:
    server.kill()

    with pytest.raises(StoreError, match=rf"redis://127\.0\.0\.1:{server.port}/0 cannot be reach"):
        RedisStore(replace(server.address, limits=HASTY), "demo")


# -- one server or a cluster


def test_cluster_node_under_a_server_url_is_an_error(redis_cluster: RedisClusterProcesses) -> None:
    found = []
    for node in redis_cluster.nodes:
        try:
            RedisStore(node.url + "?prefix=single", "demo").close()
        except StoreError as exc:
            found.append(str(exc))

    # The node that holds the slot answers as any server would.
    assert len(found) == len(redis_cluster.nodes) - 1
    assert all("is a node of a cluster, expected a URL redis+cluster://" in told for told in found)


def test_server_under_a_cluster_url_is_an_error(redis_server: RedisProcess) -> None:
    with pytest.raises(StoreError, match="is not a cluster, expected a URL redis:// for it"):
        RedisStore(redis_server.url.replace("redis:", "redis+cluster:"), "demo")


# -- TLS


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


def started_with_tls(folder: Path, settings: dict[str, str]) -> RedisProcess:
    try:
        return RedisProcess(folder, settings)
    except StoreError as exc:
        if "Bad directive" not in str(exc):
            raise
        pytest.skip(f"{find_redis_server()} was built without TLS")


def test_connection_over_tls_checks_the_server(certificates: Path) -> None:
    settings = {
        "tls-cert-file": str(certificates / "cert.pem"),
        "tls-key-file": str(certificates / "key.pem"),
        "tls-ca-cert-file": str(certificates / "ca.pem"),
        "tls-auth-clients": "no",
    }
    with started_with_tls(certificates / "redis", settings) as server:
        tls_port = str(server.port + 1)
        server.ask("CONFIG SET", "tls-port", tls_port)
        url = f"rediss://127.0.0.1:{tls_port}"

        with closing(RedisStore(f"{url}?ca_certs={certificates}/ca.pem", "demo")) as store:
            store.add_event("note", {})
        with pytest.raises(StoreError, match="fails TLS, expected certificates"):
            RedisStore(url, "demo")
        with pytest.raises(StoreError, match="fails TLS, expected certificates"):
            RedisStore(f"{url}?ca_certs={certificates}/nowhere.pem", "demo")


def test_socket_file_serves_as_well(tmp_path: Path) -> None:
    path = tmp_path / "redis.sock"
    with (
        RedisProcess(tmp_path / "redis", {"unixsocket": str(path)}),
        closing(RedisStore(f"unix://{path}", "demo")) as store,
    ):
        store.add_event("note", {})

        assert [event.kind for event in store.events()] == ["note"]


def test_socket_file_that_is_not_there_is_named_and_is_no_failure_of_tls(tmp_path: Path) -> None:
    path = tmp_path / "redis.sock"

    with pytest.raises(StoreError, match="has no socket file, expected a server") as refused:
        RedisStore(f"unix://{path}?deadline_s=0.1", "demo")

    assert str(path) in str(refused.value)
    assert "TLS" not in str(refused.value)


def test_certificates_that_are_not_there_are_a_failure_of_tls(tmp_path: Path) -> None:
    url = f"rediss://127.0.0.1:{free_port()}?ca_certs={tmp_path}/none.pem&deadline_s=0.1"

    with pytest.raises(StoreError, match=r"fails TLS|cannot be reached"):
        RedisStore(url, "demo")


def test_server_behind_a_socket_file_is_used_and_its_absence_is_passing(tmp_path: Path) -> None:
    path = tmp_path / "redis.sock"
    url = f"unix://{path}?deadline_s=5&breaker_failures=1000"
    with (
        RedisProcess(tmp_path, {"unixsocket": str(path)}) as server,
        closing(RedisStore(url, "demo")) as store,
    ):
        first = store.add_event("before", {})
        server.kill()
        path.unlink(missing_ok=True)
        server.start()

        assert store.add_event("after", {}) > first
