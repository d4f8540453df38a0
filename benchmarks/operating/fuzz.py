"""Random methods, paths, headers and bodies against the admin API: no 500, no growth of memory.

    python -m benchmarks.operating.fuzz [--requests 10000] [--seed 1]

The service is a process of its own with keys, an audit and a store of 8 ranks; nine of ten requests
prove an admin's key. Paths and bodies begin as documented ones and are then spoilt, so that most
get past the router. Memory is compared after a tenth of the requests and at the end. Exit status 1:
an answer of 500, a service that ended, or growth above 32 MB.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import sys
import tempfile
import time
from collections import Counter
from contextlib import closing
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx

from api.access.keys import AccessKeys
from api.http.app import create_app
from api.http.limits import HttpLimits
from api.http.server import HttpService
from benchmarks.operating.load import Now, Size, fill
from benchmarks.operating.streams import received
from telemetry import open_store

DEADLINE_S, MOST_GROWTH_MB = 20.0, 32.0
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE", "Q\x00", "get")
SPOILERS = (
    "..", "%2e%2e", "%00", "%ff", "é",
    "'", '"', "\\", "//", ";x=1", "-1", "1e400", "NaN", "A" * 9000,
    "9223372036854775808", "18446744073709551616", "0x10", " ", "\t", "{}", "*", "null", "true",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**63, -(2**70), 1.5, 1e308, float("nan"), float("inf"), "", "x" * 70_000,
    "\ud800", "\u0000", "2026-11-22", [], [[]], {}, {"a": {"b": [1, {}]}}, [0] * 5000,
)  # fmt: skip
HEADERS = (
    "If-Match", "Idempotency-Key", "Last-Event-ID", "Origin", "Host", "Authorization", "Accept",
    "Content-Type", "Content-Length", "Transfer-Encoding", "Expect", "Cookie", "Range",
    "X-Forwarded-For",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    drawn = random.Random(given.seed)
    with tempfile.TemporaryDirectory() as name:
        folder, (own, other) = Path(name), get_context("spawn").Pipe()
        token = AccessKeys(folder).add("fuzz", "admin")
        service = get_context("spawn").Process(target=serve, args=(folder, other), daemon=True)
        service.start()
        port = received(own, "the service")
        assert isinstance(port, int), "serve() sends a number"
        assert service.pid is not None, "it was started"
        document = httpx.get(
            f"http://127.0.0.1:{port}/api/v1/openapi.json",
            headers={"Authorization": f"Bearer {token}"},
            timeout=DEADLINE_S,
            trust_env=False,
        ).json()
        statuses: Counter[str] = Counter()
        begun, wrong, early_mb = time.perf_counter(), [], 0.0
        for number in range(given.requests):
            request = made(drawn, document, token)
            status = answer(port, request)
            statuses[status] += 1
            if status.startswith("5") and status != "503":
                wrong.append(request)
            if number == given.requests // 10:
                early_mb = memory_mb(service.pid)
        took, late_mb = time.perf_counter() - begun, memory_mb(service.pid)
        is_alive = service.is_alive()
        own.send("end")
        service.join(DEADLINE_S)
    print(f"python {sys.version.split()[0]}, seed {given.seed}: {given.requests} in {took:.0f} s")
    print(", ".join(f"{count} x {status}" for status, count in statuses.most_common()))
    print(f"memory {early_mb:.0f} MB after a tenth, {late_mb:.0f} MB at the end; alive: {is_alive}")
    for request in wrong[:5]:
        print("wrong:", request[:600])
    sys.exit(bool(wrong) or not is_alive or late_mb - early_mb > MOST_GROWTH_MB)


def serve(folder: Path, pipe: Connection) -> None:
    """Run the service until the parent process ends it."""
    with closing(open_store(folder / "store.sqlite", "west")) as store:
        fill(store, Size(ranks=8, layers=4, experts=32, windows=20), Now(time.time()))
        limits = HttpLimits(stream_s=0.05, request_deadline_s=0.5)
        app = create_app(store, plan_wait_s=0.0, limits=limits, state_dir=folder, is_watching=True)
        service = HttpService(app, limits=limits)
        service.start()
        pipe.send(int(service.url.rpartition(":")[2]))
        received(pipe, "the end", 3600.0)
        service.stop()


def made(drawn: random.Random, document: dict[str, Any], token: str) -> bytes:
    """A request that is nearly as documented, or not at all."""
    path, operations = drawn.choice(list(document["paths"].items()))
    method, operation = drawn.choice(list(operations.items()))
    method = drawn.choice(METHODS) if drawn.random() < 0.1 else method.upper()
    while "{" in path:
        before, _, rest = path.partition("{")
        path = before + drawn.choice(("0", "1", *SPOILERS)) + rest.partition("}")[2]
    if drawn.random() < 0.2:
        cut = drawn.randrange(len(path) + 1)
        path = path[:cut] + drawn.choice(SPOILERS) + path[cut:]
    names = [one["name"] for one in operation.get("parameters", ()) if one["in"] == "query"]
    if drawn.random() < 0.5:
        asked = drawn.choices((*names, "x"), k=drawn.randint(1, 3))
        path += "?" + "&".join(f"{one}={drawn.choice(('1', *SPOILERS))}" for one in asked)
    body = body_of(drawn, document, operation)
    headers = {"Host": "localhost", "Content-Type": "application/json"}
    headers["Content-Length"] = str(len(body))
    if drawn.random() < 0.9:
        headers["Authorization"] = f"Bearer {token}"
    if drawn.random() < 0.5:
        headers |= {"If-Match": drawn.choice(("*", '"1"', '"2"'))}
    for name in drawn.choices(HEADERS, k=drawn.randint(0, 2)):
        if drawn.random() < 0.4:
            headers[name] = drawn.choice((*SPOILERS, "chunked", "bytes=0-", "http://evil.example"))
    head = f"{method} {path} HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in headers.items())
    return head.encode("utf-8", "surrogatepass") + b"Connection: close\r\n\r\n" + body


def body_of(drawn: random.Random, document: dict[str, Any], operation: dict[str, Any]) -> bytes:
    """JSON with the documented keys and other values, damaged JSON, or no JSON."""
    if "requestBody" not in operation or drawn.random() < 0.05:
        return drawn.choice((b"", b"{", drawn.randbytes(drawn.randrange(300)), b"[" * 5000))
    (content,) = operation["requestBody"]["content"].values()
    schema = content["schema"]
    while "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    body = dict(drawn.choice(schema.get("examples") or [{}]))
    for name in drawn.choices([*schema.get("properties", ()), "x"], k=drawn.randint(0, 3)):
        body[name] = drawn.choice(VALUES)
    text = json.dumps(body).encode()
    return text if drawn.random() < 0.9 else text[: drawn.randrange(len(text) + 1)]


def answer(port: int, request: bytes) -> str:
    """Status of the answer, read to its end; else how the connection ended."""
    with socket.create_connection(("127.0.0.1", port), DEADLINE_S) as one:
        try:
            one.sendall(request)
            found = b""
            while piece := one.recv(65_536):
                found = (found + piece)[:64]
        except TimeoutError:
            return f"silent for {DEADLINE_S:.0f} s"
        except ConnectionError:
            return "closed"
    return found[9:12].decode("ascii", "replace") if found.startswith(b"HTTP/1.1 ") else "closed"


def memory_mb(pid: int) -> float:
    """What a process holds in memory."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


if __name__ == "__main__":
    main()
