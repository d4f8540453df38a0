"""Attacks on the HTTP service and on the signals and output of ``eplb demo``."""

from __future__ import annotations

import http.client
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.attack import Attack, Outcome
from tests.support.http import SCHEMATHESIS
from tests.support.sessions import pids_of

BIN = Path(sys.executable).parent
START_S, END_S, SERVE_AGAIN_S = 60.0, 60.0, 60.0
DESCRIPTORS, HALF_SENT = 1024, 1200
MB = 2**20
SMALL = {
    "ranks_per_node": 2,
    "layers": 2,
    "experts": 8,
    "top_k": 2,
    "hidden": 32,
    "intermediate": 32,
    "window_steps": 4,
    "port": 0,
}
OPTIONS = ["--serve", "--seconds", "1", "--tokens-per-rank", "64", "--view", "plain"]


class Demo:
    """``eplb demo`` in a session of its own."""

    def __init__(self, folder: Path, prepare: Callable[[], object] = lambda: None) -> None:
        given = {"state_dir": folder / "state"} | SMALL
        words = [*OPTIONS, "--output", str(folder / "summary.json")]
        words += [word for item in given.items() for word in ("--setting", "{}={}".format(*item))]
        self.summary, self.output = folder / "summary.json", folder / "output.txt"
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [BIN / "eplb", "demo", *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=prepare,
            )

    def said(self, words: str) -> str:
        """Wait for a line with these words."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            for line in self.output.read_text(errors="replace").splitlines():
                if words in line:
                    return line
            if self.process.poll() is not None:
                break
            time.sleep(0.1)
        raise RuntimeError(f"no {words!r}: {self.output.read_text(errors='replace')[-500:]}")

    @property
    def url(self) -> str:
        """Where it is served."""
        return self.said("eplb demo: ").split()[-1]

    def client(self) -> httpx.Client:
        """Wait until it serves, and give a client of it."""
        self.said(" window=1 ")
        return httpx.Client(base_url=self.url, timeout=20.0)

    def interrupt(self, how: signal.Signals = signal.SIGINT) -> int:
        """Signal all its processes as a terminal does, and wait for its end."""
        os.killpg(self.process.pid, how)
        return self.process.wait(END_S)

    def memory(self, field: str) -> int:
        """Bytes of the process that serves HTTP, of a field of its status."""
        status = Path(f"/proc/{self.pid('serve')}/status").read_text()
        return int(status.partition(f"{field}:")[2].split()[0]) * 1024

    def pid(self, title: str) -> int:
        """The id of a process of this demo."""
        if found := pids_of(self.process.pid, title):
            return found[0]
        raise RuntimeError(f"{title} is not there")


@contextmanager
def demo(folder: Path, prepare: Callable[[], object] = lambda: None) -> Iterator[Demo]:
    running = Demo(folder, prepare)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            os.killpg(running.process.pid, signal.SIGKILL)
        running.process.wait(END_S)


def large_bodies(folder: Path) -> Outcome:
    def chunks() -> Iterator[bytes]:
        for _ in range(100):
            yield b"x" * MB

    with demo(folder) as running, running.client() as client:
        Path(f"/proc/{running.pid('serve')}/clear_refs").write_text("5")  # the peak, from now on
        before, statuses = running.memory("VmRSS"), []
        for content in (b"x" * (100 * MB), chunks()):
            header = {"Content-Type": "application/json"}
            answer = client.post("/api/v1/pause", content=content, headers=header)
            statuses.append((answer.status_code, len(answer.content)))
        growth = (running.memory("VmHWM") - before) / MB
    held = growth <= 64 and all(status == 413 and size < 1000 for status, size in statuses)
    return Outcome(held, f"100 MB with a length and in chunks: {statuses}, +{growth:.1f} MB")


def cross_site(folder: Path) -> Outcome:
    body = b'{"reason": "cross-site"}'
    kinds = ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"]
    tries: list[dict[str, str]] = [{"Content-Type": kind} for kind in kinds]
    json_type = {"Content-Type": "application/json"}
    tries += [{}, json_type | {"Origin": "null"}, json_type | {"Origin": "https://elsewhere.test"}]
    tries += [json_type | {"Sec-Fetch-Site": site} for site in ("cross-site", "same-site")]
    tries += [json_type | {"Host": "elsewhere.test"}]
    with demo(folder) as running, running.client() as client:
        statuses = [
            client.post("/api/v1/pause", content=body, headers=one).status_code for one in tries
        ]
        moves = client.get("/api/v1/state").json()["movement"]
    return Outcome(bool(moves) and min(statuses) >= 400, f"{len(tries)} posts: {statuses}")


def hostile_values(folder: Path) -> Outcome:
    ids = [2**31, 2**63 - 1, 2**63, 2**64, -1, 10**30, "1e3", "0x1", "%00", "१"]
    paths = ["/api/v1/tasks/{}", "/api/v1/placement?generation={}", "/api/v1/events?after={}"]
    switches: list[Any] = ["no", "off", "false", "0", 0, 1, None, [], {}, 0.0]
    with demo(folder) as running, running.client() as client:
        statuses = [client.get(path.format(one)).status_code for path in paths for one in ids]
        statuses += [
            client.post("/api/v1/explanations", json=body).status_code
            for body in ({"layer": 2**63, "expert": 0}, {"layer": 0, "expert": 10**30})
        ]
        refused = [
            client.post("/api/v1/rebalances", json={"reason": "x", "dry_run": one}).status_code
            for one in switches
        ]
    held = max(statuses) < 500 and set(refused) == {422}
    return Outcome(held, f"ids: {sorted(set(statuses))}, dry_run: {sorted(set(refused))}")


def half_sent(folder: Path) -> Outcome:
    """A rank is killed while 1,200 requests are half sent; again without them, to compare."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
    took = [serves_again(folder / str(count), count) for count in (0, HALF_SENT)]
    (quiet_s, _, quiet), (loud_s, burst_s, loud) = took
    quiet_ms, loud_ms = (float(np.percentile(one, 99)) * 1e3 for one in (quiet, loud))
    # Ranks that start again take every core of a small machine, with and without the requests.
    is_late = loud_ms > max(100.0, 1.5 * quiet_ms)
    figures = f"serves again after {quiet_s:.1f} s without, {loud_s:.1f} s with"
    figures += f"; livez p99 {quiet_ms:.0f} ms without, {loud_ms:.0f} ms with"
    figures += f" ({len(loud)} probes), {burst_s * 1e3:.0f} ms for one sent after the burst"
    return Outcome(loud_s < min(SERVE_AGAIN_S, 2 * quiet_s + 5.0) and not is_late, figures)


