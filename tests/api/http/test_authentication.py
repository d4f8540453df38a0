"""The HTTP service with a token: who may ask. Its sockets are in ``test_http_limits.py``."""

from collections.abc import Iterator

import httpx
import pytest

from api.app import create_app
from api.http.problems import ProblemType
from tests.support.http import client_of, problem_of
from tests.support.stores import MemoryStore

TOKEN = "t" * 64
BEARER = f"Bearer {TOKEN}"


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with client_of(create_app(MemoryStore("d"), token=TOKEN)) as opened:
        yield opened


@pytest.mark.parametrize("path", ["/", "/metrics", "/api/v1/state", "/static/app.js", "/healthz"])
def test_request_without_the_token_is_answered_401(client: httpx.Client, path: str) -> None:
    answer = client.get(path)

    assert problem_of(answer)[0] is ProblemType.NOT_AUTHENTICATED
    assert answer.headers["www-authenticate"].startswith("Basic ")


@pytest.mark.parametrize(
    "given",
    ["Bearer wrong", f"{BEARER}x", "Basic !!!", "Basic dHQ=", f"Digest {TOKEN}", TOKEN, ""],
)
def test_wrong_proof_is_answered_401(client: httpx.Client, given: str) -> None:
    assert client.get("/api/v1/state", headers={"authorization": given}).status_code == 401


def test_programs_and_browsers_with_the_token_are_answered(client: httpx.Client) -> None:
    # Under any name: a page of another site has no token.
    bearer = client.get("/metrics", headers={"authorization": BEARER, "host": "eplb.example:80"})
    browser = client.get("/", auth=("operator", TOKEN))
    change = client.post("/api/v1/pause", json={"reason": "test"}, auth=("", TOKEN))

    assert [bearer.status_code, browser.status_code, change.status_code] == [200, 200, 200]


def test_change_by_a_page_of_another_site_is_refused_with_the_token(client: httpx.Client) -> None:
    evil = {"origin": "http://evil.example", "authorization": BEARER}

    answer = client.post("/api/v1/pause", json={"reason": "test"}, headers=evil)

    assert problem_of(answer)[0] is ProblemType.FOREIGN_ORIGIN


def test_probes_need_no_token(client: httpx.Client) -> None:
    assert client.get("/livez").status_code == 200
    assert client.get("/readyz").status_code == 503  # nothing serves yet


@pytest.mark.parametrize("method", ["POST", "PATCH", "DELETE", "TRACE"])
def test_probe_with_another_method_needs_a_token_and_is_not_allowed(
    client: httpx.Client, method: str
) -> None:
    assert client.request(method, "/livez").status_code == 401
    assert client.request(method, "/livez", auth=("", TOKEN)).status_code == 405
