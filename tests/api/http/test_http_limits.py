"""Limits of the HTTP service over a real port: bodies, connections, time, threads, probes."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest

from api.http.app import create_app
from api.http.latest import LatestAnswer
from api.http.limits import HttpLimits
from api.http.problems import Refused
from api.http.schemas import Health
from api.http.server import HttpService
from telemetry.stores.memory import MemoryStore

MAX_BODY_BYTES, MAX_REQUESTS = HttpLimits.max_body_bytes, HttpLimits.max_requests
DEADLINE_S = 20.0
HALF_A_REQUEST = b"POST /api/v1/pause HTTP/1.1\r\nHost: localhost\r\nContent-Le"


class SlowStore(MemoryStore):
    """A store that answers nothing until it is released."""

    def __init__(self, deployment: str) -> None:
        self.released = threading.Event()
        self.released.set()
        self.asked = threading.Semaphore(0)
        super().__init__(deployment)

    def version(self) -> int:
        self.asked.release()
        assert self.released.wait(DEADLINE_S), "the test must release the store"
        return super().version()

    def current_run(self) -> None:
        self.version()


@pytest.fixture
def store() -> Iterator[SlowStore]:
    opened = SlowStore("d")
    yield opened
    opened.released.set()
    opened.close()


@pytest.fixture
def service(store: SlowStore, request: pytest.FixtureRequest) -> Iterator[HttpService]:
    limits = getattr(request, "param", HttpLimits())
    started = HttpService(create_app(store, limits=limits), limits=limits)
    started.start()
    yield started
    store.released.set()
    started.stop()


@pytest.fixture
def client(service: HttpService) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=service.url, timeout=DEADLINE_S) as opened:
        yield opened


def connect(service: HttpService, sent: bytes = b"") -> socket.socket:
    port = int(service.url.rpartition(":")[2])
    opened = socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S)
    opened.sendall(sent)
    return opened


def is_closed(opened: socket.socket) -> bool:
    """Wait until the service closes the connection without an answer."""
    try:
        return opened.recv(1) == b""
    except ConnectionResetError:
        return True


def test_body_whose_length_is_too_large_is_refused_before_it_is_sent(
    service: HttpService,
) -> None:
    head = f"POST /api/v1/pause HTTP/1.1\r\nHost: localhost\r\nContent-Length: {MAX_BODY_BYTES + 1}"

    with connect(service, head.encode() + b"\r\n\r\n") as opened:
        answer = opened.makefile("rb").read(300).decode()

    assert answer.startswith("HTTP/1.1 413 ")
    assert f"a body of {MAX_BODY_BYTES + 1} bytes, expected at most {MAX_BODY_BYTES}" in answer


def test_chunked_body_is_refused_once_it_is_too_large(client: httpx.Client) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(2 * MAX_BODY_BYTES // 1024):
            yield b"x" * 1024

    json = {"Content-Type": "application/json"}
    answer = client.post("/api/v1/pause", content=chunks(), headers=json)

    assert answer.status_code == 413
    assert answer.headers["content-type"] == "application/problem+json"
    assert client.get("/livez").status_code == 200


def test_body_of_the_largest_size_is_read(client: httpx.Client, store: SlowStore) -> None:
    body = b'{"reason": "x"}'.ljust(MAX_BODY_BYTES)

    answer = client.post(
        "/api/v1/pause", content=body, headers={"Content-Type": "application/json"}
    )

    assert answer.status_code == 200


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        HALF_A_REQUEST,
        b"POST /livez HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{",
        b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\nGET /li",
    ],
    ids=["nothing", "half a header", "half a body", "half a second request"],
)
@pytest.mark.parametrize("service", [HttpLimits(request_deadline_s=0.2)], indirect=True)
def test_request_that_does_not_arrive_in_time_is_answered_and_closed(
    service: HttpService, sent: bytes
) -> None:
    with connect(service, sent) as opened:
        answers = b""
        while part := opened.recv(65_536):
            answers += part

    whole = sent.count(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert answers.count(b"HTTP/1.1 200") == whole
    assert answers.count(b"HTTP/1.1 408") == bool(sent)
    assert answers.count(b"/api/v1/problems/request-too-slow") == bool(sent)


@pytest.mark.parametrize("service", [HttpLimits(request_deadline_s=0.2)], indirect=True)
def test_slow_client_is_closed_at_the_deadline(service: HttpService) -> None:
    with connect(service, HALF_A_REQUEST) as opened:
        opened.settimeout(0.02)
        for _ in range(int(DEADLINE_S / 0.02)):
            try:
                if is_closed(opened):
                    return
            except TimeoutError:
                with contextlib.suppress(ConnectionError):
                    opened.sendall(b"n")
    raise AssertionError(f"still open after {DEADLINE_S:g} s")


# 4 of an address.
@pytest.mark.parametrize("service", [HttpLimits(max_connections=8)], indirect=True)
def test_one_connection_too_many_takes_the_place_of_the_oldest_idle_one(
    service: HttpService,
) -> None:
    with ExitStack() as stack:
        idle = [stack.enter_context(connect(service, HALF_A_REQUEST)) for _ in range(4)]
        with httpx.Client(base_url=service.url, timeout=DEADLINE_S) as fifth:
            assert fifth.get("/livez").status_code == 200

            assert is_closed(idle[0])
            idle[1].setblocking(False)
            with pytest.raises(BlockingIOError):
                idle[1].recv(1)


# 1 of an address.
@pytest.mark.parametrize("service", [HttpLimits(max_connections=2)], indirect=True)
def test_request_that_is_answered_keeps_its_place(service: HttpService, store: SlowStore) -> None:
    store.released.clear()

    with connect(service, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n") as first:
        assert store.asked.acquire(timeout=DEADLINE_S)
        with connect(service) as second:
            assert is_closed(second)
        store.released.set()

        assert first.recv(1024).startswith(b"HTTP/1.1 200 ")


def test_requests_too_many_are_refused_and_probes_are_answered(
    service: HttpService, store: SlowStore
) -> None:
    store.released.clear()
    request = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"

    with ExitStack() as stack:
        for _ in range(MAX_REQUESTS):
            stack.enter_context(connect(service, request))
        for _ in range(MAX_REQUESTS):
            assert store.asked.acquire(timeout=DEADLINE_S)

        client = stack.enter_context(httpx.Client(base_url=service.url, timeout=DEADLINE_S))
        refused = client.get("/api/v1/state")
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert f"{MAX_REQUESTS} requests are in progress" in refused.json()["detail"]
        assert client.get("/livez").status_code == 200
        ready = client.get("/readyz")
        assert (ready.status_code, ready.json()["detail"]) == (
            503,
            "the store has not answered yet",
        )
        store.released.set()
    assert httpx.get(f"{service.url}/healthz", timeout=DEADLINE_S).status_code == 200


def test_probe_reports_for_how_long_the_store_has_not_answered(store: SlowStore) -> None:
    now = [100.0]
    released = threading.Event()

    def ask() -> Health:
        assert released.wait(DEADLINE_S)
        return Health(detail="fine")

    async def probe() -> None:
        latest = LatestAnswer(ask, wait_s=0.01, stale_after_s=10.0, clock=lambda: now[0])
        with pytest.raises(Refused, match="has not answered yet"):
            await latest.get()
        now[0] += 12.0
        with pytest.raises(Refused, match=r"the store has not answered for 12\.0 s"):
            await latest.get()
        released.set()
        patient = asyncio.get_running_loop().time() + DEADLINE_S
        while asyncio.get_running_loop().time() < patient:
            try:
                assert (await latest.get()).detail == "fine"
                return
            except Refused:
                await asyncio.sleep(0)
        raise AssertionError("no answer in time")

    asyncio.run(probe())
