"""Streams of events: what a client gets, when it returns, and when it is too slow."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest

from api.app import create_app
from api.http.guard import DEFAULT_LIMITS
from api.http.problems import ProblemType
from api.http.server import HttpService
from telemetry.state.events import Event
from tests.support.http import client_of, client_on, problem_of, serving
from tests.support.limits import NEVER_S
from tests.support.stores import MemoryStore

PATH = "/api/v1/events/stream"
LIMITS = replace(DEFAULT_LIMITS, max_streams=2, stream_s=NEVER_S, request_deadline_s=NEVER_S)


class CountingStore(MemoryStore):
    """Counts the threads that read events."""

    def __init__(self, deployment: str) -> None:
        self.readers = set[int]()
        super().__init__(deployment)

    def events(self, *, after: int = 0, limit: int = 1000) -> list[Event]:
        self.readers.add(threading.get_ident())
        return super().events(after=after, limit=limit)


@pytest.fixture
def store() -> Iterator[CountingStore]:
    with closing(CountingStore("d")) as opened:
        yield opened


@pytest.fixture
def service(store: CountingStore) -> Iterator[HttpService]:
    with serving(create_app(store, limits=LIMITS), limits=LIMITS) as opened:
        yield opened


class Stream:
    """One open stream."""

    def __init__(self, response: httpx.Response) -> None:
        self._lines = response.iter_lines()
        self.response = response

    def message(self) -> dict[str, str]:
        """Read on to the next message that is no heartbeat."""
        fields: dict[str, str] = {}
        for line in self._lines:
            if not line and fields:
                return fields
            name, _, value = line.partition(":")
            if name:
                fields[name] = value.strip()
        return fields

    def event(self) -> Any:
        """Read the next event."""
        return json.loads(self.message()["data"])


@contextmanager
def stream(service: HttpService, last: int | None = None, **params: int) -> Iterator[Stream]:
    headers = {} if last is None else {"Last-Event-ID": str(last)}
    with (
        client_on(service) as client,
        client.stream("GET", PATH, headers=headers, params=params) as response,
    ):
        assert response.status_code == 200, response.read()
        opened = Stream(response)
        assert opened.message() == {"retry": "1000"}
        yield opened


def test_stream_gives_events_as_the_route_of_events_does(
    service: HttpService, store: CountingStore
) -> None:
    store.add_event("early", {"n": 1})
    with stream(service, after=1) as opened:
        store.add_event("plan", {"n": 2})
        found = opened.event()

    listed = get(service, "/api/v1/events?after=1").json()["events"]
    assert [found] == listed
    assert opened.response.headers["content-type"].startswith("text/event-stream")


def test_client_whose_events_are_gone_is_told_so(
    service: HttpService, store: CountingStore
) -> None:
    for number in range(1005):
        store.add_event("plan", {"n": number})

    with stream(service, last=2) as opened:
        assert opened.message()["event"] == "missed"
        assert opened.event()["id"] == 6


def test_two_clients_cost_one_reader_of_the_store(
    service: HttpService, store: CountingStore
) -> None:
    with stream(service, after=0) as one, stream(service, after=0) as two:
        for number in (1, 2):
            store.add_event("plan", {})
            assert one.event()["id"] == two.event()["id"] == number

    assert len(store.readers) == 1


def test_client_beyond_the_limit_of_streams_is_refused(service: HttpService) -> None:
    with stream(service), stream(service):
        kind, detail = problem_of(get(service, PATH))

    assert (kind, "2 event streams" in detail) == (ProblemType.TOO_BUSY, True)


def test_streams_of_one_address_leave_connections_for_everything_else(
    store: CountingStore,
) -> None:
    limits = replace(LIMITS, max_streams=128, max_streams_of_address=3, max_connections=8)
    with serving(create_app(store, limits=limits), limits=limits) as service, ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(stream(service))
        kind, detail = problem_of(get(service, PATH))

        assert (kind, "3 event streams of one address" in detail) == (ProblemType.TOO_BUSY, True)
        assert get(service, "/livez").status_code == 200
    assert DEFAULT_LIMITS.max_streams_of_address < DEFAULT_LIMITS.max_connections // 2


def test_client_that_reads_nothing_is_ended_and_counted_and_delays_nobody(
    store: CountingStore,
) -> None:
    # The connection has the longer deadline, so that the stream ends first on a busy machine too.
    app = create_app(store, limits=replace(LIMITS, unread_deadline_s=1.0))
    with serving(app, limits=replace(LIMITS, unread_deadline_s=NEVER_S)) as service:
        host, port = service.url.removeprefix("http://").split(":")
        with (
            socket.create_connection((host, int(port))) as slow,
            stream(service, after=0) as quick,
        ):
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.sendall(f"GET {PATH} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            assert slow.recv(15) == b"HTTP/1.1 200 OK"
            last = 0
            while not (found := dropped(get(service, "/metrics").text)):
                sent = range(last + 1, last + 101)
                for _ in sent:
                    store.add_event("plan", {"text": "x" * 20_000})
                assert [quick.event()["id"] for _ in sent] == list(sent)
                last = sent[-1]

            assert found == [1.0]


def get(service: HttpService, path: str) -> httpx.Response:
    with client_on(service) as client:
        return client.get(path)


def dropped(text: str) -> list[float]:
    """The count of dropped clients, once there is one."""
    lines = [one for one in text.splitlines() if one.startswith("eplb_event_streams_dropped_total")]
    return [float(one.rpartition(" ")[2]) for one in lines if not one.endswith(" 0.0")]


def test_stream_ends_after_its_time_and_goes_on_where_it_was(store: CountingStore) -> None:
    limits = replace(LIMITS, stream_s=0.2)
    store.add_event("plan", {})
    with serving(create_app(store, limits=limits), limits=limits) as service:
        with stream(service, after=0) as opened:
            last = opened.event()["id"]
            assert opened.message() == {}
        store.add_event("plan", {})

        with stream(service, last=last) as again:
            assert again.event()["id"] == 2


@pytest.mark.parametrize("last", ["-1", "x", "9" * 30, "1.0"])
def test_last_event_id_that_is_no_number_is_refused(store: CountingStore, last: str) -> None:
    with client_of(create_app(store)) as client:
        refused = client.get(PATH, headers={"Last-Event-ID": last})

    assert problem_of(refused)[0] is ProblemType.INVALID_REQUEST
