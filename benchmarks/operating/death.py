"""From a fault of a live cluster to the verdict of its service, and to an alert in Prometheus.

    python -m benchmarks.operating.death --repeats 3

``eplb demo`` serves on four ranks of two hosts in processes of its own. One process after another
is killed or stopped; the state and a real Prometheus are asked twenty times a second until the
verdict is another one and an alert of the fault is pending, and then until all serve again.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from math import nan
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.operating.prometheus_server import SCRAPE_S, Prometheus

EPLB = Path(sys.executable).with_name("eplb")
WORDS = "demo --ranks 4 --nodes 2 --layers 2 --experts 8 --top-k 2 --serve --seconds 5 --port 0"
RESTARTS = "supervision.restart_after_death=1000"
DEADLINE_S = 240.0
MOST_S = 60.0  # for the verdict and the alert of a fault
LOOK_S = 0.05
SETTLED_S = 3.0  # without a change of the verdict before the next fault
NONE = "none"


@dataclass(frozen=True)
class Fault:
    """What is done to the processes of some titles."""

    name: str
    titles: tuple[str, ...]
    how: signal.Signals
    alerts: tuple[str, ...]  # any of them tells of it


OF_RANKS = ("EplbStopped", "EplbRankSilent", "EplbNoProgress", "EplbNoTokens", "EplbBlind")
OF_CONTROLLER = ("EplbProcessDown", "EplbNoLeader", "EplbControllerHangs")
FAULTS = (
    Fault("a rank is killed", ("rank 1",), signal.SIGKILL, ("EplbAnomaly rank_death", *OF_RANKS)),
    Fault("the controller is killed", ("controller",), signal.SIGKILL, OF_CONTROLLER),
    Fault(
        "a host weight cache is killed", ("preload process",), signal.SIGKILL, ("EplbProcessDown",)
    ),
    Fault("a rank is stopped", ("rank 1",), signal.SIGSTOP, OF_RANKS),
    Fault("the controller is stopped", ("controller",), signal.SIGSTOP, OF_CONTROLLER),
    Fault("the ranks of a host are stopped", ("rank 2", "rank 3"), signal.SIGSTOP, OF_RANKS),
)


@dataclass(frozen=True)
class Found:
    """What followed from a fault, in seconds after it."""

    verdict_s: float
    verdict: str  # with its reason
    alert_s: float
    alert: str
    serves_s: float


def main() -> None:
    """Print a row for each fault, and the verdicts as they come."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="", help="faults whose name has this pattern")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "output"
        command = [str(EPLB), *WORDS.split(), "--view", "plain", "--state-dir", f"{folder}/state"]
        with log.open("w") as output:
            demo = subprocess.Popen(
                [*command, "--setting", RESTARTS],
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            found = _until(lambda: re.search(r"http://[0-9.:]+", log.read_text()), "the address")
            rows = {
                fault.name: [
                    _one(found[0], demo.pid, fault, Path(folder) / f"{at}-{number}")
                    for number in range(asked.repeats)
                ]
                for at, fault in enumerate(FAULTS)
                if re.search(asked.only, fault.name)
            }
        finally:
            demo.send_signal(signal.SIGINT)
            demo.wait(DEADLINE_S)
    print("\n| fault | verdict after s | which | alert pending after s | which | serving after s |")
    print("|---|---|---|---|---|---|")
    for name, times in rows.items():
        cells = [
            ", ".join(f"{getattr(one, part):.2f}" for one in times)
            + f"; median {median(getattr(one, part) for one in times):.2f}"
            for part in ("verdict_s", "alert_s", "serves_s")
        ]
        last = times[-1]
        print(f"| {name} | {cells[0]} | {last.verdict} | {cells[1]} | {last.alert} | {cells[2]} |")
    load = " ".join(f"{one:.1f}" for one in os.getloadavg())
    print(f"scrapes and rules every {SCRAPE_S} s; load average at the end {load}")


def _one(url: str, demo: int, fault: Fault, folder: Path) -> Found:
    """Cause one fault in a cluster that serves, and wait until it serves again."""
    _until(lambda: _serves_for(url, SETTLED_S), "the deployment to serve")
    folder.mkdir()
    prometheus = Prometheus(folder, url.removeprefix("http://"))
    pids = [_pid_of(demo, title) for title in fault.titles]
    try:
        prometheus.wait("verdict", lambda: prometheus.query('eplb_verdict{verdict="serving"} == 1'))
        known, begun = prometheus.alerts(), time.monotonic()
        verdict, alert = (nan, NONE), (nan, NONE)
        for pid in pids:
            os.kill(pid, fault.how)
        while NONE in (verdict[1], alert[1]):
            after_s, state = time.monotonic() - begun, _state(url)
            if verdict[1] == NONE and state["verdict"] != "serving":
                verdict = time.monotonic() - begun, f"{state['verdict']}: {state['reason']}"
            if alert[1] == NONE and (new := (prometheus.alerts() - known) & {*fault.alerts}):
                alert = time.monotonic() - begun, ", ".join(sorted(new))
            if after_s > MOST_S:  # both have come and gone between two looks, or never will
                break
            time.sleep(LOOK_S)
        found = f"{verdict[0]:.2f} s {verdict[1]}; {alert[0]:.2f} s {alert[1]}"
        print(f"{fault.name}: {found}", flush=True)
        if fault.how is signal.SIGSTOP:
            for pid in pids:
                with suppress(ProcessLookupError):  # it was killed and started again
                    os.kill(pid, signal.SIGCONT)
        _until(lambda: _state(url)["verdict"] == "serving", "the deployment to serve again")
        return Found(*verdict, *alert, time.monotonic() - begun)
    finally:
        prometheus.close()


def _serves_for(url: str, seconds: float) -> bool:
    """Whether the deployment serves and makes steps for so long."""
    first, until = _state(url), time.monotonic() + seconds
    latest = first
    while time.monotonic() < until:
        latest = _state(url)
        if latest["verdict"] != "serving":
            return False
        time.sleep(LOOK_S)
    return bool(latest["step"] > first["step"])


def _state(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}/api/v1/state", timeout=30.0) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def _until(ask: Callable[[], Any], what: str) -> Any:
    until = time.monotonic() + DEADLINE_S
    while time.monotonic() < until:
        if found := ask():
            return found
        time.sleep(LOOK_S)
    raise SystemExit(f"waited {DEADLINE_S:g} s for {what}")


def _pid_of(demo: int, title: str) -> int:
    """The process of a demo's session with a title."""
    known = set[str]()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            name, _, rest = (folder / "stat").read_text().partition("(")[2].rpartition(") ")
            if rest[0] not in "ZX" and os.getsid(int(folder.name)) == demo:
                known.add(name)
                if name == title:
                    return int(folder.name)
        except OSError:
            continue  # it has ended meanwhile
    raise SystemExit(f"no process of the demo is {title!r}, found {sorted(known)}")


if __name__ == "__main__":
    main()