def serves_again(folder: Path, count: int) -> tuple[float, float, list[float]]:
    """Seconds until it serves again, of the first probe after the burst, and of each one later."""
    folder.mkdir()
    limits = (DESCRIPTORS, DESCRIPTORS)
    with (
        demo(folder, lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limits)) as running,
        running.client() as client,
        ExitStack() as stack,
    ):
        port, is_over, delays = int(running.url.rpartition(":")[2]), threading.Event(), []

        def flood() -> None:
            head = b"POST /api/v1/pause HTTP/1.1\r\nHost: localhost\r\nContent-Length: 20\r\n\r\n{"
            for _ in range(count):
                opened = stack.enter_context(socket.create_connection(("127.0.0.1", port), 20.0))
                opened.sendall(head)

        def probe() -> None:
            while not is_over.wait(0.02):
                delays.append(ask_livez(port))

        threads = [threading.Thread(target=one) for one in (flood, probe)]
        for thread in threads:
            thread.start()
        threads[0].join()
        # A probe sent now comes after the burst; it is reported apart. From then on: all half-sent,
        # one rank killed.
        longest = ask_livez(port)
        delays.clear()
        while "run" not in client.get("/api/v1/state").json():  # its ranks do not serve yet
            if is_over.wait(0.1):
                break
        first = client.get("/api/v1/state").json()["run"]
        start = time.monotonic()
        os.kill(running.pid("rank 1"), signal.SIGKILL)
        while time.monotonic() < start + SERVE_AGAIN_S:
            state = client.get("/api/v1/state").json()
            if state.get("run", first) != first and state["step"] > 0 and not state["silent_ranks"]:
                break
            time.sleep(0.1)
        took = time.monotonic() - start
        is_over.wait(2.0)  # of probes after it serves again
        is_over.set()
        threads[1].join()
        if running.interrupt() != 0 or not running.summary.is_file():
            raise RuntimeError(f"no summary: {running.output.read_text()[-500:]}")
    return took, longest, delays


