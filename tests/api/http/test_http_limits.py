"""The HTTP service on a real port: bodies, connections, time, threads, probes, TLS, its address."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import Response

from api.app import create_app
from api.http.guard import DEFAULT_LIMITS, HttpLimits
from api.http.problems import ProblemType
from api.http.server import HttpService
from eplb.errors import ConfigError
from eplb.settings.deployment import loopback_address
from tests.support.certificates import Authority
from tests.support.http import client_on, problem_of, serving
from tests.support.limits import NEVER_S
from tests.support.stores import MemoryStore

MAX_BODY_BYTES, MAX_REQUESTS = HttpLimits.max_body_bytes, HttpLimits.max_requests
# No limit of time that a busy machine could reach.
LIMITS = replace(DEFAULT_LIMITS, request_deadline_s=NEVER_S, unread_deadline_s=NEVER_S)
LARGE_BYTES = 64 * 2**20  # more than the kernel buffers
HALF_A_REQUEST = b"POST /api/v1/pause HTTP/1.1\r\nHost: localhost\r\nContent-Le"
PROBE = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"


class SlowStore(MemoryStore):
    """A store that answers nothing until it is released."""

    def __init__(self, deployment: str) -> None:
        self.released = threading.Event()
        self.released.set()
        self.asked = threading.Semaphore(0)
        super().__init__(deployment)

    def version(self) -> int:
        self.asked.release()
        self.released.wait()
        return super().version()

    def current_run(self) -> None:
        self.version()


@pytest.fixture
def store() -> Iterator[SlowStore]:
    with closing(SlowStore("d")) as opened:
        yield opened


@pytest.fixture
def service(store: SlowStore, request: pytest.FixtureRequest) -> Iterator[HttpService]:
    limits = getattr(request, "param", LIMITS)
    with serving(create_app(store, limits=limits), limits=limits) as started:
        yield started
        store.released.set()


@pytest.fixture
def client(service: HttpService) -> Iterator[httpx.Client]:
    with client_on(service) as opened:
        yield opened


def port_of(service: HttpService) -> int:
    return int(service.url.rpartition(":")[2])


def connect(service: HttpService, sent: bytes = b"") -> socket.socket:
    opened = socket.create_connection(("127.0.0.1", port_of(service)))
    opened.sendall(sent)
    return opened


def is_closed(opened: socket.socket) -> bool:
    """Wait until the service closes the connection without an answer."""
    try:
        return opened.recv(1) == b""
    except ConnectionResetError:
        return True


def test_body_that_is_too_large_is_refused_before_it_has_arrived(
    service: HttpService, client: httpx.Client
) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(2 * MAX_BODY_BYTES // 1024):
            yield b"x" * 1024

    json = {"content-type": "application/json"}
    largest = b'{"reason": "x"}'.ljust(MAX_BODY_BYTES)
    chunked = client.post("/api/v1/pause", content=chunks(), headers=json)
    whole = client.post("/api/v1/pause", content=largest, headers=json)
    length = f"Connection: close\r\nContent-Length: {MAX_BODY_BYTES + 1}\r\n\r\n"
    head = b"POST /api/v1/pause HTTP/1.1\r\nHost: localhost\r\n" + length.encode()
    with connect(service, head) as opened:
        answer = opened.makefile("rb").read().decode()

    assert problem_of(chunked)[0] is ProblemType.BODY_TOO_LARGE
    assert whole.status_code == 200
    assert answer.startswith("HTTP/1.1 413 ")
    assert f"{MAX_BODY_BYTES + 1} bytes, expected at most {MAX_BODY_BYTES}" in answer


def test_body_that_is_nested_deep_is_refused_with_one_line_of_log(
    client: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    deep = b'{"reason": ' + b"[" * 480 + b"]" * 480 + b"}"

    answer = client.post(
        "/api/v1/pause", content=deep, headers={"content-type": "application/json"}
    )

    kind, detail = problem_of(answer)
    assert (answer.status_code, kind) == (400, ProblemType.BAD_REQUEST)
    assert "nested deeper than 32 levels" in detail
    assert [record.getMessage().count("\n") for record in caplog.records] == [0]


def test_request_with_a_length_and_chunks_is_refused_and_its_connection_closed(
    service: HttpService, store: SlowStore
) -> None:
    hidden = b"POST /api/v1/pause HTTP/1.1\r\nHost: localhost\r\n"
    hidden += b'Content-Type: application/json\r\nContent-Length: 15\r\n\r\n{"reason": "x"}'
    head = b"POST /api/v1/resume HTTP/1.1\r\nHost: localhost\r\n"
    head += b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n"
    with connect(service, head + hidden) as opened:
        answer = opened.makefile("rb").read().decode()

    assert answer.count("HTTP/1.1 ") == 1
    assert answer.startswith("HTTP/1.1 400 ")
    assert "connection: close" in answer.lower()
    assert "both Content-Length and Transfer-Encoding" in answer
    assert store.control().movement


def test_body_of_a_request_without_the_token_is_not_awaited(store: SlowStore) -> None:
    head = b"POST /api/v1/pause HTTP/1.1\r\nHost: x\r\nContent-Length: 60000\r\n\r\n"
    app = create_app(store, token="t" * 64, limits=LIMITS)

    with (
        serving(app, limits=LIMITS, is_authenticated=True) as service,
        connect(service, head) as opened,
    ):
        assert opened.recv(64).startswith(b"HTTP/1.1 401")


@pytest.mark.parametrize("service", [replace(LIMITS, max_connections=4)], indirect=True)
def test_silent_connection_beyond_the_limit_is_closed_and_others_answered(
    service: HttpService,
) -> None:
    with ExitStack() as stack:
        silent = [stack.enter_context(connect(service, HALF_A_REQUEST)) for _ in range(5)]

        (ended,) = wait(silent)
        assert is_closed(ended)
        with client_on(service) as another:
            assert another.get("/livez").status_code == 200


@pytest.mark.parametrize("service", [replace(LIMITS, max_connections=1)], indirect=True)
def test_request_that_is_answered_keeps_its_place(service: HttpService, store: SlowStore) -> None:
    store.released.clear()

    with connect(service, PROBE.replace(b"livez", b"healthz")) as first:
        store.asked.acquire()
        with connect(service) as second:
            assert is_closed(second)
        store.released.set()

        assert first.recv(1024).startswith(b"HTTP/1.1 200 ")


def test_client_that_does_not_read_its_answer_loses_the_place_of_its_request(
    store: SlowStore,
) -> None:
    limits = replace(LIMITS, unread_deadline_s=0.2, max_requests=1)
    app, asked = create_app(store, limits=limits), threading.Event()

    def large() -> Response:
        asked.set()
        return Response(bytes(LARGE_BYTES))

    app.add_api_route("/large", large)
    with (
        serving(app, limits=limits) as service,
        connect(service, PROBE.replace(b"livez", b"large")),
        client_on(service) as client,
    ):
        asked.wait()
        while (answer := client.get("/healthz")).status_code != 200:
            assert problem_of(answer)[0] is ProblemType.TOO_BUSY


def test_requests_too_many_are_refused_and_the_probe_of_life_is_answered(
    service: HttpService, store: SlowStore, client: httpx.Client
) -> None:
    store.released.clear()

    with ExitStack() as stack:
        for _ in range(MAX_REQUESTS):
            stack.enter_context(connect(service, PROBE.replace(b"livez", b"healthz")))
        for _ in range(MAX_REQUESTS):
            store.asked.acquire()

        refused = client.get("/api/v1/state")
        kind, detail = problem_of(refused)
        assert (kind, f"{MAX_REQUESTS} requests" in detail) == (ProblemType.TOO_BUSY, True)
        assert refused.headers["retry-after"] == "1"
        assert client.get("/livez").status_code == 200
        store.released.set()
    while client.get("/healthz").status_code != 200:
        pass  # until those are answered


# -- time


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"", b""),
        (HALF_A_REQUEST, b""),
        (PROBE.replace(b"\r\n\r\n", b"\r\nContent-Length: 2\r\n\r\n{"), b"HTTP/1.1 408"),
    ],
    ids=["nothing", "half a header", "half a body"],
)
@pytest.mark.parametrize("service", [replace(LIMITS, request_deadline_s=0.1)], indirect=True)
def test_request_that_is_late_is_closed_and_one_without_its_body_answered(
    service: HttpService, sent: bytes, status: bytes
) -> None:
    with connect(service, sent) as opened:
        try:
            answer = opened.makefile("rb").read()
        except ConnectionResetError:
            answer = b""

    assert answer.startswith(status)
    assert bool(status) == (ProblemType.REQUEST_TOO_SLOW.uri.encode() in answer)


@pytest.mark.parametrize("service", [replace(LIMITS, request_deadline_s=0.1)], indirect=True)
def test_header_that_comes_bit_by_bit_has_the_deadline_of_the_whole(service: HttpService) -> None:
    with connect(service, HALF_A_REQUEST) as opened:
        opened.settimeout(0.02)
        while is_open(opened):
            opened.sendall(b"x")


@pytest.mark.parametrize("service", [replace(LIMITS, request_deadline_s=0.1)], indirect=True)
def test_connection_that_sends_one_request_after_another_stays_open(service: HttpService) -> None:
    until = time.monotonic() + 10 * 0.1
    with connect(service) as opened, opened.makefile("rb") as answers:
        while time.monotonic() < until:
            opened.sendall(PROBE)
            assert answers.readline().startswith(b"HTTP/1.1 200")
            headers = dict(line.split(b": ") for line in iter(answers.readline, b"\r\n"))
            answers.read(int(headers[b"content-length"]))


def is_open(opened: socket.socket) -> bool:
    """Wait for the end of the connection, for as long as its timeout."""
    try:
        return opened.recv(1) != b""
    except TimeoutError:
        return True
    except ConnectionResetError:
        return False


def test_probe_of_readiness_does_not_wait_for_a_store_that_does_not_answer(
    store: SlowStore,
) -> None:
    store.released.clear()
    app = create_app(store, is_watching=True)
    with serving(app) as service, client_on(service) as client:
        store.asked.acquire()
        kind, why = problem_of(client.get("/readyz"))
        assert (kind, "not answered" in why) == (ProblemType.STORE_UNAVAILABLE, True)

        store.released.set()
        while problem_of(client.get("/readyz"))[0] is not ProblemType.NOT_READY:
            pass  # until the store was read: no run has begun


# -- the address, and its certificate


def test_port_in_use_is_refused_and_one_of_a_service_that_ended_is_free(store: SlowStore) -> None:
    with serving(create_app(store)) as service:
        port = port_of(service)
        with pytest.raises(ConfigError, match=rf"port {port} of 127\.0\.0\.1.*http\.port"):
            HttpService(create_app(store), port=port).start()

    with serving(create_app(store), port=port) as again, client_on(again) as client:
        assert client.get("/livez").status_code == 200


def test_service_with_a_certificate_answers_https_alone(store: SlowStore, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    trust = partial(ssl.create_default_context, cafile=authority.file)
    certificate = authority.issue("127.0.0.1")
    pause: Any = {"url": "/api/v1/pause", "json": {}}

    with serving(create_app(store), certificate=certificate) as service:
        assert service.url.startswith("https://127.0.0.1:")
        with client_on(service, verify=trust()) as client:
            assert client.get("/livez").status_code == 200
            own = client.post(**pause, headers={"Origin": service.url})
            other = client.post(**pause, headers={"Origin": "http://127.0.0.1"})
        assert problem_of(own)[0] is ProblemType.INVALID_REQUEST
        assert problem_of(other)[0] is ProblemType.FOREIGN_ORIGIN
        with pytest.raises(httpx.TransportError):
            httpx.get(service.url.replace("https", "http") + "/livez", timeout=None)


def test_connection_that_begins_no_tls_handshake_is_closed(
    store: SlowStore, tmp_path: Path
) -> None:
    certificate = Authority(tmp_path).issue("127.0.0.1")
    limits = replace(LIMITS, request_deadline_s=0.1)

    with (
        serving(create_app(store), certificate=certificate, limits=limits) as service,
        connect(service) as silent,
    ):
        assert is_closed(silent)  # asyncio alone would wait for 60 s


def test_expired_certificate_is_refused_before_the_port_is_bound(
    store: SlowStore, tmp_path: Path
) -> None:
    certificate = Authority(tmp_path).issue("127.0.0.1", expired=True)

    with pytest.raises(ConfigError, match="expired"):
        HttpService(create_app(store), certificate=certificate)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.com"])
def test_only_loopback_is_served_without_authentication(host: str) -> None:
    with pytest.raises(ConfigError, match=f"'{host}'.*loopback"):
        loopback_address(host)
    with pytest.raises(ConfigError, match=f"'{host}'.*loopback"):
        HttpService(create_app(MemoryStore("d")), host)


def test_name_is_no_address_of_a_service_with_authentication() -> None:
    with pytest.raises(ConfigError, match=r"'gpu7'.*numeric"):
        HttpService(create_app(MemoryStore("d")), "gpu7", is_authenticated=True)
