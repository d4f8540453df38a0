"""The HTTP service with a token: who may ask, and that a stranger's body is not read."""

import socket
from collections.abc import Iterator

import httpx
import pytest

from api.http.app import create_app
from api.http.server import HttpService
from eplb.errors import ConfigError
from telemetry.stores.memory import MemoryStore

TOKEN, DEADLINE_S = "t" * 64, 10.0


@pytest.fixture
def service() -> Iterator[HttpService]:
    store = MemoryStore("d")
    started = HttpService(create_app(store, token=TOKEN), "0.0.0.0", is_authenticated=True)
    started.start()
    yield started
    started.stop()
    store.close()


def get(service: HttpService, path: str, **headers: str) -> httpx.Response:
    url = service.url.replace("0.0.0.0", "127.0.0.1")
    return httpx.get(f"{url}{path}", headers=headers, timeout=DEADLINE_S)


@pytest.mark.parametrize("path", ["/", "/metrics", "/api/v1/state", "/static/app.js", "/healthz"])
def test_request_without_the_token_is_answered_401(service: HttpService, path: str) -> None:
    answer = get(service, path)

    assert answer.status_code == 401
    assert answer.headers["www-authenticate"].startswith("Basic ")
    assert answer.json()["title"] == "Not authenticated"


@pytest.mark.parametrize(
    "given",
    [
        "Bearer wrong",
        f"Bearer {TOKEN}x",
        "Basic !!!",
        "Basic dHQ=",
        f"Digest {TOKEN}",
        TOKEN,
        "",
    ],
)
def test_wrong_proof_is_answered_401(service: HttpService, given: str) -> None:
    assert get(service, "/api/v1/state", authorization=given).status_code == 401


def test_programs_and_browsers_with_the_token_are_answered(service: HttpService) -> None:
    bearer = get(service, "/metrics", authorization=f"Bearer {TOKEN}", host="eplb.example:80")
    url = service.url.replace("0.0.0.0", "127.0.0.1")
    browser = httpx.get(f"{url}/", auth=("operator", TOKEN), timeout=DEADLINE_S)
    change = httpx.post(
        f"{url}/api/v1/pause", json={"reason": "test"}, auth=("", TOKEN), timeout=DEADLINE_S
    )

    assert [bearer.status_code, browser.status_code, change.status_code] == [200, 200, 200]


def test_change_by_a_page_of_another_site_is_refused_with_the_token(service: HttpService) -> None:
    url = service.url.replace("0.0.0.0", "127.0.0.1")
    answer = httpx.post(
        f"{url}/api/v1/pause",
        json={"reason": "test"},
        auth=("", TOKEN),
        headers={"origin": "http://evil.example"},
        timeout=DEADLINE_S,
    )

    assert answer.status_code == 403


def test_probes_need_no_token(service: HttpService) -> None:
    assert get(service, "/livez").status_code == 200
    assert get(service, "/readyz").status_code == 503  # nothing serves yet


def test_body_of_a_request_without_the_token_is_not_awaited(service: HttpService) -> None:
    port = int(service.url.rpartition(":")[2])
    head = b"POST /api/v1/pause HTTP/1.1\r\nHost: x\r\nContent-Length: 60000\r\n\r\n"

    with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as connection:
        connection.sendall(head)
        answer = connection.recv(64)

    assert answer.startswith(b"HTTP/1.1 401")


def test_address_of_another_host_needs_authentication() -> None:
    app = create_app(MemoryStore("d"))

    with pytest.raises(ConfigError, match=r"host is '10\.0\.0\.1', expected a loopback address"):
        HttpService(app, "10.0.0.1")
    with pytest.raises(ConfigError, match="host is 'gpu7', expected a numeric address"):
        HttpService(app, "gpu7", is_authenticated=True)