def ask_livez(port: int) -> float:
    """Ask once over a connection of its own; seconds until the answer."""
    start = time.monotonic()
    asking = http.client.HTTPConnection("127.0.0.1", port, timeout=20.0)
    asking.request("GET", "/livez")
    assert asking.getresponse().status == 200
    asking.close()
    return time.monotonic() - start


def escapes(folder: Path) -> Outcome:
    reason = "\x1b[2J\x1b]0;owned\x07\x9b31m\r\ngeneration=9 decision=MOVE reason=\u202e"
    with demo(folder) as running, running.client() as client:
        client.post("/api/v1/pause", json={"reason": reason}).raise_for_status()
        running.said("owned")
        running.interrupt()
        lines = running.output.read_bytes().decode().split("\n")
    found = [sign for sign in "\x1b\x07\x9b\r\u202e" if any(sign in line for line in lines)]
    forged = [line for line in lines if line.startswith("generation=9")]
    return Outcome(not found and not forged, f"control characters {found}, forged lines {forged}")


def closed_terminal(folder: Path) -> Outcome:
    with demo(folder) as running:
        running.client().close()
        status = running.interrupt(signal.SIGHUP)
        missing = json.loads(running.summary.read_text())["missing"]
    return Outcome(status == 0 and not missing, f"status {status}, missing {missing}")


def early_interrupts(folder: Path) -> Outcome:
    """The interpreter's own start is left out: no file of the project is in its traceback."""
    told = set()
    for number in range(10):
        place = folder / str(number)
        place.mkdir()
        with demo(place) as running:
            time.sleep(0.06 + 0.03 * number)
            status = running.interrupt()
            lines = running.output.read_text().splitlines()
            is_before = lines and not any("/api/" in line for line in lines) and status != 130
            told.add("before the project" if is_before else f"{status} {' '.join(lines)}")
    held = told <= {"before the project", "130 eplb: interrupted", "-2 "}
    return Outcome(held, f"10 interrupts in 0.06..0.33 s: {sorted(told)}"[:200])


def schemathesis(folder: Path) -> Outcome:
    with demo(folder) as running:
        running.client().close()
        command = [str(BIN / "schemathesis"), "run", f"{running.url}/api/v1/openapi.json"]
        command += ["--checks", "all", "--continue-on-failure", "--max-time", "300"]
        command += ["--max-examples", "5", "--generation-database", "none", "--no-color"]
        # Not ready is a 503, as documented; tests/api/http/test_http_schema.py has one that is
        # ready.
        command += ["--exclude-path", "/readyz"]
        # A request to rebalance waits 10 s for its plan.
        command += ["--max-response-time", "30", "--request-timeout", "30"]
        (folder / "schemathesis.toml").write_text(SCHEMATHESIS)
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=400)
    lines = [line.strip() for line in done.stdout.splitlines()]
    words = ("Tested", "generated", "ST1", "ST2", "ST3", "ST4", "- GET", "- POST", "curl")
    figures = "; ".join(line for line in lines if any(word in line for word in words))
    return Outcome(done.returncode == 0, figures[:600])


ATTACKS = (
    Attack("http-large-body", "A 100 MB body is refused and costs 64 MB at most.", large_bodies),
    Attack("http-cross-site", "No page of another site changes state.", cross_site),
    Attack("http-hostile-values", "No id gives 500, only true and false are.", hostile_values),
    Attack("http-half-sent", "1,200 half-sent requests change nothing for ranks.", half_sent),
    Attack("http-schemathesis", "Every answer is as documented.", schemathesis),
    Attack("output-escapes", "No reason commands the terminal or forges a line.", escapes),
    Attack("signal-hangup", "A closed terminal ends with a summary.", closed_terminal),
    Attack("signal-early", "An early interrupt ends in one line.", early_interrupts),
)
