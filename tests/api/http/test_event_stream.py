"""Streams of events: what a client gets, when it returns, and when it is too slow."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest

from api.http.app import create_app
from api.http.limits import DEFAULT_LIMITS
from api.http.server import HttpService
from telemetry.store import Event
from telemetry.stores.memory import MemoryStore

DEADLINE_S = 120.0
PATH = "/api/v1/events/stream"
LIMITS = replace(DEFAULT_LIMITS, max_streams=2, stream_s=DEADLINE_S)


class CountingStore(MemoryStore):
    """Counts how often events are read."""

    event_reads = 0

    def events(self, *, after: int = 0, limit: int = 1000) -> list[Event]:
        self.event_reads += 1
        return super().events(after=after, limit=limit)


@pytest.fixture
def store() -> Iterator[CountingStore]:
    with closing(CountingStore("d")) as opened:
        yield opened


@pytest.fixture
def service(store: CountingStore) -> Iterator[HttpService]:
    opened = HttpService(create_app(store, limits=LIMITS), limits=LIMITS)
    opened.start()
    yield opened
    opened.stop()


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
        httpx.Client(base_url=service.url, timeout=DEADLINE_S) as client,
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

    listed = httpx.get(f"{service.url}/api/v1/events", params={"after": 1}).json()["events"]
    assert [found] == listed
    assert opened.response.headers["content-type"].startswith("text/event-stream")


def test_client_that_returns_gets_what_it_missed(
    service: HttpService, store: CountingStore
) -> None:
    for number in range(5):
        store.add_event("plan", {"n": number})

    with stream(service, last=3, after=0) as opened:
        assert [opened.event()["id"] for _ in range(2)] == [4, 5]


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
        store.add_event("plan", {})
        assert one.event()["id"] == two.event()["id"] == 1
        before = store.event_reads
        store.add_event("plan", {})
        assert one.event()["id"] == two.event()["id"] == 2

        # It reads until there is nothing more.
        assert store.event_reads - before <= 2


def test_client_beyond_the_limit_of_streams_is_refused(service: HttpService) -> None:
    with stream(service), stream(service):
        refused = httpx.get(f"{service.url}{PATH}", timeout=DEADLINE_S)

    assert refused.status_code == 503
    assert refused.json()["detail"] == "2 event streams are open, expected fewer than 2"


def test_slow_client_is_dropped_and_counted_and_delays_nobody(
    service: HttpService, store: CountingStore
) -> None:
    host, port = service.url.removeprefix("http://").split(":")
    with (
        socket.create_connection((host, int(port)), DEADLINE_S) as slow,
        stream(service, after=0) as quick,
    ):
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.sendall(f"GET {PATH} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert slow.recv(15) == b"HTTP/1.1 200 OK"
        until = time.monotonic() + DEADLINE_S
        sent = 0
        while "event_streams_dropped_total" not in (text := metrics(service)) or dropped(text) < 1:
            for _ in range(100):
                sent += 1
                store.add_event("plan", {"text": "x" * 4000})
                assert quick.event()["id"] == sent
            assert time.monotonic() < until, "the slow client was not dropped"

        assert dropped(text) == 1


def metrics(service: HttpService) -> str:
    return httpx.get(f"{service.url}/metrics", timeout=DEADLINE_S).text


def dropped(text: str) -> float:
    lines = [one for one in text.splitlines() if one.startswith("eplb_event_streams_dropped_total")]
    return float(lines[0].rpartition(" ")[2])


def test_service_stops_while_a_stream_is_open(store: CountingStore) -> None:
    service = HttpService(create_app(store))
    service.start()
    ended = threading.Event()

    with stream(service, after=0) as opened:
        begun = time.monotonic()
        threading.Thread(target=lambda: (service.stop(), ended.set())).start()
        assert opened.message() == {}

        assert ended.wait(DEADLINE_S)
        assert time.monotonic() - begun < 5.0


def test_stream_ends_after_its_time_and_goes_on_where_it_was(store: CountingStore) -> None:
    limits = replace(LIMITS, stream_s=0.2)
    service = HttpService(create_app(store, limits=limits), limits=limits)
    service.start()
    store.add_event("plan", {})
    with stream(service, after=0) as opened:
        last = opened.event()["id"]
        assert opened.message() == {}
    store.add_event("plan", {})

    with stream(service, last=last) as again:
        assert again.event()["id"] == 2
    service.stop()


@pytest.mark.parametrize("last", ["-1", "x", "9" * 30, "1.0"])
def test_last_event_id_that_is_no_number_is_refused(service: HttpService, last: str) -> None:
    refused = httpx.get(f"{service.url}{PATH}", headers={"Last-Event-ID": last})

    assert refused.status_code == 422
    assert "expected a number" in refused.json()["detail"]
